"""Microsoft's PhiMoE models (Phi-tiny-MoE, Phi-mini-MoE, Phi-3.5-MoE): streamed, or with their experts in slots.

The class is chosen by ``model_type`` phimoe, whichever way the checkpoint spells its architecture, and never runs the
checkpoint's own modelling code: that code does not load on transformers 5, whose native class computes the same.
"""

from __future__ import annotations

import logging
from typing import Any

from transformers import PreTrainedModel

from airllm import guard
from airllm.airllm_base import AirLLMBaseModel
from airllm.checkpoint import TensorReader
from airllm.decode_step import DecodeStepper, why_no_steps
from airllm.experts.assembly import add_device_engine
from airllm.experts.runtime import SlotExpertRuntime
from airllm.layer_watch import LayerWatch
from airllm.phimoe_rope import PhiMoERotaryEmbedding, reread_at_switch
from airllm.phimoe_step import PhiMoEStep, why_not_fused
from airllm.recorded_layers import record_decode
from airllm.skeleton import decoder_layers
from airllm.weight_map import WeightMap

log = logging.getLogger(__name__)

TOP_K = 2
"""PhiMoE's router (sparsemixer) always picks two, whatever ``num_experts_per_tok`` says."""


class AirLLMPhiMoE(AirLLMBaseModel):
    """PhiMoE: its rotary embedding on the device, and with slots its routers as graphs and decoded tokens as steps."""

    _top_k = TOP_K
    _stepper: DecodeStepper | None = None
    _graph_reason = ""

    def _build(
        self, experts_implementation: str | None, trust_remote_code: bool
    ) -> tuple[PreTrainedModel, WeightMap, TensorReader]:
        return super()._build(experts_implementation, trust_remote_code=False)

    def _record_graphs(self, model: PreTrainedModel, runtime: SlotExpertRuntime) -> None:
        if self.options.device.type != "cuda":
            self._graph_reason = "graphs need a CUDA or ROCm device"
            return
        self._graph_reason, remove = record_decode(model, runtime, [layer for _, layer in decoder_layers(model)[1]])
        self._resources.callback(remove)

    def _finish(self, model: PreTrainedModel, forward_guard: guard.ForwardGuard) -> None:
        # The stock module builds its tables on the host in every forward, and its LongRoPE is wrong since transformers 5.15.
        inner = model.model
        inner.rotary_emb = PhiMoERotaryEmbedding(model.config).to(self.options.device).eval()
        reread_at_switch(model)
        super()._finish(model, forward_guard)

    def _start_steps(self, model: PreTrainedModel, runtime: SlotExpertRuntime, watch: LayerWatch) -> None:
        """Let decoded tokens be steps served by the device engine, or say why they cannot be."""
        self._engine_reason = why_no_steps(model) or add_device_engine(runtime, model)
        if runtime.engine is None:
            log.warning("expert_cache_engine='device': the plain engine serves this model (%s)", self._engine_reason)
            return
        unfused = why_not_fused(model)
        fused = None if unfused else PhiMoEStep(model, runtime.engine)
        if unfused:
            log.info("decoded tokens run the stock modules' kernels: %s", unfused)
        self._stepper = self._guard.stepper = DecodeStepper(model, runtime.engine, watch, fused)
        self._resources.callback(self._stepper.close)

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        stepper = self._stepper
        if stepper is None or kwargs.get("assistant_model") is not None:
            return super().generate(*args, **kwargs)
        with self._guard.lock, stepper.generating():
            return stepper.hand_out(super().generate(*args, **kwargs))

    def get_expert_cache_stats(self) -> dict[str, Any]:
        stats = super().get_expert_cache_stats()
        return stats if self._stepper is None else {**stats, "engine": "device", **self._stepper.stats()}

    def close(self) -> None:
        super().close()
        self._stepper = None
