"""A stand-in for GraphPool on machines without a GPU: records the operators that run and replays them into the same tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Tape(TorchDispatchMode):
    """Every operator between ``begin`` and ``end``, with the tensors it read and made."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, Any, Any, list[Any]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        self.calls.append((func, args, kwargs or {}, tree_leaves(made)))
        return made

    def replay(self) -> None:
        for func, args, kwargs, old in self.calls:
            for then, now in zip(old, tree_leaves(func(*args, **kwargs)), strict=True):
                if isinstance(then, torch.Tensor) and then.data_ptr() != now.data_ptr():
                    then.copy_(now)


class TapePool:
    """As ``airllm.experts.decode_graphs.GraphPool``; what is recorded also runs."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.recorded = device, 0
        self._open: Tape | None = None

    @contextmanager
    def aside(self) -> Iterator[None]:
        yield

    def begin(self) -> None:
        assert self._open is None, "recordings do not nest"
        self._open = Tape()
        self._open.__enter__()

    def end(self) -> Tape:
        tape, self._open = self._open, None
        assert tape is not None
        tape.__exit__(None, None, None)
        self.recorded += 1
        return tape

    def abandon(self) -> None:
        if self._open is not None:
            self.end()

    def record(self, work: Callable[[], object], warm_up: bool = True) -> Tape:
        self.begin()
        work()
        return self.end()
