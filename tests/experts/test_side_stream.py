"""The order of waits around work on a side stream; fakes stand for streams, so that a CPU can see it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch

from airllm.experts.side_stream import on_stream


class Stream:
    """Writes down who waits for whom."""

    device = torch.device("cpu")

    def __init__(self, name: str, log: list[str]) -> None:
        self.name, self.log = name, log

    def wait_stream(self, other: Stream) -> None:
        self.log.append(f"{self.name} waits for {other.name}")


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    made: list[str] = []
    now = [Stream("main", made)]

    @contextmanager
    def stream(other: Stream) -> Iterator[None]:
        now.append(other)
        yield
        now.pop()

    monkeypatch.setattr(torch.cuda, "current_stream", lambda _device: now[-1])
    monkeypatch.setattr(torch.cuda, "stream", stream)
    return made


def work(log: list[str]) -> None:
    log.append(f"work on {torch.cuda.current_stream('cpu').name}")  # type: ignore[attr-defined]


BEFORE, WORK, AFTER = "side waits for main", "work on side", "main waits for side"


@pytest.mark.parametrize("wait", [True, False])
def test_work_comes_after_what_was_there_and_before_what_comes(log: list[str], wait: bool) -> None:
    with on_stream(Stream("side", log), wait=wait):  # type: ignore[arg-type]
        work(log)
    assert log == [BEFORE, WORK, AFTER][: 3 if wait else 2]


def test_without_a_stream_nothing_waits(log: list[str]) -> None:
    with on_stream(None):
        work(log)
    assert log == ["work on main"]


@pytest.mark.parametrize("error", [KeyboardInterrupt, torch.OutOfMemoryError])
def test_the_first_error_is_the_one_to_show(
    log: list[str], error: Callable[[], BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(_self: Stream, _other: Stream) -> None:
        raise RuntimeError("the recording is broken")

    with pytest.raises(error), on_stream(Stream("side", log)):  # type: ignore[arg-type]
        monkeypatch.setattr(Stream, "wait_stream", broken)
        raise error()
    assert log == [BEFORE]
