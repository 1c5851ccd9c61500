"""``SlotExpertRuntime``: lease, plan, copy, compute, release: one layer of one forward at a time."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from airllm.experts.bank import HostBank
from airllm.experts.compute import ExpertMath, ExpertSum, Routing
from airllm.experts.decode_graphs import ExpertGraphs
from airllm.experts.device_engine import DeviceEngine
from airllm.experts.grouped import GroupedSum
from airllm.experts.passing import Passing
from airllm.experts.plan import PlanCounts, Step, plan_layer, waves
from airllm.experts.policy import AUTO_POLICY, make_policy
from airllm.experts.slots import SlotPool
from airllm.experts.stats import Counters
from airllm.experts.transfer import Transfer
from airllm.gradients import refuse_gradients

log = logging.getLogger(__name__)

SHORT_SEQUENCE = 8
"""Forwards with at most this many new tokens a sequence (decoding, or checking an assistant's guesses) cache every expert
they use; longer ones are prompts and leave behind only what their last tokens used."""


AHEAD_ROUTED = 8
"""A prompt that routes at least so many times as many ids as a layer has experts, and to 7 of 8 experts of this layer, is
taken to need nearly all of the next one's."""


@dataclass(slots=True)
class LayerCall:
    """The arguments of one layer's forward. ``loaded``: the graphs hold the token, and their total is what is wanted."""

    layer: int
    hidden: torch.Tensor
    index: torch.Tensor
    weights: torch.Tensor
    math: ExpertMath
    loaded: ExpertGraphs | None = None


@dataclass(frozen=True, slots=True)
class ForwardShape:
    """``batch`` sequences of ``sequence`` new tokens; ``last_rows``: rows of a prompt's last tokens, None when decoding.

    One object, replaced as a whole: callers in several threads may announce their forwards while another one runs.
    """

    batch: int = 1
    sequence: int = 1
    last_rows: torch.Tensor | None = None


class SlotExpertRuntime:
    """Serves the experts of all layers of one model from slots.

    Args:
        bank: every expert's bytes on the host.
        pool: the device places.
        transfer: how bytes get from one to the other.
        top_k: experts a token is routed to.
        layers: number of layers with experts.
        policy: "aged" or "lru", or "auto", which is "aged"; see :mod:`airllm.experts.policy`.

    One forward at a time; other threads wait. After any exception no lease survives, a place either holds what the table
    says or is empty, and the exception goes on to the caller.
    """

    def __init__(
        self, bank: HostBank, pool: SlotPool, transfer: Transfer, *, top_k: int, layers: int, policy: str = "auto"
    ) -> None:
        self.bank, self.pool, self.transfer = bank, pool, transfer
        self.top_k, self.layers = top_k, layers
        self.layout, self.num_experts = bank.layout, bank.layout.num_experts
        self._first_keys = bank.layout.first_keys
        self._views = [pool.views_as(layout) for layout in bank.layout.layers]
        even = len({layout.num_experts for layout in bank.layout.layers}) == 1
        self.policy = make_policy(policy if even else "lru", pool.plan.slots, layers, self.num_experts)
        self._policy_reason = AUTO_POLICY if policy == "auto" else "as asked"
        if not even:
            self._policy_reason = "the layers have different numbers of experts"
        self.counters = Counters()
        self.graphs: ExpertGraphs | None = None
        self._recorder: Callable[..., torch.Tensor] | None = None
        self.on_routing: Callable[[int, torch.Tensor], None] | None = None  # is shown each layer's experts, [T, K]
        self.engine: DeviceEngine | None = None
        self._sources = bank.blocks()
        # Experts of smaller layers fill only the front of a place.
        self._fronts = None if bank.layout.uniform else [block.nbytes for block in self._sources]
        self._shape = ForwardShape()
        # Experts that are in the table although their copy is not under way yet: not to be believed when a forward fails.
        self._suspects: set[int] = set()
        self._ahead: dict[int, int] = {}  # fetched before the routing is known: an expert, and where it lies
        self._unfinished = False
        self._lock = threading.RLock()

    def begin_forward(self, batch: int, sequence: int, device: torch.device) -> None:
        """Tell the runtime the shape of the forward that comes: ``batch`` sequences of ``sequence`` new tokens."""
        self.transfer.take_turn()
        self._ahead = {}
        last_rows = torch.arange(1, batch + 1, device=device) * sequence - 1 if sequence > SHORT_SEQUENCE else None
        self._shape = ForwardShape(batch, sequence, last_rows)

    def run(
        self, layer: int, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor, math: ExpertMath
    ) -> torch.Tensor:
        """The experts' part of one layer: ``hidden`` [T, H], ``index`` and ``weights`` [T, K]; gives [T, H].

        A device that runs out of memory gets one more try with its caches emptied (counted in ``oom_retries``).
        Raises UnsupportedModelError for gradients: the slots may hold other experts by then.
        """
        refuse_gradients(hidden, weights)
        with self._lock:
            if self._recorder is not None:
                return self._recorder(layer, hidden, index, weights)
            if self.engine is not None and self.engine.stepping:
                return self.engine.experts(layer, hidden, index, weights)
            return self._run(LayerCall(layer, hidden, index, weights, math))

    def run_loaded(self, layer: int, index: torch.Tensor) -> None:
        """The experts' part of one layer for the token that the graphs hold; their total becomes its result."""
        graphs = self.graphs
        assert graphs is not None
        with self._lock:
            self._run(LayerCall(layer, graphs.row, index, graphs.weights, graphs.math, loaded=graphs))

    @contextmanager
    def recording(self, recorder: Callable[..., torch.Tensor]) -> Iterator[None]:
        """Inside, ``recorder(layer, hidden, index, weights)`` answers in place of the experts."""
        with self._lock:
            self._recorder = recorder
            try:
                yield
            finally:
                self._recorder = None

    def _run(self, call: LayerCall) -> torch.Tensor:
        if self.engine is not None and self.engine.ahead:
            self.engine.leave()
            self._ahead = {}  # its steps may have used those places
        if self.on_routing is not None:
            self.on_routing(call.layer, call.index)
        try:
            return self._run_once(call)
        except torch.OutOfMemoryError:
            self.counters.oom_retries += 1
            torch.cuda.empty_cache()
        if call.loaded is not None:
            call.loaded.total.zero_()
        return self._run_once(call)

    def _run_once(self, call: LayerCall) -> torch.Tensor:
        if call.index.shape[-1] > self.top_k:
            self.top_k = call.index.shape[-1]
        if self._unfinished:  # an interrupt cut the recovery from another one short
            self._recover()
        self._unfinished = True
        try:
            total = self._one_token(call) if call.hidden.shape[0] == 1 else self._many_tokens(call)
            self.policy.release_all()
        except BaseException:
            self.counters.recoveries += 1
            self._recover()
            raise
        self._unfinished = False
        return total

    def _recover(self) -> None:
        self.policy.recover(self._suspects)
        self._suspects.clear()
        self._ahead = {}
        self._unfinished = False

    def _plan(self, call: LayerCall, experts: list[int], admit: set[int]) -> list[Step]:
        first_key = self._first_keys[call.layer]
        self._suspects.update(key for e in experts if (key := first_key + e) not in self.policy)
        counts, evictions = PlanCounts(), self.policy.evictions
        steps = plan_layer(
            self.policy,
            first_key=first_key,
            experts=experts,
            admit=admit,
            scratch=self.pool.plan.scratch,
            keep_free=self.layers * self.top_k * self._shape.batch,
            counts=counts,
        )
        counters = self.counters
        counters.hits += counts.hits
        counters.misses += counts.misses
        counters.bypasses += counts.bypasses
        counters.evictions += self.policy.evictions - evictions
        counters.prefill_skips += sum(1 for step in steps if not step.cached and step.expert not in admit)
        return steps

    def _copy(self, step: Step, place: int, at: int | None = None) -> None:
        """Start the copy of a step's expert into ``place``: from the bank, or from the place where it lies already."""
        if at != place:
            self._bring(step.key, place, at)
        self._suspects.discard(step.key)

    def _bring(self, key: int, place: int, at: int | None = None) -> None:
        source, target = self._sources[key], self.pool.blocks[place]
        if at is not None:
            source = self.pool.blocks[at][: source.nbytes]
        self.transfer.copy(source, target if self._fronts is None else target[: self._fronts[key]], place)
        if at is None:
            self.counters.h2d_copies += 1
            self.counters.h2d_bytes += source.nbytes

    def _places(self, prompt: bool) -> Iterator[int]:
        """Where experts may pass through: scratch, and in a prompt the slots that hold nothing and that the next layer's
        experts will not be given."""
        slots, scratch, free = self.policy.slots, self.pool.plan.scratch, self.policy.free
        yield from range(slots, slots + scratch)
        if prompt:
            last = self.top_k * self._shape.batch
            wanted = last + max(0, free - self.layers * last) if scratch else self.num_experts
            yield from self.policy.idle_slots(wanted)

    def _fetch_ahead(self, call: LayerCall, used: int, passing: Passing) -> None:
        """Start on the next layer's experts, as far as places are to spare, where a prompt will need nearly all of them."""
        following = call.layer + 1
        if not self.transfer.overlaps or following == self.layers or self._shape.last_rows is None:
            return
        first, end = self._first_keys[following : following + 2]
        if call.index.numel() < AHEAD_ROUTED * (end - first) or 8 * used < 7 * self.layout.layers[call.layer].num_experts:
            return
        for key in range(first, end):
            if key not in self._ahead and key not in self.policy:
                place = passing.spare()
                if place is None:
                    break
                self._bring(key, place)
                self._ahead[key] = place

    def _one_token(self, call: LayerCall) -> torch.Tensor:
        graphs = call.loaded
        if graphs is None and self.graphs is not None and self.graphs.fit(call.hidden, call.weights):
            graphs = self.graphs
            graphs.load(call.hidden, call.weights)  # enqueued before the read-back, so that it costs no waiting
        total = call.math.start(call.hidden, call.weights) if graphs is None else graphs.total
        chosen: list[int] = call.index.tolist()[0]  # the one read-back of the layer
        layout = self.layout.layers[call.layer]
        routed = sorted(e for e in chosen if e < layout.num_experts)
        experts = sorted(set(routed))
        if len(experts) < len(routed) or (layout.identities and len(routed) < len(chosen)):
            result = self._many_tokens(call)  # an expert chosen twice gets both rows in one product, as in transformers
            return result if call.loaded is None else call.loaded.total.copy_(result)
        for wave in waves(self._plan(call, experts, set(experts)), self.pool.plan.scratch):
            for step in wave:
                if step.copy:
                    self._copy(step, step.place)
            for step in wave:
                self.transfer.wait(step.place)
                k = chosen.index(step.expert)
                if graphs is not None:
                    graphs.replay(step.place, k)
                else:
                    views = self._views[call.layer][step.place]
                    total.add_(call.math.weighted(call.hidden, views, call.weights[:, k, None]).to(total.dtype))
                self.transfer.done_reading(step.place)
        self._ahead = {}
        if graphs is None:
            return total.to(call.hidden.dtype)
        return total if call.loaded is not None else total.clone()

    def _many_tokens(self, call: LayerCall) -> torch.Tensor:
        tokens = call.hidden.shape[0]
        if tokens == 0:
            return torch.zeros_like(call.hidden)
        shape = self._shape
        last_rows = shape.last_rows if tokens == shape.batch * shape.sequence else None
        layout = self.layout.layers[call.layer]
        routing = Routing(call.index, layout.num_experts + layout.identities, last_rows)
        experts = [expert for expert in routing.experts if expert < layout.num_experts]
        steps = self._plan(call, experts, routing.last_experts)
        # Copies first: the link must not wait for the host to enqueue anything else.
        passing = Passing(steps, self._places(prompt=last_rows is not None), self._ahead, self._copy)
        self._ahead = {}
        self._fetch_ahead(call, len(experts), passing)
        total = self._sum(call, routing, prompt=last_rows is not None)
        while steps:
            chunk = passing.next_of(steps, total.at_once)
            self._compute(chunk, passing, total)
            steps = steps[len(chunk) :]
        self._fetch_ahead(call, len(experts), passing)
        if isinstance(total, ExpertSum):
            for expert in routing.experts[len(experts) :]:
                total.add_identity(expert)
        return total.result()

    def _sum(self, call: LayerCall, routing: Routing, prompt: bool) -> ExpertSum | GroupedSum:
        grouped = self.engine.prompt_sum(call.layer, routing, call.hidden, call.weights) if self.engine and prompt else None
        identities = self.layout.layers[call.layer].identities
        return grouped or routing.sum_of(call.hidden, call.weights, call.math, self._views[call.layer], identities)

    def _compute(self, chunk: Sequence[Step], passing: Passing, total: ExpertSum | GroupedSum) -> None:
        places = [passing.place_of(step) for step in chunk]
        for place in places:
            self.transfer.wait(place)
        total.add([step.expert for step in chunk], places)
        for step, place in zip(chunk, places, strict=True):
            self.transfer.done_reading(place)
            passing.done(step)

    def clear(self) -> None:
        """Empty every slot; counters stay."""
        with self._lock:
            if self.engine is not None:
                self.engine.leave()
            self.transfer.synchronize()
            self.policy.clear()
            self._suspects.clear()
            self._ahead = {}

    def reset_counters(self) -> None:
        """Counters to zero; what is resident stays."""
        with self._lock:
            if self.engine is not None:
                self.engine.reset_counts()
            self.counters.reset()

    def stats(self) -> dict[str, Any]:
        """Sizes and counters under the names of the public statistics; see :class:`Counters` for what each counts."""
        plan, counters = self.pool.plan, self.counters
        return {
            "capacity_bytes": plan.slot_bytes,
            "allocated_cache_bytes": plan.slot_bytes,
            "resident_bytes": len(self.policy) * plan.expert_bytes,
            "resident_experts": len(self.policy),
            "slot_count": plan.slots,
            "scratch_slots": plan.scratch,
            "scratch_bytes": plan.scratch_bytes,
            "host_bank_bytes": self.bank.nbytes,
            "host_bank_experts": self.bank.experts,
            "host_bank_load_seconds": self.bank.load_seconds,
            "host_bank_tensor_reads": self.bank.reads_at_load,
            "host_bank_pinned": self.bank.pinned,
            "host_bank_pin_reason": self.bank.pin_reason,
            "pinned_staging_bytes": self.transfer.staging_bytes,
            "generation_disk_expert_reads": self.bank.reads_since_load,
            "budget_reason": plan.reason,
            "cache_policy": self.policy.name,
            "cache_policy_reason": self._policy_reason,
            **vars(counters),
            **self._on_device(),
        }

    def _on_device(self) -> dict[str, int]:
        """Statistics that the device engine has not handed over yet, added to what is known here."""
        if self.engine is None:
            return {}
        pending = self.engine.pending()
        return {name: value + getattr(self.counters, name, 0) for name, value in pending.items()}

    def close(self) -> None:
        """Give device and host memory back. Idempotent."""
        with self._lock:
            self.transfer.close()
            if self.engine is not None:
                self.engine.close()
            self.graphs = None
            self._sources, self._views = (), []
            self.policy.clear()
            self.pool.close()
            self.bank.close()
