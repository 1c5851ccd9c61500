"""The geometries that the benchmark knows, as the config.json of the hub would say them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

GIB = 2**30


@dataclass(frozen=True)
class Geometry:
    """Shape of one PhiMoE. Sizes count values, not bytes."""

    name: str
    hidden: int
    layers: int
    experts: int
    expert_width: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    sliding_window: int
    top_k: int = 2

    @property
    def expert_values(self) -> int:
        return 3 * self.hidden * self.expert_width

    @property
    def experts_per_token(self) -> int:
        """T, the experts that one decoded token uses over all layers."""
        return self.layers * self.top_k

    def cut(self, layers: int | None) -> Geometry:
        """The first ``layers`` of it: enough to time a layer of a model whose experts take more memory than there is."""
        if layers is None or layers == self.layers:
            return self
        return replace(self, layers=layers, name=f"{self.name}-{layers}-layers")

    def default_budget_gb(self, bytes_per_value: int) -> float:
        """0.75 GiB is the published budget of Phi-tiny; the tiny geometry takes the same 1.14 T of experts."""
        if not self.name.startswith("tiny"):
            return 0.75
        slots = round(1.14 * self.experts_per_token)
        return slots * self.expert_values * bytes_per_value / GIB

    def config(self, dtype: str) -> dict[str, Any]:
        """config.json as the hub's PhiMoE checkpoints carry it, less the remote code."""
        return {
            "architectures": ["PhiMoEForCausalLM"],
            "attention_bias": True,
            "attention_dropout": 0.0,
            "bos_token_id": 1,
            "eos_token_id": min(32000, self.vocabulary - 1),
            "expert_dropout": 0.0,
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "hidden_dropout": 0.0,
            "hidden_size": self.hidden,
            "initializer_range": 0.02,
            "input_jitter_noise": 0.01,
            "intermediate_size": self.expert_width,
            "lm_head_bias": True,
            "max_position_embeddings": 4096,
            "model_type": "phimoe",
            "num_attention_heads": self.heads,
            "num_experts_per_tok": self.top_k,
            "num_hidden_layers": self.layers,
            "num_key_value_heads": self.kv_heads,
            "num_local_experts": self.experts,
            "output_router_logits": False,
            "rms_norm_eps": 1e-05,
            "rope_theta": 10000.0,
            "router_aux_loss_coef": 0.0,
            "router_jitter_noise": 0.01,
            "sliding_window": self.sliding_window,
            "tie_word_embeddings": False,
            "torch_dtype": dtype,
            "transformers_version": "4.43.3",
            "use_cache": True,
            "vocab_size": self.vocabulary,
        }

    def generation_config(self) -> dict[str, Any]:
        eos = min(32000, self.vocabulary - 1)
        ids = [eos, 32001, 32007] if self.vocabulary > 32007 else [eos]
        return {
            "_from_model_config": True,
            "bos_token_id": 1,
            "eos_token_id": ids,
            "pad_token_id": eos,
            "transformers_version": "4.43.3",
        }


GEOMETRIES = {
    "phi-tiny": Geometry("phi-tiny", 4096, 32, 16, 448, 16, 4, 128, 32064, 2047),
    "phi-mini": Geometry("phi-mini", 4096, 32, 16, 960, 32, 8, 128, 32064, 2047),
    # Its LongRoPE is left out: the default rotary embedding moves and multiplies as much.
    "phi-3.5": Geometry("phi-3.5", 4096, 32, 16, 6400, 32, 8, 128, 32064, 131072),
    # Small enough for a CPU in seconds; head_dim differs from hidden / heads as it does in Phi-tiny.
    "tiny": Geometry("tiny", 256, 4, 8, 64, 4, 2, 32, 512, 64),
}
