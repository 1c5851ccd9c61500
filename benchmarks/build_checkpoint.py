#!/usr/bin/env python
"""Write a PhiMoE checkpoint with random weights in an exact geometry: hub-style keys, shards, config.json.

    python benchmarks/build_checkpoint.py OUT --geometry phi-tiny --dtype float16

How the weights are made
  * All values come from one pool of N(0, 1) numbers drawn once on the CPU from the seed, so that the files are the same
    on every machine and 7 GiB are written at the speed of the disk. Each tensor is a window of the pool at an offset of
    its own, scaled; windows are not aligned to rows, so no two tensors share a row or a column structure.
  * Matrices and biases have standard deviation 0.02 (the config's initializer_range) at hidden 4096, and 1.28 / sqrt(hidden)
    in general, so that experts weigh as much in a small model. Norms have weight 1.
  * Embeddings have standard deviation 1, so that a token's identity outweighs what attention adds, and routing follows
    the tokens. The head has 0.3, so that logits are far apart in absolute terms.
  * Routing is skewed but does not collapse: the router has the same scale, which makes the logits of a token N(0, 1.28^2),
    and the bias of the norm before it is N(0, 0.5^2), which adds a fixed offset N(0, 0.64^2) to every expert's logit.
    Popular experts exist in every layer, and every expert is used; tests/test_benchmarks.py measures it.

There is no tokenizer: the benchmark feeds random token ids.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from benchmarks.geometry import GEOMETRIES, Geometry  # noqa: E402

DTYPES = {"float16": ("F16", torch.float16), "bfloat16": ("BF16", torch.bfloat16), "float32": ("F32", torch.float32)}
UNIT_OUTPUT_STD = 1.28  # 0.02 * sqrt(4096): a matrix row times a normalised hidden state
HEAD_STD = 0.3
EMBEDDING_STD = 1.0
ROUTER_NORM_BIAS_STD = 0.5
POOL_VALUES = 2**25  # 64 MiB in half precision
SHARD_BYTES = 5 * 10**9
COMMON = "common"


@dataclass(frozen=True)
class Tensor:
    """One tensor of the checkpoint to be. `std` None means all ones, "common" the scale of the matrices."""

    name: str
    shape: tuple[int, ...]
    std: float | str | None

    @property
    def values(self) -> int:
        return math.prod(self.shape)


def tensors(geometry: Geometry) -> Iterator[Tensor]:
    """Every tensor in the order of the file: embedding, layers, norm, head."""
    g = geometry
    yield Tensor("model.embed_tokens.weight", (g.vocabulary, g.hidden), EMBEDDING_STD)
    for layer in range(g.layers):
        yield from layer_tensors(g, f"model.layers.{layer}.")
    yield from norm("model.norm", g.hidden, COMMON)
    yield Tensor("lm_head.weight", (g.vocabulary, g.hidden), HEAD_STD)
    yield Tensor("lm_head.bias", (g.vocabulary,), COMMON)


def layer_tensors(g: Geometry, prefix: str) -> Iterator[Tensor]:
    yield from norm(prefix + "input_layernorm", g.hidden, COMMON)
    yield from norm(prefix + "post_attention_layernorm", g.hidden, ROUTER_NORM_BIAS_STD)
    rows = {"q_proj": g.heads * g.head_dim, "k_proj": g.kv_heads * g.head_dim, "v_proj": g.kv_heads * g.head_dim}
    for projection, width in rows.items():
        yield from linear(f"{prefix}self_attn.{projection}", width, g.hidden)
    yield from linear(f"{prefix}self_attn.o_proj", g.hidden, g.heads * g.head_dim)
    yield Tensor(f"{prefix}block_sparse_moe.gate.weight", (g.experts, g.hidden), COMMON)
    for expert in range(g.experts):
        stem = f"{prefix}block_sparse_moe.experts.{expert}."
        yield Tensor(stem + "w1.weight", (g.expert_width, g.hidden), COMMON)
        yield Tensor(stem + "w2.weight", (g.hidden, g.expert_width), COMMON)
        yield Tensor(stem + "w3.weight", (g.expert_width, g.hidden), COMMON)


def norm(stem: str, width: int, bias_std: float | str) -> Iterator[Tensor]:
    yield Tensor(stem + ".weight", (width,), None)
    yield Tensor(stem + ".bias", (width,), bias_std)


def linear(stem: str, rows: int, columns: int) -> Iterator[Tensor]:
    yield Tensor(stem + ".weight", (rows, columns), COMMON)
    yield Tensor(stem + ".bias", (rows,), COMMON)


class Pool:
    """Random bytes for any tensor: windows of one block of N(0, 1) values, scaled."""

    def __init__(self, seed: int, dtype: torch.dtype, values: int, common_std: float) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        self.normal = torch.randn(values, generator=self.generator)
        self.dtype, self.common_std = dtype, common_std
        self.scaled: dict[float, torch.Tensor] = {}  # cast once for each scale, and written without a copy

    def windows(self, tensor: Tensor) -> Iterator[memoryview]:
        """The tensor's bytes in order, in pieces no larger than the pool."""
        left = tensor.values
        while left:
            start = int(torch.randint(self.normal.numel(), (1,), generator=self.generator))
            count = min(left, self.normal.numel() - start)
            yield as_bytes(self.piece(tensor.std, start, count))
            left -= count

    def piece(self, std: float | str | None, start: int, count: int) -> torch.Tensor:
        if std is None:
            return torch.ones(count, dtype=self.dtype)
        scale = self.common_std if isinstance(std, str) else std
        if scale not in self.scaled:
            self.scaled[scale] = (self.normal * scale).to(self.dtype)
        return self.scaled[scale][start : start + count]


def as_bytes(tensor: torch.Tensor) -> memoryview:
    return memoryview(tensor.view(torch.uint8).numpy())


def shards(all_tensors: list[Tensor], bytes_per_value: int, shard_bytes: int) -> list[list[Tensor]]:
    """Cut the list into about equal files of about `shard_bytes`, at least two, as the hub's checkpoints come."""
    total = sum(t.values for t in all_tensors) * bytes_per_value
    count = max(2, math.ceil(total / shard_bytes))
    cut: list[list[Tensor]] = [[] for _ in range(count)]
    start = 0
    for tensor in all_tensors:
        cut[start * count // total].append(tensor)
        start += tensor.values * bytes_per_value
    return [shard for shard in cut if shard]


def safetensors_header(shard: list[Tensor], code: str, bytes_per_value: int) -> bytes:
    """Eight bytes of length, then JSON padded with spaces so that the data starts at a multiple of eight."""
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for tensor in shard:
        end = offset + tensor.values * bytes_per_value
        entries[tensor.name] = {"dtype": code, "shape": list(tensor.shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def write_shard(path: Path, header: bytes, shard: list[Tensor], pool: Pool) -> None:
    partial = path.with_suffix(".partial")
    with open(partial, "wb", buffering=2**20) as file:
        file.write(header)
        for tensor in shard:
            for window in pool.windows(tensor):
                file.write(window)
    os.replace(partial, path)


def build(folder: Path, geometry: Geometry, dtype: str, seed: int = 0, shard_bytes: int = SHARD_BYTES) -> int:
    """Write the checkpoint into `folder` and return its bytes of weights. Peak memory is the pool's, once for each scale."""
    pool_values = min(POOL_VALUES, 4 * geometry.expert_values * geometry.experts)
    pool = Pool(seed, DTYPES[dtype][1], pool_values, UNIT_OUTPUT_STD / math.sqrt(geometry.hidden))
    total = write_weights(folder, list(tensors(geometry)), pool, dtype, shard_bytes)
    write_json(folder / "config.json", geometry.config(dtype))
    write_json(folder / "generation_config.json", geometry.generation_config())
    return total


def write_weights(folder: Path, all_tensors: list[Tensor], pool: Pool, dtype: str, shard_bytes: int = SHARD_BYTES) -> int:
    """The tensors as shards and their index; returns their bytes."""
    code, torch_dtype = DTYPES[dtype]
    bytes_per_value = torch_dtype.itemsize
    folder.mkdir(parents=True, exist_ok=True)
    cut = shards(all_tensors, bytes_per_value, shard_bytes)
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(cut, 1):
        name = f"model-{number:05d}-of-{len(cut):05d}.safetensors"
        write_shard(folder / name, safetensors_header(shard, code, bytes_per_value), shard, pool)
        weight_map.update({tensor.name: name for tensor in shard})
    total = sum(t.values for shard in cut for t in shard) * bytes_per_value
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    write_json(folder / "model.safetensors.index.json", index)
    return total


def write_json(path: Path, content: dict) -> None:
    path.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def ensure(folder: Path, geometry: Geometry, dtype: str, seed: int = 0) -> Path:
    """Build the checkpoint unless the folder already holds exactly this one."""
    wanted = {"geometry": geometry.name, "dtype": dtype, "seed": seed}
    return ensure_built(folder, wanted, lambda: build(folder, geometry, dtype, seed))


def ensure_built(folder: Path, wanted: dict[str, Any], write: Callable[[], Any]) -> Path:
    """Let `write` fill the folder unless its stamp file says that it holds what is `wanted`."""
    stamp = folder / "built_from.json"
    if stamp.is_file() and json.loads(stamp.read_text()) == wanted:
        return folder
    stamp.unlink(missing_ok=True)
    for stale in folder.glob("*.safetensors"):
        stale.unlink()
    write()
    write_json(stamp, wanted)
    return folder


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="where to write; created if missing")
    parser.add_argument("--geometry", choices=GEOMETRIES, default="phi-tiny")
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16", help="dtype on disk (default: the hub's)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--shard-gb", type=float, default=SHARD_BYTES / 1e9, help="largest shard, in 10^9 bytes")
    args = parser.parse_args()
    start = time.perf_counter()
    shard_bytes = int(args.shard_gb * 1e9)
    total = build(args.folder, GEOMETRIES[args.geometry], args.dtype, args.seed, shard_bytes)
    seconds = time.perf_counter() - start
    print(f"{args.folder}: {total} bytes of {args.geometry} in {args.dtype}, {seconds:.1f} s")


if __name__ == "__main__":
    main()
