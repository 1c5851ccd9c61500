"""Pickled checkpoints (``pytorch_model*.bin``): read with weights_only, memory-mapped, a shard at a time.

They cannot be streamed as they are, so they are only a source for the split (layer_files.py).
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Mapping
from functools import cached_property
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch

from airllm.checkpoint import read_index, refuse_missing, some
from airllm.errors import CheckpointError
from airllm.safetensors_format import DOWNLOAD_AGAIN, refuse_placeholder

BIN_INDEX = "pytorch_model.bin.index.json"
SAMPLE_BYTES = 1 << 16
# What torch.load raises for a damaged file, one that holds more than tensors, or one that is no pickle at all.
_LOAD_ERRORS = (RuntimeError, pickle.UnpicklingError, EOFError, OSError, ValueError, KeyError, AttributeError)


class BinCheckpoint(Mapping[str, torch.Tensor]):
    """Tensor name -> tensor of a .bin checkpoint; one shard is mapped at a time, the one of the last tensor taken.
    """

    def __init__(self, folder: Path, files: tuple[Path, ...], weight_map: Mapping[str, str] | None) -> None:
        self.folder = folder
        self.files = files
        self._weight_map = weight_map or {}
        self._open: tuple[Path, dict[str, torch.Tensor]] | None = None

    @classmethod
    def open(cls, folder: Path) -> BinCheckpoint:
        """``pytorch_model.bin``, or the shards of its index.json. Raises CheckpointError when some are missing.

        The files' contents are looked at when ``geometry`` is first asked for: a valid split needs only ``identity``.
        """
        index = folder / BIN_INDEX
        weight_map = read_index(index, ".bin") if index.exists() else None
        names = set(weight_map.values()) if weight_map else {path.name for path in folder.glob("pytorch_model*.bin")}
        files = tuple(folder / name for name in sorted(names))
        refuse_missing(folder, files)
        if weight_map is None and len(files) > 1:
            raise CheckpointError(f"{folder} has {len(files)} .bin shards but no {BIN_INDEX}: download it too")
        return cls(folder, files, weight_map)

    @cached_property
    def geometry(self) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
        """Name -> (dtype, shape). Raises CheckpointError for a damaged file, or a tensor that is not in its file."""
        geometry: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {}
        self.file_of: dict[str, Path] = {}
        for path in self.files:
            for name, tensor in load_shard(path).items():
                geometry[name], self.file_of[name] = (tensor.dtype, tuple(tensor.shape)), path
        absent = [f"{name} ({file})" for name, file in self._weight_map.items() if name not in geometry]
        if absent:
            raise CheckpointError(
                f"{self.folder}: {len(absent)} tensors that {BIN_INDEX} names are not in their files: {some(absent)}: "
                "download the checkpoint again"
            )
        return geometry

    def identity(self) -> dict[str, dict[str, Any]]:
        """As CheckpointIndex.identity; in the header's place stands a hash of each file's first and last 64 KiB."""
        return {path.relative_to(self.folder).as_posix(): file_identity(path) for path in self.files}

    def __getitem__(self, name: str) -> torch.Tensor:
        if name not in self.geometry:
            raise KeyError(name)
        path = self.file_of[name]
        if self._open is None or self._open[0] != path:
            self._open = None  # unmap the last shard before the next one is mapped
            self._open = (path, load_shard(path))
        return self._open[1][name].contiguous()

    def __iter__(self) -> Iterator[str]:
        return iter(self.geometry)

    def __len__(self) -> int:
        return len(self.geometry)


def file_identity(path: Path) -> dict[str, Any]:
    """Size, time and a hash of both ends of ``path``: the end of a .bin file is its table of contents."""
    status = path.stat()
    with open(path, "rb") as file:
        sample = file.read(SAMPLE_BYTES)
        file.seek(max(0, status.st_size - SAMPLE_BYTES))
        sample += file.read(SAMPLE_BYTES)
    return {"size": status.st_size, "header_sha256": sha256(sample).hexdigest(), "mtime_ns": status.st_mtime_ns}


def load_shard(path: Path) -> dict[str, torch.Tensor]:
    """The tensors of one .bin file, memory-mapped where its format allows. Code in the pickle is never run."""
    size = path.stat().st_size
    with open(path, "rb") as file:
        start = file.read(512)
    refuse_placeholder(path, start, size)
    mapped = start.startswith(b"PK\x03\x04")  # the format before torch 1.6 cannot be mapped
    try:
        content = torch.load(path, map_location="cpu", weights_only=True, mmap=mapped)
    except _LOAD_ERRORS as error:
        reason = str(error).split("\n")[0]
        raise CheckpointError(
            f"{path} ({size} B) cannot be read as a table of tensors ({reason:.300}): {DOWNLOAD_AGAIN}, or use a "
            "safetensors copy of the checkpoint"
        ) from error
    if not isinstance(content, Mapping):
        raise CheckpointError(f"{path} ({size} B) holds no table of tensors: use a safetensors copy of the checkpoint")
    odd = [str(name) for name, value in content.items() if not _is_plain(name, value)]
    if odd:
        raise CheckpointError(f"{path}: these entries are not plain tensors: {some(odd)}: use a safetensors copy")
    return dict(content)


def _is_plain(name: Any, value: Any) -> bool:
    return isinstance(name, str) and isinstance(value, torch.Tensor) and value.layout == torch.strided
