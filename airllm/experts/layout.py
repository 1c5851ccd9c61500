"""What one expert is: its projections, their shapes, and where each lies in one contiguous block of bytes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from airllm.errors import UnsupportedModelError

ALIGNMENT_BYTES = 256
"""Every projection and every block starts on this boundary: cuBLAS picks other kernels for badly aligned weights."""

_STANDARD = {"is_transposed": False, "has_bias": False, "has_gate": True, "is_concatenated": True}


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
    """The bytes of one expert: all projections one behind the other in one block of ``expert_bytes``."""

    projections: tuple[Projection, ...]
    num_experts: int
    expert_bytes: int

    @classmethod
    def from_shapes(
        cls, shapes: Sequence[tuple[str, tuple[int, ...], torch.dtype]], num_experts: int
    ) -> ExpertLayout:
        """``shapes``: (name, shape of one expert, dtype) in block order."""
        offset, projections = 0, []
        for name, shape, dtype in shapes:
            projections.append(Projection(name, tuple(shape), dtype, offset))
            offset = _aligned(offset + projections[-1].nbytes)
        return cls(tuple(projections), num_experts, offset)

    @classmethod
    def from_module(cls, module: torch.nn.Module, dtype: torch.dtype | None = None) -> ExpertLayout:
        """Layout of a transformers experts module (parameters stacked along E, on ``meta`` or real).

        Raises:
            UnsupportedModelError: the module departs from the plain contract (gate and up concatenated, no bias, not
                transposed); the message names what is missing.
        """
        name = type(module).__name__
        odd = [flag for flag, want in _STANDARD.items() if getattr(module, flag, want) != want]
        if getattr(module, "has_post_expert_norm", False):
            odd.append("has_post_expert_norm")
        if odd:
            raise UnsupportedModelError(f"{name} has {', '.join(odd)}, which the slot backend does not serve yet")
        stacked = dict(module.named_parameters(recurse=False))
        if set(stacked) != {"gate_up_proj", "down_proj"}:
            raise UnsupportedModelError(
                f"{name} holds {sorted(stacked)}; the slot backend needs gate_up_proj [E, 2I, H] and down_proj [E, H, I]"
            )
        num_experts = stacked["gate_up_proj"].shape[0]
        shapes = [(key, tuple(stacked[key].shape[1:]), dtype or stacked[key].dtype) for key in ("gate_up_proj", "down_proj")]
        return cls.from_shapes(shapes, num_experts)

    def views(self, block: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Typed views of one expert's ``block`` (uint8, [expert_bytes]) in the order of ``projections``."""
        return tuple(
            block.narrow(0, p.offset_bytes, p.nbytes).view(p.dtype).view(p.shape) for p in self.projections
        )


def common_layout(layouts: Iterable[ExpertLayout]) -> ExpertLayout:
    """The one layout all layers share.

    Raises:
        UnsupportedModelError: layers differ (slots are exchangeable only when every expert has the same size).
    """
    distinct = set(layouts)
    if len(distinct) != 1:
        sizes = sorted({layout.expert_bytes for layout in distinct})
        raise UnsupportedModelError(f"layers hold experts of different layouts ({sizes} B); slots need one layout")
    return distinct.pop()
