"""Where each parameter of a decoder layer lies in one block of bytes, and in which pieces the block is filled.

A block holds one whole layer. Parameters lie in the order of the file, so that filling a block is one sweep over it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from airllm.checkpoint import ScatterRead, TensorReader, plan_scatter
from airllm.weight_map import Chunk, LoadGroup, TargetSpec, WeightMap

ALIGN_BYTES = 256  # what the widest device loads and the matrix libraries' fastest kernels ask for
PIECE_BYTES = 16 << 20
"""Read by one job: large enough that a job is one call of the system that lasts milliseconds (between calls a reading thread
waits for Python's lock, which the thread that runs the model may hold), small enough that every thread gets one."""


@dataclass(frozen=True, slots=True)
class Place:
    """One parameter: its bytes in the block, and every (module, attribute) that is this parameter."""

    spec: TargetSpec
    offset: int
    owners: tuple[tuple[nn.Module, str], ...]
    on_meta: nn.Parameter

    def view(self, block: torch.Tensor) -> torch.Tensor:
        """The parameter's tensor in ``block`` (uint8)."""
        run = block[self.offset : self.offset + self.spec.nbytes]
        return run.view(self.spec.dtype).view(self.spec.shape)


@dataclass(frozen=True, slots=True)
class Piece:
    """What one job reads: chunks that are neighbours in the file, or one conversion."""

    chunks: tuple[Chunk, ...] = ()
    converted: LoadGroup | None = None

    def read(self, reader: TensorReader, views: LayerViews) -> None:
        """Fill the bytes in the host block that ``views`` looks at."""
        if self.converted is not None:
            self.converted.read_into(reader, {spec.name: views.whole[spec.name] for spec in self.converted.targets})
            return
        for read in views.straight_reads(self, reader):
            reader.scatter(read)
        for chunk in self.chunks:
            if not _lands_as_it_is(chunk, views, reader):
                chunk.read(reader, views.flat[chunk.target])


def _lands_as_it_is(chunk: Chunk, views: LayerViews, reader: TensorReader) -> bool:
    return chunk.entry.dtype == views.flat[chunk.target].dtype and reader.as_stored(chunk.entry)


@dataclass(frozen=True)
class LayerLayout:
    """One decoder layer: its streamed parameters and the pieces that fill its block of ``nbytes``."""

    name: str
    places: tuple[Place, ...]
    pieces: tuple[Piece, ...]
    nbytes: int
    key: tuple[object, ...] = field(repr=False)
    """Equal for layers whose parameters lie in a block in the same way: they can share views."""


class LayerViews:
    """A host block seen as the targets of one layer: whole, and each as one row."""

    def __init__(self, layout: LayerLayout, block: torch.Tensor) -> None:
        self.whole = {place.spec.name: place.view(block) for place in layout.places}
        self.flat = {name: tensor.view(-1) for name, tensor in self.whole.items()}
        self._reads: dict[int, list[ScatterRead]] = {}

    def straight_reads(self, piece: Piece, reader: TensorReader) -> list[ScatterRead]:
        """The reads of the piece whose bytes land as they are; made once, so that streaming a layer is one call a piece."""
        made = self._reads.get(id(piece))
        if made is None:
            wanted = [
                (chunk.entry, chunk.source_start * chunk.entry.dtype.itemsize, self._run(chunk))
                for chunk in piece.chunks
                if _lands_as_it_is(chunk, self, reader)
            ]
            made = self._reads[id(piece)] = plan_scatter(wanted)
        return made

    def _run(self, chunk: Chunk) -> torch.Tensor:
        return self.flat[chunk.target][chunk.start : chunk.start + chunk.count]


def plan_layers(
    model: nn.Module, layers: Sequence[tuple[str, nn.Module]], weight_map: WeightMap, without: Collection[str] = ()
) -> list[LayerLayout]:
    """One layout a layer, for the parameters that can be streamed.

    Left out, and so for the caller to keep on the device: buffers, a parameter that lies in several layers or also
    outside them, one that the checkpoint does not fill, one named in ``without``, and one that is converted together with any
    such tensor.
    """
    names = _names_by_parameter(model)
    targets = {name: spec for name, spec in weight_map.targets().items() if name not in without}
    return [_plan_layer(name, layer, names, targets, weight_map) for name, layer in layers]


def _names_by_parameter(model: nn.Module) -> dict[int, list[str]]:
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return names


def _plan_layer(
    prefix: str, layer: nn.Module, names: dict[int, list[str]], targets: dict[str, TargetSpec], weight_map: WeightMap
) -> LayerLayout:
    owners: dict[str, list[tuple[nn.Module, str]]] = {}
    on_meta: dict[str, nn.Parameter] = {}
    for _, module in layer.named_modules(remove_duplicate=False):
        for attribute, parameter in module._parameters.items():
            if parameter is None or not parameter.is_meta:
                continue
            twins = names[id(parameter)]
            target = next((twin for twin in twins if twin in targets), None)
            if target is None or not all(twin.startswith(f"{prefix}.") for twin in twins):
                continue
            owners.setdefault(target, []).append((module, attribute))
            on_meta[target] = parameter
    groups = {id(group): group for group in map(weight_map.group_of, owners)}
    whole = [g for g in groups.values() if all(spec.name in owners for spec in g.targets)]
    whole.sort(key=_position)
    places, pieces, nbytes = _lay_out(whole, owners, on_meta)
    key = tuple((p.spec.name.removeprefix(prefix), p.spec.shape, p.spec.dtype, p.offset) for p in places)
    return LayerLayout(prefix, tuple(places), tuple(pieces), nbytes, key)


def _position(group: LoadGroup) -> tuple[str, int]:
    first = min(group.sources, key=lambda entry: (str(entry.path), entry.offset))
    return str(first.path), first.offset


def _lay_out(
    groups: Sequence[LoadGroup], owners: dict[str, list[tuple[nn.Module, str]]], on_meta: dict[str, nn.Parameter]
) -> tuple[list[Place], list[Piece], int]:
    places: list[Place] = []
    end = 0
    for group in groups:
        for spec in group.targets:
            places.append(Place(spec, end, tuple(owners[spec.name]), on_meta[spec.name]))
            end += -(-spec.nbytes // ALIGN_BYTES) * ALIGN_BYTES
    converted = [Piece(converted=group) for group in groups if not group.straight]
    chunks = [chunk for group in groups if group.straight for chunk in group.chunks(PIECE_BYTES)]
    return places, [*converted, *_packed(chunks)], end


def _packed(chunks: Sequence[Chunk]) -> Iterator[Piece]:
    """Chunks in the order of the file, in pieces of about PIECE_BYTES: a job reads one run of the file where it can."""
    held: list[Chunk] = []
    size = 0
    for chunk in sorted(chunks, key=lambda each: (str(each.entry.path), each.entry.offset, each.source_start)):
        nbytes = chunk.count * chunk.entry.dtype.itemsize
        if held and size + nbytes > PIECE_BYTES:
            yield Piece(tuple(held))
            held, size = [], 0
        held.append(chunk)
        size += nbytes
    if held:
        yield Piece(tuple(held))
