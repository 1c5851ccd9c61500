"""PURE: routed experts and residency become steps: which expert is computed from where, and what is copied first.

Steps are in ascending order of expert id, because transformers' eager experts add in that order and a sum in half
precision depends on it. No torch here.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from airllm.experts.policy import SlotPolicy


@dataclass(frozen=True)
class Step:
    """Compute one expert from a place on the device. ``place`` counts slots first, scratch behind them."""

    expert: int
    key: int
    place: int
    copy: bool
    cached: bool  # False: the expert passes through scratch


class PlanCounts:
    """What one layer's plan did, for the statistics."""

    __slots__ = ("bypasses", "hits", "misses")

    def __init__(self) -> None:
        self.hits = self.misses = self.bypasses = 0


def plan_layer(
    policy: SlotPolicy,
    *,
    first_key: int,
    experts: Sequence[int],
    admit: Collection[int],
    scratch: int,
    keep_free: int = 0,
    counts: PlanCounts | None = None,
) -> list[Step]:
    """Plan one layer of one forward; every slot it names is leased until ``policy.release_all()``.

    Args:
        policy: residency; changed.
        first_key: layer * E.
        experts: distinct routed experts, ascending.
        admit: those worth a slot even at the cost of an eviction (decoded tokens, and the last tokens of a prompt).
            The others take a free slot while more than ``keep_free`` are free, else pass through scratch.
        scratch: scratch slots, used in rotation. When so many of ``admit`` pass through them, the policy must admit the rest.

    Leases come first: all hits are leased before any miss looks for a victim, so a miss can never evict what this very
    forward still needs. Two copies into one place never meet within a wave (see :func:`waves`).
    """
    counts = counts or PlanCounts()
    policy.begin(first_key, {expert for expert in experts if expert in admit})
    slot_of = {expert: policy.lease(first_key + expert) for expert in experts}
    steps: list[Step] = []
    rotation = refused = 0
    for expert in experts:
        key, slot = first_key + expert, slot_of[expert]
        if slot is not None:
            counts.hits += 1
            steps.append(Step(expert, key, slot, copy=False, cached=True))
            continue
        counts.misses += 1
        wanted = expert in admit
        if wanted or scratch == 0 or policy.free > keep_free:
            slot = policy.admit(key, cold=not wanted, must=refused >= scratch)
        if slot is not None:
            steps.append(Step(expert, key, slot, copy=True, cached=True))
            continue
        if scratch == 0:
            raise RuntimeError(f"no slot and no scratch for expert {expert}: {policy.slots} slots are all leased")
        counts.bypasses += 1
        steps.append(Step(expert, key, policy.slots + rotation % scratch, copy=True, cached=False))
        rotation += 1
        refused += wanted
    return steps


def waves(steps: Sequence[Step], scratch: int) -> Iterator[list[Step]]:
    """Cut steps so that no wave uses a scratch slot twice: a wave never holds more than slots + scratch experts."""
    wave: list[Step] = []
    passing = 0
    for step in steps:
        if not step.cached and passing == scratch:
            yield wave
            wave, passing = [], 0
        wave.append(step)
        passing += not step.cached
    if wave:
        yield wave
