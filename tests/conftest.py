from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # before anything imports the hub client
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")

import pytest
import torch

torch.set_num_threads(1)  # tiny models: a second thread costs more at its barriers than it computes


def pytest_configure(config: pytest.Config) -> None:
    """Where processes share the work by file: in the order of collection, which begins with the slowest, those of the kernels.
    By the number of their tests, which is small, they would come last, and one process would wait for the other."""
    if hasattr(config.option, "loadscopereorder"):
        config.option.loadscopereorder = False


@pytest.fixture(params=["cpu", pytest.param("cuda:0", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    """Each test that asks for it runs on the CPU, and on a GPU under the marker ``gpu``."""
    if request.param != "cpu" and not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    return request.param


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """``checkpoint("phimoe", dtype=..., shards=...)``: the folder of a tiny random checkpoint, built once a session.

    The folders are shared: a test that changes one must copy it first.
    """
    import families

    made: dict[str, Path] = {}

    def build(family: str, **options: Any) -> Path:
        key = repr((family, sorted(options.items())))
        if key not in made:
            made[key] = families.make_checkpoint(family, tmp_path_factory.mktemp(family), **options)
        return made[key]

    return build


@pytest.fixture(params=["aged", "aged in groups", "lru"])
def every_policy(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The slot rigs of a test that asks for it run with each policy. In groups: the least number of slots makes several."""
    import slot_rig

    from airllm.experts import policy

    if request.param == "aged in groups":
        monkeypatch.setattr(policy, "GROUP_SLOTS", 6)
    choice = request.param.split()[0]
    monkeypatch.setattr(slot_rig, "RIG_POLICY", choice)
    return choice


@pytest.fixture
def poisoned_blocks(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A block that layers stream through is NaN (bytes of 0xFF) just before it is read into, and when its layer has ended."""
    from airllm.streaming import LayerStreamer

    read, leave = LayerStreamer._read_pieces, LayerStreamer.leave

    def poisoned_read(self: LayerStreamer, layout: Any, views: Any) -> None:
        for tensor in views.flat.values():
            tensor.view(torch.uint8).fill_(0xFF)
        read(self, layout, views)

    def poisoned_leave(self: LayerStreamer) -> None:
        if self._current is not None:
            self._blocks[self._current[1]].fill_(0xFF)
            self._holds[self._current[1]] = None
        leave(self)

    monkeypatch.setattr(LayerStreamer, "_read_pieces", poisoned_read)
    monkeypatch.setattr(LayerStreamer, "leave", poisoned_leave)
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
