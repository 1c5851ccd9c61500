"""What one expert is: its projections, their shapes, and where each lies in one contiguous block of bytes."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

import torch

from airllm.errors import UnsupportedModelError

ALIGNMENT_BYTES = 256
"""Every projection and every block starts on this boundary: cuBLAS picks other kernels for badly aligned weights."""


def _aligned(count_bytes: int) -> int:
    return -(-count_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


@dataclass(frozen=True)
class Projection:
    """One weight of an expert: ``shape`` of a single expert ([2I, H] or [H, I]); ``offset_bytes`` from the block start."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    offset_bytes: int

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class ExpertLayout:
    """The bytes of one expert: all projections one behind the other in one block of ``expert_bytes``.

    ``identities``: ids behind the experts' own that stand for no weights at all: they give back what they are given.
    """

    projections: tuple[Projection, ...]
    num_experts: int
    expert_bytes: int
    identities: int = 0

    @classmethod
    def from_shapes(
        cls, shapes: Sequence[tuple[str, tuple[int, ...], torch.dtype]], num_experts: int, identities: int = 0
    ) -> ExpertLayout:
        """``shapes``: (name, shape of one expert, dtype) in block order."""
        offset, projections = 0, []
        for name, shape, dtype in shapes:
            projections.append(Projection(name, tuple(shape), dtype, offset))
            offset = _aligned(offset + projections[-1].nbytes)
        return cls(tuple(projections), num_experts, offset, identities)

    @classmethod
    def from_module(cls, module: torch.nn.Module, dtype: torch.dtype | None = None) -> ExpertLayout:
        """Layout of a transformers experts module (parameters stacked along E, on ``meta`` or real).

        The blocks hold ``gate_up_proj`` (``up_proj`` where there is no gate) and ``down_proj``, each with its bias behind
        it where the module says that it has biases, as the module has them: transposed, interleaved, joined.

        Raises:
            UnsupportedModelError: the module holds other parameters than its flags say; the message names them.
        """
        stacked = dict(module.named_parameters(recurse=False))
        names = projection_names(module)
        if set(stacked) != set(names):
            raise UnsupportedModelError(
                f"{type(module).__name__} holds {_shapes(stacked)}; by its flags the slot backend expects {', '.join(names)}"
            )
        experts, identities = stacked["down_proj"].shape[0], identity_experts(module)
        if any(parameter.shape[0] not in (experts, experts + identities) for parameter in stacked.values()):
            raise UnsupportedModelError(
                f"{type(module).__name__} holds {_shapes(stacked)}: not the same number of experts in each"
            )
        shapes = [(name, tuple(stacked[name].shape[1:]), dtype or stacked[name].dtype) for name in names]
        return cls.from_shapes(shapes, experts, identities)

    def views(self, block: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Typed views of one expert's ``block`` (uint8, [expert_bytes] or longer) in the order of ``projections``."""
        return tuple(
            block.narrow(0, p.offset_bytes, p.nbytes).view(p.dtype).view(p.shape) for p in self.projections
        )


def identity_experts(module: torch.nn.Module) -> int:
    """Ids behind the experts' own for which a module hands its input through (LongCat)."""
    return int(getattr(module, "zero_expert_num", 0)) if hasattr(module, "identity_expert") else 0


def projection_names(module: torch.nn.Module) -> tuple[str, ...]:
    """Parameters that an experts module has by its flags, in block order: weight, its bias if any, weight, its bias if any."""
    weights = ("gate_up_proj" if getattr(module, "has_gate", True) else "up_proj", "down_proj")
    if not getattr(module, "has_bias", False):
        return weights
    return tuple(name for weight in weights for name in (weight, f"{weight}_bias"))


def _shapes(stacked: dict[str, torch.nn.Parameter]) -> str:
    return ", ".join(f"{name} {list(parameter.shape)}" for name, parameter in sorted(stacked.items())) or "no parameters"


@dataclass(frozen=True)
class ModelLayout:
    """The layouts of all layers with experts, which are numbered among themselves, and the keys of their experts.

    An expert's key counts the experts of all layers before it. Layers may differ in shape and in number of experts;
    ``expert_bytes`` is the largest expert, so that any slot holds any expert.
    """

    layers: tuple[ExpertLayout, ...]

    @property
    def uniform(self) -> ExpertLayout | None:
        """The one layout of all layers, None when they differ."""
        return self.layers[0] if len(set(self.layers)) == 1 else None

    @classmethod
    def of(cls, layout: ExpertLayout, layers: int) -> ModelLayout:
        """``layers`` layers alike."""
        return cls((layout,) * layers)

    @property
    def projections(self) -> tuple[Projection, ...]:
        """Those of the first layer: of every layer, where all have one layout."""
        return self.layers[0].projections

    @property
    def num_experts(self) -> int:
        """Experts of the largest layer."""
        return max(layout.num_experts for layout in self.layers)

    @cached_property
    def first_keys(self) -> tuple[int, ...]:
        """The key of each layer's expert 0, and the number of all experts."""
        return (0, *accumulate(layout.num_experts for layout in self.layers))

    @property
    def total_experts(self) -> int:
        return self.first_keys[-1]

    @property
    def expert_bytes(self) -> int:
        """Bytes of the largest expert."""
        return max(layout.expert_bytes for layout in self.layers)

    def locate(self, key: int) -> tuple[int, int]:
        """(layer, expert) of a key."""
        layer = bisect_right(self.first_keys, key) - 1
        return layer, key - self.first_keys[layer]

    @property
    def widest(self) -> int:
        """The longest side of any projection: no product within an expert is wider."""
        return max(max(projection.shape) for layer in set(self.layers) for projection in layer.projections)

    @property
    def total_bytes(self) -> int:
        """Bytes of all experts."""
        return sum(layout.num_experts * layout.expert_bytes for layout in self.layers)
