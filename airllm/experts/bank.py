"""The host bank: the bytes of every expert, one contiguous block each, read-only once filled."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from tqdm.auto import tqdm

from airllm.errors import HostMemoryError
from airllm.experts import host_memory
from airllm.experts.layout import ModelLayout

if TYPE_CHECKING:
    from airllm.checkpoint import TensorReader
    from airllm.weight_map import WeightMap

log = logging.getLogger(__name__)

HEADROOM_BYTES = 256 * 2**20
"""Left to the rest of the process when the bank's size is checked against the memory that is available."""


class HostBank:
    """All experts in one host block, layer after layer; ``block(key)`` is one of them as uint8 [expert_bytes of its layer].

    Args:
        layout: what the experts are, and which keys they have.
        prefixes: names of the experts modules, one a layer ("model.layers.0.mlp.experts").
        weight_map, reader: where the bytes come from.
        pin: register the block for fast copies. Refusal leaves it pageable: one warning, and ``pin_reason``.

    Raises:
        HostMemoryError: less memory is available than the bank needs (checked before anything is taken).
    """

    def __init__(
        self,
        layout: ModelLayout,
        prefixes: Sequence[str],
        weight_map: WeightMap,
        reader: TensorReader,
        *,
        pin: bool,
        device: torch.device | None = None,
        progress: bool = True,
    ) -> None:
        self.layout, self.prefixes = layout, tuple(prefixes)
        self.experts, self.nbytes = layout.total_experts, layout.total_bytes
        self._weight_map, self._reader = weight_map, reader
        self.tensor_reads = 0
        _check_available(self.nbytes, self.experts, layout.expert_bytes)
        started = time.perf_counter()
        self._memory = host_memory.HostBlock(self.nbytes)
        try:
            self._blocks = _cut(self._memory.tensor, layout)
            self._fill(progress)
            weight_map.forget_conversions()
            if pin and not self._memory.pin(device):
                log.warning(
                    "the expert bank stays pageable (%s): copies to the device will run several times slower",
                    self._memory.pin_reason,
                )
        except BaseException:
            self.close()
            raise
        self.load_seconds = time.perf_counter() - started
        self.reads_at_load = self.tensor_reads

    @property
    def memory(self) -> torch.Tensor:
        """All experts by key: uint8 [experts, expert_bytes]. Only where all layers have one layout."""
        return self._memory.tensor.view(self.experts, self.layout.expert_bytes)

    @property
    def pinned(self) -> bool:
        return self._memory.pinned

    @property
    def pin_reason(self) -> str:
        return self._memory.pin_reason

    @property
    def reads_since_load(self) -> int:
        """Expert tensors read from disk after loading; the same counter that counts the loading itself."""
        return self.tensor_reads - self.reads_at_load

    def block(self, key: int) -> torch.Tensor:
        """uint8 [expert_bytes of its layer], a view of the bank."""
        return self._blocks[key]

    def blocks(self) -> tuple[torch.Tensor, ...]:
        """All experts' blocks by key; made once so that the decode loop slices nothing."""
        return self._blocks

    def read_expert(self, key: int, out: Sequence[torch.Tensor]) -> None:
        """Read one expert's projections from disk into ``out`` (views in layout order). The only way experts leave a file."""
        layer, expert = self.layout.locate(key)
        for projection, view in zip(self.layout.layers[layer].projections, out, strict=True):
            target = f"{self.prefixes[layer]}.{projection.name}"
            self._weight_map.read_expert(target, expert, self._reader, view)
            self.tensor_reads += 1

    def _fill(self, progress: bool) -> None:
        with tqdm(
            total=self.nbytes, unit="B", unit_scale=True, desc="expert bank", disable=None if progress else True, leave=False
        ) as bar:
            for layer, layout in enumerate(self.layout.layers):
                # A layer at a time: conversions that need a whole layer hold one layer, not the model.
                first = self.layout.first_keys[layer]
                keys = range(first, first + layout.num_experts)
                self._reader.run([lambda key=key: self._fill_one(key) for key in keys])  # type: ignore[misc]
                bar.update(layout.num_experts * layout.expert_bytes)

    def _fill_one(self, key: int) -> None:
        layer, _ = self.layout.locate(key)
        self.read_expert(key, self.layout.layers[layer].views(self._blocks[key]))

    def close(self) -> None:
        """Give the memory back. Idempotent."""
        self._blocks = ()
        self._memory.close()


def _cut(memory: torch.Tensor, layout: ModelLayout) -> tuple[torch.Tensor, ...]:
    sizes = [layer.expert_bytes for layer in layout.layers for _ in range(layer.num_experts)]
    return torch.split(memory, sizes)


def _check_available(need: int, experts: int, expert_bytes: int) -> None:
    free = host_memory.available_bytes()
    if free is not None and need + HEADROOM_BYTES > free:
        raise HostMemoryError(
            f"the expert bank needs {need} B ({experts} experts of {expert_bytes} B) plus {HEADROOM_BYTES} B of headroom, "
            f"but {free} B of host memory are available: close other programs, add memory, or stream the model "
            f'(expert_cache_backend="none")'
        )
