"""PURE: which expert holds which slot, with leases: by aged frequency, or least recently used. No torch here.

The table ``expert -> slot`` is the only truth; everything else about residency follows from it, so a table cut short by an
interrupt can be made whole again (:meth:`SlotPolicy.recover`).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterable, Mapping, Sequence
from operator import mul

AUTO_POLICY = "auto: more hits than one LRU in replays, and also with fewer slots than a token has experts, where that has none"
FREE, LEASED = -1, 2**31 - 1
"""What stands for the worth of a slot that holds nothing, and of one that must not be taken."""

GROUP_SLOTS = 2048
"""Layers share slots in groups of at most so many, so that looking for a victim costs the same with any number of slots."""
HABIT_SHIFT, RECENT_SHIFT = 6, 1
HABIT_USE, RECENT_USE = 1 << 16, 5 << 16
NEAREST, FAR_LESS = 128, 64
"""See :class:`AgedPolicy`; chosen by ``benchmarks/policy_replay.py``, and the same in the kernels."""


class SlotPolicy:
    """Residency of experts in ``slots`` slots. Keys are integers (layer * E + expert); not thread-safe: the runtime locks."""

    name = ""

    def __init__(self, slots: int) -> None:
        if slots < 1:
            raise ValueError(f"a policy needs at least 1 slot, got {slots}")
        self.slots = slots
        self.evictions = 0
        self._slot_of: dict[int, int] = {}
        self._leased: set[int] = set()

    def __len__(self) -> int:
        return len(self._slot_of)

    def __contains__(self, key: int) -> bool:
        return key in self._slot_of

    @property
    def free(self) -> int:
        """Slots that hold nothing."""
        return self.slots - len(self._slot_of)

    def residents(self) -> dict[int, int]:
        """A copy of the table."""
        return dict(self._slot_of)

    def begin(self, first_key: int, used: Collection[int]) -> None:
        """One layer's forward begins, and these of its experts count as used."""

    def lease(self, key: int) -> int | None:
        """The slot of ``key``, leased; None when it is not resident."""
        raise NotImplementedError

    def admit(self, key: int, *, cold: bool = False, must: bool = False) -> int | None:
        """A slot for ``key``, which is not resident, leased at once; None when there is none for it.

        ``cold`` experts are admitted for want of anything better and are the next victims. With ``must`` only leases are
        a reason to refuse.
        """
        raise NotImplementedError

    def release_all(self) -> None:
        """End every lease (one layer's forward is over)."""
        self._leased.clear()

    def drop(self, keys: Iterable[int]) -> None:
        """Forget experts whose bytes cannot be trusted; their slots become free. Other leases stay."""
        for key in keys:
            self._leased.discard(key)
            self._slot_of.pop(key, None)
        self._derive()

    def clear(self) -> None:
        """Forget every resident."""
        self._leased.clear()
        self._slot_of.clear()
        self._derive()

    def uses(self) -> tuple[list[int], list[int]]:
        """Copies of the counts by key of a policy that has such: ``habit`` and ``recent``."""
        return [], []

    def restore(self, residents: Mapping[int, int], habit: Sequence[int] = (), recent: Sequence[int] = ()) -> None:
        """Take over a table, slot by key, in the order of :meth:`residents`, and :meth:`uses`; no leases."""
        self._slot_of.clear()
        self._slot_of.update(residents)
        self.recover(())

    def recover(self, suspects: Iterable[int]) -> None:
        """After an exception or interrupt: no leases, ``suspects`` gone, what follows from the table made anew."""
        self._leased.clear()
        self.drop(suspects)

    def _derive(self) -> None:
        """Make everything that follows from the table and the leases anew."""
        raise NotImplementedError

    def _free_slots(self) -> list[int]:
        """By the table; the lowest one last, where a stack gives it out first."""
        owned = set(self._slot_of.values())
        return [slot for slot in range(self.slots - 1, -1, -1) if slot not in owned]

    def idle_slots(self, wanted: int) -> list[int]:
        """Slots that hold nothing, less the ``wanted`` of each group that `admit` gives out first; ascending."""
        if self.free <= wanted:
            return []
        return self._beyond(self._free_slots()[::-1], wanted)

    def _beyond(self, free: list[int], wanted: int) -> list[int]:
        return free[wanted:]

    def check(self) -> None:
        """Raise AssertionError when an invariant is broken (used by tests after each step)."""
        owned = list(self._slot_of.values())
        if len(set(owned)) != len(owned):
            raise AssertionError(f"two experts share a slot: {self._slot_of}")
        if not set(owned) <= set(range(self.slots)):
            raise AssertionError(f"slots that do not exist: {sorted(owned)} of {self.slots}")
        if not self._leased <= set(self._slot_of):
            raise AssertionError(f"leases without a resident: {self._leased - set(self._slot_of)}")


class LruPolicy(SlotPolicy):
    """One pool for all layers; the victim is the least recently used expert. The table is kept oldest first.

    Below T = layers * K slots it gives no hit at all: layers are visited in order, so an expert is evicted before its layer
    comes round again.
    """

    name = "least recently used"

    def __init__(self, slots: int) -> None:
        super().__init__(slots)
        self._slot_of: OrderedDict[int, int] = OrderedDict()
        self._derive()

    @property
    def free(self) -> int:
        return len(self._free)

    def lease(self, key: int) -> int | None:
        """As the base class says; ``key`` becomes the youngest."""
        slot = self._slot_of.get(key)
        if slot is not None:
            self._slot_of.move_to_end(key)
            self._leased.add(key)
        return slot

    def admit(self, key: int, *, cold: bool = False, must: bool = False) -> int | None:
        """A free slot, else the oldest unleased expert's; ``cold`` puts the expert at the old end."""
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

    def _derive(self) -> None:
        self._free = self._free_slots()

    def check(self) -> None:
        super().check()
        if sorted(self._free) != sorted(self._free_slots()):
            raise AssertionError(f"slots lost or doubled: owned {sorted(self._slot_of.values())}, free {sorted(self._free)}")


class AgedPolicy(SlotPolicy):
    """An expert's worth is how often it was used, uses long ago counting less, and more the sooner its layer comes round
    again; the victim is the expert of least worth.

    Two counts age at each forward of the expert's layer: ``habit`` by 1/64 and ``recent`` by half. A use adds 1 to the one and
    5 to the other, and their sum says how likely the next use is: experts with a habit stay, and one that was just used gets a
    chance. An expert whose layer comes next is tested soon, and its slot is free again soon, if that was wrong; one whose layer
    is just over keeps its slot for a whole token. So the sum counts up to twice as much for the one as for the other. A missed
    expert worth no more than every expert it could replace is not admitted: it passes through scratch ("bypass"). So a small
    cache is not scanned empty, as one LRU is, when layers come one after the other.

    Source: a count that decays with time is the "combined recency and frequency" of LRFU (Lee et al., IEEE Transactions on
    Computers 50, 2001), here the sum of two; to weigh likely hits against the time for which they take up a slot is the "hit
    density" of LHD (Beckmann et al., NSDI 2018), whose time is known here up to the layer; admission only of what is worth more
    than the victim is that of TinyLFU (Einziger et al., ACM Transactions on Storage 13, 2017).

    Args:
        slots: in all.
        layers, experts: L and E; keys are below L * E.
    """

    name = "aged frequency"
    habit_shift, habit_use, recent_shift, recent_use = HABIT_SHIFT, HABIT_USE, RECENT_SHIFT, RECENT_USE

    def __init__(self, slots: int, layers: int, experts: int) -> None:
        super().__init__(slots)
        self.layers, self.experts = layers, experts
        self.spans = layer_spans(slots, layers)
        self._near = [[near(now, other, layers) for other in range(layers)] for now in range(layers)]
        self._together = [(self.spans.index(span), layers - self.spans[::-1].index(span)) for span in self.spans]
        self._forget()
        self._derive()

    def _forget(self) -> None:
        keys = self.layers * self.experts
        self._habit, self._recent = [0] * keys, [0] * keys

    def begin(self, first_key: int, used: Collection[int]) -> None:
        """The layer's counts age, and ``used`` count up."""
        habit, recent = self._habit, self._recent
        for key in range(first_key, first_key + self.experts):
            habit[key] -= habit[key] >> self.habit_shift
            recent[key] -= recent[key] >> self.recent_shift
            if key - first_key in used:
                habit[key] += self.habit_use
                recent[key] += self.recent_use
        self._look_again(first_key // self.experts)

    def lease(self, key: int) -> int | None:
        slot = self._slot_of.get(key)
        if slot is not None:
            self._leased.add(key)
            self._look_again(key // self.experts)
        return slot

    def admit(self, key: int, *, cold: bool = False, must: bool = False) -> int | None:
        """The lowest free slot of the layer's group, else that of the expert of least worth (the lowest of equals), unless
        ``key`` is worth no more or ``cold``."""
        layer = key // self.experts
        slot = self._free_slot(*self.spans[layer])
        if slot is None:
            least, slot = self._victim(layer)
            refused = cold or least >= (self._habit[key] + self._recent[key]) * self._near[layer][layer]
            if least >= LEASED or (refused and not must):
                return None
            old = self._owner[slot]
            del self._slot_of[old]
            self._keys_in[old // self.experts].discard(old)
            self._look_again(old // self.experts)
            self.evictions += 1
        self._slot_of[key] = slot
        self._owner[slot] = key
        self._keys_in[layer].add(key)
        self._leased.add(key)
        self._look_again(layer)
        return slot

    def _free_slot(self, first: int, end: int) -> int | None:
        if len(self._slot_of) == self.slots:
            return None
        return next((slot for slot in range(first, end) if self._owner[slot] == FREE), None)

    def _victim(self, layer: int) -> tuple[int, int]:
        """Least worth as seen from ``layer``, LEASED or more where every slot of the group is leased, and the slot."""
        first, end = self._together[layer]
        least, least_slot = self._least, self._least_slot
        for stale in [stale for stale in self._stale if first <= stale < end]:
            keys = self._keys_in[stale] - self._leased
            pairs = [(self._habit[key] + self._recent[key], self._slot_of[key]) for key in keys]
            least[stale], least_slot[stale] = min(pairs, default=(LEASED, FREE))
            self._stale.discard(stale)
        worth = list(map(mul, least[first:end], self._near[layer][first:end]))
        lowest = min(worth)
        if worth.count(lowest) == 1:
            return lowest, least_slot[first + worth.index(lowest)]
        return lowest, min(slot for slot, equal in zip(least_slot[first:end], worth, strict=True) if equal == lowest)

    def _look_again(self, layer: int) -> None:
        """What is known of the layer's expert of least worth no longer holds."""
        self._stale.add(layer)

    def release_all(self) -> None:
        for key in self._leased:
            self._look_again(key // self.experts)
        self._leased.clear()

    def _beyond(self, free: list[int], wanted: int) -> list[int]:
        groups = sorted(set(self.spans))
        return [slot for first, end in groups for slot in [s for s in free if first <= s < end][wanted:]]

    def clear(self) -> None:
        """Forget every resident, and every use."""
        self._forget()
        super().clear()

    def uses(self) -> tuple[list[int], list[int]]:
        return self._habit[:], self._recent[:]

    def restore(self, residents: Mapping[int, int], habit: Sequence[int] = (), recent: Sequence[int] = ()) -> None:
        """As the base class says; counts that are not given stay as they are."""
        if habit:
            self._habit, self._recent = list(habit), list(recent)
        super().restore(residents)

    def _derive(self) -> None:
        self._owner = [FREE] * self.slots
        self._keys_in: list[set[int]] = [set() for _ in range(self.layers)]
        self._least, self._least_slot = [LEASED] * self.layers, [FREE] * self.layers
        self._stale = set(range(self.layers))
        for key, slot in self._slot_of.items():
            self._owner[slot] = key
            self._keys_in[key // self.experts].add(key)

    def check(self) -> None:
        super().check()
        layers = [layer for layer in range(self.layers) if layer not in self._stale]
        known = [(self._least[layer], self._least_slot[layer]) for layer in layers]
        kept = self._owner, self._keys_in
        self._derive()
        if kept != (self._owner, self._keys_in):
            raise AssertionError(f"owners {kept} contradict the table, by which they are {self._owner, self._keys_in}")
        for layer in range(self.layers):
            self._victim(layer)
        again = [(self._least[layer], self._least_slot[layer]) for layer in layers]
        if known != again:
            raise AssertionError(f"of the layers {layers} the least worth and its slot are {again}, not {known}")
        for key, slot in self._slot_of.items():
            first, end = self.spans[key // self.experts]
            if not first <= slot < end:
                raise AssertionError(f"expert {key} lies in slot {slot}, outside of its group's {first} to {end - 1}")


def near(now: int, layer: int, layers: int) -> int:
    """What the counts of a layer's experts are multiplied by at layer ``now``: up to NEAREST the sooner it comes, FAR_LESS less
    where that is a token away."""
    return NEAREST - FAR_LESS * ((layer - now - 1) % layers + 1) // layers


def layer_spans(slots: int, layers: int) -> list[tuple[int, int]]:
    """First slot and end of the group of each layer: consecutive layers share slots in proportion to their number. A group has
    more than ``GROUP_SLOTS`` only where a single layer does."""
    groups = min(layers, -(-slots // GROUP_SLOTS))
    while groups < min(layers, slots) and -(-slots * -(-layers // groups) // layers) > GROUP_SLOTS:
        groups += 1
    starts = [-(-group * layers // groups) for group in range(groups + 1)]
    spans = [(slots * first // layers, slots * end // layers) for first, end in zip(starts, starts[1:], strict=False)]
    return [spans[layer * groups // layers] for layer in range(layers)]


def make_policy(choice: str, slots: int, layers: int, experts: int) -> SlotPolicy:
    """The policy that ``expert_cache_policy`` names: "lru", "aged", or "auto", which is "aged"."""
    return LruPolicy(slots) if choice == "lru" else AgedPolicy(slots, layers, experts)
