"""Steps launched before generate asks for them: the same tokens, whatever comes between two forwards of a call.

On the CPU nothing is launched ahead by itself (nothing would be gained), so it is switched on here. The oracle is transformers'
own model in the same process.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import families
import pytest
import slot_models
import torch
from slot_models import check, runtime
from slot_rig import DEVICES, Injected, gpu
from transformers import LogitsProcessor, StoppingCriteria
from transformers.generation.streamers import BaseStreamer

from airllm import AutoModel, tiny_model_path
from airllm.errors import AirLLMError

NEW = 9
SLOTS_GB = 0.0026  # 22 of the tiny model's 48 experts in float32
RECORDED_LATE = 1
"""Steps on a GPU that run before there is a recording; without one nothing is launched ahead."""


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def oracles() -> dict[str, Any]:
    return {}


@pytest.fixture
def oracle(oracles: dict[str, Any], device: str) -> Any:
    if device not in oracles:
        oracles[device] = slot_models.oracle(tiny_model_path(), torch.float32, device=device)
    return oracles[device]


def load(device: str, ahead: bool) -> Any:
    options = {"expert_cache_backend": "slot", "expert_cache_engine": "device", "expert_cache_gb": SLOTS_GB}
    model = AutoModel.from_pretrained(tiny_model_path(), device=device, dtype="float32", **options)
    model._stepper._ahead.on = ahead
    return model


@pytest.fixture
def model(device: str) -> Any:
    return load(device, ahead=True)


def prompt(device: str, rows: int = 1, seed: int = 40) -> torch.Tensor:
    return torch.randint(3, 512, (rows, 9), generator=torch.Generator().manual_seed(seed)).to(device)


def both(oracle: Any, model: Any, ids: torch.Tensor, **call: Any) -> torch.Tensor:
    """The new tokens, which must be the oracle's."""
    call = {"max_new_tokens": NEW, "do_sample": False, "pad_token_id": 0, "attention_mask": torch.ones_like(ids), **call}
    streamer = call.pop("streamer", None)
    expected = oracle.generate(ids, **call)
    assert torch.equal(model.generate(ids, streamer=streamer, **call), expected)
    return expected[:, ids.shape[1] :]


def counts(model: Any) -> tuple[int, int, int]:
    """Steps, steps launched ahead, and of these the ones thrown away."""
    stats = model.get_expert_cache_stats()
    return tuple(stats[f"device_engine_steps{name}"] for name in ("", "_ahead", "_discarded"))  # type: ignore[return-value]


def late(device: str) -> int:
    return 0 if device == "cpu" else RECORDED_LATE




def test_every_step_but_the_first_is_there_when_it_is_asked_for(oracle: Any, model: Any, device: str) -> None:
    both(oracle, model, prompt(device), eos_token_id=None)
    assert counts(model) == (NEW - 1, NEW - 2 - late(device), 0), "none beyond the last token"
    both(oracle, model, prompt(device, seed=41), eos_token_id=None)
    assert counts(model) == (2 * (NEW - 1), 2 * (NEW - 2) - late(device), 0)
    check(model)


def test_the_counters_are_those_of_steps_that_wait_for_the_host(model: Any, device: str) -> None:
    waits = load(device, ahead=False)
    found = []
    for each in (model, waits):
        families.greedy(each, prompt(device), NEW)
        stats = each.get_expert_cache_stats()
        found.append([stats[name] for name in ("hits", "misses", "evictions", "h2d_copies", "h2d_bytes", "resident_experts")])
    assert found[0] == found[1] and counts(waits)[1] == 0 < counts(model)[1]


def test_the_end_of_a_sequence_throws_one_step_away(oracle: Any, model: Any, device: str) -> None:
    tokens = both(oracle, model, prompt(device), eos_token_id=None)[0].tolist()
    end = next(token for n, token in enumerate(tokens) if n >= 2 and token not in tokens[:n])
    both(oracle, model, prompt(device), eos_token_id=end)
    assert counts(model)[2] == 1
    both(oracle, model, prompt(device), eos_token_id=None)
    assert counts(model)[2] == 1
    check(model)


class Never(LogitsProcessor):
    """Not the token that would have come."""

    def __init__(self, token: int) -> None:
        self.token = token

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores.index_fill(1, torch.tensor([self.token], device=scores.device), -torch.inf)


def test_after_a_wrong_guess_a_call_makes_no_more(oracle: Any, model: Any, device: str) -> None:
    tokens = both(oracle, model, prompt(device), eos_token_id=None)[0].tolist()
    at = next(n for n in range(3, NEW) if tokens[n] not in tokens[:n])
    before = counts(model)
    both(oracle, model, prompt(device), eos_token_id=None, logits_processor=[Never(tokens[at])])
    steps, ahead, discarded = (now - then for now, then in zip(counts(model), before, strict=True))
    assert (steps, ahead, discarded) == (NEW - 1, at, 1)
    both(oracle, model, prompt(device), eos_token_id=None)
    assert counts(model)[2] == before[2] + 1, "the next call guesses again"
    check(model)


@pytest.mark.parametrize("rows", [2, 4])
def test_sequences_of_a_batch_end_one_after_the_other(rows: int, oracle: Any, model: Any, device: str) -> None:
    tokens = both(oracle, model, prompt(device, rows), eos_token_id=None)
    ended = both(oracle, model, prompt(device, rows), eos_token_id=int(tokens[0, 3]))
    assert (ended[0, -1] == 0) or ended.shape[1] < NEW
    check(model)


def test_a_batch_with_padding_gets_its_own_tokens(oracle: Any, model: Any, device: str) -> None:
    ids, mask = (part.to(device) for part in slot_models.padded((3, 9, 6)))
    both(oracle, model, ids, attention_mask=mask, eos_token_id=None)
    both(oracle, model, ids, attention_mask=mask, eos_token_id=None)
    assert counts(model)[1:] == (2 * (NEW - 2) - late(device), 0)


@pytest.mark.parametrize("call", [{"do_sample": True}, {"num_beams": 2}], ids=["sampled", "beams"])
def test_what_cannot_be_guessed_is_not(call: dict[str, Any], oracle: Any, model: Any, device: str) -> None:
    drawn = []
    for each in (oracle, model):
        torch.manual_seed(5)
        drawn.append(each.generate(prompt(device), **{"do_sample": False, "max_new_tokens": NEW, "pad_token_id": 0, **call}))
    assert torch.equal(*drawn) and counts(model)[0] > 0 and counts(model)[1] == 0


class Calls(BaseStreamer):
    """Does something with the model between two tokens."""

    def __init__(self, work: Callable[[], Any], every: int) -> None:
        self.work, self.every, self.seen = work, every, 0

    def put(self, value: torch.Tensor) -> None:
        self.seen += 1
        if self.seen % self.every == 0:
            self.work()

    def end(self) -> None:
        pass


@pytest.mark.parametrize("work", ["statistics", "reset", "clear", "forward", "generate"])
def test_the_model_is_used_between_two_tokens(work: str, oracle: Any, model: Any, device: str) -> None:
    other, call = prompt(device, seed=77), {"max_new_tokens": 4, "pad_token_id": 0, "eos_token_id": None}
    expected, gone_wrong = oracle.generate(other, do_sample=False, **call), []

    def statistics() -> None:
        used = runtime(model).engine.pending()  # by whole steps, though one may be running
        gone_wrong.extend([used] if used and (used["hits"] + used["misses"]) % (2 * model._runtime.layers) else [])

    def generate() -> None:
        found = model.generate(other, do_sample=False, **call)
        gone_wrong.extend([] if torch.equal(found, expected) else [found])

    does: dict[str, Callable[[], Any]] = {
        "statistics": statistics,
        "reset": model.reset_expert_cache_stats,
        "clear": model.clear_expert_cache,
        "forward": lambda: model(other),
        "generate": generate,
    }
    for _ in range(2):
        both(oracle, model, prompt(device), eos_token_id=None, streamer=Calls(does[work], 2))
    assert not gone_wrong
    both(oracle, model, prompt(device), eos_token_id=None)
    check(model)


class Raises(StoppingCriteria):
    def __init__(self, error: BaseException, at: int) -> None:
        self.error, self.at = error, at

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **_: Any) -> torch.Tensor:
        if input_ids.shape[1] >= self.at:
            raise self.error
        return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)


@pytest.mark.parametrize("error", [Injected("mine"), KeyboardInterrupt("mine")], ids=["exception", "interrupt"])
def test_a_call_that_ends_with_an_exception_leaves_nothing_behind(
    error: BaseException, oracle: Any, model: Any, device: str
) -> None:
    for at in (12, 14, 15):
        with pytest.raises(type(error)):
            model.generate(prompt(device), max_new_tokens=NEW, do_sample=False, stopping_criteria=[Raises(error, at)])
        check(model)
        both(oracle, model, prompt(device, seed=at), eos_token_id=None)


@pytest.mark.parametrize("error", [Injected("mine"), KeyboardInterrupt("mine"), torch.OutOfMemoryError("none left")])
@pytest.mark.parametrize("launch", [1, 4])
def test_a_launch_ahead_that_fails(
    error: BaseException, launch: int, oracle: Any, model: Any, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ahead = model._stepper._ahead
    run, seen = ahead._run, [0]

    def fail(*call: Any, wait: bool) -> None:
        seen[0] += 1
        if seen[0] == launch:
            raise error
        run(*call, wait=wait)

    monkeypatch.setattr(ahead, "_run", fail)
    if isinstance(error, torch.OutOfMemoryError):
        both(oracle, model, prompt(device), eos_token_id=None)
        assert "ran out of memory" in model.get_expert_cache_stats()["device_engine_reason"]
    else:
        with pytest.raises(type(error)):
            model.generate(prompt(device), max_new_tokens=NEW, do_sample=False, eos_token_id=None)
    assert seen[0] == launch
    check(model)
    both(oracle, model, prompt(device), eos_token_id=None)


@pytest.mark.parametrize("step", [0, 4])
@pytest.mark.parametrize("ends", [False, True], ids=["goes on", "ends there"])
def test_numbers_that_are_not_finite_come_from_the_layer_that_made_them(
    step: int, ends: bool, model: Any, device: str
) -> None:
    """Although the layers' outputs of that step have been written over by the step after it."""
    engine, first = runtime(model).engine, prompt(device).shape[1]
    experts = engine.experts

    def spoil(layer: int, *args: Any, **more: Any) -> torch.Tensor:
        out = experts(layer, *args, **more)
        if layer == 1:
            out.masked_fill_(model._stepper._states[-1].slot == first + step, torch.nan)
        return out

    engine.experts = spoil
    stop = [StopsAt(first + step + 2)] if ends else []
    with pytest.raises(AirLLMError, match=r"layers\.1\b"):
        model.generate(prompt(device), max_new_tokens=NEW, do_sample=False, eos_token_id=None, stopping_criteria=stop)


class StopsAt(StoppingCriteria):
    def __init__(self, length: int) -> None:
        self.length = length

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **_: Any) -> torch.Tensor:
        return torch.full((input_ids.shape[0],), input_ids.shape[1] >= self.length, device=input_ids.device)


def test_an_interrupt_at_the_very_end_of_a_call_does_not_switch_the_steps_off(
    oracle: Any, model: Any, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    last = counts(model)[0] + NEW - 1

    def interrupted(_stream: object) -> None:
        if counts(model)[0] == last:
            monkeypatch.undo()
            raise KeyboardInterrupt

    monkeypatch.setattr("airllm.run_ahead.join", interrupted)
    with pytest.raises(KeyboardInterrupt):
        model.generate(prompt(device), max_new_tokens=NEW, do_sample=True, eos_token_id=None)
    before = counts(model)[0]
    both(oracle, model, prompt(device), eos_token_id=None)
    assert counts(model)[0] == before + NEW - 1
    check(model)


def test_positions_given_once_for_all_rows_are_no_wrong_guess(oracle: Any, model: Any, device: str) -> None:
    ids = prompt(device, 2)
    both(oracle, model, ids, position_ids=torch.arange(9, device=device)[None], eos_token_id=None)
    assert counts(model)[1] > 1 and counts(model)[2] == 0


def test_closing_between_two_tokens_is_refused_by_the_next(model: Any, device: str) -> None:
    stepper = model._stepper
    with pytest.raises(AirLLMError, match="closed"):
        model.generate(prompt(device), max_new_tokens=NEW, do_sample=False, streamer=Calls(model.close, 5))
    assert not stepper._states and not stepper._ahead.pending


def test_a_dropped_model_is_freed_without_the_collector(device: str) -> None:
    made = load(device, ahead=True)
    families.greedy(made, prompt(device), NEW)
    seen = [weakref.ref(each) for each in (made.model, made._runtime, made._stepper)]
    gc.collect()
    gc.disable()
    try:
        del made
        assert [each() for each in seen] == [None, None, None]
    finally:
        gc.enable()


@gpu
def test_a_dropped_model_does_not_break_the_recording_of_another(oracles: dict[str, Any]) -> None:
    """The collector may find it in the middle of that, and giving its memory back waits for the device."""
    dropped = load("cuda:0", ahead=True)
    families.greedy(dropped, prompt("cuda:0"), NEW)
    dropped.itself = dropped  # a cycle, as a caller may make one
    gone = weakref.ref(dropped._runtime.bank._memory)
    with load("cuda:0", ahead=True) as model:
        body = model._stepper._body
        del dropped

        def collects(state: Any) -> Any:
            if gc.isenabled():  # as it would by itself, sooner or later
                gc.collect()
            return body(state)

        model._stepper._body = collects
        gc.disable()
        try:
            families.greedy(model, prompt("cuda:0"), 2)
            gc.enable()
            families.greedy(model, prompt("cuda:0"), NEW)
        finally:
            gc.enable()
        del model._stepper._body
        assert model.get_expert_cache_stats()["device_engine_reason"] == "" and model._stepper.captures == 1
        gc.collect()
        assert gone() is None
