"""Plans: no leased victim, no place used twice in a wave, ascending experts, a prompt that leaves decoding its experts."""

from __future__ import annotations

import random

import pytest

from airllm.experts import policy as policies
from airllm.experts.plan import PlanCounts, plan_layer, waves
from airllm.experts.policy import LruPolicy, make_policy


def check_steps(steps, experts, policy, scratch, first_key):
    assert [s.expert for s in steps] == sorted(experts), "every expert once, in ascending order"
    slots_used = [s.place for s in steps if s.cached]
    assert len(set(slots_used)) == len(slots_used), "a slot serves one expert a layer"
    table = policy.residents()
    for step in steps:
        if step.cached:
            assert table[first_key + step.expert] == step.place, "what is planned as cached is still in the table at the end"
        else:
            assert step.copy and policy.slots <= step.place < policy.slots + scratch
    for wave in waves(steps, scratch):
        places = [s.place for s in wave]
        assert len(set(places)) == len(places) <= policy.slots + scratch
    assert [s for w in waves(steps, scratch) for s in w] == steps


@pytest.mark.parametrize("choice", ["lru", "aged", "aged in groups"])
@pytest.mark.parametrize("slots", [2, 3, 5, 8, 30])
def test_random_forwards_keep_every_rule(slots, choice, monkeypatch):
    num_experts, layers = 8, 3
    monkeypatch.setattr(policies, "GROUP_SLOTS", 3 if choice == "aged in groups" else 2048)
    draw, policy = random.Random(slots), make_policy(choice, slots, layers, num_experts)
    scratch = 0 if slots >= num_experts * layers else 2
    for _ in range(3000):
        layer = draw.randrange(layers)
        experts = sorted(draw.sample(range(num_experts), draw.randrange(0, num_experts + 1)))
        admit = set(draw.sample(experts, draw.randrange(0, len(experts) + 1)))
        counts, resident = PlanCounts(), set(policy.residents())
        steps = plan_layer(
            policy,
            first_key=layer * num_experts,
            experts=experts,
            admit=admit,
            scratch=scratch,
            keep_free=draw.randrange(0, 4),
            counts=counts,
        )
        check_steps(steps, experts, policy, scratch, layer * num_experts)
        policy.check()
        hits = {s.expert for s in steps if not s.copy}
        assert hits == {e for e in experts if layer * num_experts + e in resident}, "a resident expert is a hit"
        assert counts.hits + counts.misses == len(experts)
        assert counts.bypasses == sum(not s.cached for s in steps)
        policy.release_all()


def test_a_later_hit_is_not_evicted_by_an_earlier_miss():
    policy = LruPolicy(2)
    policy.admit(6), policy.admit(7)
    policy.release_all()
    steps = plan_layer(policy, first_key=0, experts=[0, 1, 6, 7], admit={0, 1, 6, 7}, scratch=2)
    assert [(s.expert, s.copy, s.cached) for s in steps] == [
        (0, True, False),
        (1, True, False),
        (6, False, True),
        (7, False, True),
    ]


def test_a_prompt_leaves_behind_only_what_its_last_tokens_used():
    policy = LruPolicy(4)
    policy.admit(100), policy.admit(101), policy.admit(102)
    policy.release_all()
    steps = plan_layer(policy, first_key=0, experts=list(range(8)), admit={3, 5}, scratch=2, keep_free=4)
    assert {s.expert for s in steps if s.cached} == {3, 5}
    assert set(policy.residents()) == {101, 102, 3, 5}


def test_free_slots_beyond_the_reserve_take_prompt_experts_as_first_victims():
    policy = LruPolicy(6)
    plan_layer(policy, first_key=0, experts=[0, 1, 2, 3], admit={3}, scratch=2, keep_free=4)
    policy.release_all()
    assert set(policy.residents()) == {0, 1, 3}
    for key in range(50, 55):
        policy.admit(key)
    assert 3 in policy and 0 not in policy and 1 not in policy


def test_what_decoding_used_outlives_the_experts_a_prompt_left_in_free_slots():
    policy = LruPolicy(6)
    policy.admit(100)
    policy.release_all()
    plan_layer(policy, first_key=0, experts=[0, 1, 2, 3], admit=set(), scratch=2, keep_free=2)
    policy.release_all()
    assert set(policy.residents()) == {100, 0, 1, 2}
    for key in range(50, 55):
        policy.admit(key)
    assert 100 in policy and not {0, 1, 2} & set(policy.residents())


def test_no_more_decoded_experts_pass_through_scratch_than_it_has_places():
    """Experts in decode are computed together: a third one would wait for the first to be read."""
    policy = make_policy("aged", 4, 1, 16)
    for _ in range(40):
        plan_layer(policy, first_key=0, experts=[0, 1, 2, 3], admit={0, 1, 2, 3}, scratch=2)
        policy.release_all()
    passing = [4, 5, 6, 7]
    steps = plan_layer(policy, first_key=0, experts=passing, admit=set(passing), scratch=2)
    assert [(step.place, step.cached) for step in steps] == [(4, False), (5, False), (0, True), (1, True)]


def test_what_a_prompt_does_not_keep_forces_nothing_in():
    """Experts that only pass by may be many: those of the last token still have to be worth their slot."""
    policy = make_policy("aged", 2, 1, 16)
    for _ in range(40):
        plan_layer(policy, first_key=0, experts=[14, 15], admit={14, 15}, scratch=2)
        policy.release_all()
    plan_layer(policy, first_key=0, experts=list(range(12)), admit={10, 11}, scratch=2, keep_free=1)
    assert set(policy.residents()) == {14, 15}


def test_a_prompts_fillers_never_evict_what_decoding_used_under_the_aged_policy():
    policy = make_policy("aged", 4, 1, 16)
    plan_layer(policy, first_key=0, experts=[0, 1], admit={0, 1}, scratch=2)
    policy.release_all()
    steps = plan_layer(policy, first_key=0, experts=list(range(2, 12)), admit={11}, scratch=2, keep_free=1)
    assert [step.expert for step in steps if step.cached] == [2, 11]
    assert set(policy.residents()) == {0, 1, 2, 11}


@pytest.mark.parametrize("choice", ["lru", "aged"])
def test_a_model_that_fits_whole_needs_no_scratch(choice):
    policy = make_policy(choice, 8, 1, 8)
    steps = plan_layer(policy, first_key=0, experts=list(range(8)), admit=set(), scratch=0, keep_free=100)
    assert all(s.cached for s in steps)


def test_no_routed_expert_gives_no_step_and_no_wave():
    assert plan_layer(LruPolicy(2), first_key=0, experts=[], admit=set(), scratch=2) == []
    assert list(waves([], 2)) == []
