from __future__ import annotations

import functools
import json
import shutil
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import families
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel, dynamic_module_utils

from airllm import skeleton as module
from airllm.checkpoint import CheckpointIndex, TensorReader
from airllm.errors import CheckpointError, UnsupportedModelError, WeightMapError
from airllm.skeleton import (
    assert_no_meta,
    build_skeleton,
    decoder_layers,
    get_tensor,
    load_config,
    load_resident,
    move_buffers,
    resolve_dtype,
    set_tensor,
    tie_weights,
)
from airllm.weight_map import WeightMap, build_weight_map

Checkpoint = Callable[..., Path]
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def skeleton(folder: Path, dtype: torch.dtype | None = None, **options: Any) -> tuple[PreTrainedModel, WeightMap]:
    config = load_config(folder)
    index = CheckpointIndex.open(folder)
    dtype = resolve_dtype(dtype, config, index)
    model = build_skeleton(config, dtype=dtype, folder=folder, **options)
    return model, build_weight_map(model, index, dtype=dtype)


def loaded(folder: Path, dtype: torch.dtype | None = None, **options: Any) -> PreTrainedModel:
    model, weight_map = skeleton(folder, dtype, **options)
    with TensorReader(2) as reader:
        load_resident(model, weight_map, weight_map.targets(), reader, "cpu")
    tie_weights(model)
    assert_no_meta(model)
    return model


def tensors(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    return dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers(remove_duplicate=False))


def differing(ours: PreTrainedModel, theirs: PreTrainedModel) -> list[str]:
    mine, other = tensors(ours), tensors(theirs)
    return sorted(mine.keys() ^ other.keys()) + [
        name
        for name in mine.keys() & other.keys()
        if mine[name].dtype != other[name].dtype or not torch.equal(mine[name], other[name])
    ]


def edit_json(path: Path, **changes: Any) -> None:
    content = json.loads(path.read_text())
    content.update(changes)
    path.write_text(json.dumps({key: value for key, value in content.items() if value is not None}))


def copied(folder: Path, target: Path, **changes: Any) -> Path:
    """A copy of a checkpoint with changes to its config.json; None removes an entry."""
    shutil.copytree(folder, target)
    edit_json(target / "config.json", **changes)
    return target


# --- the same model -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("family", families.FAMILIES)
def test_the_loaded_model_is_the_one_transformers_loads(
    checkpoint: Checkpoint, family: str, dtype: torch.dtype
) -> None:
    theirs = families.oracle(checkpoint(family), dtype)
    ours = loaded(checkpoint(family), dtype, experts_implementation="eager")
    assert differing(ours, theirs) == []
    assert type(ours) is type(theirs) and not ours.training
    assert not any(parameter.requires_grad for parameter in ours.parameters())
    assert ours.config.to_dict() == theirs.config.to_dict()
    assert ours.config._attn_implementation == theirs.config._attn_implementation
    assert ours.generation_config.to_dict() == theirs.generation_config.to_dict()
    ids = families.prompt(ours)
    with torch.no_grad():
        assert torch.equal(ours(ids).logits, theirs(ids).logits)


@pytest.mark.parametrize("tied", [True, False])
def test_tied_and_untied_models_generate_the_same_tokens(checkpoint: Checkpoint, tied: bool) -> None:
    folder = checkpoint("llama", tied=tied, dtype=torch.float16, shards=2)
    theirs, ours = families.oracle(folder), loaded(folder)
    assert (ours.lm_head.weight is ours.model.embed_tokens.weight) == tied
    assert ours.dtype == torch.float16 and differing(ours, theirs) == []
    ids = families.prompt(ours, batch=2)
    assert torch.equal(families.greedy(ours, ids, 6), families.greedy(theirs, ids, 6))


def test_the_head_alone_in_a_tied_checkpoint_fills_the_embedding(checkpoint: Checkpoint, tmp_path: Path) -> None:
    folder = copied(checkpoint("llama", tied=True), tmp_path / "x")
    state = load_file(folder / "model.safetensors")
    state["lm_head.weight"] = state.pop("model.embed_tokens.weight")
    save_file(state, folder / "model.safetensors")
    ours = loaded(folder)
    assert ours.lm_head.weight is ours.model.embed_tokens.weight
    assert differing(ours, families.oracle(folder)) == []


def test_a_tied_config_whose_two_weights_differ_stays_untied_as_in_transformers(
    checkpoint: Checkpoint, tmp_path: Path
) -> None:
    folder = copied(checkpoint("llama", tied=False), tmp_path / "x", tie_word_embeddings=True)
    ours = loaded(folder)
    assert ours.lm_head.weight is not ours.model.embed_tokens.weight
    assert differing(ours, families.oracle(folder)) == []


@pytest.mark.parametrize("attention", [None, "eager", "sdpa"])
def test_the_attention_asked_for_is_the_one_used(checkpoint: Checkpoint, attention: str | None) -> None:
    model, _ = skeleton(checkpoint("phimoe"), attn_implementation=attention)
    assert model.config._attn_implementation == (attention or "sdpa")


@pytest.mark.parametrize("experts", [None, "eager", "grouped_mm"])
def test_the_experts_implementation_asked_for_is_the_one_used(checkpoint: Checkpoint, experts: str | None) -> None:
    model, _ = skeleton(checkpoint("phimoe"), experts_implementation=experts)
    theirs = families.oracle(checkpoint("phimoe"), experts=experts)
    assert model.config._experts_implementation == theirs.config._experts_implementation


def test_only_what_a_checkpoint_fills_is_on_meta_and_frequencies_stay_float32(checkpoint: Checkpoint) -> None:
    model, weight_map = skeleton(checkpoint("deepseek_v3"), torch.bfloat16)
    assert {name for name, tensor in tensors(model).items() if tensor.is_meta} == set(weight_map.targets())
    assert not any(parameter.requires_grad for parameter in model.parameters())
    assert model.model.rotary_emb.inv_freq.dtype == torch.float32
    with pytest.raises(WeightMapError, match="were never loaded: .*embed_tokens"):
        assert_no_meta(model)


def test_building_leaves_the_callers_config_and_torch_alone(checkpoint: Checkpoint) -> None:
    config = load_config(checkpoint("phimoe"))
    before = config.to_dict()
    build_skeleton(config, dtype=torch.float16, attn_implementation="eager", experts_implementation="eager")
    assert config.to_dict() == before
    assert torch.get_default_dtype() == torch.float32 and torch.empty(1).device.type == "cpu"


def test_models_built_at_once_in_threads_keep_their_dtypes(checkpoint: Checkpoint) -> None:
    config = load_config(checkpoint("llama"))
    found: list[tuple[torch.dtype, torch.dtype]] = []

    def build(dtype: torch.dtype) -> None:
        found.append((dtype, next(build_skeleton(config, dtype=dtype).parameters()).dtype))

    threads = [threading.Thread(target=build, args=(dtype,)) for dtype in DTYPES * 3]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 9 and all(asked == got for asked, got in found)
    assert torch.get_default_dtype() == torch.float32


# --- configuration ------------------------------------------------------------------------------------------------


def test_generation_settings_come_from_their_file_or_else_from_the_config(
    checkpoint: Checkpoint, tmp_path: Path
) -> None:
    folder = copied(checkpoint("phimoe"), tmp_path / "x")
    edit_json(folder / "generation_config.json", eos_token_id=[2, 3, 4], temperature=0.5, do_sample=True)
    model, _ = skeleton(folder)
    assert model.generation_config.eos_token_id == [2, 3, 4] and model.generation_config.do_sample
    (folder / "generation_config.json").unlink()
    edit_json(folder / "config.json", eos_token_id=7)
    model, _ = skeleton(folder)
    assert model.generation_config.eos_token_id == 7
    assert model.generation_config.to_dict() == families.oracle(folder).generation_config.to_dict()


def test_a_hub_style_phimoe_loads_the_class_of_transformers_without_remote_code(
    checkpoint: Checkpoint, tmp_path: Path
) -> None:
    folder = copied(
        checkpoint("phimoe"),
        tmp_path / "hub",
        architectures=["PhiMoEForCausalLM"],
        auto_map={
            "AutoConfig": "configuration_slimmoe.PhiMoEConfig",
            "AutoModelForCausalLM": "modeling_slimmoe.PhiMoEForCausalLM",
        },
    )
    for trust in (False, True):  # the files it names are not even there
        model = build_skeleton(
            load_config(folder, trust_remote_code=trust), dtype=torch.float32, trust_remote_code=trust, folder=folder
        )
        assert type(model).__module__ == "transformers.models.phimoe.modeling_phimoe"
    assert model.model.layers[0].self_attn.q_proj.weight.shape == (4 * 32, 64)  # head_dim as the config says
    assert differing(loaded(folder), families.oracle(folder)) == []


@pytest.fixture
def own_code(checkpoint: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkpoint of a type that transformers does not know, with its own code, which leaves a trace when run."""
    modules = tmp_path / "modules"
    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(modules))
    monkeypatch.setattr(sys, "path", [*sys.path])
    folder = copied(
        checkpoint("llama"),
        tmp_path / "own",
        model_type="airllm_test_own",
        architectures=["OwnForCausalLM"],
        auto_map={"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnForCausalLM"},
    )
    (folder / "own.py").write_text(
        f"open({str(tmp_path / 'ran')!r}, 'w').close()\n"
        "from transformers import LlamaConfig, LlamaForCausalLM\n"
        "class OwnConfig(LlamaConfig):\n    model_type = 'airllm_test_own'\n"
        "class OwnForCausalLM(LlamaForCausalLM):\n    config_class = OwnConfig\n"
    )
    return folder


def test_a_checkpoints_own_code_runs_only_when_trusted(own_code: Path, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match="airllm_test_own.*trust_remote_code=True"):
        load_config(own_code)
    assert not (tmp_path / "ran").exists()
    config = load_config(own_code, trust_remote_code=True)
    assert (tmp_path / "ran").exists()
    with pytest.raises(UnsupportedModelError, match="trust_remote_code=True"):
        build_skeleton(config, dtype=torch.float32, folder=own_code)
    model = build_skeleton(config, dtype=torch.float32, folder=own_code, trust_remote_code=True)
    weight_map = build_weight_map(model, CheckpointIndex.open(own_code), dtype=torch.float32)
    with TensorReader(1) as reader:
        load_resident(model, weight_map, weight_map.targets(), reader, "cpu")
    assert type(model).__name__ == "OwnForCausalLM" and families.greedy(model, families.prompt(model), 2).shape == (1, 2)


def test_an_unknown_type_without_code_is_an_error_that_names_it(checkpoint: Checkpoint, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match="'nonsense'"):
        load_config(copied(checkpoint("llama"), tmp_path / "x", model_type="nonsense"))


def test_a_folder_without_a_config_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"config\.json"):
        load_config(tmp_path)
    for content in ("{", "{}", '{"vocab_size": 3}'):
        (tmp_path / "config.json").write_text(content)
        with pytest.raises(CheckpointError, match=r"config\.json"):
            load_config(tmp_path)


@pytest.mark.parametrize("method", ["gptq", "awq", "bitsandbytes"])
def test_a_quantised_checkpoint_is_refused_by_the_name_of_its_method(
    checkpoint: Checkpoint, tmp_path: Path, method: str
) -> None:
    folder = copied(checkpoint("phimoe"), tmp_path / "x", quantization_config={"quant_method": method, "bits": 4})
    with pytest.raises(UnsupportedModelError, match=f"quantised with {method}"):
        build_skeleton(load_config(folder), dtype=torch.float32)


def test_the_dtype_is_the_users_then_the_configs_then_the_files(checkpoint: Checkpoint, tmp_path: Path) -> None:
    folder = copied(checkpoint("llama", dtype=torch.float16), tmp_path / "x", dtype="bfloat16")
    index = CheckpointIndex.open(folder)
    assert resolve_dtype(torch.float32, load_config(folder), index) == torch.float32
    assert resolve_dtype(None, load_config(folder), index) == torch.bfloat16
    edit_json(folder / "config.json", dtype=None)
    assert resolve_dtype(None, load_config(folder), index) == torch.float16


# --- parts of the model -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", families.FAMILIES)
def test_the_decoder_layers_are_found(checkpoint: Checkpoint, family: str) -> None:
    model = build_skeleton(load_config(checkpoint(family)), dtype=torch.float32)
    name, layers = decoder_layers(model)
    places = {
        "gpt2": "transformer.h",
        "falcon": "transformer.h",
        "gpt_neox": "gpt_neox.layers",
        "opt": "model.decoder.layers",
    }
    assert name == places.get(family, "model.layers")
    assert [layer_name for layer_name, _ in layers] == [f"{name}.{number}" for number in range(3)]
    assert all(layer is model.get_submodule(layer_name) for layer_name, layer in layers)


def test_a_model_without_a_list_of_layers_is_refused(checkpoint: Checkpoint) -> None:
    model = build_skeleton(load_config(checkpoint("llama")), dtype=torch.float32)
    model.model.layers = torch.nn.Sequential()
    with pytest.raises(UnsupportedModelError, match="LlamaForCausalLM has no list"):
        decoder_layers(model)


def test_parameters_and_buffers_are_set_by_name(checkpoint: Checkpoint) -> None:
    model, _ = skeleton(checkpoint("deepseek_v3"))
    weight, bias = torch.ones(32), torch.ones(8)
    set_tensor(model, "model.norm.weight", weight)
    set_tensor(model, "model.layers.1.mlp.gate.e_score_correction_bias", bias)
    assert model.model.norm.weight.data_ptr() == weight.data_ptr()
    assert get_tensor(model, "model.layers.1.mlp.gate.e_score_correction_bias") is bias
    assert "model.layers.1.mlp.gate.e_score_correction_bias" in dict(model.named_buffers())
    for use in (lambda: set_tensor(model, "model.norm.bias", bias), lambda: get_tensor(model, "model.norm.bias")):
        with pytest.raises(WeightMapError, match=r"no parameter or buffer model\.norm\.bias"):
            use()


def test_moving_buffers_leaves_those_on_meta(checkpoint: Checkpoint) -> None:
    model, _ = skeleton(checkpoint("deepseek_v3"))
    move_buffers(model, "cpu")
    assert model.model.layers[1].mlp.gate.e_score_correction_bias.is_meta
    assert not model.model.rotary_emb.inv_freq.is_meta


# --- resident tensors ---------------------------------------------------------------------------------------------


def test_resident_tensors_alone_are_loaded_and_counted(checkpoint: Checkpoint) -> None:
    model, weight_map = skeleton(checkpoint("phimoe"), torch.float16)
    names = [name for name in weight_map.targets() if ".layers." not in name]
    arrived: list[int] = []
    with TensorReader(2) as reader:
        nbytes = load_resident(model, weight_map, names, reader, "cpu", arrived.append)
    assert nbytes == sum(arrived) == sum(weight_map.targets()[name].nbytes for name in names)
    assert {name for name, tensor in tensors(model).items() if not tensor.is_meta} >= set(names)
    assert all(parameter.is_meta for parameter in model.model.layers.parameters())
    assert_no_meta(model, except_under=["model.layers"])
    with pytest.raises(WeightMapError, match="model.layers.0"):
        assert_no_meta(model, except_under=["model.layers.1", "model.layers.2"])


def test_resident_names_the_checkpoint_does_not_fill_are_refused(checkpoint: Checkpoint) -> None:
    model, weight_map = skeleton(checkpoint("phimoe"))
    with TensorReader(1) as reader, pytest.raises(WeightMapError, match="nonsense"):
        load_resident(model, weight_map, ["model.norm.weight", "nonsense"], reader, "cpu")


def test_a_failed_read_reaches_the_caller_and_nothing_is_set(checkpoint: Checkpoint, tmp_path: Path) -> None:
    folder = copied(checkpoint("phimoe"), tmp_path / "x")
    model, weight_map = skeleton(folder)
    with open(folder / "model.safetensors", "r+b") as file:
        file.truncate(10_000)
    with TensorReader(2) as reader, pytest.raises(CheckpointError, match="ends at byte"):
        load_resident(model, weight_map, weight_map.targets(), reader, "cpu")
    assert all(parameter.is_meta for parameter in model.parameters())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_chunks_pass_through_a_reused_stage_on_the_way_to_a_device(
    checkpoint: Checkpoint, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The stage for a GPU, with the CPU standing in for it: pinning is refused here, which must not matter."""
    _, weight_map = skeleton(checkpoint("mixtral"), dtype)
    monkeypatch.setattr(module, "STAGE_BYTES", 1000)
    staging = module._Staging(2)
    name = "model.layers.1.mlp.experts.gate_up_proj"
    out = {name: torch.full(weight_map.targets()[name].shape, float("nan"), dtype=dtype)}
    with TensorReader(3) as reader:
        chunks = list(weight_map.group_of(name).chunks(1000))
        assert len(chunks) > 8
        reader.run([functools.partial(staging.copy, chunk, reader, out[name].view(-1)) for chunk in chunks])
    assert torch.equal(out[name], families.oracle(checkpoint("mixtral"), dtype).state_dict()[name])


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_model_loaded_onto_the_gpu_equals_the_one_transformers_loads(
    checkpoint: Checkpoint, dtype: torch.dtype
) -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    model, weight_map = skeleton(checkpoint("phimoe"), dtype)
    with TensorReader(4) as reader:
        load_resident(model, weight_map, weight_map.targets(), reader, "cuda")
    move_buffers(model, "cuda")
    tie_weights(model)
    assert all(tensor.device.type == "cuda" for tensor in tensors(model).values())
    assert differing(model.cpu(), families.oracle(checkpoint("phimoe"), dtype)) == []


def test_what_a_checkpoint_may_leave_out_is_initialised_and_nothing_else_is_touched(
    checkpoint: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = copied(checkpoint("deepseek_v3"), tmp_path / "x")
    state = load_file(folder / "model.safetensors")
    optional = ["model.layers.1.mlp.gate.e_score_correction_bias", "model.norm.weight"]
    for name in optional:
        del state[name]
    save_file(state, folder / "model.safetensors")
    from transformers import DeepseekV3ForCausalLM

    monkeypatch.setattr(
        DeepseekV3ForCausalLM, "_keys_to_ignore_on_load_missing", ["1.mlp.gate.e_score_correction_bias", "model.norm"]
    )
    model, weight_map = skeleton(folder)
    assert set(weight_map.missing) == set(optional) and not set(optional) & set(weight_map.targets())
    with TensorReader(2) as reader:
        load_resident(model, weight_map, [*weight_map.targets(), *weight_map.missing], reader, "cpu")
    assert_no_meta(model)
    assert differing(model, families.oracle(folder)) == []
