"""The safetensors container: prove a file whole from its header, and build such a header.

A file is 8 bytes (little-endian length N), N bytes of JSON, then the tensors' bytes without gaps. Every check here uses
only the header and the file's size, so a checkpoint of any size is proved in milliseconds, before memory is taken.
"""

from __future__ import annotations

import json
import math
import os
import stat
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch

from airllm.errors import CheckpointError

HEADER_LIMIT_BYTES = 100_000_000  # the format's own cap: a longer header is an attack or not a header
DOWNLOAD_AGAIN = "download the file again"

_TORCH_NAMES = {
    "F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "I64": "int64", "I32": "int32",
    "I16": "int16", "I8": "int8", "U64": "uint64", "U32": "uint32", "U16": "uint16", "U8": "uint8", "BOOL": "bool",
    "C64": "complex64", "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2", "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2FNUZ": "float8_e5m2fnuz", "F8_E8M0": "float8_e8m0fnu", "F4": "float4_e2m1fn_x2",
}  # fmt: skip
DTYPES: dict[str, torch.dtype] = {
    name: getattr(torch, attribute) for name, attribute in _TORCH_NAMES.items() if hasattr(torch, attribute)
}
NAMES: dict[torch.dtype, str] = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """Where one tensor's bytes lie. ``offset`` counts from the start of the file; ``shape`` is torch's."""

    name: str
    path: Path
    offset: int
    nbytes: int
    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class FileHeader:
    """What a proved file holds: its entries in file order, metadata, and what identifies it."""

    path: Path
    entries: tuple[TensorEntry, ...]
    metadata: dict[str, str]
    size: int
    header_sha256: str
    mtime_ns: int

    def identity(self) -> dict[str, Any]:
        """What a file derived from this one remembers of it."""
        return {"size": self.size, "header_sha256": self.header_sha256, "mtime_ns": self.mtime_ns}


def read_header(path: Path) -> FileHeader:
    """Parse the header of ``path`` and prove that the file holds exactly what it promises.

    Raises CheckpointError, naming the file, the sizes and the remedy, for anything missing, cut, overlapping or odd.
    """
    try:
        with open(path, "rb") as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise CheckpointError(f"{path} is not a regular file: {DOWNLOAD_AGAIN}")
            start = file.read(512)
            length = _header_length(path, start, status.st_size)
            raw = start[8 : 8 + length] + file.read(max(0, 8 + length - len(start)))
    except FileNotFoundError as error:
        what = "is a link to a file that is not there" if path.is_symlink() else "is missing"
        raise CheckpointError(f"{path} {what}: {DOWNLOAD_AGAIN}") from error
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    header = _parse_json(path, raw)
    metadata = _metadata(path, header.pop("__metadata__", None))
    entries = tuple(_entry(path, name, fields, 8 + length) for name, fields in header.items())
    ordered = tuple(sorted(entries, key=lambda entry: (entry.offset, entry.nbytes)))
    _prove_layout(path, ordered, 8 + length, status.st_size)
    return FileHeader(path, ordered, metadata, status.st_size, sha256(raw).hexdigest(), status.st_mtime_ns)


def build_header(tensors: Iterable[tuple[str, torch.dtype, tuple[int, ...]]], metadata: Mapping[str, str]) -> bytes:
    """The first bytes (length and JSON) of a file holding ``tensors`` in this order; their bytes follow directly.

    The result is padded with spaces to a multiple of 8 bytes, as the reference writer does.
    """
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    end = 0
    for name, dtype, shape in tensors:
        if name in header:
            raise CheckpointError(f"tensor {name} would be written twice")
        if dtype not in NAMES:
            raise CheckpointError(f"tensor {name}: safetensors has no name for {dtype}")
        begin, end = end, end + math.prod(shape) * dtype.itemsize
        on_disk = (*shape[:-1], shape[-1] * 2) if NAMES[dtype] == "F4" else shape
        header[name] = {"dtype": NAMES[dtype], "shape": list(on_disk), "data_offsets": [begin, end]}
    raw = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    raw += b" " * (-len(raw) % 8)
    return len(raw).to_bytes(8, "little") + raw


def _header_length(path: Path, start: bytes, size: int) -> int:
    refuse_placeholder(path, start, size)
    if start.startswith(b"PK\x03\x04"):
        raise CheckpointError(f"{path} ({size} B) is a zip archive (a torch .bin?), not safetensors: {DOWNLOAD_AGAIN}")
    if size < 8:
        raise CheckpointError(f"{path} holds {size} B, too few for a safetensors header: {DOWNLOAD_AGAIN}")
    length = int.from_bytes(start[:8], "little")
    if length > HEADER_LIMIT_BYTES:
        raise CheckpointError(
            f"{path} ({size} B) is not a safetensors file: its first 8 bytes ask for a header of {length} B, "
            f"the format allows {HEADER_LIMIT_BYTES} B: {DOWNLOAD_AGAIN}"
        )
    if 8 + length > size:
        raise CheckpointError(
            f"{path} is cut short or not a safetensors file: its header needs {8 + length} B, the file holds {size} B: "
            f"{DOWNLOAD_AGAIN}"
        )
    return length


def refuse_placeholder(path: Path, start: bytes, size: int) -> None:
    """Name what stands in the place of the weights when it is something that people really meet there.

    ``start`` is the beginning of the file. Raises CheckpointError for a git-lfs pointer, a web page or an empty file.
    """
    if size == 0:
        raise CheckpointError(f"{path} is empty (0 B): {DOWNLOAD_AGAIN}")
    if start.startswith(b"version https://git-lfs"):
        promised = next((line[5:] for line in start.decode("ascii", "replace").split("\n") if line[:5] == "size "), "?")
        raise CheckpointError(
            f"{path} is a git-lfs pointer of {size} B, not the {promised} B of weights: run `git lfs pull` there"
        )
    text = start.lstrip(b"\xef\xbb\xbf \t\r\n").lower()
    if text.startswith((b"<!doctype", b"<html", b"<?xml", b"<head")):
        raise CheckpointError(
            f"{path} ({size} B) is a web page, not weights: {DOWNLOAD_AGAIN} (from its download link, not its page)"
        )


def _parse_json(path: Path, raw: bytes) -> dict[str, Any]:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) != len(pairs):
            names = [name for name, _ in pairs]
            twice = sorted({name for name in names if names.count(name) > 1}) if len(names) < 10_000 else ["…"]
            raise CheckpointError(f"{path}: its header names {', '.join(twice)} more than once: {DOWNLOAD_AGAIN}")
        return found

    try:
        header = json.loads(raw.decode("utf-8"), object_pairs_hook=unique)
    except CheckpointError:
        raise
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: its header of {len(raw)} B is not JSON ({error}): {DOWNLOAD_AGAIN}") from error
    if not isinstance(header, dict):
        raise CheckpointError(f"{path}: its header is JSON, but no table of tensors: {DOWNLOAD_AGAIN}")
    return header


def _metadata(path: Path, metadata: Any) -> dict[str, str]:
    if metadata is None:
        return {}
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise CheckpointError(f"{path}: the __metadata__ of its header is not a table of texts: {DOWNLOAD_AGAIN}")
    return metadata


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 63


def _is_shape(shape: Any) -> bool:
    """Sizes that torch can hold; an empty tensor must not hide a product that overflows."""
    if not isinstance(shape, list) or len(shape) > 64 or not all(_is_count(size) for size in shape):
        return False
    return math.prod(size for size in shape if size) < 1 << 60


def _entry(path: Path, name: str, fields: Any, data_start: int) -> TensorEntry:
    if not isinstance(fields, dict) or not {"dtype", "shape", "data_offsets"} <= fields.keys():
        raise CheckpointError(f"{path}: tensor {name} has no dtype, shape and data_offsets: {DOWNLOAD_AGAIN}")
    shape, offsets, dtype_name = fields["shape"], fields["data_offsets"], fields["dtype"]
    if not _is_shape(shape):
        raise CheckpointError(f"{path}: tensor {name} has the impossible shape {shape!r:.200}: {DOWNLOAD_AGAIN}")
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(_is_count(offset) for offset in offsets):
        raise CheckpointError(f"{path}: tensor {name} has impossible data_offsets {offsets!r:.200}: {DOWNLOAD_AGAIN}")
    dtype = DTYPES.get(dtype_name) if isinstance(dtype_name, str) else None
    if dtype is None:
        raise CheckpointError(
            f"{path}: tensor {name} has dtype {dtype_name!r:.80}, which torch {torch.__version__} does not know "
            f"(known: {', '.join(DTYPES)}): use a newer torch or another checkpoint"
        )
    if dtype_name == "F4":  # two values a byte; torch counts the bytes
        if not shape or shape[-1] % 2:
            raise CheckpointError(f"{path}: tensor {name} packs 4-bit values, its last dimension must be even: {shape}")
        shape = [*shape[:-1], shape[-1] // 2]
    needed, held = math.prod(shape) * dtype.itemsize, offsets[1] - offsets[0]
    if needed != held:
        raise CheckpointError(
            f"{path}: tensor {name} of shape {shape} and dtype {dtype_name} needs {needed} B, its data_offsets hold "
            f"{held} B: {DOWNLOAD_AGAIN}"
        )
    return TensorEntry(name, path, data_start + offsets[0], needed, tuple(shape), dtype)


def _prove_layout(path: Path, entries: tuple[TensorEntry, ...], data_start: int, size: int) -> None:
    """The tensors must cover the file from the header's end to its last byte, without overlap or gap."""
    end = max((entry.offset + entry.nbytes for entry in entries), default=data_start)
    if end != size:
        what = "is cut short" if end > size else "holds more than its header names"
        raise CheckpointError(f"{path} {what}: its header needs {end} B, the file holds {size} B: {DOWNLOAD_AGAIN}")
    expected = data_start
    for entry in entries:
        if entry.offset != expected:
            what = "overlaps the tensor before it" if entry.offset < expected else "leaves a gap before it"
            raise CheckpointError(
                f"{path}: tensor {entry.name} begins at byte {entry.offset}, expected {expected}: it {what}: "
                f"{DOWNLOAD_AGAIN}"
            )
        expected += entry.nbytes
