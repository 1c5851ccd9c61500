"""Recorded decode steps: the same bits as without them, and a way round them for everything they were not recorded for.

Without a GPU a recording is replayed by running the recorded work again, which tests all but the driver.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import slot_rig
import torch
from slot_rig import DEVICES, LAYERS, Rig, gpu
from tape_pool import Tape, TapePool

from airllm.experts.compute import ExpertMath
from airllm.experts.decode_graphs import ExpertGraphs, GraphPool


def pool_for(device: str) -> Any:
    return TapePool(torch.device("cpu")) if device == "cpu" else GraphPool(torch.device(device))


def graphed(rig: Rig, weight_dtype: torch.dtype | None = None) -> Rig:
    math, pool = ExpertMath(rig.oracles[0]._apply_gate), pool_for(str(rig.device))
    rig.runtime.graphs = ExpertGraphs(
        pool, rig.pool.views, slot_rig.HIDDEN, rig.top_k, math, weight_dtype or rig.dtype
    )
    return rig


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("slots", [2, 5, 24])
def test_tokens_with_graphs_have_the_oracles_bits(slots: int, dtype: torch.dtype, device: str) -> None:
    rig = graphed(Rig(slots, dtype=dtype, device=device))
    for n in range(30):
        tokens = 12 if n % 9 == 8 else 1
        rig.runtime.begin_forward(1, tokens, rig.device)
        for layer in range(LAYERS):
            rig.call(layer, *rig.draw(tokens))


def test_a_graph_belongs_to_one_place_and_one_of_the_tokens_weights() -> None:
    rig = Rig(3)
    rig.pool._memory.zero_()
    for place, views in enumerate(rig.pool.views):
        for view in views:
            view.fill_(0.01 * (place + 1))
    math = ExpertMath(rig.oracles[0]._apply_gate)
    graphs = ExpertGraphs(pool_for("cpu"), rig.pool.views, slot_rig.HIDDEN, 2, math, rig.dtype)
    hidden, weights = torch.randn(1, slot_rig.HIDDEN), torch.tensor([[0.5, 2.0]])
    for place in range(5):
        for k in range(2):
            graphs.load(hidden, weights)
            graphs.replay(place, k)
            assert torch.equal(graphs.total, math.output(hidden, rig.pool.views[place]) * weights[:, k, None])
    graphs.replay(0, 0)
    assert not torch.equal(graphs.total, math.output(hidden, rig.pool.views[0]) * 0.5), "results add up until the next load"


def test_one_warm_up_and_a_graph_for_every_place_and_weight() -> None:
    warm_ups: list[bool] = []

    class Noted(TapePool):
        def record(self, work: Callable[[], object], warm_up: bool = True) -> Tape:
            warm_ups.append(warm_up)
            return super().record(work, warm_up)

    rig = Rig(3)
    math = ExpertMath(rig.oracles[0]._apply_gate)
    ExpertGraphs(Noted(rig.device), rig.pool.views, slot_rig.HIDDEN, 2, math, rig.dtype)  # type: ignore[arg-type]
    assert warm_ups == [True] + [False] * 9


@pytest.mark.parametrize("odd", ["hidden dtype", "weights dtype"])
def test_what_was_not_recorded_takes_the_plain_way(odd: str) -> None:
    rig = graphed(Rig(3, dtype=torch.bfloat16), weight_dtype=torch.bfloat16)
    hidden, index, weights = rig.draw(1)
    if odd == "hidden dtype":
        rig = graphed(Rig(3), weight_dtype=torch.float32)
        rig.runtime.graphs.row = rig.runtime.graphs.row.double()
        hidden, index, weights = rig.draw(1)
    else:
        weights = weights.float()
    rig.runtime.graphs.load = None  # type: ignore[union-attr,method-assign,assignment] # would be called to use a graph
    assert torch.equal(rig.run(0, hidden, index, weights), rig.expected(0, hidden, index, weights))


def test_the_caller_owns_what_a_graph_computed() -> None:
    rig = graphed(Rig(3))
    ours = rig.run(0, *rig.draw(1))
    kept = ours.clone()
    rig.run(1, *rig.draw(1))
    assert torch.equal(ours, kept)


@gpu
def test_graphs_take_no_memory_while_replayed() -> None:
    rig = graphed(Rig(5, dtype=torch.float16, device="cuda:0"))
    asked = [rig.draw(1) for _ in range(64)]
    for n in range(8):
        rig.run(n % LAYERS, *asked[n])
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()["segment.all.allocated"]
    for n in range(64):
        rig.run(n % LAYERS, *asked[n])
    torch.cuda.synchronize()
    assert torch.cuda.memory_stats()["segment.all.allocated"] == before
