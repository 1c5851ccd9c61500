"""A prompt's experts several at a time, for the device engine, which rounds on its own.

transformers' order of operations wants two products an expert, each of as many rows as the expert has, and the host takes
longer to launch those than the link to bring the experts. Here one launch computes several experts, reads the rows where they
lie and weights them on the way; one more adds up each token's rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType

import torch

from airllm.experts import prompt_twins
from airllm.experts.compute import Routing
from airllm.experts.prompt_twins import Rows

OUTPUT_BYTES = 128 * 2**20
"""Bytes that the weighted outputs of all routed rows may take; a longer prompt is computed expert by expert."""


class GroupedSum:
    """The sum over a prompt's experts, [T, H], with sums in float32; stands where `airllm.experts.compute.ExpertSum` stands.

    Args:
        routing: of this forward, in which every id is an expert's.
        hidden, weights: [T, H] and [T, K].
        gate_up, down: the pool as [places, 2I, H] and [places, H, I].
        ops: the kernels, or their twins.
    """

    at_once = prompt_twins.CHUNK

    def __init__(
        self,
        routing: Routing,
        hidden: torch.Tensor,
        weights: torch.Tensor,
        gate_up: torch.Tensor,
        down: torch.Tensor,
        ops: ModuleType,
    ) -> None:
        self._routing, self._hidden, self._ops = routing, hidden.contiguous(), ops
        self._gate_up, self._down = gate_up, down
        self._weights, rows = routing.by_row(weights), routing.order.numel()
        self._inner = torch.empty(rows, down.shape[2], dtype=down.dtype, device=hidden.device)
        self._outputs = torch.empty(rows, hidden.shape[1], dtype=hidden.dtype, device=hidden.device)

    def add(self, experts: Sequence[int], places: Sequence[int]) -> None:
        """Up to ``at_once`` experts, which lie in ``places``."""
        rows = [Rows(place, *self._routing.rows(expert)) for expert, place in zip(experts, places, strict=True)]
        self._ops.gate_up(self._hidden, self._routing.token, rows, self._gate_up, self._inner)
        self._ops.down(self._inner, self._weights, rows, self._down, self._outputs)

    def result(self) -> torch.Tensor:
        """[T, H] in the dtype of the hidden states."""
        total = torch.empty_like(self._hidden)
        self._ops.combine(self._outputs, self._routing.row_of(), total)
        return total


def can_group(routing: Routing, hidden: torch.Tensor) -> bool:
    """Whether a prompt's rows may be computed so: every id is an expert's, and they do not take too much memory."""
    rows = routing.order.numel()
    return routing.complete and rows * hidden.shape[1] * hidden.element_size() <= OUTPUT_BYTES
