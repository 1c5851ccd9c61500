"""How the sources of one target lie in it: as they are, piece by piece, or through a conversion.

The parts of the weight map that look at one target at a time. Shapes are proved here, before any byte is read.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch

from airllm import transformers_private as private
from airllm.checkpoint import TensorEntry, TensorReader

_Choose = Callable[[Sequence[TensorEntry]], Sequence[TensorEntry]]


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
        self._dtype = None if private.takes_stored_dtype(converter) else dtype
        self.by_expert = ""
        """How `run_expert` finds an expert's sources ("listed" or "stacked"); "" where only `run` is possible."""

    def run(self, reader: TensorReader) -> dict[str, torch.Tensor]:
        """Read every source, cast it (transformers casts first, too) and convert; one group in memory."""
        read = {
            pattern: [self._cast(reader.read(entry)) for entry in entries]
            for pattern, entries in self._sources.items()
        }
        return self._conversions.convert(self._converter, self._target, read)

    def run_expert(self, reader: TensorReader, expert: int) -> torch.Tensor:
        """What `run` would make of one expert: [R, C] (or [R]) of a stacked target; one expert in memory."""
        read = {
            pattern: [self._cast(_read_expert(reader, entries, expert, self.by_expert))]
            for pattern, entries in self._sources.items()
        }
        return self._conversions.convert(self._converter, self._target, read)[self._target][0]

    def expert_shapes(self, wanted: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
        """`shapes`, from one expert alone, where the converter treats each of ``wanted[0]`` experts by itself; sets
        `by_expert` then. Empty otherwise."""
        kind, experts = private.by_expert(self._converter), wanted[0] if len(wanted) > 1 else 0
        if kind is None or not all(_has_experts(entries, experts, kind) for entries in self._sources.values()):
            return {}
        one = self._shapes(lambda entries: entries[:1] if kind == "listed" else entries, 1 if kind == "stacked" else None)
        shape = one.get(self._target, ())
        if len(one) != 1 or shape[:1] != (1,):
            return {}
        self.by_expert = kind
        return {self._target: (experts, *shape[1:])}

    def _cast(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor if self._dtype is None else tensor.to(self._dtype)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Names and shapes of what `run` makes, without reading."""
        return self._shapes(lambda entries: entries, None)

    def _shapes(self, choose: _Choose, rows: int | None) -> dict[str, tuple[int, ...]]:
        try:
            made = self._run_empty("meta", choose, rows)
        except (NotImplementedError, RuntimeError):  # an operation that looks at values
            made = self._run_empty("cpu", choose, rows)
        return {name: tuple(tensor.shape) for name, tensor in made.items()}

    def _run_empty(self, device: str, choose: _Choose, rows: int | None) -> dict[str, torch.Tensor]:
        """Convert zeros in the place of the chosen sources, the first axis cut to ``rows``."""
        empty = {
            pattern: [self._zeros(entry, device, rows) for entry in choose(entries)]
            for pattern, entries in self._sources.items()
        }
        return self._conversions.convert(self._converter, self._target, empty)

    def _zeros(self, entry: TensorEntry, device: str, rows: int | None) -> torch.Tensor:
        shape = entry.shape if rows is None else (rows, *entry.shape[1:])
        return torch.zeros(shape, dtype=self._dtype or entry.dtype, device=device)


def _has_experts(entries: Sequence[TensorEntry], experts: int, kind: str) -> bool:
    if kind == "listed":
        return len(entries) == experts
    return len(entries) == 1 and entries[0].shape[:1] == (experts,)


def _read_expert(reader: TensorReader, entries: Sequence[TensorEntry], expert: int, kind: str) -> torch.Tensor:
    """One expert's own tensor, or its slice [1, ...] of the stacked one."""
    if kind == "listed":
        return reader.read(entries[expert])
    (entry,) = entries
    out = torch.empty((1, *entry.shape[1:]), dtype=entry.dtype)
    reader.read_into(entry, out, expert * out.nbytes)
    return out


def draft_conversion(
    draft: Draft, spec: TargetSpec, conversions: private.Conversions
) -> tuple[Conversion | None, dict[str, tuple[int, ...]], str | None]:
    """The conversion, the shapes of its targets, and what is wrong with it."""
    conversion = Conversion(conversions, draft.converter, spec.name, draft.sources, spec.dtype)
    try:
        return conversion, conversion.expert_shapes(spec.shape) or conversion.shapes(), None
    except (ValueError, KeyError, IndexError, RuntimeError) as error:
        names = ", ".join(f"{entry.name} {list(entry.shape)}" for entry in draft.entries[:4])
        return None, {}, f"{spec.name}: transformers cannot convert {names}: {error}"


def draft_pieces(draft: Draft, spec: TargetSpec) -> tuple[list[Piece] | None, str | None]:
    """The pieces of a target whose bytes can be read as they are (None: they must be converted), and what is wrong."""
    if draft.converter is None:
        (entry,) = draft.entries
        return [Piece(entry)], _wrong_shape(spec, entry, spec.shape)
    if len(draft.entries) == 1 and private.leaves_alone(draft.converter, draft.entries[0].shape, spec.shape):
        entry = draft.entries[0]
        if entry.dtype.is_floating_point and entry.dtype.itemsize > 1:
            return [Piece(entry)], None
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
