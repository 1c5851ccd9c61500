"""Keys and values of a fixed size, at fixed addresses: what a captured decode step writes into and reads from.

A prompt goes through it as through transformers' dynamic cache (the same keys and values reach attention). Within a step the
place to write comes from a tensor, and all of the cache is handed to attention, whose mask hides what is not there yet.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

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

    def reset(self) -> None:
        """Forget everything. Zeroed, because a NaN left behind would pass through any mask (0 * NaN)."""
        assert self.keys is not None and self.values is not None
        self.keys.zero_()
        self.values.zero_()
        self.seen = 0


class StepCache(Cache):
    """Keys and values of ``batch`` sequences of up to ``capacity`` positions."""

    def __init__(
        self, config: PretrainedConfig, batch: int, capacity: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.batch, self.capacity = batch, capacity
        shape = (config.num_hidden_layers, 2, *cache_shape(config, batch, capacity))
        # Tensors made under inference_mode could not be written outside of it.
        with torch.inference_mode(False):
            self._memory = torch.zeros(shape, dtype=dtype, device=device)
            super().__init__(layers=[StepLayer(*layer.unbind(0)) for layer in self._memory.unbind(0)])

    @property
    def nbytes(self) -> int:
        return self._memory.nbytes

    def memory(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of one layer, all of their positions."""
        keys, values = self._memory[layer].unbind(0)
        return keys, values

    @property
    def seen(self) -> int:
        """Positions that are filled."""
        return self.layers[0].seen  # type: ignore[union-attr]

    def advance(self, positions: int) -> None:
        """Count positions that a step has written."""
        for layer in self.layers:
            layer.seen += positions  # type: ignore[union-attr]

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
        for number, (keys, values) in enumerate(self._memory.unbind(0)):
            dynamic.update(keys[:, :, : self.seen].clone(), values[:, :, : self.seen].clone(), number)
        return dynamic


def cache_shape(config: PretrainedConfig, batch: int, capacity: int) -> tuple[int, int, int, int]:
    """[B, heads, capacity, head_dim] of one layer's keys."""
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return batch, heads, capacity, head_dim
