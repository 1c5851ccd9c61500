"""Recorded layers whose weights are streamed: one recording for each block that they may lie in, with the stock bits.

Without a GPU a tape of operators stands in for a recorded graph. A block is NaN whenever no layer lies in it.
"""

from __future__ import annotations

import gc
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import families
import pytest
import slot_models
import slot_rig
import torch
from slot_rig import DEVICES
from tape_pool import Tape, TapePool

from airllm import recorded_layers
from airllm.airllm_phimoe import AirLLMPhiMoE
from airllm.inspect_model import inspect_folder
from airllm.recorded_layers import MovingLayer, RecordedLayer, record_decode

LAYERS = 8
Make = Callable[..., AirLLMPhiMoE]


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def folder(checkpoint: Callable[..., Path], device: str) -> Path:
    return checkpoint("phimoe", dtype=torch.float32 if device == "cpu" else torch.float16, num_hidden_layers=LAYERS)


@pytest.fixture
def oracle(folder: Path, device: str) -> Any:
    return slot_models.oracle(folder, device=device)


def layers_of(model: Any) -> list[torch.nn.Module]:
    return list(model.model.model.layers)


@pytest.fixture
def built() -> Iterator[list[AirLLMPhiMoE]]:
    """The models of a test, closed when it has ended."""
    models: list[AirLLMPhiMoE] = []
    yield models
    for model in models:
        model.close()


@pytest.fixture
def load(folder: Path, device: str, built: list[AirLLMPhiMoE]) -> Make:
    """The model with a quarter of its layers resident; nothing recorded on the CPU."""

    def build(**keywords: Any) -> AirLLMPhiMoE:
        held = sum(inspect_folder(folder).dense_layers) / 4 / 2**30
        dtype = torch.float32 if device == "cpu" else torch.float16
        built.append(slot_models.load(folder, 5, device=device, dtype=dtype, **{"resident_gb": held, **keywords}))
        return built[-1]

    return build


@pytest.fixture
def make(load: Make, device: str) -> Make:
    """The same with its layers recorded, on the CPU by tape."""

    def build(**keywords: Any) -> AirLLMPhiMoE:
        model = load(**keywords)
        if device == "cpu":
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(recorded_layers, "GraphPool", TapePool)
                streamer, runtime = model._streamer, slot_models.runtime(model)
                model._graph_reason, remove = record_decode(model.model, runtime, layers_of(model), streamer)
            model._resources.callback(remove)
        assert model.get_expert_cache_stats()["decode_graphs"], model._graph_reason
        return model

    return build


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Counter[Any]:
    """How many layers ran as they are, and how many were replayed in each block (None: in memory of their own)."""
    seen: Counter[Any] = Counter()
    plain, replayed = recorded_layers._StandIn._plain, RecordedLayer.__call__

    def noted(self: Any, *args: Any, **kwargs: Any) -> Any:
        seen["stock"] += 1
        return plain(self, *args, **kwargs)

    def called(self: RecordedLayer, *args: Any, **kwargs: Any) -> Any:
        forward: Any = self._layer().forward
        block = forward._streamer.current_block if isinstance(forward, MovingLayer) else None
        before = seen["stock"]
        output = replayed(self, *args, **kwargs)
        seen[block] += seen["stock"] == before
        return output

    monkeypatch.setattr(recorded_layers._StandIn, "_plain", noted)
    monkeypatch.setattr(RecordedLayer, "__call__", called)
    return seen


def generate(model: Any, ids: torch.Tensor, new: int = 8) -> Any:
    options = {"do_sample": False, "output_logits": True, "return_dict_in_generate": True}
    return model.generate(ids, max_new_tokens=new, min_new_tokens=new, **options)


def assert_same(ours: Any, theirs: Any) -> None:
    assert torch.equal(ours.sequences, theirs.sequences)
    assert all(torch.equal(a, b) for a, b in zip(ours.logits, theirs.logits, strict=True))


@pytest.mark.parametrize("prefetching", [True, False])
def test_decoded_tokens_are_replayed_wherever_a_layer_lies_and_have_the_stock_bits(
    prefetching: bool, make: Make, oracle: Any, device: str, calls: Counter[Any], poisoned_blocks: None
) -> None:
    model = make(prefetching=prefetching)
    plan = model._streamer.plan
    assert (plan.resident, plan.streamed, plan.ring) == (2, 6, 3 if prefetching else 1)
    for seed, length in enumerate((9, 1, 70)):
        calls.clear()
        ids = families.prompt(oracle, length, seed=seed).to(device)
        assert_same(generate(model, ids), generate(oracle, ids))
        decoded = 8 if length == 1 else 7  # a prompt of one token is a decoded token
        assert calls[None] == 2 * decoded and sum(calls[block] for block in range(3)) == 6 * decoded
        assert all(calls[block] for block in range(plan.ring)) and calls["stock"] == LAYERS * (8 - decoded)
        slot_rig.check(model._runtime)


def test_a_layer_that_is_listened_to_runs_as_it_is(make: Make, oracle: Any, device: str, calls: Counter[Any]) -> None:
    model, ids = make(), families.prompt(oracle, 9).to(device)
    for each in (model.model, oracle):
        each.model.layers[5].self_attn.q_proj.register_forward_hook(lambda _module, _args, output: output * 1.5)
    assert_same(generate(model, ids), generate(oracle, ids))
    assert calls["stock"] == LAYERS + 7


def test_a_layer_called_where_no_block_holds_it_is_not_replayed(make: Make, calls: Counter[Any]) -> None:
    moving: Any = layers_of(make())[6].forward
    with pytest.raises((RuntimeError, NotImplementedError, AttributeError, TypeError)):
        moving(torch.zeros(1, 1, 64))  # without the hooks its weights are on meta
    assert calls["stock"] == 1


@pytest.mark.parametrize("error", [ZeroDivisionError, KeyboardInterrupt])
def test_an_exception_in_attention_leaves_a_model_that_answers_right(
    error: type[BaseException], make: Make, oracle: Any, device: str, poisoned_blocks: None
) -> None:
    model, ids = make(), families.prompt(oracle, 9).to(device)
    expected, count = generate(oracle, ids), iter(range(10**6))

    def fail(*_: Any) -> Any:
        if next(count) == 12:
            raise error
        return function(*_)

    function = recorded_layers.private.attention_function
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(recorded_layers.private, "attention_function", fail)
        with pytest.raises(error):
            generate(model, ids)
    assert all(p.is_meta for layer in layers_of(model)[2:] for p in layer.parameters())
    assert_same(generate(model, ids), expected)
    slot_rig.check(model._runtime)


@pytest.mark.parametrize("device", ["cpu"])  # a driver that refuses is planted by tape
def test_a_recording_that_fails_leaves_a_model_that_streams_as_it_is(
    load: Make, oracle: Any, device: str, calls: Counter[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Refusing(TapePool):
        def end(self) -> Tape:
            if self.recorded > 20:
                super().end()
                raise RuntimeError("capture is not allowed here")
            return super().end()

    model = load()
    monkeypatch.setattr(recorded_layers, "GraphPool", Refusing)
    reason, _ = record_decode(model.model, model._runtime, layers_of(model), model._streamer)
    assert "capture is not allowed here" in reason and model._runtime.graphs is None
    assert all(p.is_meta for layer in layers_of(model)[2:] for p in layer.parameters())
    ids = families.prompt(oracle, 9).to(device)
    assert_same(generate(model, ids), generate(oracle, ids))
    assert not calls


def test_a_dropped_model_is_freed_without_the_collector(make: Make, built: list[AirLLMPhiMoE], device: str) -> None:
    model = make()
    seen = [weakref.ref(layers_of(model)[0]), weakref.ref(layers_of(model)[6]), weakref.ref(model._streamer)]
    model(torch.tensor([[5, 6, 7]], device=device))
    gc.collect()
    gc.disable()
    try:
        built.clear()
        del model  # not closed
        assert [reference() for reference in seen] == [None, None, None]
    finally:
        gc.enable()


def test_what_was_recorded_goes_when_the_model_is_closed(make: Make) -> None:
    model = make()
    layers = layers_of(model)
    assert all("forward" in vars(layer) for layer in layers)
    model.close()
    assert not any("forward" in vars(layer) for layer in layers)
