"""The device engine's four kernels in Triton, for CUDA and ROCm alike: no intrinsics of one vendor, no tables of pointers.

Imported only by who uses it: Triton is not there on every system. Every kernel has a twin in plain torch under the same
name in :mod:`airllm.experts.kernel_twins`, which says what it computes; with TRITON_INTERPRET=1 these run on the CPU.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

from airllm.experts.device_tables import AgedTables, Decisions, DeviceTables
from airllm.experts.gates import PLAIN, Gate
from airllm.experts.kernel_twins import Misses
from airllm.experts.route_aged import among, part_of, route_aged, warps_for

NAME = f"triton {triton.__version__}"

COPY_BLOCKS = 32
"""Programs that copy one expert: from about 32 on the link is full (measured on PCIe 5)."""
COPY_WORDS = 4096
GATE_UP_ROWS, GATE_UP_COLUMNS = 1, 2048
DOWN_ROWS, DOWN_COLUMNS = 4, 512
NARROW, NARROW_COLUMNS = 512, 64
"""Experts up to so wide are read in short pieces by `down`. All of these: the fastest of those tried on an H200 (LOG.md)."""
MIDDLING = 768
"""Up to so wide (Qwen3's, of which a token uses many) one warp a row: 10.0 us where tiles of 4 rows and warps take 14.4."""
DOWN_WIDE, DOWN_NARROW, DOWN_MIDDLING = (DOWN_ROWS, DOWN_COLUMNS, 4), (DOWN_ROWS, NARROW_COLUMNS, 4), (1, 128, 1)
"""(rows, columns, warps)"""
GATE_UP_ACROSS, DOWN_ACROSS = (32, 64), (16, 128, 4)
"""The same where weights lie transposed: neighbours in memory are neighbours in the output, so tiles are tall. Not measured."""

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
    PART: tl.constexpr,
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
    local = key_in - first_key
    used = among(wanted, ids, num_ids, num_experts, e, IDS, PART)
    is_hit = among(wanted, ids, num_ids, num_experts, local, IDS, PART)
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
def _activate(x, slope: tl.constexpr, KIND: tl.constexpr):
    if KIND == "silu":
        x = x / (1.0 + tl.exp(-x * slope))
    elif KIND == "gelu":
        x = 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    elif KIND == "gelu_tanh":  # 1 + tanh(z) = 2 * sigmoid(2 z)
        x = x / (1.0 + tl.exp(-1.5957691216057308 * (x + 0.044715 * x * x * x)))
    elif KIND == "relu":
        x = tl.maximum(x, 0.0)
    else:
        x = tl.maximum(x, 0.0) * tl.maximum(x, 0.0)
    return x


@triton.jit
def _missed(place, miss_key, miss_slot, miss_count, most: tl.constexpr, MOST: tl.constexpr):
    """The key of the expert that the miss list (``most`` entries long at most) sends to ``place``; -1 when it lies there."""
    m = tl.arange(0, MOST)
    slot = tl.load(miss_slot + m, mask=m < most, other=-1)
    key = tl.load(miss_key + m, mask=m < most, other=-1)
    return tl.max(tl.where((m < tl.load(miss_count)) & (slot == place), key, -1), axis=0)


@triton.jit
def _gate_and_up(
    row,
    weights,
    biases,
    keep,
    rows,
    hidden_width: tl.constexpr,
    width: tl.constexpr,
    ROW: tl.constexpr,
    COLUMN: tl.constexpr,
    BIAS: tl.constexpr,
    GATED: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    KEEP: tl.constexpr,
):
    """The products of a ``row`` with ``rows`` of one expert's gate and up; with KEEP the weights go to ``keep`` as well."""
    first = rows * 2 if INTERLEAVED else rows
    to_up: tl.constexpr = 1 if INTERLEAVED else width
    start = first[:, None].to(tl.int64) * ROW
    gate = tl.zeros((ROWS, COLUMNS), tl.float32)
    up = tl.zeros((ROWS, COLUMNS), tl.float32)
    for begin in range(0, hidden_width, COLUMNS):
        at = begin + tl.arange(0, COLUMNS)
        x = tl.load(row + at, mask=at < hidden_width, other=0.0).to(tl.float32)[None, :]
        inside = (rows[:, None] < width) & (at[None, :] < hidden_width)
        there = start + at[None, :] * COLUMN
        gates = tl.load(weights + there, mask=inside, other=0.0)
        if GATED:
            ups = tl.load(weights + there + to_up * ROW, mask=inside, other=0.0)
            up += ups.to(tl.float32) * x
            if KEEP:
                tl.store(keep + there + to_up * ROW, ups, mask=inside)
        gate += gates.to(tl.float32) * x
        if KEEP:
            tl.store(keep + there, gates, mask=inside)
    g = tl.sum(gate, axis=1)
    u = tl.sum(up, axis=1)
    if BIAS:
        g += tl.load(biases + first, mask=rows < width, other=0.0).to(tl.float32)
        if GATED:
            u += tl.load(biases + first + to_up, mask=rows < width, other=0.0).to(tl.float32)
    return g, u


@triton.jit
def _gate_up(
    hidden,
    places,
    pool,
    bias,
    out,
    bank,
    bank_bias,
    bank_words,
    pool_words,
    miss_key,
    miss_slot,
    miss_count,
    stride,
    hidden_width: tl.constexpr,
    width: tl.constexpr,
    top_k: tl.constexpr,
    ROW: tl.constexpr,  # numbers from one row of the weights to the next, and from one column to the next
    COLUMN: tl.constexpr,
    BIAS: tl.constexpr,
    KIND: tl.constexpr,
    GATED: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    LIMITED: tl.constexpr,
    slope: tl.constexpr,
    offset: tl.constexpr,
    limit: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    FETCH: tl.constexpr,  # missed experts are read from the bank, and left in their places
    MOST: tl.constexpr,
    COPIERS: tl.constexpr,  # programs that copy what is not read here: all words but LEFT_OUT behind the first BEFORE
    WORDS: tl.constexpr,
    BEFORE: tl.constexpr,
    LEFT_OUT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    part = tl.program_id(0)
    pair = tl.program_id(1)
    place = tl.load(places + pair)
    key = place * 0 - 1
    if FETCH:
        key = _missed(place, miss_key, miss_slot, miss_count, top_k, MOST)
        if (part < COPIERS) & (key >= 0):
            source = bank_words + key.to(tl.int64) * WORDS
            target = pool_words + place.to(tl.int64) * WORDS
            for begin in range(0, WORDS - LEFT_OUT, COPIERS * BLOCK):
                word = begin + part * BLOCK + tl.arange(0, BLOCK)
                mask = word < WORDS - LEFT_OUT
                word = tl.where(word < BEFORE, word, word + LEFT_OUT)
                tl.store(target + word, tl.load(source + word, mask=mask), mask=mask)
        part -= COPIERS
    if (place >= 0) & (part >= 0):
        rows = part * ROWS + tl.arange(0, ROWS)
        row = hidden + (pair // top_k) * hidden_width
        here = place.to(tl.int64) * stride
        if key >= 0:
            there = key.to(tl.int64) * stride
            g, u = _gate_and_up(
                row, bank + there, bank_bias + there, pool + here, rows,
                hidden_width, width, ROW, COLUMN, BIAS, GATED, INTERLEAVED, ROWS, COLUMNS, FETCH,
            )  # fmt: skip
        else:
            g, u = _gate_and_up(
                row, pool + here, bias + here, pool, rows,
                hidden_width, width, ROW, COLUMN, BIAS, GATED, INTERLEAVED, ROWS, COLUMNS, False,
            )  # fmt: skip
        if LIMITED:
            g = tl.minimum(g, limit)
            u = tl.minimum(tl.maximum(u, -limit), limit)
        if offset != 0:
            u += offset
        inner = _activate(g, slope, KIND)
        if GATED:
            inner *= u
        tl.store(out + pair * width + rows, inner.to(out.dtype.element_ty), mask=rows < width)


@triton.jit
def _down(
    inner,
    places,
    ids,
    routing,
    pool,
    bias,
    residual,
    out,
    stride,
    hidden_width: tl.constexpr,
    width: tl.constexpr,
    top_k: tl.constexpr,
    K: tl.constexpr,
    ROW: tl.constexpr,
    COLUMN: tl.constexpr,
    BIAS: tl.constexpr,
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
            weight_at = pool + place.to(tl.int64) * stride + rows[:, None].to(tl.int64) * ROW
            products = tl.zeros((ROWS, COLUMNS), tl.float32)
            for begin in range(0, width, COLUMNS):
                at = begin + tl.arange(0, COLUMNS)
                x = tl.load(inner + pair * width + at, mask=at < width, other=0.0).to(tl.float32)[None, :]
                inside = (rows[:, None] < hidden_width) & (at[None, :] < width)
                products += tl.load(weight_at + at[None, :] * COLUMN, mask=inside, other=0.0).to(tl.float32) * x
            product = tl.sum(products, axis=1)
            if BIAS:
                bias_at = bias + place.to(tl.int64) * stride + rows
                product += tl.load(bias_at, mask=rows < hidden_width, other=0.0).to(tl.float32)
            total += product * tl.load(routing + pair).to(tl.float32)
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
    numbers, experts = triton.next_power_of_2(ids.numel()), triton.next_power_of_2(num_experts)
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
        IDS=numbers,
        PART=part_of(numbers, max(experts, slots)),
        EXPERTS=experts,
        SLOTS=slots,
        num_warps=warps_for(max(experts, slots)),
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


def gate_up(
    hidden: torch.Tensor,
    places: torch.Tensor,
    weights: torch.Tensor,
    out: torch.Tensor,
    gate: Gate = PLAIN,
    bias: torch.Tensor | None = None,
    misses: Misses | None = None,
) -> None:
    """See the twin. Bound by the bytes of the weights: every program reads its own rows once.

    With ``misses`` the rows of a missed expert come over the link straight into the product; its other bytes are copied by
    programs of the same launch.
    """
    tokens, top_k, width = out.shape
    hidden_width = hidden.shape[1]
    rows, columns = GATE_UP_ROWS, GATE_UP_COLUMNS
    if weights.stride(2) != 1:
        rows, columns = GATE_UP_ACROSS
    more = [weights, weights, weights, weights, places, places, places]
    words = before = left_out = copiers = 0
    if misses is not None:
        pool, bank, tables = misses
        typed = bank.view(weights.dtype).view(-1)
        starts = [typed[(part.data_ptr() - pool.data_ptr()) // part.itemsize :] for part in (weights, bias) if part is not None]
        more = [starts[0], starts[-1], bank.view(torch.int32), pool.view(torch.int32)]
        more += [tables.miss_key, tables.miss_slot, tables.miss_count]
        start = weights.data_ptr() - pool.data_ptr()
        end = start + weights.shape[1] * weights.shape[2] * weights.itemsize
        words, before, copiers = pool.shape[1] // 4, -(-start // 4), COPY_BLOCKS
        left_out = max(0, end // 4 - before)
    _gate_up[(triton.cdiv(width, rows) + copiers, tokens * top_k)](
        hidden,
        places,
        weights,
        weights if bias is None else bias,
        out,
        *more,
        weights.stride(0),
        hidden_width=hidden_width,
        width=width,
        top_k=top_k,
        ROW=weights.stride(1),
        COLUMN=weights.stride(2),
        BIAS=bias is not None,
        KIND=gate.activation,
        GATED=gate.gated,
        INTERLEAVED=gate.interleaved,
        LIMITED=math.isfinite(gate.limit),
        slope=gate.slope,
        offset=gate.offset,
        limit=gate.limit if math.isfinite(gate.limit) else 0.0,
        ROWS=rows,
        COLUMNS=min(columns, triton.next_power_of_2(hidden_width)),
        FETCH=misses is not None,
        MOST=triton.next_power_of_2(top_k),
        COPIERS=copiers,
        WORDS=words,
        BEFORE=before,
        LEFT_OUT=left_out,
        BLOCK=COPY_WORDS,
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
    bias: torch.Tensor | None = None,
) -> None:
    """See the twin."""
    tokens, top_k, width = inner.shape
    hidden_width = out.shape[1]
    rows, columns, warps = down_tile(width, across=weights.stride(2) != 1)
    _down[(triton.cdiv(hidden_width, rows), tokens)](
        inner,
        places,
        ids,
        routing,
        weights,
        weights if bias is None else bias,
        out if residual is None else residual,
        out,
        weights.stride(0),
        hidden_width=hidden_width,
        width=width,
        top_k=top_k,
        ROW=weights.stride(1),
        COLUMN=weights.stride(2),
        BIAS=bias is not None,
        RESIDUAL=residual is not None,
        K=triton.next_power_of_2(top_k),
        ROWS=rows,
        COLUMNS=columns,
        num_warps=warps,
    )


def down_tile(width: int, across: bool) -> tuple[int, int, int]:
    """Rows and columns of the weights that a program of `down` reads at once, and its warps."""
    if across:
        return DOWN_ACROSS
    if width <= NARROW:
        return DOWN_NARROW
    return DOWN_MIDDLING if width <= MIDDLING else DOWN_WIDE
