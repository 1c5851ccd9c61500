"""The device tables and their twin of the routing kernel against the pure policy, on the same routing."""

from __future__ import annotations

import random

import pytest
import torch

from airllm.experts import kernel_twins as twins
from airllm.experts import policy as policies
from airllm.experts.device_tables import AgedTables, Counts, Decisions, DeviceTables, tables_for
from airllm.experts.plan import PlanCounts, plan_layer
from airllm.experts.policy import AgedPolicy, LruPolicy, SlotPolicy

CPU = torch.device("cpu")


def step(tables: Decisions, policy: SlotPolicy, layer: int, ids: torch.Tensor, experts: int, counts: PlanCounts) -> None:
    """One layer's call through both, with everything that must be equal after it."""
    twins.route(tables, ids, layer * experts, experts)
    used = sorted(set(ids.reshape(-1).tolist()))
    scratch = tables.scratch if isinstance(tables, AgedTables) else 0
    steps = plan_layer(policy, first_key=layer * experts, experts=used, admit=set(used), scratch=scratch, counts=counts)
    place_of = {each.expert: each.place for each in steps}
    assert tables.places[: ids.numel()].tolist() == [place_of[e] for e in ids.reshape(-1).tolist()]
    missed = int(tables.miss_count)
    copied = [(each.key, each.place) for each in steps if each.copy]
    assert list(zip(tables.miss_key[:missed].tolist(), tables.miss_slot[:missed].tolist(), strict=True)) == copied
    policy.release_all()


@pytest.mark.parametrize(("layers", "experts", "top_k", "slots"), [(3, 4, 2, 2), (4, 8, 2, 11), (2, 16, 2, 32), (3, 7, 3, 9)])
def test_thousands_of_random_calls_leave_the_policys_table(layers, experts, top_k, slots):
    rng, counts = random.Random(layers * slots), PlanCounts()
    tables, policy = DeviceTables(layers * experts, slots, 8 * top_k, CPU), LruPolicy(slots)
    most_rows = max(rows for rows in range(1, 9) if slots >= min(rows * top_k, experts))
    for number in range(1000):
        rows = rng.randint(1, most_rows)
        ids = torch.tensor([rng.sample(range(experts), top_k) for _ in range(rows)])
        step(tables, policy, rng.randrange(layers), ids, experts, counts)
        if number % 50 == 0:
            tables.check()
            assert list(tables.residents().items()) == list(policy.residents().items())
        if number % 300 == 299:  # the truth goes over to the policy and back
            policy.restore(tables.residents())
            policy.check()
            tables.upload(policy.residents())
    assert tables.take_counts() == Counts(counts.hits, counts.misses, policy.evictions)
    assert tables.read_counts() == Counts(0, 0, 0)


@pytest.mark.parametrize(
    ("layers", "experts", "top_k", "slots", "scratch", "group"),
    [
        (3, 4, 2, 2, 0, 512),
        (4, 8, 2, 5, 2, 512),
        (2, 16, 2, 32, 0, 512),
        (3, 7, 3, 9, 2, 4),
        (32, 16, 2, 34, 2, 512),
        (32, 16, 2, 5, 2, 512),
        (32, 16, 2, 2, 2, 512),
        (6, 8, 2, 20, 2, 8),
    ],
)
def test_thousands_of_random_calls_leave_the_aged_policys_table(layers, experts, top_k, slots, scratch, group, monkeypatch):
    monkeypatch.setattr(policies, "GROUP_SLOTS", group)
    rng, counts = random.Random(layers * slots), PlanCounts()
    policy = AgedPolicy(slots, layers, experts)
    tables = tables_for(policy, layers * experts, scratch, 8 * top_k, CPU)
    assert isinstance(tables, AgedTables)
    most_rows = max(rows for rows in range(1, 9) if tables.most_ids() >= min(rows * top_k, experts))
    popular = [1 / (1 + e) for e in range(experts)]
    for number in range(1000):
        rows = rng.randint(1, most_rows) if number % 3 == 0 else 1
        ids = torch.tensor([skewed(rng, popular, top_k) for _ in range(rows)])
        step(tables, policy, rng.randrange(layers), ids, experts, counts)
        policy.check()
        if number % 50 == 0:
            tables.check()
            same(tables, policy)
        if number % 300 == 299:  # the truth goes over to the policy and back
            before = policy.residents(), policy.uses()
            tables.hand_back(policy)
            policy.check()
            assert (policy.residents(), policy.uses()) == before
            tables.take_over(policy)
    assert tables.take_counts() == Counts(counts.hits, counts.misses, policy.evictions, counts.bypasses)
    assert counts.hits > 0 and (counts.bypasses > 0) == (scratch > 0)


def skewed(rng: random.Random, popular: list[float], top_k: int) -> list[int]:
    """Distinct experts, the first ones more often."""
    return sorted(range(len(popular)), key=lambda e: rng.random() ** (1 / popular[e]))[-top_k:]


def same(tables: AgedTables, policy: AgedPolicy) -> None:
    slot_of = {key: slot for key, slot in enumerate(tables.slot_of.tolist()) if slot >= 0}
    assert slot_of == policy.residents()
    assert (tables.habit.tolist(), tables.recent.tolist()) == policy.uses()


def test_a_policys_order_survives_the_way_there_and_back():
    policy = LruPolicy(4)
    for key in (9, 3, 7, 1):
        policy.admit(key)
    policy.release_all()
    policy.lease(9)
    tables = DeviceTables(12, 4, 2, CPU)
    tables.upload(policy.residents())
    tables.check()
    assert list(tables.residents().items()) == [(3, 1), (7, 2), (1, 3), (9, 0)]


def test_a_call_never_evicts_what_it_uses_itself():
    tables = DeviceTables(16, 4, 8, CPU)
    tables.upload({0: 0, 5: 1, 6: 2, 7: 3})  # expert 0 is the oldest, and wanted again
    twins.route(tables, torch.tensor([[0, 1], [2, 3]]), 0, 4)
    assert set(tables.residents()) == {0, 1, 2, 3} and tables.residents()[0] == 0


def test_restoring_a_policy_ends_its_leases_and_finds_its_free_slots():
    policy = LruPolicy(3)
    policy.admit(5)
    policy.restore({8: 2})
    policy.check()
    assert policy.residents() == {8: 2} and policy.free == 2
    assert policy.admit(1) == 0


def test_check_notices_tables_that_contradict_each_other():
    tables = DeviceTables(6, 2, 2, CPU)
    tables.upload({4: 1})
    tables.owner[1] = 3
    with pytest.raises(AssertionError, match="contradict"):
        tables.check()
