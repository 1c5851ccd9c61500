"""Which layers stay within a number of bytes, what fits a device, and what the errors say."""

from __future__ import annotations

import random
import re

import pytest

from airllm.dense_budget import GIB, largest_that_fits, plan_dense, resident_gib, why_too_large

SIZES = (400, 100, 100, 100, 300, 100, 100)


def test_a_plan_counts_what_stays_what_passes_and_the_blocks_for_it() -> None:
    plan = plan_dense(SIZES, 550)
    assert (plan.resident, plan.streamed, plan.ring) == (2, 5, 3)
    assert (plan.resident_bytes, plan.streamed_bytes, plan.block_bytes) == (500, 700, 300)
    assert (plan.ring_bytes, plan.device_bytes, plan.moved_bytes) == (900, 1400, 700)
    assert plan_dense(SIZES, 550, prefetch=False).ring_bytes == 300
    assert plan_dense(SIZES, "all").device_bytes == sum(SIZES)
    assert plan_dense((), 0).device_bytes == 0


@pytest.mark.parametrize(("prefetch", "kept"), [(True, 3), (False, 1)])
def test_layers_that_have_a_block_each_are_moved_once_and_not_each_token(prefetch: bool, kept: int) -> None:
    for streamed in range(len(SIZES)):
        plan = plan_dense(SIZES, sum(SIZES[: len(SIZES) - streamed]), prefetch)
        assert plan.streamed == streamed
        assert plan.moved_bytes == (plan.streamed_bytes if streamed > kept else 0)


def test_the_largest_plan_that_fits_does_and_one_more_layer_would_not() -> None:
    draw = random.Random(2)
    for _ in range(300):
        sizes = [draw.randrange(1, 1000) for _ in range(draw.randrange(1, 12))]
        free, prefetch = draw.randrange(0, 2 * sum(sizes)), draw.random() < 0.5
        best = largest_that_fits(sizes, free, prefetch)
        fitting = [n for n in range(len(sizes) + 1) if plan_dense(sizes, sum(sizes[:n]), prefetch).device_bytes <= free]
        assert (best.resident if best else None) == max(fitting, default=None)
        assert best is None or best.device_bytes <= free


def test_a_number_of_gib_gives_the_plan_that_it_stands_for_and_is_short_where_it_can_be() -> None:
    draw = random.Random(3)
    for scale in (1, 2**10, 2**20, 2**28):
        sizes = [scale * draw.randrange(1, 100) for _ in range(9)]
        for resident in range(10):
            plan = plan_dense(sizes, sum(sizes[:resident]))
            assert plan_dense(sizes, int(resident_gib(plan) * GIB)).resident == resident
    assert resident_gib(plan_dense([2**28] * 8, 3 * 2**28)) == 0.75


def test_what_is_too_large_says_the_numbers_and_what_would_fit() -> None:
    sizes, rest = (2**20,) * 10, 2**22
    plan = plan_dense(sizes, "all")
    assert why_too_large(plan, rest_bytes=rest, beside_bytes=0, free_bytes=rest + 10 * 2**20) is None
    why = why_too_large(plan, rest_bytes=rest, beside_bytes=5, free_bytes=rest + 8 * 2**20)
    assert why is not None and f"need {rest + 10 * 2**20 + 5} B" in why and f"{rest + 8 * 2**20} B are free" in why
    found = re.search(r"pass resident_gb=(\S+), so that 4 of 10 layers stay .* \((\d+) B a token\)", why)
    assert found is not None and int(found[2]) == 6 * 2**20
    fits = plan_dense(sizes, int(float(found[1]) * GIB))
    assert why_too_large(fits, rest_bytes=rest, beside_bytes=5, free_bytes=rest + 8 * 2**20) is None
    why = why_too_large(plan, rest_bytes=rest, beside_bytes=0, free_bytes=rest)
    assert why is not None and f"even resident_gb=0 needs {rest + 3 * 2**20} B" in why
