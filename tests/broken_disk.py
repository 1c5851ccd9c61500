"""A disk that can be broken and mended while a model reads from it."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from airllm.checkpoint import TensorReader
from airllm.errors import CheckpointError


def breaking_disk(monkeypatch: pytest.MonkeyPatch) -> tuple[threading.Event, CheckpointError]:
    """While the event is set every read raises the error."""
    scatter, broken, original = TensorReader.scatter, threading.Event(), CheckpointError("the disk is gone")

    def fail(self: TensorReader, read: Any) -> None:
        if broken.is_set():
            raise original
        scatter(self, read)

    monkeypatch.setattr(TensorReader, "scatter", fail)
    return broken, original
