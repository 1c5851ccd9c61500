"""The device engine's four kernels in Triton, for CUDA and ROCm alike: no intrinsics of one vendor, no tables of pointers.

Imported only by who uses it: Triton is not there on every system. Every kernel has a twin in plain torch under the same
name in :mod:`airllm.experts.kernel_twins`, which says what it computes; with TRITON_INTERPRET=1 these run on the CPU.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from airllm.experts.device_tables import AgedTables, Decisions, DeviceTables
from airllm.experts.route_aged import route_aged

NAME = f"triton {triton.__version__}"

COPY_BLOCKS = 32
"""Programs that copy one expert: from about 32 on the link is full (measured on PCIe 5)."""
COPY_WORDS = 4096
GATE_UP_ROWS, GATE_UP_COLUMNS = 1, 2048
DOWN_ROWS, DOWN_COLUMNS = 4, 512
NARROW, NARROW_COLUMNS = 512, 64
"""Experts up to so wide are read in short pieces by `down`. All of these: the fastest of those tried on an H200 (LOG.md)."""

_LATEST = tl.constexpr(2147483647)


@triton.jit(do_not_specialize=["first_key"])
def _route(
    ids,
    slot_of,
    owner,
    last_use,
    clock,
    counts,
    places,
    miss_key,
    miss_slot,
    miss_count,
    first_key,
    num_ids,
    num_experts,
    num_slots,
    IDS: tl.constexpr,
    EXPERTS: tl.constexpr,
    SLOTS: tl.constexpr,
):
    j = tl.arange(0, IDS)
    e = tl.arange(0, EXPERTS)
    s = tl.arange(0, SLOTS)
    wanted = tl.load(ids + j, mask=j < num_ids, other=-1).to(tl.int32)
    wanted = tl.where((wanted >= 0) & (wanted < num_experts), wanted, -1)
    held = tl.load(slot_of + first_key + e, mask=e < num_experts, other=-1)
    place = tl.load(slot_of + first_key + wanted, mask=wanted >= 0, other=-1)
    key_in = tl.load(owner + s, mask=s < num_slots, other=-1)
    last = tl.load(last_use + s, mask=s < num_slots, other=_LATEST)
    now = tl.load(clock)
    # Warps that lag behind must have read the tables before the first one writes.
    tl.debug_barrier()
    used = tl.sum((wanted[None, :] == e[:, None]).to(tl.int32), axis=1) > 0
    local = key_in - first_key
    is_hit = tl.sum(((wanted[None, :] == local[:, None]) & (wanted[None, :] >= 0)).to(tl.int32), axis=1) > 0
    last = tl.where(is_hit, now + local, last)
    missing = (used & (held < 0)).to(tl.int32)
    misses = tl.sum(missing, axis=0)
    evictions = 0
    number = 0
    while number < misses:  # not range(): Triton's interpreter cannot take its bound from a tensor
        expert = tl.min(tl.where(missing > 0, e, EXPERTS), axis=0)
        missing = tl.where(e == expert, 0, missing)
        slot = tl.argmin(last, axis=0)
        old = tl.max(tl.where(s == slot, key_in, -1), axis=0)
        tl.store(slot_of + old, -1, mask=old >= 0)
        tl.store(slot_of + first_key + expert, slot)
        tl.store(miss_key + number, first_key + expert)
        tl.store(miss_slot + number, slot)
        key_in = tl.where(s == slot, first_key + expert, key_in)
        last = tl.where(s == slot, now + num_experts + expert, last)
        place = tl.where(wanted == expert, slot, place)
        evictions += tl.where(old >= 0, 1, 0)
        number += 1
    tl.store(owner + s, key_in, mask=s < num_slots)
    tl.store(last_use + s, last, mask=s < num_slots)
    tl.store(places + j, place, mask=j < num_ids)
    tl.store(miss_count, misses)
    tl.store(clock, now + 2 * num_experts)
    tl.store(counts, tl.load(counts) + tl.sum(used.to(tl.int32), axis=0) - misses)
    tl.store(counts + 1, tl.load(counts + 1) + misses)
    tl.store(counts + 2, tl.load(counts + 2) + evictions)


@triton.jit
def _copy_misses(
    bank,
    pool,
    miss_key,
    miss_slot,
    miss_count,
    WORDS: tl.constexpr,
    BLOCKS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    number = tl.program_id(1)
    if number < tl.load(miss_count):
        source = bank + tl.load(miss_key + number).to(tl.int64) * WORDS
        target = pool + tl.load(miss_slot + number).to(tl.int64) * WORDS
        for first in range(0, WORDS, BLOCKS * BLOCK):
            at = first + tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
            tl.store(target + at, tl.load(source + at, mask=at < WORDS), mask=at < WORDS)


@triton.jit
def _gate_up(
    hidden,
    places,
    pool,
    out,
    stride,
    hidden_width: tl.constexpr,
    width: tl.constexpr,
    top_k: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    pair = tl.program_id(1)
    place = tl.load(places + pair)
    if place >= 0:
        rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
        row = hidden + (pair // top_k) * hidden_width
        gate_at = pool + place.to(tl.int64) * stride + rows[:, None].to(tl.int64) * hidden_width
        up_at = gate_at + width * hidden_width
        gate = tl.zeros((ROWS, COLUMNS), tl.float32)
        up = tl.zeros((ROWS, COLUMNS), tl.float32)
        for first in range(0, hidden_width, COLUMNS):
            at = first + tl.arange(0, COLUMNS)
            x = tl.load(row + at, mask=at < hidden_width, other=0.0).to(tl.float32)[None, :]
            inside = (rows[:, None] < width) & (at[None, :] < hidden_width)
            gate += tl.load(gate_at + at[None, :], mask=inside, other=0.0).to(tl.float32) * x
            up += tl.load(up_at + at[None, :], mask=inside, other=0.0).to(tl.float32) * x
        g = tl.sum(gate, axis=1)
        inner = g / (1.0 + tl.exp(-g)) * tl.sum(up, axis=1)
        tl.store(out + pair * width + rows, inner.to(out.dtype.element_ty), mask=rows < width)


@triton.jit
def _down(
    inner,
    places,
    ids,
    routing,
    pool,
    residual,
    out,
    stride,
    hidden_width: tl.constexpr,
    width: tl.constexpr,
    top_k: tl.constexpr,
    K: tl.constexpr,
    RESIDUAL: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    token = tl.program_id(1)
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    k = tl.arange(0, K)
    expert = tl.load(ids + token * top_k + k, mask=k < top_k, other=0).to(tl.int32)
    order = tl.where(k < top_k, expert * K + k, _LATEST)
    total = tl.zeros((ROWS,), tl.float32)
    for _ in range(top_k):
        first = tl.min(order, axis=0)  # ascending expert id, as transformers' eager experts add
        order = tl.where(order == first, _LATEST, order)
        pair = token * top_k + first % K
        place = tl.load(places + pair)
        if place >= 0:
            weight_at = pool + place.to(tl.int64) * stride + rows[:, None].to(tl.int64) * width
            products = tl.zeros((ROWS, COLUMNS), tl.float32)
            for begin in range(0, width, COLUMNS):
                at = begin + tl.arange(0, COLUMNS)
                x = tl.load(inner + pair * width + at, mask=at < width, other=0.0).to(tl.float32)[None, :]
                inside = (rows[:, None] < hidden_width) & (at[None, :] < width)
                products += tl.load(weight_at + at[None, :], mask=inside, other=0.0).to(tl.float32) * x
            total += tl.sum(products, axis=1) * tl.load(routing + pair).to(tl.float32)
    at = token * hidden_width + rows
    if RESIDUAL:
        total += tl.load(residual + at, mask=rows < hidden_width, other=0.0).to(tl.float32)
    tl.store(out + at, total.to(out.dtype.element_ty), mask=rows < hidden_width)


def route(tables: Decisions, ids: torch.Tensor, first_key: int, num_experts: int) -> None:
    """See the twin. One program: a token's decision is a few dozen integers."""
    if isinstance(tables, AgedTables):
        route_aged(tables, ids, first_key, num_experts)
    elif isinstance(tables, DeviceTables):
        _launch_lru(tables, ids, first_key, num_experts)


def _launch_lru(tables: DeviceTables, ids: torch.Tensor, first_key: int, num_experts: int) -> None:
    slots = triton.next_power_of_2(tables.slots)
    _route[(1,)](
        ids,
        tables.slot_of,
        tables.owner,
        tables.last_use,
        tables.clock,
        tables.counts,
        tables.places,
        tables.miss_key,
        tables.miss_slot,
        tables.miss_count,
        first_key,
        ids.numel(),
        num_experts,
        tables.slots,
        IDS=triton.next_power_of_2(ids.numel()),
        EXPERTS=triton.next_power_of_2(num_experts),
        SLOTS=slots,
        num_warps=1 if slots <= 256 else 4,
    )


def copy_misses(tables: Decisions, bank: torch.Tensor, pool: torch.Tensor, most: int) -> None:
    """See the twin. ``bank`` is pinned host memory, read by the kernel itself; its address is an argument of the launch."""
    words = pool.shape[1] // 4
    _copy_misses[(COPY_BLOCKS, most)](
        bank.view(torch.int32),
        pool.view(torch.int32),
        tables.miss_key,
        tables.miss_slot,
        tables.miss_count,
        WORDS=words,
        BLOCKS=COPY_BLOCKS,
        BLOCK=COPY_WORDS,
        num_warps=4,
    )


def gate_up(hidden: torch.Tensor, places: torch.Tensor, weights: torch.Tensor, out: torch.Tensor) -> None:
    """See the twin. Bound by the bytes of the weights: every program reads its own rows once."""
    tokens, top_k, width = out.shape
    _gate_up[(triton.cdiv(width, GATE_UP_ROWS), tokens * top_k)](
        hidden,
        places,
        weights,
        out,
        weights.stride(0),
        hidden_width=hidden.shape[1],
        width=width,
        top_k=top_k,
        ROWS=GATE_UP_ROWS,
        COLUMNS=min(GATE_UP_COLUMNS, triton.next_power_of_2(hidden.shape[1])),
        num_warps=4,
    )


def down(
    inner: torch.Tensor,
    places: torch.Tensor,
    ids: torch.Tensor,
    routing: torch.Tensor,
    weights: torch.Tensor,
    out: torch.Tensor,
    residual: torch.Tensor | None = None,
) -> None:
    """See the twin."""
    tokens, top_k, width = inner.shape
    hidden_width = out.shape[1]
    _down[(triton.cdiv(hidden_width, DOWN_ROWS), tokens)](
        inner,
        places,
        ids,
        routing,
        weights,
        out if residual is None else residual,
        out,
        weights.stride(0),
        hidden_width=hidden_width,
        width=width,
        top_k=top_k,
        RESIDUAL=residual is not None,
        K=triton.next_power_of_2(top_k),
        ROWS=DOWN_ROWS,
        COLUMNS=DOWN_COLUMNS if width > NARROW else NARROW_COLUMNS,
        num_warps=4,
    )
