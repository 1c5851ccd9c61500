"""What is noted while layers run: counters of the streaming, and which layer's numbers went wrong first."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

WATCHED_ROWS = 64  # rows of hidden states that may be kept alive a layer to find a layer that computed infinities


class StreamCounts:
    """What the streamer measured since it started."""

    def __init__(self) -> None:
        self.lock = threading.Lock()  # fills run on several threads
        self.layer_loads = 0
        self.ready = 0  # layers that were there when they were asked for
        self.filled_bytes = 0  # that came into the blocks of the ring
        self.h2d_bytes = 0
        self.read_s = 0.0
        self.wait_s = 0.0


class LayerWatch:
    """What tells, once the logits have gone wrong, which layer went wrong first. Nothing is read back before that.

    Of a short forward (a decoded token) the layers' outputs themselves are kept, which costs no kernel; of a long one a
    number a layer on the device, which is finite as long as the layer's last position is.
    """

    def __init__(self, modules: Sequence[nn.Module], names: Sequence[str], device: torch.device) -> None:
        self.on = False
        self._names = list(names)
        self._outputs: list[torch.Tensor | None] = [None] * len(modules)
        with torch.inference_mode(False):
            self._sums = list(torch.zeros(len(modules), device=device).unbind())
        self._hooks = [
            module.register_forward_hook(partial(_note, self, number)) for number, module in enumerate(modules)
        ]

    def note(self, number: int, output: Any) -> None:
        """Remember a layer's output [batch, positions, hidden]."""
        hidden = output[0] if isinstance(output, tuple) else output
        if not (isinstance(hidden, torch.Tensor) and hidden.dim() == 3 and hidden.is_floating_point()):
            return
        if hidden.shape[0] * hidden.shape[1] <= WATCHED_ROWS:
            self._outputs[number] = hidden
        else:
            self._outputs[number] = None
            self._sums[number].copy_(hidden[:, -1].sum(dtype=torch.float32))

    def first_bad(self) -> str | None:
        """The name of the first layer whose output was not finite; None if all were."""
        for number, output in enumerate(self._outputs):
            seen = self._sums[number] if output is None else output[:, -1]
            if not bool(seen.isfinite().all()):
                return self._names[number]
        return None

    def shown(self) -> list[torch.Tensor | None]:
        """The outputs that are kept now: a recorded forward writes the same ones again each time it is replayed."""
        return list(self._outputs)

    def show(self, outputs: Sequence[torch.Tensor | None]) -> None:
        """Look at these outputs, which `shown` gave when the forward that has just been replayed was recorded."""
        self._outputs[:] = outputs

    def close(self) -> None:
        """Unhook."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        self._outputs = [None] * len(self._outputs)


# A function, not a method: a bound method in a hook of a module that the object may come to hold would be a cycle.


def _note(watch: LayerWatch, number: int, module: nn.Module, args: Any, output: Any) -> None:
    if watch.on:
        watch.note(number, output)
