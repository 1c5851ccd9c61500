"""The MLP out of a slot, in exactly the order of operations of transformers' eager experts.

What must not change, because half precision shows it: one product for gate and up together, the routing weight applied
after the down projection and in its own dtype, experts added in ascending order, the rows of an expert neither padded nor
batched with another's. (The order is that of ``PhimoeExperts.forward`` and its fifty siblings in transformers 5.)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch.nn.functional import linear

from airllm.experts.layout import ALIGNMENT_BYTES

GATHER_BYTES = 32 * 2**20
"""Rows of hidden states that may be gathered at once for all experts of a layer. Above, one expert's work outweighs its
launches, and the memory is worth more."""

ApplyGate = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class ExpertMath:
    """What the experts of one layer compute; the defaults are the plain contract.

    Attributes:
        apply_gate: what lies between the two products: the module's own gate, or its activation where there is no gate.
        transposed: weights lie as [in, out].
        bias: views hold a bias behind each weight.
        norm: what the module does to an expert's output before it is weighted.
        sum_in: dtype of the sum over experts: that of the hidden states, of the routing weights, or float32.
        upcast: every operand is made float32 first.
    """

    apply_gate: ApplyGate
    transposed: bool = False
    bias: bool = False
    norm: Callable[[torch.Tensor], torch.Tensor] | None = None
    sum_in: str = "hidden"
    upcast: bool = False

    def start(self, hidden: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Zeros [T, H] for the sum over experts."""
        dtype = {"hidden": hidden.dtype, "weights": weights.dtype, "float32": torch.float32}[self.sum_in]
        return torch.zeros_like(hidden, dtype=dtype)

    def weighted(self, rows: torch.Tensor, views: Sequence[torch.Tensor], weights: torch.Tensor) -> torch.Tensor:
        """``weights`` [n, 1] times the expert's output for ``rows`` [n, H]; ``views`` in layout order."""
        return self.times(self.output(rows, views), weights)

    def times(self, outputs: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Outputs [n, H] times routing weights [n, 1]."""
        return outputs * (weights.float() if self.upcast else weights)

    def output(self, rows: torch.Tensor, views: Sequence[torch.Tensor]) -> torch.Tensor:
        """The expert's output [n, H] for ``rows`` [n, H]."""
        if self.upcast:
            rows, views = rows.float(), [view.float() for view in views]
        if self.bias:
            up, up_bias, down, down_bias = views
            result = self._product(self.apply_gate(self._product(rows, up) + up_bias), down) + down_bias
        else:
            up, down = views
            result = self._product(self.apply_gate(self._product(rows, up)), down)
        return result if self.norm is None else self.norm(result)

    def _product(self, rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return rows @ weight if self.transposed else linear(rows, weight)


class Routing:
    """One forward's routing, grouped by expert on the device; the host learns only what it must decide on, in one read-back.

    Args:
        index: [T, K] expert ids; an id of E marks "no expert" and is skipped, as transformers does.
        last_rows: rows (of T) of the last tokens of each sequence; their experts are worth a slot after a prompt.
            None means that every row's experts are.
    """

    def __init__(self, index: torch.Tensor, num_experts: int, last_rows: torch.Tensor | None) -> None:
        tokens, self._top_k = index.shape
        flat = index.t().reshape(-1)  # position-major, the order in which torch.where(mask) lists pairs
        ranked, order = torch.sort(flat, stable=True)
        edges = torch.searchsorted(ranked, torch.arange(num_experts + 1, device=index.device, dtype=ranked.dtype))
        self.token, self._position = order % tokens, order // tokens
        parts = [edges] if last_rows is None else [edges, index[last_rows].reshape(-1)]
        values = torch.cat(parts).tolist()  # the one read-back of the layer
        self.order = order
        self._edges = values[: num_experts + 1]
        self.experts = [e for e in range(num_experts) if self._edges[e + 1] > self._edges[e]]
        self.last_experts = set(self.experts if last_rows is None else values[num_experts + 1 :])

    def add_identity(self, out: torch.Tensor, expert: int, hidden: torch.Tensor, weights: torch.Tensor) -> None:
        """``out`` [T, H] += weight * hidden for the tokens routed to ``expert``."""
        self._add(out, expert, weights, lambda rows, weight: rows * weight, hidden)

    def add_expert(
        self,
        out: torch.Tensor,
        expert: int,
        hidden: torch.Tensor,
        weights: torch.Tensor,
        views: Sequence[torch.Tensor],
        math: ExpertMath,
    ) -> None:
        """``out`` [T, H] += weight * expert(hidden) for the tokens routed to ``expert``; ``weights`` [T, K]."""
        self._add(out, expert, weights, lambda rows, weight: math.weighted(rows, views, weight), hidden)

    def _add(
        self,
        out: torch.Tensor,
        expert: int,
        weights: torch.Tensor,
        weighted: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
        hidden: torch.Tensor,
    ) -> None:
        span = self._span(expert)
        token, position = self.token[span], self._position[span]
        result = weighted(hidden[token], weights[token, position, None])
        out.index_add_(0, token, result.to(out.dtype))

    def rows(self, expert: int) -> tuple[int, int]:
        """The first of the sorted rows that are routed to ``expert``, and the one behind the last."""
        return self._edges[expert], self._edges[expert + 1]

    def _span(self, expert: int) -> slice:
        return slice(*self.rows(expert))

    def by_row(self, weights: torch.Tensor) -> torch.Tensor:
        """Routing weights [T, K] of the sorted rows, [T * K]."""
        return weights.t().reshape(-1)[self.order]

    def row_of(self) -> torch.Tensor:
        """[K, T]: which of the sorted rows each token's position became."""
        row = torch.empty_like(self.order)
        row[self.order] = torch.arange(self.order.numel(), device=self.order.device)
        return row.view(self._top_k, -1)

    @property
    def complete(self) -> bool:
        """Whether no id means "no expert"."""
        return self._edges[-1] == self.order.numel()

    def sum_of(
        self,
        hidden: torch.Tensor,
        weights: torch.Tensor,
        math: ExpertMath,
        views: Sequence[Sequence[torch.Tensor]],
        identities: int = 0,
    ) -> ExpertSum:
        """What adds up this forward's experts: with rows gathered once where that takes little memory.

        ``views``: of each place. ``identities``: so many ids behind the experts' stand for no weights.
        """
        row_bytes = hidden.shape[1] * hidden.element_size()
        little = row_bytes % ALIGNMENT_BYTES == 0 and row_bytes * self.order.numel() <= GATHER_BYTES
        kind = GatheredSum if self.complete and not identities and little else ExpertSum
        return kind(self, hidden, weights, math, views)


class ExpertSum:
    """The sum over experts, [T, H], taken expert by expert in ascending order."""

    at_once = 1
    """Experts that `add` computes together."""

    def __init__(
        self,
        routing: Routing,
        hidden: torch.Tensor,
        weights: torch.Tensor,
        math: ExpertMath,
        views: Sequence[Sequence[torch.Tensor]],
    ) -> None:
        self._routing, self._hidden, self._weights, self._math, self._views = routing, hidden, weights, math, views
        self._total = math.start(hidden, weights)
        self._prepare()

    def _prepare(self) -> None:
        """What is done once for all experts."""

    def add(self, experts: Sequence[int], places: Sequence[int]) -> None:
        """The expert that lies in the place; call with ascending experts."""
        for expert, place in zip(experts, places, strict=True):
            self._add(expert, self._views[place])

    def _add(self, expert: int, views: Sequence[torch.Tensor]) -> None:
        self._routing.add_expert(self._total, expert, self._hidden, self._weights, views, self._math)

    def add_identity(self, expert: int) -> None:
        """An id that stands for no weights; see `Routing.add_identity`."""
        self._routing.add_identity(self._total, expert, self._hidden, self._weights)

    def result(self) -> torch.Tensor:
        """[T, H] in the dtype of the hidden states."""
        return self._total.to(self._hidden.dtype)


class GatheredSum(ExpertSum):
    """The same sum with the same bits, in fewer launches: rows are gathered once for all experts, and weighted and added up
    once at the end, each token's experts in ascending order."""

    def _prepare(self) -> None:
        self._rows = self._hidden[self._routing.token]
        self._by_row = self._routing.by_row(self._weights)[:, None]
        self._outputs: dict[int, torch.Tensor] = {}

    def _add(self, expert: int, views: Sequence[torch.Tensor]) -> None:
        self._outputs[expert] = self._math.output(self._rows[self._routing._span(expert)], views)

    def result(self) -> torch.Tensor:
        """[T, H] in the dtype of the hidden states."""
        outputs = torch.cat([self._outputs[expert] for expert in sorted(self._outputs)])
        total = self._total
        addends = self._math.times(outputs, self._by_row).to(total.dtype)
        # By token, in ascending order of its experts, which is the order of the rows.
        for rows in self._routing.row_of().sort(dim=0).values.unbind(0):
            total.add_(addends[rows])
        return super().result()
