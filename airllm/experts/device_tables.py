"""Which expert holds which slot, as integers on the device, so that a decoded token's bookkeeping needs no word to the host.

The rule is that of :class:`airllm.experts.policy.LruPolicy`: hits become youngest in ascending order of expert id, then
misses are admitted in ascending order into the lowest free slot, else into the slot of the oldest expert that this very
call does not use. Only the order of the stamps matters: a hit is stamped ``clock + expert``, a miss ``clock + E + expert``,
and a call moves the clock on by ``2 E``. A free slot is stamped -1, older than anything used.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch

FREE = -1


class Counts(NamedTuple):
    """Events since the last :meth:`DeviceTables.take_counts`; every miss is one copy."""

    hits: int
    misses: int
    evictions: int


class DeviceTables:
    """The tables of ``keys`` experts (L * E) and ``slots`` slots, and where one call leaves its decisions.

    Tables (int32): ``slot_of`` [keys], ``owner`` [slots], ``last_use`` [slots], ``clock`` [1]; ``counts`` (int64) [3].
    Decisions of the latest call (int32), for at most ``max_ids`` routed ids (T * K): ``places`` [max_ids] the slot of each
    id, ``miss_key`` and ``miss_slot`` [max_ids], ``miss_count`` [1].
    """

    def __init__(self, keys: int, slots: int, max_ids: int, device: torch.device) -> None:
        self.keys, self.slots, self.max_ids = keys, slots, max_ids
        # Tensors made under inference_mode could not be written outside of it.
        with torch.inference_mode(False):
            # One allocation, so that handing the truth over either way is one copy.
            self._state = torch.full((keys + 2 * slots + 1,), FREE, dtype=torch.int32, device=device)
            self.counts = torch.zeros(3, dtype=torch.int64, device=device)
            self._calls = torch.zeros(3 * max_ids + 1, dtype=torch.int32, device=device)
        self.slot_of, self.owner, self.last_use, self.clock = self._state.split([keys, slots, slots, 1])
        self.places, self.miss_key, self.miss_slot, self.miss_count = self._calls.split([max_ids] * 3 + [1])
        self.upload({})

    def upload(self, residents: Mapping[int, int]) -> None:
        """Take over a policy's table: slot by key, oldest first."""
        state = torch.full((self._state.numel(),), FREE, dtype=torch.int32)
        slot_of, owner, last_use, clock = state.split([self.keys, self.slots, self.slots, 1])
        for age, (key, slot) in enumerate(residents.items()):
            slot_of[key], owner[slot], last_use[slot] = slot, key, age
        clock[0] = len(residents)
        self._state.copy_(state)

    def residents(self) -> dict[int, int]:
        """Slot by key, oldest first. Waits for the device."""
        _, owner, last_use, _ = self._state.cpu().split([self.keys, self.slots, self.slots, 1])
        owners, stamps = owner.tolist(), last_use.tolist()
        held = sorted((stamps[slot], slot) for slot in range(self.slots) if owners[slot] != FREE)
        return {owners[slot]: slot for _, slot in held}

    def read_counts(self) -> Counts:
        """The counts so far, left as they are. Waits for the device."""
        return Counts(*self.counts.tolist())

    def take_counts(self) -> Counts:
        """The counts so far, back to zero. Waits for the device."""
        counts = self.read_counts()
        self.counts.zero_()
        return counts

    def check(self) -> None:
        """Raise AssertionError when the two directions of the table contradict each other (for tests)."""
        slot_of, owner = self.slot_of.tolist(), self.owner.tolist()
        forth = {key: slot for key, slot in enumerate(slot_of) if slot != FREE}
        back = {key: slot for slot, key in enumerate(owner) if key != FREE}
        if forth != back:
            raise AssertionError(f"slots by expert {forth} contradict experts by slot {back}")
        stamps = [stamp for stamp in self.last_use.tolist() if stamp != FREE]
        if len(stamps) != len(back) or len(set(stamps)) != len(stamps):
            raise AssertionError(f"{len(back)} residents have the stamps {stamps}")
