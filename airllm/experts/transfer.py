"""Bank to slot: the only file of the package's expert path that touches streams and events.

Two edges keep a place on the device right: the copy into it waits for its last reader (``done_reading``), and the reader
waits for the copy (``wait``). The synchronous twin serves the CPU.
"""

from __future__ import annotations

from typing import Protocol

import torch


class Transfer(Protocol):
    """Copies expert blocks; one call of ``copy`` is one copy."""

    staging_bytes: int
    overlaps: bool
    """Whether copies run beside arithmetic, so that starting one early gains time."""

    def copy(self, source: torch.Tensor, target: torch.Tensor, place: int) -> None:
        """Start copying ``source`` to ``target`` (device memory of ``place``), after the last reader of ``place``.

        ``source`` lies on the host, or in another place on the device, whose own copy was started before.
        """

    def wait(self, place: int) -> None:
        """What is enqueued from now on may read ``place``."""

    def done_reading(self, place: int) -> None:
        """What was enqueued until now is the last reader of ``place``."""

    def finish(self, place: int) -> None:
        """Return when the copies into ``place`` have ended."""

    def take_turn(self) -> None:
        """A forward begins on the current stream: it runs after the last forward, whichever stream that one was given to."""

    def synchronize(self) -> None:
        """Return when no copy is under way."""

    def close(self) -> None: ...


class SyncTransfer:
    """The CPU twin: a copy is finished when the call returns, so every edge holds by itself."""

    staging_bytes = 0
    overlaps = False

    def copy(self, source: torch.Tensor, target: torch.Tensor, place: int) -> None:
        target.copy_(source)

    def wait(self, place: int) -> None:
        pass

    def done_reading(self, place: int) -> None:
        pass

    def finish(self, place: int) -> None:
        pass

    def take_turn(self) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def close(self) -> None:
        pass


class StreamTransfer:
    """Copies on a stream of their own, so that they run beside arithmetic. ``places`` counts slots and scratch.

    Events are made once per place and recorded again and again; waiting for one that was never recorded is a no-op.

    Args:
        urgent: these copies go before those of other streams, as far as the link has not begun with them.
        piece_bytes: hand larger copies to the link in pieces of this size, between which urgent ones get through.
    """

    staging_bytes = 0
    overlaps = True

    def __init__(self, places: int, device: torch.device, *, urgent: bool = False, piece_bytes: int | None = None) -> None:
        self.device = device
        self._piece_bytes = piece_bytes
        self._stream = torch.cuda.Stream(device, priority=-1 if urgent else 0)
        # The places may lie in memory whose last use is still enqueued.
        self._stream.wait_stream(torch.cuda.current_stream(device))
        self._copied = [torch.cuda.Event() for _ in range(places)]
        self._read = [torch.cuda.Event() for _ in range(places)]
        self._ready_for: list[int | None] = [None] * places  # stream that has already waited for the copy
        self._turn: torch.cuda.Stream | None = None
        self._known: torch.cuda.Stream | None = None
        self._index = self._stream.device_index

    def copy(self, source: torch.Tensor, target: torch.Tensor, place: int) -> None:
        self._stream.wait_event(self._read[place])
        self._ready_for[place] = None
        current = self._current()
        try:
            torch.cuda.set_stream(self._stream)  # a context manager for this costs as much again as the copy
            self._move(source, target)
        finally:
            torch.cuda.set_stream(current)
        self._copied[place].record(self._stream)

    def _move(self, source: torch.Tensor, target: torch.Tensor) -> None:
        if self._piece_bytes is None:
            target.copy_(source, non_blocking=True)
            return
        for part, piece in zip(target.split(self._piece_bytes), source.split(self._piece_bytes), strict=True):
            part.copy_(piece, non_blocking=True)

    def _current(self) -> torch.cuda.Stream:
        """The current stream. Asking torch for it costs as much as a launch, so it is kept while it stays the same."""
        known = self._known
        if known is None or torch._C._cuda_getCurrentRawStream(self._index) != known.cuda_stream:
            known = self._known = torch.cuda.current_stream(self.device)
        return known

    def wait(self, place: int) -> None:
        current = self._current()
        if self._ready_for[place] != current.cuda_stream:
            current.wait_event(self._copied[place])
            self._ready_for[place] = current.cuda_stream

    def done_reading(self, place: int) -> None:
        self._read[place].record(self._current())

    def take_turn(self) -> None:
        # Callers in different threads may each have a stream of their own, yet there is one event a place and one set of
        # recorded graphs with fixed inputs: forwards must follow one another on the device as they do on the host.
        current = torch.cuda.current_stream(self.device)
        if self._turn is not None and self._turn != current:
            current.wait_stream(self._turn)
        self._turn = current

    def finish(self, place: int) -> None:
        self._copied[place].synchronize()

    def synchronize(self) -> None:
        self._stream.synchronize()

    def close(self) -> None:
        self._stream.synchronize()
