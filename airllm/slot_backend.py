"""The slot backend of a model class: every expert in a host bank, those in use in slots, dense weights on the device or, as
far as they are too large for it, streamed.

What every family shares. A family's own class overrides `_top_k` or `_record_graphs` where it deviates.
"""

from __future__ import annotations

import contextlib
import logging
import os
from typing import Any

from transformers import PretrainedConfig, PreTrainedModel

from airllm import guard
from airllm.checkpoint import TensorReader
from airllm.decode_step import DecodeStepper
from airllm.dense_weights import DenseWeights, ResidentLayers, dense_resident_bytes
from airllm.errors import UnsupportedModelError
from airllm.experts.assembly import ExpertsFound, add_device_engine, install
from airllm.experts.runtime import SlotExpertRuntime
from airllm.experts.stats import disabled_stats
from airllm.experts.trace import record_routing
from airllm.fused_step import FusedStep, why_not_fused
from airllm.layer_watch import LayerWatch
from airllm.options import Options
from airllm.profiler import LayeredProfiler
from airllm.step_plan import plan_steps
from airllm.streaming import LayerStreamer
from airllm.weight_map import WeightMap

log = logging.getLogger(__name__)


class SlotBackend:
    """Loads a model with its experts in slots, and hands out the statistics of the expert cache."""

    options: Options
    config: PretrainedConfig
    model: PreTrainedModel
    profiler: LayeredProfiler | None
    _resources: contextlib.ExitStack
    _reader: TensorReader
    _guard: guard.ForwardGuard
    _runtime: SlotExpertRuntime | None = None
    _last_stats: dict[str, Any] | None = None  # of a closed model
    _stepper: DecodeStepper | None = None
    _streamer: LayerStreamer | None = None
    _graph_reason = "not recorded for this family"
    _engine_reason = "not asked for (expert_cache_engine='device')"
    _top_k: int | None = None
    """Experts a token is routed to, where a family knows better than its configuration."""

    def _build(
        self, experts_implementation: str | None, trust_remote_code: bool
    ) -> tuple[PreTrainedModel, WeightMap, TensorReader]:
        raise NotImplementedError

    def _finish(self, model: PreTrainedModel, forward_guard: guard.ForwardGuard) -> None:
        raise NotImplementedError

    @classmethod
    def experts_of(cls, model: PreTrainedModel) -> ExpertsFound:
        """What slots would hold of ``model`` (on meta). Raises UnsupportedModelError where they cannot serve it."""
        return ExpertsFound.of(model, cls._top_k)

    def _load_slots(self) -> None:
        options, device = self.options, self.options.device
        model, weight_map, reader = self._build("eager", options.trust_remote_code)
        found = self.experts_of(model).for_engine(options.expert_cache_engine)
        plan = None
        if isinstance(options.expert_cache_bytes, int):
            plan = found.plan(options.expert_cache_bytes)  # before anything is taken: a budget too small costs nothing
        bank_bytes = found.layout.total_bytes
        dense = DenseWeights(model, weight_map, reader, options, in_slots=found.parameter_names(), bank_bytes=bank_bytes)
        streamer = self._streamer = dense.streamer
        if streamer is not None:
            self._resources.callback(streamer.close)
        dense.require_room(found.least_bytes() if plan else found.least_auto_bytes(self.config, options.max_seq_len))
        dense.load("reading dense weights")
        if plan is None:
            plan = found.plan_auto(self.config, device, options.max_seq_len, dense.plan.ring_bytes)
            log.info("expert_cache_gb: %d slots (%s)", plan.slots, plan.reason)
        runtime, remove_hook = install(
            model,
            found,
            plan,
            weight_map=weight_map,
            reader=reader,
            device=device,
            pin=options.pin_memory,
            policy=options.expert_cache_policy,
        )
        self._resources.callback(runtime.close)
        self._resources.callback(remove_hook)
        self._reader, self._runtime = reader, runtime
        dense.assert_loaded()
        layers = streamer or ResidentLayers(model, device)
        self._finish(model, guard.ForwardGuard(layers, self.profiler))
        self._record_graphs(model, runtime)
        if options.expert_cache_engine == "device":
            self._start_engine(model, runtime, layers.watch)

    def _start_engine(self, model: PreTrainedModel, runtime: SlotExpertRuntime, watch: LayerWatch) -> None:
        if self._streamer is None:
            self._start_steps(model, runtime, watch)
            return
        streamed = self._streamer.plan.streamed
        self._engine_reason = f"{streamed} decoder layers are streamed: it needs them on the device, leave resident_gb out"
        log.warning("expert_cache_engine='device': the plain engine serves this model (%s)", self._engine_reason)

    def _record_graphs(self, model: PreTrainedModel, runtime: SlotExpertRuntime) -> None:
        """Record what can be replayed for a decoded token, or leave the reason in ``_graph_reason``."""

    def _start_steps(self, model: PreTrainedModel, runtime: SlotExpertRuntime, watch: LayerWatch) -> None:
        """Let decoded tokens be steps served by the device engine, or say in ``_engine_reason`` why they cannot be."""
        unfused = why_not_fused(model)
        plan, self._engine_reason = plan_steps(model, runtime, stock=bool(unfused))
        if plan is not None:
            self._engine_reason = add_device_engine(runtime, model, plan.top_k)
        if plan is None or runtime.engine is None:
            log.warning("expert_cache_engine='device': the plain engine serves this model (%s)", self._engine_reason)
            return
        if unfused:
            log.info("decoded tokens run the stock modules' kernels: %s", unfused)
        step = None if unfused else FusedStep(model, runtime.engine)
        ahead = self.profiler is None
        self._stepper = self._guard.stepper = DecodeStepper(model, runtime.engine, watch, plan, step, ahead)
        self._resources.callback(self._stepper.close)

    # --- statistics ---------------------------------------------------------------------------------------------------

    def get_expert_cache_stats(self) -> dict[str, Any]:
        """Sizes (bytes) and counters of the expert cache; all measured. ``enabled`` is False when layers are streamed. A closed
        model gives what it gave last."""
        if self._runtime is None:
            return dict(self._last_stats) if self._last_stats is not None else disabled_stats()
        dense, plan = dense_resident_bytes(self.model, self._streamer), self._streamer.plan if self._streamer else None
        ring_bytes = plan.ring_bytes if plan else 0
        stats = {
            "enabled": True,
            "backend": "slot",
            "dense_resident_bytes": dense,
            "dense_streamed_bytes": plan.moved_bytes if plan else 0,
            "dense_ring_bytes": ring_bytes,
            "allocated_device_bytes": dense + ring_bytes + self._runtime.pool.nbytes,
            "decode_graphs": self._runtime.graphs is not None,
            "decode_graphs_reason": self._graph_reason,
            "engine": "plain",
            "device_engine_reason": self._engine_reason,
            **self._runtime.stats(),
        }
        return stats if self._stepper is None else {**stats, "engine": "device", **self._stepper.stats()}

    def reset_expert_cache_stats(self) -> None:
        """Counters to zero; what is resident stays. Nothing to reset without an expert cache."""
        if self._runtime is not None:
            self._runtime.reset_counters()

    def clear_expert_cache(self) -> None:
        """Empty every slot; counters stay. Nothing to empty without an expert cache."""
        if self._runtime is not None:
            with self._guard.lock:
                self._runtime.clear()


    def record_routing(self, path: str | os.PathLike[str]) -> contextlib.AbstractContextManager[None]:
        """A block within which each token's experts are written to the CSV file ``path``; see :mod:`airllm.experts.trace`.

        Raises:
            UnsupportedModelError: no slots, or the device engine serves them, which tells the host nothing.
        """
        if self._runtime is None or self._runtime.engine is not None:
            raise UnsupportedModelError(
                'routing is recorded with expert_cache_backend="slot" and expert_cache_engine="plain": load the model so'
            )
        return record_routing(self._runtime, path, self.config.model_type)
