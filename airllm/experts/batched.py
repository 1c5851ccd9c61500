"""Experts that are handed every token once for each expert, already weighted, with zeros where it is not routed (Llama 4).

The block around them sums over experts itself. An expert with zeros only gives zeros and is not computed; the others get all
rows, as in transformers, since a product of fewer rows may round differently. The runtime that serves every family does it:
one row, one expert, weight one.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

from airllm import transformers_private as private
from airllm.errors import UnsupportedModelError
from airllm.experts.compute import ApplyGate, ExpertMath
from airllm.experts.modules import SlotExperts

_EXPERTS, _TOKENS, _WIDTH, _INNER = 3, 5, 24, 16


class BatchedSlotExperts(SlotExperts):
    """``forward(copies [E * T, H])`` gives [E * T, H]; see the module's docstring."""

    def forward(self, copies: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        by_expert = copies.view(self.num_experts, -1, copies.shape[-1])  # [E, T, H]
        used = (by_expert != 0).flatten(1).any(dim=1).nonzero()  # [experts, 1]
        rows = by_expert[used[:, 0]]
        index = used.expand(-1, rows.shape[1]).reshape(-1, 1)
        weights = torch.ones(index.shape, dtype=copies.dtype, device=copies.device)
        out = torch.zeros_like(by_expert)
        out[used[:, 0]] = super().forward(rows.flatten(0, 1), index, weights).view_as(rows)
        return out.view_as(copies)


def batched_math(module: nn.Module) -> ExpertMath:
    """What such experts compute, tried on a small copy: equal but for rounding, for a product of many rows at once may round
    differently from one of a few.

    Raises:
        UnsupportedModelError: they compute something else than ``down(act(gate) * up)``.
    """
    kind: Any = module
    small: Any = copy.copy(module)
    random = torch.Generator().manual_seed(0)
    shapes = {"gate_up_proj": (_EXPERTS, _WIDTH, 2 * _INNER), "down_proj": (_EXPERTS, _INNER, _WIDTH)}
    small._parameters = {name: nn.Parameter(torch.randn(shape, generator=random)) for name, shape in shapes.items()}
    small.num_experts, small.hidden_size = _EXPERTS, _WIDTH
    copies = torch.randn(_EXPERTS * _TOKENS, _WIDTH, generator=random)
    math = ExpertMath(_gate(kind.act_fn), transposed=True)
    with torch.no_grad():
        theirs = private.own_experts_forward(module)(small, copies)
        ours = torch.cat([_one(small, expert, copies, math) for expert in range(_EXPERTS)])
    if not torch.allclose(ours, theirs, rtol=1e-4, atol=1e-4):
        raise UnsupportedModelError(f"{type(module).__name__} computes something else than down(act(gate) * up)")
    return math


def _one(small: Any, expert: int, copies: torch.Tensor, math: ExpertMath) -> torch.Tensor:
    views = (small.gate_up_proj[expert], small.down_proj[expert])
    return math.weighted(copies[expert * _TOKENS : (expert + 1) * _TOKENS], views, torch.ones(1))


def _gate(activation: nn.Module) -> ApplyGate:
    def apply(gate_up: torch.Tensor) -> torch.Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return up * activation(gate)

    return apply
