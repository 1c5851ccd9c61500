"""Module parameter <- source tensors, from transformers' own conversion tables. Reads no bytes until asked.

`build_weight_map` matches every tensor of a checkpoint with the parameters and persistent buffers of a model that was
built on meta, exactly as ``from_pretrained`` would, and proves names and shapes before any weight is read. The dense
parameters, the streamed layers and the expert bank all read through the map it returns.

Shape letters: E experts, R rows and C columns of one expert's matrix.
"""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from transformers import PreTrainedModel

from airllm import transformers_private as private
from airllm.checkpoint import TensorEntry, TensorReader
from airllm.errors import WeightMapError
from airllm.quantised import dequantiser
from airllm.weight_sources import Conversion, Draft, Piece, TargetSpec, draft_conversion, draft_pieces

__all__ = ["Chunk", "LoadGroup", "Piece", "TargetSpec", "WeightMap", "build_weight_map"]

log = logging.getLogger(__name__)

CHUNK_BYTES = 1 << 25  # large tensors are read by several threads in pieces of this size
CONVERTED_BYTES = 1 << 20  # converted at a time: few enough to stay in a core's cache between the read and the conversion
_LISTED = 20  # names in an error message


@dataclass(frozen=True, slots=True)
class Chunk:
    """A run of elements that lie together both in a file and in a target (flattened)."""

    target: str
    entry: TensorEntry
    source_start: int  # element of the source tensor
    start: int  # element of the target
    count: int  # elements

    def read(self, reader: TensorReader, flat: torch.Tensor) -> None:
        """Fill ``flat[start : start + count]``, the target as one contiguous CPU row; casts through the reader's scratch."""
        self.read_run(reader, flat[self.start : self.start + self.count])

    def read_run(self, reader: TensorReader, run: torch.Tensor) -> None:
        """Fill ``run`` [count] of any dtype."""
        size = self.entry.dtype.itemsize
        if run.dtype == self.entry.dtype:
            reader.read_into(self.entry, run, self.source_start * size)
            return
        step = CONVERTED_BYTES // size
        with reader.scratch(CONVERTED_BYTES) as scratch:
            stored = scratch.view(self.entry.dtype)
            for start in range(0, self.count, step):
                part = run[start : start + step]
                reader.read_into(self.entry, stored[: len(part)], (self.source_start + start) * size)
                part.copy_(stored[: len(part)])


class LoadGroup:
    """Targets that are filled together: one target read straight from its pieces, or all targets of one conversion."""

    def __init__(
        self,
        targets: Sequence[TargetSpec],
        sources: Sequence[TensorEntry],
        pieces: Sequence[Piece] = (),
        conversion: Conversion | None = None,
    ) -> None:
        self.targets = tuple(targets)
        self.sources = tuple(sources)
        self.pieces = tuple(pieces)
        self.conversion = conversion
        self._of_expert: dict[int, list[Piece]] = {}
        for piece in self.pieces:
            if piece.expert is not None:
                self._of_expert.setdefault(piece.expert, []).append(piece)

    def __repr__(self) -> str:
        how = "straight" if self.straight else "converted"
        return f"LoadGroup({', '.join(spec.name for spec in self.targets)}: {how} from {len(self.sources)} tensors)"

    @property
    def straight(self) -> bool:
        """True when the bytes on disk (cast, if need be) are the bytes of the one target."""
        return self.conversion is None

    @property
    def nbytes(self) -> int:
        """Bytes of all targets."""
        return sum(spec.nbytes for spec in self.targets)

    def chunks(self, max_bytes: int | None = None) -> Iterator[Chunk]:
        """The straight group's target, run by run, each of at most ``max_bytes`` of the source (None: no limit)."""
        (spec,) = self.targets
        for piece in self.pieces:
            yield from _chunks_of(piece, spec, max_bytes)

    def jobs(
        self, reader: TensorReader, out: Mapping[str, torch.Tensor], chunk_bytes: int | None = CHUNK_BYTES
    ) -> list[Callable[[], None]]:
        """`read_into` as independent jobs for ``reader.run``. Targets that ``out`` does not name are left alone."""
        wanted = [spec for spec in self.targets if spec.name in out]
        for spec in wanted:
            _check_out(spec.name, out[spec.name], spec.shape, spec.dtype)
        if not wanted:
            return []
        if self.conversion is not None:
            return [_bind(_convert_into, self.conversion, reader, wanted, out)]
        flat = out[wanted[0].name].view(-1)
        return [_bind(chunk.read, reader, flat) for chunk in self.chunks(chunk_bytes)]

    def read_into(self, reader: TensorReader, out: Mapping[str, torch.Tensor]) -> None:
        """Fill ``out[name]``: contiguous CPU tensors of the targets' shapes and dtypes. Runs in the calling thread."""
        for job in self.jobs(reader, out, None):
            job()

    def expert_chunks(self, expert: int) -> list[Chunk]:
        """One expert's slice of a straight group's target, as chunks of that slice."""
        (spec,) = self.targets
        if self._of_expert:
            base = expert * prod(spec.shape[1:])
            runs = [chunk for piece in self._of_expert[expert] for chunk in _chunks_of(piece, spec, None)]
            return [Chunk(c.target, c.entry, c.source_start, c.start - base, c.count) for c in runs]
        (piece,) = self.pieces
        count = prod(spec.shape[1:])
        return [Chunk(spec.name, piece.entry, expert * count, 0, count)]


class WeightMap:
    """Every parameter and persistent buffer that the checkpoint fills, and where its bytes come from."""

    def __init__(self, groups: Sequence[LoadGroup], unexpected: Sequence[str], missing: Sequence[str]) -> None:
        self.groups = tuple(groups)
        self.unexpected = tuple(unexpected)
        """Tensors of the checkpoint, by their names on disk, that the model has no place for."""
        self.missing = tuple(missing)
        """Names that the model class allows a checkpoint to leave out, and this one does (tied weights apart)."""
        self._specs = {spec.name: spec for group in groups for spec in group.targets}
        self._groups = {spec.name: group for group in groups for spec in group.targets}
        self._converted: OrderedDict[int, dict[str, torch.Tensor]] = OrderedDict()
        self._lock = threading.Lock()

    def targets(self) -> dict[str, TargetSpec]:
        """Name in the model -> shape and dtype, for all that the checkpoint fills. A tied twin is not among them."""
        return dict(self._specs)

    def group_of(self, target: str) -> LoadGroup:
        """The group that fills ``target``. Raises WeightMapError for a name the checkpoint does not fill."""
        if target not in self._groups:
            raise WeightMapError(f"{target} is not a tensor that the checkpoint fills")
        return self._groups[target]

    def read_expert(self, target: str, expert: int, reader: TensorReader, out: torch.Tensor) -> None:
        """Fill ``out`` [R, C] (or [R]) with ``target[expert]`` of a stacked target [E, R, C] (or [E, R]).

        ``out`` is a contiguous CPU tensor of the target's dtype. Straight groups read just that expert's bytes, and most
        conversions make one expert at a time. Others are converted whole; the last two of these are kept, so that reading
        expert after expert costs one each.
        """
        group, spec = self.group_of(target), self._specs[target]
        if not 0 <= expert < spec.shape[0]:
            raise WeightMapError(f"{target} has {spec.shape[0]} experts, there is no expert {expert}")
        _check_out(target, out, spec.shape[1:], spec.dtype)
        if group.conversion is not None and group.conversion.by_expert:
            out.copy_(group.conversion.run_expert(reader, expert))
            return
        if group.conversion is not None:
            out.copy_(self._convert(group, reader)[target][expert])
            return
        flat = out.view(-1)
        for chunk in group.expert_chunks(expert):
            chunk.read(reader, flat)

    def forget_conversions(self) -> None:
        """Free what `read_expert` keeps of converted groups."""
        with self._lock:
            self._converted.clear()

    def _convert(self, group: LoadGroup, reader: TensorReader) -> dict[str, torch.Tensor]:
        assert group.conversion is not None
        with self._lock:
            made = self._converted.get(id(group))
            if made is None:
                while len(self._converted) > 1:
                    self._converted.popitem(last=False)
                made = self._converted[id(group)] = group.conversion.run(reader)
            return made


def build_weight_map(
    model: PreTrainedModel,
    index: Mapping[str, TensorEntry],
    *,
    dtype: torch.dtype,
    quantisation: dict[str, Any] | None = None,
) -> WeightMap:
    """Match a checkpoint with ``model`` (built on meta in ``dtype``), as transformers' ``from_pretrained`` would.

    ``quantisation`` is what config.json says of weights stored quantised (see `airllm.quantised`).

    Raises:
        WeightMapError: tensors that are missing, of another shape, or experts that are missing; names all of them.
    """
    wanted = model.state_dict()
    conversions = private.Conversions(model, wanted, dequantiser(quantisation))
    plan = private.DtypePlan(model, dtype)
    drafts, unexpected = _assign(conversions, index, wanted)
    groups: list[LoadGroup] = []
    problems: list[str] = []
    for name, draft in drafts.items():
        group = _group(name, draft, wanted, plan, conversions, problems)
        if group is not None:
            groups.append(group)
    filled = {spec.name for group in groups for spec in group.targets}
    absent = _without_tied(model, wanted.keys() - filled - drafts.keys(), filled)
    reported, strange = private.not_reported(model, absent, set(unexpected))
    problems += [f"{name} {list(wanted[name].shape)} is missing" for name in sorted(reported, key=private.natural_key)]
    if problems:
        raise WeightMapError(_message(model, problems))
    left = [key for name, keys in unexpected.items() if name in strange for key in keys]
    if left:
        log.warning("%d tensors of the checkpoint have no place in the model: %s", len(left), _some(left))
    return WeightMap(groups, left, sorted(absent - reported, key=private.natural_key))


def _assign(
    conversions: private.Conversions, index: Mapping[str, TensorEntry], wanted: Mapping[str, torch.Tensor]
) -> tuple[dict[str, Draft], dict[str, list[str]]]:
    """Checkpoint keys by the (first) target they go to, and those with none by the name they would have had."""
    drafts: dict[str, Draft] = {}
    unexpected: dict[str, list[str]] = {}
    for key in sorted(index, key=private.natural_key):
        name, pattern = conversions.rename(key)
        if name not in wanted:
            unexpected.setdefault(name, []).append(key)
            continue
        converter = conversions.converter(pattern) if pattern is not None else None
        draft = drafts.setdefault(name, Draft(converter))
        if (draft.converter is None) != (converter is None) or (converter is None and draft.sources):
            # transformers silently takes the first here; two different weights for one place deserve to be seen
            other = next(iter(draft.sources.values()))[0].name
            raise WeightMapError(f"{name}: both {other} and {key} of the checkpoint claim this place")
        draft.sources.setdefault(pattern or key, []).append(index[key])
    return drafts, unexpected


def _group(
    name: str,
    draft: Draft,
    wanted: Mapping[str, torch.Tensor],
    plan: private.DtypePlan,
    conversions: private.Conversions,
    problems: list[str],
) -> LoadGroup | None:
    dtype = plan.of(name, wanted[name])
    spec = TargetSpec(name, tuple(wanted[name].shape), dtype)
    pieces, problem = draft_pieces(draft, spec)
    if problem is not None:
        problems.append(problem)
        return None
    if pieces is not None:
        return LoadGroup([spec], draft.entries, pieces)
    conversion, shapes, problem = draft_conversion(draft, spec, conversions)
    if problem is not None:
        problems.append(problem)
        return None
    specs = []
    for made, shape in shapes.items():
        if made not in wanted:
            continue
        if shape != tuple(wanted[made].shape):
            problems.append(
                f"{made}: {_some([e.name for e in draft.entries])} convert to {list(shape)}, "
                f"the model wants {list(wanted[made].shape)}"
            )
        specs.append(TargetSpec(made, shape, dtype))
    return LoadGroup(specs, draft.entries, conversion=conversion)


def _without_tied(model: PreTrainedModel, absent: Iterable[str], filled: set[str]) -> set[str]:
    """``absent`` without the names that are tied to a tensor the checkpoint has."""
    left = set(absent)
    for names in private.tied_groups(model):
        if names & filled:
            left -= names
    return left


def _chunks_of(piece: Piece, spec: TargetSpec, max_bytes: int | None) -> Iterator[Chunk]:
    start = 0
    inner = spec.shape
    if piece.expert is not None:
        inner = inner[1:]
        start += piece.expert * prod(inner)
    if piece.rows is not None:
        start += piece.rows[0] * prod(inner[1:])
    count = prod(piece.entry.shape)
    step = count if max_bytes is None else max(1, max_bytes // piece.entry.dtype.itemsize)
    for done in range(0, count, max(step, 1)):
        yield Chunk(spec.name, piece.entry, done, start + done, min(step, count - done))


def _convert_into(
    conversion: Conversion, reader: TensorReader, specs: Sequence[TargetSpec], out: Mapping[str, torch.Tensor]
) -> None:
    made = conversion.run(reader)
    for spec in specs:
        out[spec.name].copy_(made[spec.name])


def _bind(function: Callable[..., None], *args: object) -> Callable[[], None]:
    return lambda: function(*args)


def _check_out(name: str, out: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    if tuple(out.shape) != shape or out.dtype != dtype or out.device.type != "cpu" or not out.is_contiguous():
        raise ValueError(
            f"{name}: wants a contiguous CPU tensor {list(shape)} of {dtype}, got {list(out.shape)} of {out.dtype} on "
            f"{out.device}{'' if out.is_contiguous() else ', not contiguous'}"
        )


def _some(names: Sequence[str], limit: int = 5) -> str:
    return ", ".join(names[:limit]) + (f" and {len(names) - limit} more" if len(names) > limit else "")


def _message(model: PreTrainedModel, problems: Sequence[str]) -> str:
    shown = list(problems[:_LISTED])
    if len(problems) > _LISTED:
        shown.append(f"and {len(problems) - _LISTED} more")
    return (
        f"the checkpoint does not fit {type(model).__name__}: {len(problems)} problem{'s' if len(problems) > 1 else ''}\n  "
        + "\n  ".join(shown)
        + "\nCheck that config.json belongs to these weights and that the download is complete."
    )
