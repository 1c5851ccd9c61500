"""Keys of any decoder layout fall into the module files that AirLLM's format has."""

from __future__ import annotations

import pytest

from airllm.errors import CheckpointError, OptionError
from airllm.split_plan import plan_modules

LLAMA = {"embed": "model.embed_tokens", "layer_prefix": "model.layers", "norm": "model.norm", "lm_head": "lm_head"}
CHATGLM = {"embed": "transformer.embedding", "layer_prefix": "transformer.encoder.layers",
           "norm": "transformer.encoder.final_layernorm", "lm_head": "transformer.output_layer",
           "rotary_pos_emb": "transformer.rotary_pos_emb"}  # fmt: skip


@pytest.mark.parametrize(
    ("keys", "modules"),
    [
        (["model.embed_tokens.weight", "model.layers.0.a.weight", "model.layers.0.b.weight", "model.norm.weight",
          "model.norm.bias", "lm_head.weight", "lm_head.bias"],
         ["model.embed_tokens", "model.layers.0", "model.norm", "lm_head"]),
        (["transformer.wte.weight", "transformer.wpe.weight", "transformer.h.0.ln_1.weight", "transformer.ln_f.bias"],
         ["transformer.wte", "transformer.wpe", "transformer.h.0", "transformer.ln_f"]),
        (["h.0.ln_1.weight", "wte.weight"], ["h.0", "wte"]),
        (["gpt_neox.embed_in.weight", "gpt_neox.layers.0.x.weight", "gpt_neox.final_layer_norm.weight", "embed_out.weight"],
         ["gpt_neox.embed_in", "gpt_neox.layers.0", "gpt_neox.final_layer_norm", "embed_out"]),
        (["model.decoder.embed_tokens.weight", "model.decoder.layers.1.fc1.weight", "model.decoder.layers.0.fc1.weight"],
         ["model.decoder.embed_tokens", "model.decoder.layers.0", "model.decoder.layers.1"]),
        (["model.layers.0.block_sparse_moe.experts.3.w1.weight", "model.layers.0.block_sparse_moe.gate.weight"],
         ["model.layers.0"]),
        (["model.layers.10.x.weight", "model.layers.2.x.weight", "model.norm.weight"],
         ["model.layers.2", "model.layers.10", "model.norm"]),
        (["vision.blocks.0.w", "model.layers.0.w", "vision.blocks.1.w", "logit_scale"],
         ["vision.blocks.0", "vision.blocks.1", "model.layers.0", "logit_scale"]),
    ],
)  # fmt: skip
def test_keys_are_grouped_by_layer_or_by_parent(keys: list[str], modules: list[str]) -> None:
    plan = plan_modules(keys)
    assert [module.name for module in plan] == modules
    assert sorted(key for module in plan for key in module.keys) == sorted(keys)  # each once, none lost
    assert all(key.startswith(module.name) for module in plan for key in module.keys)


def test_layer_names_take_their_modules_whole() -> None:
    keys = ["transformer.embedding.word_embeddings.weight", "transformer.encoder.layers.0.mlp.w.weight",
            "transformer.encoder.final_layernorm.weight", "transformer.output_layer.weight",
            "transformer.rotary_pos_emb.inv_freq", "transformer.other.weight"]  # fmt: skip
    assert [module.name for module in plan_modules(keys, CHATGLM)] == [
        "transformer.embedding", "transformer.encoder.layers.0", "transformer.encoder.final_layernorm",
        "transformer.output_layer", "transformer.rotary_pos_emb", "transformer.other",
    ]  # fmt: skip


def test_a_name_is_not_taken_for_the_start_of_another() -> None:
    keys = ["model.norm.weight", "model.norm_2.weight", "model.layers.1.w", "model.layers.11.w"]
    assert {module.name: module.keys for module in plan_modules(keys, LLAMA)} == {
        "model.norm": ("model.norm.weight",), "model.norm_2": ("model.norm_2.weight",),
        "model.layers.1": ("model.layers.1.w",), "model.layers.11": ("model.layers.11.w",),
    }  # fmt: skip


@pytest.mark.parametrize("key", ["../up.weight", "/etc/passwd.x", "a/b.weight", "a\\b.weight", "c:x.w", ".hidden.w",
                                 "a\0b.w", "", "ü.weight", "x" * 300 + ".weight"])  # fmt: skip
def test_a_key_that_could_leave_the_folder_is_refused(key: str) -> None:
    with pytest.raises(CheckpointError, match="do not trust this checkpoint"):
        plan_modules([key, "model.layers.0.w"])


def test_layer_names_that_do_not_fit_are_refused_with_what_is_there() -> None:
    with pytest.raises(CheckpointError, match=r"layer_prefix 'transformer\.encoder\.layers'; it has model\.layers\.0"):
        plan_modules(["model.layers.0.w"], CHATGLM)
    with pytest.raises(OptionError, match="layer_names lacks layer_prefix, lm_head"):
        plan_modules(["model.layers.0.w"], {"embed": "e", "norm": "n"})
