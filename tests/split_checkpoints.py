"""Tiny checkpoints of plain tensors for the tests of the split format (no transformers needed)."""

from __future__ import annotations

import json
from hashlib import sha256
from pathlib import Path

import safetensors.torch
import torch

LAYERS = 3


def tensors(seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> dict[str, torch.Tensor]:
    """A decoder with experts, norms with biases, mixed dtypes, an odd count, a scalar and an empty tensor."""
    torch.manual_seed(seed)
    made = {"model.embed_tokens.weight": torch.randn(33, 8).to(dtype)}
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}"
        made[f"{prefix}.self_attn.q_proj.weight"] = torch.randn(7, 8).to(dtype)
        made[f"{prefix}.input_layernorm.weight"] = torch.randn(8)
        made[f"{prefix}.input_layernorm.bias"] = torch.randn(7).to(dtype)
        for expert in range(2):
            made[f"{prefix}.block_sparse_moe.experts.{expert}.w1.weight"] = torch.randn(4, 8).to(dtype)
    made["model.layers.0.mask"] = torch.tensor([True, False, True])
    made["model.layers.1.scale"] = torch.tensor(1.5)
    made["model.layers.1.none"] = torch.zeros(0, 3)
    made["model.norm.weight"] = torch.randn(8).to(dtype)
    made["model.norm.bias"] = torch.randn(8).to(dtype)
    made["lm_head.weight"] = torch.randn(33, 8).to(dtype)
    return made


def write_safetensors(folder: Path, seed: int = 0, shards: int = 3, dtype: torch.dtype = torch.bfloat16) -> Path:
    """Shards cut in the middle of layers, and the index that names them; ``shards=1`` is a single file."""
    folder.mkdir(parents=True, exist_ok=True)
    content = tensors(seed, dtype)
    if shards == 1:
        safetensors.torch.save_file(content, folder / "model.safetensors", metadata={"format": "pt"})
        return folder
    weight_map = {}
    for name, part in shard_parts(content, shards, "model-{:05d}-of-{:05d}.safetensors"):
        safetensors.torch.save_file(part, folder / name, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(part, name))
    write_index(folder / "model.safetensors.index.json", weight_map)
    return folder


def write_bin(folder: Path, seed: int = 0, shards: int = 3, legacy: bool = False) -> Path:
    """The same as ``pytorch_model*.bin``; ``legacy`` is the format before torch 1.6."""
    folder.mkdir(parents=True, exist_ok=True)
    content = tensors(seed)
    if shards == 1:
        torch.save(content, folder / "pytorch_model.bin", _use_new_zipfile_serialization=not legacy)
        return folder
    weight_map = {}
    for name, part in shard_parts(content, shards, "pytorch_model-{:05d}-of-{:05d}.bin"):
        torch.save(part, folder / name, _use_new_zipfile_serialization=not legacy)
        weight_map.update(dict.fromkeys(part, name))
    write_index(folder / "pytorch_model.bin.index.json", weight_map)
    return folder


def shard_parts(content: dict[str, torch.Tensor], shards: int, pattern: str) -> list[tuple[str, dict[str, torch.Tensor]]]:
    names, size = list(content), -(-len(content) // shards)
    return [
        (pattern.format(number + 1, shards), {name: content[name] for name in names[number * size : (number + 1) * size]})
        for number in range(shards)
    ]


def write_index(path: Path, weight_map: dict[str, str]) -> None:
    path.write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def read_split(folder: Path) -> dict[str, torch.Tensor]:
    """A split folder through the reference reader."""
    read: dict[str, torch.Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        part = safetensors.torch.load_file(path)
        assert not read.keys() & part.keys()
        read.update(part)
    return read


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape), name
        assert torch.equal(found[name], tensor), name


def digests(folder: Path) -> dict[str, str]:
    """File name -> sha256 of every module file and marker."""
    paths = [path for path in sorted(folder.glob("*.safetensors*")) if not path.name.startswith(".")]
    return {path.name: sha256(path.read_bytes()).hexdigest() for path in paths}


def write_airllm_split(folder: Path, target: Path, seed: int = 0) -> Path:
    """A split as AirLLM leaves it: module files and markers, and nothing that says what it was made from."""
    write_safetensors(folder, seed)
    groups: dict[str, dict[str, torch.Tensor]] = {}
    for name, tensor in tensors(seed).items():
        module = ".".join(name.split(".")[:3]) if name.startswith("model.layers.") else name.rpartition(".")[0]
        groups.setdefault(module, {})[name] = tensor
    target.mkdir(parents=True)
    for module, part in groups.items():
        safetensors.torch.save_file(part, target / f"{module}.safetensors")
        (target / f"{module}.safetensors.done").touch()
    return target
