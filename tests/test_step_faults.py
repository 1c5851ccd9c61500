"""Faults within and around a step of the device engine, in a whole model; test_slot_faults.py has those of both engines.

After each: the original exception reaches the caller (or the tokens are right all the same), tables and slots agree, and the
next answers and counters are those of a fresh model. A step runs Python in its first two calls, the second of which is the
recording on a GPU; later ones are replays, in which nothing can be raised.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import families
import pytest
import slot_models
import torch
from slot_models import LAYERS, check, load, runtime
from slot_rig import DEVICES, Injected, gpu

from airllm import decode_step
from airllm.errors import NonFiniteError

NEW = 6
DTYPE = torch.float32  # in which rounding of the engine's own changes no token
BY_LAYER = ["route", "gate_up", "down", "attend", "sparsemixer", "project"]
CALLS_A_LAYER = {"project": 3}
COUNTED = ("hits", "misses", "evictions", "bypasses", "h2d_copies", "h2d_bytes")


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def make(checkpoint: Callable[..., Path], device: str) -> Callable[..., Any]:
    def build(**more: Any) -> Any:
        model = load(checkpoint("phimoe"), 5, device=device, expert_cache_engine="device", **more)
        assert model.get_expert_cache_stats()["engine"] == "device"
        return model

    return build


@pytest.fixture(scope="module")
def known(checkpoint: Callable[..., Path]) -> Callable[[str], list[torch.Tensor]]:
    """The oracle's tokens after the three prompts, by device."""
    made: dict[str, list[torch.Tensor]] = {}

    def of(device: str) -> list[torch.Tensor]:
        if device not in made:
            oracle = slot_models.oracle(checkpoint("phimoe"), device=device)
            made[device] = [families.greedy(oracle, prompt(n).to(device), NEW) for n in range(3)]
        return made[device]

    return of


def prompt(n: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(40 + n)
    return torch.randint(3, 512, (1, (9, 21, 66)[n]), generator=generator)


def answer(model: Any, n: int) -> torch.Tensor:
    return families.greedy(model, prompt(n).to(model.device), NEW)


def right_again(model: Any, expected: list[torch.Tensor]) -> None:
    """The table is whole, and everything that follows is what a fresh model does: tokens, steps and counters."""
    check(model)
    for n in range(3):
        assert torch.equal(answer(model, n), expected[n])
    check(model)
    assert counted(model) == counted(model), "the same call twice on the same state must count the same"


def counted(model: Any) -> dict[str, int]:
    """What the first answer costs, starting from empty slots."""
    model.clear_expert_cache()
    model.reset_expert_cache_stats()
    answer(model, 0)
    stats = model.get_expert_cache_stats()
    assert stats["misses"] == stats["h2d_copies"] and stats["recoveries"] == 0
    return {name: stats[name] for name in COUNTED}


@pytest.fixture(scope="module")
def usual(checkpoint: Callable[..., Path]) -> Callable[[str], dict[str, int]]:
    """``counted`` of the plain engine, which decides as the device engine does."""
    made: dict[str, dict[str, int]] = {}

    def of(device: str) -> dict[str, int]:
        if device not in made:
            made[device] = counted(load(checkpoint("phimoe"), 5, device=device, expert_cache_engine="plain"))
        return made[device]

    return of


def raise_in(patch: pytest.MonkeyPatch, model: Any, point: str, call: int, error: BaseException) -> list[int]:
    """Kernel ``point`` raises in its ``call``-th call from now on, once; gives the calls seen."""
    engine, seen = runtime(model).engine, [0]
    ops = engine.ops if hasattr(engine.ops, point) else model._stepper._fused._ops
    kernel = getattr(ops, point)

    def run(*args: Any, **more: Any) -> Any:
        seen[0] += 1
        if seen[0] == call:
            raise error
        return kernel(*args, **more)

    patch.setattr(ops, point, run)
    return seen


@pytest.mark.parametrize("error", [Injected("mine"), KeyboardInterrupt("mine")], ids=["exception", "interrupt"])
@pytest.mark.parametrize("step", [0, 1], ids=["first step", "second step"])
@pytest.mark.parametrize("point", BY_LAYER)
def test_an_exception_in_any_kernel_of_any_layer_reaches_the_caller_and_costs_nothing_later(
    point: str, step: int, error: BaseException, make: Any, known: Any, usual: Any, device: str
) -> None:
    model, each = make(), CALLS_A_LAYER.get(point, 1)
    for layer in range(LAYERS):
        # project has one more call a step, for the head
        call = 1 + (step * LAYERS + layer) * each + (step if point == "project" else 0)
        model._stepper._forget(model._stepper._states)  # a step that was recorded runs no Python
        with pytest.MonkeyPatch.context() as patch:
            seen = raise_in(patch, model, point, call, error)
            with pytest.raises(type(error)) as caught:
                answer(model, 0)
        assert caught.value is error and seen[0] == call
        check(model)
        assert len(runtime(model).policy) == 0, "after a step cut short nothing is believed resident"
        assert model.get_expert_cache_stats()["recoveries"] == 1
        assert counted(model) == usual(device)
    right_again(model, known(device))


def test_an_interrupt_while_the_first_one_is_cleaned_up_after_costs_nothing_either(
    make: Any, known: Any, device: str
) -> None:
    model = make(expert_cache_policy="lru")  # which lets every miss in
    engine, tables = runtime(model).engine, runtime(model).engine.tables
    with pytest.MonkeyPatch.context() as patch:
        compute = engine.ops.gate_up

        def once_more() -> None:
            raise KeyboardInterrupt("second")

        def first(*call: Any) -> None:
            """In the place of the first read into a slot, of which the tables already speak."""
            if not (tables.miss_slot[: int(tables.miss_count)] < tables.slots).any():
                return compute(*call)
            patch.setattr(engine, "_synchronize", once_more)
            raise KeyboardInterrupt("first")

        patch.setattr(engine.ops, "gate_up", first)
        with pytest.raises(KeyboardInterrupt, match="second"):
            answer(model, 0)
    check(model)
    right_again(model, known(device))


class Interrupts:
    """A logits processor that raises between two steps."""

    def __init__(self, after: int, error: BaseException) -> None:
        self.left, self.error = after, error

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.left -= 1
        if self.left < 0:
            raise self.error
        return scores


@pytest.mark.parametrize("after", [0, 1, 2, 4])
def test_an_interrupt_between_steps_leaves_the_slots_as_they_are(
    after: int, make: Any, known: Any, usual: Any, device: str
) -> None:
    model = make()
    error = KeyboardInterrupt("mine")
    with pytest.raises(KeyboardInterrupt) as caught:
        model.generate(prompt(0).to(device), max_new_tokens=NEW, do_sample=False, logits_processor=[Interrupts(after, error)])
    assert caught.value is error
    check(model)
    assert len(runtime(model).policy) > 0 and model.get_expert_cache_stats()["recoveries"] == 0
    right_again(model, known(device))
    assert counted(model) == usual(device)


@pytest.mark.parametrize("times", [1, 2])
def test_no_memory_for_the_static_cache_costs_a_retry_or_the_steps_of_one_call(
    times: int, make: Any, known: Any, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, left = make(), [times]
    whole = decode_step.StepState

    def refuse(*args: Any) -> Any:
        left[0] -= 1
        if left[0] >= 0:
            raise torch.OutOfMemoryError("no memory left")
        return whole(*args)

    monkeypatch.setattr(decode_step, "StepState", refuse)
    assert torch.equal(answer(model, 0), known(device)[0])
    stats = model.get_expert_cache_stats()
    assert stats["device_engine_steps"] == (NEW - 1 if times == 1 else 0)
    assert ("no memory left" in stats["device_engine_reason"]) == (times == 2)
    assert torch.equal(answer(model, 1), known(device)[1])
    assert model.get_expert_cache_stats()["device_engine_steps"] >= NEW - 1, "the next call has memory again"
    right_again(model, known(device))


@pytest.mark.parametrize("step", [0, 1], ids=["first step", "second step"])
def test_no_memory_within_a_step_or_its_recording_sends_the_rest_the_plain_way(
    step: int, make: Any, known: Any, device: str
) -> None:
    model = make()
    with pytest.MonkeyPatch.context() as patch:
        raise_in(patch, model, "gate_up", 1 + step * LAYERS, torch.OutOfMemoryError("no memory left"))
        assert torch.equal(answer(model, 0), known(device)[0])
    stats = model.get_expert_cache_stats()
    assert "ran out of memory" in stats["device_engine_reason"] and stats["device_engine_steps"] == step
    assert stats["step_cache_bytes"] == 0, "the memory that was short is given back"
    right_again(model, known(device))


@pytest.mark.parametrize("step", [0, 1, 3], ids="step {}".format)
@pytest.mark.parametrize("sampled", [False, True], ids=["greedy", "sampled"])
def test_numbers_that_are_not_finite_are_reported_with_the_layer_they_come_from(
    step: int, sampled: bool, make: Any, known: Any, device: str
) -> None:
    """Planted on the device by position, so that a recorded step does it in its replays."""
    model = make()
    engine, first = runtime(model).engine, prompt(0).shape[1]
    experts = engine.experts

    def spoil(layer: int, *args: Any, **more: Any) -> torch.Tensor:
        out = experts(layer, *args, **more)
        if layer == 1:
            out.masked_fill_(model._stepper._active.slot == first + step, torch.nan)
        return out

    engine.experts = spoil
    with pytest.raises(NonFiniteError, match=r"layers\.1\b"):
        model.generate(prompt(0).to(device), max_new_tokens=NEW, do_sample=sampled, pad_token_id=0)
    del engine.experts
    model._stepper._states.clear()  # its recording holds the fault
    right_again(model, known(device))


def test_two_threads_take_turns_while_one_of_them_fails(make: Any, known: Any, device: str) -> None:
    model, expected = make(), known(device)
    wrong: list[object] = []
    raised: list[BaseException] = []

    def serve(thread: int) -> None:
        try:
            for turn in range(4):
                if (thread + turn) % 2:
                    call = {"max_new_tokens": NEW, "logits_processor": [Interrupts(turn, Injected())]}
                    model.generate(prompt(0).to(device), do_sample=False, **call)
                    wrong.append("nothing was raised")
                else:
                    wrong.extend([turn] if not torch.equal(answer(model, turn % 3), expected[turn % 3]) else [])
        except Injected as error:
            raised.append(error)
        except BaseException as error:  # noqa: BLE001 - shown by the assertion
            wrong.append(error)

    threads = [threading.Thread(target=serve, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert not any(thread.is_alive() for thread in threads) and not wrong and len(raised) == 2
    right_again(model, expected)


def test_poisoned_slots_change_no_token(make: Any, known: Any, device: str) -> None:
    """NaN in everything that the tables do not call resident, between calls: nobody may read it."""
    model = make()
    for n in (0, 1, 2, 0):
        check(model)
        held = set(runtime(model).policy.residents().values())
        for place in range(len(runtime(model).pool.blocks)):
            if place not in held:
                runtime(model).pool.poison(place)
        assert torch.equal(answer(model, n), known(device)[n])


def test_a_wrong_table_would_show(make: Any, known: Any, device: str) -> None:
    """The tests above would be worth nothing if a swapped expert did not show."""
    model = make()
    answer(model, 0)
    tables = runtime(model).engine.tables
    assert runtime(model).engine.ahead
    held = [slot for slot, key in enumerate(tables.owner.tolist()) if key >= 0][:2]
    runtime(model).pool.blocks[held[0]].copy_(runtime(model).pool.blocks[held[1]])
    with pytest.raises(AssertionError, match="does not hold expert"):
        check(model)
    tables.owner[held[0]] = -1
    with pytest.raises(AssertionError, match="contradict"):
        tables.check()


@gpu
def test_a_step_that_was_recorded_before_the_fault_is_recorded_anew(checkpoint: Callable[..., Path], known: Any) -> None:
    model = load(checkpoint("phimoe"), 5, device="cuda:0", expert_cache_engine="device")
    assert torch.equal(answer(model, 0), known("cuda:0")[0])
    stepper = model._stepper
    assert stepper.captures == 1
    graph = stepper._states[-1].graph

    class Broken:
        def replay(self) -> None:
            raise Injected("mine")

    stepper._states[-1].graph = Broken()
    with pytest.raises(Injected):
        answer(model, 0)
    del graph
    assert torch.equal(answer(model, 0), known("cuda:0")[0]) and stepper.captures == 2
    right_again(model, known("cuda:0"))
