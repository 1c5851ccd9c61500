"""The device engine: experts of a decoded token served without a word to the host, so that a whole step can be captured.

Between :meth:`DeviceEngine.enter` and :meth:`DeviceEngine.leave` the tables on the device are the truth about the slots;
outside of that the policy on the host is. ``SlotExpertRuntime`` calls ``leave`` before anything it does itself, so the two
never speak at once.
"""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import ModuleType

import torch

from airllm.experts import kernel_twins, prompt_twins
from airllm.experts.bank import HostBank
from airllm.experts.compute import Routing
from airllm.experts.device_ops import ops_for
from airllm.experts.device_tables import Counts, tables_for
from airllm.experts.gates import PLAIN, Gate
from airllm.experts.grouped import GroupedSum, can_group
from airllm.experts.kernel_twins import Misses
from airllm.experts.layout import Projection
from airllm.experts.policy import SlotPolicy
from airllm.experts.slots import SlotPool
from airllm.experts.stats import Counters
from airllm.experts.transfer import Transfer

log = logging.getLogger(__name__)

MAX_ROWS = 8
"""Rows (sequences of a batch) of a decoded step that the engine serves; a larger batch goes the plain way."""
MAX_TOP_K = 16


def why_not(bank: HostBank, pool: SlotPool, top_k: int, gates: Sequence[Gate | None]) -> str:
    """Why the device engine cannot serve these experts on this machine; "" when it can. ``gates``: of each layer."""
    if top_k > MAX_TOP_K:
        return f"a token uses {top_k} experts, the kernels take up to {MAX_TOP_K}"
    dtypes = {projection.dtype for projection in bank.layout.projections}
    if not dtypes <= {torch.float16, torch.bfloat16, torch.float32} or len(dtypes) > 1:
        return f"the experts are {', '.join(sorted(map(str, dtypes)))}"
    if None in gates:
        return "the experts' gate or activation is none of those that the kernels compute, tried on sample numbers"
    if pool.blocks[0].device.type == "cpu":
        return ""
    if not bank.pinned:
        return f"the expert bank is not pinned, so that kernels cannot read it ({bank.pin_reason})"
    return "" if importlib.util.find_spec("triton") else "Triton is not installed"


class DeviceEngine:
    """Serves up to ``MAX_ROWS`` rows a call from slots, by kernels alone.

    Args:
        bank, pool, transfer, policy, counters: the runtime's own; ``policy`` and ``counters`` are changed by ``leave``.
        top_k: experts a token is routed to.
        gates: what lies between the two products of each layer's experts; the plain gate when left out.
        transposed: the weights lie as [in, out].
        ops: the kernels, or their twins; by the pool's device when left out.
    """

    def __init__(
        self,
        bank: HostBank,
        pool: SlotPool,
        transfer: Transfer,
        policy: SlotPolicy,
        counters: Counters,
        *,
        top_k: int,
        gates: Sequence[Gate] = (),
        transposed: bool = False,
        ops: ModuleType | None = None,
    ) -> None:
        self.device = pool.blocks[0].device
        self.ops = ops or ops_for(self.device, "kernels", kernel_twins)
        self.num_experts, self.top_k = bank.layout.num_experts, top_k
        self.tables = tables_for(policy, bank.experts, pool.plan.scratch, MAX_ROWS * top_k, self.device)
        self.ahead = False  # the tables know more than the policy
        self.stepping = False  # a step is running (or being captured) that calls `experts`
        self._transfer, self._policy, self._counters = transfer, policy, counters
        self._expert_bytes = pool.plan.expert_bytes
        self._bank, self._pool = bank.memory, pool.memory
        layout = bank.layout
        self._gates = list(gates) or [PLAIN] * len(layout.layers)
        self._dtype = layout.projections[0].dtype
        views = {p.name: self._view(p) for p in layout.projections}
        into = next(name for name in ("gate_up_proj", "up_proj") if name in views)
        # As the kernels see them, rows are outputs: [places, out, in], whichever of the two is dense in memory.
        self._gate_up, self._down = (
            views[name].transpose(1, 2) if transposed else views[name] for name in (into, "down_proj")
        )
        self._gate_up_bias, self._down_bias = views.get(f"{into}_bias"), views.get("down_proj_bias")

    def _view(self, projection: Projection) -> torch.Tensor:
        """One projection of every place: [places, *its shape]."""
        p = projection
        return self._pool[:, p.offset_bytes : p.offset_bytes + p.nbytes].view(p.dtype).unflatten(1, p.shape)

    def fits(self, rows: int) -> bool:
        """Whether a call of ``rows`` rows always finds a place for each of its experts."""
        most = min(rows * self.top_k, self.num_experts)
        return rows <= MAX_ROWS and self.tables.most_ids() >= most

    def enter(self) -> None:
        """The tables take over from the policy. Waits for every copy and every reader that was started before."""
        if self.ahead:
            return
        self._transfer.synchronize()
        self._synchronize()
        self.tables.take_over(self._policy)
        self.tables.counts.zero_()
        self.ahead = True

    def leave(self) -> None:
        """The policy takes over from the tables. Waits for the device, so that no kernel still uses a slot."""
        if not self.ahead:
            return
        self._synchronize()
        self.tables.hand_back(self._policy)
        counts = self.tables.take_counts()
        self._policy.evictions += counts.evictions
        for name, value in self._as_counters(counts).items():
            setattr(self._counters, name, getattr(self._counters, name) + value)
        self.ahead = False

    def abandon(self) -> None:
        """After an exception within a step: nothing is believed resident any more."""
        self.stepping = False
        if self.ahead:
            self.ahead = False  # first: an interrupt while this waits must not leave tables that are believed
            self._policy.clear()
            self._counters.recoveries += 1
            self._synchronize()

    @contextmanager
    def step(self) -> Iterator[None]:
        """Inside, the runtime hands its calls to `experts`."""
        self.stepping = True
        try:
            yield
        finally:
            self.stepping = False

    def experts(
        self,
        layer: int,
        hidden: torch.Tensor,
        index: torch.Tensor,
        weights: torch.Tensor,
        residual: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """The experts' part of one layer: ``hidden`` [T, H], ``index`` and ``weights`` [T, K]; gives [T, H].

        ``residual`` [T, H] is added; the result is written to ``out`` [T, H] if given.
        """
        tables, (rows, top_k) = self.tables, index.shape
        if rows * top_k > tables.max_ids:
            raise ValueError(f"{rows} rows of {top_k} experts are more than the {tables.max_ids} that the tables are made for")
        index, weights, hidden = index.contiguous(), weights.contiguous(), hidden.contiguous()
        self.ops.route(tables, index, layer * self.num_experts, self.num_experts)
        misses = Misses(self._pool, self._bank, tables) if rows == 1 and self._gate_up.stride(2) == 1 else None
        if misses is None:  # rows share experts, which must come over the link once; or a row's numbers lie apart there
            self.ops.copy_misses(tables, self._bank, self._pool, min(rows * top_k, self.num_experts))
        inner = torch.empty(rows, top_k, self._down.shape[2], dtype=self._dtype, device=hidden.device)
        self.ops.gate_up(hidden, tables.places, self._gate_up, inner, self._gates[layer], self._gate_up_bias, misses)
        out = torch.empty_like(hidden) if out is None else out
        self.ops.down(inner, tables.places, index, weights, self._down, out, residual, self._down_bias)
        return out

    def prompt_sum(self, layer: int, routing: Routing, hidden: torch.Tensor, weights: torch.Tensor) -> GroupedSum | None:
        """What adds up a prompt's experts several at a time; None where no kernel does."""
        plain = self._gates[layer] == PLAIN and self._gate_up_bias is None and self._gate_up.stride(2) == 1
        if not plain or not can_group(routing, hidden):
            return None
        ops = ops_for(self.device, "prompt_kernels", prompt_twins)
        return GroupedSum(routing, hidden, weights, self._gate_up, self._down, ops)

    def pending(self) -> dict[str, int]:
        """What ``leave`` would add to the counters, and the residents as they are now. Waits for the device."""
        if not self.ahead:
            return {}
        self._synchronize()  # steps may run on another stream than the one that reads
        counts = self._as_counters(self.tables.read_counts())
        residents = int((self.tables.owner >= 0).sum())
        return {**counts, "resident_experts": residents, "resident_bytes": residents * self._expert_bytes}

    def reset_counts(self) -> None:
        """Counters on the device to zero."""
        self._synchronize()
        self.tables.counts.zero_()

    def close(self) -> None:
        """Let go of the slots and the bank, which are not its own. Idempotent."""
        if self.device.type != "cpu":
            torch.cuda.synchronize(self.device)
        self.ahead = self.stepping = False
        self._pool = self._bank = self._gate_up = self._down = torch.empty(0)
        self._gate_up_bias = self._down_bias = None

    def _as_counters(self, counts: Counts) -> dict[str, int]:
        copied = counts.misses * self._expert_bytes
        return {**counts._asdict(), "h2d_copies": counts.misses, "h2d_bytes": copied}

    def _synchronize(self) -> None:
        if self.device.type != "cpu":
            torch.cuda.synchronize(self.device)
