"""Which expert holds which slot, as integers on the device, so that a decoded token's bookkeeping needs no word to the host.

There are tables for each policy of :mod:`airllm.experts.policy`, and the kernels keep its rule to the letter.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import NamedTuple

import torch

from airllm.experts.policy import FREE, AgedPolicy, SlotPolicy, layer_spans


class Counts(NamedTuple):
    """Events since the last :meth:`Decisions.take_counts`; every miss is one copy, and a bypass is a miss without a slot."""

    hits: int
    misses: int
    evictions: int
    bypasses: int = 0


class Decisions:
    """Where one call leaves its decisions (int32), for at most ``max_ids`` routed ids (T * K), and the ``counts`` (int64) [4].

    ``places`` [max_ids] the slot of each id, ``miss_key`` and ``miss_slot`` [max_ids], ``miss_count`` [1].
    """

    def __init__(self, keys: int, slots: int, max_ids: int, device: torch.device, state: Sequence[int]) -> None:
        self.keys, self.slots, self.max_ids = keys, slots, max_ids
        # Tensors made under inference_mode could not be written outside of it.
        with torch.inference_mode(False):
            # One allocation, so that handing the truth over either way is one copy.
            self._state = torch.full((sum(state),), FREE, dtype=torch.int32, device=device)
            self.counts = torch.zeros(4, dtype=torch.int64, device=device)
            self._calls = torch.zeros(3 * max_ids + 1, dtype=torch.int32, device=device)
        self._sizes = list(state)
        self.slot_of, self.owner = self._state.split(self._sizes)[:2]
        self.places, self.miss_key, self.miss_slot, self.miss_count = self._calls.split([max_ids] * 3 + [1])

    def _take(self, residents: Mapping[int, int], *more: Sequence[int]) -> None:
        """Take over a table, slot by key, and the rest of the state."""
        slot_of, owner = [FREE] * self.keys, [FREE] * self.slots
        for key, slot in residents.items():
            slot_of[key], owner[slot] = slot, key
        self._state.copy_(torch.tensor(list(chain(slot_of, owner, *more)), dtype=torch.int32))

    def most_ids(self) -> int:
        """How many different experts a call always finds places for."""
        return self.slots

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


class DeviceTables(Decisions):
    """The tables of :class:`airllm.experts.policy.LruPolicy` for ``keys`` experts (L * E) and ``slots`` slots.

    (int32): ``slot_of`` [keys], ``owner`` [slots], ``last_use`` [slots], ``clock`` [1].

    Hits become youngest in ascending order of expert id, then misses are admitted in ascending order into the lowest free
    slot, else into the slot of the oldest expert that this very call does not use. Only the order of the stamps matters: a
    hit is stamped ``clock + expert``, a miss ``clock + E + expert``, and a call moves the clock on by ``2 E``. A free slot
    is stamped -1, older than anything used.
    """

    def __init__(self, keys: int, slots: int, max_ids: int, device: torch.device) -> None:
        super().__init__(keys, slots, max_ids, device, (keys, slots, slots, 1))
        self.last_use, self.clock = self._state.split(self._sizes)[2:]
        self.upload({})

    def upload(self, residents: Mapping[int, int]) -> None:
        """Take over a policy's table: slot by key, oldest first."""
        last_use = [FREE] * self.slots
        for age, slot in enumerate(residents.values()):
            last_use[slot] = age
        self._take(residents, last_use, [len(residents)])

    def residents(self) -> dict[int, int]:
        """Slot by key, oldest first. Waits for the device."""
        _, owner, last_use, _ = self._state.cpu().split(self._sizes)
        owners, stamps = owner.tolist(), last_use.tolist()
        held = sorted((stamps[slot], slot) for slot in range(self.slots) if owners[slot] != FREE)
        return {owners[slot]: slot for _, slot in held}

    def take_over(self, policy: SlotPolicy) -> None:
        """What the policy knows becomes what the tables know."""
        self.upload(policy.residents())

    def hand_back(self, policy: SlotPolicy) -> None:
        """And the other way round. Waits for the device."""
        policy.restore(self.residents())

    def check(self) -> None:
        super().check()
        stamps = [stamp for stamp in self.last_use.tolist() if stamp != FREE]
        held = int((self.owner != FREE).sum())
        if len(stamps) != held or len(set(stamps)) != held:
            raise AssertionError(f"{held} residents have the stamps {stamps}")


class AgedTables(Decisions):
    """The tables of :class:`airllm.experts.policy.AgedPolicy`, whose rule they follow.

    (int32): ``slot_of`` [keys], ``owner`` [slots], ``habit`` [keys], ``recent`` [keys]. A miss that is not admitted gets a
    place behind the slots, in ascending order, while there are any of the ``scratch`` ones; those behind them must be admitted.
    """

    def __init__(self, layers: int, experts: int, slots: int, scratch: int, max_ids: int, device: torch.device) -> None:
        keys = layers * experts
        super().__init__(keys, slots, max_ids, device, (keys, slots, keys, keys))
        self.habit, self.recent = self._state.split(self._sizes)[2:]
        self.experts, self.scratch = experts, scratch
        self.spans = layer_spans(slots, layers)
        widths = [end - first for first, end in self.spans]
        self.widest, self.narrowest = max(widths), min(widths)
        self.habit.zero_()
        self.recent.zero_()

    def most_ids(self) -> int:
        return self.scratch + self.narrowest

    def take_over(self, policy: SlotPolicy) -> None:
        """What the policy knows becomes what the tables know."""
        self._take(policy.residents(), *policy.uses())

    def hand_back(self, policy: SlotPolicy) -> None:
        """And the other way round. Waits for the device."""
        slot_of, _, habit, recent = (part.tolist() for part in self._state.cpu().split(self._sizes))
        policy.restore({key: slot for key, slot in enumerate(slot_of) if slot != FREE}, habit, recent)


def tables_for(policy: SlotPolicy, keys: int, scratch: int, max_ids: int, device: torch.device) -> DeviceTables | AgedTables:
    """Empty tables of the policy's kind."""
    if isinstance(policy, AgedPolicy):
        return AgedTables(policy.layers, policy.experts, policy.slots, scratch, max_ids, device)
    return DeviceTables(keys, policy.slots, max_ids, device)
