"""The device engine: experts of a decoded token served without a word to the host, so that a whole step can be captured.

Between :meth:`DeviceEngine.enter` and :meth:`DeviceEngine.leave` the tables on the device are the truth about the slots;
outside of that the policy on the host is. ``SlotExpertRuntime`` calls ``leave`` before anything it does itself, so the two
never speak at once.
"""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType

import torch
from torch.nn.functional import silu

from airllm.experts import kernel_twins
from airllm.experts.bank import HostBank
from airllm.experts.compute import ApplyGate
from airllm.experts.device_tables import Counts, tables_for
from airllm.experts.policy import SlotPolicy
from airllm.experts.slots import SlotPool
from airllm.experts.stats import Counters
from airllm.experts.transfer import Transfer

log = logging.getLogger(__name__)

MAX_ROWS = 8
"""Rows (sequences of a batch) of a decoded step that the engine serves; a larger batch goes the plain way."""
MAX_TOP_K = 16


def why_not(bank: HostBank, pool: SlotPool, top_k: int, apply_gate: ApplyGate) -> str:
    """Why the device engine cannot serve these experts on this machine; "" when it can."""
    gate_up = bank.layout.projections[0]
    if top_k > MAX_TOP_K:
        return f"a token uses {top_k} experts, the kernels take up to {MAX_TOP_K}"
    if not gate_up.dtype.is_floating_point or gate_up.dtype == torch.float64:
        return f"the experts are {gate_up.dtype}"
    if not _is_silu_gate(apply_gate):
        return "the experts' gate is not silu(gate) * up"
    if pool.blocks[0].device.type == "cpu":
        return ""
    if not bank.pinned:
        return f"the expert bank is not pinned, so that kernels cannot read it ({bank.pin_reason})"
    return "" if importlib.util.find_spec("triton") else "Triton is not installed"


def _is_silu_gate(apply_gate: ApplyGate) -> bool:
    """Asked by trying: families write their gates in many ways."""
    sample = torch.linspace(-3, 3, 16).reshape(2, 8)
    gate, up = sample.chunk(2, dim=-1)
    return bool(torch.allclose(apply_gate(sample), silu(gate) * up, rtol=1e-5, atol=1e-6))


def kernels_for(device: torch.device) -> ModuleType:
    """The Triton kernels, or their twins on the CPU."""
    if device.type == "cpu":
        return kernel_twins
    from airllm.experts import kernels

    return kernels


class DeviceEngine:
    """Serves up to ``MAX_ROWS`` rows a call from slots, by kernels alone.

    Args:
        bank, pool, transfer, policy, counters: the runtime's own; ``policy`` and ``counters`` are changed by ``leave``.
        top_k: experts a token is routed to.
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
        ops: ModuleType | None = None,
    ) -> None:
        self.device = pool.blocks[0].device
        self.ops = ops or kernels_for(self.device)
        self.num_experts, self.top_k = bank.layout.num_experts, top_k
        self.tables = tables_for(policy, bank.experts, pool.plan.scratch, MAX_ROWS * top_k, self.device)
        self.ahead = False  # the tables know more than the policy
        self.stepping = False  # a step is running (or being captured) that calls `experts`
        self._transfer, self._policy, self._counters = transfer, policy, counters
        self._expert_bytes = pool.plan.expert_bytes
        self._bank, self._pool = bank.memory, pool.memory
        gate_up, down = bank.layout.projections
        self._dtype = gate_up.dtype
        self._gate_up, self._down = (
            self._pool[:, p.offset_bytes : p.offset_bytes + p.nbytes].view(p.dtype).unflatten(1, p.shape)
            for p in (gate_up, down)
        )

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
        index, weights, hidden = index.contiguous(), weights.contiguous(), hidden.contiguous()
        self.ops.route(tables, index, layer * self.num_experts, self.num_experts)
        self.ops.copy_misses(tables, self._bank, self._pool, min(rows * top_k, self.num_experts))
        inner = torch.empty(rows, top_k, self._down.shape[2], dtype=self._dtype, device=hidden.device)
        self.ops.gate_up(hidden, tables.places, self._gate_up, inner)
        out = torch.empty_like(hidden) if out is None else out
        self.ops.down(inner, tables.places, index, weights, self._down, out, residual)
        return out

    def pending(self) -> dict[str, int]:
        """What ``leave`` would add to the counters, and the residents as they are now. Waits for the device."""
        if not self.ahead:
            return {}
        counts = self._as_counters(self.tables.read_counts())
        residents = int((self.tables.owner >= 0).sum())
        return {**counts, "resident_experts": residents, "resident_bytes": residents * self._expert_bytes}

    def reset_counts(self) -> None:
        """Counters on the device to zero."""
        self.tables.counts.zero_()

    def close(self) -> None:
        """Let go of the slots and the bank, which are not its own. Idempotent."""
        if self.device.type != "cpu":
            torch.cuda.synchronize(self.device)
        self.ahead = self.stepping = False
        self._pool = self._bank = self._gate_up = self._down = torch.empty(0)

    def _as_counters(self, counts: Counts) -> dict[str, int]:
        copied = counts.misses * self._expert_bytes
        return {**counts._asdict(), "h2d_copies": counts.misses, "h2d_bytes": copied}

    def _synchronize(self) -> None:
        if self.device.type != "cpu":
            torch.cuda.synchronize(self.device)
