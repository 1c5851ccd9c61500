"""What goes wrong in programs of this kind, made to go wrong in a whole model on slots, with either engine.

test_step_faults.py has the faults within a step of the device engine. After each fault: the original exception reaches the
caller, no lease survives, every slot holds what the table says, and the next answer is the one of a fresh model.
"""

from __future__ import annotations

import hashlib
import random
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import families
import pytest
import slot_models
import torch
from slot_models import LAYERS, check, load, runtime
from slot_rig import DEVICES, Injected, LateTransfer, gpu
from transformers import TextIteratorStreamer
from transformers.generation.stopping_criteria import StoppingCriteria, StoppingCriteriaList

from airllm import airllm_phimoe
from airllm.errors import AirLLMError
from airllm.experts import assembly
from airllm.experts.compute import ExpertMath
from airllm.experts.grouped import GroupedSum
from airllm.experts.transfer import StreamTransfer, SyncTransfer

PROMPT, NEW = 20, 5
POINTS = ["before copy", "after copy", "in compute"]


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(params=["plain", "device"])
def engine(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def dtype(device: str, engine: str) -> torch.dtype:
    """The device engine rounds on its own: in float32 that changes no token."""
    return torch.float32 if device == "cpu" or engine == "device" else torch.float16


@pytest.fixture
def make(checkpoint: Callable[..., Path], device: str, dtype: torch.dtype, engine: str) -> Callable[..., Any]:
    def build(slots: float = 4) -> Any:
        folder = checkpoint("phimoe", dtype=dtype)
        model = load(folder, slots, device=device, dtype=dtype, expert_cache_engine=engine)
        assert model.get_expert_cache_stats()["engine"] == engine
        return model

    return build


@pytest.fixture(scope="module")
def known(checkpoint: Callable[..., Path]) -> Callable[..., list[torch.Tensor]]:
    """The oracle's tokens after some prompts of different lengths, by device and dtype."""
    made: dict[tuple[str, torch.dtype], list[torch.Tensor]] = {}

    def of(device: str, dtype: torch.dtype) -> list[torch.Tensor]:
        if (device, dtype) not in made:
            oracle = slot_models.oracle(checkpoint("phimoe", dtype=dtype), device=device)
            made[device, dtype] = [families.greedy(oracle, prompt(n).to(device), NEW) for n in range(8)]
        return made[device, dtype]

    return of


def prompt(n: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(n)
    return torch.randint(3, 512, (1, (PROMPT, 1, 7, 33, 70, 2, 12, 20)[n]), generator=generator)


def answer(model: Any, n: int) -> torch.Tensor:
    return families.greedy(model, prompt(n).to(model.device), NEW)


# --- exceptions and interrupts ----------------------------------------------------------------------------------------


class Fault:
    """Raises ``error`` at one point of one layer, in the prompt's forward or in that of the third new token.

    The slots are emptied before that layer, since a token that only hits copies nothing.
    """

    def __init__(self, model: Any, patch: pytest.MonkeyPatch, layer: int, point: str, forward: int, error: BaseException):
        self.error, self.layer, self.forward, self.seen, self.fired = error, layer, forward, -1, False
        self.armed = False
        used = runtime(model)
        self.policy = used.policy
        begin, run, copy = used.begin_forward, used._run_once, used._copy
        patch.setattr(used, "begin_forward", lambda *a: (setattr(self, "seen", self.seen + 1), begin(*a))[1])
        patch.setattr(used, "_run_once", lambda call: self.arm(call, run))
        if point == "in compute":
            for module in model.model.modules():
                if isinstance(module, assembly.SlotExperts):
                    gate = module.apply_gate
                    patch.setattr(module, "math", ExpertMath(lambda z, gate=gate: (self.fire(), gate(z))[1]))
            add = GroupedSum.add  # which computes a prompt of the device engine
            patch.setattr(GroupedSum, "add", lambda total, *call: (self.fire(), add(total, *call))[1])
        elif point == "before copy":
            patch.setattr(used, "_copy", lambda *step: (self.fire(), copy(*step))[1])
        else:
            patch.setattr(used, "_copy", lambda *step: (copy(*step), self.fire()))

    def arm(self, call: Any, run: Callable[[Any], Any]) -> Any:
        self.armed = call.layer == self.layer and self.seen == self.forward
        if self.armed and not self.fired:
            self.policy.clear()
        return run(call)

    def fire(self) -> None:
        if self.armed and not self.fired:
            self.fired = True
            raise self.error


def forwards(engine: str) -> list[int]:
    """The third token of the device engine does not pass here: test_step_faults.py."""
    return [0, 2] if engine == "plain" else [0]


@pytest.mark.parametrize("error", [Injected("mine"), KeyboardInterrupt("mine")], ids=["exception", "interrupt"])
@pytest.mark.parametrize("point", POINTS)
def test_an_exception_at_every_step_of_every_layer_leaves_a_model_that_answers_right(
    point: str,
    error: BaseException,
    make: Callable[..., Any],
    known: Callable[..., Any],
    device: str,
    dtype: torch.dtype,
    engine: str,
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        if point == "in compute" and device != "cpu":
            patch.setattr(airllm_phimoe, "record_decode", lambda *_: ("a graph does not call the gate", lambda: None))
        model = make()
    expected = known(device, dtype)
    cases = [(forward, layer) for forward in forwards(engine) for layer in range(LAYERS)]
    for forward, layer in cases:
        with pytest.MonkeyPatch.context() as patch:
            fault = Fault(model, patch, layer, point, forward, error)
            with pytest.raises(type(error)) as caught:
                answer(model, 0)
        assert caught.value is error and fault.fired
        check(model)
        assert torch.equal(answer(model, 0), expected[0])
        assert torch.equal(answer(model, 1 + layer), expected[1 + layer])
        check(model)
    assert model.get_expert_cache_stats()["recoveries"] == len(cases)


@pytest.mark.parametrize("where", ["model.layers.1.self_attn", "model.layers.2.mlp.router", "lm_head"])
def test_an_exception_outside_the_experts_leaves_the_model_right_too(
    where: str, make: Callable[..., Any], known: Callable[..., Any], device: str, dtype: torch.dtype
) -> None:
    model = make()
    left = [3]

    def fail(*_: object) -> None:
        left[0] -= 1
        if left[0] == 0:
            raise KeyboardInterrupt

    hook = model.model.get_submodule(where).register_forward_pre_hook(fail)
    with pytest.raises(KeyboardInterrupt):
        answer(model, 0)
    hook.remove()
    check(model)
    assert torch.equal(answer(model, 0), known(device, dtype)[0])


def test_out_of_memory_once_costs_a_retry_and_twice_is_an_ordinary_error(
    make: Callable[..., Any], known: Callable[..., Any], device: str, dtype: torch.dtype
) -> None:
    model = make()
    for times, retries in ((1, 1), (2, 2)):
        with pytest.MonkeyPatch.context() as patch:
            copy, left = runtime(model)._copy, [times]

            def fail(*step: Any, copy: Any = copy, left: Any = left) -> None:
                copy(*step)
                left[0] -= 1
                if left[0] >= 0:
                    raise torch.OutOfMemoryError("no memory left")

            patch.setattr(runtime(model), "_copy", fail)
            if times == 1:
                assert torch.equal(answer(model, 0), known(device, dtype)[0])
            else:
                with pytest.raises(torch.OutOfMemoryError, match="no memory left"):
                    answer(model, 0)
        assert model.get_expert_cache_stats()["oom_retries"] == retries
        check(model)
        assert torch.equal(answer(model, 6), known(device, dtype)[6])


def test_bad_arguments_are_the_callers_error_and_nothing_more(
    make: Callable[..., Any], known: Callable[..., Any], device: str, dtype: torch.dtype
) -> None:
    model = make()
    with pytest.raises((IndexError, ValueError, RuntimeError)):
        if device != "cpu":
            raise IndexError("an id outside the vocabulary ends the device's context, for transformers alike")
        model(torch.tensor([[99999]]))
    with pytest.raises((ValueError, TypeError)):
        model.generate(prompt(0), no_such_argument=1)
    assert torch.equal(answer(model, 0), known(device, dtype)[0])


# --- threads, streamers, generates given up ---------------------------------------------------------------------------


def test_eight_threads_and_their_prompts_get_what_one_gets(
    make: Callable[..., Any], known: Callable[..., Any], device: str, dtype: torch.dtype
) -> None:
    model, expected = make(), known(device, dtype)
    wrong: list[object] = []

    def serve(thread: int) -> None:
        try:
            for turn in range(3):
                n = (thread * 3 + turn) % 8
                if not torch.equal(answer(model, n), expected[n]):
                    wrong.append(n)
        except BaseException as error:  # noqa: BLE001 - shown by the assertion
            wrong.append(error)

    run_threads([lambda thread=thread: serve(thread) for thread in range(8)])
    assert not wrong
    check(model)


def test_threads_that_call_the_model_directly_take_turns_too(
    make: Callable[..., Any], checkpoint: Callable[..., Path], device: str, dtype: torch.dtype
) -> None:
    model, oracle = make(3), slot_models.oracle(checkpoint("phimoe", dtype=dtype), device=device)
    with torch.no_grad():
        expected = [oracle(prompt(n).to(device)).logits for n in range(8)]
    wrong: list[object] = []

    def same(ours: torch.Tensor, theirs: torch.Tensor) -> bool:
        """The same bits; with the device engine, which adds a prompt's experts up in its own order, up to rounding."""
        room = 0.0
        if runtime(model).engine is not None:
            room = (1e-4 if dtype == torch.float32 else 0.02) * float(theirs.abs().max())
        return bool((ours - theirs).abs().max() <= room)

    def serve(thread: int) -> None:
        try:
            for turn in range(4):
                n = (thread + turn * 3) % 8
                with torch.no_grad():
                    if not same(model.model(prompt(n).to(device)).logits, expected[n]):
                        wrong.append(n)
        except BaseException as error:  # noqa: BLE001 - shown by the assertion
            wrong.append(error)

    run_threads([lambda thread=thread: serve(thread) for thread in range(8)])
    assert not wrong
    check(model)


def run_threads(work: list[Callable[[], object]]) -> None:
    threads = [threading.Thread(target=each) for each in work]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert not any(thread.is_alive() for thread in threads), "a thread waits for ever"


def test_a_thread_that_raises_lets_the_others_go_on(
    make: Callable[..., Any], known: Callable[..., Any], device: str, dtype: torch.dtype
) -> None:
    model, expected = make(), known(device, dtype)
    copy, lock, left = runtime(model)._copy, threading.Lock(), [9]
    raised, wrong = [], []

    def sometimes(*step: Any) -> None:
        with lock:
            left[0] -= 1
            failing = left[0] % 100 == 0
        if failing:
            raise Injected
        copy(*step)

    def serve(n: int) -> None:
        try:
            wrong.extend([n] if not torch.equal(answer(model, n), expected[n]) else [])
        except Injected as error:
            raised.append(error)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runtime(model), "_copy", sometimes)
        run_threads([lambda n=n: serve(n) for n in range(8)])
    assert 0 < len(raised) < 8 and not wrong
    check(model)
    assert torch.equal(answer(model, 3), expected[3])


def test_closing_waits_for_the_running_call_and_ends_later_ones(make: Callable[..., Any]) -> None:
    model = make()
    inside, closed, ended = threading.Event(), threading.Event(), []

    class Slow(StoppingCriteria):
        def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **_: Any) -> torch.Tensor:
            inside.set()
            assert not closed.wait(0.05), "closed under a running call"
            return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)

    def serve() -> None:
        slow = StoppingCriteriaList([Slow()])
        ended.append(model.generate(prompt(2).to(model.device), max_new_tokens=4, stopping_criteria=slow))

    thread = threading.Thread(target=serve)
    thread.start()
    assert inside.wait(60)
    model.close()
    closed.set()
    thread.join(60)
    assert len(ended) == 1
    with pytest.raises(AirLLMError, match="closed"):
        answer(model, 0)


class FailingStreamer:
    """A consumer that breaks off in the midst."""

    def __init__(self, after: int) -> None:
        self.left = after

    def put(self, value: torch.Tensor) -> None:
        self.left -= 1
        if self.left < 0:
            raise Injected("the reader has gone")

    def end(self) -> None: ...


@pytest.mark.parametrize("after", [0, 1, 3])
def test_a_generate_given_up_half_way_leaves_nothing_behind(
    after: int, make: Callable[..., Any], known: Callable[..., Any], device: str, dtype: torch.dtype
) -> None:
    model = make()
    with pytest.raises(Injected):
        model.generate(prompt(0).to(device), max_new_tokens=8, streamer=FailingStreamer(after))
    check(model)
    assert torch.equal(answer(model, 0), known(device, dtype)[0])


class Words:
    """As much of a tokenizer as a text streamer asks for."""

    def decode(self, ids: Any, **_: Any) -> str:
        return "".join(f"{int(each)} " for each in (ids if hasattr(ids, "__iter__") else [ids]))


def test_a_text_streamer_nobody_reads_any_more_does_not_block_the_model(
    make: Callable[..., Any], known: Callable[..., Any], device: str, dtype: torch.dtype
) -> None:
    model = make()
    streamer = TextIteratorStreamer(Words(), timeout=60)  # type: ignore[arg-type]
    thread = threading.Thread(
        target=lambda: model.generate(prompt(0).to(device), max_new_tokens=6, streamer=streamer)
    )
    thread.start()
    assert next(iter(streamer)) is not None  # and then the consumer stops reading
    thread.join(60)
    assert not thread.is_alive()
    assert torch.equal(answer(model, 0), known(device, dtype)[0])


# --- poison -----------------------------------------------------------------------------------------------------------


class PoisonTransfer(SyncTransfer):
    """Fills the target with NaN before each copy, so that a copy too short or to the wrong place shows."""

    def copy(self, source: torch.Tensor, target: torch.Tensor, place: int) -> None:
        target.fill_(255)
        super().copy(source, target, place)


@pytest.mark.parametrize("policy", ["aged", "lru"])
@pytest.mark.parametrize("kind", [PoisonTransfer, LateTransfer])
def test_with_poison_everywhere_no_number_changes(
    kind: Any, policy: str, checkpoint: Callable[..., Path], known: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(assembly, "SyncTransfer", kind)
    model = load(checkpoint("phimoe"), 3, expert_cache_policy=policy)  # its pool is full of NaN
    admit = runtime(model).policy.admit

    def admit_and_poison(key: int, **how: bool) -> int | None:
        before = runtime(model).policy.residents()
        slot = admit(key, **how)
        for lost in set(before) - set(runtime(model).policy.residents()):
            runtime(model).pool.poison(before[lost])
        return slot

    monkeypatch.setattr(runtime(model).policy, "admit", admit_and_poison)
    for n in (0, 4, 1, 5, 0):
        assert torch.equal(answer(model, n), known("cpu", torch.float32)[n])
        check(model)


def test_equal_runs_have_one_hash_whatever_ran_between_them(checkpoint: Callable[..., Path]) -> None:
    model = load(checkpoint("phimoe", dtype=torch.bfloat16), 3, dtype=torch.bfloat16)
    draw, hashes = random.Random(0), set()
    ids = prompt(6)
    for run in range(40):
        if run % 2 == 0:  # what is cached differs from run to run
            model(prompt(draw.randrange(8)))
        logits = model(ids).logits
        hashes.add(hashlib.sha256(logits.view(torch.int16).numpy().tobytes()).hexdigest())
    assert len(hashes) == 1


def test_the_oracle_tells_a_wrong_expert_from_a_right_one(
    checkpoint: Callable[..., Path], known: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tests above would be worth nothing if a swapped expert did not show."""
    model = load(checkpoint("phimoe"), 4)
    sources = list(runtime(model)._sources)
    sources[0], sources[1] = sources[1], sources[0]
    sources[9], sources[10] = sources[10], sources[9]
    monkeypatch.setattr(runtime(model), "_sources", tuple(sources))
    assert any(not torch.equal(answer(model, n), known("cpu", torch.float32)[n]) for n in range(8))


# --- streams ----------------------------------------------------------------------------------------------------------


class Delayed(StreamTransfer):
    """Copies, or the arithmetic after each wait, are held back; one ordering edge may be missing."""

    slow, without = "", ""
    cycles = 2_000_000

    def _move(self, source: torch.Tensor, target: torch.Tensor) -> None:
        if self.slow == "copy":
            torch.cuda._sleep(self.cycles)
        super()._move(source, target)

    def wait(self, place: int) -> None:
        if self.without != "wait":
            super().wait(place)
        if self.slow == "compute":
            torch.cuda._sleep(self.cycles)

    def done_reading(self, place: int) -> None:
        if self.without != "done_reading":
            super().done_reading(place)


@pytest.fixture
def delayed(checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Any]]:
    monkeypatch.setattr(assembly, "StreamTransfer", Delayed)

    def build(slow: str, without: str = "") -> Any:
        monkeypatch.setattr(Delayed, "slow", slow)
        monkeypatch.setattr(Delayed, "without", without)
        return load(checkpoint("phimoe", dtype=torch.float16), 2, device="cuda:0", dtype=torch.float16)

    yield build


@gpu
@pytest.mark.parametrize("slow", ["copy", "compute"])
def test_delays_in_the_copies_and_in_the_arithmetic_change_nothing(
    slow: str, delayed: Callable[..., Any], known: Callable[..., Any]
) -> None:
    model = delayed(slow)
    for n in (0, 3, 1):
        assert torch.equal(answer(model, n), known("cuda:0", torch.float16)[n])
        check(model)


@gpu
@pytest.mark.parametrize(("slow", "without"), [("copy", "wait"), ("compute", "done_reading")])
def test_a_missing_edge_shows(slow: str, without: str, delayed: Callable[..., Any], known: Callable[..., Any]) -> None:
    model = delayed(slow, without)
    right = 0
    for n in (0, 3, 1):
        try:
            right += torch.equal(answer(model, n), known("cuda:0", torch.float16)[n])
        except ArithmeticError:  # NaN out of a place that was read too early
            pass
    assert right < 3
