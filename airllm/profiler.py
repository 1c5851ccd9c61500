"""Seconds spent in the parts of each forward, kept when ``profiling_mode=True``; and the bar that loading shows."""

from __future__ import annotations

import contextlib
import logging
import statistics
from collections.abc import Iterator
from typing import Any

from tqdm.auto import tqdm

log = logging.getLogger(__name__)


class LayeredProfiler:
    """Times by name, one entry a forward. The names are AirLLM's own methods' where it has them."""

    def __init__(self) -> None:
        self.profiling_time_dict: dict[str, list[float]] = {}

    def add_profiling_time(self, item: str, time: float) -> None:
        """Keep one more measurement, in seconds."""
        self.profiling_time_dict.setdefault(item, []).append(time)

    def clear_profiling_time(self) -> None:
        """Forget all measurements."""
        self.profiling_time_dict.clear()

    def print_profiling_time(self) -> None:
        """Log the count, total and median of each item."""
        for item, times in self.profiling_time_dict.items():
            log.info("%s: %d times, %.3f s, median %.4f s", item, len(times), sum(times), statistics.median(times))


@contextlib.contextmanager
def progress_bar(what: str, total_bytes: int) -> Iterator[Any]:
    """A bar in bytes on a terminal, nothing elsewhere; gives the function that moves it on."""
    with tqdm(total=total_bytes, desc=what, unit="B", unit_scale=True, unit_divisor=1024, disable=None) as bar:
        yield bar.update
