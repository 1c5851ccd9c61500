"""Tiny random checkpoints of many model families, and the oracle: unmodified transformers in the same process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, PreTrainedModel

_SIZES: dict[str, Any] = {
    "vocab_size": 256,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_ONE_KV = {key: value for key, value in _SIZES.items() if key != "num_key_value_heads"}
_GPT2 = {key: _SIZES[key] for key in ("vocab_size", "bos_token_id", "eos_token_id", "pad_token_id")}

CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "phimoe": (
        "PhimoeConfig",
        _SIZES
        | {
            "vocab_size": 512,
            "hidden_size": 64,
            "intermediate_size": 128,
            "head_dim": 32,  # not hidden_size / num_attention_heads, as in Phi-tiny-MoE
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "attention_bias": True,
            "lm_head_bias": True,
            "sliding_window": 64,
        },
    ),
    "mixtral": ("MixtralConfig", _SIZES | {"head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen2_moe": (
        "Qwen2MoeConfig",
        _SIZES
        | {
            "num_experts": 5,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 24,
            "shared_expert_intermediate_size": 40,
        },
    ),
    "qwen3_moe": (
        "Qwen3MoeConfig",
        _SIZES | {"head_dim": 16, "num_experts": 6, "num_experts_per_tok": 4, "moe_intermediate_size": 24},
    ),
    "olmoe": ("OlmoeConfig", _SIZES | {"num_experts": 6, "num_experts_per_tok": 3}),
    "deepseek_v3": (
        "DeepseekV3Config",
        _SIZES
        | {
            "num_key_value_heads": 4,
            "moe_intermediate_size": 24,
            "n_routed_experts": 8,
            "num_experts_per_tok": 3,
            "n_shared_experts": 1,
            "n_group": 2,
            "topk_group": 1,
            "first_k_dense_replace": 1,
            "q_lora_rank": 24,
            "kv_lora_rank": 16,
            "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 8,
            "v_head_dim": 8,
        },
    ),
    "llama": ("LlamaConfig", _SIZES),
    "mistral": ("MistralConfig", _SIZES | {"head_dim": 16, "sliding_window": 32}),
    "qwen2": ("Qwen2Config", _SIZES),
    "qwen3": ("Qwen3Config", _SIZES | {"head_dim": 16}),
    "gemma2": ("Gemma2Config", _SIZES | {"head_dim": 16, "sliding_window": 32, "tie_word_embeddings": True}),
    "gpt2": ("GPT2Config", _GPT2 | {"n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 512}),
    "gpt_neox": ("GPTNeoXConfig", _ONE_KV),
    "opt": (
        "OPTConfig",
        _ONE_KV | {"ffn_dim": 48, "word_embed_proj_dim": 32, "tie_word_embeddings": True},
    ),
    "phi": ("PhiConfig", _SIZES | {"num_key_value_heads": 4}),
    "phi3": ("Phi3Config", _SIZES),
    "falcon": ("FalconConfig", _ONE_KV | {"multi_query": True, "tie_word_embeddings": True}),
}
"""Family -> configuration class of transformers and its arguments."""

FAMILIES = tuple(CONFIGS)
MOE_FAMILIES = ("phimoe", "mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "deepseek_v3")
DENSE_FAMILIES = tuple(family for family in FAMILIES if family not in MOE_FAMILIES)


def make_config(family: str, **changes: Any) -> transformers.PretrainedConfig:
    """The family's tiny configuration, with ``changes``."""
    name, arguments = CONFIGS[family]
    return getattr(transformers, name)(**(arguments | changes))


def make_checkpoint(
    family: str,
    folder: str | Path,
    *,
    dtype: torch.dtype = torch.float32,
    shards: int = 1,
    tied: bool | None = None,
    seed: int = 0,
    **changes: Any,
) -> Path:
    """Write a random checkpoint with the key names that checkpoints of this family have on the hub.

    Biases and norms are random too, so that a tensor in the wrong place shows. The head's weights have a standard
    deviation of 0.3, so that greedy tokens do not hang on rounding.
    """
    if tied is not None:
        changes["tie_word_embeddings"] = tied
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(make_config(family, **changes), dtype=torch.float32)
        _randomise(model)
    model = model.to(dtype)
    model.config.dtype = dtype
    total = sum(p.numel() * p.element_size() for p in model.parameters())
    # sizes are only a ceiling for each shard, so a little above the exact share gives the number asked for
    limit = int(total / shards * 1.1) if shards > 1 else total * 2
    model.save_pretrained(folder, max_shard_size=limit)
    return Path(folder)


@torch.no_grad()
def _randomise(model: PreTrainedModel) -> None:
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1:
            parameter.normal_(std=0.08)
        elif name.endswith("bias"):
            parameter.normal_(std=0.05)
        else:
            parameter.add_(torch.randn_like(parameter) * 0.05)
    for name, buffer in model.named_buffers():
        if name in model.state_dict() and buffer.is_floating_point():
            buffer.add_(torch.rand_like(buffer) * 0.1)
    model.get_output_embeddings().weight.normal_(std=0.3)


def oracle(
    folder: str | Path, dtype: torch.dtype | None = None, experts: str | None = "eager", attn: str | None = None
) -> PreTrainedModel:
    """The checkpoint in unmodified transformers on the CPU; ``dtype`` None takes the checkpoint's own."""
    options: dict[str, Any] = {"dtype": dtype if dtype is not None else "auto"}
    if experts is not None:
        options["experts_implementation"] = experts
    if attn is not None:
        options["attn_implementation"] = attn
    return AutoModelForCausalLM.from_pretrained(str(folder), **options)


def prompt(model: PreTrainedModel, length: int = 7, batch: int = 1, seed: int = 1) -> torch.Tensor:
    """Random token ids [batch, length], none of them special."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, model.config.get_text_config().vocab_size, (batch, length), generator=generator)


@torch.no_grad()
def greedy(model: Any, ids: torch.Tensor, n: int) -> torch.Tensor:
    """The ``n`` greedy tokens [batch, n] after ``ids`` [batch, T]; the end of the sequence does not stop them."""
    mask = torch.ones_like(ids)
    out = model.generate(ids, attention_mask=mask, max_new_tokens=n, min_new_tokens=n, do_sample=False)
    return out[:, ids.shape[1] :]


def oracle_ties(folder: str | Path) -> bool:
    """Whether the checkpoint's configuration ties the head to the embedding."""
    return bool(transformers.AutoConfig.from_pretrained(str(folder)).get_text_config().tie_word_embeddings)
