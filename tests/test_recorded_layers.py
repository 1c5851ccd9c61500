"""Recorded layers: the same bits as the stock layer, for the calls they were recorded for; the stock layer for all others.

Without a GPU a tape of operators stands in for a recorded graph, which tests all but the driver.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import families
import pytest
import slot_models
import torch
from slot_models import LAYERS, check, load, runtime
from slot_rig import DEVICES
from tape_pool import Tape, TapePool

from airllm import recorded_layers
from airllm.recorded_layers import RecordedLayer, record_decode
from airllm.skeleton import decoder_layers


def dtype_for(device: str) -> torch.dtype:
    return torch.float32 if device == "cpu" else torch.float16


def oracle_with(attention: str, folder: Path, device: str) -> Any:
    oracle = slot_models.oracle(folder, device=device)
    oracle.set_attn_implementation(attention)
    return oracle


def layers_of(model: Any) -> list[torch.nn.Module]:
    return [layer for _, layer in decoder_layers(model.model)[1]]


def recorded_on(device: str, folder: Path, slots: int, **keywords: Any) -> Any:
    """A model with recorded layers, on the CPU by tape."""
    model = load(folder, slots, device=device, dtype=dtype_for(device), **keywords)
    if device == "cpu":
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(recorded_layers, "GraphPool", TapePool)
            model._graph_reason, remove = record_decode(model.model, runtime(model), layers_of(model))
        model._resources.callback(remove)
    return model


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def folder(checkpoint: Callable[..., Path], device: str) -> Path:
    return checkpoint("phimoe", dtype=dtype_for(device))


@pytest.fixture
def make(folder: Path, device: str) -> Iterator[Callable[..., Any]]:
    made: list[Any] = []

    def build(slots: int = 5, **keywords: Any) -> Any:
        made.append(recorded_on(device, folder, slots, **keywords))
        return made[-1]

    yield build
    for model in made:
        model.close()


@pytest.fixture
def stock(monkeypatch: pytest.MonkeyPatch) -> list[torch.Size]:
    """Shapes of the hidden states that went through stock layers."""
    shapes: list[torch.Size] = []
    plain = RecordedLayer._plain

    def noted(self: RecordedLayer, hidden: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        shapes.append(hidden.shape)
        return plain(self, hidden, *args, **kwargs)

    monkeypatch.setattr(RecordedLayer, "_plain", noted)
    return shapes


def generate(model: Any, ids: torch.Tensor, new: int = 12, **options: Any) -> Any:
    options = {"do_sample": False, "output_logits": True, "return_dict_in_generate": True} | options
    return model.generate(ids, max_new_tokens=new, min_new_tokens=new, **options)


def assert_same(ours: Any, oracle: Any) -> None:
    assert torch.equal(ours.sequences, oracle.sequences)
    assert all(torch.equal(a, b) for a, b in zip(ours.logits, oracle.logits, strict=True))


@pytest.mark.parametrize("slots", [2, 5, 24])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_decoded_tokens_are_replayed_and_have_the_stock_bits(
    attention: str, slots: int, make: Callable[..., Any], folder: Path, device: str, stock: list[torch.Size]
) -> None:
    oracle = oracle_with(attention, folder, device)
    model = make(slots, attn_implementation=attention)
    for seed, length in enumerate((9, 1, 70)):
        ids = families.prompt(oracle, length, seed=seed).to(device)
        del stock[:]
        assert_same(generate(model, ids), generate(oracle, ids))
        assert {shape[1] for shape in stock} <= {length} and len(stock) <= LAYERS
        check(model)


@pytest.mark.parametrize("device", ["cpu"])  # on a GPU both are recorded
def test_the_tables_count_what_the_stock_way_counts(make: Callable[..., Any], folder: Path, device: str) -> None:
    recorded, plain = make(5), load(folder, 5, device=device, dtype=dtype_for(device))
    ids = families.prompt(plain.model, 9)
    for model in (recorded, plain):
        generate(model, ids)
    ours, theirs = recorded.get_expert_cache_stats(), plain.get_expert_cache_stats()
    for name in ("hits", "misses", "evictions", "h2d_copies", "h2d_bytes", "bypasses", "resident_experts"):
        assert ours[name] == theirs[name], name
    assert ours["decode_graphs"] and not theirs["decode_graphs"]


CALLS: dict[str, dict[str, Any]] = {
    "sampling": {"do_sample": True, "top_k": 20},
    "beams": {"num_beams": 3},
    "hidden states": {"output_hidden_states": True},
    "attentions": {"output_attentions": True},
    "router logits": {"output_router_logits": True},
    "static cache": {"cache_implementation": "static", "disable_compile": True},
    "no cache": {"use_cache": False},
}


@pytest.mark.parametrize("call", CALLS)
def test_whatever_generate_is_asked_the_answer_is_the_oracles(
    call: str, make: Callable[..., Any], folder: Path, device: str
) -> None:
    attention = "eager" if call == "attentions" else "sdpa"
    oracle = oracle_with(attention, folder, device)
    model = make(5, attn_implementation=attention)
    ids, answers = families.prompt(oracle, 7).to(device), []
    for each in (oracle, model):
        torch.manual_seed(3)
        try:
            answers.append(generate(each, ids, **CALLS[call]))
        except RuntimeError as error:  # transformers 5.8 cannot decode with router logits
            answers.append(str(error))
    if isinstance(answers[0], str):
        assert answers[1] == answers[0]
        return
    assert_same(*answers)
    for name in ("hidden_states", "attentions"):
        ours, theirs = getattr(answers[0], name, None), getattr(answers[1], name, None)
        assert (ours is None) == (theirs is None)
        for step, expected in zip(ours or (), theirs or (), strict=True):
            assert all(torch.equal(a, b) for a, b in zip(step, expected, strict=True))


def test_after_outputs_were_collected_tokens_are_replayed_again(
    make: Callable[..., Any], folder: Path, device: str, stock: list[torch.Size]
) -> None:
    oracle, model = oracle_with("eager", folder, device), make(5, attn_implementation="eager")
    ids = families.prompt(oracle, 7).to(device)
    generate(model, ids, output_attentions=True, output_hidden_states=True)
    del stock[:]
    assert_same(generate(model, ids), generate(oracle, ids))
    assert len(stock) == LAYERS


def test_left_padding_reaches_attention(make: Callable[..., Any], folder: Path, device: str, stock: list[torch.Size]) -> None:
    oracle, model = slot_models.oracle(folder, device=device), make(5)
    ids = families.prompt(oracle, 9).to(device)
    mask = torch.ones_like(ids)
    mask[:, :4] = 0
    assert_same(generate(model, ids, attention_mask=mask), generate(oracle, ids, attention_mask=mask))
    assert len(stock) == LAYERS


def one_step(model: Any, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits of one decoded token after a prompt of one."""
    ids = torch.tensor([[5, 6, 7, 8]], device=device)
    with torch.no_grad():
        first = model(ids, use_cache=True)
        cache = first["cache" if "cache" in first else "past_key_values"]
        name = "cache" if "cache" in first else "past_key_values"
        return first.logits, model(ids[:, :1], use_cache=True, **{name: cache}).logits


def a_hook(layer: Any) -> None:
    layer.self_attn.q_proj.register_forward_hook(lambda _module, _args, output: output * 1.5)


def a_pre_hook(layer: Any) -> None:
    layer.mlp.router.register_forward_pre_hook(lambda _module, args: (args[0].flip(-1),))


def another_module(layer: Any) -> None:
    class Doubled(torch.nn.Module):
        def __init__(self, inner: torch.nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return 2 * self.inner(x)

    layer.self_attn.o_proj = Doubled(layer.self_attn.o_proj).eval()


def another_weight(layer: Any) -> None:
    layer.self_attn.k_proj.weight = torch.nn.Parameter(layer.self_attn.k_proj.weight * 3, requires_grad=False)


def other_data(layer: Any) -> None:
    layer.input_layernorm.weight.data = layer.input_layernorm.weight.data * 2


def a_forward(layer: Any) -> None:
    plain = layer.self_attn.v_proj.forward
    layer.self_attn.v_proj.forward = lambda x: plain(x) + 1


def a_scale(layer: Any) -> None:
    layer.self_attn.scaling *= 2


def a_norms_epsilon(layer: Any) -> None:
    layer.input_layernorm.eps = 0.5


SETTINGS = [a_scale, a_norms_epsilon]
CHANGES = [*SETTINGS, a_hook, a_pre_hook, another_module, another_weight, other_data, a_forward]


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_a_layer_that_was_changed_runs_as_it_now_is(
    change: Callable[[Any], None], make: Callable[..., Any], folder: Path, device: str
) -> None:
    oracle, model = slot_models.oracle(folder, device=device), make(5)
    before = one_step(oracle, device)[1]
    for each in (oracle, model):
        change(each.model.layers[1] if each is oracle else layers_of(model)[1])
    ours, theirs = one_step(model, device), one_step(oracle, device)
    assert torch.equal(ours[1], theirs[1]) and not torch.equal(theirs[1], before)


@pytest.mark.parametrize("change", SETTINGS, ids=lambda change: change.__name__)
def test_a_setting_changed_between_two_tokens_of_one_text_counts_from_the_next_one(
    change: Callable[[Any], None], make: Callable[..., Any], folder: Path, device: str, stock: list[torch.Size]
) -> None:
    oracle, model = slot_models.oracle(folder, device=device), make(5)
    ids, logits = torch.tensor([[5, 6, 7, 8]], device=device), []
    for each in (oracle, model):
        layer, said = each.model.layers[2] if each is oracle else layers_of(model)[2], []
        with torch.no_grad():
            answer = each(ids, use_cache=True)
            name = "cache" if "cache" in answer else "past_key_values"
            for turn in range(3):
                if turn == 1:
                    change(layer)
                answer = each(ids[:, turn : turn + 1], use_cache=True, **{name: answer[name]})
                said.append(answer.logits)
        logits.append(said)
    assert all(torch.equal(a, b) for a, b in zip(*logits, strict=True))
    assert len(stock) == LAYERS * 3, "the prompt and the two tokens after the change"


def test_weights_changed_in_place_are_read_by_the_recording(
    make: Callable[..., Any], folder: Path, device: str, stock: list[torch.Size]
) -> None:
    oracle, model = slot_models.oracle(folder, device=device), make(5)
    with torch.no_grad():
        for each in (oracle.model.layers[1], layers_of(model)[1]):
            each.self_attn.o_proj.weight.mul_(2)
    assert torch.equal(one_step(model, device)[1], one_step(oracle, device)[1])
    assert len(stock) == LAYERS


def test_another_attention_function_is_used_at_once(make: Callable[..., Any], folder: Path, device: str) -> None:
    oracle = oracle_with("eager", folder, device)
    model = make(5)
    model.model.set_attn_implementation("eager")
    assert_same(generate(model, ids := torch.tensor([[4, 5, 6]], device=device)), generate(oracle, ids))


@pytest.mark.parametrize("odd", ["gradient", "inference mode", "autocast"])
def test_modes_of_torch(odd: str, make: Callable[..., Any], folder: Path, device: str, stock: list[torch.Size]) -> None:
    oracle, model = slot_models.oracle(folder, device=device), make(5)
    modes = {
        "gradient": torch.enable_grad,
        "inference mode": torch.inference_mode,
        "autocast": lambda: torch.autocast(device.partition(":")[0], torch.bfloat16),
    }
    results = []
    for each in (oracle, model):
        with modes[odd]():
            results.append(one_step(each, device)[1])
    assert torch.equal(*results)
    assert len(stock) == LAYERS * (2 if odd == "autocast" else 1)


def test_an_exception_in_attention_leaves_a_model_that_answers_right(
    make: Callable[..., Any], folder: Path, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    oracle, model = slot_models.oracle(folder, device=device), make(5)
    ids = families.prompt(oracle, 9).to(device)
    expected = generate(oracle, ids)
    with monkeypatch.context() as patch:
        patch.setattr(recorded_layers.private, "attention_function", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            generate(model, ids)
    assert_same(generate(model, ids), expected)
    check(model)


def test_after_memory_ran_out_between_two_experts_the_total_starts_again(
    make: Callable[..., Any], folder: Path, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    oracle, model = slot_models.oracle(folder, device=device), make(5)
    ids, graphs = families.prompt(oracle, 9).to(device), runtime(model).graphs
    calls, replay = [0], graphs.replay

    def running_out(place: int, k: int) -> None:
        replay(place, k)
        calls[0] += 1
        if calls[0] == 9:
            raise torch.OutOfMemoryError("planted")

    monkeypatch.setattr(graphs, "replay", running_out)
    assert_same(generate(model, ids), generate(oracle, ids))
    assert model.get_expert_cache_stats()["oom_retries"] == 1


def test_what_was_recorded_goes_when_the_model_is_closed(make: Callable[..., Any]) -> None:
    model = make(5)
    layers = layers_of(model)
    assert all("forward" in vars(layer) for layer in layers)
    model.close()
    assert not any("forward" in vars(layer) for layer in layers)


def test_a_dropped_model_is_freed_without_the_collector(folder: Path, device: str) -> None:
    model = recorded_on(device, folder, 5)
    seen = [weakref.ref(layers_of(model)[0]), weakref.ref(runtime(model))]
    gc.collect()
    gc.disable()
    try:
        model.close()
        del model
        assert [reference() for reference in seen] == [None, None]
    finally:
        gc.enable()


def test_a_layer_that_cannot_be_recorded_leaves_everything_as_it_was(
    checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model = load(checkpoint("phimoe", dtype=torch.float32), 5)
    monkeypatch.setattr(recorded_layers, "GraphPool", TapePool)
    first = layers_of(model)[1]
    monkeypatch.setattr(type(first.self_attn), "forward", lambda self, hidden_states, **_: (hidden_states, None))
    reason, remove = record_decode(model.model, runtime(model), layers_of(model))
    assert "PhimoeDecoderLayer goes through experts" in reason and reason.partition(": ")[2] in caplog.text
    assert runtime(model).graphs is None and not any("forward" in vars(layer) for layer in layers_of(model))
    remove()
    monkeypatch.undo()
    assert one_step(model, "cpu")[1].isfinite().all()


def test_a_recording_that_the_driver_refuses_is_a_reason(
    checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Refusing(TapePool):
        def end(self) -> Tape:
            super().end()
            raise RuntimeError("capture is not allowed here")

    model = load(checkpoint("phimoe", dtype=torch.float32), 5)
    monkeypatch.setattr(recorded_layers, "GraphPool", Refusing)
    reason, _ = record_decode(model.model, runtime(model), layers_of(model))
    assert "capture is not allowed here" in reason
    assert runtime(model).graphs is None and not any("forward" in vars(layer) for layer in layers_of(model))
