"""Compile every Triton kernel for a GPU that is not there: `python compile_kernels.py cuda:90`.

The kernels are launched as the library launches them, on tensors that lie on the CPU; a driver that only names its target lets
Triton compile each launch, and nothing runs. What Triton's compiler refuses for a target is seen without such a GPU.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from airllm.experts import kernels, prompt_kernels, route_aged, step_kernels  # noqa: E402
from airllm.experts.device_tables import AgedTables, DeviceTables  # noqa: E402
from airllm.experts.gates import Gate  # noqa: E402
from airllm.experts.grouped import Rows  # noqa: E402
from airllm.experts.kernel_twins import Misses  # noqa: E402
from airllm.experts.step_twins import Norm  # noqa: E402

CPU = torch.device("cpu")
LAYERS, EXPERTS, SLOTS = 32, 16, 73
LARGE_BYTES = 2**31 + 2**20
"""Behind so many bytes offsets need more than 32 bits, for which other code is made; never touched, so never taken."""


class NoDevice:
    """What Triton asks of a driver before it launches."""

    def __init__(self, target: GPUTarget) -> None:
        self.target = target

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int | None = None) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return CPU


def compile_only(target: GPUTarget) -> Counter[str]:
    """From now on every launch only compiles for ``target``; gives the count of launches by kernel, which goes on."""
    driver.set_active(NoDevice(target))
    compiled: Counter[str] = Counter()
    run = JITFunction.run

    def warm_up(self: Any, *args: Any, **keywords: Any) -> Any:
        made = run(self, *args, **{**keywords, "warmup": True})
        assert any(kind in made.asm for kind in ("cubin", "hsaco")), list(made.asm)
        compiled[f"{self.fn.__module__.rpartition('.')[2]}.{self.fn.__name__}"] += 1
        return made

    JITFunction.run = warm_up
    return compiled


def numbers(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(*shape, dtype=dtype)


def tables(top_k: int) -> AgedTables:
    return AgedTables(LAYERS, EXPERTS, SLOTS, 2, 8 * top_k, CPU)


def routes() -> None:
    for rows, top_k, experts, slots in ((1, 2, 16, 73), (8, 8, 128, 1228)):
        ids = torch.zeros(rows, top_k, dtype=torch.int32)
        kernels.route(AgedTables(4, experts, slots, 2, 8 * top_k, CPU), ids, experts, experts)
        kernels.route(DeviceTables(4 * experts, slots, 8 * top_k, CPU), ids, experts, experts)


def experts(dtype: torch.dtype, gate: Gate, biased: bool, transposed: bool, bank_bytes: int = 0) -> None:
    hidden_width, width, top_k = 256, 96, 2
    into = gate.parts * width
    sizes = [into * hidden_width, into, hidden_width * width, hidden_width]
    expert_bytes = -(-sum(sizes) * dtype.itemsize // 16) * 16
    pool = torch.empty(SLOTS, expert_bytes, dtype=torch.uint8)
    bank = torch.empty(max(3, bank_bytes // expert_bytes), expert_bytes, dtype=torch.uint8)
    up, up_bias, down, down_bias = pool.view(dtype)[:, : sum(sizes)].split(sizes, dim=1)
    shapes = [(into, hidden_width), (hidden_width, width)]
    flat = zip((up, down), shapes, strict=True)
    up, down = (
        part.unflatten(1, shape[::-1]).transpose(1, 2) if transposed else part.unflatten(1, shape) for part, shape in flat
    )
    decided = tables(top_k)
    for rows, misses in ((3, None),) if transposed else ((1, Misses(pool, bank, decided)), (3, None)):
        x, inner = numbers(rows, hidden_width, dtype=dtype), numbers(rows, top_k, width, dtype=dtype)
        ids, shares, out = torch.zeros(rows, top_k, dtype=torch.int32), numbers(rows, top_k), numbers(rows, hidden_width)
        kernels.gate_up(x, decided.places, up, inner, gate, up_bias if biased else None, misses)
        kernels.down(inner, decided.places, ids, shares, down, out, out, down_bias if biased else None)
    kernels.copy_misses(decided, bank, pool, top_k)


def prompts(dtype: torch.dtype) -> None:
    hidden_width, width, rows = 256, 96, 64
    pool = numbers(SLOTS, 3 * hidden_width * width, dtype=dtype)
    up = pool[:, : 2 * hidden_width * width].unflatten(1, (2 * width, hidden_width))
    down = pool[:, 2 * hidden_width * width :].unflatten(1, (hidden_width, width))
    chunk = [Rows(1, 0, 40), Rows(2, 40, 64)]
    inner, outputs = numbers(rows, width, dtype=dtype), numbers(rows, hidden_width, dtype=dtype)
    prompt_kernels.gate_up(numbers(32, hidden_width, dtype=dtype), torch.zeros(rows, dtype=torch.int64), chunk, up, inner)
    prompt_kernels.down(inner, numbers(rows), chunk, down, outputs)
    prompt_kernels.combine(outputs, torch.zeros(2, 32, dtype=torch.int64), numbers(32, hidden_width, dtype=dtype))


def dense(dtype: torch.dtype, rows: int, capacities: Sequence[int]) -> None:
    hidden, heads, kv_heads, dims = 256, 8, 2, 64
    weight = numbers(hidden, dtype=dtype)
    layer_norm, rms_norm = Norm(weight, weight, 1e-5), Norm(weight, None, 1e-6)
    head_norm = Norm(numbers(dims, dtype=dtype), None, 1e-6)
    for norm in (layer_norm, rms_norm):
        x = numbers(rows, hidden)
        counts = [heads * dims, kv_heads * dims, kv_heads * dims]
        biases = [numbers(n, dtype=dtype) if norm is layer_norm else None for n in counts]
        qkv = numbers(rows, sum(counts))
        step_kernels.project(x, [numbers(n, hidden, dtype=dtype) for n in counts], biases, qkv, norm=norm)
        step_kernels.project(numbers(rows, heads * dims), [numbers(hidden, heads * dims, dtype=dtype)], [None], x, residual=x)
        logits, normed = numbers(rows, 16), numbers(rows, hidden, dtype=dtype)
        step_kernels.project(x, [numbers(16, hidden, dtype=dtype)], [None], logits, norm=norm, normed=normed)
        for capacity in capacities:
            keys, values = (numbers(rows, kv_heads, capacity, dims, dtype=dtype) for _ in range(2))
            slot, padding = torch.zeros(1, dtype=torch.int64), torch.ones(rows, capacity, dtype=torch.bool)
            angle, arrived = numbers(rows, dims), torch.zeros(rows * heads, dtype=torch.int32)
            norms = (head_norm, head_norm) if norm is rms_norm else None
            given = (qkv, angle, angle, keys, values, slot, padding, numbers(rows, heads * dims), arrived)
            for step_kernels.LAST_COMBINES in (True, False):
                step_kernels.attend(*given, heads=heads, window=None, scale=0.1, norms=norms)
    for count, top_k in ((16, 2), (128, 8)) if capacities else ():
        ids, shares = torch.zeros(2, top_k, dtype=torch.int32), numbers(2, top_k)
        step_kernels.softmax_top_k(numbers(2, count), ids, shares, normalise=True)
        if top_k == 2:
            step_kernels.sparsemixer(numbers(2, count), 0.01, ids, shares)


def launch_all() -> None:
    plain, clamped = Gate(), Gate("silu", True, True, 1.702, 1.0, 7.0)
    routes()
    for dtype in (torch.float16, torch.float32):
        experts(dtype, plain, biased=False, transposed=False)
        prompts(dtype)
    prompts(torch.bfloat16)
    dense(torch.float16, 1, (128, 4096))
    dense(torch.bfloat16, 2, (256,))
    experts(torch.bfloat16, clamped, biased=True, transposed=True)
    experts(torch.bfloat16, clamped, biased=True, transposed=False)
    experts(torch.float16, Gate("gelu", gated=False), biased=True, transposed=False)
    experts(torch.float16, plain, biased=True, transposed=False, bank_bytes=LARGE_BYTES)


def launched() -> set[str]:
    """The kernels of the library that somebody launches: those whose names no other kernel's code speaks of."""
    own = {}
    for module in (kernels, prompt_kernels, route_aged, step_kernels):
        for name, found in vars(module).items():
            if isinstance(found, JITFunction) and found.fn.__module__ == module.__name__:
                own[f"{module.__name__.rpartition('.')[2]}.{name}"] = found
    called = {name for f in own.values() for name in f.fn.__code__.co_names}
    return {name for name in own if name.partition(".")[2] not in called}


if __name__ == "__main__":
    backend, _, arch = sys.argv[1].partition(":")
    wave = 32 if backend == "cuda" or arch.startswith("gfx1") else 64
    count = compile_only(GPUTarget(backend, int(arch) if backend == "cuda" else arch, wave))
    launch_all()
    print(json.dumps({"triton": triton.__version__, "compiled": count, "missing": sorted(launched() - set(count))}))
