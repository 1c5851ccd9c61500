"""Decoder layers that pass through a few blocks of device memory, each just before it computes.

    file --reader's threads--> host block (pinned) --copy stream--> device block --views--> the layer's parameters

Layers that are kept in host memory are read from the files once, each into a block of its own, and only copied from then on.
Otherwise, on the CPU, the host block is the device block and nothing is copied. A block's two ordering edges are kept by
``experts.transfer``: the copy into it waits for the layer that read it last, and a layer waits for its copy.
Everything is allocated by `start`, nothing while generating.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn

from airllm.checkpoint import TensorReader
from airllm.dense_budget import following, plan_dense
from airllm.errors import DeviceError
from airllm.experts.host_memory import HostBlock
from airllm.experts.transfer import StreamTransfer, SyncTransfer, Transfer
from airllm.gradients import refuse_gradients
from airllm.layer_layout import LayerLayout, LayerViews, plan_layers
from airllm.layer_watch import LayerWatch, StreamCounts
from airllm.weight_map import WeightMap

log = logging.getLogger(__name__)

FILLS_AT_ONCE = 2
"""While one layer's last pieces arrive, reading threads already have work of the next: the thread that runs the model needs
Python's lock at that moment, and threads without work would wait for it."""
COPY_BYTES = 8 << 20
HOST_BLOCKS = 2  # one for each fill; the first to be free is copied from while it waits

Progress = Callable[[int], None]


class LayerStreamer:
    """Gives each decoder layer its weights when its forward begins, and takes them away when it ends.

    ``names`` are the tensors it takes care of; all others are the caller's. One forward at a time: the caller locks.

    Args:
        layers: (full name, module) of the decoder layers, in order.
        resident_bytes: as many first layers as fit in this number of bytes stay on the device; "all" keeps every one.
        prefetch: read the next layers while one computes. Without it one block does, and nothing overlaps.
        pin_memory: pin the host block; where that is refused the copies are slower, and ``stats`` says so.
        without: names of parameters that are others' to give, such as experts that live in slots.
    """

    in_host_memory = False
    """Set before `start`: keep the layers that stream in host memory, pinned if ``pin_memory``, and read no file from then on.
    `start` takes ``plan.streamed_bytes`` of it; the caller has seen that they are there."""
    source_reason = "as asked"

    def __init__(
        self,
        model: nn.Module,
        layers: Sequence[tuple[str, nn.Module]],
        weight_map: WeightMap,
        reader: TensorReader,
        device: torch.device,
        *,
        resident_bytes: int | str = 0,
        prefetch: bool = True,
        pin_memory: bool = True,
        without: Collection[str] = (),
    ) -> None:
        self._layouts = plan_layers(model, layers, weight_map, without)
        self.names = frozenset(place.spec.name for layout in self._layouts for place in layout.places)
        self._modules = [module for _, module in layers]  # only until start: a cycle would keep the memory
        self._reader = reader
        self.device = device
        self.on_gpu = device.type != "cpu"
        self._pin_memory = pin_memory
        self.plan = plan_dense([layout.nbytes for layout in self._layouts], resident_bytes, prefetch)
        self._resident, ring = self.plan.resident, self.plan.ring
        streamed = list(range(self._resident, len(layers)))
        self._prefetch = prefetch
        self._next = {n: following(streamed, n, ring - 1) for n in streamed}

        self._blocks: list[torch.Tensor] = []
        self._ring = ring
        self._holds: list[int | None] = [None] * ring  # the layer in each block, once its fill has ended
        self._fills: list[Future[None] | None] = [None] * ring
        self._tickets = [0] * ring  # of the last fill that each block was promised to
        self._filling = [threading.Lock() for _ in range(ring)]
        self._current: tuple[int, int] | None = None  # (layer, block) whose views are installed
        self._kept: list[torch.Tensor] = []
        self._sources: dict[int, HostBlock] = {}  # of layers kept in host memory
        self._hosts: list[HostBlock] = []
        # Host blocks that nothing is read into now, each with the device block that its last copy went to.
        self._free_hosts: queue.SimpleQueue[tuple[int, int | None]] = queue.SimpleQueue()
        self._views: dict[tuple[int, int], LayerViews] = {}  # (layer, host block)
        self._parameters: dict[tuple[Any, int], list[nn.Parameter]] = {}  # (layout key, block)
        self._transfer: Transfer = SyncTransfer()
        self._worker: ThreadPoolExecutor | None = None
        self._hooks: list[Any] = []
        self._watch: LayerWatch | None = None
        self.counts = StreamCounts()

    # --- setting up and taking down -----------------------------------------------------------------------------------

    def start(self, progress: Progress | None = None) -> None:
        """Allocate every block, read the layers that stay on the device or in host memory, and hook those that stream."""
        with torch.inference_mode(False):  # blocks made in inference mode could not be filled outside it
            self._allocate()
            for number in range(self._resident):
                self._load_to_stay(number, progress)
            if self.in_host_memory:
                self._keep_in_host_memory(progress)
        for number, module in enumerate(self._modules):
            if number >= self._resident:
                self._hooks.append(module.register_forward_pre_hook(partial(_enter, self, number), with_kwargs=True))
                self._hooks.append(module.register_forward_hook(partial(_leave, self), always_call=True))
        names = [layout.name for layout in self._layouts]
        self._watch = LayerWatch(self._modules, names, self.device)
        self._modules = []
        if self._ring == 0:
            self._free_staging()
        elif self._prefetch and not self._sources:
            self._worker = ThreadPoolExecutor(FILLS_AT_ONCE, thread_name_prefix="airllm-stream")

    def _allocate(self) -> None:
        plan = self.plan
        try:
            self._kept = [self._device_bytes(size) for size in plan.layers[: plan.resident]]
            self._blocks = [self._device_bytes(plan.block_bytes) for _ in range(plan.ring)]
        except torch.OutOfMemoryError as error:
            self.close()
            raise DeviceError(
                f"{self.device} cannot hold {plan.resident_bytes} B of resident layers and {plan.ring} blocks of "
                f"{plan.block_bytes} B: lower resident_gb, or pass prefetching=False for a single block"
            ) from error
        if self.on_gpu:
            # A layer read once is sent in pieces, so that experts that a layer waits for need not wait for layers ahead of it.
            piece_bytes = COPY_BYTES if self.in_host_memory else None
            self._transfer = StreamTransfer(self._ring + 1, self.device, piece_bytes=piece_bytes)
            self._hosts = [HostBlock(max(plan.layers, default=0)) for _ in range(HOST_BLOCKS if self._ring > 1 else 1)]
            for number in range(len(self._hosts)):
                self._free_hosts.put((number, None))
            self._pin(self._hosts)

    def _device_bytes(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, device=self.device)

    def _pin(self, blocks: Sequence[HostBlock]) -> None:
        refused = [block.pin_reason for block in blocks if self._pin_memory and not block.pin(self.device)]
        if refused:
            log.warning("host memory is not pinned (%s): copies to the device are slower", refused[0])

    def _keep_in_host_memory(self, progress: Progress | None) -> None:
        self._free_staging()
        for number in range(self._resident, len(self._layouts)):
            layout = self._layouts[number]
            self._sources[number] = HostBlock(layout.nbytes)
            self._read_pieces(layout, LayerViews(layout, self._sources[number].tensor))
            if progress is not None:
                progress(layout.nbytes)
        if self.on_gpu:
            self._pin(list(self._sources.values()))

    def _load_to_stay(self, number: int, progress: Progress | None) -> None:
        layout, block = self._layouts[number], self._kept[number]
        self._fill_block(number, block, self._ring)
        self._transfer.wait(self._ring)
        for place in layout.places:
            parameter = nn.Parameter(place.view(block), requires_grad=False)
            for owner, attribute in place.owners:
                owner._parameters[attribute] = parameter
        if progress is not None:
            progress(layout.nbytes)

    def close(self) -> None:
        """Unhook, wait for what is under way, and give every block back. Streamed parameters are on meta again."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        if self._worker is not None:
            self._worker.shutdown(wait=True, cancel_futures=True)
            self._worker = None
        self.leave()
        self._transfer.close()
        for layout in self._layouts[: self._resident]:
            _put_on_meta(layout)
        if self._watch is not None:
            self._watch.close()
        self._fills = [None] * self._ring
        self._holds = [None] * self._ring
        self._parameters, self._blocks, self._kept = {}, [], []
        self._free_staging()

    def _free_staging(self) -> None:
        self._transfer.synchronize()
        self._views = {}
        for host in (*self._hosts, *self._sources.values()):
            host.close()
        self._hosts, self._sources = [], {}

    # --- one layer ----------------------------------------------------------------------------------------------------

    def enter(self, number: int) -> None:
        """Install layer ``number``'s weights, reading them now if nobody did, and begin to read what follows it."""
        self.leave()  # an interrupt may have left the last layer installed
        block = self._obtain(number)
        self._transfer.wait(block)
        self._current = (number, block)
        self._install(number, block)
        if self._prefetch:
            self._read_ahead(number, block)

    def _install(self, number: int, block: int) -> None:
        for place, parameter in zip(self._layouts[number].places, self._parameters_in(number, block), strict=True):
            for owner, attribute in place.owners:
                owner._parameters[attribute] = parameter

    def leave(self) -> None:
        """Put the installed layer, if there is one, back on meta; its block may then be filled anew."""
        if self._current is None:
            return
        number, block = self._current
        _put_on_meta(self._layouts[number])
        self._transfer.done_reading(block)
        self._current = None

    def _parameters_in(self, number: int, block: int) -> list[nn.Parameter]:
        key = (self._layouts[number].key, block)
        made = self._parameters.get(key)
        if made is None:
            with torch.inference_mode(False):
                made = [
                    nn.Parameter(place.view(self._blocks[block]), requires_grad=False)
                    for place in self._layouts[number].places
                ]
            self._parameters[key] = made
        return made

    def _obtain(self, number: int) -> int:
        """The block that holds the layer, filled. A guess that failed is tried once more before its error counts."""
        started = time.perf_counter()
        if number in self._holds:
            block = self._holds.index(number)
            if self._filled(block):
                self.counts.wait_s += time.perf_counter() - started
                return block
        block = self._victim(keep=())
        self._begin_fill(number, block)
        fill = self._fills[block]
        assert fill is not None
        fill.result()  # a block whose fill failed keeps its name: `_filled` finds the failure and reads again
        self.counts.wait_s += time.perf_counter() - started
        return block

    def _filled(self, block: int) -> bool:
        fill = self._fills[block]
        assert fill is not None
        if fill.done():
            self.counts.ready += 1
        wait((fill,))
        if fill.exception() is not None:  # whatever it was, the second try raises it to the caller
            log.debug("reading ahead failed (%r): reading again", fill.exception())
            self._holds[block] = None
            return False
        return True

    def _read_ahead(self, number: int, current: int) -> None:
        following, started = self._next[number], time.perf_counter()
        for wanted in following:
            if wanted not in self._holds:
                self._begin_fill(wanted, self._victim(keep=(number, *following)))
        if self._worker is None:  # the thread that runs the model did it
            self.counts.wait_s += time.perf_counter() - started

    def _victim(self, keep: Sequence[int]) -> int:
        """A block that neither computes nor holds a layer of ``keep``; an empty one if there is one."""
        busy = self._current[1] if self._current is not None else None
        free = [b for b in range(self._ring) if b != busy and (self._holds[b] is None or self._holds[b] not in keep)]
        return min(free, key=lambda b: self._holds[b] is not None)

    def _begin_fill(self, number: int, block: int) -> None:
        """Queue the fill; any fill of the same block that has not begun is void from now on."""
        self._tickets[block] += 1
        self._holds[block] = None  # first: an interrupt between these lines must not leave a block under a wrong name
        old = self._fills[block]
        if old is not None:
            old.cancel()
        if self._worker is not None:
            self._fills[block] = self._worker.submit(self._fill, number, block, self._tickets[block])
        else:
            self._fills[block] = _run_now(self._fill, number, block, self._tickets[block])
        self._holds[block] = number

    def _fill(self, number: int, block: int, ticket: int) -> None:
        with self._filling[block]:  # a block is never filled twice at once
            if ticket != self._tickets[block]:
                return  # an interrupt made us forget this fill, or a later one took its place
            self._fill_block(number, self._blocks[block], block)
        with self.counts.lock:
            self.counts.layer_loads += 1
            self.counts.filled_bytes += self._layouts[number].nbytes

    def _fill_block(self, number: int, block: torch.Tensor, place: int) -> None:
        """Bring the layer's bytes to its block, from host memory, or by way of it, where there are host blocks."""
        started = time.perf_counter()
        layout = self._layouts[number]
        if number in self._sources:
            self._transfer.copy(self._sources[number].tensor, block[: layout.nbytes], place)
        elif not self._hosts:
            self._read_pieces(layout, self._views_of(number, place, block))
        else:
            self._read_and_send(layout, number, block, place)
        with self.counts.lock:
            self.counts.read_s += time.perf_counter() - started
            self.counts.h2d_bytes += layout.nbytes if self.on_gpu else 0

    def _read_and_send(self, layout: LayerLayout, number: int, block: torch.Tensor, place: int) -> None:
        host, sent_to = self._free_hosts.get()
        try:
            if sent_to is not None:
                self._transfer.finish(sent_to)
            source = self._hosts[host].tensor
            self._read_pieces(layout, self._views_of(number, host, source))
            # One copy a layer: it runs beside the reading of the next layer, and many small ones would cost the reading
            # threads more than they gain (each needs the driver's lock and Python's).
            self._transfer.copy(source[: layout.nbytes], block[: layout.nbytes], place)
            sent_to = place
        finally:
            self._free_hosts.put((host, sent_to))

    def _read_pieces(self, layout: LayerLayout, views: LayerViews) -> None:
        self._reader.run([partial(piece.read, self._reader, views) for piece in layout.pieces])

    def _views_of(self, number: int, memory_number: int, memory: torch.Tensor) -> LayerViews:
        key = number, memory_number
        if number < self._resident:  # read once: not worth keeping
            return LayerViews(self._layouts[number], memory)
        if key not in self._views:
            self._views[key] = LayerViews(self._layouts[number], memory)
        return self._views[key]

    # --- what others ask ----------------------------------------------------------------------------------------------

    @property
    def current_block(self) -> int | None:
        """The block of the ring that the layer that runs lies in."""
        return None if self._current is None else self._current[1]

    def blocks_of(self, number: int) -> range:
        """The blocks that layer ``number`` may come to lie in; none when it stays."""
        return range(self._ring if number >= self._resident else 0)

    @contextmanager
    def lying_in(self, number: int, block: int) -> Iterator[None]:
        """Inside, layer ``number`` has its parameters in ``block``, all zeros. Only before the first forward."""
        self._blocks[block].zero_()
        self._install(number, block)
        try:
            yield
        finally:
            _put_on_meta(self._layouts[number])

    def ring_addresses(self) -> set[int]:
        """Addresses of the blocks that layers pass through: what lies there does not stay."""
        return {block.untyped_storage().data_ptr() for block in self._blocks}

    @property
    def watch(self) -> LayerWatch:
        """The check for infinities and NaN between layers."""
        assert self._watch is not None, "start() first"
        return self._watch

    def stats(self) -> dict[str, Any]:
        """Measured counters and sizes, in bytes and seconds."""
        plan, hosts = self.plan, [*self._hosts, *self._sources.values()]
        return {
            "layer_loads": self.counts.layer_loads,
            "filled_bytes": self.counts.filled_bytes,
            "layers_ready_in_time": self.counts.ready,
            "h2d_bytes": self.counts.h2d_bytes,
            "read_seconds": self.counts.read_s,
            "wait_seconds": self.counts.wait_s,
            "streamed_layers": plan.streamed,
            "streamed_bytes": plan.streamed_bytes,
            "streamed_from": "host" if self.in_host_memory else "file",
            "streamed_from_reason": self.source_reason,
            "resident_layers": plan.resident,
            "resident_bytes": sum(block.numel() for block in self._kept),
            "ring_blocks": len(self._blocks),
            "ring_bytes": sum(block.numel() for block in self._blocks),
            "staging_bytes": sum(host.nbytes for host in self._hosts),
            "host_memory_bytes": sum(host.nbytes for host in self._sources.values()),
            "pinned": all(host.pinned for host in hosts) if hosts else None,
            "pin_reason": min(hosts, key=lambda host: host.pinned).pin_reason if hosts else "no host block",
        }


# Functions, not methods: a bound method in a hook of the module that the object holds would be a cycle.


def _enter(streamer: LayerStreamer, number: int, module: nn.Module, args: Any, kwargs: Any) -> None:
    if streamer.plan.moved_bytes:
        refuse_gradients(*args, *kwargs.values())
    streamer.enter(number)


def _leave(streamer: LayerStreamer, module: nn.Module, args: Any, output: Any) -> None:
    streamer.leave()


def _put_on_meta(layout: LayerLayout) -> None:
    for place in layout.places:
        for owner, attribute in place.owners:
            owner._parameters[attribute] = place.on_meta


def _run_now(function: Callable[..., None], *args: Any) -> Future[None]:
    future: Future[None] = Future()
    try:
        with torch.inference_mode(False):  # views made in the caller's inference mode could not be filled outside it
            function(*args)
    except Exception as error:  # noqa: BLE001 - raised by result(), as from the worker
        future.set_exception(error)
    else:
        future.set_result(None)
    return future
