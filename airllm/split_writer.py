"""Write module files: space first, then temporary file, fsync, rename, manifest, marker."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from hashlib import sha256
from pathlib import Path
from typing import TypeAlias

import torch

from airllm.bin_files import BinCheckpoint
from airllm.checkpoint import DONE, CheckpointIndex, TensorReader
from airllm.compression import compress, compressed_bytes, is_compressible, original_dtypes
from airllm.errors import CheckpointError, NotEnoughSpaceException
from airllm.safetensors_format import build_header, read_header
from airllm.split_manifest import Manifest, sync_folder
from airllm.split_plan import Module

SplitSource: TypeAlias = CheckpointIndex | BinCheckpoint
Geometry: TypeAlias = dict[str, tuple[torch.dtype, tuple[int, ...]]]

CHUNK_BYTES = 1 << 24
METADATA = {"format": "pt"}
_BLOCK_BYTES = 4096  # a file takes whole blocks of the disk
_MANIFEST_BYTES = 1 << 16


def geometry(source: SplitSource) -> Geometry:
    """Name -> (dtype, shape) of every tensor of a source."""
    if isinstance(source, BinCheckpoint):
        return source.geometry
    return {name: (entry.dtype, entry.shape) for name, entry in source.items()}


def module_bytes(shapes: Geometry, module: Module, compression: str | None) -> int:
    """Bytes that the module's file will take on the disk: exact without compression, else an upper estimate."""
    header = build_header(((key, *shapes[key]) for key in module.keys), METADATA)
    payload = sum(compressed_bytes(*shapes[key], compression) for key in module.keys)
    return -(-(len(header) + payload) // _BLOCK_BYTES) * _BLOCK_BYTES


def check_space(target: Path, needed: int, reclaimed: int) -> None:
    """Raise NotEnoughSpaceException when ``needed`` bytes do not fit on the disk of ``target``.

    ``reclaimed`` are the bytes of a stale split there, which are freed before writing.
    """
    free = shutil.disk_usage(target).free
    needed += _MANIFEST_BYTES
    if free + reclaimed < needed:
        again = f" and {reclaimed} B of an old split there can be used again" if reclaimed else ""
        raise NotEnoughSpaceException(
            f"the split needs {needed} B in {target}, {free} B are free{again}: free {needed - free - reclaimed} B, or "
            "give layer_shards_saving_path a folder on another disk"
        )


class SplitWriter:
    """Writes the module files of one source into one folder; the caller holds the folder's lock."""

    def __init__(self, source: SplitSource, target: Path, manifest: Manifest) -> None:
        self.source = source
        self.target = target
        self.manifest = manifest
        self._shapes = geometry(source)
        self._chunk = torch.empty(CHUNK_BYTES, dtype=torch.uint8)

    def write(self, modules: Sequence[Module], progress: bool) -> None:
        """Write ``modules``. An OSError (a full disk, say) comes out as it is; what is finished stays."""
        from tqdm import tqdm

        sizes = {m.name: sum(compressed_bytes(*self._shapes[key], None) for key in m.keys) for m in modules}
        bar = tqdm(
            total=sum(sizes.values()), unit="B", unit_scale=True, desc="splitting", disable=None if progress else True
        )
        with bar, TensorReader(threads=1) as reader:
            for module in modules:
                self._write_module(module, reader)
                bar.update(sizes[module.name])

    def _write_module(self, module: Module, reader: TensorReader) -> None:
        path = self.target / module.file_name
        temporary = path.with_name(f".{path.name}.part")
        try:
            digest = self._write_file(temporary, module, reader)
            header = read_header(temporary)
            os.replace(temporary, path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
        sync_folder(self.target)
        self.manifest.written[path.name] = {
            "size": header.size, "sha256": digest, "header_sha256": header.header_sha256,
        }  # fmt: skip
        self.manifest.write(self.target)
        path.with_name(path.name + DONE).touch()

    def _write_file(self, path: Path, module: Module, reader: TensorReader) -> str:
        """Header and bytes to ``path``, flushed to the disk. Returns the sha256 of the file."""
        digest = sha256()
        with open(path, "wb") as file:
            for piece in self._pieces(module, reader):
                digest.update(piece)
                file.write(piece)
            file.flush()
            os.fsync(file.fileno())
        return digest.hexdigest()

    def _pieces(self, module: Module, reader: TensorReader) -> Iterator[bytes | memoryview]:
        keys = _aligned(module.keys, {key: self._shapes[key][0] for key in module.keys})
        if self.manifest.compression is not None:
            yield from self._compressed_pieces(keys, reader)
            return
        yield build_header(((key, *self._shapes[key]) for key in keys), METADATA)
        for key in keys:
            yield from self._tensor_pieces(key, reader)

    def _compressed_pieces(self, keys: Sequence[str], reader: TensorReader) -> Iterator[bytes | memoryview]:
        kind = self.manifest.compression
        assert kind is not None
        parts: dict[str, torch.Tensor] = {}
        dtypes: dict[str, torch.dtype] = {}
        for key in keys:
            tensor = self.source[key] if isinstance(self.source, BinCheckpoint) else reader.read(self.source[key])
            parts.update(compress(key, tensor, kind))
            if is_compressible(tensor.dtype, tuple(tensor.shape)):
                dtypes[key] = tensor.dtype
        metadata = {**METADATA, **original_dtypes(dtypes)} if kind == "8bit" else METADATA
        names = _aligned(tuple(parts), {name: part.dtype for name, part in parts.items()})
        yield build_header(((name, parts[name].dtype, tuple(parts[name].shape)) for name in names), metadata)
        for name in names:
            yield from _bytes_of(parts[name])

    def _tensor_pieces(self, key: str, reader: TensorReader) -> Iterator[memoryview]:
        if isinstance(self.source, BinCheckpoint):
            yield from _bytes_of(self.source[key])
            return
        entry = self.source[key]
        for start in range(0, entry.nbytes, CHUNK_BYTES):
            part = self._chunk[: min(CHUNK_BYTES, entry.nbytes - start)]
            reader.read_into(entry, part, start)
            yield part.numpy().data


def _aligned(keys: Sequence[str], dtypes: Mapping[str, torch.dtype]) -> list[str]:
    """Widest dtype first: safetensors' own reader cannot view a tensor at an offset its dtype does not divide."""
    return sorted(keys, key=lambda key: -dtypes[key].itemsize)


def _bytes_of(tensor: torch.Tensor) -> Iterator[memoryview]:
    if tensor.numel():
        yield tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data


def file_digest(path: Path) -> str:
    """The sha256 of a file, read from the disk rather than from memory where the system can be told so."""
    digest = sha256()
    try:
        with open(path, "rb", buffering=0) as file:
            if hasattr(os, "posix_fadvise"):
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            while piece := file.read(CHUNK_BYTES):
                digest.update(piece)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read back: {error}") from error
    return digest.hexdigest()
