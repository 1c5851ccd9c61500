"""Work on a stream beside the current one, in order with it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress

import torch


@contextmanager
def on_stream(stream: torch.cuda.Stream | None, *, wait: bool = True) -> Iterator[None]:
    """Inside, work goes to ``stream``, after what the current stream was given. What the current stream gets afterwards comes
    after that work, unless ``wait`` is False: then `join` does that later. With None everything stays where it is."""
    if stream is None:
        yield
        return
    stream.wait_stream(torch.cuda.current_stream(stream.device))
    try:
        with torch.cuda.stream(stream):
            yield
    except BaseException:
        if wait:
            with suppress(RuntimeError):  # the first error is the one to show
                join(stream)
        raise
    if wait:
        join(stream)


def join(stream: torch.cuda.Stream | None) -> None:
    """The current stream of ``stream``'s device goes on after everything that ``stream`` was given."""
    if stream is not None:
        torch.cuda.current_stream(stream.device).wait_stream(stream)
