"""The dense part of a decoded token in Triton: norm and projections, attention over a fixed cache, the sparsemixer router.

A decoded token reads every dense weight once and computes almost nothing, so each kernel here is a matrix-vector product at
the speed of the memory, with what stands before and after it (norm, bias, rotation, residual) done on the way. Sums and
everything between two products are float32. Twins in plain torch: :mod:`airllm.experts.step_twins`, which say what each
computes. Like :mod:`airllm.experts.kernels`: for CUDA and ROCm alike, imported only by who uses it, testable in Triton's
interpreter.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from airllm.experts.step_twins import Norm

PROJECT_ROWS, PROJECT_COLUMNS, PROJECT_WARPS = 8, 1024, 8
FEW_OUTPUTS = 256
"""Up to so many outputs (a router's) a program computes one, so that enough programs share the work."""
ATTEND_POSITIONS = 128
SPLIT_POSITIONS, MAX_SPLITS = 128, 32
"""Positions of the cache that one program attends to, more where that would make more than MAX_SPLITS programs a head."""

LAST_COMBINES = torch.version.hip is None
"""Whether the last program of a head puts its parts together. On AMD a second kernel does: on CDNA a program's waves write past
each other, and the one that counts does not vouch for what the others wrote (so in what Triton 3.9 makes for gfx942)."""


@triton.jit
def _products(
    x,
    norm_weight,
    norm_bias,
    mean,
    scale,
    normed,
    weight,
    bias,
    rows,
    inside,
    K: tl.constexpr,
    BATCH: tl.constexpr,
    ROW_OF: tl.constexpr,
    NORM: tl.constexpr,
    BIAS: tl.constexpr,
    KEEP: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """[ROW_OF, ROWS]: the normed rows of ``x`` times ``rows`` of one weight, plus its bias."""
    b = tl.arange(0, ROW_OF)
    c = tl.arange(0, COLUMNS)
    sums = tl.zeros((ROW_OF, ROWS), tl.float32)
    for begin in range(0, K, COLUMNS):
        at = begin + c
        tile = tl.load(
            weight + rows[:, None].to(tl.int64) * K + at[None, :],
            mask=inside[:, None] & (at[None, :] < K),
            other=0.0,
        ).to(tl.float32)
        for row in tl.static_range(BATCH):
            value = tl.load(x + row * K + at, mask=at < K, other=0.0).to(tl.float32)
            if NORM > 0:
                value -= tl.sum(tl.where(b == row, mean, 0.0), axis=0)
                value *= tl.sum(tl.where(b == row, scale, 0.0), axis=0)
                value *= tl.load(norm_weight + at, mask=at < K, other=0.0).to(tl.float32)
                if NORM == 1:
                    value += tl.load(norm_bias + at, mask=at < K, other=0.0).to(tl.float32)
                if KEEP:
                    if tl.program_id(0) == 0:
                        tl.store(normed + row * K + at, value.to(normed.dtype.element_ty), mask=at < K)
            products = tl.sum(tile * value[None, :], axis=1)
            sums = tl.where(b[:, None] == row, sums + products[None, :], sums)
    if BIAS:
        sums += tl.load(bias + rows, mask=inside, other=0.0).to(tl.float32)[None, :]
    return sums


@triton.jit
def _project(
    x,
    norm_weight,
    norm_bias,
    eps,
    w0,
    w1,
    w2,
    b0,
    b1,
    b2,
    residual,
    normed,
    out,
    n0,
    n1,
    total,
    K: tl.constexpr,
    BATCH: tl.constexpr,
    ROW_OF: tl.constexpr,
    NORM: tl.constexpr,
    PARTS: tl.constexpr,
    BIAS: tl.constexpr,
    RESIDUAL: tl.constexpr,
    KEEP: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    first = tl.program_id(0) * ROWS
    local, rows_here = first, n0
    if PARTS > 1:
        if first >= n0 + n1:
            local, rows_here = first - n0 - n1, total - n0 - n1
        elif first >= n0:
            local, rows_here = first - n0, n1
    r = tl.arange(0, ROWS)
    b = tl.arange(0, ROW_OF)
    c = tl.arange(0, COLUMNS)
    inside = (local + r) < rows_here
    mean = tl.zeros((ROW_OF,), tl.float32)
    scale = tl.full((ROW_OF,), 1.0, tl.float32)
    if NORM > 0:
        for row in tl.static_range(BATCH):
            if NORM == 1:
                added = tl.zeros((COLUMNS,), tl.float32)
                for begin in range(0, K, COLUMNS):
                    at = begin + c
                    added += tl.load(x + row * K + at, mask=at < K, other=0.0).to(tl.float32)
                mean = tl.where(b == row, tl.sum(added, axis=0) / K, mean)
            middle = tl.sum(tl.where(b == row, mean, 0.0), axis=0)
            squares = tl.zeros((COLUMNS,), tl.float32)
            for begin in range(0, K, COLUMNS):
                at = begin + c
                away = tl.load(x + row * K + at, mask=at < K, other=0.0).to(tl.float32) - middle
                squares += tl.where(at < K, away * away, 0.0)
            scale = tl.where(b == row, 1.0 / tl.sqrt(tl.sum(squares, axis=0) / K + eps), scale)
    # The weight is no pointer chosen by a branch: Triton's compiler for AMD refuses those up to 3.6 at least.
    if PARTS > 1:
        if first >= n0 + n1:
            sums = _products(
                x, norm_weight, norm_bias, mean, scale, normed, w2, b2, local + r, inside,
                K, BATCH, ROW_OF, NORM, BIAS, KEEP, ROWS, COLUMNS,
            )  # fmt: skip
        elif first >= n0:
            sums = _products(
                x, norm_weight, norm_bias, mean, scale, normed, w1, b1, local + r, inside,
                K, BATCH, ROW_OF, NORM, BIAS, KEEP, ROWS, COLUMNS,
            )  # fmt: skip
        else:
            sums = _products(
                x, norm_weight, norm_bias, mean, scale, normed, w0, b0, local + r, inside,
                K, BATCH, ROW_OF, NORM, BIAS, KEEP, ROWS, COLUMNS,
            )  # fmt: skip
    else:
        sums = _products(
            x, norm_weight, norm_bias, mean, scale, normed, w0, b0, local + r, inside,
            K, BATCH, ROW_OF, NORM, BIAS, KEEP, ROWS, COLUMNS,
        )  # fmt: skip
    to = b[:, None] * total + (first + r)[None, :]
    mask = (b[:, None] < BATCH) & inside[None, :]
    if RESIDUAL:
        sums += tl.load(residual + to, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + to, sums.to(out.dtype.element_ty), mask=mask)


@triton.jit
def _rotated(states, norm, eps, cos, sin, d, D: tl.constexpr, NORM: tl.constexpr):
    """A head's values, normed where there is a norm, turned by the rotary embedding (rotate_half)."""
    HALF: tl.constexpr = D // 2
    other = tl.where(d < HALF, d + HALF, d - HALF)
    value = tl.load(states + d, mask=d < D, other=0.0)
    turned = tl.load(states + other, mask=d < D, other=0.0) * tl.where(d < HALF, -1.0, 1.0)
    if NORM:
        scale = 1.0 / tl.sqrt(tl.sum(value * value, axis=0) / D + eps)
        value *= scale * tl.load(norm + d, mask=d < D, other=0.0).to(tl.float32)
        turned *= scale * tl.load(norm + other, mask=d < D, other=0.0).to(tl.float32)
    return value * tl.load(cos + d, mask=d < D, other=0.0) + turned * tl.load(sin + d, mask=d < D, other=0.0)


@triton.jit
def _put_together(parts, maxima, totals, out, head, splits, D: tl.constexpr, DIMS: tl.constexpr, SPLITS: tl.constexpr):
    """A head's output out of what its programs found."""
    s = tl.arange(0, SPLITS)
    d = tl.arange(0, DIMS)
    tops = tl.load(maxima + head * splits + s, mask=s < splits, other=-float("inf"))
    share = tl.exp(tops - tl.max(tops, axis=0))
    whole = tl.sum(share * tl.load(totals + head * splits + s, mask=s < splits, other=0.0), axis=0)
    where = (head * splits + s)[:, None] * D + d[None, :]
    found = tl.load(parts + where, mask=(s[:, None] < splits) & (d[None, :] < D), other=0.0)
    tl.store(out + head * D + d, tl.sum(found * share[:, None], axis=0) / whole, mask=d < D)


@triton.jit
def _combine(parts, maxima, totals, out, splits, D: tl.constexpr, DIMS: tl.constexpr, SPLITS: tl.constexpr):
    _put_together(parts, maxima, totals, out, tl.program_id(0), splits, D, DIMS, SPLITS)


@triton.jit
def _attend(
    qkv,
    query_norm,
    key_norm,
    eps,
    cos,
    sin,
    keys,
    values,
    slot,
    padding,
    parts,
    maxima,
    totals,
    arrived,
    out,
    window,
    scale,
    capacity,
    split_positions,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    NORM: tl.constexpr,
    D: tl.constexpr,
    DIMS: tl.constexpr,
    POSITIONS: tl.constexpr,
    SPLITS: tl.constexpr,
    COUNT: tl.constexpr,
):
    row = tl.program_id(0) // HEADS
    head = tl.program_id(0) % HEADS
    split = tl.program_id(1)
    GROUP: tl.constexpr = HEADS // KV_HEADS
    kv_head = head // GROUP
    d = tl.arange(0, DIMS)
    now = tl.load(slot).to(tl.int32)
    start = qkv + row * (HEADS + 2 * KV_HEADS) * D
    query = _rotated(start + head * D, query_norm, eps, cos + row * D, sin + row * D, d, D, NORM) * scale
    cached = (row * KV_HEADS + kv_head).to(tl.int64) * capacity * D
    oldest = tl.maximum(now - window + 1, 0)
    at = tl.maximum(split * split_positions, oldest // POSITIONS * POSITIONS)
    end = tl.minimum((split + 1) * split_positions, now)
    most = now.to(tl.float32) * 0.0 - float("inf")
    total = now.to(tl.float32) * 0.0
    mixed = tl.zeros((DIMS,), tl.float32)
    if split == 0:
        key = _rotated(start + (HEADS + kv_head) * D, key_norm, eps, cos + row * D, sin + row * D, d, D, NORM)
        value = tl.load(start + (HEADS + KV_HEADS + kv_head) * D + d, mask=d < D, other=0.0)
        key = key.to(keys.dtype.element_ty)
        value = value.to(values.dtype.element_ty)
        if head % GROUP == 0:
            # Nobody reads this position in this launch: those who need it compute it, as is done here.
            tl.store(keys + cached + now * D + d, key, mask=d < D)
            tl.store(values + cached + now * D + d, value, mask=d < D)
        most = tl.sum(query * key.to(tl.float32), axis=0)
        total += 1.0
        mixed = value.to(tl.float32)
    while at < end:
        n = at + tl.arange(0, POSITIONS)
        seen = (n >= oldest) & (n < end)
        seen = seen & (tl.load(padding + row * capacity + n, mask=seen, other=0) != 0)
        where = cached + n[:, None].to(tl.int64) * D + d[None, :]
        mask = seen[:, None] & (d[None, :] < D)
        score = tl.sum(tl.load(keys + where, mask=mask, other=0.0).to(tl.float32) * query[None, :], axis=1)
        score = tl.where(seen, score, -float("inf"))
        higher = tl.maximum(most, tl.max(score, axis=0))
        safe = tl.where(higher == -float("inf"), 0.0, higher)
        kept = tl.exp(most - safe)
        weight = tl.exp(score - safe)
        total = total * kept + tl.sum(weight, axis=0)
        mixed = mixed * kept + tl.sum(weight[:, None] * tl.load(values + where, mask=mask, other=0.0).to(tl.float32), axis=0)
        most = higher
        at += POSITIONS
    if SPLITS == 1:
        tl.store(out + tl.program_id(0) * D + d, mixed / total, mask=d < D)
    else:
        splits = tl.num_programs(1)
        part = tl.program_id(0) * splits + split
        tl.store(parts + part * D + d, mixed, mask=d < D)
        tl.store(maxima + part, most)
        tl.store(totals + part, total)
        if COUNT:
            # Every thread's numbers are written before the one that counts says so; who comes last finds all parts there.
            tl.debug_barrier()
            before = tl.atomic_add(arrived + tl.program_id(0), 1, sem="acq_rel", scope="gpu")
            tl.debug_barrier()
            if before == splits - 1:
                _put_together(parts, maxima, totals, out, tl.program_id(0), splits, D, DIMS, SPLITS)
                tl.store(arrived + tl.program_id(0), 0)


@triton.jit
def _sparsemixer(logits, ids, weights, threshold, num_experts, EXPERTS: tl.constexpr):
    row = tl.program_id(0)
    e = tl.arange(0, EXPERTS)
    score = tl.load(logits + row * num_experts + e, mask=e < num_experts, other=-float("inf"))
    size = tl.where(e < num_experts, tl.abs(score), 1.0)
    rest = score
    for pick in tl.static_range(2):
        most = tl.max(rest, axis=0)
        chosen = tl.argmax(rest, axis=0)
        far = (most - score) / tl.maximum(size, most) > threshold
        shares = tl.where(far | (e >= num_experts), 0.0, tl.exp(rest - most))
        tl.store(ids + row * 2 + pick, chosen)
        tl.store(weights + row * 2 + pick, 1.0 / tl.sum(shares, axis=0))
        rest = tl.where(e == chosen, -float("inf"), rest)


@triton.jit
def _softmax_top_k(
    logits, ids, weights, num_experts, TOP_K: tl.constexpr, K: tl.constexpr, NORMALISE: tl.constexpr, EXPERTS: tl.constexpr
):
    row = tl.program_id(0)
    e = tl.arange(0, EXPERTS)
    k = tl.arange(0, K)
    score = tl.load(logits + row * num_experts + e, mask=e < num_experts, other=-float("inf"))
    share = tl.exp(score - tl.max(score, axis=0))
    total = tl.sum(share, axis=0)
    rest = tl.where(e < num_experts, share, -1.0)
    picked = tl.zeros((K,), tl.float32)
    chosen = tl.zeros((K,), tl.int32)
    for pick in tl.static_range(TOP_K):
        best = tl.argmax(rest, axis=0)
        picked = tl.where(k == pick, tl.max(rest, axis=0), picked)
        chosen = tl.where(k == pick, best, chosen)
        rest = tl.where(e == best, -1.0, rest)
    if NORMALISE:
        total = tl.sum(picked, axis=0)
    tl.store(ids + row * TOP_K + k, chosen, mask=k < TOP_K)
    tl.store(weights + row * TOP_K + k, picked / total, mask=k < TOP_K)


def project(
    x: torch.Tensor,
    weights: Sequence[torch.Tensor],
    biases: Sequence[torch.Tensor | None],
    out: torch.Tensor,
    *,
    norm: Norm | None = None,
    residual: torch.Tensor | None = None,
    normed: torch.Tensor | None = None,
) -> None:
    """See the twin."""
    batch, inputs = x.shape
    total = out.shape[1]
    counts = [weight.shape[0] for weight in weights]
    rows = PROJECT_ROWS if total > FEW_OUTPUTS else 1
    if len(weights) > 1:
        rows = math.gcd(rows, *counts)  # a program's rows lie in one of them
    kind = 0 if norm is None else (1 if norm.bias is not None else 2)
    w = [*weights, *[weights[0]] * (3 - len(weights))]
    has_bias = biases[0] is not None
    b = [bias if bias is not None else x for bias in (*biases, *[biases[0]] * (3 - len(weights)))]
    _project[(triton.cdiv(total, rows),)](
        x,
        x if norm is None else norm.weight,
        x if norm is None or norm.bias is None else norm.bias,
        0.0 if norm is None else norm.eps,
        *w,
        *b,
        x if residual is None else residual,
        x if normed is None else normed,
        out,
        counts[0],
        counts[1] if len(counts) > 1 else 0,
        total,
        K=inputs,
        BATCH=batch,
        ROW_OF=triton.next_power_of_2(batch),
        NORM=kind,
        PARTS=len(weights),
        BIAS=has_bias,
        RESIDUAL=residual is not None,
        KEEP=normed is not None,
        ROWS=rows,
        COLUMNS=min(PROJECT_COLUMNS if rows > 1 else 4096, triton.next_power_of_2(inputs)),
        num_warps=PROJECT_WARPS,
    )


def splits_for(capacity: int) -> int:
    """How many programs share a head's positions."""
    return min(MAX_SPLITS, triton.cdiv(capacity, SPLIT_POSITIONS))


def attend(
    qkv: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    slot: torch.Tensor,
    padding: torch.Tensor,
    out: torch.Tensor,
    arrived: torch.Tensor,
    *,
    heads: int,
    window: int | None,
    scale: float,
    norms: tuple[Norm, Norm] | None = None,
) -> None:
    """See the twin. The positions of a head are shared out to several programs; the last one to finish puts them together, or a
    second kernel does."""
    batch, kv_heads, capacity, dims = keys.shape
    splits = splits_for(capacity)
    each = triton.cdiv(triton.cdiv(capacity, splits), ATTEND_POSITIONS) * ATTEND_POSITIONS
    parts = torch.empty(batch * heads, splits, dims, dtype=torch.float32, device=qkv.device)
    maxima, totals = torch.empty(2, batch * heads, splits, dtype=torch.float32, device=qkv.device).unbind(0)
    _attend[(batch * heads, splits)](
        qkv,
        qkv if norms is None else norms[0].weight,
        qkv if norms is None else norms[1].weight,
        0.0 if norms is None else norms[0].eps,
        cos,
        sin,
        keys,
        values,
        slot,
        padding.view(torch.uint8),
        parts,
        maxima,
        totals,
        arrived,
        out,
        window or capacity,
        scale,
        capacity,
        each,
        HEADS=heads,
        KV_HEADS=kv_heads,
        NORM=norms is not None,
        D=dims,
        DIMS=triton.next_power_of_2(dims),
        POSITIONS=ATTEND_POSITIONS,
        SPLITS=triton.next_power_of_2(splits),
        COUNT=LAST_COMBINES,
        num_warps=4,
    )
    if splits > 1 and not LAST_COMBINES:
        grid, width = (batch * heads,), triton.next_power_of_2(dims)
        _combine[grid](
            parts, maxima, totals, out, splits, D=dims, DIMS=width, SPLITS=triton.next_power_of_2(splits), num_warps=1
        )


def sparsemixer(logits: torch.Tensor, jitter: float, ids: torch.Tensor, weights: torch.Tensor) -> None:
    """See the twin."""
    batch, experts = logits.shape
    _sparsemixer[(batch,)](
        logits, ids, weights, 2 * jitter, experts, EXPERTS=triton.next_power_of_2(experts), num_warps=1
    )


def softmax_top_k(logits: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, *, normalise: bool) -> None:
    """See the twin. Of equal shares the expert with the lower id comes first."""
    batch, experts = logits.shape
    width = triton.next_power_of_2(experts)
    _softmax_top_k[(batch,)](
        logits,
        ids,
        weights,
        experts,
        TOP_K=ids.shape[1],
        K=triton.next_power_of_2(ids.shape[1]),
        NORMALISE=normalise,
        EXPERTS=width,
        num_warps=1 if width <= 256 else 4,
    )
