"""Mixtures of experts of other families in the shapes of their published models, with random weights and the hub's names."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.build_checkpoint import (
    COMMON,
    DTYPES,
    EMBEDDING_STD,
    HEAD_STD,
    POOL_VALUES,
    UNIT_OUTPUT_STD,
    Pool,
    Tensor,
    ensure_built,
    write_json,
    write_weights,
)


@dataclass(frozen=True)
class Shape:
    """One decoder of equal layers, all of them with experts and grouped-query attention, untied. Sizes count values."""

    name: str
    model_type: str
    architecture: str
    hidden: int
    layers: int
    experts: int
    top_k: int
    expert_width: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int

    @property
    def total_experts(self) -> int:
        return self.layers * self.experts

    @property
    def expert_values(self) -> int:
        return 3 * self.hidden * self.expert_width

    @property
    def qwen(self) -> bool:
        return self.model_type == "qwen3_moe"

    def config(self, dtype: str) -> dict[str, Any]:
        """config.json; a family's own names for the experts beside what all of them share."""
        own: dict[str, Any] = {"num_local_experts": self.experts, "sliding_window": None}
        if self.qwen:
            own = {"num_experts": self.experts, "moe_intermediate_size": self.expert_width, "norm_topk_prob": True}
            own |= {"decoder_sparse_step": 1, "mlp_only_layers": []}
        return own | {
            "architectures": [self.architecture],
            "model_type": self.model_type,
            "hidden_size": self.hidden,
            "intermediate_size": self.expert_width,
            "num_hidden_layers": self.layers,
            "num_experts_per_tok": self.top_k,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "vocab_size": self.vocabulary,
            "max_position_embeddings": 32768,
            "rms_norm_eps": 1e-6,
            "rope_theta": 1e6,
            "hidden_act": "silu",
            "attention_bias": False,
            "tie_word_embeddings": False,
            "bos_token_id": 1,
            "eos_token_id": self.vocabulary - 1,
            "torch_dtype": dtype,
        }

    def tensors(self) -> Iterator[Tensor]:
        """Every tensor in the order of the file."""
        yield Tensor("model.embed_tokens.weight", (self.vocabulary, self.hidden), EMBEDDING_STD)
        for layer in range(self.layers):
            yield from self._layer(f"model.layers.{layer}.")
        yield Tensor("model.norm.weight", (self.hidden,), None)
        yield Tensor("lm_head.weight", (self.vocabulary, self.hidden), HEAD_STD)

    def _layer(self, prefix: str) -> Iterator[Tensor]:
        for norm in ("input_layernorm", "post_attention_layernorm"):
            yield Tensor(f"{prefix}{norm}.weight", (self.hidden,), None)
        for norm in ("q_norm", "k_norm") if self.qwen else ():
            yield Tensor(f"{prefix}self_attn.{norm}.weight", (self.head_dim,), None)
        rows = {"q_proj": self.heads, "k_proj": self.kv_heads, "v_proj": self.kv_heads}
        for projection, heads in rows.items():
            yield Tensor(f"{prefix}self_attn.{projection}.weight", (heads * self.head_dim, self.hidden), COMMON)
        yield Tensor(f"{prefix}self_attn.o_proj.weight", (self.hidden, self.heads * self.head_dim), COMMON)
        block = prefix + ("mlp" if self.qwen else "block_sparse_moe")
        gate, up, down = ("gate_proj", "up_proj", "down_proj") if self.qwen else ("w1", "w3", "w2")
        yield Tensor(f"{block}.gate.weight", (self.experts, self.hidden), COMMON)
        for expert in range(self.experts):
            stem = f"{block}.experts.{expert}."
            yield Tensor(f"{stem}{gate}.weight", (self.expert_width, self.hidden), COMMON)
            yield Tensor(f"{stem}{up}.weight", (self.expert_width, self.hidden), COMMON)
            yield Tensor(f"{stem}{down}.weight", (self.hidden, self.expert_width), COMMON)

    def ensure(self, folder: Path, dtype: str, seed: int = 0) -> Path:
        """The checkpoint, written unless it is there. Bytes come from one random block: at the speed of the disk."""

        def write() -> None:
            pool_values = min(POOL_VALUES, 4 * self.expert_values * self.experts)
            pool = Pool(seed, DTYPES[dtype][1], pool_values, UNIT_OUTPUT_STD / math.sqrt(self.hidden))
            write_weights(folder, list(self.tensors()), pool, dtype)
            write_json(folder / "config.json", self.config(dtype))

        return ensure_built(folder, {"shape": repr(self), "dtype": dtype, "seed": seed}, write)


QWEN, MIXTRAL = ("qwen3_moe", "Qwen3MoeForCausalLM"), ("mixtral", "MixtralForCausalLM")
SHAPES = {
    "qwen3-30b-a3b": Shape("qwen3-30b-a3b", *QWEN, 2048, 16, 128, 8, 768, 32, 4, 128, 151936),
    "mixtral-8x7b": Shape("mixtral-8x7b", *MIXTRAL, 4096, 4, 8, 2, 14336, 32, 8, 128, 32000),
    # Small enough for a CPU in seconds.
    "qwen3-tiny": Shape("qwen3-tiny", *QWEN, 64, 2, 16, 4, 24, 4, 2, 32, 512),
    "mixtral-tiny": Shape("mixtral-tiny", *MIXTRAL, 64, 2, 8, 2, 48, 4, 2, 16, 512),
}
"""The first two have a published model's layers, fewer of them: 16 of 48, and 4 of 32."""
