"""The slot backend of a model class: dense weights on the device, every expert in a host bank, those in use in slots.

What every family shares. A family's own class overrides `_top_k` or `_record_graphs` where it deviates.
"""

from __future__ import annotations

import contextlib
import logging
import os
from typing import Any

import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from airllm import guard
from airllm.checkpoint import TensorReader
from airllm.decode_step import DecodeStepper
from airllm.errors import UnsupportedModelError
from airllm.experts.assembly import ExpertsFound, add_device_engine, install
from airllm.experts.runtime import SlotExpertRuntime
from airllm.experts.stats import disabled_stats
from airllm.experts.trace import record_routing
from airllm.fused_step import FusedStep, why_not_fused
from airllm.layer_watch import LayerWatch, StreamCounts
from airllm.options import Options
from airllm.profiler import LayeredProfiler, progress_bar
from airllm.skeleton import assert_no_meta, decoder_layers, load_resident, move_buffers, tie_weights
from airllm.step_plan import plan_steps
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
    _stepper: DecodeStepper | None = None
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
        self._load_dense(model, weight_map, reader, found)
        if plan is None:
            plan = found.plan_auto(self.config, device, options.max_seq_len)
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
        assert_no_meta(model)
        _, layers = decoder_layers(model)
        resident = _ResidentLayers(layers, device)
        self._finish(model, guard.ForwardGuard(resident, self.profiler))
        self._record_graphs(model, runtime)
        if options.expert_cache_engine == "device":
            self._start_steps(model, runtime, resident.watch)

    def _load_dense(self, model: PreTrainedModel, weight_map: WeightMap, reader: Any, found: ExpertsFound) -> None:
        experts, targets = found.parameter_names(), weight_map.targets()
        names = [name for name in (*targets, *weight_map.missing) if name not in experts]
        total = sum(targets[name].nbytes for name in names if name in targets)
        with progress_bar("reading dense weights", total) as progress:
            self._dense_bytes = load_resident(model, weight_map, names, reader, self.options.device, progress)
        tie_weights(model)
        move_buffers(model, self.options.device)

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
        layers = [layer for _, layer in decoder_layers(model)[1]]
        if unfused:
            log.info("decoded tokens run the stock modules' kernels: %s", unfused)
        step = None if unfused else FusedStep(model, runtime.engine)
        self._stepper = self._guard.stepper = DecodeStepper(model, runtime.engine, watch, plan, step, layers)
        self._resources.callback(self._stepper.close)

    # --- statistics ---------------------------------------------------------------------------------------------------

    def get_expert_cache_stats(self) -> dict[str, Any]:
        """Sizes (bytes) and counters of the expert cache; all measured. ``enabled`` is False when layers are streamed."""
        if self._runtime is None:
            return disabled_stats()
        dense = sum({p.data_ptr(): p.nbytes for p in self.model.parameters() if not p.is_meta}.values())
        stats = {
            "enabled": True,
            "backend": "slot",
            "dense_resident_bytes": dense,
            "allocated_device_bytes": dense + self._runtime.pool.nbytes,
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


class _ResidentLayers:
    """What the forward guard asks of layers that stay where they are."""

    def __init__(self, layers: list[tuple[str, nn.Module]], device: torch.device) -> None:
        self.device, self.on_gpu = device, device.type != "cpu"
        self.counts = StreamCounts()
        self.watch = LayerWatch([module for _, module in layers], [name for name, _ in layers], device)

    def leave(self) -> None:
        """Nothing was installed for one forward only."""
