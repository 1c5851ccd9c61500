"""Checkpoint folders made from other ones by hand: stacked experts, edited tensors, .bin weights, hub-style configurations."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

Tensors = dict[str, torch.Tensor]


def load(folder: Path) -> Tensors:
    tensors: Tensors = {}
    for path in sorted(folder.glob("*.safetensors")):
        tensors |= load_file(path)
    return tensors


def edited(source: Path, folder: Path, edit: Callable[[Tensors], object]) -> Path:
    """A copy of ``source`` in one file, its tensors changed in place by ``edit``."""
    shutil.copytree(source, folder, ignore=shutil.ignore_patterns("*.safetensors*"))
    tensors = load(source)
    edit(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def stacked(source: Path, folder: Path) -> Path:
    """The experts of each layer as two tensors along an expert axis, under the names that transformers 5 gives them."""

    def stack(tensors: Tensors) -> None:
        experts = re.compile(r"(.*)\.block_sparse_moe\.experts\.(\d+)\.(w[123])\.weight")
        layers: dict[str, dict[tuple[int, str], torch.Tensor]] = {}
        for name in list(tensors):
            if found := experts.fullmatch(name):
                layers.setdefault(found[1], {})[int(found[2]), found[3]] = tensors.pop(name)
            elif ".block_sparse_moe.gate." in name:
                tensors[name.replace(".block_sparse_moe.gate.", ".mlp.router.")] = tensors.pop(name)
        for prefix, parts in layers.items():
            count = 1 + max(expert for expert, _ in parts)
            gate_up = [torch.cat([parts[e, "w1"], parts[e, "w3"]]) for e in range(count)]
            tensors[f"{prefix}.mlp.experts.gate_up_proj"] = torch.stack(gate_up)
            tensors[f"{prefix}.mlp.experts.down_proj"] = torch.stack([parts[e, "w2"] for e in range(count)])

    return edited(source, folder, stack)


def as_bin(source: Path, folder: Path) -> Path:
    """The same weights as one pickle."""
    shutil.copytree(source, folder, ignore=shutil.ignore_patterns("*.safetensors*"))
    torch.save(load(source), folder / "pytorch_model.bin")
    return folder


def with_config(source: Path, folder: Path, *drop: str, **changes: Any) -> Path:
    """A copy with entries of config.json changed and dropped."""
    shutil.copytree(source, folder)
    path = folder / "config.json"
    config = json.loads(path.read_text())
    for name in drop:
        config.pop(name, None)
    path.write_text(json.dumps(config | changes))
    return folder


def with_remote_code(source: Path, folder: Path, architecture: str) -> Path:
    """As on the hub: another spelling of the architecture and code of its own, which fails whoever imports it."""
    with_config(
        source,
        folder,
        architectures=[architecture],
        auto_map={
            "AutoConfig": "configuration_slimmoe.PhiMoEConfig",
            "AutoModelForCausalLM": "modeling_slimmoe.PhiMoEForCausalLM",
        },
    )
    for name in ("configuration_slimmoe.py", "modeling_slimmoe.py"):
        (folder / name).write_text("raise RuntimeError('the code of the checkpoint was run')\n")
    return folder
