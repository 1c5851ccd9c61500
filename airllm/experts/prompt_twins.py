"""What the kernels of :mod:`airllm.experts.prompt_kernels` compute, in plain torch: their oracle, and what runs on the CPU.

A prompt's rows are sorted by expert: row r belongs to ``token[r]``, and each expert has the rows from its start to its end.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch.nn.functional import silu

NAME = "plain torch"
CHUNK = 4
"""Experts that one launch takes at most."""


class Rows(NamedTuple):
    """One expert's part of a launch: where its weights lie, and its rows."""

    place: int
    start: int
    end: int


def gate_up(
    hidden: torch.Tensor, token: torch.Tensor, chunk: Sequence[Rows], weights: torch.Tensor, inner: torch.Tensor
) -> None:
    """``inner`` [R, I] = silu(gate) * up of ``hidden`` [T, H] for the rows of ``chunk``; ``token`` [R].

    ``weights`` [places, 2I, H]: a view of the pool, gate rows first. Sums in float32.
    """
    width = inner.shape[1]
    for place, start, end in chunk:
        both = hidden[token[start:end]].float() @ weights[place].float().t()
        inner[start:end] = silu(both[:, :width]) * both[:, width:]


def down(
    inner: torch.Tensor, routing: torch.Tensor, chunk: Sequence[Rows], weights: torch.Tensor, outputs: torch.Tensor
) -> None:
    """``outputs`` [R, H] = ``routing`` [R] * down projection of ``inner`` [R, I] for the rows of ``chunk``.

    ``weights`` [places, H, I]: a view of the pool. Sums in float32.
    """
    for place, start, end in chunk:
        outputs[start:end] = (inner[start:end].float() @ weights[place].float().t()) * routing[start:end, None].float()


def combine(outputs: torch.Tensor, row: torch.Tensor, total: torch.Tensor) -> None:
    """``total`` [T, H] = the sum of ``outputs`` [R, H] over each token's rows ``row`` [K, T], in float32."""
    total.copy_(outputs[row].float().sum(dim=0))
