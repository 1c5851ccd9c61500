"""How the sources of one target lie in it: as they are, piece by piece, or through a conversion.

The parts of the weight map that look at one target at a time. Shapes are proved here, before any byte is read.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch

from airllm import transformers_private as private
from airllm.checkpoint import TensorEntry, TensorReader


@dataclass(frozen=True, slots=True)
class TargetSpec:
    """A parameter or persistent buffer of the model, in the dtype that transformers would load it in."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class Piece:
    """A whole source tensor that fills rows [r0, r1) of ``target[expert]``, or of the target; None means all of it."""

    entry: TensorEntry
    expert: int | None = None
    rows: tuple[int, int] | None = None


@dataclass(slots=True)
class Draft:
    """The checkpoint's tensors for one target: the converter they go through, and the tensors by source pattern."""

    converter: Any | None
    sources: dict[str, list[TensorEntry]] = field(default_factory=dict)

    @property
    def entries(self) -> list[TensorEntry]:
        return [entry for entries in self.sources.values() for entry in entries]


class Conversion:
    """transformers' own conversion of one group of tensors."""

    def __init__(
        self,
        conversions: private.Conversions,
        converter: Any,
        target: str,
        sources: Mapping[str, Sequence[TensorEntry]],
        dtype: torch.dtype,
    ) -> None:
        self._conversions = conversions
        self._converter = converter
        self._target = target
        self._sources = sources
        self._dtype = dtype

    def run(self, reader: TensorReader) -> dict[str, torch.Tensor]:
        """Read every source, cast it (transformers casts first, too) and convert; one group in memory."""
        read = {
            pattern: [reader.read(entry).to(self._dtype) for entry in entries]
            for pattern, entries in self._sources.items()
        }
        return self._conversions.convert(self._converter, self._target, read)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Names and shapes of what `run` makes, without reading."""
        try:
            made = self._run_empty("meta")
        except (NotImplementedError, RuntimeError):  # an operation that looks at values
            made = self._run_empty("cpu")
        return {name: tuple(tensor.shape) for name, tensor in made.items()}

    def _run_empty(self, device: str) -> dict[str, torch.Tensor]:
        empty = {
            pattern: [torch.zeros(entry.shape, dtype=self._dtype, device=device) for entry in entries]
            for pattern, entries in self._sources.items()
        }
        return self._conversions.convert(self._converter, self._target, empty)


def draft_conversion(
    draft: Draft, spec: TargetSpec, conversions: private.Conversions
) -> tuple[Conversion | None, dict[str, tuple[int, ...]], str | None]:
    """The conversion, the shapes of its targets, and what is wrong with it."""
    conversion = Conversion(conversions, draft.converter, spec.name, draft.sources, spec.dtype)
    try:
        return conversion, conversion.shapes(), None
    except (ValueError, KeyError, IndexError, RuntimeError) as error:
        names = ", ".join(f"{entry.name} {list(entry.shape)}" for entry in draft.entries[:4])
        return None, {}, f"{spec.name}: transformers cannot convert {names}: {error}"


def draft_pieces(draft: Draft, spec: TargetSpec) -> tuple[list[Piece] | None, str | None]:
    """The pieces of a target whose bytes can be read as they are (None: they must be converted), and what is wrong."""
    if draft.converter is None:
        (entry,) = draft.entries
        return [Piece(entry)], _wrong_shape(spec, entry, spec.shape)
    layout = private.layout_of(draft.converter)
    if layout is None:
        return None, None
    lists = [(pattern, draft.sources.get(pattern, [])) for pattern in draft.converter.source_patterns]
    if layout == "join":
        return _joined(spec, [entry for _, entries in lists for entry in entries], None)
    return _stacked(spec, lists, joined=layout == "stack_join")


def _stacked(
    spec: TargetSpec, lists: Sequence[tuple[str, list[TensorEntry]]], joined: bool
) -> tuple[list[Piece] | None, str | None]:
    experts = spec.shape[0]
    for pattern, entries in lists:
        if (problem := _wrong_experts(spec.name, pattern, entries, experts)) is not None:
            return None, problem
    pieces: list[Piece] = []
    for expert in range(experts):
        mine = [entries[expert] for _, entries in lists]
        if joined:
            some, problem = _joined(spec, mine, expert)
        else:
            some, problem = [Piece(mine[0], expert)], _wrong_shape(spec, mine[0], spec.shape[1:])
        if problem is not None:
            return None, problem
        pieces += some or []
    return pieces, None


def _joined(spec: TargetSpec, entries: Sequence[TensorEntry], expert: int | None) -> tuple[list[Piece], str | None]:
    """Pieces one below the other in ``target[expert]`` or in the target."""
    want = spec.shape if expert is None else spec.shape[1:]
    pieces, row = [], 0
    for entry in entries:
        if len(entry.shape) != len(want) or entry.shape[1:] != want[1:]:
            return [], _wrong_shape(spec, entry, want) or f"{spec.name}: {entry.name} cannot be joined"
        pieces.append(Piece(entry, expert, (row, row + entry.shape[0])))
        row += entry.shape[0]
    if row != want[0]:
        given = " + ".join(f"{entry.name} {list(entry.shape)}" for entry in entries)
        return [], f"{spec.name}: {given} have {row} rows together, the model wants {list(want)}"
    return pieces, None


def _wrong_shape(spec: TargetSpec, entry: TensorEntry, want: tuple[int, ...]) -> str | None:
    if entry.shape == want:
        return None
    return f"{spec.name}: {entry.name} of the checkpoint is {list(entry.shape)}, the model wants {list(want)}"


def _wrong_experts(target: str, pattern: str, entries: Sequence[TensorEntry], experts: int) -> str | None:
    """What is wrong with the list of experts found for one source pattern, or None."""
    place, numbers = _expert_numbers(entries)
    gap = bool(numbers) and numbers[-1] - numbers[0] != len(numbers) - 1
    if len(entries) == experts and not gap:
        return None
    absent = [number for number in range(experts) if number not in numbers]
    if numbers and absent:
        parts = entries[0].name.split(".")
        names = [".".join([*parts[:place], str(number), *parts[place + 1 :]]) for number in absent[:4]]
        detail = ", ".join(names) + (f" and {len(absent) - 4} more" if len(absent) > 4 else "")
        return f"{target}: {len(entries)} of {experts} experts found, missing {detail}"
    return f"{target}: the checkpoint has {len(entries)} tensors like {pattern!r}, the model has {experts} experts"


def _expert_numbers(entries: Sequence[TensorEntry]) -> tuple[int, list[int]]:
    """Which dotted part of the names counts the experts, and the numbers there; no numbers if it cannot be told."""
    parts = [entry.name.split(".") for entry in entries]
    if len(parts) < 2 or len({len(p) for p in parts}) != 1:
        return 0, []
    for place in range(len(parts[0])):
        column = [p[place] for p in parts]
        if len(set(column)) > 1:
            return (place, [int(part) for part in column]) if all(part.isdigit() for part in column) else (0, [])
    return 0, []
