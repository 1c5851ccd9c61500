"""Microsoft's PhiMoE models (Phi-tiny-MoE, Phi-mini-MoE, Phi-3.5-MoE): streamed, or with their experts in slots.

The class is chosen by ``model_type`` phimoe, whichever way the checkpoint spells its architecture, and never runs the
checkpoint's own modelling code: that code does not load on transformers 5, whose native class computes the same.
"""

from __future__ import annotations

import logging

from transformers import PreTrainedModel

from airllm import guard
from airllm.airllm_base import AirLLMBaseModel
from airllm.checkpoint import TensorReader
from airllm.experts.runtime import SlotExpertRuntime
from airllm.phimoe_rope import PhiMoERotaryEmbedding, reread_at_switch
from airllm.recorded_layers import record_decode
from airllm.skeleton import decoder_layers
from airllm.weight_map import WeightMap

log = logging.getLogger(__name__)

TOP_K = 2
"""PhiMoE's router (sparsemixer) always picks two, whatever ``num_experts_per_tok`` says."""


class AirLLMPhiMoE(AirLLMBaseModel):
    """PhiMoE: its rotary embedding on the device, and with slots its routers as graphs and decoded tokens as steps."""

    _top_k = TOP_K
    _graph_reason = ""

    def _build(
        self, experts_implementation: str | None, trust_remote_code: bool
    ) -> tuple[PreTrainedModel, WeightMap, TensorReader]:
        return super()._build(experts_implementation, trust_remote_code=False)

    def _record_graphs(self, model: PreTrainedModel, runtime: SlotExpertRuntime) -> None:
        if self.options.device.type != "cuda":
            self._graph_reason = "graphs need a CUDA or ROCm device"
            return
        layers = [layer for _, layer in decoder_layers(model)[1]]
        self._graph_reason, remove = record_decode(model, runtime, layers, self._streamer)
        self._resources.callback(remove)

    def _finish(self, model: PreTrainedModel, forward_guard: guard.ForwardGuard) -> None:
        # The stock module builds its tables on the host in every forward, and its LongRoPE is wrong since transformers 5.15.
        inner = model.model
        inner.rotary_emb = PhiMoERotaryEmbedding(model.config).to(self.options.device).eval()
        reread_at_switch(model)
        super()._finish(model, forward_guard)
