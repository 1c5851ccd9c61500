"""PURE: from bytes to a number of slots, or an error that says which number would do. No torch here."""

from __future__ import annotations

import math
from dataclasses import dataclass

from airllm.errors import BudgetError

GIB = 2**30
MIB = 2**20
SCRATCH_SLOTS = 2
"""Two, so that one scratch slot is filled while the other one is computed."""


def most_scratch(engine: str, top_k: int) -> int:
    """Scratch slots worth having: the device engine can pass every expert of a token by, and copies them all at once."""
    return max(SCRATCH_SLOTS, top_k) if engine == "device" else SCRATCH_SLOTS


@dataclass(frozen=True)
class SlotPlan:
    """How the device bytes for experts are cut. ``slots`` come out of the budget, ``scratch`` lies outside it."""

    slots: int
    scratch: int
    expert_bytes: int
    budget_bytes: int
    reason: str

    @property
    def slot_bytes(self) -> int:
        return self.slots * self.expert_bytes

    @property
    def scratch_bytes(self) -> int:
        return self.scratch * self.expert_bytes


def smallest_budget_gib(expert_bytes: int, top_k: int) -> float:
    """The least ``expert_cache_gb``, rounded up to two significant digits, that holds ``top_k`` experts."""
    least = top_k * expert_bytes / GIB
    scale = 10.0 ** (1 - math.floor(math.log10(least)))
    return math.ceil(least * scale * (1 + 1e-12)) / scale


def plan_slots(
    *,
    budget_bytes: int,
    expert_bytes: int,
    total_experts: int,
    top_k: int,
    scratch: int = SCRATCH_SLOTS,
    reason: str = "as asked",
) -> SlotPlan:
    """Cut ``budget_bytes`` into slots of ``expert_bytes``; never more slots than ``total_experts`` of the model.

    A model that fits whole needs no scratch: every expert has a slot of its own. More than two ``scratch`` slots, which lie
    outside the budget, are given only while they are no more than a quarter of it.

    Raises:
        BudgetError: fewer than ``top_k`` experts (one token in one layer) fit.
    """
    slots = min(budget_bytes // expert_bytes, total_experts)
    if slots < min(top_k, total_experts):
        need = min(top_k, total_experts) * expert_bytes
        raise BudgetError(
            f"the expert cache needs {need} B for {top_k} experts of {expert_bytes / MIB:.4g} MiB (one token in one layer), "
            f"got {budget_bytes} B: raise expert_cache_gb to at least {smallest_budget_gib(expert_bytes, top_k):g}"
        )
    if slots == total_experts:
        scratch, reason = 0, f"{reason}; every expert has a slot"
    else:
        scratch = max(SCRATCH_SLOTS, min(scratch, int(slots) // 4))
    return SlotPlan(int(slots), scratch, expert_bytes, budget_bytes, reason)


def auto_budget_bytes(
    *, free_bytes: int, kv_cache_bytes: int, workspace_bytes: int, reserve_bytes: int, scratch_bytes: int
) -> int:
    """What ``expert_cache_gb="auto"`` takes: free device bytes, measured once the dense weights are there, less what
    generation will need. May be negative; :func:`plan_slots` turns that into an error with the numbers."""
    return free_bytes - kv_cache_bytes - workspace_bytes - reserve_bytes - scratch_bytes
