"""delete_original removes what was split and read back right, and nothing else."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from split_checkpoints import assert_same, read_split, tensors, write_airllm_split, write_bin, write_safetensors

import airllm
from airllm import layer_files, split_originals
from airllm.errors import CheckpointError, OptionError
from airllm.layer_files import find_or_create_split
from airllm.split_manifest import MANIFEST


def split(folder: Path, **options: Any) -> Path:
    return find_or_create_split(folder, progress=False, **options)


def everything(root: Path) -> set[str]:
    return {path.relative_to(root).as_posix() for path in root.rglob("*") if not path.is_dir()}


@pytest.mark.parametrize("write", [write_safetensors, write_bin])
@pytest.mark.parametrize("shards", [1, 3])
def test_ordinary_weight_files_go_and_all_other_files_stay(tmp_path: Path, write: Any, shards: int) -> None:
    folder = write(tmp_path / "model", shards=shards)
    weights = {path.name for path in folder.iterdir() if path.suffix in (".safetensors", ".bin")}
    for bystander in ("config.json", "tokenizer.json", "consolidated.pth", "adapter.bin", "notes.safetensors.txt"):
        (folder / bystander).write_text("mine")
    before = everything(tmp_path)
    target = split(folder, delete_original=True)
    gone = before - everything(tmp_path)
    assert gone == {f"model/{name}" for name in weights}
    assert_same(read_split(target), tensors())
    assert split(folder, delete_original=True) == target == split(folder)  # the split stands for the weights now


def test_what_is_removed_is_said_with_its_bytes(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = write_safetensors(tmp_path / "model")
    nbytes = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    with caplog.at_level("WARNING"):
        split(folder, delete_original=True)
    assert f"{nbytes} B in all" in caplog.text and "model-00001" in caplog.text


def test_what_comes_with_the_package_is_not_removed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    shipped = write_safetensors(tmp_path / "shipped")
    monkeypatch.setattr(airllm, "tiny_model_path", lambda: shipped)
    before = everything(tmp_path)
    (tmp_path / "link").symlink_to(shipped)
    for folder in (shipped, tmp_path / "link"):
        with pytest.raises(OptionError, match="comes with airllm itself"):
            split(folder, delete_original=True)
    assert everything(tmp_path) == before


def test_a_safetensors_file_that_the_index_does_not_name_stays(tmp_path: Path) -> None:
    folder = write_safetensors(tmp_path / "model")
    write_safetensors(tmp_path / "other", shards=1)
    os.replace(tmp_path / "other" / "model.safetensors", folder / "consolidated.safetensors")
    split(folder, delete_original=True)
    assert (folder / "consolidated.safetensors").exists()
    assert not list(folder.glob("model-*.safetensors"))


def test_an_existing_split_is_read_back_before_the_originals_go(tmp_path: Path) -> None:
    folder = write_safetensors(tmp_path / "model")
    target = split(folder)
    path = target / "model.layers.1.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1  # same size, same header: only the hash shows it
    path.write_bytes(content)
    before = everything(tmp_path)
    with pytest.raises(CheckpointError, match=r"model\.layers\.1\.safetensors reads back with sha256.*nothing was deleted"):
        split(folder, delete_original=True)
    assert everything(tmp_path) == before


def test_nothing_goes_when_a_byte_was_lost_between_writing_and_reading_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_safetensors(tmp_path / "model")
    monkeypatch.setattr(split_originals, "file_digest", lambda path: "0" * 64)
    with pytest.raises(CheckpointError, match="nothing was deleted"):
        split(folder, delete_original=True)
    assert len(list(folder.glob("model-*.safetensors"))) == 3


def test_weights_that_changed_after_the_split_do_not_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_safetensors(tmp_path / "model")
    split(folder)
    write_safetensors(folder, seed=1)
    monkeypatch.setattr(layer_files, "is_usable", lambda *_: True)  # as if the first check had been fooled
    with pytest.raises(CheckpointError, match="nothing was deleted"):
        split(folder, delete_original=True)
    assert len(list(folder.glob("model-*.safetensors"))) == 3


def test_a_split_without_a_manifest_deletes_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = tmp_path / "model"
    write_airllm_split(folder, folder / "splitted_model")
    split(folder, delete_original=True)
    assert len(list(folder.glob("model-*.safetensors"))) == 3
    assert f"has no {MANIFEST}, so the original weights are kept" in caplog.text


def test_new_weights_half_downloaded_do_not_hide_behind_the_old_split(tmp_path: Path) -> None:
    folder = write_safetensors(tmp_path / "model")
    split(folder, delete_original=True)
    write_safetensors(folder, seed=1)
    (folder / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(CheckpointError, match="is not the file that was split"):
        split(folder)


def test_a_deletion_stopped_half_way_leaves_a_model_that_loads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_safetensors(tmp_path / "model")
    real, calls = Path.unlink, [0]

    def stop(self: Path, missing_ok: bool = False) -> None:
        if self.parent == folder:
            calls[0] += 1
            if calls[0] == 2:
                raise KeyboardInterrupt
        real(self, missing_ok=missing_ok)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Path, "unlink", stop)
        split(folder, delete_original=True)
    assert len(list(folder.glob("model-*.safetensors"))) == 2
    assert_same(read_split(split(folder)), tensors())


def make_hub_cache(tmp_path: Path) -> tuple[Path, Path]:
    """A cached model: its snapshot links to blobs. Returns (the model's cache folder, the snapshot)."""
    model = tmp_path / "hub" / "models--org--model"
    snapshot = write_safetensors(model / "snapshots" / "abc")
    (model / "blobs").mkdir()
    for number, path in enumerate(sorted(snapshot.glob("*.safetensors"))):
        os.replace(path, model / "blobs" / f"blob{number}")
        path.symlink_to(Path("..") / ".." / "blobs" / f"blob{number}")
    return model, snapshot


def test_in_a_hub_cache_the_link_and_its_blob_go(tmp_path: Path) -> None:
    model, snapshot = make_hub_cache(tmp_path)
    (model / "blobs" / "config").write_text("{}")
    target = split(snapshot, delete_original=True)
    assert_same(read_split(target), tensors())
    assert everything(model / "blobs") == {"config"}
    assert not list(snapshot.glob("*.safetensors"))


def test_a_blob_that_another_snapshot_uses_stays(tmp_path: Path) -> None:
    model, snapshot = make_hub_cache(tmp_path)
    other = model / "snapshots" / "def" / "model-00001-of-00003.safetensors"
    other.parent.mkdir()
    other.symlink_to(Path("..") / ".." / "blobs" / "blob0")
    split(snapshot, delete_original=True)
    assert everything(model / "blobs") == {"blob0"} and other.exists()


def test_links_that_lead_outside_are_left_alone_with_what_they_point_to(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = write_safetensors(tmp_path / "store")
    model, snapshot = make_hub_cache(tmp_path)
    plain = tmp_path / "plain"
    plain.mkdir()
    for path in store.iterdir():
        (plain / path.name).symlink_to(path)
    stray = snapshot / "model-00001-of-00003.safetensors"
    stray.unlink()
    stray.symlink_to(store / stray.name)
    before = everything(tmp_path / "store")
    split(plain, delete_original=True)
    split(snapshot, delete_original=True)
    assert everything(tmp_path / "store") == before
    assert len(list(plain.glob("*.safetensors"))) == 3 and stray.exists()
    assert everything(model / "blobs") == {"blob0"}
    assert "both are kept" in caplog.text
