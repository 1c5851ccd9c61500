"""Compressed splits: AirLLM's layout on disk, bitsandbytes' own values when read (bitsandbytes is the oracle)."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from split_checkpoints import read_split, tensors, write_bin, write_safetensors

from airllm import compression
from airllm.checkpoint import TensorReader
from airllm.compression import compressed_bytes, dequantise, is_compressible, open_compressed
from airllm.errors import CheckpointError, OptionError
from airllm.layer_files import find_or_create_split

try:
    from bitsandbytes import functional
except ImportError:
    functional = None

needs_bitsandbytes = pytest.mark.skipif(functional is None, reason='needs bitsandbytes: pip install "airllm[bitsandbytes]"')
DTYPES = [torch.bfloat16, torch.float16, torch.float32]


def split(folder: Path, kind: str, **options: Any) -> Path:
    return find_or_create_split(folder, compression=kind, progress=False, **options)


def oracle(tensor: torch.Tensor, kind: str) -> torch.Tensor:
    """What bitsandbytes itself gives back for ``tensor``."""
    if not is_compressible(tensor.dtype, tuple(tensor.shape)):
        return tensor
    if kind == "4bit":
        return functional.dequantize_nf4(*functional.quantize_nf4(tensor, blocksize=64)).view(tensor.shape)
    return functional.dequantize_blockwise(*functional.quantize_blockwise(tensor, blocksize=2048)).to(tensor.dtype)


def test_without_bitsandbytes_the_error_names_the_extra_and_nothing_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "bitsandbytes", None)
    folder = write_safetensors(tmp_path / "model")
    with pytest.raises(OptionError, match=r'pip install "airllm\[bitsandbytes\]"'):
        split(folder, "4bit")
    assert not list((folder / "splitted_model.4bit").glob("*.safetensors*"))


@needs_bitsandbytes
@pytest.mark.parametrize("kind", ["4bit", "8bit"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_compressed_split_reads_as_bitsandbytes_reads_it(tmp_path: Path, kind: str, dtype: torch.dtype) -> None:
    folder = write_safetensors(tmp_path / "model", dtype=dtype)
    target = split(folder, kind)
    assert target == folder / f"splitted_model.{kind}"
    index, reader = open_compressed(target)
    with reader:
        assert set(index) == set(tensors())
        for name, tensor in tensors(dtype=dtype).items():
            assert (index[name].shape, index[name].dtype) == (tuple(tensor.shape), tensor.dtype)
            assert torch.equal(reader.read(index[name]), oracle(tensor, kind)), name
    stored = read_split(target)
    for name, tensor in tensors(dtype=dtype).items():
        assert torch.equal(dequantise(name, stored, tensor.dtype), oracle(tensor, kind)), name


@needs_bitsandbytes
@pytest.mark.parametrize("kind", ["4bit", "8bit"])
def test_the_layout_on_disk_is_airllms(tmp_path: Path, kind: str) -> None:
    stored = read_split(split(write_safetensors(tmp_path / "model"), kind))
    keys = {"4bit": ["4bit.absmax", "4bit.quant_map", "4bit.quant_state.bitsandbytes__nf4"],
            "8bit": ["8bit.absmax", "8bit.code"]}[kind]  # fmt: skip
    for name, tensor in tensors().items():
        packed = is_compressible(tensor.dtype, tuple(tensor.shape))
        assert [f"{name}.{key}" in stored for key in keys] == [packed] * len(keys)
        if packed and kind == "4bit":  # unpack with bitsandbytes as AirLLM does, from the file's entries alone
            state = {key[len(name) :]: value for key, value in stored.items() if key.startswith(name + ".4bit")}
            again = functional.dequantize_nf4(stored[name], functional.QuantState.from_dict(state, device="cpu"))
            assert torch.equal(again.view(tensor.shape), oracle(tensor, kind))


@needs_bitsandbytes
@pytest.mark.parametrize("kind", ["4bit", "8bit"])
@pytest.mark.parametrize("count", [1, 63, 64, 2049, 5001])
def test_any_run_of_elements_reads_as_that_run_of_the_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, count: int
) -> None:
    monkeypatch.setattr(compression, "STEP", 1000)
    torch.manual_seed(count)
    tensor = torch.randn(count).half()
    folder = tmp_path / "model"
    folder.mkdir()
    safetensors.torch.save_file({"model.layers.0.w": tensor}, folder / "model.safetensors")
    index, reader = open_compressed(split(folder, kind))
    entry, whole = index["model.layers.0.w"], oracle(tensor, kind)
    with reader:
        for start in {0, count // 3, count - 1}:
            for stop in {start + 1, (start + count) // 2 + 1, count}:
                out = torch.full((stop - start,), math.nan, dtype=torch.float16)
                reader.read_into(entry, out, start * 2)
                assert torch.equal(out, whole[start:stop])
        for length, offset in ((count + 1, 0), (1, count * 2), (1, -2), (1, 1)):
            with pytest.raises(ValueError, match="no whole elements"):
                reader.read_into(entry, torch.empty(length, dtype=torch.float16), offset)


@needs_bitsandbytes
@pytest.mark.parametrize("kind", ["4bit", "8bit"])
def test_the_space_estimate_is_the_truth_within_a_few_hundred_bytes_a_tensor(tmp_path: Path, kind: str) -> None:
    shape = (257, 1031)
    folder = tmp_path / "model"
    folder.mkdir()
    safetensors.torch.save_file({"model.layers.0.w": torch.randn(shape).half()}, folder / "model.safetensors")
    taken = (split(folder, kind) / "model.layers.0.safetensors").stat().st_size
    estimate = compressed_bytes(torch.float16, shape, kind)
    assert abs(estimate - taken) < 700
    assert estimate < math.prod(shape) * (0.6 if kind == "4bit" else 1.02)


@needs_bitsandbytes
def test_bin_weights_compress_and_originals_can_go(tmp_path: Path) -> None:
    folder = write_bin(tmp_path / "model")
    target = split(folder, "8bit", delete_original=True)
    assert not list(folder.glob("*.bin"))
    assert split(folder, "8bit") == target
    index, reader = open_compressed(target)
    with reader:
        tensor = tensors()["lm_head.weight"]
        assert torch.equal(reader.read(index["lm_head.weight"]), oracle(tensor, "8bit"))


@needs_bitsandbytes
def test_plain_and_compressed_splits_do_not_pass_for_one_another(tmp_path: Path) -> None:
    folder = write_safetensors(tmp_path / "model")
    four = split(folder, "4bit")
    four.rename(folder / "splitted_model.8bit")
    index, reader = open_compressed(split(folder, "8bit"))
    with reader:
        tensor = tensors()["lm_head.weight"]
        assert torch.equal(reader.read(index["lm_head.weight"]), oracle(tensor, "8bit"))


@needs_bitsandbytes
def test_an_8_bit_split_by_airllm_has_no_dtypes_and_takes_the_one_asked_for(tmp_path: Path) -> None:
    tensor = torch.randn(40, 70).half()
    packed, state = functional.quantize_blockwise(tensor, blocksize=2048)
    name = "model.layers.0.w"
    content = {name: packed, f"{name}.8bit.absmax": state.absmax, f"{name}.8bit.code": state.code}
    safetensors.torch.save_file(content, tmp_path / "model.layers.0.safetensors")
    (tmp_path / "model.layers.0.safetensors.done").touch()
    for dtype in (None, torch.bfloat16):
        index, reader = open_compressed(tmp_path, dtype=dtype)
        with reader:
            assert index[name].dtype == (dtype or torch.float16)
            expected = functional.dequantize_blockwise(packed, state).float()
            assert torch.allclose(reader.read(index[name]).float(), expected, atol=2e-2)


@needs_bitsandbytes
@pytest.mark.parametrize("fault", ["no scales", "short scales", "short bytes", "other table", "text", "block", "no bytes"])
def test_parts_that_do_not_fit_together_are_refused(tmp_path: Path, fault: str) -> None:
    name = "model.layers.0.w"
    parts = compression.compress(name, torch.randn(16, 64), "4bit")
    state = f"{name}.4bit.quant_state.bitsandbytes__nf4"
    broken = {
        "no scales": {f"{name}.4bit.absmax": None},
        "short scales": {f"{name}.4bit.absmax": parts[f"{name}.4bit.absmax"][:-1].clone()},
        "short bytes": {name: parts[name][:-1].clone()},
        "other table": {f"{name}.4bit.quant_map": torch.zeros(8)},
        "text": {state: torch.zeros(5, dtype=torch.uint8)},
        "block": {state: torch.tensor(list(bytes(parts[state].tolist()).replace(b"64", b"32", 1)), dtype=torch.uint8)},
        "no bytes": {name: None},
    }[fault]  # fmt: skip
    content = {key: value for key, value in {**parts, **broken}.items() if value is not None}
    safetensors.torch.save_file(content, tmp_path / "model.layers.0.safetensors")
    (tmp_path / "model.layers.0.safetensors.done").touch()
    with pytest.raises(CheckpointError, match=r"model\.layers\.0\.w.*split"):
        open_compressed(tmp_path)


def test_a_plain_split_opens_through_the_same_door(tmp_path: Path) -> None:
    target = find_or_create_split(write_safetensors(tmp_path / "model"), progress=False)
    index, reader = open_compressed(target)
    with reader, TensorReader() as plain:
        for entry in index.values():
            assert torch.equal(reader.read(entry), plain.read(entry))
