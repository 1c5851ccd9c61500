"""The dense weights of a model: read to the device where they stay, handed to a streamer where they do not.

What experts slots hold is not read here. Without slots experts are dense weights of their layer.
"""

from __future__ import annotations

import logging
from collections.abc import Collection

import torch
from torch import nn
from transformers import PreTrainedModel

from airllm.checkpoint import TensorReader
from airllm.dense_budget import why_too_large
from airllm.errors import DeviceError, HostMemoryError
from airllm.experts.bank import HEADROOM_BYTES
from airllm.experts.host_memory import available_bytes
from airllm.layer_watch import LayerWatch, StreamCounts
from airllm.options import Options
from airllm.profiler import progress_bar
from airllm.skeleton import assert_no_meta, decoder_layers, load_resident, move_buffers, tie_weights
from airllm.streaming import LayerStreamer
from airllm.weight_map import WeightMap

log = logging.getLogger(__name__)

HOST_RESERVE_BYTES = 2 << 30
"""Left to other programs when layers are kept in host memory unasked."""


class ResidentLayers:
    """What the forward guard asks of layers that stay where they are."""

    def __init__(self, model: PreTrainedModel, device: torch.device) -> None:
        _, layers = decoder_layers(model)
        self.device, self.on_gpu = device, device.type != "cpu"
        self.counts = StreamCounts()
        self.watch = LayerWatch([module for _, module in layers], [name for name, _ in layers], device)

    def leave(self) -> None:
        """Nothing was installed for one forward only."""


class DenseWeights:
    """Where the dense weights of ``model`` (on meta) go.

    Args:
        in_slots: names of the parameters that slots hold. With slots, layers that all stay need no ``streamer``: each tensor
            is then read into memory of its own.
        bank_bytes: host memory that the experts will take.

    Raises:
        HostMemoryError: ``stream_from="host"``, and the layers that stream do not fit in host memory.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        weight_map: WeightMap,
        reader: TensorReader,
        options: Options,
        in_slots: Collection[str] = (),
        bank_bytes: int = 0,
    ) -> None:
        self.model, self.weight_map, self.reader, self.options = model, weight_map, reader, options
        self._in_slots = in_slots
        self._prefix, layers = decoder_layers(model)
        streamer = LayerStreamer(
            model,
            layers,
            weight_map,
            reader,
            options.device,
            resident_bytes=options.resident_bytes,
            prefetch=options.prefetching,
            pin_memory=options.pin_memory,
            without=in_slots,
        )
        self.plan, self._of_layers = streamer.plan, streamer.names
        asked = options.resident_bytes
        if isinstance(asked, int) and asked > 0 and self.plan.layers and self.plan.resident == 0:
            log.warning("resident_gb: no layer stays in %d B, the first one has %d B", asked, self.plan.layers[0])
        self.streamer: LayerStreamer | None = streamer if self.plan.streamed or not in_slots else None
        streamer.in_host_memory, streamer.source_reason = self._keep_in_host_memory(bank_bytes)

    def _keep_in_host_memory(self, bank_bytes: int) -> tuple[bool, str]:
        """Whether the layers that stream are kept there, and why."""
        asked, moved = self.options.stream_from, self.plan.moved_bytes
        if asked == "file" or not moved:
            return False, "as asked" if moved else "each layer that streams has a block of its own and is read once"
        if asked == "auto" and (not self._in_slots or self.options.device.type == "cpu"):
            return False, "auto: host memory is taken unasked only beside slots on a GPU"
        free, need = available_bytes(), bank_bytes + self.plan.streamed_bytes
        if self.options.device.type == "cpu":  # there all the rest is host memory too
            need += self.rest_bytes + self.plan.device_bytes
        reserve = HOST_RESERVE_BYTES if asked == "auto" else HEADROOM_BYTES
        numbers = f"{need} B of experts and weights, {reserve} B of reserve, {free} B of host memory available"
        if asked == "auto":
            return free is not None and need + reserve <= free, f"auto: {numbers}"
        if free is not None and need + reserve > free:
            raise HostMemoryError(f"stream_from='host' does not fit: {numbers}: use stream_from='file'")
        return True, "as asked"

    @property
    def rest_bytes(self) -> int:
        """Bytes outside the decoder layers, or that cannot be streamed with them."""
        return self._bytes_of(self._names(self._of_layers))

    def require_room(self, beside_bytes: int = 0) -> None:
        """Raises DeviceError, with the ``resident_gb`` that would do, when a GPU has not room for them and ``beside_bytes``."""
        free = free_bytes(self.options.device)
        why = None if free is None else why_too_large(
            self.plan,
            rest_bytes=self.rest_bytes,
            beside_bytes=beside_bytes,
            free_bytes=free,
            prefetch=self.options.prefetching,
        )
        if why is not None:
            raise DeviceError(f"{self.options.device}: {why}")

    def load(self, what: str) -> None:
        """Read all that stays, and start the streamer. ``what`` is for the progress bar.

        Raises:
            DeviceError: they do not fit on the device after all.
        """
        device, names = self.options.device, self._names(self.streamer.names if self.streamer else ())
        total = self._bytes_of(names)
        try:
            with progress_bar(what, total) as progress:
                load_resident(self.model, self.weight_map, names, self.reader, device, progress)
        except torch.OutOfMemoryError as error:
            raise DeviceError(f"{device} cannot hold {total} B of dense weights ({error}): lower resident_gb") from error
        tie_weights(self.model)
        move_buffers(self.model, device)
        if self.streamer is not None:
            kept = self.plan.streamed_bytes if self.streamer.in_host_memory else 0
            with progress_bar("reading the layers that stay", self.plan.resident_bytes + kept) as progress:
                self.streamer.start(progress)

    def assert_loaded(self) -> None:
        """Raises WeightMapError when a tensor is still on meta that should be on the device."""
        assert_no_meta(self.model, except_under=() if self.streamer is None else (self._prefix,))

    def _names(self, streamed: Collection[str]) -> list[str]:
        others = {*streamed, *self._in_slots}
        return [name for name in (*self.weight_map.targets(), *self.weight_map.missing) if name not in others]

    def _bytes_of(self, names: Collection[str]) -> int:
        targets = self.weight_map.targets()
        return sum(targets[name].nbytes for name in names if name in targets)


def free_bytes(device: torch.device) -> int | None:
    """Bytes that can still be allocated on a GPU, with what torch keeps without using it; None for the CPU."""
    if device.type == "cpu":
        return None
    cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return int(torch.cuda.mem_get_info(device)[0] + cached)


def dense_resident_bytes(model: nn.Module, streamer: LayerStreamer | None) -> int:
    """Bytes of the memory that parameters have on the device to stay, shared memory counted once."""
    memory = (p.untyped_storage() for p in model.parameters() if not p.is_meta)
    there = {storage.data_ptr(): storage.nbytes() for storage in memory}
    passing = streamer.ring_addresses() if streamer is not None else set()
    return sum(nbytes for address, nbytes in there.items() if address not in passing)
