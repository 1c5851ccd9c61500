"""Every way in which weight files arrive broken is an error with file, sizes and remedy; whole ones read bit for bit."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest
import safetensors
import safetensors.torch
import torch

from airllm import checkpoint as checkpoint_module
from airllm.checkpoint import CheckpointIndex, TensorEntry, TensorReader, has_bin_weights, plan_scatter
from airllm.errors import CheckpointError
from airllm.safetensors_format import DTYPES, NAMES, build_header

INDEX = "model.safetensors.index.json"


def some_tensors() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return {
        "a.weight": torch.randn(7, 5),
        "b.weight": torch.randn(4, 3, 2).to(torch.bfloat16),
        "b.bias": torch.randn(3).half(),
        "scalar": torch.tensor(2.5),
        "empty": torch.zeros(0, 6),
        "flags": torch.tensor([True, False, True]),
    }


def write_single(folder: Path) -> Path:
    path = folder / "model.safetensors"
    safetensors.torch.save_file(some_tensors(), path, metadata={"format": "pt"})
    return path


def write_shards(folder: Path) -> list[Path]:
    tensors, paths, weight_map = some_tensors(), [], {}
    names = list(tensors)
    for number, part in enumerate((names[:2], names[2:4], names[4:]), 1):
        paths.append(folder / f"model-0000{number}-of-00003.safetensors")
        safetensors.torch.save_file({name: tensors[name] for name in part}, paths[-1])
        weight_map.update({name: paths[-1].name for name in part})
    (folder / INDEX).write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": weight_map}))
    return paths


def write_raw(path: Path, header: Any, data: bytes = b"") -> None:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(raw).to_bytes(8, "little") + raw + data)


def assert_reads_back(folder: Path) -> None:
    index, expected = CheckpointIndex.open(folder), some_tensors()
    with TensorReader(threads=2) as reader:
        assert set(index) == set(expected)
        for name, tensor in expected.items():
            got = reader.read(index[name])
            assert got.dtype == tensor.dtype and got.shape == tensor.shape
            assert torch.equal(got, tensor)
    assert index.total_bytes == sum(tensor.nbytes for tensor in expected.values())


@pytest.mark.parametrize("write", [write_single, write_shards])
def test_a_whole_checkpoint_reads_back_bit_for_bit(tmp_path: Path, write: Any) -> None:
    write(tmp_path)
    assert_reads_back(tmp_path)


def test_a_split_folder_opens_as_a_checkpoint(tmp_path: Path) -> None:
    for path in write_shards(tmp_path):
        path.with_name(path.name + ".done").touch()
    (tmp_path / INDEX).unlink()
    assert_reads_back(tmp_path)


def test_a_split_folder_with_an_unmarked_file_is_refused(tmp_path: Path) -> None:
    for path in write_shards(tmp_path)[:2]:
        path.with_name(path.name + ".done").touch()
    with pytest.raises(CheckpointError, match=r"not finished.*model-00003-of-00003"):
        CheckpointIndex.open(tmp_path)


@pytest.mark.parametrize("name", sorted(DTYPES))
def test_every_safetensors_dtype_that_torch_knows_reads_as_the_reference_reader_does(tmp_path: Path, name: str) -> None:
    dtype = DTYPES[name]
    raw = torch.arange(6 * 4 * dtype.itemsize, dtype=torch.uint8) % 2
    tensor = raw.view(dtype).view(6, 4)
    header = build_header([("x", dtype, (6, 4)), ("none", dtype, (0, 2)), ("one", dtype, ())][: 2 if name == "F4" else 3], {})
    extra = b"" if name == "F4" else bytes(raw[: dtype.itemsize].tolist())
    (tmp_path / "model.safetensors").write_bytes(header + bytes(raw.tolist()) + extra)
    index = CheckpointIndex.open(tmp_path)
    with TensorReader() as reader:
        got = {key: reader.read(entry) for key, entry in index.items()}
    with safetensors.safe_open(tmp_path / "model.safetensors", framework="pt") as reference:
        assert set(reference.keys()) == set(got)
        for key, value in got.items():
            expected = reference.get_tensor(key)
            assert (expected.dtype, expected.shape) == (value.dtype, value.shape)
            assert torch.equal(expected.reshape(-1).view(torch.uint8), value.reshape(-1).view(torch.uint8))
    assert torch.equal(got["x"].view(torch.uint8), tensor.view(torch.uint8))
    assert NAMES[dtype] == name


@pytest.mark.parametrize("shard", [0, 1, 2])
@pytest.mark.parametrize("how", ["one byte less", "one byte more", "half", "header only half", "empty", "7 bytes"])
def test_a_shard_of_the_wrong_length_is_refused_with_both_sizes(tmp_path: Path, shard: int, how: str) -> None:
    path = write_shards(tmp_path)[shard]
    whole = path.read_bytes()
    pieces = {
        "one byte less": whole[:-1], "one byte more": whole + b"\0", "half": whole[: len(whole) // 2],
        "header only half": whole[:40], "empty": b"", "7 bytes": whole[:7],
    }  # fmt: skip
    path.write_bytes(pieces[how])
    with pytest.raises(CheckpointError, match="download the file again") as caught:
        CheckpointIndex.open(tmp_path)
    assert path.name in str(caught.value)
    assert f"{len(pieces[how])} B" in str(caught.value)


def test_a_git_lfs_pointer_says_so_and_names_the_command(tmp_path: Path) -> None:
    path = write_shards(tmp_path)[1]
    path.write_text(f"version https://git-lfs.github.com/spec/v1\noid sha256:{'0' * 64}\nsize 4986211280\n")
    with pytest.raises(CheckpointError, match=r"git-lfs pointer.*4986211280 B.*git lfs pull"):
        CheckpointIndex.open(tmp_path)


@pytest.mark.parametrize("page", ["<!DOCTYPE html><html></html>", "\n  <html lang=en>", "<?xml version='1.0'?><Error/>"])
def test_a_web_page_in_the_place_of_weights_says_so(tmp_path: Path, page: str) -> None:
    write_single(tmp_path).write_text(page)
    with pytest.raises(CheckpointError, match="web page"):
        CheckpointIndex.open(tmp_path)


def test_a_pickled_checkpoint_under_a_safetensors_name_says_so(tmp_path: Path) -> None:
    torch.save(some_tensors(), tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match="zip archive"):
        CheckpointIndex.open(tmp_path)


def entry(dtype: Any = "F32", shape: Any = (2, 2), offsets: Any = (0, 16)) -> dict[str, Any]:
    shape, offsets = (list(value) if isinstance(value, tuple) else value for value in (shape, offsets))
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


@pytest.mark.parametrize(
    ("header", "complaint"),
    [
        ({"x": entry(offsets=(0, 1 << 40))}, "needs 16 B, its data_offsets hold"),
        ({"x": entry(shape=(1 << 20, 1 << 20), offsets=(0, 1 << 42))}, "cut short"),
        ({"x": entry(offsets=(16, 32))}, "cut short"),
        ({"x": entry(), "y": entry()}, "overlaps"),
        ({"x": entry(), "y": entry(shape=(1,), offsets=(12, 16))}, "overlaps"),
        ({"x": entry(shape=(1,), offsets=(12, 16))}, "gap"),
        ({"x": entry(shape=(1,), offsets=(0, 4)), "y": entry(shape=(1,), offsets=(12, 16))}, "gap"),
        ({"x": entry(offsets=(16, 0))}, "data_offsets hold -16 B"),
        ({"x": entry(offsets=(-16, 0))}, "impossible data_offsets"),
        ({"x": entry(offsets=[0])}, "impossible data_offsets"),
        ({"x": entry(offsets=[0.0, 16.0])}, "impossible data_offsets"),
        ({"x": entry(offsets="0,16")}, "impossible data_offsets"),
        ({"x": entry(shape=(2, 3))}, "needs 24 B"),
        ({"x": entry(dtype="F16")}, "needs 8 B"),
        ({"x": entry(dtype="F12")}, "torch .* does not know"),
        ({"x": entry(dtype=["F32"])}, "torch .* does not know"),
        ({"x": entry(shape=(-2, -2))}, "impossible shape"),
        ({"x": entry(shape=(True, 4))}, "impossible shape"),
        ({"x": entry(shape=(1 << 63, 0), offsets=(0, 0))}, "impossible shape"),
        ({"x": entry(shape=(1 << 40, 1 << 40, 0), offsets=(0, 0))}, "impossible shape"),
        ({"x": entry(shape=[1] * 1000)}, "impossible shape"),
        ({"x": entry(shape="4")}, "impossible shape"),
        ({"x": {"dtype": "F32", "shape": [2, 2]}}, "no dtype, shape and data_offsets"),
        ({"x": None}, "no dtype, shape and data_offsets"),
        ({"x": entry(dtype="F4", shape=(31,))}, "last dimension must be even"),
        ({"__metadata__": {"n": 1}, "x": entry()}, "__metadata__"),
        ({"__metadata__": "pt", "x": entry()}, "__metadata__"),
        ([1, 2], "no table of tensors"),
        (b'{"x": ', "not JSON"),
        (b"\xff\xfe{}", "not JSON"),
        (b"[" * 50_000, "not JSON"),
        (b'{"x": ' + json.dumps(entry()).encode() + b', "x": ' + json.dumps(entry()).encode() + b"}", "x more than once"),
        ({}, "holds more than its header names"),
    ],
)  # fmt: skip
def test_a_header_that_lies_is_refused(tmp_path: Path, header: Any, complaint: str) -> None:
    write_raw(tmp_path / "model.safetensors", header, b"\0" * 16)
    with pytest.raises(CheckpointError, match=complaint) as caught:
        CheckpointIndex.open(tmp_path)
    assert "model.safetensors" in str(caught.value)


@pytest.mark.parametrize("length", [100_000_001, 1 << 40, (1 << 64) - 1])
def test_a_huge_header_length_is_refused_without_reading_it(tmp_path: Path, length: int) -> None:
    (tmp_path / "model.safetensors").write_bytes(length.to_bytes(8, "little") + b"{}" * 100)
    with pytest.raises(CheckpointError, match=f"header of {length} B.*100000000 B"):
        CheckpointIndex.open(tmp_path)


def test_a_missing_shard_is_listed(tmp_path: Path) -> None:
    paths = write_shards(tmp_path)
    paths[0].unlink()
    paths[2].unlink()
    with pytest.raises(CheckpointError, match="2 of 3 weight files are missing: model-00001-of-00003.*model-00003-of"):
        CheckpointIndex.open(tmp_path)


def test_a_dangling_link_counts_as_missing(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").symlink_to(tmp_path / "blobs" / "gone")
    with pytest.raises(CheckpointError, match="missing.*model.safetensors"):
        CheckpointIndex.open(tmp_path)


def test_a_tensor_that_the_index_names_but_its_shard_lacks_is_listed(tmp_path: Path) -> None:
    paths = write_shards(tmp_path)
    index = json.loads((tmp_path / INDEX).read_text())
    index["weight_map"]["c.weight"] = paths[0].name
    (tmp_path / INDEX).write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=r"c\.weight \(model-00001-of-00003\.safetensors\)"):
        CheckpointIndex.open(tmp_path)


@pytest.mark.parametrize("content", ["", "{", "<html>", "[]", '{"weight_map": []}', '{"weight_map": {}}', "[" * 50_000])
def test_an_index_that_is_no_index_is_refused(tmp_path: Path, content: str) -> None:
    write_shards(tmp_path)
    (tmp_path / INDEX).write_text(content)
    with pytest.raises(CheckpointError, match=INDEX):
        CheckpointIndex.open(tmp_path)


@pytest.mark.parametrize(
    "name", ["../x.safetensors", "/x.safetensors", "a/../../x.safetensors", "..\\x.safetensors", "C:x.safetensors",
             "x.bin", "config.json", "", 3, None, "\0.safetensors"],
)  # fmt: skip
def test_an_index_cannot_point_outside_the_folder(tmp_path: Path, name: Any) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    write_shards(folder)
    (tmp_path / "x.safetensors").write_bytes((folder / "model-00001-of-00003.safetensors").read_bytes())
    index = json.loads((folder / INDEX).read_text())
    index["weight_map"]["a.weight"] = name
    (folder / INDEX).write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match="do not trust this checkpoint"):
        CheckpointIndex.open(folder)


def test_shards_without_their_index_ask_for_it(tmp_path: Path) -> None:
    write_shards(tmp_path)
    (tmp_path / INDEX).unlink()
    with pytest.raises(CheckpointError, match=f"no {INDEX}"):
        CheckpointIndex.open(tmp_path)


def test_the_index_decides_between_two_shards_that_hold_the_same_name(tmp_path: Path) -> None:
    paths = write_shards(tmp_path)
    safetensors.torch.save_file({**safetensors.torch.load_file(paths[2]), "a.weight": torch.zeros(7, 5)}, paths[2])
    assert_reads_back(tmp_path)


@pytest.mark.parametrize("what", ["nothing", "a file", "an empty folder"])
def test_a_place_without_weights_is_refused(tmp_path: Path, what: str) -> None:
    place = tmp_path / "model"
    if what == "a file":
        place.write_text("x")
    elif what == "an empty folder":
        place.mkdir()
    with pytest.raises(CheckpointError, match="not a folder|no weights"):
        CheckpointIndex.open(place)


def test_safetensors_win_over_bin(tmp_path: Path) -> None:
    torch.save({"other": torch.zeros(1)}, tmp_path / "pytorch_model.bin")
    assert has_bin_weights(tmp_path)
    with pytest.raises(CheckpointError, match=r"\.bin weights only.*split"):
        CheckpointIndex.open(tmp_path)
    write_single(tmp_path)
    assert not has_bin_weights(tmp_path)
    assert_reads_back(tmp_path)


def test_identity_changes_with_content_and_not_otherwise(tmp_path: Path) -> None:
    path = write_single(tmp_path)
    before = CheckpointIndex.open(tmp_path).identity()
    assert set(before) == {"model.safetensors"}
    assert set(before["model.safetensors"]) == {"size", "header_sha256", "mtime_ns"}
    assert CheckpointIndex.open(tmp_path).identity() == before
    safetensors.torch.save_file({**some_tensors(), "a.weight": torch.zeros(5, 7)}, path)
    assert CheckpointIndex.open(tmp_path).identity()["model.safetensors"]["header_sha256"] != (
        before["model.safetensors"]["header_sha256"]
    )


@pytest.mark.parametrize("portable", [False, True])
def test_parts_of_a_tensor_read_from_many_threads_are_the_right_parts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, portable: bool
) -> None:
    if portable:
        monkeypatch.delattr("os.preadv", raising=False)
    monkeypatch.setattr(checkpoint_module, "READ_CHUNK_BYTES", 1000)
    tensor = torch.arange(50_000, dtype=torch.int32)
    safetensors.torch.save_file({"x": tensor}, tmp_path / "model.safetensors")
    entry = CheckpointIndex.open(tmp_path)["x"]
    out = torch.full((50_000,), -1, dtype=torch.int32)
    with TensorReader(threads=4) as reader:
        reader.run([
            lambda start=start: reader.read_into(entry, out[start : start + 500], start * 4)
            for start in range(0, 50_000, 500)
        ])  # fmt: skip
        assert reader.bytes_read == tensor.nbytes and reader.reads == 100
    assert torch.equal(out, tensor)


def test_scratch_is_lent_to_one_at_a_time_and_again() -> None:
    with TensorReader() as reader:
        with reader.scratch(64) as one, reader.scratch(64) as other:
            lent = {one.data_ptr(), other.data_ptr()}
            assert len(lent) == 2
        with reader.scratch(64) as one, reader.scratch(64) as other:
            assert {one.data_ptr(), other.data_ptr()} == lent
        with torch.inference_mode(), reader.scratch(32) as again, reader.scratch(1000) as larger:
            assert again.shape == (32,) and again.data_ptr() in lent and larger.shape == (1000,)
            assert not larger.is_inference()
        with pytest.raises(KeyError), reader.scratch(1000) as failed:
            address = failed.data_ptr()
            raise KeyError
        with reader.scratch(1000) as after:
            assert after.data_ptr() == address
        with reader.scratch(64):
            reader.close()
            assert not reader._scratch
    assert not reader._scratch, "one that was lent when the reader was closed is not kept either"


@pytest.mark.parametrize("portable", [False, True])
def test_neighbours_in_a_file_are_read_as_one_run_into_scattered_places(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, portable: bool
) -> None:
    if portable:
        monkeypatch.delattr("os.preadv", raising=False)
    monkeypatch.setattr(checkpoint_module, "IOVEC_LIMIT", 3)
    tensors = {f"t{number:02d}": torch.randn(number + 1) for number in range(12)}
    safetensors.torch.save_file(tensors, tmp_path / "model.safetensors")
    index = CheckpointIndex.open(tmp_path)
    outs = {name: torch.full_like(tensor, float("nan")) for name, tensor in tensors.items()}
    order = sorted(tensors, key=lambda name: index[name].offset)
    wanted = [(index[name], 0, outs[name]) for name in order if name != "t05"]
    wanted += [(index["t05"], 8, outs["t05"][2:]), (index["t05"], 0, outs["t05"][:2])]  # backwards: no neighbours
    planned = plan_scatter(wanted)
    assert len(planned) == 4 and sum(len(run.views) for run in planned) == 13
    with TensorReader(threads=1) as reader:
        for run in planned:
            reader.scatter(run)
        assert all(torch.equal(outs[name], tensor) for name, tensor in tensors.items())
        assert reader.bytes_read == sum(tensor.nbytes for tensor in tensors.values())
        path = tmp_path / "model.safetensors"
        path.write_bytes(path.read_bytes()[:-4])
        with pytest.raises(CheckpointError, match="changed since it was checked"):
            reader.scatter(max(planned, key=lambda run: run.offset))
    with pytest.raises(ValueError, match="outside its 4 B"):
        plan_scatter([(index["t00"], 0, torch.empty(2))])


def test_a_file_cut_after_it_was_proved_is_an_error_and_not_zeros(tmp_path: Path) -> None:
    path = write_single(tmp_path)
    index = CheckpointIndex.open(tmp_path)
    path.write_bytes(path.read_bytes()[:-4])
    last = max(index.values(), key=lambda entry: entry.offset)
    with TensorReader() as reader, pytest.raises(CheckpointError, match="changed since it was checked"):
        reader.read(last)


def test_a_file_removed_after_it_was_proved_is_an_error(tmp_path: Path) -> None:
    path = write_single(tmp_path)
    index = CheckpointIndex.open(tmp_path)
    path.unlink()
    with TensorReader() as reader, pytest.raises(CheckpointError, match="cannot be opened"):
        reader.read(index["a.weight"])


def test_reads_outside_the_tensor_are_refused(tmp_path: Path) -> None:
    write_single(tmp_path)
    entry = CheckpointIndex.open(tmp_path)["a.weight"]
    with TensorReader() as reader:
        for out, offset in ((torch.empty(36), 0), (torch.empty(1), 140), (torch.empty(1), -4)):
            with pytest.raises(ValueError, match="outside its 140 B"):
                reader.read_into(entry, out, offset)
        with pytest.raises(ValueError, match="contiguous CPU tensor"):
            reader.read_into(entry, torch.empty(5, 7).T)


def test_the_first_exception_of_a_job_comes_out_after_all_jobs_have_stopped() -> None:
    running = threading.Event()
    ended: list[int] = []

    def fail() -> None:
        running.wait(5)
        raise KeyError("the original")

    def slow() -> None:
        running.set()
        threading.Event().wait(0.2)
        ended.append(1)

    with TensorReader(threads=2) as reader:
        with pytest.raises(KeyError, match="the original"):
            reader.run([fail, slow] + [lambda: ended.append(2)] * 50)
        assert ended == [1]  # the running one ended, those that had not begun were dropped
        reader.run([lambda: ended.append(3)] * 3)
        assert ended.count(3) == 3


def test_a_job_may_run_jobs_itself_without_waiting_for_its_own_pool() -> None:
    done: list[int] = []
    with TensorReader(threads=1) as reader:
        outer = [lambda: reader.run([lambda: done.append(1)] * 3)] * 3
        thread = threading.Thread(target=reader.run, args=(outer,), daemon=True)
        thread.start()
        thread.join(10)
        assert not thread.is_alive() and len(done) == 9


def test_a_closed_reader_says_so_and_closes_twice(tmp_path: Path) -> None:
    write_single(tmp_path)
    entry = CheckpointIndex.open(tmp_path)["a.weight"]
    reader = TensorReader()
    reader.read(entry)
    reader.close()
    reader.close()
    for use in (lambda: reader.read(entry), lambda: reader.run([lambda: None] * 2)):
        with pytest.raises(CheckpointError, match="closed"):
            use()


def test_opening_a_checkpoint_reads_headers_only(tmp_path: Path) -> None:
    header = build_header([("x", torch.uint8, (1 << 36,))], {})
    with open(tmp_path / "model.safetensors", "wb") as file:
        file.write(header)
        file.truncate(len(header) + (1 << 36))  # 64 GiB without a block on the disk
    index = CheckpointIndex.open(tmp_path)
    assert index.total_bytes == 1 << 36
    tail = torch.ones(4, dtype=torch.uint8)
    with TensorReader() as reader:
        reader.read_into(index["x"], tail, (1 << 36) - 4)
    assert tail.tolist() == [0, 0, 0, 0]
    assert isinstance(index["x"], TensorEntry)
