"""What steps of one batch are computed from and to: the shapes of a model's cache, and the fixed tensors of a step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel

from airllm.step_cache import LayerShape, StepCache


@dataclass(frozen=True)
class StepPlan:
    """What a model's steps need to know of it.

    ``layers``: of its cache. ``types``: window by layer type for a model that takes a mask for each type; None for one that
    takes a single mask. ``top_k``: experts a token is routed to.
    """

    layers: tuple[LayerShape, ...]
    types: Mapping[str, int | None] | None
    top_k: int

    def cache_bytes(self, batch: int, capacity: int, itemsize: int) -> int:
        """Bytes of the keys and values of ``batch`` sequences of ``capacity`` positions."""
        return batch * capacity * itemsize * sum(layer.values_a_position for layer in self.layers)


class StepState:
    """The fixed tensors of steps of ``batch`` rows on a cache of ``capacity`` positions, and the recording of one.

    ``window``: that of the first layer, which is every layer's where the plan has no types.
    """

    def __init__(self, model: PreTrainedModel, plan: StepPlan, batch: int, capacity: int, device: torch.device) -> None:
        self.batch, self.capacity, self.dtype = batch, capacity, model.dtype
        self.window: int | None = plan.layers[0].window
        self.additive_mask = model.config._attn_implementation == "eager"
        self.cache = StepCache(plan.layers, batch, capacity, model.dtype, device)
        self._types = plan.types
        with torch.inference_mode(False):
            self.ids = torch.zeros(batch, 1, dtype=torch.int64, device=device)
            self.positions = torch.zeros(batch, 1, dtype=torch.int64, device=device)
            self.slot = torch.zeros(1, dtype=torch.int64, device=device)
            self.padding = torch.ones(batch, capacity, dtype=torch.bool, device=device)
            self._at = torch.arange(capacity, device=device)
        self.begun = False  # within this call of generate
        self.warm = False  # a step has run: libraries are set up, kernels compiled
        self.graph: Any = None
        self.graph_bytes = 0
        self.output: Any = None
        self.watched: list[torch.Tensor | None] = []

    @property
    def nbytes(self) -> int:
        """Device bytes of the cache and of the recording."""
        return self.cache.nbytes + self.graph_bytes

    def reset(self) -> None:
        """For a new call of generate."""
        self.cache.reset()
        self.begun = False

    def load(self, ids: torch.Tensor, positions: torch.Tensor, mask: torch.Tensor | None) -> None:
        """Take one step's input: ``ids`` and ``positions`` [B, 1], ``mask`` [B, positions so far]."""
        self.ids.copy_(ids)
        self.slot.fill_(self.cache.seen)
        self.positions.copy_(positions)
        if not self.begun:  # later masks only grow by ones
            self.padding.fill_(True)
            if mask is not None:
                self.padding[:, : mask.shape[1]] = mask.bool()
            self.begun = True

    def masks(self) -> torch.Tensor | dict[str, torch.Tensor]:
        """What the new token may look at, as the model takes it: one mask, or one for each type of layer."""
        if self._types is None:
            return self._mask(self.window)
        made = {window: self._mask(window) for window in set(self._types.values())}
        return {name: made[window] for name, window in self._types.items()}

    def _mask(self, window: int | None) -> torch.Tensor:
        """[B, 1, 1, capacity] bool, or to be added for eager attention."""
        visible = self._at <= self.slot
        if window is not None:
            visible = visible & (self._at > self.slot - window)
        allowed = (visible & self.padding)[:, None, None, :]
        if not self.additive_mask:
            return allowed
        return torch.zeros_like(allowed, dtype=self.dtype).masked_fill(~allowed, torch.finfo(self.dtype).min)
