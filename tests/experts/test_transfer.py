"""The two ordering edges of a place. On a GPU delays are put into the copies and into the arithmetic: results must not change,
and must change once an edge is taken out, or the test would prove nothing."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from slot_rig import DEVICES, LateTransfer, Rig, gpu

from airllm.experts.transfer import StreamTransfer, SyncTransfer

LONG = 20_000_000  # cycles: some 10 ms
EDGES = ["wait", "done_reading"]


def rounds(transfer: Any, device: str) -> bool:
    """Copy changing numbers through two places and add each up; whether the sums are right."""
    width, turns = 1 << 16, 24
    sources = torch.arange(turns, dtype=torch.float32)[:, None].expand(turns, width).contiguous()
    if device != "cpu":
        sources = sources.pin_memory()
    places = torch.full((2, width), float("nan"), device=device)
    sums = torch.zeros(turns, device=device)
    for place in range(2):
        transfer.done_reading(place)  # what was just written there comes before the copies
    transfer.copy(sources[0], places[0], 0)
    for turn in range(turns):
        place = turn % 2
        if turn + 1 < turns:
            transfer.copy(sources[turn + 1], places[1 - place], 1 - place)
        transfer.wait(place)
        if device != "cpu" and getattr(transfer, "slow_compute", False):
            torch.cuda._sleep(LONG // 8)
        sums[turn] = places[place].mean()
        transfer.done_reading(place)
    transfer.synchronize()
    return torch.equal(sums.cpu(), torch.arange(turns, dtype=torch.float32))


@pytest.mark.parametrize("kind", [SyncTransfer, LateTransfer])
def test_the_twins_bring_what_was_asked_for(kind: Any) -> None:
    assert rounds(kind(), "cpu")
    assert kind.staging_bytes == 0


@pytest.mark.parametrize("edge", ["wait"])
def test_the_late_twin_shows_a_missing_wait(edge: str) -> None:
    transfer = LateTransfer()
    setattr(transfer, edge, lambda place: None)
    assert not rounds(transfer, "cpu")


def test_the_late_twin_shows_a_copy_over_what_is_read() -> None:
    transfer = LateTransfer()
    place = torch.zeros(4)
    transfer.wait(0)
    with pytest.raises(AssertionError, match="while it is read"):
        transfer.copy(torch.ones(4), place, 0)
    transfer.done_reading(0)
    transfer.copy(torch.ones(4), place, 0)


class Delayed(StreamTransfer):
    """Copies, or the arithmetic after a wait, take much longer than they should; one edge may be missing."""

    def __init__(self, places: int, *, slow: str, without: str | None = None) -> None:
        super().__init__(places, torch.device("cuda:0"))
        self.slow_copy, self.slow_compute, self._without = slow == "copy", slow == "compute", without

    def _move(self, source: torch.Tensor, target: torch.Tensor) -> None:
        if self.slow_copy:
            torch.cuda._sleep(LONG // 8)
        super()._move(source, target)

    def wait(self, place: int) -> None:
        if self._without != "wait":
            super().wait(place)
        if self.slow_compute:
            torch.cuda._sleep(LONG // 8)

    def done_reading(self, place: int) -> None:
        if self._without != "done_reading":
            super().done_reading(place)


@gpu
@pytest.mark.parametrize("slow", ["neither", "copy", "compute"])
def test_delays_change_nothing(slow: str) -> None:
    assert rounds(Delayed(2, slow=slow), "cuda:0")
    rig = Rig(4, device="cuda:0", transfer=Delayed(6, slow=slow))
    for tokens in (1, 64, 1, 1, 3, 40, 1):
        rig.runtime.begin_forward(1, tokens, rig.device)
        for layer in range(3):
            rig.call(layer, *rig.draw(tokens))


@gpu
@pytest.mark.parametrize(("slow", "without"), [("copy", "wait"), ("compute", "done_reading")])
def test_taking_an_edge_out_shows(slow: str, without: str) -> None:
    assert not rounds(Delayed(2, slow=slow, without=without), "cuda:0")
    rig = Rig(4, device="cuda:0", transfer=Delayed(6, slow=slow, without=without))
    wrong = 0
    for tokens in (1, 64, 1, 1, 3, 40, 1):
        rig.runtime.begin_forward(1, tokens, rig.device)
        asked = [rig.draw(tokens) for _ in range(3)]
        ours = [rig.run(layer, *asked[layer]) for layer in range(3)]
        wrong += any(not torch.equal(ours[layer], rig.expected(layer, *asked[layer])) for layer in range(3))
    assert wrong


@gpu
def test_a_stream_that_waited_once_does_not_wait_again_and_another_one_does() -> None:
    transfer = StreamTransfer(1, torch.device("cuda:0"))
    source, place = torch.ones(4).pin_memory(), torch.zeros(4, device="cuda:0")
    transfer.copy(source, place, 0)
    transfer.wait(0)
    first = transfer._ready_for[0]
    transfer.wait(0)
    assert transfer._ready_for[0] == first == torch.cuda.current_stream().cuda_stream
    other = torch.cuda.Stream()
    with torch.cuda.stream(other):
        transfer.wait(0)
    assert transfer._ready_for[0] == other.cuda_stream
    transfer.copy(source, place, 0)
    assert transfer._ready_for[0] is None


@gpu
@pytest.mark.parametrize("slow", ["copy", "compute"])
def test_threads_on_streams_of_their_own_get_what_one_gets(slow: str) -> None:
    rig = Rig(2, device="cuda:0", transfer=Delayed(4, slow=slow))
    turn = threading.Lock()
    wrong: list[object] = []

    def serve(calls: list[Any]) -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            for layer, asked in calls:
                with turn:
                    rig.runtime.begin_forward(1, asked[0].shape[0], rig.device)
                    ours = rig.run(layer, *asked)
                if not torch.equal(ours, rig.expected(layer, *asked)):
                    wrong.append(layer)

    work = [[(n % 3, rig.draw(1 + n % 3)) for n in range(12)] for _ in range(4)]
    torch.cuda.synchronize()
    threads = [threading.Thread(target=serve, args=(calls,)) for calls in work]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not wrong


@pytest.mark.parametrize("device", DEVICES)
def test_closing_waits_for_what_is_under_way(device: str) -> None:
    source = torch.arange(1 << 16, dtype=torch.float32)
    place = torch.zeros(1 << 16, device=device)
    if device == "cpu":
        transfer: Any = LateTransfer()
    else:
        source, transfer = source.pin_memory(), Delayed(1, slow="copy")
    transfer.copy(source, place, 0)
    transfer.close()
    assert torch.equal(place.cpu(), source)
