"""The gated MLP out of a slot, in exactly the order of operations of transformers' eager experts.

What must not change, because half precision shows it: one product for gate and up together, the routing weight applied
after the down projection and in its own dtype, experts added in ascending order, the rows of an expert neither padded nor
batched with another's. (The order is that of ``PhimoeExperts.forward`` and its fifty siblings in transformers 5.)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch.nn.functional import linear

ApplyGate = Callable[[torch.Tensor], torch.Tensor]


def gated_mlp(rows: torch.Tensor, views: Sequence[torch.Tensor], apply_gate: ApplyGate) -> torch.Tensor:
    """``rows`` [n, H] through one expert: ``views`` are gate_up_proj [2I, H] and down_proj [H, I]; gives [n, H]."""
    gate_up, down = views
    return linear(apply_gate(linear(rows, gate_up)), down)


class Routing:
    """One forward's routing, grouped by expert on the device; the host learns only what it must decide on, in one read-back.

    Args:
        index: [T, K] expert ids; an id of E marks "no expert" and is skipped, as transformers does.
        last_rows: rows (of T) of the last tokens of each sequence; their experts are worth a slot after a prompt.
            None means that every row's experts are.
    """

    def __init__(self, index: torch.Tensor, num_experts: int, last_rows: torch.Tensor | None) -> None:
        tokens = index.shape[0]
        flat = index.t().reshape(-1)  # position-major, the order in which torch.where(mask) lists pairs
        ranked, order = torch.sort(flat, stable=True)
        edges = torch.searchsorted(ranked, torch.arange(num_experts + 1, device=index.device, dtype=ranked.dtype))
        self._token, self._position = order % tokens, order // tokens
        parts = [edges] if last_rows is None else [edges, index[last_rows].reshape(-1)]
        values = torch.cat(parts).tolist()  # the one read-back of the layer
        self._edges = values[: num_experts + 1]
        self.experts = [e for e in range(num_experts) if self._edges[e + 1] > self._edges[e]]
        self.last_experts = set(self.experts if last_rows is None else values[num_experts + 1 :])

    def add_expert(
        self,
        out: torch.Tensor,
        expert: int,
        hidden: torch.Tensor,
        weights: torch.Tensor,
        views: Sequence[torch.Tensor],
        apply_gate: ApplyGate,
    ) -> None:
        """``out`` [T, H] += weight * expert(hidden) for the tokens routed to ``expert``; ``weights`` [T, K]."""
        span = slice(self._edges[expert], self._edges[expert + 1])
        token, position = self._token[span], self._position[span]
        result = gated_mlp(hidden[token], views, apply_gate)
        result = result * weights[token, position, None]
        out.index_add_(0, token, result.to(out.dtype))
