"""A decoded token as a few kernels a layer, instead of the hundred that the stock modules launch.

For families whose decoder layer is norm, attention, norm, router and experts, and nothing else. Reads the stock modules' own
weights where they lie and computes what their forwards compute, with sums and everything between two products in float32, so
that its logits are nearer to a float32 model's than those of the stock forward in half precision.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any, NamedTuple, Protocol

import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from airllm.experts import step_twins
from airllm.experts.device_engine import MAX_ROWS, DeviceEngine
from airllm.experts.device_ops import ops_for
from airllm.experts.step_twins import Norm
from airllm.step_cache import StepCache


class StepInputs(Protocol):
    """The fixed tensors of a step: ``ids`` and ``positions`` [B, 1], ``slot`` [1] where the cache is written, ``padding``
    [B, capacity] which positions may be seen at all."""

    batch: int
    window: int | None
    cache: StepCache
    ids: torch.Tensor
    positions: torch.Tensor
    slot: torch.Tensor
    padding: torch.Tensor


class LayerWeights(NamedTuple):
    """One decoder layer's dense weights, as the kernels take them."""

    attention_norm: Norm
    qkv: list[torch.Tensor]
    qkv_bias: list[torch.Tensor | None]
    head_norms: tuple[Norm, Norm] | None
    output: torch.Tensor
    output_bias: torch.Tensor | None
    experts_norm: Norm
    router: torch.Tensor

    @classmethod
    def of(cls, layer: Any) -> LayerWeights:
        attention = layer.self_attn
        projections = (attention.q_proj, attention.k_proj, attention.v_proj)
        return cls(
            attention_norm=_norm(layer.input_layernorm),
            qkv=[projection.weight for projection in projections],
            qkv_bias=[projection.bias for projection in projections],
            head_norms=(_norm(attention.q_norm), _norm(attention.k_norm)) if hasattr(attention, "q_norm") else None,
            output=attention.o_proj.weight,
            output_bias=attention.o_proj.bias,
            experts_norm=_norm(layer.post_attention_layernorm),
            router=(layer.mlp.router if hasattr(layer.mlp, "router") else layer.mlp.gate).weight,
        )


def _norm(module: Any) -> Norm:
    if isinstance(module, nn.LayerNorm):
        return Norm(module.weight, module.bias, module.eps)
    return Norm(module.weight, None, module.variance_epsilon)


@dataclass(frozen=True)
class Router:
    """How logits [B, E] become ``top_k`` ids and shares [B, K]: ``pick(ops, logits, ids, shares)``."""

    top_k: int
    pick: Callable[[ModuleType, torch.Tensor, torch.Tensor, torch.Tensor], None]


def _sparsemixer(config: PretrainedConfig) -> Router:
    return Router(2, lambda ops, logits, ids, shares: ops.sparsemixer(logits, config.router_jitter_noise, ids, shares))


def _softmax_top_k(top_k: int, normalise: bool) -> Router:
    return Router(top_k, lambda ops, logits, ids, shares: ops.softmax_top_k(logits, ids, shares, normalise=normalise))


ROUTERS: dict[str, Callable[[PretrainedConfig], Router]] = {
    "phimoe": _sparsemixer,
    "mixtral": lambda config: _softmax_top_k(config.num_experts_per_tok, normalise=True),
    "qwen3_moe": lambda config: _softmax_top_k(config.num_experts_per_tok, normalise=bool(config.norm_topk_prob)),
}
"""By model_type: the families whose layers are computed here, and what their routers do."""


def why_not_fused(model: PreTrainedModel) -> str:
    """Why this model's tokens cannot be computed here; "" when they can."""
    config = model.config
    if config.model_type not in ROUTERS:
        return f"no kernels for the layers of model_type {config.model_type!r}"
    if not all(hasattr(layer.mlp, "experts") for layer in model.model.layers):
        return "some layers have no experts"
    dtype = model.model.embed_tokens.weight.dtype
    if dtype not in (torch.float16, torch.bfloat16, torch.float32):
        return f"the weights are {dtype}"
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    if head_dim % 2 or head_dim > 256:
        return f"head_dim {head_dim} is odd or above 256"
    if 2 * model.model.rotary_emb.inv_freq.numel() != head_dim:
        return "the rotary embedding turns only part of each head"
    if any(p.is_meta or not p.is_contiguous() for p in model.parameters()):
        return "some weights are not in one piece on the device"
    return ""


class FusedStep:
    """The forward of one new token of each of up to eight sequences, from and to the fixed tensors of a step."""

    def __init__(self, model: PreTrainedModel, engine: DeviceEngine) -> None:
        config = model.config
        self._engine, self._ops = engine, ops_for(engine.device, "step_kernels", step_twins)
        self._layers = [LayerWeights.of(layer) for layer in model.model.layers]
        self._embedding = model.model.embed_tokens.weight
        self._rotary = model.model.rotary_emb
        self._final_norm = _norm(model.model.norm)
        self._head, self._head_bias = model.lm_head.weight, model.lm_head.bias
        self._heads, self.router = config.num_attention_heads, ROUTERS[config.model_type](config)
        self._dtype, self._float = model.dtype, torch.empty(0, device=engine.device)
        with torch.inference_mode(False):
            self._arrived = torch.zeros(MAX_ROWS * self._heads, dtype=torch.int32, device=engine.device)

    def __call__(self, state: StepInputs) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Logits [B, 1, vocabulary] in the model's dtype, and the hidden states [B, 1, H] (float32) after each layer."""
        cos, sin = (part[:, 0].contiguous() for part in self._rotary(self._float, state.positions))
        hidden = torch.nn.functional.embedding(state.ids[:, 0], self._embedding).float()
        after = []
        for number, weights in enumerate(self._layers):
            hidden = self._layer(number, weights, hidden, cos, sin, state)
            after.append(hidden[:, None])
        logits = hidden.new_empty(state.batch, self._head.shape[0], dtype=self._dtype)
        self._ops.project(hidden, [self._head], [self._head_bias], logits, norm=self._final_norm)
        return logits[:, None], after

    def _layer(
        self,
        number: int,
        weights: LayerWeights,
        hidden: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        state: StepInputs,
    ) -> torch.Tensor:
        ops, batch = self._ops, state.batch
        qkv = hidden.new_empty(batch, sum(weight.shape[0] for weight in weights.qkv))
        ops.project(hidden, weights.qkv, weights.qkv_bias, qkv, norm=weights.attention_norm)
        attended = hidden.new_empty(batch, weights.output.shape[1])
        keys, values = state.cache.memory(number)
        look = {"heads": self._heads, "window": state.window, "scale": keys.shape[-1] ** -0.5, "norms": weights.head_norms}
        ops.attend(qkv, cos, sin, keys, values, state.slot, state.padding, attended, self._arrived, **look)
        between = torch.empty_like(hidden)
        ops.project(attended, [weights.output], [weights.output_bias], between, residual=hidden)
        normed = torch.empty_like(between, dtype=self._dtype)
        logits = hidden.new_empty(batch, weights.router.shape[0])
        ops.project(between, [weights.router], [None], logits, norm=weights.experts_norm, normed=normed)
        shares = hidden.new_empty(batch, self.router.top_k)
        ids = torch.empty_like(shares, dtype=torch.int32)
        self.router.pick(ops, logits, ids, shares)
        return self._engine.experts(number, normed, ids, shares, residual=between, out=torch.empty_like(hidden))
