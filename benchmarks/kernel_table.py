"""Each kernel of the device engine alone: its time, and the fraction of the memory's or the link's bandwidth that it reaches.

Kernels are timed as they run in a step, recorded in a graph, on weights that no cache still holds (as many sets of weights
in turn as make up several times the device's cache).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

from benchmarks import floors
from benchmarks.geometry import Geometry
from benchmarks.machine import synchronize

CACHE_BYTES = 256 * 2**20
"""More than the caches of today's devices."""


def seconds_a_call(work: Callable[[int], None], calls: int, device: torch.device) -> float:
    """Seconds of one of ``calls`` calls, recorded one behind the other; on the CPU just called."""
    work(0)
    synchronize(device)
    if device.type != "cuda":
        start = time.perf_counter()
        work(0)
        return time.perf_counter() - start
    stream, graph = torch.cuda.Stream(device), torch.cuda.CUDAGraph()
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        work(0)
        graph.capture_begin(capture_error_mode="thread_local")
        for number in range(calls):
            work(number)
        graph.capture_end()
    graph.replay()
    synchronize(device)
    start = time.perf_counter()
    for _ in range(3):
        graph.replay()
    synchronize(device)
    return (time.perf_counter() - start) / 3 / calls


def matmul_flops(device: torch.device, dtype: torch.dtype, width: int) -> float:
    """Operations a second of a large product: what a long prompt's arithmetic is held against."""
    size = max(width, 4096) if device.type == "cuda" else 256
    left, right = (torch.ones(size, size, dtype=dtype, device=device) for _ in range(2))
    left @ right
    synchronize(device)
    start = time.perf_counter()
    for _ in range(5):
        left @ right
    synchronize(device)
    return 5 * 2 * size**3 / (time.perf_counter() - start)


def measure(geometry: Geometry, device: torch.device, dtype: torch.dtype, rates: dict[str, float]) -> dict[str, Any]:
    """A row a kernel: ``seconds``, ``bytes`` that it must read, ``fraction`` of the rate ``of`` what it reads from."""
    table: dict[str, Any] = {}
    for name, nbytes, of, work, calls in _kernels(geometry, device, dtype):
        seconds = seconds_a_call(work, calls, device)
        rate = floors.link_rate(rates) if of == "link" else floors.device_rate(rates)
        table[name] = {"seconds": seconds, "bytes": nbytes, "of": of}
        if nbytes and device.type == "cuda":
            table[name]["fraction"] = nbytes / rate / seconds
    return table


Row = tuple[str, int, str, Callable[[int], None], int]


def _kernels(geometry: Geometry, device: torch.device, dtype: torch.dtype) -> list[Row]:
    return [*_dense(geometry, device, dtype), *_experts(geometry, device, dtype)]


def _dense(g: Geometry, device: torch.device, dtype: torch.dtype) -> list[Row]:
    from airllm.experts import step_twins
    from airllm.experts.device_ops import ops_for
    from airllm.experts.step_twins import Norm

    ops = ops_for(device, "step_kernels", step_twins)

    def numbers(*shape: int, of: torch.dtype = dtype) -> torch.Tensor:
        return torch.randn(*shape, device=device).to(of) * 0.02

    norm, x = Norm(numbers(g.hidden), numbers(g.hidden), 1e-5), numbers(1, g.hidden, of=torch.float32)

    def projection(name: str, outputs: tuple[int, ...], inputs: int, normed: bool) -> Row:
        nbytes = sum(outputs) * inputs * dtype.itemsize
        sets = max(1, min(32, CACHE_BYTES // nbytes)) if device.type == "cuda" else 1
        weights = [[numbers(n, inputs) for n in outputs] for _ in range(sets)]
        biases, out = [numbers(n) for n in outputs], numbers(1, sum(outputs), of=torch.float32)
        row = numbers(1, inputs, of=torch.float32)

        def work(number: int) -> None:
            ops.project(row, weights[number % sets], biases, out, norm=norm if normed else None, residual=out)

        return name, nbytes, "memory", work, 32

    kv = g.kv_heads * g.head_dim
    rows = [
        projection("norm, query, key and value", (g.heads * g.head_dim, kv, kv), g.hidden, True),
        projection("output and residual", (g.hidden,), g.heads * g.head_dim, False),
        projection("norm and router", (g.experts,), g.hidden, True),
        projection("norm and head", (g.vocabulary,), g.hidden, True),
    ]
    for capacity in (256, 4096):
        keys, values = (numbers(1, g.kv_heads, capacity, g.head_dim) for _ in range(2))
        qkv = numbers(1, (g.heads + 2 * g.kv_heads) * g.head_dim, of=torch.float32)
        angle = torch.ones(1, g.head_dim, device=device)
        slot, out = torch.tensor([capacity - 1], device=device), numbers(1, g.heads * g.head_dim, of=torch.float32)
        padding = torch.ones(1, capacity, dtype=torch.bool, device=device)
        arrived = torch.zeros(g.heads, dtype=torch.int32, device=device)

        def attend(_: int, given: Any = (qkv, angle, angle, keys, values, slot, padding, out, arrived)) -> None:
            ops.attend(*given, heads=g.heads, window=None, scale=0.1)

        rows.append((f"attention over {capacity} positions", 2 * keys.nbytes, "memory", attend, 32))
    ids, weights = torch.empty(1, 2, dtype=torch.int32, device=device), x.new_empty(1, 2)
    logits = numbers(1, g.experts, of=torch.float32)
    rows.append(("sparsemixer", 0, "memory", lambda _: ops.sparsemixer(logits, 0.01, ids, weights), 32))
    return rows


def _experts(g: Geometry, device: torch.device, dtype: torch.dtype) -> list[Row]:
    from airllm.experts import kernel_twins
    from airllm.experts.device_ops import ops_for
    from airllm.experts.device_tables import AgedTables
    from airllm.experts.host_memory import HostBlock

    ops, cuda = ops_for(device, "kernels", kernel_twins), device.type == "cuda"
    nbytes = g.expert_values * dtype.itemsize
    slots = (64 if cuda else 4) // g.top_k * g.top_k
    pool = torch.zeros(slots, nbytes, dtype=torch.uint8, device=device)
    typed = pool.view(dtype)
    gate_up = typed[:, : 2 * g.hidden * g.expert_width].unflatten(1, (2 * g.expert_width, g.hidden))
    down = typed[:, 2 * g.hidden * g.expert_width :].unflatten(1, (g.hidden, g.expert_width))
    x = torch.zeros(1, g.hidden, dtype=dtype, device=device)
    inner, out = x.new_zeros(1, g.top_k, g.expert_width), torch.zeros(1, g.hidden, device=device)
    ids, weights = torch.arange(g.top_k, device=device)[None], torch.ones(1, g.top_k, device=device)
    places = torch.arange(slots, dtype=torch.int32, device=device).view(-1, g.top_k)
    block = HostBlock(4 * nbytes)
    block.pin()
    bank = block.tensor.view(4, nbytes)
    tables = AgedTables(g.layers, g.experts, slots, 2, 8 * g.top_k, device)
    tables.miss_count.fill_(2)
    tables.miss_key[:2], tables.miss_slot[:2] = torch.arange(2), torch.arange(2)
    routes = AgedTables(g.layers, g.experts, 73, 2, 8 * g.top_k, device)
    n = len(places)

    def copy(_: int, keep: Any = block) -> None:  # the bank's pages are pinned as long as the block lives
        ops.copy_misses(tables, bank, pool, 2)

    def up(i: int) -> None:
        ops.gate_up(x, places[i % n], gate_up, inner)

    def fetch(_: int) -> None:
        ops.gate_up(x, places[0], gate_up, inner, misses=kernel_twins.Misses(pool, bank, tables))

    def back(i: int) -> None:
        ops.down(inner, places[i % n], ids, weights, down, out, out)

    def route(i: int) -> None:
        ops.route(routes, ids, i % g.layers * g.experts, g.experts)

    return [
        ("gate and up of 2 experts", 2 * 2 * nbytes // 3, "memory", up, 32),
        ("down of 2 experts", 2 * nbytes // 3, "memory", back, 32),
        ("copy of 2 experts", 2 * nbytes, "link", copy, 4),
        ("copy of 2 experts, with gate and up", 2 * nbytes, "link", fetch, 4),
        ("route, 73 slots", 0, "memory", route, 32),
    ]
