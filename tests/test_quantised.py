"""FP8 and MXFP4 checkpoints on slots and streamed: what transformers computes after dequantising them itself."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import families
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from airllm import AutoModel

BLOCK = 16
Checkpoint = Callable[..., Path]


def blocks_of(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """``weight`` [R, C] as FP8 and the factor of each block, as DeepSeek's and Qwen's checkpoints hold it."""
    rows, columns = weight.shape
    tiles = weight.float().reshape(rows // BLOCK, BLOCK, columns // BLOCK, BLOCK)
    scale = tiles.abs().amax((1, 3)) / 448
    return (tiles / scale[:, None, :, None]).reshape(rows, columns).to(torch.float8_e4m3fn), scale


def as_fp8(source: Path, folder: Path) -> Path:
    """``source`` with its layers' matrices, experts and others, in FP8; norms, embeddings and head stay."""
    folder.mkdir()
    stored: dict[str, torch.Tensor] = {}
    for name, tensor in load_file(source / "model.safetensors").items():
        if tensor.dim() == 2 and ".layers." in name and "gate.weight" not in name and not any(n % BLOCK for n in tensor.shape):
            stored[name], stored[f"{name}_scale_inv"] = blocks_of(tensor)
        else:
            stored[name] = tensor
    assert sum(tensor.dtype == torch.float8_e4m3fn for tensor in stored.values()) > 20
    save_file(stored, folder / "model.safetensors", {"format": "pt"})
    quantised = {"quant_method": "fp8", "weight_block_size": [BLOCK, BLOCK], "activation_scheme": "dynamic"}
    return with_config(source, folder, quantised)


def with_config(source: Path, folder: Path, quantised: dict[str, Any]) -> Path:
    config = json.loads((source / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": quantised}))
    return folder


def mxfp4_checkpoint(folder: Path) -> Path:
    """A tiny gpt-oss with its experts as FP4 nibbles and a factor for each 32 of them."""
    config = transformers.GptOssConfig(
        vocab_size=128, hidden_size=64, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, num_local_experts=5, num_experts_per_tok=3, sliding_window=16,
        pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        for parameter in model.parameters():
            parameter.data.normal_(std=0.1)
        model.save_pretrained(folder)
        stored = load_file(folder / "model.safetensors")
        for layer in range(2):
            for name, rows, columns in (("gate_up_proj", 64, 64), ("down_proj", 64, 32)):
                prefix = f"model.layers.{layer}.mlp.experts.{name}"
                del stored[prefix]
                stored[f"{prefix}_blocks"] = torch.randint(0, 256, (5, rows, columns // 32, 16), dtype=torch.uint8)
                stored[f"{prefix}_scales"] = torch.randint(118, 124, (5, rows, columns // 32), dtype=torch.uint8)
    save_file(stored, folder / "model.safetensors", {"format": "pt"})
    return with_config(folder, folder, {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]})


def oracle(folder: Path, quantised: Any, dtype: torch.dtype) -> Any:
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=dtype, experts_implementation="eager", quantization_config=quantised
    )
    for parameter in model.parameters():  # in memory of its own, and never in a wider dtype than was asked for
        parameter.requires_grad_(False)
        parameter.data = parameter.data.to(dtype).clone()
    return model


def assert_same(folder: Path, theirs: Any, **keywords: Any) -> None:
    ids = families.prompt(theirs, 9)
    with AutoModel.from_pretrained(folder, device="cpu", **keywords) as ours, torch.no_grad():
        assert torch.equal(ours(ids).logits, theirs(ids).logits)
        assert torch.equal(families.greedy(ours, ids, 5), families.greedy(theirs, ids, 5))


@pytest.mark.parametrize("family", ["deepseek_v3", "qwen3_moe", "mixtral"])
def test_a_block_fp8_checkpoint_gives_what_transformers_gives(family: str, checkpoint: Checkpoint, tmp_path: Path) -> None:
    source = checkpoint(family, moe_intermediate_size=32, intermediate_size=48)
    folder = as_fp8(source, tmp_path / "fp8")
    theirs = oracle(folder, transformers.FineGrainedFP8Config(dequantize=True), torch.float32)
    for keywords in ({"expert_cache_backend": "slot", "expert_cache_gb": 0.0001}, {"experts_implementation": "eager"}):
        assert_same(folder, theirs, dtype="float32", **keywords)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_an_mxfp4_checkpoint_gives_what_transformers_gives(dtype: torch.dtype, tmp_path: Path) -> None:
    folder = mxfp4_checkpoint(tmp_path / "mxfp4")
    theirs = oracle(folder, transformers.Mxfp4Config(dequantize=True), dtype)
    for keywords in ({"expert_cache_backend": "slot", "expert_cache_gb": 0.0002}, {"experts_implementation": "eager"}):
        assert_same(folder, theirs, dtype=dtype, **keywords)


def test_matrices_that_end_within_a_block_are_dequantised(checkpoint: Checkpoint, tmp_path: Path) -> None:
    """DeepSeek-V3's kv_a_proj_with_mqa has 576 rows and blocks of 128, which transformers itself cannot dequantise."""
    source = checkpoint("deepseek_v3", moe_intermediate_size=32, kv_lora_rank=20)
    folder = as_fp8(source, tmp_path / "fp8")
    stored, name = load_file(folder / "model.safetensors"), "model.layers.1.self_attn.kv_a_proj_with_mqa.weight"
    whole = torch.nn.functional.pad(stored[name], (0, 0, 0, 4))  # 28 rows
    padded, factor = blocks_of(whole)
    plain = {key: value for key, value in stored.items() if not key.endswith("scale_inv")}
    for key in [key for key in stored if key.endswith("scale_inv")]:
        tile = stored[key].repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)
        plain[key.removesuffix("_scale_inv")] = stored[key.removesuffix("_scale_inv")].float() * tile
    tile = factor.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)
    plain[name] = (padded.float() * tile)[:28].contiguous()
    stored[name], stored[f"{name}_scale_inv"] = padded[:28].contiguous(), factor
    save_file(stored, folder / "model.safetensors", {"format": "pt"})
    (tmp_path / "plain").mkdir()
    save_file(plain, tmp_path / "plain" / "model.safetensors", {"format": "pt"})
    (tmp_path / "plain" / "config.json").write_text((source / "config.json").read_text())
    theirs = oracle(tmp_path / "plain", None, torch.float32)
    assert_same(folder, theirs, dtype="float32", expert_cache_backend="slot", expert_cache_gb=0.0001)


def test_experts_are_dequantised_one_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from airllm.weight_sources import Conversion

    folder = mxfp4_checkpoint(tmp_path / "mxfp4")
    run = Conversion.run

    def refuse(self: Conversion, reader: Any) -> Any:
        assert "experts" not in self._target, "a whole layer of experts is dequantised"
        return run(self, reader)

    monkeypatch.setattr(Conversion, "run", refuse)
    AutoModel.from_pretrained(folder, device="cpu", expert_cache_backend="slot", expert_cache_gb=0.001).close()
