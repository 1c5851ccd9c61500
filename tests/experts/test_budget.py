"""Budget arithmetic against the numbers of the first model, and at the edges."""

from __future__ import annotations

import math
import random

import pytest

from airllm.errors import BudgetError
from airllm.experts.budget import GIB, auto_budget_bytes, most_scratch, plan_slots, smallest_budget_gib

PHI_TINY_EXPERT = 3 * 4096 * 448 * 2


def test_phi_tiny_at_three_quarters_of_a_gib_gets_73_slots_and_2_scratch():
    plan = plan_slots(budget_bytes=int(0.75 * GIB), expert_bytes=PHI_TINY_EXPERT, total_experts=512, top_k=2)
    assert (plan.slots, plan.scratch) == (73, 2)
    assert plan.scratch_bytes == 2 * PHI_TINY_EXPERT


@pytest.mark.parametrize(("width", "slots"), [(960, 34), (6400, 5)])
def test_siblings_get_the_published_number_of_slots(width, slots):
    plan = plan_slots(budget_bytes=int(0.75 * GIB), expert_bytes=3 * 4096 * width * 2, total_experts=512, top_k=2)
    assert plan.slots == slots


def test_a_budget_above_the_model_is_capped_and_needs_no_scratch():
    plan = plan_slots(budget_bytes=10**15, expert_bytes=1000, total_experts=24, top_k=2)
    assert (plan.slots, plan.scratch) == (24, 0)


@pytest.mark.parametrize("experts", [2, 3])
def test_exactly_one_tokens_experts_and_one_more_work(experts):
    assert plan_slots(budget_bytes=experts * 1000, expert_bytes=1000, total_experts=24, top_k=2).slots == experts


@pytest.mark.parametrize("budget", [1999, 0, -1, -(10**12)])
def test_below_one_tokens_experts_the_error_has_both_numbers_and_a_value_that_works(budget):
    with pytest.raises(BudgetError) as caught:
        plan_slots(budget_bytes=budget, expert_bytes=1000, total_experts=24, top_k=2)
    assert "2000 B" in str(caught.value) and f"{budget} B" in str(caught.value)
    assert "at least" in str(caught.value)


def test_the_suggested_budget_always_works():
    draw = random.Random(0)
    for _ in range(2000):
        expert_bytes, top_k = draw.randrange(1, 10**9), draw.randrange(1, 17)
        total = draw.randrange(top_k, 10_000)
        suggested = smallest_budget_gib(expert_bytes, top_k)
        plan = plan_slots(
            budget_bytes=math.floor(suggested * GIB), expert_bytes=expert_bytes, total_experts=total, top_k=top_k
        )
        assert top_k <= plan.slots <= total
        assert suggested <= 1.1001 * top_k * expert_bytes / GIB, "and asks for little more than is needed"
        assert plan.slot_bytes <= max(plan.budget_bytes, 0)


def test_auto_leaves_what_generation_needs():
    left = auto_budget_bytes(free_bytes=1000, kv_cache_bytes=100, workspace_bytes=200, reserve_bytes=50, scratch_bytes=30)
    assert left == 620


@pytest.mark.parametrize(
    ("engine", "top_k", "slots", "scratch"),
    [
        ("device", 2, 73, 2),  # PhiMoE, Mixtral: as with the plain engine
        ("device", 8, 120, 8),  # every expert of a token can pass by
        ("plain", 8, 120, 2),
        ("auto", 8, 120, 2),
        ("device", 8, 20, 5),  # a small budget is not outgrown by what lies outside of it
        ("device", 8, 8, 2),
        ("device", 1, 40, 2),
        ("device", 8, 500, 0),  # the whole model
    ],
)
def test_the_device_engine_gets_a_scratch_slot_for_each_expert_of_a_token(engine, top_k, slots, scratch):
    plan = plan_slots(
        budget_bytes=slots * 1000, expert_bytes=1000, total_experts=500, top_k=top_k, scratch=most_scratch(engine, top_k)
    )
    assert (plan.slots, plan.scratch) == (slots, scratch)
