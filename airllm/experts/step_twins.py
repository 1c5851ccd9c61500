"""What the kernels of :mod:`airllm.experts.step_kernels` compute, in plain torch: their oracle, and what runs on the CPU."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch


class Norm(NamedTuple):
    """A norm over the last dimension: LayerNorm, or RMSNorm where ``bias`` is None. ``weight``, ``bias``: [H]."""

    weight: torch.Tensor
    bias: torch.Tensor | None
    eps: float

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """``x`` [B, H] float32, normed in float32."""
        if self.bias is not None:
            x = x - x.mean(-1, keepdim=True)
        scaled = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps) * self.weight.float()
        return scaled if self.bias is None else scaled + self.bias.float()


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
    """``out`` [B, N] = ``residual`` + ``norm`` (``x`` [B, K]) through up to three linear layers side by side.

    ``weights`` [n, K] and ``biases`` [n] (all or none), whose n add up to N. ``normed`` [B, K] takes the norm's output.
    """
    value = x.float() if norm is None else norm(x.float())
    if normed is not None:
        normed.copy_(value)
    columns = [
        value @ weight.float().t() + (0 if bias is None else bias.float())
        for weight, bias in zip(weights, biases, strict=True)
    ]
    result = torch.cat(columns, dim=-1)
    out.copy_(result if residual is None else result + residual.float())


def _rotated(states: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """``states`` [B, heads, D] turned by the rotary embedding (rotate_half); ``cos`` and ``sin`` [B, D]."""
    first, second = states.chunk(2, dim=-1)
    return states * cos[:, None] + torch.cat((-second, first), dim=-1) * sin[:, None]


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
    """One token's attention: ``out`` [B, heads * D] float32.

    ``qkv`` [B, (heads + 2 kv_heads) * D] float32, not yet rotated; ``cos``, ``sin`` [B, D] float32. ``norms``: RMSNorms over D
    of queries and keys, before they are rotated. The new key and value
    are written to position ``slot`` [1] of ``keys`` and ``values`` [B, kv_heads, capacity, D]. The token sees itself and those
    of the ``window`` - 1 positions before it that ``padding`` (bool [B, capacity]) shows. ``arrived`` [B * heads] int32 holds
    zeros, before and after: the kernel's programs count in it.
    """
    batch, kv_heads, capacity, dims = keys.shape
    query, key, value = qkv.view(batch, -1, dims).split([heads, kv_heads, kv_heads], dim=1)
    if norms is not None:
        query, key = norms[0](query), norms[1](key)
    now = int(slot)
    keys[:, :, now] = _rotated(key, cos, sin).to(keys.dtype)
    values[:, :, now] = value.to(values.dtype)
    first = max(0, now + 1 - (window or capacity))
    seen = padding[:, None, first : now + 1].clone()
    seen[..., -1] = True
    group = heads // kv_heads
    known, told = (t[:, :, first : now + 1].float().repeat_interleave(group, dim=1) for t in (keys, values))
    scores = torch.einsum("bhd,bhnd->bhn", _rotated(query, cos, sin) * scale, known).masked_fill(~seen, -torch.inf)
    out.copy_(torch.einsum("bhn,bhnd->bhd", scores.softmax(-1), told).reshape(batch, -1))


def sparsemixer(logits: torch.Tensor, jitter: float, ids: torch.Tensor, weights: torch.Tensor) -> None:
    """PhiMoE's router in evaluation (SparseMixer-v2, Liu et al. 2024): ``ids`` and ``weights`` [B, 2] of ``logits`` [B, E].

    Each of two picks takes the largest score that is left; its weight is its share among those left that lie within
    2 * ``jitter`` of it, relative to the larger of it and their own size.
    """
    rest = logits.float()
    for pick in range(2):
        most, chosen = rest.max(-1, keepdim=True)
        far = (most - logits) / logits.abs().clamp(min=most) > 2 * jitter
        shares = torch.where(far, 0.0, (rest - most).exp())
        ids[:, pick : pick + 1] = chosen.to(ids.dtype)
        weights[:, pick : pick + 1] = (1 / shares.sum(-1, keepdim=True)).to(weights.dtype)
        rest = rest.scatter(-1, chosen, -torch.inf)


def softmax_top_k(logits: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, *, normalise: bool) -> None:
    """The usual router: ``ids`` and ``weights`` [B, K] of the K largest shares of the softmax of ``logits`` [B, E], largest
    first, which ``normalise`` makes add up to one."""
    shares, chosen = logits.float().softmax(-1).topk(ids.shape[1], dim=-1)
    ids.copy_(chosen)
    weights.copy_(shares / shares.sum(-1, keepdim=True) if normalise else shares)
