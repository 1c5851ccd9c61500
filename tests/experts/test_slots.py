"""The slots: one allocation, addresses that never change, memory that is given back."""

from __future__ import annotations

import pytest
import torch
from slot_rig import gpu

from airllm.errors import BudgetError
from airllm.experts.budget import plan_slots
from airllm.experts.layout import ALIGNMENT_BYTES, ExpertLayout, ModelLayout
from airllm.experts.slots import SlotPool

ONE = ExpertLayout.from_shapes([("gate_up_proj", (10, 7), torch.float16), ("down_proj", (7, 5), torch.float16)], 4)
LAYOUT = ModelLayout.of(ONE, 3)


def plan(slots: int, total: int = 12):
    return plan_slots(
        budget_bytes=slots * LAYOUT.expert_bytes, expert_bytes=LAYOUT.expert_bytes, total_experts=total, top_k=2
    )


def test_slots_and_scratch_are_one_piece_of_memory() -> None:
    pool = SlotPool(LAYOUT, plan(5), torch.device("cpu"))
    assert len(pool.blocks) == len(pool.views) == 7
    assert pool.nbytes == 7 * LAYOUT.expert_bytes == pool.plan.slot_bytes + pool.plan.scratch_bytes
    addresses = [block.data_ptr() for block in pool.blocks]
    assert [b - a for a, b in zip(addresses, addresses[1:], strict=False)] == [LAYOUT.expert_bytes] * 6


def test_views_lie_in_their_blocks_and_share_one_alignment() -> None:
    pool = SlotPool(LAYOUT, plan(3), torch.device("cpu"))
    for block, views in zip(pool.blocks, pool.views, strict=True):
        for projection, view in zip(LAYOUT.projections, views, strict=True):
            assert view.data_ptr() == block.data_ptr() + projection.offset_bytes
            assert (view.data_ptr() - pool.blocks[0].data_ptr()) % ALIGNMENT_BYTES == 0
            assert view.is_contiguous() and view.shape == projection.shape


def test_poison_is_nan_in_every_projection() -> None:
    pool = SlotPool(LAYOUT, plan(3), torch.device("cpu"))
    pool._memory.zero_()
    pool.poison(1)
    assert all(view.isnan().all() for view in pool.views[1])
    assert not any(view.isnan().any() for place in (0, 2, 3, 4) for view in pool.views[place])
    pool.poison()
    assert all(view.isnan().all() for views in pool.views for view in views)


def test_a_device_too_small_is_an_error_with_bytes_and_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError("out of memory")

    monkeypatch.setattr(torch, "empty", refuse)
    with pytest.raises(BudgetError, match=f"7 slots of {LAYOUT.expert_bytes} B .*lower expert_cache_gb"):
        SlotPool(LAYOUT, plan(5), torch.device("cpu"))


def test_closing_lets_the_memory_go_and_may_be_repeated() -> None:
    pool = SlotPool(LAYOUT, plan(5), torch.device("cpu"))
    pool.close()
    pool.close()
    assert (pool.nbytes, pool.blocks, pool.views) == (0, (), ())


@gpu
def test_on_the_device_the_allocation_is_what_was_promised() -> None:
    device = torch.device("cuda:0")
    shapes = [("gate_up_proj", (896, 512), torch.float16), ("down_proj", (512, 448), torch.float16)]
    layout = ModelLayout.of(ExpertLayout.from_shapes(shapes, 4), 3)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated(device)
    pool = SlotPool(
        layout,
        plan_slots(budget_bytes=20 * layout.expert_bytes, expert_bytes=layout.expert_bytes, total_experts=99, top_k=2),
        device,
    )
    assert 0 <= torch.cuda.memory_allocated(device) - before - 22 * layout.expert_bytes <= 2 * 2**20
    assert all(view.data_ptr() % ALIGNMENT_BYTES == 0 for views in pool.views for view in views)
    pool.close()
    assert torch.cuda.memory_allocated(device) == before
