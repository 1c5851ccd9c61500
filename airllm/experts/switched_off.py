"""Settings of the whole process that are off while somebody needs them off, whichever threads do."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch


class SwitchedOff:
    """Called, gives a context inside which a setting is off; when the last one ends it is on again, if it was on before.

    It is off for all threads, and whoever sets it meanwhile may find it changed. An interrupt between two lines may leave it
    off until the next context ends.

    ``is_on``: whether it is on, and may be switched off. ``switch``: sets it.
    """

    def __init__(self, is_on: Callable[[], bool], switch: Callable[[bool], object]) -> None:
        self._is_on, self._switch = is_on, switch
        self._lock = threading.Lock()
        self._inside: weakref.WeakSet[_Inside] = weakref.WeakSet()  # one that an interrupt forgets is gone with its frame
        self._owed = False  # whether it must be switched on again

    @contextmanager
    def __call__(self) -> Iterator[None]:
        inside = _Inside()
        try:
            with self._lock:
                self._inside.add(inside)
                if self._is_on():
                    self._owed = True
                    self._switch(False)
            yield
        finally:
            with self._lock:
                if self._owed and not set(self._inside) - {inside}:
                    self._switch(True)
                    self._owed = False
                self._inside.discard(inside)


class _Inside:
    """Somebody who needs a setting off."""


def _spare_cudnn() -> bool:
    """Whether cuDNN's attention is on, and another kernel allowed that can stand in for it."""
    allowed = torch.backends.cuda
    return allowed.cudnn_sdp_enabled() and (
        allowed.flash_sdp_enabled() or allowed.mem_efficient_sdp_enabled() or allowed.math_sdp_enabled()
    )


no_collector = SwitchedOff(gc.isenabled, lambda on: gc.enable() if on else gc.disable())
"""Python's collector does not run. A dropped model's memory is given back after a wait for the device, which CUDA forbids to a
thread that records: the recording would break, and that memory stay registered with the driver."""

no_cudnn_attention = SwitchedOff(_spare_cudnn, torch.backends.cuda.enable_cudnn_sdp)
"""torch takes another kernel than cuDNN's for attention. It prefers cuDNN's on Hopper, which makes a plan for each new length:
36 ms on an H200, a third of what a prompt of 512 tokens takes at the speed of the link (benchmarks/LOG.md)."""
