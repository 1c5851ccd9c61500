"""The split format: what is written, what is believed, and what happens when something goes wrong on the way."""

from __future__ import annotations

import errno
import json
import logging
import os
import re
import shutil
import signal
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import safetensors
import safetensors.torch
import torch
from split_checkpoints import (
    LAYERS,
    assert_same,
    digests,
    read_split,
    tensors,
    write_airllm_split,
    write_bin,
    write_safetensors,
)

from airllm import folder_lock, layer_files, split_writer
from airllm.checkpoint import CheckpointIndex, TensorReader
from airllm.errors import CheckpointError, NotEnoughSpaceException, OptionError
from airllm.layer_files import find_or_create_split, split_and_save_layers
from airllm.split_manifest import MANIFEST, Manifest
from airllm.split_writer import SplitWriter

MODULES = ["model.embed_tokens", *(f"model.layers.{n}" for n in range(LAYERS)), "model.norm", "lm_head"]


def split(folder: Path, **options: Any) -> Path:
    return find_or_create_split(folder, progress=False, **options)


def assert_right(target: Path, seed: int = 0) -> None:
    """The split holds exactly the tensors of ``seed``, is believed, and opens as a checkpoint."""
    assert_same(read_split(target), tensors(seed))
    index = CheckpointIndex.open(target)
    with TensorReader(threads=1) as reader:
        assert_same({name: reader.read(entry) for name, entry in index.items()}, tensors(seed))


def count_writes(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The module files that are put under their final name from now on."""
    written: list[str] = []
    replace = os.replace

    def counting(source: Any, target: Any) -> None:
        replace(source, target)
        if str(target).endswith(".safetensors"):
            written.append(Path(target).name)

    monkeypatch.setattr(os, "replace", counting)
    return written


@pytest.mark.parametrize("shards", [1, 3])
def test_a_split_holds_the_checkpoints_own_keys_and_dtypes_in_airllms_layout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shards: int
) -> None:
    monkeypatch.setattr(split_writer, "CHUNK_BYTES", 100)  # most tensors take several
    folder = write_safetensors(tmp_path / "model", shards=shards)
    target = split_and_save_layers(folder, progress=False)
    assert target == folder / "splitted_model"
    assert {path.name for path in target.glob("*.safetensors")} == {f"{name}.safetensors" for name in MODULES}
    assert {path.name for path in target.glob("*.done")} == {f"{name}.safetensors.done" for name in MODULES}
    assert all(path.stat().st_size == 0 for path in target.glob("*.done"))
    with safetensors.safe_open(target / "model.layers.2.safetensors", framework="pt") as file:
        assert file.metadata() == {"format": "pt"}
        assert set(file.keys()) == {name for name in tensors() if name.startswith("model.layers.2.")}
    assert_right(target)
    for entry in CheckpointIndex.open(target).values():  # older readers of safetensors view bytes in place
        assert entry.offset % entry.dtype.itemsize == 0, entry


def test_a_split_can_lie_elsewhere_and_a_second_call_writes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_safetensors(tmp_path / "model")
    target = split(folder, layer_shards_saving_path=tmp_path / "disk2")
    assert target == tmp_path / "disk2" / "splitted_model" and not (folder / "splitted_model").exists()
    monkeypatch.setattr(layer_files, "_make_folder", lambda _: pytest.fail("a valid split was opened for writing"))
    assert split(folder, layer_shards_saving_path=tmp_path / "disk2") == target


@pytest.mark.parametrize(("shards", "legacy"), [(1, False), (3, False), (1, True), (3, True)])
def test_bin_checkpoints_are_split_without_running_their_pickles(tmp_path: Path, shards: int, legacy: bool) -> None:
    folder = write_bin(tmp_path / "model", shards=shards, legacy=legacy)
    target = split(folder)
    assert_right(target)
    write_bin(folder, seed=1, shards=shards, legacy=legacy)
    assert_right(split(folder), seed=1)


class Bomb:
    def __reduce__(self) -> Any:
        return os.mkdir, (os.environ["BOMB"],)


def test_a_bin_that_would_run_code_is_refused_and_does_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BOMB", str(tmp_path / "exploded"))
    folder = tmp_path / "model"
    folder.mkdir()
    torch.save({"model.norm.weight": Bomb()}, folder / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match="pytorch_model.bin.*safetensors copy"):
        split(folder)
    assert not (tmp_path / "exploded").exists()


@pytest.mark.parametrize("how", ["one byte less", "half", "empty", "pointer", "page", "missing", "index", "nested"])
def test_a_damaged_bin_is_refused_by_name_before_anything_is_written(tmp_path: Path, how: str) -> None:
    folder = write_bin(tmp_path / "model")
    path = folder / "pytorch_model-00002-of-00003.bin"
    whole = path.read_bytes()
    if how == "missing":
        path.unlink()
    elif how == "index":
        index = json.loads((folder / "pytorch_model.bin.index.json").read_text())
        index["weight_map"]["model.extra.weight"] = path.name
        (folder / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    elif how == "nested":
        torch.save({"state_dict": torch.load(path)}, path)
    else:
        broken = {"one byte less": whole[:-1], "half": whole[: len(whole) // 2], "empty": b"",
                  "pointer": b"version https://git-lfs.github.com/spec/v1\nsize 99\n", "page": b"<html>"}  # fmt: skip
        path.write_bytes(broken[how])
    with pytest.raises(CheckpointError, match=path.name):
        split(folder)
    assert not (folder / "splitted_model").exists()


def test_safetensors_are_split_where_both_kinds_are_there(tmp_path: Path) -> None:
    folder = write_safetensors(write_bin(tmp_path / "model", seed=1), seed=0)
    assert_right(split(folder), seed=0)


def test_changed_weights_of_the_same_shape_are_split_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = write_safetensors(tmp_path / "model", seed=0)
    assert_right(split(folder), seed=0)
    write_safetensors(folder, seed=1)
    assert_right(split(folder), seed=1)
    assert "split from other weights" in caplog.text


def test_a_time_cut_to_whole_seconds_by_an_archive_does_not_make_a_split_stale(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_safetensors(tmp_path / "model")
    split(folder)
    for path in folder.glob("*.safetensors"):
        second = path.stat().st_mtime_ns // 10**9 * 10**9
        os.utime(path, ns=(second, second))
    written = count_writes(monkeypatch)
    split(folder)
    assert written == []
    for path in folder.glob("*.safetensors"):
        os.utime(path, ns=(second + 2 * 10**9, second + 2 * 10**9))
    split(folder)
    assert len(written) == len(MODULES)


@pytest.mark.parametrize("how", ["one byte less", "one byte more", "empty", "gone", "no marker", "other header"])
def test_a_damaged_file_with_its_marker_is_found_and_only_that_one_written_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    folder = write_safetensors(tmp_path / "model")
    target = split(folder)
    path = target / "model.layers.1.safetensors"
    damage(path, how)
    written = count_writes(monkeypatch)
    split(folder)
    assert written == [path.name]
    assert_right(target)


def damage(path: Path, how: str) -> None:
    whole = path.read_bytes()
    if how == "gone":
        path.unlink()
    elif how == "no marker":
        path.with_name(path.name + ".done").unlink()
    elif how == "other header":
        path.write_bytes(whole.replace(b"q_proj", b"k_proj"))
    else:
        path.write_bytes({"one byte less": whole[:-1], "one byte more": whole + b"\0", "empty": b""}[how])


@pytest.mark.parametrize("how", ["one byte less", "gone", "no marker"])
def test_a_damaged_split_whose_originals_are_gone_is_an_error_that_says_so(tmp_path: Path, how: str) -> None:
    folder = write_safetensors(tmp_path / "model")
    target = split(folder, delete_original=True)
    damage(target / "model.layers.1.safetensors", how)
    with pytest.raises(CheckpointError, match=r"model\.layers\.1.*original weights are gone: download them again"):
        split(folder)


@pytest.mark.parametrize("content", ["", "{", "[]", '{"format": 1}', '{"format": 2}', "[" * 50_000, "types"])
def test_a_damaged_manifest_is_not_believed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: str) -> None:
    folder = write_safetensors(tmp_path / "model")
    target = split(folder)
    if content == "types":
        content = json.dumps({**json.loads((target / MANIFEST).read_text()), "files": [["x"]]})
    (target / MANIFEST).write_text(content)
    written = count_writes(monkeypatch)
    split(folder)
    assert len(written) == len(MODULES)
    assert_right(target)


def test_files_of_another_grouping_do_not_stay_beside_a_new_split(tmp_path: Path) -> None:
    folder = write_safetensors(tmp_path / "model")
    names = {"embed": "model.embed_tokens", "layer_prefix": "model.layers", "norm": "model.norm", "lm_head": "lm_head"}
    target = folder / "splitted_model"
    target.mkdir()
    safetensors.torch.save_file({"model.norm.weight": torch.zeros(8)}, target / "old.grouping.safetensors")
    (target / "old.grouping.safetensors.done").touch()
    (target / "notes.txt").write_text("mine")
    assert_right(split(folder, layer_names=names))
    assert (target / "notes.txt").read_text() == "mine"


def test_a_split_by_airllm_is_used_and_the_log_says_it_has_no_identity(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "model"
    target = write_airllm_split(folder, folder / "splitted_model")
    written = count_writes(monkeypatch)
    assert split(folder) == target
    assert written == [] and "has no identity" in caplog.text
    assert_right(target)
    for path in folder.glob("*.safetensors"):
        path.unlink()  # AirLLM's delete_original leaves such a folder
    assert split(folder) == target


@pytest.mark.parametrize("how", ["one byte less", "gone", "module gone", "no marker", "other shape", "other dtype"])
def test_a_split_by_airllm_that_does_not_fit_the_checkpoint_is_made_again(tmp_path: Path, how: str) -> None:
    folder = tmp_path / "model"
    target = write_airllm_split(folder, folder / "splitted_model")
    path = target / "model.layers.1.safetensors"
    if how == "module gone":
        path.unlink()
        path.with_name(path.name + ".done").unlink()
    elif how.startswith("other"):
        content = safetensors.torch.load_file(path)
        name = "model.layers.1.self_attn.q_proj.weight"
        content[name] = content[name].float() if how == "other dtype" else content[name][:6].contiguous()
        safetensors.torch.save_file(content, path)
    else:
        damage(path, how)
    assert_right(split(folder))
    assert Manifest.read(target) is not None


class Killed(BaseException):
    """Stands for a kill: clean-up may run, but nothing after it."""


def kill_at(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, call: int, error: BaseException) -> None:
    """Raise ``error`` instead of the ``call``-th call (from 1) of ``owner.name``."""
    real, calls = getattr(owner, name), [0]

    def failing(*args: Any, **kwargs: Any) -> Any:
        calls[0] += 1
        if calls[0] == call:
            raise error
        return real(*args, **kwargs)

    monkeypatch.setattr(owner, name, failing)


# Each module is an fsync and a replace of its file, an fsync and a replace of the manifest, a touch of its marker.
@pytest.mark.parametrize(("where", "call"), [("fsync", 7), ("replace", 4), ("replace", 5), ("touch", 4), ("replace", 13)])
def test_a_split_stopped_anywhere_leaves_no_partial_file_and_goes_on_from_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str, call: int
) -> None:
    folder = write_safetensors(tmp_path / "model")
    clean = digests(split(folder, layer_shards_saving_path=tmp_path / "clean"))
    with monkeypatch.context() as patch, pytest.raises(Killed):
        kill_at(patch, Path if where == "touch" else os, where, call, Killed())
        split(folder)
    target = folder / "splitted_model"
    left = digests(target)
    assert left and all(clean[name] == digest for name, digest in left.items())
    finished = {name[: -len(".done")] for name in left if name.endswith(".done")}
    written = count_writes(monkeypatch)
    split(folder)
    assert set(written) == {f"{name}.safetensors" for name in MODULES} - finished
    assert digests(target) == clean
    assert not list(target.glob(".*.part"))


def in_child(work: Callable[[], object]) -> int:
    """Run ``work`` in a forked process (a new interpreter would spend seconds on importing torch). Returns its pid."""
    child = os.fork()
    if child == 0:
        signal.alarm(60)
        try:
            work()
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    return child


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")
def test_a_process_killed_with_sigkill_in_the_middle_of_a_write_is_resumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_safetensors(tmp_path / "model")
    clean = digests(split(folder, layer_shards_saving_path=tmp_path / "clean"))
    real, calls = SplitWriter._tensor_pieces, [0]

    def half_then_kill(self: SplitWriter, key: str, reader: TensorReader) -> Iterator[memoryview]:
        calls[0] += 1
        for piece in real(self, key, reader):
            yield piece[: len(piece) // 2] if calls[0] == 10 else piece
            if calls[0] == 10:
                os.kill(os.getpid(), signal.SIGKILL)

    with monkeypatch.context() as patch:
        patch.setattr(SplitWriter, "_tensor_pieces", half_then_kill)
        _, status = os.waitpid(in_child(lambda: split(folder)), 0)
    assert os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL
    target = folder / "splitted_model"
    left = digests(target)
    assert 0 < len(left) < len(clean) and all(clean[name] == digest for name, digest in left.items())
    with pytest.raises(CheckpointError, match="not finished"):
        Manifest.read(target).prove(target, None, None)  # type: ignore[union-attr]
    assert digests(split(folder)) == clean
    assert not list(target.glob(".*.part"))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")
@pytest.mark.parametrize("fallback", [False, True])
def test_two_processes_that_split_the_same_folder_write_each_file_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fallback: bool
) -> None:
    folder = write_safetensors(tmp_path / "model")
    if fallback:
        monkeypatch.setattr(folder_lock, "fcntl", None)

    def work(number: int) -> None:
        real, written = os.replace, count_writes(monkeypatch)
        counting = os.replace
        monkeypatch.setattr(os, "replace", lambda a, b: (time.sleep(0.01), counting(a, b)))
        split(folder)
        monkeypatch.setattr(os, "replace", real)
        (tmp_path / f"count{number}").write_text(str(len(written)))

    children = [in_child(lambda number=number: work(number)) for number in range(2)]
    assert [os.waitpid(child, 0)[1] for child in children] == [0, 0]
    counts = [int((tmp_path / f"count{number}").read_text()) for number in range(2)]
    assert sorted(counts) == [0, len(MODULES)]
    assert_right(folder / "splitted_model")
    assert not (folder / "splitted_model" / "airllm_split.lock.held").exists()


def test_a_lock_that_is_never_freed_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for without in (False, True):
        if without:
            monkeypatch.setattr(folder_lock, "fcntl", None)
        with folder_lock.folder_lock(tmp_path / "lock"):
            with pytest.raises(CheckpointError, match="lock.* was held by another process for 0 s"):
                with folder_lock.folder_lock(tmp_path / "lock", timeout_s=0.15):
                    pytest.fail("two holders")
        with folder_lock.folder_lock(tmp_path / "lock", timeout_s=0.15):
            pass


def test_a_full_disk_is_foreseen_with_a_true_estimate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_safetensors(tmp_path / "model")
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=1000))
    with pytest.raises(NotEnoughSpaceException, match=r"needs \d+ B in .*splitted_model, 1000 B are free") as caught:
        split(folder)
    assert not list((folder / "splitted_model").glob("*.safetensors*"))
    needed = int(str(caught.value).split("needs ")[1].split(" B")[0])
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=needed))
    taken = sum(-(-path.stat().st_size // 4096) * 4096 for path in split(folder).glob("*"))
    assert taken <= needed <= taken + (1 << 16)


def test_a_stale_split_counts_as_free_space_and_survives_when_that_is_not_enough(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_safetensors(tmp_path / "model")
    target = split(folder)
    before = digests(target)
    write_safetensors(folder, seed=1)
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=0))
    with pytest.raises(NotEnoughSpaceException, match="of an old split there can be used again") as caught:
        split(folder)
    assert digests(target) == before
    needed, reclaimed = (int(number) for number in re.findall(r"needs (\d+) B.* and (\d+) B of", str(caught.value))[0])
    assert reclaimed == sum(path.stat().st_size for path in target.glob("*.safetensors"))
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=needed - reclaimed))
    assert_right(split(folder), seed=1)


@pytest.mark.parametrize("call", [1, 3, 5, 23])
def test_a_disk_that_fills_up_while_writing_is_named_and_the_split_goes_on_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: int
) -> None:
    folder = write_safetensors(tmp_path / "model")
    with monkeypatch.context() as patch:
        kill_at(patch, os, "fsync", call, OSError(errno.ENOSPC, "No space left on device"))
        with pytest.raises(NotEnoughSpaceException, match=r"is full: .* needs \d+ B, \d+ B are free"):
            split(folder)
    assert not list((folder / "splitted_model").glob(".*.part"))
    assert_right(split(folder))


def test_a_folder_that_cannot_be_written_names_the_way_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_safetensors(tmp_path / "model")

    def refuse(*_: Any, **__: Any) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(Path, "mkdir", refuse)
    with pytest.raises(CheckpointError, match="cannot be written.*layer_shards_saving_path"):
        split(folder)


def test_two_checkpoints_do_not_take_turns_in_one_saving_path(tmp_path: Path) -> None:
    first, second = write_safetensors(tmp_path / "a"), write_safetensors(tmp_path / "b", seed=1)
    target = split(first, layer_shards_saving_path=tmp_path / "disk")
    before = digests(target)
    with pytest.raises(CheckpointError, match="holds the split of .*a: give another layer_shards_saving_path"):
        split(second, layer_shards_saving_path=tmp_path / "disk")
    assert digests(target) == before
    shutil.rmtree(first)
    assert_right(split(second, layer_shards_saving_path=tmp_path / "disk"), seed=1)


@pytest.mark.parametrize("name", ["", ".", "..", "../x", "a/b", "/tmp/x", "a\\b"])
def test_the_name_of_the_split_folder_cannot_lead_elsewhere(tmp_path: Path, name: str) -> None:
    folder = write_safetensors(tmp_path / "model")
    with pytest.raises(OptionError, match="must be the name of one folder"):
        split(folder, splitted_model_dir_name=name)


@pytest.mark.parametrize("options", [{"compression": "4 bit"}, {"compression": "int8"}])
def test_an_unknown_compression_is_refused(tmp_path: Path, options: dict[str, str]) -> None:
    with pytest.raises(OptionError, match="use 4bit or 8bit"):
        split(write_safetensors(tmp_path / "model"), **options)


@pytest.mark.parametrize("call", [split, split_and_save_layers])
def test_a_place_that_is_no_checkpoint_is_refused(tmp_path: Path, call: Callable[..., Path]) -> None:
    with pytest.raises(CheckpointError, match="not a folder"):
        call(tmp_path / "none")
    with pytest.raises(CheckpointError, match="no weights"):
        call(tmp_path)


def test_a_split_reports_what_it_did(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    split(write_safetensors(tmp_path / "model"))
    assert f"into {len(MODULES)} modules" in caplog.text
