"""What stands between a caller and the forward of a model whose weights come and go.

The transformers model that the public classes hand out is a plain one, and callers use it directly too (pipelines,
their own loops). So the lock, the check for infinities, and the refusal to be moved sit on that model itself. Nothing
here holds a reference to the model: dropping the model must free its memory at once, without a collector run.
"""

from __future__ import annotations

import functools
import inspect
import logging
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn, Protocol

import torch
from torch import nn
from transformers import PreTrainedModel

from airllm.errors import AirLLMError, NonFiniteError, UnsupportedModelError
from airllm.layer_watch import LayerWatch, StreamCounts
from airllm.profiler import LayeredProfiler

log = logging.getLogger(__name__)


class Layers(Protocol):
    """What the guard asks of whatever gives the decoder layers their weights."""

    device: torch.device
    on_gpu: bool
    counts: StreamCounts

    @property
    def watch(self) -> LayerWatch: ...

    def leave(self) -> None:
        """Take back what was installed for the layer that runs, if there is one."""


class Stepper(Protocol):
    """Another way through a forward, for those forwards that it serves."""

    @property
    def checks_late(self) -> bool:
        """Whether the logits just computed may be looked at when the next forward begins, or generating ends.

        The device then need not wait for the host. Not so when they are sampled from: torch's sampling must not see a NaN.
        """

    def look_back(self) -> None:
        """Show the watch the latest forward's layers again, where something has run since."""

    def run(self, plain: Callable[[], Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The forward that was called with ``args`` and ``kwargs``; ``plain()`` runs it as it is."""


class ForwardGuard:
    """One forward at a time; weights taken back whatever happens; wrong numbers reported instead of sampled from."""

    def __init__(self, streamer: Layers, profiler: LayeredProfiler | None = None) -> None:
        self.lock = threading.RLock()
        self.closed = False
        self.stepper: Stepper | None = None
        self._streamer = streamer
        self._profiler = profiler
        self._checking = False
        self._unread: tuple[torch.Tensor, torch.dtype] | None = None  # whether the last logits are finite, still on the device

    def attach(self, model: PreTrainedModel) -> None:
        """Put the guard around ``model.forward``."""
        reference = weakref.ref(model)
        original = type(model).forward

        @functools.wraps(original)
        def forward(*args: Any, **kwargs: Any) -> Any:
            plain = functools.partial(original, reference(), *args, **kwargs)
            return self.run(plain if self.stepper is None else functools.partial(self.stepper.run, plain, args, kwargs))

        forward.__signature__ = inspect.signature(model.forward)  # type: ignore[attr-defined] # generate reads it
        model.forward = forward  # type: ignore[method-assign]

    def run(self, forward: Callable[[], Any]) -> Any:
        """One forward of the whole model."""
        with self.lock:
            self.refuse_closed()
            self._streamer.watch.on = self._checking
            started = time.perf_counter()
            before = self._streamer.counts.wait_s, self._streamer.counts.read_s
            self._read_check()
            try:
                output = forward()
                if self._checking:
                    self._check(output)
            finally:
                self._streamer.watch.on = False
                self._streamer.leave()  # an interrupt inside a layer skips the hook that does this
            if self._profiler is not None:
                self._profile(started, *before)
            return output

    def refuse_closed(self) -> None:
        """Raises AirLLMError after `close`."""
        if self.closed:
            raise AirLLMError("this model is closed and its memory given back: load it again")

    @contextmanager
    def checking(self) -> Iterator[None]:
        """Inside, each forward's last logits must not hold NaN or +inf (a mask may well hold -inf)."""
        with self.lock:
            before, self._checking = self._checking, True
            try:
                yield
                self._read_check()
            finally:
                self._checking, self._unread = before, None

    def _check(self, output: Any) -> None:
        logits = getattr(output, "logits", None)
        if not isinstance(logits, torch.Tensor) or logits.dim() != 3:
            return
        self._unread = (logits[:, -1] < torch.inf).all(), logits.dtype  # false for NaN too
        if self.stepper is None or not self.stepper.checks_late:
            self._read_check()

    def _read_check(self) -> None:
        unread, self._unread = self._unread, None
        if unread is None or bool(unread[0]):
            return
        if self.stepper is not None:
            self.stepper.look_back()
        where = self._streamer.watch.first_bad() or "the head (every decoder layer's output is finite)"
        raise NonFiniteError(
            f"the logits are not finite; the first output that is not comes from {where}, computed in "
            f"{unread[1]}: load the model with dtype='bfloat16' or 'float32'"
        )

    def _profile(self, started: float, wait_s: float, read_s: float) -> None:
        assert self._profiler is not None
        if self._streamer.on_gpu:
            torch.cuda.synchronize(self._streamer.device)
        total = time.perf_counter() - started
        waited = self._streamer.counts.wait_s - wait_s
        self._profiler.add_profiling_time("forward", total)
        self._profiler.add_profiling_time("wait_for_layers", waited)
        self._profiler.add_profiling_time("compute", total - waited)
        self._profiler.add_profiling_time("read_and_copy", self._streamer.counts.read_s - read_s)


def fix_in_place(model: PreTrainedModel, device: torch.device, dtype: torch.dtype) -> None:
    """Let ``model`` stay where it is: moving, casting or saving it would meet parameters that hold no data."""

    def to(*args: Any, **kwargs: Any) -> Any:
        refuse_move(device, dtype, *args, **kwargs)
        return reference()

    reference = weakref.ref(model)
    fixed: dict[str, Callable[..., Any]] = {
        "to": to,
        "cuda": lambda index=None: to("cuda" if index is None else f"cuda:{int(index)}"),
        "cpu": lambda: to("cpu"),
        "half": lambda: to(torch.float16),
        "bfloat16": lambda: to(torch.bfloat16),
        "float": lambda: to(torch.float32),
        "double": lambda: to(torch.float64),
        "save_pretrained": _refuse_saving,
    }
    for name, method in fixed.items():
        setattr(model, name, method)


def refuse_move(device: torch.device, dtype: torch.dtype, *args: Any, **kwargs: Any) -> None:
    """Nothing for a move to where the model already is; raises UnsupportedModelError for any other."""
    wanted_device, wanted_dtype, *_ = torch._C._nn._parse_to(*args, **kwargs)
    if wanted_device is not None:
        same = wanted_device.type == device.type and wanted_device.index in (None, device.index)
        if not same:
            raise UnsupportedModelError(
                f"the model is on {device} and its weights come and go: it cannot be moved to {wanted_device}; "
                f"load it again with device={str(wanted_device)!r}"
            )
    if wanted_dtype is not None and wanted_dtype != dtype:
        name = str(wanted_dtype).removeprefix("torch.")
        raise UnsupportedModelError(
            f"the model computes in {dtype}, and its weights come and go: they cannot be cast; "
            f"load it again with dtype={name!r}"
        )


def _refuse_saving(*_: Any, **__: Any) -> NoReturn:
    raise UnsupportedModelError(
        "this model does not hold its weights as parameters, so there is nothing to save: copy the checkpoint folder"
    )


def empty(model: nn.Module) -> None:
    """Put every parameter and buffer on meta, so that their memory is free even if somebody still holds the model."""
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                module._parameters[name] = nn.Parameter(parameter.detach().to("meta"), requires_grad=False)
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = buffer.to("meta")
