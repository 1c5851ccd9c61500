"""The LRU with leases against a simple model: lists and sets, thousands of random steps, invariants after each."""

from __future__ import annotations

import random

import pytest

from airllm.experts.policy import LruPolicy


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
def test_policy_equals_the_simple_model_for_thousands_of_steps(slots):
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


def test_a_leased_expert_is_never_a_victim():
    policy = LruPolicy(2)
    policy.admit(1), policy.admit(2)
    assert policy.admit(3) is None
    assert set(policy.residents()) == {1, 2}
    policy.release_all()
    policy.lease(1)
    policy.admit(3)
    assert set(policy.residents()) == {1, 3}


def test_a_slot_keeps_its_expert_until_eviction():
    policy = LruPolicy(4)
    where = {key: policy.admit(key) for key in range(4)}
    policy.release_all()
    assert {key: policy.lease(key) for key in range(4)} == where


@pytest.mark.parametrize("broken", ["two experts in a slot", "a slot lost", "a lease without resident"])
def test_check_notices_each_broken_invariant(broken):
    policy = LruPolicy(3)
    policy.admit(1), policy.admit(2)
    if broken == "two experts in a slot":
        policy._slot_of[2] = policy._slot_of[1]
    elif broken == "a slot lost":
        policy._free.clear()
    else:
        policy._leased.add(99)
    with pytest.raises(AssertionError):
        policy.check()


def test_recover_rebuilds_the_free_list_an_interrupt_tore():
    policy = LruPolicy(3)
    policy.admit(1), policy.admit(2)
    policy._free.clear()  # as if the interrupt had come between the table and the list
    policy.recover([2])
    policy.check()
    assert set(policy.residents()) == {1} and policy.free == 2


def test_zero_slots_are_refused():
    with pytest.raises(ValueError, match="at least 1"):
        LruPolicy(0)
