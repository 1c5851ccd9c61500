"""PURE: one layer's experts on their way through the device: which copy starts when, and into which place. No torch here.

Cached experts have their slots. The others pass: each borrows a place for as long as it computes. Scratch slots are such
places, and while a prompt runs so is every slot that holds nothing. The more there are, the further copies run ahead.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence

from airllm.experts.plan import Step

Bring = Callable[[Step, int, "int | None"], None]


class Passing:
    """The copies of one layer's ``steps``, started as early as there are places.

    Args:
        steps: in ascending order, in which they will be computed.
        places: scratch and empty slots, none of which ``steps`` caches an expert in; those least recently read first.
        ahead: where experts lie that were fetched before the routing was known: place by key. An entry whose slot ``steps``
            give to another expert is void.
        bring: starts the copy of a step's expert into a place after the last reader of that place; the third argument is
            where on the device the expert lies already (perhaps in that very place), or None.

    For each step in turn the caller asks `place_of`, computes, and then says `done`.
    """

    def __init__(self, steps: Sequence[Step], places: Iterable[int], ahead: Mapping[int, int], bring: Bring) -> None:
        self._bring = bring
        slots = {step.place: step.key for step in steps if step.cached}
        here = {key: place for key, place in ahead.items() if slots.get(place, key) == key}
        self._passing = {step.key: step for step in steps if not step.cached}
        self._at = {key: here[key] for key in self._passing if key in here}
        held = set(self._at.values())
        lent = list(places)
        self._lent = set(lent)
        self._free = deque(place for place in lent if place not in held)
        self._waiting: deque[Step] = deque()
        # Moves on the device come first: the places they come from may be among the free ones.
        for step in steps:
            if step.cached and step.copy and step.key in here:
                bring(step, step.place, here[step.key])
        for step in steps:
            if step.cached and step.copy and step.key not in here:
                bring(step, step.place, None)
            elif not step.cached and step.key not in self._at:
                self._waiting.append(step)
                self._start()

    def _start(self) -> None:
        while self._waiting and self._free:
            step = self._waiting.popleft()
            self._at[step.key] = place = self._free.popleft()
            self._bring(step, place, None)

    def place_of(self, step: Step) -> int:
        """Where the expert lies, or will when the copy under way has ended."""
        if step.cached:
            return step.place
        if step.key not in self._at:
            self._give_up_last()
        return self._at[step.key]

    def next_of(self, steps: Sequence[Step], most: int) -> Sequence[Step]:
        """The first of ``steps``, which come next, that may compute together: up to ``most``, whose copies are under way, and
        so few that others are copied meanwhile."""
        few = max(1, min(most, len(self._lent) // 2))
        ready = 1
        while ready < min(few, len(steps)) and (steps[ready].cached or steps[ready].key in self._at):
            ready += 1
        return steps[:ready]

    def _give_up_last(self) -> None:
        """Every place holds an expert that comes later: the last of them is fetched again when its time comes."""
        key = max(self._at)
        self._free.append(self._at.pop(key))
        self._start()
        self._waiting = deque(sorted((*self._waiting, self._passing[key]), key=lambda step: step.key))

    def done(self, step: Step) -> None:
        """The last reader of the step's expert was enqueued: another one may be copied over it."""
        if step.cached:
            return
        place = self._at.pop(step.key)
        if place in self._lent:
            self._free.append(place)
            self._start()

    def spare(self) -> int | None:
        """A place that nobody waits for, the least recently read one, taken out for good; None when there is none."""
        return None if self._waiting or not self._free else self._free.popleft()
