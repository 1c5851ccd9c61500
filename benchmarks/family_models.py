"""Tiny random models of every modelling file of the installed transformers that has experts.

Configurations are made by shrinking: every field of a configuration class that is named in ``SIZES`` gets that size, and
``SPECIAL`` says what a family needs beyond it. Sub-configurations are shrunk in the same way.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import PretrainedConfig, PreTrainedModel
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING, CONFIG_MAPPING_NAMES

VOCABULARY = 128
_EXPERTS_CLASS = re.compile(r"^@use_experts_implementation|^class \w*Experts\w*\(", re.MULTILINE)
_KINDS = ("CAUSAL_LM", "IMAGE_TEXT_TO_TEXT", "MULTIMODAL_LM")

SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "d_model": 32, "intermediate_size": 24, "moe_intermediate_size": 24,
    "num_hidden_layers": 4, "num_layers": 4, "n_layers": 4, "num_attention_heads": 4, "n_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 256, "max_seq_len": 256,
    "num_experts": 6, "num_local_experts": 6, "n_routed_experts": 6, "moe_num_experts": 6,
    "num_experts_per_tok": 3, "num_experts_per_token": 3, "moe_topk": 3, "moe_top_k": 3, "moe_k": 3, "top_k_experts": 3,
    "shared_expert_intermediate_size": 24, "shared_intermediate_size": 24, "moe_shared_expert_intermediate_size": 24,
    "n_shared_experts": 1, "moe_num_shared_experts": 1, "n_group": 1, "topk_group": 1,
    "first_k_dense_replace": 1, "q_lora_rank": 24, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8,
    "v_head_dim": 16, "sliding_window": 16, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    "tie_word_embeddings": False,
    "mamba_d_state": 8, "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_n_groups": 1, "mamba_chunk_size": 8,
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
    "num_nextn_predict_layers": 0, "num_mtp_layers": 0, "index_topk": 8, "index_head_dim": 16, "index_n_heads": 2,
    "ffn_hidden_size": 24, "expert_ffn_hidden_size": 24, "zero_expert_num": 2, "unpadded_vocab_size": VOCABULARY,
    "vocab_size_per_layer_input": VOCABULARY, "hidden_size_per_layer_input": 8, "moe_hidden_size": 16, "mamba_num_heads": 4,
    "mamba_head_dim": 16, "ssm_state_size": 8, "linear_head_dim": 8, "linear_num_heads": 4, "num_dense_layers": 1,
    "router_hidden_size": 16, "layer_group_size": 2, "text_hidden_size": 32, "swa_num_attention_heads": 4,
    "swa_num_key_value_heads": 2, "swa_head_dim": 16, "sliding_window_size": 16, "rel_extent": 32, "d_rel": 8,
    "shared_experts_intermediate_size": 24, "hc_lowrank": 8,
}  # fmt: skip
VISION_SIZES: dict[str, Any] = {
    "hidden_size": 32, "embed_dim": 32, "intermediate_size": 24, "num_hidden_layers": 1, "depth": 1, "num_heads": 2,
    "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 16, "out_hidden_size": 32, "image_size": 28,
    "patch_size": 14, "num_position_embeddings": 16, "deepstack_visual_indexes": [0], "fullatt_block_indexes": [0],
    "output_channels": 32, "downsample_channels": [32, 32], "mlp_dim": 24, "global_attn_indexes": [0],
    "adapter_in_dim": 32, "adapter_out_dim": 32, "adapter_input_size": 32, "text_hidden_size": 32, "output_dim": 32,
    "d_model": 32, "encoder_layers": 1, "encoder_attention_heads": 2, "encoder_ffn_dim": 24, "downsample_hidden_size": 8,
    "projection_intermediate_size": 24, "projection_hidden_dim": 24, "output_proj_dims": 32, "position_embedding_size": 64,
    "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "vocab_size": 32, "out_hidden_sizes": [32],
}  # fmt: skip

_SAME_HEADS = {"num_key_value_heads": 4}
_MIXED = ["linear_attention", "full_attention", "linear_attention", "full_attention"]
_ONE_DENSE = ["dense", "sparse", "sparse", "sparse"]
_NO_TOKENS = {"image_token_id": 120, "video_token_id": 121, "audio_token_id": 122}
_MROPE = {"rope_type": "default", "rope_theta": 10000.0}
SPECIAL: dict[str, dict[str, Any]] = {
    "axk2": _SAME_HEADS,
    "bailing_hybrid": _SAME_HEADS | {"layer_types": _MIXED, "n_group": 1},
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8.0},
        "ffn_config": {"hidden_size": 32, "ffn_hidden_size": 32, "moe_num_experts": 6, "moe_top_k": 3},
    },
    "deepseek_ocr2": {"text_config": _SAME_HEADS | {"mlp_layer_types": _ONE_DENSE}},
    "deepseek_v32": _SAME_HEADS,
    "diffusion_gemma": {"canvas_length": 8},
    "dots3_note": _SAME_HEADS | {"head_dim": 16},
    "ernie4_5_vl_moe": {
        "text_config": {"moe_intermediate_size": [24, 16], "rope_parameters": _MROPE | {"mrope_section": [1, 1, 2]}},
    },
    "gemma4": {"enable_moe_block": True},
    "glm4v_moe": {"text_config": {"rope_parameters": _MROPE | {"mrope_section": [1, 1, 0], "partial_rotary_factor": 0.5}}},
    "glm5_next": {"text_config": _SAME_HEADS | {"qk_rope_head_dim": 0, "head_dim": 0, "index_kpool": 2}},
    "glm_moe_dsa": _SAME_HEADS,
    "granitemoehybrid": {"layer_types": _MIXED},
    "hy_v4_vl": {"text_config": {"rope_parameters": _MROPE | {"mrope_section": [2, 1, 1]}}},
    "inkling2": {"eos_token_id": 2},
    "inkling2_loop": {"eos_token_id": 2},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "kimi_linear": _SAME_HEADS | {"layer_types": _MIXED},
    "lfm2_moe": {"layer_types": ["conv", "full_attention", "conv", "full_attention"]},
    "longcat_flash": _SAME_HEADS | {"head_dim": 8, "num_layers": 2},
    "mistral_large4": {"text_config": _SAME_HEADS, "vision_config": VISION_SIZES},
    "muse_spark": {
        "audio_config": {
            "patch_sizes": [16, 6], "hidden_sizes": [32, 32], "depths": [1, 1], "num_hidden_layers": 2, "out_hidden_size": 32,
        },
        "out_hidden_size": 32, "projector_hidden_size": 32,
    },
    "nemotron_h": {"n_groups": 1},
    "qwen3_omni_moe": {"vision_start_token_id": 119, "vision_end_token_id": 118, "audio_start_token_id": 117},
    "qwen4_exp": {
        "indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 16, "indexer_budget": 8, "indexer_compress_ratio": 2,
    },
    "zaya": {"num_experts_per_tok": 1},
}


@dataclass(frozen=True)
class Family:
    """One modelling file with experts: its folder, the model_type to build, and how its model class is looked up."""

    folder: str
    model_type: str | None
    kind: str | None


def families() -> list[Family]:
    """A row for each modelling file that defines an experts class."""
    root = Path(transformers.__file__).parent / "models"
    types: dict[str, list[str]] = {}
    for model_type in CONFIG_MAPPING_NAMES:
        module = _config_module(model_type)
        types.setdefault(module, []).append(model_type)
    found = []
    for path in sorted(root.glob("*/modeling_*.py")):
        if _EXPERTS_CLASS.search(path.read_text(encoding="utf-8")):
            folder = path.parent.name
            found.append(_family(folder, types.get(folder, [])))
    return found


def _config_module(model_type: str) -> str:
    try:
        return CONFIG_MAPPING[model_type].__module__.split(".")[2]
    except (AttributeError, ImportError, KeyError, IndexError):
        return ""


def _family(folder: str, model_types: list[str]) -> Family:
    """The text model where there is one of its own, else the smallest wrapper that generates."""
    for kind in _KINDS:
        names = getattr(modeling_auto, f"MODEL_FOR_{kind}_MAPPING_NAMES", {})
        fitting = [name for name in model_types if name in names]
        if fitting:
            return Family(folder, max(fitting, key=lambda name: (name.endswith("_text"), len(name))), kind)
    return Family(folder, None, None)


def make_config(family: Family) -> PretrainedConfig:
    """The family's tiny configuration."""
    assert family.model_type is not None
    return shrunk(CONFIG_MAPPING[family.model_type], SPECIAL.get(family.folder, {}), SIZES)


def shrunk(kind: type[PretrainedConfig], special: dict[str, Any], sizes: dict[str, Any]) -> PretrainedConfig:
    """A configuration of class ``kind``: ``sizes`` where it has such a field, and ``special`` on top."""
    chosen = {name: sizes[name] for name in _fields(kind) if name in sizes}
    if "kv_lora_rank" in chosen:  # latent attention gives every head keys of its own
        chosen |= {name: value for name, value in _SAME_HEADS.items() if name in chosen}
    for name, part in kind.sub_configs.items():
        if name not in special and hasattr(part, "sub_configs"):
            chosen[name] = shrunk(part, {}, SIZES if "text" in name else VISION_SIZES)
    for name, value in special.items():
        if value is _MIXED and (kind().layer_types or [""])[0] == "mamba":
            value = ["mamba" if each == "linear_attention" else "attention" for each in _MIXED]  # the names before 5.10
        if isinstance(value, dict) and hasattr(kind.sub_configs.get(name), "sub_configs"):
            value = shrunk(kind.sub_configs[name], value, SIZES if "text" in name else VISION_SIZES)
        chosen[name] = value
    return kind(**chosen)


def _fields(kind: type[PretrainedConfig]) -> Iterator[str]:
    for field in dataclasses.fields(kind):
        yield kind.attribute_map.get(field.name, field.name)


def make_model(family: Family, seed: int = 0) -> PreTrainedModel:
    """A random model in float32 whose greedy tokens do not hang on rounding: the head's weights have a deviation of 0.3."""
    config = make_config(family)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = model_class(family)._from_config(config, dtype=torch.float32)
        _randomise(model)
    return model.eval()


def model_class(family: Family) -> type[PreTrainedModel]:
    """The class that the model_type has in transformers' table for its kind."""
    table = getattr(modeling_auto, f"MODEL_FOR_{family.kind}_MAPPING")
    return table[CONFIG_MAPPING[str(family.model_type)]]


@torch.no_grad()
def _randomise(model: PreTrainedModel) -> None:
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1:
            parameter.normal_(std=0.08)
        elif name.endswith("bias"):
            parameter.normal_(std=0.05)
        else:
            parameter.add_(torch.randn_like(parameter) * 0.05)
    head = model.get_output_embeddings()
    if head is not None:
        head.weight.normal_(std=0.3)
