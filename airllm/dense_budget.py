"""PURE: which decoder layers' dense weights stay on the device, what that takes, and what would fit. No torch here.

A byte of dense weights that stays saves a byte on the link for every token; a byte of expert slots saves one only when it is
hit. So where memory is short the layers come first, and slots get what is left.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

GIB = 2**30
RING_BLOCKS = 3  # one computes, one is ready, one is being filled


@dataclass(frozen=True)
class DensePlan:
    """``layers``: bytes of each decoder layer's dense weights, in order. The first ``resident`` stay, ``ring`` blocks serve
    the others."""

    layers: tuple[int, ...]
    resident: int
    ring: int

    @property
    def streamed(self) -> int:
        """How many layers pass through the ring."""
        return len(self.layers) - self.resident

    @property
    def resident_bytes(self) -> int:
        return sum(self.layers[: self.resident])

    @property
    def streamed_bytes(self) -> int:
        return sum(self.layers[self.resident :])

    @property
    def block_bytes(self) -> int:
        """One block of the ring: the largest layer that passes through it."""
        return max(self.layers[self.resident :], default=0)

    @property
    def ring_bytes(self) -> int:
        return self.ring * self.block_bytes

    @property
    def device_bytes(self) -> int:
        return self.resident_bytes + self.ring_bytes

    @property
    def moved_bytes(self) -> int:
        """Bytes that each forward brings to the device: none when every streamed layer has a block of its own."""
        return self.streamed_bytes if self.streamed > self.ring else 0


def plan_dense(layers: Sequence[int], resident_bytes: int | str, prefetch: bool = True) -> DensePlan:
    """As many first layers as fit in ``resident_bytes`` stay; "all" keeps every one. Without ``prefetch`` one block serves."""
    resident = len(layers)
    if isinstance(resident_bytes, int):
        left = resident_bytes
        for number, nbytes in enumerate(layers):
            left -= nbytes
            if left < 0:
                resident = number
                break
    ring = min(RING_BLOCKS if prefetch else 1, len(layers) - resident)
    return DensePlan(tuple(layers), resident, ring)


def following(streamed: Sequence[int], number: int, count: int) -> tuple[int, ...]:
    """The next ``count`` streamed layers after ``number``, on into the next token's, never ``number`` itself."""
    at = streamed.index(number)
    order = [*streamed[at + 1 :], *streamed[:at]]
    return tuple(order[: max(count, 0)])


def largest_that_fits(layers: Sequence[int], free_bytes: int, prefetch: bool = True) -> DensePlan | None:
    """The plan that keeps most layers within ``free_bytes`` of device memory, None when not even the ring fits."""
    for resident in range(len(layers), -1, -1):
        plan = plan_dense(layers, sum(layers[:resident]), prefetch)
        if plan.device_bytes <= free_bytes:
            return plan
    return None


def resident_gib(plan: DensePlan) -> float:
    """A ``resident_gb`` that gives this plan, rounded up to as few digits as still do."""
    exact = plan.resident_bytes / GIB
    for digits in range(2, 17):
        scale = 10.0 ** (digits - 1 - math.floor(math.log10(exact))) if exact else 1.0
        rounded = math.ceil(exact * scale) / scale
        if plan_dense(plan.layers, int(rounded * GIB)).resident == plan.resident:
            return rounded
    return exact


def why_too_large(plan: DensePlan, *, rest_bytes: int, beside_bytes: int, free_bytes: int, prefetch: bool = True) -> str | None:
    """What is missing when the dense weights do not fit in ``free_bytes``, and the ``resident_gb`` that would do; None when
    they fit.

    Args:
        rest_bytes: dense weights outside the decoder layers, which always stay.
        beside_bytes: what must fit beside them.
    """
    need = rest_bytes + plan.device_bytes + beside_bytes
    if need <= free_bytes:
        return None
    parts = [f"{rest_bytes} B outside the decoder layers", f"{plan.resident_bytes} B of {plan.resident} layers that stay"]
    if plan.ring:
        parts.append(f"{plan.ring_bytes} B of blocks for {plan.streamed} layers that stream")
    if beside_bytes:
        parts.append(f"{beside_bytes} B beside them")
    text = f"the dense weights need {need} B ({', '.join(parts)}), and {free_bytes} B are free: "
    best = largest_that_fits(plan.layers, free_bytes - rest_bytes - beside_bytes, prefetch)
    if best is not None:
        gib = resident_gib(best)
        return text + (
            f"pass resident_gb={gib:g}, so that {best.resident} of {len(best.layers)} layers stay and the others are streamed "
            f"({best.moved_bytes} B a token)"
        )
    least = rest_bytes + plan_dense(plan.layers, 0, prefetch).device_bytes + beside_bytes
    return text + f"even resident_gb=0 needs {least} B: free memory on the device, or take a larger one"
