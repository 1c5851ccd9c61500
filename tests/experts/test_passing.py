"""Passing experts, fuzzed against a model of the device that does everything in the order in which it is enqueued."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from airllm.experts.passing import Passing
from airllm.experts.plan import Step

SLOTS, SCRATCH = 12, 2


class Device:
    """What each place holds once everything that was enqueued until now has run."""

    def __init__(self, ahead):
        self.holds = {place: key for key, place in ahead.items()}
        self.copies = Counter()
        self.begun = []

    def bring(self, step, place, at):
        if at is None:
            self.copies[step.key] += 1
        else:
            assert self.holds[at] == step.key, "what is copied on must still lie there"
        self.holds[place] = step.key
        self.begun.append(step.key)


def run(steps, places, ahead):
    hits = {step.key: step.place for step in steps if step.cached and not step.copy}
    device = Device({**ahead, **hits})
    passing = Passing(steps, places, ahead, device.bring)
    for step in steps:
        place = passing.place_of(step)
        assert device.holds[place] == step.key, f"place {place} is read for expert {step.key}"
        passing.done(step)
    return device, passing


def draw_layer(draw):
    """Steps as a plan gives them, places that it leaves over, and what was fetched ahead into any places before it."""
    experts = sorted(draw.sample(range(16), draw.randrange(1, 17)))
    slots = draw.sample(range(SLOTS), SLOTS)
    steps = []
    for expert in experts:
        cached = bool(slots) and draw.random() < 0.5
        place = slots.pop() if cached else SLOTS + len(steps) % SCRATCH
        steps.append(Step(expert, expert, place, copy=not cached or draw.random() < 0.7, cached=cached))
    idle = sorted(slots)[draw.randrange(0, len(slots) + 1) :]
    places = [*range(SLOTS, SLOTS + SCRATCH), *idle]
    hits = {step.place for step in steps if step.cached and not step.copy}
    missing = [key for key in range(16) if key not in {step.key for step in steps if step.cached and not step.copy}]
    somewhere = draw.sample([p for p in range(SLOTS + SCRATCH) if p not in hits], draw.randrange(0, 8))
    ahead = dict(zip(draw.sample(missing, min(len(missing), len(somewhere))), somewhere, strict=False))
    return steps, places, ahead


def test_random_layers_read_what_they_should_and_lose_no_place():
    draw = random.Random(0)
    given_up = 0
    for _ in range(5_000):
        steps, places, ahead = draw_layer(draw)
        device, passing = run(steps, places, ahead)
        spare = list(iter(passing.spare, None))
        assert set(spare) <= set(places) and len(set(spare)) == len(spare)
        slots = {step.place: step.key for step in steps if step.cached}
        for step in steps:
            copied = device.copies[step.key]
            lay_there = step.key in ahead and slots.get(ahead[step.key], step.key) == step.key
            needed = 1 if step.copy and not lay_there else 0
            given_up += copied > needed
            assert needed <= copied <= needed + (lay_there and not step.cached)
    assert 0 < given_up < 1000, "when every place holds something for later, one is given up and fetched again"


@pytest.mark.parametrize(("places", "early"), [(2, 2), (6, 6), (16, 10)])
def test_as_many_copies_run_ahead_as_there_are_places(places, early):
    steps = [Step(e, e, 100 + e % 2, copy=True, cached=False) for e in range(10)]
    device = Device({})
    passing = Passing(steps, range(100, 100 + places), {}, device.bring)
    assert device.begun == list(range(early))
    for number, step in enumerate(steps):
        passing.place_of(step)
        passing.done(step)
        assert len(device.begun) == min(10, number + 1 + places)


def test_places_are_to_spare_only_when_no_expert_waits_for_one():
    steps = [Step(e, e, 100 + e % 2, copy=True, cached=False) for e in range(3)]
    passing = Passing(steps, [100, 101], {}, Device({}).bring)
    assert passing.spare() is None
    passing = Passing(steps, [100, 101, 7, 8], {}, Device({}).bring)
    assert passing.spare() == 8 and passing.spare() is None
    passing.done(steps[0])
    assert passing.spare() == 100


def test_what_was_fetched_ahead_is_read_where_it_lies():
    steps = [Step(e, e, 100 + e % 2, copy=True, cached=False) for e in range(4)]
    device, passing = run(steps, [100, 101, 5, 6], {0: 5, 1: 6, 2: 100, 3: 101})
    assert device.begun == []
    assert list(iter(passing.spare, None)) == [5, 6, 100, 101], "those least recently read come first"


def test_an_expert_that_got_a_slot_is_copied_on_before_its_place_is_used_again():
    steps = [Step(0, 0, 100, copy=True, cached=False), Step(1, 1, 3, copy=True, cached=True)]
    device, _ = run(steps, [100], {1: 100})
    assert device.begun == [1, 0] and device.copies == {0: 1}


def test_an_entry_whose_slot_went_to_another_expert_is_void():
    steps = [Step(0, 0, 3, copy=True, cached=True), Step(1, 1, 100, copy=True, cached=False)]
    device, _ = run(steps, [100], {1: 3})
    assert device.copies == {0: 1, 1: 1}


def test_with_every_place_held_for_later_the_last_is_given_up():
    steps = [Step(e, e, 100 + e % 2, copy=True, cached=False) for e in range(3)]
    device, _ = run(steps, [100, 101], {1: 100, 2: 101})
    assert device.begun == [0, 2] and device.copies == {0: 1, 2: 1}
