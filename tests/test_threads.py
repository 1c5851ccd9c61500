"""Many threads, two models, a consumer that goes away: calls wait for one another and never mix."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import families
import pytest
import torch
from transformers import TextIteratorStreamer

from airllm.airllm_base import AirLLMBaseModel

THREADS, PROMPTS = 8, 10


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def model(checkpoint: Callable[..., Path], device: str) -> Iterator[AirLLMBaseModel]:
    made = AirLLMBaseModel(checkpoint("llama", num_hidden_layers=5), device=device)
    yield made
    made.close()


def prompt(number: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(number)
    return torch.randint(3, 256, (1, 3 + number % 5), generator=generator)


def answer(model: Any, number: int) -> list[int]:
    ids = prompt(number).to(model.device)
    return model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=3, do_sample=False)[0].tolist()


@pytest.mark.parametrize("directly", [False, True], ids=["airllm", "transformers"])
def test_eight_threads_with_ten_prompts_each_get_their_single_thread_answers(
    directly: bool, model: AirLLMBaseModel
) -> None:
    asked: Any = model.model if directly else model  # the transformers model inside may be called too
    alone = [answer(model, number) for number in range(PROMPTS)]
    assert len({tuple(tokens) for tokens in alone}) == PROMPTS
    with ThreadPoolExecutor(THREADS) as pool:
        rows = list(pool.map(lambda _: [answer(asked, number) for number in range(PROMPTS)], range(THREADS)))
    assert rows == [alone] * THREADS


def test_a_thread_that_raises_frees_the_lock(model: AirLLMBaseModel) -> None:
    alone = answer(model, 1)

    def fail(*_: Any) -> None:
        if threading.current_thread().name == "the one that fails":
            raise RuntimeError("in the middle")

    model.model.model.layers[2].mlp.register_forward_pre_hook(fail)
    caught: list[BaseException] = []

    def run() -> None:
        try:
            answer(model, 1)
        except RuntimeError as error:
            caught.append(error)

    thread = threading.Thread(target=run, name="the one that fails")
    thread.start()
    thread.join(30)
    assert [str(error) for error in caught] == ["in the middle"]
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(answer, model, 1).result(30) == alone


def test_two_models_in_one_process_do_not_meet(checkpoint: Callable[..., Path], device: str) -> None:
    folders = [checkpoint(family, num_hidden_layers=5) for family in ("llama", "mixtral")]
    models = [AirLLMBaseModel(folder, device=device) for folder in folders]
    alone = [[answer(model, number) for number in range(4)] for model in models]
    oracles = [families.oracle(folder, experts=None).to(device) for folder in folders]
    assert alone == [[answer(oracle, number) for number in range(4)] for oracle in oracles]
    with ThreadPoolExecutor(4) as pool:
        work = [(which, number) for number in range(4) for which in (0, 1)] * 3
        answers = list(pool.map(lambda item: answer(models[item[0]], item[1]), work))
    assert answers == [alone[which][number] for which, number in work]
    models[0].close()
    assert answer(models[1], 2) == alone[1][2]
    models[1].close()


def test_closing_waits_for_the_call_that_runs(model: AirLLMBaseModel) -> None:
    alone, inside, go_on = answer(model, 1), threading.Event(), threading.Event()

    def pause(*_: Any) -> None:
        inside.set()
        go_on.wait(30)

    hook = model.model.model.layers[2].mlp.register_forward_pre_hook(pause)
    with ThreadPoolExecutor(2) as pool:
        running = pool.submit(answer, model, 1)
        assert inside.wait(30)
        closing = pool.submit(model.close)
        assert not closing.done()
        hook.remove()
        go_on.set()
        assert running.result(30) == alone
        closing.result(30)


def test_an_iterator_streamer_may_be_abandoned_half_way(model: AirLLMBaseModel) -> None:
    class Words:
        def decode(self, tokens: Any, **_: Any) -> str:
            return " ".join(map(str, tokens)) + " "

    alone = answer(model, 3)
    streamer = TextIteratorStreamer(Words())
    thread = threading.Thread(target=model.generate, args=(prompt(3),), kwargs={"streamer": streamer, "max_length": 30})
    thread.start()
    next(streamer)  # and never again
    thread.join(60)
    assert not thread.is_alive()
    assert answer(model, 3) == alone


def test_threads_do_not_grow_with_calls(model: AirLLMBaseModel) -> None:
    answer(model, 1)
    before = threading.active_count()
    for number in range(10):
        answer(model, number)
    assert threading.active_count() <= before
