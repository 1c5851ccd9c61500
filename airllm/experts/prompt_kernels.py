"""A prompt's experts in Triton, several a launch: a prompt is bound by the link, and on the host by the number of launches.

Like :mod:`airllm.experts.kernels`: for CUDA and ROCm alike, imported only by who uses it, testable in Triton's interpreter.
Twins in plain torch: :mod:`airllm.experts.prompt_twins`, which say what each computes.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from airllm.experts.prompt_twins import CHUNK, Rows

NAME = f"triton {triton.__version__}"
ROWS, COLUMNS, DEPTH = 64, 64, 64
COMBINE_COLUMNS = 1024
_CHANGING = [f"{name}{n}" for n in range(CHUNK) for name in ("place", "start", "end")]


@triton.jit
def _pick(which, a, b, c, d):
    return tl.where(which == 0, a, tl.where(which == 1, b, tl.where(which == 2, c, d)))


@triton.jit(do_not_specialize=_CHANGING)
def _gate_up(
    hidden,
    token,
    weights,
    inner,
    stride,
    place0,
    start0,
    end0,
    place1,
    start1,
    end1,
    place2,
    start2,
    end2,
    place3,
    start3,
    end3,
    HIDDEN: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    which = tl.program_id(2)
    end = _pick(which, end0, end1, end2, end3)
    first = _pick(which, start0, start1, start2, start3) + tl.program_id(1) * ROWS
    if first < end:
        rows = first + tl.arange(0, ROWS)
        columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
        depth = tl.arange(0, DEPTH)
        at = tl.load(token + rows, mask=rows < end, other=0).to(tl.int64)
        x = hidden + at[:, None] * HIDDEN + depth[None, :]
        gate_at = weights + _pick(which, place0, place1, place2, place3).to(tl.int64) * stride
        gate_at += columns[None, :].to(tl.int64) * HIDDEN + depth[:, None]
        gate = tl.zeros((ROWS, COLUMNS), tl.float32)
        up = tl.zeros((ROWS, COLUMNS), tl.float32)
        for begin in range(0, HIDDEN, DEPTH):
            there = begin + depth < HIDDEN
            inside = there[:, None] & (columns[None, :] < WIDTH)
            values = tl.load(x + begin, mask=(rows < end)[:, None] & there[None, :], other=0.0)
            gate = tl.dot(values, tl.load(gate_at + begin, mask=inside, other=0.0), gate, input_precision="ieee")
            up_at = gate_at + WIDTH * HIDDEN + begin
            up = tl.dot(values, tl.load(up_at, mask=inside, other=0.0), up, input_precision="ieee")
        result = gate / (1.0 + tl.exp(-gate)) * up
        to = inner + rows[:, None].to(tl.int64) * WIDTH + columns[None, :]
        tl.store(to, result.to(inner.dtype.element_ty), mask=(rows < end)[:, None] & (columns[None, :] < WIDTH))


@triton.jit(do_not_specialize=_CHANGING)
def _down(
    inner,
    routing,
    weights,
    outputs,
    stride,
    place0,
    start0,
    end0,
    place1,
    start1,
    end1,
    place2,
    start2,
    end2,
    place3,
    start3,
    end3,
    HIDDEN: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    which = tl.program_id(2)
    end = _pick(which, end0, end1, end2, end3)
    first = _pick(which, start0, start1, start2, start3) + tl.program_id(1) * ROWS
    if first < end:
        rows = first + tl.arange(0, ROWS)
        columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
        depth = tl.arange(0, DEPTH)
        x = inner + rows[:, None].to(tl.int64) * WIDTH + depth[None, :]
        down_at = weights + _pick(which, place0, place1, place2, place3).to(tl.int64) * stride
        down_at += columns[None, :].to(tl.int64) * WIDTH + depth[:, None]
        total = tl.zeros((ROWS, COLUMNS), tl.float32)
        for begin in range(0, WIDTH, DEPTH):
            there = begin + depth < WIDTH
            values = tl.load(x + begin, mask=(rows < end)[:, None] & there[None, :], other=0.0)
            weight = tl.load(down_at + begin, mask=there[:, None] & (columns[None, :] < HIDDEN), other=0.0)
            total = tl.dot(values, weight, total, input_precision="ieee")
        total *= tl.load(routing + rows, mask=rows < end, other=0.0).to(tl.float32)[:, None]
        to = outputs + rows[:, None].to(tl.int64) * HIDDEN + columns[None, :]
        tl.store(to, total.to(outputs.dtype.element_ty), mask=(rows < end)[:, None] & (columns[None, :] < HIDDEN))


@triton.jit(do_not_specialize=["tokens", "top_k"])
def _combine(outputs, row, total, tokens, top_k, HIDDEN: tl.constexpr, COLUMNS: tl.constexpr):
    token = tl.program_id(0)
    at = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    added = tl.zeros((COLUMNS,), tl.float32)
    number = 0
    while number < top_k:
        source = tl.load(row + number * tokens + token).to(tl.int64) * HIDDEN
        added += tl.load(outputs + source + at, mask=at < HIDDEN, other=0.0).to(tl.float32)
        number += 1
    tl.store(total + token.to(tl.int64) * HIDDEN + at, added.to(total.dtype.element_ty), mask=at < HIDDEN)


def _flat(chunk: Sequence[Rows]) -> list[int]:
    """The chunk as arguments; experts that are not there have no rows."""
    return [number for rows in chunk for number in rows] + [0] * (3 * (CHUNK - len(chunk)))


def _row_blocks(chunk: Sequence[Rows]) -> int:
    return max(_cdiv(rows.end - rows.start, ROWS) for rows in chunk)


def _cdiv(a: int, b: int) -> int:
    """triton.cdiv takes 6 us a call on the host, and a launch would need five of them."""
    return -(-a // b)


def gate_up(
    hidden: torch.Tensor, token: torch.Tensor, chunk: Sequence[Rows], weights: torch.Tensor, inner: torch.Tensor
) -> None:
    """See the twin."""
    width = inner.shape[1]
    _gate_up[(_cdiv(width, COLUMNS), _row_blocks(chunk), len(chunk))](
        hidden,
        token,
        weights,
        inner,
        weights.stride(0),
        *_flat(chunk),
        HIDDEN=hidden.shape[1],
        WIDTH=width,
        ROWS=ROWS,
        COLUMNS=COLUMNS,
        DEPTH=DEPTH,
        num_warps=4,
        num_stages=3,
    )


def down(
    inner: torch.Tensor, routing: torch.Tensor, chunk: Sequence[Rows], weights: torch.Tensor, outputs: torch.Tensor
) -> None:
    """See the twin."""
    hidden_width = outputs.shape[1]
    _down[(_cdiv(hidden_width, COLUMNS), _row_blocks(chunk), len(chunk))](
        inner,
        routing,
        weights,
        outputs,
        weights.stride(0),
        *_flat(chunk),
        HIDDEN=hidden_width,
        WIDTH=inner.shape[1],
        ROWS=ROWS,
        COLUMNS=COLUMNS,
        DEPTH=DEPTH,
        num_warps=4,
        num_stages=3,
    )


def combine(outputs: torch.Tensor, row: torch.Tensor, total: torch.Tensor) -> None:
    """See the twin."""
    top_k, tokens = row.shape
    width = total.shape[1]
    columns = min(COMBINE_COLUMNS, triton.next_power_of_2(width))
    _combine[(tokens, _cdiv(width, columns))](
        outputs, row, total, tokens, top_k, HIDDEN=width, COLUMNS=columns, num_warps=4
    )
