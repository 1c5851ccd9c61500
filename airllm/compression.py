"""4-bit (nf4, blocks of 64) and 8-bit (blockwise, blocks of 2048) weights on disk, through bitsandbytes.

A compressed tensor ``k`` lies in a file as ``k`` (packed bytes) with ``k.4bit.<state>``, or with ``k.8bit.absmax`` and
``k.8bit.code``. That is AirLLM's layout, and AirLLM expects every floating tensor of a file to be packed, norms and
biases included. bitsandbytes packs; unpacking is a table look-up and a product, done here in torch on any device.
``open_compressed`` hides it all: an index of the original names, shapes and dtypes, and a reader that unpacks.
"""

from __future__ import annotations

import json
import logging
import math
import os
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
STEP = 1 << 18  # elements unpacked at once: the float32 values stay in the processor's cache
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


def unpack_blocks(packed: torch.Tensor, absmax: torch.Tensor, table: torch.Tensor, block: int) -> torch.Tensor:
    """The float32 values [N] of whole blocks, on the device of the arguments (bit-equal to bitsandbytes).

    ``packed``: uint8, [N / 2] with a table of 16 values (first value in the high half), [N] with one of 256.
    ``absmax``: float32, one scale a block of ``block`` values; the last block may be short.
    """
    index = packed.reshape(-1).int()
    if len(table) == 16:
        pairs = torch.stack((table.repeat_interleave(16), table.repeat(16)), 1).view(torch.int64).reshape(-1)
        values = pairs.index_select(0, index).view(torch.float32)  # one look-up gives two values
    else:
        values = table.index_select(0, index)
    whole = len(values) // block
    values[: whole * block].view(-1, block).mul_(absmax[:whole, None])
    if whole * block < len(values):
        values[whole * block :].mul_(absmax[whole])
    return values


def dequantise(
    name: str, parts: Mapping[str, torch.Tensor], dtype: torch.dtype | None = None, device: torch.device | str = "cpu"
) -> torch.Tensor:
    """The tensor ``name`` out of its file's entries ``parts``, in its original shape, on ``device``.

    ``dtype`` is that of an 8-bit tensor whose file does not say it (float16 then); a 4-bit one keeps its own.
    """
    packed = parts[name].to(device)
    if f"{name}.8bit.absmax" in parts:
        shape, kept = tuple(packed.shape), dtype or torch.float16
        prefix, table, block = f"{name}.8bit.", "code", BYTE_BLOCK
    elif f"{name}.4bit.absmax" in parts:
        shape, kept = _nf4_geometry(name, parts[f"{name}.4bit.{_NF4_STATE}"])
        prefix, table, block = f"{name}.4bit.", "quant_map", NF4_BLOCK
    else:
        return packed
    values = unpack_blocks(packed, parts[prefix + "absmax"].to(device), parts[prefix + table].to(device), block)
    return values[: math.prod(shape)].view(shape).to(kept)


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
    """One compressed tensor: its original geometry, where its parts lie, and its table of 16 or 256 values."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    packed: TensorEntry
    absmax: TensorEntry
    table: torch.Tensor
    block: int

    def values(self, reader: TensorReader, start: int, stop: int) -> torch.Tensor:
        """Elements ``start`` to ``stop`` of the flattened tensor, in float32. Reads only the blocks they lie in."""
        first, last = start // self.block, -(-stop // self.block)
        per_byte = 2 if len(self.table) == 16 else 1
        begin = first * self.block // per_byte
        packed = torch.empty(min(last * self.block // per_byte, self.packed.nbytes) - begin, dtype=torch.uint8)
        absmax = torch.empty(last - first, dtype=torch.float32)
        reader.read_into(self.packed, packed, begin)
        reader.read_into(self.absmax, absmax, first * 4)
        values = unpack_blocks(packed, absmax, self.table, self.block)
        return values[start - first * self.block : stop - first * self.block]


class CompressedIndex(CheckpointIndex):
    """The original names, shapes and dtypes of a compressed split.

    The offsets of its entries mean nothing: they have to be read through the reader that ``open_compressed`` gives.
    """


class CompressedReader(TensorReader):
    """Reads of compressed tensors come dequantised. ``bytes_read`` counts the compressed bytes."""

    def __init__(self, packed: Mapping[str, PackedTensor], threads: int | None = None) -> None:
        super().__init__(threads)
        self.packed = packed

    def as_stored(self, entry: TensorEntry) -> bool:
        item = self.packed.get(entry.name)
        return item is None or entry is item.packed or entry is item.absmax

    def read_into(self, entry: TensorEntry, out: torch.Tensor, byte_offset: int = 0) -> None:
        """As TensorReader.read_into; of a compressed tensor only whole elements can be read."""
        item = self.packed.get(entry.name)
        if item is None or entry is item.packed or entry is item.absmax:
            super().read_into(entry, out, byte_offset)
            return
        length, size = out.numel() * out.element_size(), item.dtype.itemsize
        if byte_offset < 0 or byte_offset + length > entry.nbytes or byte_offset % size or length % size:
            raise ValueError(f"{entry.name}: bytes {byte_offset}+{length} are no whole elements of its {entry.nbytes} B")
        if out.device.type != "cpu" or not out.is_contiguous():
            raise ValueError(f"{entry.name}: the bytes can only be read into a contiguous CPU tensor")
        flat = out.detach().reshape(-1)
        for start in range(byte_offset // size, (byte_offset + length) // size, STEP):
            stop = min(start + STEP, (byte_offset + length) // size)
            values = item.values(self, start, stop).to(item.dtype).view(out.dtype)
            first = (start * size - byte_offset) // out.element_size()
            flat[first : first + len(values)].copy_(values)


def open_compressed(
    folder: str | os.PathLike[str], *, dtype: torch.dtype | None = None, threads: int | None = None
) -> tuple[CompressedIndex, CompressedReader]:
    """Index and reader of a split folder, compressed or not. Reading does not need bitsandbytes.

    ``dtype`` is for 8-bit tensors of a folder that does not keep theirs (AirLLM's own: float16 there).
    Raises CheckpointError for a folder that is not whole, or a tensor whose parts do not fit together.
    """
    stored = CheckpointIndex.open(folder)
    with TensorReader(threads=1) as reader:
        packed = {item.name: item for item in _packed_tensors(stored, reader, dtype or torch.float16)}
    entries = {name: entry for name, entry in stored.items() if base_name(name) not in packed}
    for item in packed.values():
        nbytes = math.prod(item.shape) * item.dtype.itemsize
        entries[item.name] = TensorEntry(item.name, item.packed.path, 0, nbytes, item.shape, item.dtype)
    return CompressedIndex(stored.folder, stored.headers, entries), CompressedReader(packed, threads)


def _packed_tensors(stored: CheckpointIndex, reader: TensorReader, fallback: torch.dtype) -> Iterator[PackedTensor]:
    dtypes: dict[str, torch.dtype] = {}
    for header in stored.headers:
        for name, code in json.loads(header.metadata.get(DTYPES_KEY, "{}")).items():
            dtypes[name] = DTYPES[code]
    for name in sorted({base_name(name) for name in stored if base_name(name) != name}):
        try:
            packed = stored[name]
            if f"{name}.4bit.{_NF4_STATE}" in stored:
                shape, dtype = _nf4_geometry(name, reader.read(stored[f"{name}.4bit.{_NF4_STATE}"]))
                absmax, table, block = stored[f"{name}.4bit.absmax"], stored[f"{name}.4bit.quant_map"], NF4_BLOCK
            else:
                shape, dtype, block = packed.shape, dtypes.get(name, fallback), BYTE_BLOCK
                absmax, table = stored[f"{name}.8bit.absmax"], stored[f"{name}.8bit.code"]
        except KeyError as error:
            raise CheckpointError(f"{stored.folder}: {name} is compressed, but {error} is not there: split again") from error
        item = PackedTensor(name, shape, dtype, packed, absmax, reader.read(table), block)
        _prove_parts(item)
        yield item


def _prove_parts(item: PackedTensor) -> None:
    """The parts' sizes must follow from the shape; a nested (double-quantised) scale does not and is refused here."""
    count = math.prod(item.shape)
    held = (item.packed.nbytes, item.absmax.dtype, item.absmax.nbytes // 4, item.table.dtype, len(item.table))
    four = item.block == NF4_BLOCK
    blocks = -(-count // item.block)
    expected = (-(-count // 2) if four else count, torch.float32, blocks, torch.float32, 16 if four else 256)
    if held != expected:
        raise CheckpointError(
            f"{item.packed.path}: the parts of {item.name} {list(item.shape)} do not fit (bytes, scales, table): "
            f"expected {expected}, found {held}: split the checkpoint again"
        )


def _nf4_geometry(name: str, state: torch.Tensor) -> tuple[tuple[int, ...], torch.dtype]:
    """Shape and dtype out of the description that bitsandbytes packs as JSON text."""
    try:
        fields = json.loads(bytes(state.tolist()))
        dtype = getattr(torch, fields["dtype"])
        if fields["blocksize"] != NF4_BLOCK or fields["quant_type"] != "nf4" or not isinstance(dtype, torch.dtype):
            raise ValueError(f"blocks of {fields['blocksize']}, {fields['quant_type']}, {dtype}")
        return tuple(int(size) for size in fields["shape"]), dtype
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"the 4-bit description of {name} cannot be used ({error}): split again") from error
