"""Settings of the whole process that are off while somebody needs them off, whichever threads do."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch


class SwitchedOff:
    """Called, gives a context inside which a setting is off; when the last one ends it is again what it was before the first.

    ``is_on``: tells what it is. ``switch``: sets it.
    """

    def __init__(self, is_on: Callable[[], bool], switch: Callable[[bool], object]) -> None:
        self._is_on, self._switch = is_on, switch
        self._lock = threading.Lock()
        self._inside = 0
        self._was_on = False

    @contextmanager
    def __call__(self) -> Iterator[None]:
        with self._lock:
            if self._inside == 0:
                self._was_on = self._is_on()
                self._switch(False)
            self._inside += 1
        try:
            yield
        finally:
            with self._lock:
                self._inside -= 1
                if self._inside == 0 and self._was_on:
                    self._switch(True)


no_collector = SwitchedOff(gc.isenabled, lambda on: gc.enable() if on else gc.disable())
"""Python's collector does not run. A dropped model's memory is given back after a wait for the device, which CUDA forbids to a
thread that records: the recording would break, and that memory stay registered with the driver."""

no_cudnn_attention = SwitchedOff(torch.backends.cuda.cudnn_sdp_enabled, torch.backends.cuda.enable_cudnn_sdp)
"""torch takes another kernel than cuDNN's for attention. It prefers cuDNN's on Hopper, which makes a plan for each new length:
36 ms on an H200, a third of what a prompt of 512 tokens takes at the speed of the link (benchmarks/LOG.md)."""
