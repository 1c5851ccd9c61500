from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import families
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaForCausalLM, conversion_mapping
from transformers.core_model_loading import Chunk, Transpose, WeightConverter, WeightRenaming

from airllm.checkpoint import CheckpointIndex, TensorReader
from airllm.errors import WeightMapError
from airllm.skeleton import build_skeleton, load_config
from airllm.weight_map import CONVERTED_BYTES, WeightMap, build_weight_map
from airllm.weight_map import Chunk as Run

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
Checkpoint = Callable[..., Path]


def mapped(folder: Path, dtype: torch.dtype) -> tuple[Any, WeightMap]:
    model = build_skeleton(load_config(folder), dtype=dtype, folder=folder)
    return model, build_weight_map(model, CheckpointIndex.open(folder), dtype=dtype)


def read_all(weight_map: WeightMap) -> dict[str, torch.Tensor]:
    out = {spec.name: torch.empty(spec.shape, dtype=spec.dtype) for spec in weight_map.targets().values()}
    with TensorReader(2) as reader:
        for group in weight_map.groups:
            group.read_into(reader, out)
    return out


def same(ours: torch.Tensor, theirs: torch.Tensor) -> bool:
    return ours.dtype == theirs.dtype and torch.equal(ours, theirs)


def edited(folder: Path, target: Path, edit: Callable[[dict[str, torch.Tensor]], None]) -> Path:
    """A copy of a single-file checkpoint with its tensors changed by ``edit``."""
    shutil.copytree(folder, target)
    tensors = load_file(target / "model.safetensors")
    edit(tensors)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, target / "model.safetensors")
    return target


@pytest.mark.parametrize("family", families.FAMILIES)
def test_every_tensor_equals_what_transformers_loads(checkpoint: Checkpoint, family: str) -> None:
    """In half precision, which casts; test_skeleton.py goes through all dtypes."""
    folder = checkpoint(family)
    _, weight_map = mapped(folder, torch.bfloat16)
    theirs = families.oracle(folder, torch.bfloat16).state_dict()
    ours = read_all(weight_map)
    tied = {"lm_head.weight"} if families.oracle_ties(folder) else set()
    assert theirs.keys() - ours.keys() <= tied
    assert [name for name, tensor in ours.items() if not same(tensor, theirs[name])] == []
    assert weight_map.unexpected == () and weight_map.missing == ()


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16], ids=str)
def test_a_cast_in_several_steps_is_one_cast(tmp_path: Path, stored: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the middle of a tensor, by several threads, in memory that is touched for the first of two sweeps only."""
    tensor = torch.randn(700_001).to(stored)
    save_file({"x": tensor}, tmp_path / "model.safetensors")
    entry = CheckpointIndex.open(tmp_path)["x"]
    assert 3 * CONVERTED_BYTES > tensor.nbytes > CONVERTED_BYTES
    starts = range(5, 700_001, 600_000)
    runs = [Run("y", entry, start, start - 5, min(600_000, 700_001 - start)) for start in starts]
    with TensorReader(2) as reader:
        for _ in range(2):
            out = torch.full((699_996,), float("nan"), dtype=torch.float16)
            reader.run([partial(run.read, reader, out) for run in runs])
            assert torch.equal(out, tensor[5:].half())
            made, _ = torch.empty, monkeypatch.setattr(torch, "empty", None)
            with reader.scratch(CONVERTED_BYTES) as block:
                assert block.shape == (CONVERTED_BYTES,) and block.dtype == torch.uint8
            monkeypatch.setattr(torch, "empty", made)


@pytest.mark.parametrize("family", ["phimoe", "gpt2"])
def test_half_precision_shards_are_read_as_they_are(
    checkpoint: Checkpoint, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = checkpoint(family, dtype=torch.bfloat16, shards=3)
    assert len(CheckpointIndex.open(folder).files) >= 3
    _, weight_map = mapped(folder, torch.bfloat16)
    with monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "copy_", None)  # a temporary would have to be copied out of
        ours = read_all(weight_map)
    theirs = families.oracle(folder).state_dict()
    assert all(same(tensor, theirs[name]) for name, tensor in ours.items())


def test_bytes_read_are_the_bytes_of_the_targets(checkpoint: Checkpoint) -> None:
    _, weight_map = mapped(checkpoint("phimoe"), torch.float32)
    out = {spec.name: torch.empty(spec.shape) for spec in weight_map.targets().values()}
    with TensorReader(2) as reader:
        reader.run([job for group in weight_map.groups for job in group.jobs(reader, out, 1000)])
        assert reader.bytes_read == sum(group.nbytes for group in weight_map.groups)
    assert all(same(out[name], tensor) for name, tensor in read_all(weight_map).items())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("plan", ["_keep_in_fp32_modules", "_keep_in_fp32_modules_strict"])
def test_what_a_model_class_keeps_in_float32_is_kept(
    checkpoint: Checkpoint, plan: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = checkpoint("llama")
    monkeypatch.setattr(LlamaForCausalLM, plan, ["o_proj", "layers.1.mlp"])
    model, weight_map = mapped(folder, dtype)
    theirs = families.oracle(folder, dtype).state_dict()
    assert all(same(tensor, theirs[name]) for name, tensor in read_all(weight_map).items())
    assert {name: tensor.dtype for name, tensor in model.state_dict().items()} == {
        name: tensor.dtype for name, tensor in theirs.items()
    }
    kept = [name for name, tensor in theirs.items() if tensor.dtype == torch.float32]
    strict = plan.endswith("strict")
    counts = {torch.float32: len(theirs), torch.bfloat16: 6 if strict else 0, torch.float16: 6}
    assert len(kept) == counts[dtype]


# --- experts ----------------------------------------------------------------------------------------------------------


def stacked_phimoe(folder: Path, target: Path) -> Path:
    """The checkpoint with each layer's experts in one tensor, under the model's own names."""
    state = families.oracle(folder).state_dict()
    shutil.copytree(folder, target)
    save_file({name: tensor.clone() for name, tensor in state.items()}, target / "model.safetensors")
    assert "model.layers.0.mlp.experts.gate_up_proj" in load_file(target / "model.safetensors")
    return target


def check_experts(folder: Path, dtype: torch.dtype) -> None:
    _, weight_map = mapped(folder, dtype)
    theirs = families.oracle(folder, dtype).state_dict()
    names = [name for name in theirs if ".experts." in name and name.endswith("proj")]
    assert names
    with TensorReader(1) as reader:
        for name in names:
            for expert in range(theirs[name].shape[0]):
                out = torch.full_like(theirs[name][expert], float("nan"))
                weight_map.read_expert(name, expert, reader, out)
                assert same(out, theirs[name][expert]), (name, expert)


@pytest.mark.parametrize("family", families.MOE_FAMILIES)
def test_one_expert_equals_the_slice_of_the_fused_tensor(checkpoint: Checkpoint, family: str) -> None:
    check_experts(checkpoint(family), torch.float16 if family == "phimoe" else torch.float32)


@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
def test_one_expert_of_a_stacked_checkpoint_equals_the_slice(
    checkpoint: Checkpoint, tmp_path: Path, dtype: torch.dtype
) -> None:
    check_experts(stacked_phimoe(checkpoint("phimoe"), tmp_path / "stacked"), dtype)


@pytest.mark.parametrize("layout", ["per expert", "stacked"])
def test_reading_one_expert_reads_only_its_bytes(checkpoint: Checkpoint, tmp_path: Path, layout: str) -> None:
    folder = checkpoint("phimoe")
    if layout == "stacked":
        folder = stacked_phimoe(folder, tmp_path / "stacked")
    _, weight_map = mapped(folder, torch.float32)
    with TensorReader(1) as reader:
        out = torch.empty(256, 64)
        weight_map.read_expert("model.layers.1.mlp.experts.gate_up_proj", 5, reader, out)
        assert reader.bytes_read == 256 * 64 * 4


def test_more_than_ten_experts_come_in_numeric_order(checkpoint: Checkpoint) -> None:
    check_experts(checkpoint("mixtral", num_local_experts=12, num_hidden_layers=1), torch.float32)


def test_an_expert_that_is_not_there_is_an_error(checkpoint: Checkpoint) -> None:
    _, weight_map = mapped(checkpoint("phimoe"), torch.float32)
    with TensorReader(1) as reader, pytest.raises(WeightMapError, match="8 experts, there is no expert 8"):
        weight_map.read_expert("model.layers.0.mlp.experts.down_proj", 8, reader, torch.empty(64, 128))


@pytest.mark.parametrize("gone", [(3,), (0,), (7,), (2, 6)])
def test_missing_experts_are_named(checkpoint: Checkpoint, tmp_path: Path, gone: tuple[int, ...]) -> None:
    names = [f"model.layers.1.block_sparse_moe.experts.{expert}.w2.weight" for expert in gone]
    folder = edited(checkpoint("phimoe"), tmp_path / "x", lambda tensors: [tensors.pop(name) for name in names])
    with pytest.raises(WeightMapError) as caught:
        mapped(folder, torch.float32)
    assert f"model.layers.1.mlp.experts.down_proj: {8 - len(gone)} of 8 experts found" in str(caught.value)
    assert all(name in str(caught.value) for name in names)


def test_a_layer_without_experts_is_named(checkpoint: Checkpoint, tmp_path: Path) -> None:
    def drop(tensors: dict[str, torch.Tensor]) -> None:
        for name in [name for name in tensors if ".1.block_sparse_moe.experts" in name and "w3" in name]:
            del tensors[name]

    with pytest.raises(WeightMapError, match=r"layers\.1\.mlp\.experts\.gate_up_proj.* 0 tensors like .*w3"):
        mapped(edited(checkpoint("phimoe"), tmp_path / "x", drop), torch.float32)


def test_more_experts_than_the_model_has_is_an_error(checkpoint: Checkpoint, tmp_path: Path) -> None:
    def add(tensors: dict[str, torch.Tensor]) -> None:
        tensors["model.layers.0.block_sparse_moe.experts.8.w2.weight"] = torch.zeros(64, 128)

    with pytest.raises(WeightMapError, match=r"layers\.0\.mlp\.experts\.down_proj.*9 tensors.*8 experts"):
        mapped(edited(checkpoint("phimoe"), tmp_path / "x", add), torch.float32)


def test_a_gap_in_the_expert_numbers_is_an_error(checkpoint: Checkpoint, tmp_path: Path) -> None:
    """Expert 3 renamed to 8: the count is right, yet every expert after it would move up by one."""

    def renumber(tensors: dict[str, torch.Tensor]) -> None:
        stem = "model.layers.0.block_sparse_moe.experts.{}.w2.weight"
        tensors[stem.format(8)] = tensors.pop(stem.format(3))

    with pytest.raises(WeightMapError, match=r"experts\.3\.w2\.weight"):
        mapped(edited(checkpoint("phimoe"), tmp_path / "x", renumber), torch.float32)


def test_an_expert_of_another_width_is_an_error_with_both_shapes(checkpoint: Checkpoint, tmp_path: Path) -> None:
    def widen(tensors: dict[str, torch.Tensor]) -> None:
        tensors["model.layers.0.block_sparse_moe.experts.2.w1.weight"] = torch.zeros(120, 64)
        tensors["model.layers.0.block_sparse_moe.experts.4.w2.weight"] = torch.zeros(64, 120)

    with pytest.raises(WeightMapError) as caught:
        mapped(edited(checkpoint("phimoe"), tmp_path / "x", widen), torch.float32)
    message = str(caught.value)
    assert "experts.2.w1.weight [120, 64]" in message and "wants [256, 64]" in message
    assert "experts.4.w2.weight of the checkpoint is [64, 120], the model wants [64, 128]" in message


# --- what does not fit ------------------------------------------------------------------------------------------------


def test_missing_tensors_are_all_named(checkpoint: Checkpoint, tmp_path: Path) -> None:
    names = ["model.norm.bias", "model.layers.2.self_attn.q_proj.weight", "lm_head.weight"]
    folder = edited(checkpoint("phimoe"), tmp_path / "x", lambda tensors: [tensors.pop(name) for name in names])
    with pytest.raises(WeightMapError) as caught:
        mapped(folder, torch.float32)
    assert "3 problems" in str(caught.value)
    assert all(name in str(caught.value) for name in names)


def test_a_wrong_shape_is_an_error_with_both_names_and_shapes(checkpoint: Checkpoint, tmp_path: Path) -> None:
    def reshape(tensors: dict[str, torch.Tensor]) -> None:
        tensors["model.layers.0.block_sparse_moe.gate.weight"] = torch.zeros(7, 64)
        tensors["model.norm.weight"] = torch.zeros(1, 64)

    with pytest.raises(WeightMapError) as caught:
        mapped(edited(checkpoint("phimoe"), tmp_path / "x", reshape), torch.float32)
    message = str(caught.value)
    assert "model.layers.0.mlp.router.weight: model.layers.0.block_sparse_moe.gate.weight of the checkpoint is" in message
    assert "[7, 64], the model wants [8, 64]" in message
    assert "[1, 64], the model wants [64]" in message


def test_a_config_of_another_head_size_is_an_error(checkpoint: Checkpoint, tmp_path: Path) -> None:
    shutil.copytree(checkpoint("phimoe"), tmp_path / "x")
    config = json.loads((tmp_path / "x" / "config.json").read_text())
    assert config["head_dim"] == 32
    config["head_dim"] = 16
    (tmp_path / "x" / "config.json").write_text(json.dumps(config))
    with pytest.raises(WeightMapError, match=r"q_proj\.weight of the checkpoint is \[128, 64\], .* wants \[64, 64\]"):
        mapped(tmp_path / "x", torch.float32)


def test_extra_tensors_are_reported_by_their_name_on_disk(
    checkpoint: Checkpoint, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    extra = {
        "model.layers.9.block_sparse_moe.experts.0.w1.weight": torch.zeros(2),
        "model.layers.0.block_sparse_moe.extra": torch.zeros(2),
        "model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(2),  # old checkpoints have it: not worth a word
    }
    folder = edited(checkpoint("phimoe"), tmp_path / "x", lambda tensors: tensors.update(extra))
    with caplog.at_level(logging.WARNING, "airllm"):
        _, weight_map = mapped(folder, torch.float32)
    assert set(weight_map.unexpected) == set(list(extra)[:2])
    assert "model.layers.0.block_sparse_moe.extra" in caplog.text


def test_two_tensors_for_one_place_are_an_error(checkpoint: Checkpoint, tmp_path: Path) -> None:
    def double(tensors: dict[str, torch.Tensor]) -> None:
        tensors["model.layers.0.mlp.experts.down_proj"] = torch.zeros(8, 64, 128)

    with pytest.raises(WeightMapError, match="both .* claim this place"):
        mapped(edited(checkpoint("phimoe"), tmp_path / "x", double), torch.float32)


def test_keys_without_the_base_prefix_load(checkpoint: Checkpoint, tmp_path: Path) -> None:
    """The original GPT-2 checkpoints leave ``transformer.`` out."""

    def strip(tensors: dict[str, torch.Tensor]) -> None:
        for name in list(tensors):
            tensors[name.removeprefix("transformer.")] = tensors.pop(name)

    folder = edited(checkpoint("gpt2"), tmp_path / "x", strip)
    _, weight_map = mapped(folder, torch.float32)
    theirs = families.oracle(folder).state_dict()
    assert all(same(tensor, theirs[name]) for name, tensor in read_all(weight_map).items())
    assert weight_map.unexpected == ()


def test_a_key_already_in_the_models_naming_is_not_renamed(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A checkpoint saved in the new naming, with a renaming in the table that would take it somewhere unknown."""
    folder = checkpoint("llama")
    conversion_mapping.get_checkpoint_conversion_mapping("llama")
    renaming = WeightRenaming("self_attn", "attention")
    monkeypatch.setitem(conversion_mapping._checkpoint_conversion_mapping_cache, "llama", [renaming])
    _, weight_map = mapped(folder, torch.float32)
    assert weight_map.targets().keys() == families.oracle(folder).state_dict().keys()


def test_tied_weights_need_only_one_of_the_two(checkpoint: Checkpoint, tmp_path: Path) -> None:
    folder = checkpoint("llama", tied=True)
    _, weight_map = mapped(folder, torch.float32)
    assert "lm_head.weight" not in weight_map.targets()

    def swap(tensors: dict[str, torch.Tensor]) -> None:
        tensors["lm_head.weight"] = tensors.pop("model.embed_tokens.weight")

    _, weight_map = mapped(edited(folder, tmp_path / "swapped", swap), torch.float32)
    assert "model.embed_tokens.weight" not in weight_map.targets()
    gone = edited(folder, tmp_path / "gone", lambda tensors: tensors.pop("model.embed_tokens.weight"))
    with pytest.raises(WeightMapError, match=r"model\.embed_tokens\.weight"):
        mapped(gone, torch.float32)
    gone = edited(folder, tmp_path / "also", lambda tensors: tensors.pop("model.norm.weight"))
    with pytest.raises(WeightMapError, match=r"1 problem\s+model\.norm\.weight"):
        mapped(gone, torch.float32)


def test_a_destination_of_another_shape_or_dtype_is_refused(checkpoint: Checkpoint) -> None:
    _, weight_map = mapped(checkpoint("llama"), torch.float32)
    group = weight_map.group_of("model.norm.weight")
    with TensorReader(1) as reader:
        for wrong in (torch.empty(31), torch.empty(32, dtype=torch.float16), torch.empty(64)[::2]):
            with pytest.raises(ValueError, match=r"model\.norm\.weight: wants a contiguous CPU tensor \[32\]"):
                group.read_into(reader, {"model.norm.weight": wrong})
    with pytest.raises(WeightMapError, match="nonsense"):
        weight_map.group_of("nonsense")


# --- conversions that do not keep the bytes in order ------------------------------------------------------------------


@pytest.fixture
def fused_llama(checkpoint: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A Llama whose q, k and v lie in one tensor, with a converter that chunks it, as several families have."""
    plain = checkpoint("llama", num_key_value_heads=4)
    conversion_mapping.get_checkpoint_conversion_mapping("llama")  # fills the table
    converter = WeightConverter(
        source_patterns=["self_attn.qkv.weight"],
        target_patterns=["self_attn.q_proj.weight", "self_attn.k_proj.weight", "self_attn.v_proj.weight"],
        operations=[Chunk(dim=0)],
    )
    monkeypatch.setitem(conversion_mapping._checkpoint_conversion_mapping_cache, "llama", [converter])

    def fuse(tensors: dict[str, torch.Tensor]) -> None:
        for layer in range(3):
            stem = f"model.layers.{layer}.self_attn."
            tensors[stem + "qkv.weight"] = torch.cat([tensors.pop(f"{stem}{p}_proj.weight") for p in "qkv"])

    return edited(plain, tmp_path / "fused", fuse)


@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
def test_one_source_for_several_targets_goes_through_transformers_conversion(
    fused_llama: Path, dtype: torch.dtype
) -> None:
    _, weight_map = mapped(fused_llama, dtype)
    group = weight_map.group_of("model.layers.0.self_attn.k_proj.weight")
    assert len(group.targets) == 3 and not group.straight
    theirs = families.oracle(fused_llama, dtype).state_dict()
    ours = read_all(weight_map)
    assert ours.keys() == theirs.keys()
    assert all(same(tensor, theirs[name]) for name, tensor in ours.items())


def test_a_conversion_of_the_wrong_size_is_an_error(fused_llama: Path, tmp_path: Path) -> None:
    def cut(tensors: dict[str, torch.Tensor]) -> None:
        tensors["model.layers.1.self_attn.qkv.weight"] = torch.zeros(90, 32)

    with pytest.raises(WeightMapError, match=r"layers\.1\.self_attn\.v_proj\.weight: .*qkv.* convert to \[30, 32\]"):
        mapped(edited(fused_llama, tmp_path / "cut", cut), torch.float32)


@pytest.mark.parametrize(
    ("operations", "reads"), [([Transpose(1, 2)], (8, 9)), ([Transpose(1, 2), Transpose(0, 0)], (2, 3))], ids=["apart", "whole"]
)
def test_experts_are_converted_one_at_a_time_or_once_for_all(
    operations: list[Transpose],
    reads: tuple[int, int],
    checkpoint: Checkpoint,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    conversion_mapping.get_checkpoint_conversion_mapping("mixtral")
    names = ("mlp.experts.gate_up_proj", "mlp.experts.down_proj")
    converters = [WeightConverter([name], [name], operations) for name in names]
    state = families.oracle(checkpoint("mixtral")).state_dict()
    monkeypatch.setitem(conversion_mapping._checkpoint_conversion_mapping_cache, "mixtral", converters)
    folder = tmp_path / "transposed"
    shutil.copytree(checkpoint("mixtral"), folder)
    turned = {name: tensor.mT if tensor.dim() == 3 else tensor for name, tensor in state.items()}
    save_file({name: tensor.clone().contiguous() for name, tensor in turned.items()}, folder / "model.safetensors")
    check_experts(folder, torch.bfloat16)
    _, weight_map = mapped(folder, torch.float32)
    with TensorReader(1) as reader:
        for expert in range(4):
            for name in names:
                out = torch.empty_like(state[f"model.layers.0.{name}"][0])
                weight_map.read_expert(f"model.layers.0.{name}", expert, reader, out)
        assert reader.reads == reads[0]
        weight_map.forget_conversions()
        weight_map.read_expert(f"model.layers.0.{names[1]}", 0, reader, out)
        assert reader.reads == reads[1]
