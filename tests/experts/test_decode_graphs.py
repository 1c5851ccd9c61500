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

from airllm.experts import assembly
from airllm.experts.compute import gated_mlp
from airllm.experts.decode_graphs import ExpertGraphs, GraphedRouter, GraphPool


class Recording:
    def __init__(self, work: Callable[[], object]) -> None:
        self.replay = work


class PlainPool:
    """Stands where a GraphPool stands on a machine without a GPU."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.recorded = device, 0

    def record(self, work: Callable[[], object], warm_up: bool = True) -> Recording:
        self.recorded += 1
        work()
        return Recording(work)


def pool_for(device: str) -> Any:
    return PlainPool(torch.device("cpu")) if device == "cpu" else GraphPool(torch.device(device))


def graphed(rig: Rig, weight_dtype: torch.dtype | None = None) -> Rig:
    gate = rig.oracles[0]._apply_gate
    pool = pool_for(str(rig.device))
    rig.runtime.graphs = ExpertGraphs(pool, rig.pool.views, rig.top_k, gate, weight_dtype or rig.dtype)
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
    gate = rig.oracles[0]._apply_gate
    graphs = ExpertGraphs(pool_for("cpu"), rig.pool.views, 2, gate, rig.dtype)
    hidden, weights = torch.randn(1, slot_rig.HIDDEN), torch.tensor([[0.5, 2.0]])
    for place in range(5):
        for k in range(2):
            graphs.load(hidden, weights)
            graphs.replay(place, k)
            assert torch.equal(graphs.total, gated_mlp(hidden, rig.pool.views[place], gate) * weights[:, k, None])
    graphs.replay(0, 0)
    assert not torch.equal(graphs.total, gated_mlp(hidden, rig.pool.views[0], gate) * 0.5), "results add up until the next load"


def test_one_warm_up_and_a_graph_for_every_place_and_weight() -> None:
    warm_ups: list[bool] = []

    class Noted(PlainPool):
        def record(self, work: Callable[[], object], warm_up: bool = True) -> Recording:
            warm_ups.append(warm_up)
            return super().record(work, warm_up)

    rig = Rig(3)
    ExpertGraphs(Noted(rig.device), rig.pool.views, 2, rig.oracles[0]._apply_gate, rig.dtype)  # type: ignore[arg-type]
    assert warm_ups == [True] + [False] * 9


@pytest.mark.parametrize("odd", ["hidden dtype", "weights dtype", "gradient"])
def test_what_was_not_recorded_takes_the_plain_way(odd: str) -> None:
    rig = graphed(Rig(3, dtype=torch.bfloat16), weight_dtype=torch.bfloat16)
    hidden, index, weights = rig.draw(1)
    if odd == "hidden dtype":
        rig = graphed(Rig(3), weight_dtype=torch.float32)
        rig.runtime.graphs.row = rig.runtime.graphs.row.double()
        hidden, index, weights = rig.draw(1)
    elif odd == "weights dtype":
        weights = weights.float()
    else:
        hidden = hidden.requires_grad_()
    rig.runtime.graphs.load = None  # type: ignore[union-attr,method-assign,assignment] # would be called to use a graph
    assert torch.equal(rig.run(0, hidden, index, weights), rig.expected(0, hidden, index, weights))


def test_the_caller_owns_what_a_graph_computed() -> None:
    rig = graphed(Rig(3))
    ours = rig.run(0, *rig.draw(1))
    kept = ours.clone()
    rig.run(1, *rig.draw(1))
    assert torch.equal(ours, kept)


# --- the router -------------------------------------------------------------------------------------------------------


class Router(torch.nn.Linear):
    calls = 0

    def forward(self, hidden: torch.Tensor, scale: float = 1.0) -> tuple[torch.Tensor, ...]:
        Router.calls += 1
        logits = super().forward(hidden) * scale
        return (logits, *logits.topk(2))


@pytest.fixture
def router() -> torch.nn.Module:
    torch.manual_seed(0)
    return Router(8, 4).eval().requires_grad_(False)


def same(ours: Any, oracle: Any) -> bool:
    return len(ours) == len(oracle) and all(torch.equal(a, b) for a, b in zip(ours, oracle, strict=True))


@pytest.mark.parametrize("device", DEVICES)
def test_a_recorded_router_answers_as_the_module_does(router: torch.nn.Module, device: str) -> None:
    router = router.to(device)
    plain = router.forward
    recorded = GraphedRouter(pool_for(device), router, 8, torch.float32)
    recorded.install()
    with torch.no_grad():
        for rows in (1, 1, 3, 1, 0):
            hidden = torch.randn(rows, 8, device=device)
            assert same(router(hidden), plain(hidden))
    recorded.remove()
    assert router.forward == plain and "forward" not in vars(router)


@pytest.mark.parametrize("odd", ["rows", "dtype", "argument", "gradient", "training"])
def test_a_router_asked_something_else_runs_as_it_is(odd: str, router: torch.nn.Module) -> None:
    recorded = GraphedRouter(pool_for("cpu"), router, 8, torch.float32)
    recorded.install()
    recorded._graph = None  # type: ignore[assignment] # would be replayed
    hidden, more = torch.randn(3 if odd == "rows" else 1, 8), {}
    if odd == "dtype":
        router.double()
        hidden = hidden.double()
    if odd == "argument":
        more = {"scale": 2.0}
    if odd == "gradient":
        hidden.requires_grad_()
    if odd == "training":
        router.train()
    assert same(router(hidden, **more), recorded._plain(hidden, **more))


def test_outputs_that_somebody_collects_are_not_overwritten_by_the_next_token(router: torch.nn.Module) -> None:
    recorded = GraphedRouter(pool_for("cpu"), router, 8, torch.float32)
    recorded._outputs = tuple(torch.zeros(1, n) for n in (4, 2, 2))
    recorded._graph = Recording(lambda: [output.add_(1) for output in recorded._outputs])  # type: ignore[assignment]
    recorded.install()
    collected: list[torch.Tensor] = []
    router.register_forward_hook(lambda _module, _args, output: collected.append(output[0]))
    for _ in range(3):
        router(torch.randn(1, 8))
    assert [int(output[0, 0]) for output in collected] == [1, 2, 3]


# --- in a model -------------------------------------------------------------------------------------------------------


def test_a_recording_that_fails_leaves_the_plain_way_and_a_reason(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Refusing(PlainPool):
        def record(self, work: Callable[[], object], warm_up: bool = True) -> Recording:
            raise RuntimeError("capture is not allowed here")

    monkeypatch.setattr(assembly, "GraphPool", Refusing)
    rig = Rig(3)
    model, routers = model_around(rig)
    reason = assembly.record_graphs(rig.runtime, model, routers, slot_rig.HIDDEN)
    assert "capture is not allowed here" in reason and "capture is not allowed here" in caplog.text
    assert rig.runtime.graphs is None and rig.runtime.routers == []
    assert all("forward" not in vars(router) for router in routers)
    rig.call(0, *rig.draw(1))


def model_around(rig: Rig) -> tuple[torch.nn.Module, list[torch.nn.Module]]:
    experts = [assembly.SlotExperts(oracle, rig.runtime, layer) for layer, oracle in enumerate(rig.oracles)]

    class PlainRouter(torch.nn.Module):
        def forward(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
            return hidden, hidden[:, :2], hidden[:, :2].argsort()

    return torch.nn.ModuleList(experts), [PlainRouter().eval() for _ in experts]


def test_recorded_graphs_serve_until_the_runtime_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(assembly, "GraphPool", PlainPool)
    rig = Rig(3)
    model, routers = model_around(rig)
    assert assembly.record_graphs(rig.runtime, model, routers, slot_rig.HIDDEN) == ""
    assert rig.runtime.graphs is not None and all("forward" in vars(router) for router in routers)
    rig.call(0, *rig.draw(1))
    rig.close()
    assert rig.runtime.graphs is None and not any("forward" in vars(router) for router in routers)


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
