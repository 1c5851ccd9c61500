"""The policies with leases against simple models: lists and sets, thousands of random steps, invariants after each."""

from __future__ import annotations

import random

import pytest

from airllm.experts import policy as policies
from airllm.experts.policy import AgedPolicy, LruPolicy, SlotPolicy, layer_spans, make_policy

EITHER = pytest.mark.parametrize("choice", ["lru", "aged"])


def policy_of(choice: str, slots: int, layers: int = 2) -> SlotPolicy:
    return make_policy(choice, slots, layers, experts=50)


class ModelLru:
    """The same rules written the slow way: a list from oldest to youngest."""

    def __init__(self, slots: int) -> None:
        self.slots, self.order, self.leased = slots, [], set()

    def lease(self, key):
        if key not in self.order:
            return False
        self.order.remove(key)
        self.order.append(key)
        self.leased.add(key)
        return True

    def admit(self, key, cold):
        if len(self.order) == self.slots:
            victims = [k for k in self.order if k not in self.leased]
            if not victims:
                return False
            self.order.remove(victims[0])
        self.order.insert(0 if cold else len(self.order), key)
        self.leased.add(key)
        return True


@pytest.mark.parametrize("slots", [1, 2, 3, 7, 73])
def test_the_lru_equals_its_simple_model_for_thousands_of_steps(slots):
    draw, policy, model = random.Random(slots), LruPolicy(slots), ModelLru(slots)
    for _ in range(6000):
        key, action = draw.randrange(3 * slots), draw.random()
        if action < 0.8:
            slot = policy.lease(key)
            assert (slot is not None) == model.lease(key)
            if slot is None:
                cold = draw.random() < 0.2
                before = policy.residents()
                slot = policy.admit(key, cold=cold)
                assert (slot is not None) == model.admit(key, cold)
                lost = set(before) - set(policy.residents())
                assert len(lost) <= 1 and not lost & (model.leased - {key})
        elif action < 0.95:
            policy.release_all()
            model.leased.clear()
        elif action < 0.99:
            policy.drop([key])
            model.order = [k for k in model.order if k != key]
            model.leased.discard(key)
        else:
            policy.recover([key])
            model.order = [k for k in model.order if k != key]
            model.leased.clear()
        policy.check()
        assert list(policy.residents()) == model.order


class ModelAged:
    """The same rules written the slow way, with counts in fractions of a use instead of shifted integers."""

    def __init__(self, slots: int, layers: int, experts: int) -> None:
        self.layers, self.experts = layers, experts
        self.groups = [range(*span) for span in layer_spans(slots, layers)]
        self.holder: dict[int, int] = {}
        self.habit, self.recent = [0] * (layers * experts), [0] * (layers * experts)
        self.leased: set[int] = set()

    def worth(self, key, now):
        ahead = next(n for n in range(1, self.layers + 1) if (now + n) % self.layers == key // self.experts)
        return (self.habit[key] + self.recent[key]) * (128 - 64 * ahead // self.layers)

    def begin(self, layer, used):
        for key in range(layer * self.experts, (layer + 1) * self.experts):
            self.habit[key] = self.habit[key] - self.habit[key] // 64 + 65536 * (key % self.experts in used)
            self.recent[key] = -(-self.recent[key] // 2) + 5 * 65536 * (key % self.experts in used)

    def lease(self, key):
        slot = next((s for s, k in self.holder.items() if k == key), None)
        if slot is not None:
            self.leased.add(key)
        return slot

    def admit(self, key, cold, must):
        now = key // self.experts
        group = self.groups[now]
        free = [s for s in group if s not in self.holder]
        held = [s for s in group if s in self.holder and self.holder[s] not in self.leased]
        taken = sorted((self.worth(self.holder[s], now), s) for s in held)
        if free:
            slot = free[0]
        elif taken and (must or (not cold and self.worth(key, now) > taken[0][0])):
            slot = taken[0][1]
        else:
            return None
        self.holder[slot] = key
        self.leased.add(key)
        return slot

    def forget(self, key):
        self.holder = {s: k for s, k in self.holder.items() if k != key}
        self.leased.discard(key)


@pytest.mark.parametrize(("slots", "group"), [(1, 512), (2, 512), (7, 512), (7, 4), (13, 5), (20, 512), (24, 4)])
def test_the_aged_policy_equals_its_simple_model_for_thousands_of_steps(slots, group, monkeypatch):
    monkeypatch.setattr(policies, "GROUP_SLOTS", group)
    layers, experts = 3, 8
    draw = random.Random(slots * group)
    policy, model = AgedPolicy(slots, layers, experts), ModelAged(slots, layers, experts)
    refused = 0
    for _ in range(3000):
        layer, used = draw.randrange(layers), draw.sample(range(experts), draw.randrange(4))
        policy.begin(layer * experts, set(used))
        model.begin(layer, used)
        for expert in draw.sample(range(experts), draw.randrange(experts)):
            key = layer * experts + expert
            slot = policy.lease(key)
            assert slot == model.lease(key)
            if slot is None:
                cold, must, before = draw.random() < 0.2, draw.random() < 0.2, policy.residents()
                slot = policy.admit(key, cold=cold, must=must)
                assert slot == model.admit(key, cold, must)
                refused += slot is None
                lost = set(before) - set(policy.residents())
                assert len(lost) <= 1 and not lost & (model.leased - {key})
        if draw.random() < 0.9:
            policy.release_all()
            model.leased.clear()
        key = draw.randrange(layers * experts)
        if draw.random() < 0.05:
            policy.drop([key])
            model.forget(key)
        elif draw.random() < 0.05:
            policy.recover([key])
            model.forget(key)
            model.leased.clear()
        policy.check()
        assert policy.residents() == {key: slot for slot, key in model.holder.items()}
        assert policy.uses() == (model.habit, model.recent)
    assert refused > 0 or slots == layers * experts


def route(policy: SlotPolicy, layer: int, experts: list[int]) -> list[bool]:
    """One decoded token's call of a layer of 50 experts: which of them were hits."""
    policy.begin(50 * layer, set(experts))
    hits = [policy.lease(50 * layer + expert) is not None for expert in experts]
    for expert, hit in zip(experts, hits, strict=True):
        if not hit:
            policy.admit(50 * layer + expert)
    policy.release_all()
    policy.check()
    return hits


def test_a_cache_smaller_than_one_token_is_not_scanned_empty():
    """Two layers with one expert each, and one slot."""
    hits = {}
    for choice in ("lru", "aged"):
        policy = policy_of(choice, 1)
        hits[choice] = sum(hit for _ in range(20) for layer in (0, 1) for hit in route(policy, layer, [7]))
    assert hits == {"lru": 0, "aged": 19}


def test_an_expert_with_a_habit_outlives_a_passer_by_and_not_a_change_of_habits():
    policy = policy_of("aged", 1)
    for _ in range(40):
        route(policy, 0, [7])
    route(policy, 0, [8])
    assert list(policy.residents()) == [7]
    for _ in range(40):
        route(policy, 0, [8])
    assert list(policy.residents()) == [8]


@pytest.mark.parametrize("now", range(4))
def test_of_equal_experts_that_goes_whose_layer_is_furthest_away(now):
    policy = policy_of("aged", 3, layers=4)
    for layer in {0, 1, 2, 3} - {now}:
        route(policy, layer, [5])
    route(policy, now, [2])
    assert now not in [key // 50 for key in policy.residents()], "worth no more than those that come sooner"
    route(policy, now, [2])
    assert {key // 50 for key in policy.residents()} == {0, 1, 2, 3} - {(now - 1) % 4}


def test_uses_stop_counting_in_the_end():
    policy = policy_of("aged", 1)
    route(policy, 0, [7])
    for _ in range(2000):
        policy.begin(0, set())
    habit, recent = policy.uses()
    assert habit[7] + recent[7] <= 64, "a thousandth of a use"


def test_counts_stay_within_32_bits():
    policy = policy_of("aged", 1)
    for _ in range(3000):
        policy.begin(0, {0})
    habit, recent = policy.uses()
    assert 2**20 < habit[0] + recent[0] < policies.LEASED // policies.NEAREST


@pytest.mark.parametrize(
    ("slots", "layers", "groups"),
    [(73, 32, 1), (5, 32, 1), (2048, 48, 1), (2049, 48, 2), (3686, 48, 2), (12032, 94, 6), (6000, 28, 4), (99, 3, 1)],
)
def test_layers_share_slots_in_groups_of_like_size(slots, layers, groups):
    spans = layer_spans(slots, layers)
    distinct = sorted(set(spans))
    assert len(spans) == layers and spans == sorted(spans) and len(distinct) == groups
    assert [first for first, _ in distinct] == [0, *(end for _, end in distinct[:-1])] and distinct[-1][1] == slots
    for first, end in distinct:
        share = slots * spans.count((first, end)) / layers
        assert abs(end - first - share) < 1 and end - first <= 2048


@pytest.mark.parametrize("group", [1, 2, 7, 512])
def test_no_layer_is_without_slots_to_share(group, monkeypatch):
    monkeypatch.setattr(policies, "GROUP_SLOTS", group)
    for layers in range(1, 65):
        for slots in range(1, 200):
            assert all(first < end for first, end in layer_spans(slots, layers)), (layers, slots)


@pytest.mark.parametrize(("layers", "experts"), [(32, 16), (48, 128), (61, 256), (3, 700)])
def test_a_model_that_fits_whole_has_a_slot_for_every_expert_of_each_group(layers, experts):
    policy = AgedPolicy(layers * experts, layers, experts)
    for key in range(layers * experts):
        assert policy.admit(key, cold=True) is not None
    policy.check()
    assert policy.evictions == 0 and policy.free == 0


def test_the_counts_come_back_with_the_table():
    policy, other = policy_of("aged", 4), policy_of("aged", 4)
    for expert in (3, 9, 3, 11, 3, 4, 5):
        route(policy, 0, [expert])
    other.restore(policy.residents(), *policy.uses())
    other.check()
    assert other.residents() == policy.residents() and other.uses() == policy.uses()
    assert route(other, 0, [8]) == route(policy, 0, [8]) and other.residents() == policy.residents()


def test_clearing_forgets_uses_too():
    policy = policy_of("aged", 2)
    route(policy, 1, [3])
    policy.clear()
    policy.check()
    assert len(policy) == 0 and not any(sum(policy.uses(), []))


@EITHER
def test_a_leased_expert_is_never_a_victim(choice):
    policy = policy_of(choice, 2)
    policy.admit(1), policy.admit(2)
    assert policy.admit(3) is None and policy.admit(3, must=True) is None
    assert set(policy.residents()) == {1, 2}
    policy.release_all()
    policy.lease(1)
    policy.admit(3, must=True)
    assert set(policy.residents()) == {1, 3}


@EITHER
def test_a_slot_keeps_its_expert_until_eviction(choice):
    policy = policy_of(choice, 4)
    where = {key: policy.admit(key) for key in range(4)}
    policy.release_all()
    assert {key: policy.lease(key) for key in range(4)} == where


@EITHER
@pytest.mark.parametrize("broken", ["two experts in a slot", "a slot lost", "a lease without resident", "no such slot"])
def test_check_notices_each_broken_invariant(broken, choice):
    policy = policy_of(choice, 3)
    policy.admit(1), policy.admit(2)
    if broken == "two experts in a slot":
        policy._slot_of[2] = policy._slot_of[1]
    elif broken == "no such slot":
        policy._slot_of[2] = 3
    elif broken == "a slot lost" and choice == "lru":
        policy._free.clear()
    elif broken == "a slot lost":
        policy.release_all()
        policy._victim(0)
        policy._least_slot[0] = 2
    else:
        policy._leased.add(99)
    with pytest.raises(AssertionError):
        policy.check()


@EITHER
def test_recover_rebuilds_what_an_interrupt_tore(choice):
    policy = policy_of(choice, 3)
    policy.admit(1), policy.admit(2)
    if choice == "lru":
        policy._free.clear()  # as if the interrupt had come between the table and the list
    else:
        policy._owner[policy.residents()[1]] = policies.FREE
    policy.recover([2])
    policy.check()
    assert set(policy.residents()) == {1} and policy.free == 2


def test_an_expert_outside_of_its_groups_slots_is_noticed(monkeypatch):
    monkeypatch.setattr(policies, "GROUP_SLOTS", 2)
    policy = policy_of("aged", 4)
    policy.restore({60: 0})
    with pytest.raises(AssertionError, match="outside"):
        policy.check()


@EITHER
def test_zero_slots_are_refused(choice):
    with pytest.raises(ValueError, match="at least 1"):
        policy_of(choice, 0)
