"""PURE: which expert holds which slot: least recently used, with leases. No torch here.

The table ``expert -> slot`` is the only truth; the free list follows from it, so a table cut short by an interrupt can be
made whole again (:meth:`LruPolicy.recover`).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping


class LruPolicy:
    """Residency of experts in ``slots`` slots. Keys are integers (layer * E + expert); not thread-safe: the runtime locks."""

    def __init__(self, slots: int) -> None:
        if slots < 1:
            raise ValueError(f"a policy needs at least 1 slot, got {slots}")
        self.slots = slots
        self._slot_of: OrderedDict[int, int] = OrderedDict()  # oldest first
        self._leased: set[int] = set()
        self._free: list[int] = list(range(slots - 1, -1, -1))
        self.evictions = 0

    def __len__(self) -> int:
        return len(self._slot_of)

    def __contains__(self, key: int) -> bool:
        return key in self._slot_of

    @property
    def free(self) -> int:
        """Slots that hold nothing."""
        return len(self._free)

    def residents(self) -> dict[int, int]:
        """A copy of the table, oldest first."""
        return dict(self._slot_of)

    def lease(self, key: int) -> int | None:
        """The slot of ``key``, leased and made youngest; None when it is not resident."""
        slot = self._slot_of.get(key)
        if slot is not None:
            self._slot_of.move_to_end(key)
            self._leased.add(key)
        return slot

    def admit(self, key: int, *, cold: bool = False) -> int | None:
        """A slot for ``key``, which is not resident: a free one, else the oldest unleased expert's. Leased at once.

        ``cold`` puts the expert at the old end, where it is the next victim. None when every slot is leased.
        """
        if not self._free and not self._evict_oldest():
            return None
        slot = self._free[-1]
        self._slot_of[key] = slot
        self._free.pop()
        if cold:
            self._slot_of.move_to_end(key, last=False)
        self._leased.add(key)
        return slot

    def _evict_oldest(self) -> bool:
        victim = next((key for key in self._slot_of if key not in self._leased), None)
        if victim is None:
            return False
        self._free.append(self._slot_of.pop(victim))
        self.evictions += 1
        return True

    def release_all(self) -> None:
        """End every lease (one layer's forward is over)."""
        self._leased.clear()

    def drop(self, keys: Iterable[int]) -> None:
        """Forget experts whose bytes cannot be trusted; their slots become free."""
        for key in keys:
            self._leased.discard(key)
            slot = self._slot_of.pop(key, None)
            if slot is not None:
                self._free.append(slot)

    def clear(self) -> None:
        """Forget every resident."""
        self._leased.clear()
        self._slot_of.clear()
        self._free = list(range(self.slots - 1, -1, -1))

    def restore(self, residents: Mapping[int, int]) -> None:
        """Take over a table, slot by key, oldest first; no leases."""
        self.clear()
        self._slot_of.update(residents)
        self.recover(())

    def recover(self, suspects: Iterable[int]) -> None:
        """After an exception or interrupt: no leases, ``suspects`` gone, the free list rebuilt from the table."""
        self._leased.clear()
        for key in suspects:
            self._slot_of.pop(key, None)
        owned = set(self._slot_of.values())
        self._free = [slot for slot in range(self.slots - 1, -1, -1) if slot not in owned]

    def check(self) -> None:
        """Raise AssertionError when an invariant is broken (used by tests after each step)."""
        owned = list(self._slot_of.values())
        if len(set(owned)) != len(owned):
            raise AssertionError(f"two experts share a slot: {self._slot_of}")
        if sorted(owned + self._free) != list(range(self.slots)):
            raise AssertionError(f"slots lost or doubled: owned {sorted(owned)}, free {sorted(self._free)}")
        if not self._leased <= set(self._slot_of):
            raise AssertionError(f"leases without a resident: {self._leased - set(self._slot_of)}")
