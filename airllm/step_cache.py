"""Keys and values of a fixed size, at fixed addresses: what a captured decode step writes into and reads from.

A prompt goes through it as through transformers' dynamic cache (the same keys and values reach attention). Within a step the
place to write comes from a tensor, and all of the cache is handed to attention, whose mask hides what is not there yet.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from transformers import DynamicCache, PretrainedConfig
from transformers.cache_utils import Cache, CacheLayerMixin


class StepLayer(CacheLayerMixin):
    """One layer: ``keys`` and ``values`` [B, heads, capacity, head_dim], of which the first ``seen`` positions are filled."""

    is_sliding = False
    is_compileable = False  # else generate would build masks for, and compile, a static cache of its own kind

    def __init__(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        super().__init__()
        self.keys, self.values = keys, values
        self.dtype, self.device = keys.dtype, keys.device
        self.is_initialized = True
        self.seen = 0
        self.slot: torch.Tensor | None = None

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Nothing: the memory is there from the start."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Add keys and values [B, heads, n, head_dim]; gives what attention reads."""
        assert self.keys is not None and self.values is not None
        if self.slot is not None:
            self.keys.index_copy_(2, self.slot, key_states)
            self.values.index_copy_(2, self.slot, value_states)
            return self.keys, self.values
        end = self.seen + key_states.shape[2]
        if end > self.keys.shape[2]:
            raise ValueError(f"{end} positions do not fit in a cache of {self.keys.shape[2]}")
        self.keys[:, :, self.seen : end] = key_states
        self.values[:, :, self.seen : end] = value_states
        self.seen = end
        return self.keys[:, :, :end], self.values[:, :, :end]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.seen + query_length, 0

    def get_seq_length(self) -> int:
        return self.seen

    def get_max_length(self) -> int:
        assert self.keys is not None
        return self.keys.shape[2]

    get_max_cache_shape = get_max_length  # its name before transformers 5.17

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Row r becomes what row ``beam_idx[r]`` was (beam search); addresses stay."""
        assert self.keys is not None and self.values is not None
        for memory in (self.keys, self.values):
            filled = memory[:, :, : self.seen]
            filled.copy_(filled.index_select(0, beam_idx.to(memory.device)))

    def reset(self) -> None:
        """Forget everything. Zeroed, because a NaN left behind would pass through any mask (0 * NaN)."""
        assert self.keys is not None and self.values is not None
        self.keys.zero_()
        self.values.zero_()
        self.seen = 0


class LayerShape(NamedTuple):
    """One layer's keys [B, heads, capacity, key_width] and values, and how far back it looks (None: all the way)."""

    heads: int
    key_width: int
    value_width: int
    window: int | None

    @property
    def values_a_position(self) -> int:
        """Numbers kept of one position of one sequence."""
        return self.heads * (self.key_width + self.value_width)


class StepCache(Cache):
    """Keys and values of ``batch`` sequences of up to ``capacity`` positions."""

    def __init__(
        self, layers: Sequence[LayerShape], batch: int, capacity: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.batch, self.capacity = batch, capacity
        widths = [(layer.heads, width) for layer in layers for width in (layer.key_width, layer.value_width)]
        # Tensors made under inference_mode could not be written outside of it.
        with torch.inference_mode(False):
            sizes = [batch * heads * capacity * width for heads, width in widths]
            self._memory = torch.zeros(sum(sizes), dtype=dtype, device=device)
            parts = [
                part.view(batch, heads, capacity, width)
                for part, (heads, width) in zip(self._memory.split(sizes), widths, strict=True)
            ]
            super().__init__(layers=[StepLayer(*pair) for pair in zip(parts[::2], parts[1::2], strict=True)])

    @property
    def nbytes(self) -> int:
        return self._memory.nbytes

    def memory(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of one layer, all of their positions."""
        held: Any = self.layers[layer]
        return held.keys, held.values

    @property
    def seen(self) -> int:
        """Positions that are filled."""
        return self.layers[0].seen  # type: ignore[union-attr]

    def advance(self, positions: int) -> None:
        """Count positions that a step has written."""
        for layer in self.layers:
            layer.seen += positions  # type: ignore[union-attr]

    def clear(self, position: int) -> None:
        """Zeros at one position, of every layer."""
        for layer in range(len(self.layers)):
            for memory in self.memory(layer):
                memory[:, :, position].zero_()

    @contextmanager
    def writing_at(self, slot: torch.Tensor) -> Iterator[None]:
        """Inside, one position is written where ``slot`` (int64 [1]) says, and nothing is counted."""
        for layer in self.layers:
            layer.slot = slot  # type: ignore[union-attr]
        try:
            yield
        finally:
            for layer in self.layers:
                layer.slot = None  # type: ignore[union-attr]

    def as_dynamic(self, config: PretrainedConfig) -> DynamicCache:
        """A copy in the cache class that generate gives out otherwise."""
        dynamic = DynamicCache(config=config)
        for number in range(len(self.layers)):
            keys, values = self.memory(number)
            dynamic.update(keys[:, :, : self.seen].clone(), values[:, :, : self.seen].clone(), number)
        return dynamic
