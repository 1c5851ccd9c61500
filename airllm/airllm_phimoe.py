"""Microsoft's PhiMoE models (Phi-tiny-MoE, Phi-mini-MoE, Phi-3.5-MoE): streamed, or with their experts in slots.

The class is chosen by ``model_type`` phimoe, whichever way the checkpoint spells its architecture, and never runs the
checkpoint's own modelling code: that code does not load on transformers 5, whose native class computes the same.
"""

from __future__ import annotations

import logging
import os
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from airllm import guard
from airllm.airllm_base import AirLLMBaseModel, progress_bar
from airllm.decode_step import DecodeStepper, why_no_steps
from airllm.errors import UnsupportedModelError
from airllm.experts.assembly import ExpertsFound, add_device_engine, install, record_graphs
from airllm.experts.runtime import SlotExpertRuntime
from airllm.experts.trace import record_routing
from airllm.phimoe_rope import PhiMoERotaryEmbedding, reread_at_switch
from airllm.skeleton import (
    assert_no_meta,
    decoder_layers,
    load_resident,
    move_buffers,
    tie_weights,
)
from airllm.streaming import LayerWatch, StreamCounts
from airllm.weight_map import WeightMap

log = logging.getLogger(__name__)

TOP_K = 2
"""PhiMoE's router (sparsemixer) always picks two, whatever ``num_experts_per_tok`` says."""


class AirLLMPhiMoE(AirLLMBaseModel):
    """PhiMoE. With ``expert_cache_backend="slot"``: dense weights on the device, every expert in a host bank, experts in use
    in a fixed number of device slots (``expert_cache_gb``, a number of GiB or "auto")."""

    supports_slots = True
    _runtime: SlotExpertRuntime | None = None
    _stepper: DecodeStepper | None = None
    _graph_reason = ""
    _engine_reason = "not asked for (expert_cache_engine='device')"

    def _load(self) -> None:
        if self.options.expert_cache_backend == "slot":
            self._load_slots()
        else:
            super()._load()

    def _load_slots(self) -> None:
        options, device = self.options, self.options.device
        model, weight_map, reader = self._build("eager", trust_remote_code=False)
        found = ExpertsFound.of(model, TOP_K)
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
        self._record_graphs(model)
        _, layers = decoder_layers(model)
        resident = _ResidentLayers(layers, device)
        self._finish(model, guard.ForwardGuard(resident, self.profiler))
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

    def _record_graphs(self, model: PreTrainedModel) -> None:
        assert self._runtime is not None
        if self.options.device.type != "cuda":
            self._graph_reason = "graphs need a CUDA or ROCm device"
            return
        routers = [layer.get_submodule("mlp.router") for _, layer in decoder_layers(model)[1]]
        self._graph_reason = record_graphs(self._runtime, model, routers, self.config.hidden_size)

    def _finish(self, model: PreTrainedModel, forward_guard: guard.ForwardGuard) -> None:
        # The stock module builds its tables on the host in every forward, and its LongRoPE is wrong since transformers 5.15.
        inner = model.model
        inner.rotary_emb = PhiMoERotaryEmbedding(model.config).to(self.options.device)
        reread_at_switch(model)
        super()._finish(model, forward_guard)

    def _start_steps(self, model: PreTrainedModel, runtime: SlotExpertRuntime, watch: LayerWatch) -> None:
        """Let decoded tokens be steps served by the device engine, or say why they cannot be."""
        self._engine_reason = why_no_steps(model) or add_device_engine(runtime, model)
        if runtime.engine is None:
            log.warning("expert_cache_engine='device': the plain engine serves this model (%s)", self._engine_reason)
            return
        self._stepper = self._guard.stepper = DecodeStepper(model, runtime.engine, runtime.routers, watch)
        self._resources.callback(self._stepper.close)

    # --- use ----------------------------------------------------------------------------------------------------------

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        stepper = self._stepper
        if stepper is None or kwargs.get("assistant_model") is not None:
            return super().generate(*args, **kwargs)
        with self._guard.lock, stepper.generating():
            return stepper.hand_out(super().generate(*args, **kwargs))

    # --- statistics ---------------------------------------------------------------------------------------------------

    def get_expert_cache_stats(self) -> dict[str, Any]:
        """Sizes (bytes) and counters of the expert cache; all measured. ``enabled`` is False when layers are streamed."""
        if self._runtime is None:
            return super().get_expert_cache_stats()
        stats = self._runtime.stats()
        dense = sum({p.data_ptr(): p.nbytes for p in self.model.parameters() if not p.is_meta}.values())
        return {
            "enabled": True,
            "backend": "slot",
            "dense_resident_bytes": dense,
            "allocated_device_bytes": dense + self._runtime.pool.nbytes,
            "decode_graphs": self._runtime.graphs is not None,
            "decode_graphs_reason": self._graph_reason,
            "engine": "plain" if self._stepper is None else "device",
            "device_engine_reason": self._engine_reason,
            **stats,
            **({} if self._stepper is None else self._stepper.stats()),
        }

    def reset_expert_cache_stats(self) -> None:
        """Counters to zero; what is resident stays."""
        if self._runtime is not None:
            self._runtime.reset_counters()

    def clear_expert_cache(self) -> None:
        """Empty every slot; counters stay."""
        if self._runtime is not None:
            with self._guard.lock:
                self._runtime.clear()

    def record_routing(self, path: str | os.PathLike[str]) -> AbstractContextManager[None]:
        """A block within which each token's experts are written to the CSV file ``path``; see :mod:`airllm.experts.trace`.

        Raises:
            UnsupportedModelError: no slots, or the device engine serves them, which tells the host nothing.
        """
        if self._runtime is None or self._stepper is not None:
            raise UnsupportedModelError(
                'routing is recorded with expert_cache_backend="slot" and expert_cache_engine="plain": load the model so'
            )
        return record_routing(self.model, path)

    def get_stream_stats(self) -> dict[str, Any]:
        if self._runtime is None:
            return super().get_stream_stats()
        raise UnsupportedModelError("nothing is streamed with the slot backend: see get_expert_cache_stats()")

    def close(self) -> None:
        super().close()
        self._runtime = self._stepper = None


class _ResidentLayers:
    """What the forward guard asks of layers that stay where they are."""

    def __init__(self, layers: list[tuple[str, nn.Module]], device: torch.device) -> None:
        self.device, self.on_gpu = device, device.type != "cpu"
        self.counts = StreamCounts()
        self.watch = LayerWatch([module for _, module in layers], [name for name, _ in layers], device)

    def leave(self) -> None:
        """Nothing was installed for one forward only."""

