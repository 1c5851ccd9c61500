"""4-bit (nf4, blocks of 64) and 8-bit (blockwise, blocks of 2048) weights on disk, through bitsandbytes.

A compressed tensor ``k`` lies in a file as ``k`` (packed bytes) with ``k.4bit.<state>``, or with ``k.8bit.absmax`` and
``k.8bit.code``. That is AirLLM's layout, and AirLLM expects every floating tensor of a file to be packed, norms and
biases included. ``open_compressed`` hides it: an index of the original names, shapes and dtypes, and a reader whose
reads are dequantised on the way.
"""

from __future__ import annotations

import json
import logging
import math
import os
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import ModuleType

import torch

from airllm.checkpoint import CheckpointIndex, TensorReader
from airllm.errors import CheckpointError, OptionError
from airllm.safetensors_format import DTYPES, NAMES, TensorEntry

log = logging.getLogger(__name__)

KINDS = ("4bit", "8bit")
NF4_BLOCK = 64
BYTE_BLOCK = 2048
DTYPES_KEY = "airllm_dtypes"  # header metadata: original dtypes of 8-bit tensors, which their state does not keep
_NF4_STATE = "quant_state.bitsandbytes__nf4"
_NF4_OVERHEAD_BYTES = 16 * 4 + 256  # code table, packed description and header fields
_BYTE_OVERHEAD_BYTES = 256 * 4 + 256


def bitsandbytes() -> ModuleType:
    """The bitsandbytes package. Raises OptionError with the command that installs it."""
    try:
        import bitsandbytes as package
    except ImportError as error:
        raise OptionError(
            f'compressed weights need bitsandbytes ({error}): pip install "airllm[bitsandbytes]", or leave out '
            "compression"
        ) from error
    return package


def is_compressible(dtype: torch.dtype, shape: tuple[int, ...]) -> bool:
    """Floating tensors of 16 or 32 bits with at least one element and dimension; anything else is stored as it is."""
    return dtype in (torch.float16, torch.bfloat16, torch.float32) and len(shape) > 0 and math.prod(shape) > 0


def compressed_bytes(dtype: torch.dtype, shape: tuple[int, ...], kind: str | None) -> int:
    """How many bytes a tensor takes in a file (an upper estimate within a few hundred bytes)."""
    count = math.prod(shape)
    if kind is None or not is_compressible(dtype, shape):
        return count * dtype.itemsize
    if kind == "4bit":
        return -(-count // 2) + 4 * -(-count // NF4_BLOCK) + _NF4_OVERHEAD_BYTES
    return count + 4 * -(-count // BYTE_BLOCK) + _BYTE_OVERHEAD_BYTES


def compress(name: str, tensor: torch.Tensor, kind: str) -> dict[str, torch.Tensor]:
    """The CPU tensors that stand for ``tensor`` in a file: itself when it cannot be compressed."""
    if not is_compressible(tensor.dtype, tuple(tensor.shape)):
        return {name: tensor}
    functional = bitsandbytes().functional
    source = tensor.contiguous().to("cuda" if torch.cuda.is_available() else "cpu")
    if kind == "4bit":
        packed, state = functional.quantize_nf4(source, blocksize=NF4_BLOCK)
        extra = {f"{name}.4bit.{key}": value for key, value in state.as_dict(packed=True).items()}
    else:
        packed, state = functional.quantize_blockwise(source, blocksize=BYTE_BLOCK)
        extra = {f"{name}.8bit.absmax": state.absmax, f"{name}.8bit.code": state.code}
    return {key: value.detach().cpu().contiguous() for key, value in {name: packed, **extra}.items()}


def dequantise(
    name: str, parts: Mapping[str, torch.Tensor], dtype: torch.dtype | None = None, device: torch.device | str = "cpu"
) -> torch.Tensor:
    """The tensor ``name`` out of its file's entries ``parts``, in its original shape, on ``device``.

    ``dtype`` is that of an 8-bit tensor whose file does not say it (float16 then); a 4-bit one keeps its own.
    """
    packed = parts[name].to(device)
    four = {key[len(name) + 6 :]: value for key, value in parts.items() if key.startswith(f"{name}.4bit.")}
    if four:
        functional = bitsandbytes().functional
        state = functional.QuantState.from_dict(four, device=torch.device(device))
        return functional.dequantize_nf4(packed, state)
    if f"{name}.8bit.absmax" not in parts:
        return packed
    functional = bitsandbytes().functional
    absmax, code = parts[f"{name}.8bit.absmax"].to(device), parts[f"{name}.8bit.code"].to(device)
    state = functional.QuantState(absmax=absmax, code=code, blocksize=BYTE_BLOCK, dtype=dtype or torch.float16)
    return functional.dequantize_blockwise(packed, state)


def original_dtypes(tensors: Mapping[str, torch.dtype]) -> dict[str, str]:
    """Header metadata that keeps the dtypes of 8-bit tensors."""
    return {DTYPES_KEY: json.dumps({name: NAMES[dtype] for name, dtype in tensors.items()}, separators=(",", ":"))}


def base_name(name: str) -> str:
    """``k`` for ``k.4bit.absmax`` and the like; any other name unchanged."""
    for mark in (".4bit.", ".8bit."):
        if mark in name:
            return name[: name.rindex(mark)]
    return name


@dataclass(frozen=True, slots=True)
class PackedTensor:
    """One compressed tensor: its original geometry, and the entries of the file that make it."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    parts: tuple[TensorEntry, ...]


class CompressedIndex(CheckpointIndex):
    """The original names, shapes and dtypes of a compressed split. Its entries' offsets say nothing: a compressed
    entry has to be read through the ``CompressedReader`` that ``open_compressed`` gives with it."""

    packed: dict[str, PackedTensor]


def open_compressed(
    folder: str | os.PathLike[str], *, dtype: torch.dtype | None = None, threads: int | None = None,
    device: torch.device | str = "cpu",
) -> tuple[CompressedIndex, CompressedReader]:  # fmt: skip
    """Index and reader of a split folder, compressed or not.

    ``dtype`` is for 8-bit tensors of a folder that does not keep theirs (AirLLM's own: float16 there).
    ``device`` is where the arithmetic runs; the bytes land in CPU tensors all the same.
    """
    stored = CheckpointIndex.open(folder)
    reader = CompressedReader(threads, device)
    packed = {item.name: item for item in _packed_tensors(stored, reader, dtype)}
    entries = {name: entry for name, entry in stored.items() if base_name(name) not in packed}
    for item in packed.values():
        nbytes = math.prod(item.shape) * item.dtype.itemsize
        entries[item.name] = TensorEntry(item.name, item.parts[0].path, 0, nbytes, item.shape, item.dtype)
    index = CompressedIndex(stored.folder, stored.headers, entries)
    index.packed = packed
    reader.packed = packed
    return index, reader


def _packed_tensors(
    stored: CheckpointIndex, reader: TensorReader, fallback: torch.dtype | None
) -> Iterator[PackedTensor]:
    parts: dict[str, list[TensorEntry]] = {}
    for name, entry in stored.items():
        if base_name(name) != name:
            parts.setdefault(base_name(name), []).append(entry)
    dtypes: dict[str, torch.dtype] = {}
    for header in stored.headers:
        for name, code in json.loads(header.metadata.get(DTYPES_KEY, "{}")).items():
            dtypes[name] = DTYPES[code]
    for name, extra in parts.items():
        if name not in stored:
            raise CheckpointError(f"{stored.folder}: {extra[0].name} has no tensor {name} beside it: split again")
        shape, dtype = stored[name].shape, dtypes.get(name, fallback or torch.float16)
        for entry in extra:
            if entry.name == f"{name}.4bit.{_NF4_STATE}":
                shape, dtype = _nf4_geometry(entry, reader)
        yield PackedTensor(name, shape, dtype, (stored[name], *extra))


def _nf4_geometry(entry: TensorEntry, reader: TensorReader) -> tuple[tuple[int, ...], torch.dtype]:
    """Shape and dtype out of the description that bitsandbytes packs as JSON text."""
    try:
        state = json.loads(bytes(reader.read(entry).tolist()))
        return tuple(int(size) for size in state["shape"]), getattr(torch, state["dtype"])
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{entry.path}: {entry.name} is not a 4-bit description ({error}): split again") from error


class CompressedReader(TensorReader):
    """Reads of compressed tensors come dequantised. ``bytes_read`` counts the compressed bytes."""

    def __init__(self, threads: int | None = None, device: torch.device | str = "cpu") -> None:
        super().__init__(threads)
        self.packed: Mapping[str, PackedTensor] = {}
        self.device = torch.device(device)
        self._last = threading.local()  # a stacked tensor is read slice by slice: unpack it once

    def read_into(self, entry: TensorEntry, out: torch.Tensor, byte_offset: int = 0) -> None:
        item = self.packed.get(entry.name)
        if item is None or entry.shape != item.shape or entry.dtype != item.dtype:
            super().read_into(entry, out, byte_offset)
            return
        if out.device.type != "cpu" or not out.is_contiguous():
            raise ValueError(f"{entry.name}: the bytes can only be read into a contiguous CPU tensor")
        length = out.numel() * out.element_size()
        if byte_offset < 0 or byte_offset + length > entry.nbytes:
            raise ValueError(f"{entry.name}: bytes {byte_offset}+{length} lie outside its {entry.nbytes} B")
        whole = length == entry.nbytes
        source = self._unpacked(item, keep=not whole).reshape(-1).view(torch.uint8)
        out.detach().reshape(-1).view(torch.uint8).copy_(source[byte_offset : byte_offset + length])

    def _unpacked(self, item: PackedTensor, keep: bool) -> torch.Tensor:
        if getattr(self._last, "name", None) == item.name:
            return self._last.tensor
        parts = {}
        for part in item.parts:
            held = torch.empty(part.shape, dtype=part.dtype)
            super().read_into(part, held)
            parts[part.name] = held
        tensor = dequantise(item.name, parts, item.dtype, self.device).to("cpu", item.dtype).contiguous()
        if tuple(tensor.shape) != item.shape:
            raise CheckpointError(f"{item.parts[0].path}: {item.name} unpacks to {tuple(tensor.shape)}, not {item.shape}")
        self._last.name, self._last.tensor = (item.name, tensor) if keep else (None, None)
        return tensor
