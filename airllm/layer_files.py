"""The split-checkpoint format: one safetensors file a module, each with an empty ``.done`` marker beside it.

It is AirLLM's format, so a folder written by either loads in the other. Ours also holds ``airllm_split.json``, which
ties it to its source: changed weights, an unfinished split and a damaged file are all found before anything is loaded.

Life of a split: lock the folder; plan (group the keys by module); check the space; for each module write a temporary
file, fsync, rename, note it in the manifest, set its marker; mark the manifest complete. A kill at any point leaves
either a finished module or none under its final name, and the next run goes on from there.
"""

from __future__ import annotations

import errno
import logging
import os
import shutil
from collections.abc import Mapping
from pathlib import Path

from airllm.bin_files import BinCheckpoint, file_identity
from airllm.checkpoint import DONE, CheckpointIndex, MissingWeightsError, has_bin_weights, some, visible
from airllm.compression import KINDS, base_name, bitsandbytes, is_compressible
from airllm.errors import CheckpointError, NotEnoughSpaceException, OptionError
from airllm.folder_lock import folder_lock
from airllm.locate import locate
from airllm.safetensors_format import read_header
from airllm.split_manifest import MANIFEST, Manifest, same_file
from airllm.split_originals import delete_originals
from airllm.split_plan import Module, plan_modules
from airllm.split_writer import SplitSource, SplitWriter, check_space, geometry, module_bytes

log = logging.getLogger(__name__)

LOCK_FILE = "airllm_split.lock"


def split_and_save_layers(
    checkpoint_path: str | os.PathLike[str],
    layer_shards_saving_path: str | os.PathLike[str] | None = None,
    splitted_model_dir_name: str = "splitted_model",
    compression: str | None = None,
    layer_names: Mapping[str, str] | None = None,
    delete_original: bool = False,
    repo_id: str | None = None,
    hf_token: str | None = None,
    *,
    progress: bool = True,
) -> Path:
    """Split a checkpoint folder by module, or find the split that is already there. Returns the split folder.

    It lies in ``layer_shards_saving_path`` (default: the checkpoint folder) and is called ``splitted_model_dir_name``,
    with ``.4bit`` or ``.8bit`` after it when compressed. ``layer_names`` (``embed``, ``layer_prefix``, ``norm``,
    ``lm_head``) overrides the grouping that the keys suggest. A folder that is not there is fetched from ``repo_id``.
    ``delete_original`` removes the weight files once every byte of the split was read back and found right.

    Raises CheckpointError (damaged or missing weights, a folder that cannot be written), NotEnoughSpaceException,
    OptionError (unknown compression, bitsandbytes missing).
    """
    if repo_id is not None and not Path(checkpoint_path).is_dir():
        checkpoint_path = locate(repo_id, token=hf_token)
    return find_or_create_split(
        checkpoint_path, layer_shards_saving_path, splitted_model_dir_name, compression, layer_names, delete_original,
        progress=progress,
    )  # fmt: skip


def find_or_create_split(
    checkpoint_path: str | os.PathLike[str],
    layer_shards_saving_path: str | os.PathLike[str] | None = None,
    splitted_model_dir_name: str = "splitted_model",
    compression: str | None = None,
    layer_names: Mapping[str, str] | None = None,
    delete_original: bool = False,
    *,
    progress: bool = True,
) -> Path:
    """The work of ``split_and_save_layers`` on a local folder. A valid split is used without writing anything."""
    from airllm import tiny_model_path

    folder = Path(checkpoint_path)
    if not folder.is_dir():
        raise CheckpointError(f"{folder} is not a folder: give the folder that holds config.json and the weights")
    if compression is not None and compression not in KINDS:
        raise OptionError(f"compression={compression!r} is unknown: use {' or '.join(KINDS)}, or leave it out")
    if delete_original and folder.resolve() == tiny_model_path().resolve():
        raise OptionError(f"delete_original would remove what comes with airllm itself: copy {folder} and split the copy")
    target = split_folder(folder, layer_shards_saving_path, splitted_model_dir_name, compression)
    source = _open_source(folder, target)
    if source is None or not delete_original:
        if is_usable(target, source, compression):
            return target
    assert source is not None  # is_usable raised otherwise
    geometry(source)  # a damaged source is refused before a folder is made
    _make_folder(target)
    with folder_lock(target / LOCK_FILE):
        if not is_usable(target, source, compression):
            _split(source, target, compression, layer_names, progress)
        if delete_original:
            delete_originals(source, target)
    return target


def open_unsplit(folder: Path) -> CheckpointIndex:
    """The safetensors weights of ``folder`` as they are or, where they are gone or .bin files, its split. Writes nothing."""
    try:
        return CheckpointIndex.open(folder)
    except CheckpointError:
        target = split_folder(folder)
        if not target.is_dir() or not is_usable(target, _open_source(folder, target)):
            raise
        log.info("%s has no whole weights of its own: its split is looked at", folder)
    return CheckpointIndex.open(target)


def split_folder(
    folder: Path,
    saving_path: str | os.PathLike[str] | None = None,
    name: str = "splitted_model",
    compression: str | None = None,
) -> Path:
    """Where the split of ``folder`` lies. Raises OptionError for a name that could lead to another folder."""
    if not name or name in (".", "..") or any(sign in name for sign in "/\\:\0"):
        raise OptionError(f"splitted_model_dir_name={name!r} must be the name of one folder")
    return Path(saving_path if saving_path is not None else folder) / (f"{name}.{compression}" if compression else name)


def is_usable(target: Path, source: SplitSource | None, compression: str | None = None) -> bool:
    """True when ``target`` is a whole split of ``source``. A split that has to be made again is logged with why.

    ``source`` is None when the original weights are gone; then an unusable split is a CheckpointError, because
    nothing can repair it.
    """
    if not visible(target, "*.safetensors" + DONE):
        if source is None:
            raise CheckpointError(f"{target} holds no split, and the original weights are gone: download them again")
        return False
    manifest = Manifest.read(target)
    try:
        if manifest is None:
            _prove_foreign(target, source, compression)
        else:
            manifest.prove(target, source.identity() if source is not None else None, compression)
    except CheckpointError as error:
        if source is None:
            raise CheckpointError(f"{error} (and the original weights are gone: download them again)") from error
        log.warning("the split has to be made again: %s", error)
        return False
    if manifest is None:
        log.warning(
            "%s has no %s (AirLLM writes none), so it has no identity: nothing shows whether it was made from these "
            "weights; delete it if they were changed",
            target,
            MANIFEST,
        )
    return True


def _open_source(folder: Path, target: Path) -> SplitSource | None:
    """The original weights, proved whole; None when they were removed and ``target`` may stand for them."""
    try:
        return BinCheckpoint.open(folder) if has_bin_weights(folder) else CheckpointIndex.open(folder)
    except MissingWeightsError:
        if not visible(target, "*.safetensors" + DONE):
            raise
        _prove_rest(folder, Manifest.read(target))
        return None


def _prove_rest(folder: Path, manifest: Manifest | None) -> None:
    """What is left of removed originals must be what was split: new weights half downloaded are no excuse for old ones.

    A split by another program kept no record of its source; its own files are all that can be asked.
    """
    for name, noted in (manifest.source if manifest is not None else {}).items():
        path = folder / name
        if path.exists() and not same_file(noted, _identity_of(path)):
            raise CheckpointError(
                f"{path} is not the file that was split, and other weight files are missing: download the checkpoint "
                "again, or delete that file to use the split"
            )


def _identity_of(path: Path) -> dict[str, object]:
    if path.name.endswith(".bin"):
        return file_identity(path)
    return read_header(path).identity()


def _prove_foreign(target: Path, source: SplitSource | None, compression: str | None) -> None:
    """What can be said of a split without a manifest: its files are whole, and every tensor of the source is there."""
    index = CheckpointIndex.open(target)
    if source is None:
        return
    # AirLLM leaves out tensors that no module of its own list owns; the rotary frequencies are computed, not loaded.
    held = {base_name(name) for name in index}
    absent = [name for name in source if name not in held and not name.endswith("rotary_emb.inv_freq")]
    if absent:
        raise CheckpointError(f"{target}: {len(absent)} tensors of the checkpoint are not in it: {some(absent)}")
    for name, (dtype, shape) in geometry(source).items():
        if name not in index or (compression is not None and is_compressible(dtype, shape)):
            continue
        if (index[name].shape, index[name].dtype) != (shape, dtype):
            found = f"{index[name].dtype} {index[name].shape}"
            raise CheckpointError(f"{target}: its tensor {name} is {found}, the checkpoint's is {dtype} {shape}")


def _make_folder(target: Path) -> None:
    try:
        target.mkdir(parents=True, exist_ok=True)
        (target / LOCK_FILE).touch()
    except OSError as error:
        raise _write_failed(error, target, 0) from error


def _split(
    source: SplitSource,
    target: Path,
    compression: str | None,
    layer_names: Mapping[str, str] | None,
    progress: bool,
) -> None:
    """Write what is missing of the split of ``source``, under the folder's lock."""
    if compression is not None:
        bitsandbytes()
    shapes = geometry(source)
    modules = plan_modules(shapes, layer_names)
    manifest = _resume(source, target, compression, modules)
    todo = [module for module in modules if module.file_name not in manifest.written]
    stale = _stale_files(target, manifest)
    needed = sum(module_bytes(shapes, module, compression) for module in todo)
    check_space(target, needed, sum(_freed_bytes(path) for path in stale))
    try:
        for path in stale:
            path.unlink(missing_ok=True)
        manifest.write(target)
        SplitWriter(source, target, manifest).write(todo, progress)
        manifest.complete = True
        manifest.write(target)
    except OSError as error:
        rest = [module for module in todo if module.file_name not in manifest.written]
        raise _write_failed(error, target, sum(module_bytes(shapes, module, compression) for module in rest)) from error
    log.info("split %s into %d modules in %s", source.folder, len(modules), target)


def _write_failed(error: OSError, target: Path, needed: int) -> Exception:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        free = shutil.disk_usage(target).free
        return NotEnoughSpaceException(
            f"the disk of {target} is full: the rest of the split needs {needed} B, {free} B are free; what is finished "
            "stays: free some space and run again"
        )
    return CheckpointError(f"{target} cannot be written ({error}): give layer_shards_saving_path a folder that can be")


def _resume(source: SplitSource, target: Path, compression: str | None, modules: tuple[Module, ...]) -> Manifest:
    """The manifest to go on with: what an earlier run of the same split finished, or a new one."""
    identity, files = source.identity(), [module.file_name for module in modules]
    old = Manifest.read(target)
    manifest = Manifest(str(source.folder.resolve()), identity, compression, files)
    if old is None:
        return manifest
    if old.fits(identity, compression) and old.files == files:
        manifest.written = {name: old.written[name] for name in files if old.is_written(target, name)}
    else:
        _refuse_to_take_over(old, source, target)
    return manifest


def _refuse_to_take_over(old: Manifest, source: SplitSource, target: Path) -> None:
    """Two checkpoints with one saving path would replace each other's split at every load: say so instead."""
    owner = Path(old.source_folder)
    if target.resolve().parent == source.folder.resolve() or owner == source.folder.resolve() or not owner.is_dir():
        return
    try:
        other = BinCheckpoint.open(owner) if has_bin_weights(owner) else CheckpointIndex.open(owner)
        valid = old.complete and old.fits(other.identity(), old.compression)
    except CheckpointError:
        return
    if valid:
        raise CheckpointError(
            f"{target} holds the split of {owner}: give another layer_shards_saving_path for {source.folder}, or delete "
            "that folder"
        )


def _stale_files(target: Path, manifest: Manifest) -> list[Path]:
    """Module files, markers and leftovers in ``target`` that are no part of the split being written."""
    found = {path.name[: -len(DONE)] for path in visible(target, "*.safetensors" + DONE)}
    old = Manifest.read(target)
    found |= {name for name in (old.files if old is not None else []) if _is_module_file(name)} | set(manifest.files)
    paths = [target / f"{name}{end}" for name in sorted(found - manifest.written.keys()) for end in (DONE, "")]
    paths += sorted(target.glob(".*.part"))
    return [path for path in paths if path.exists() or path.is_symlink()]


def _is_module_file(name: object) -> bool:
    return isinstance(name, str) and name.endswith(".safetensors") and not any(sign in name for sign in "/\\:\0")


def _freed_bytes(path: Path) -> int:
    """What deleting ``path`` gives back: nothing for a link, or a file that has another name."""
    status = path.lstat()
    return 0 if path.is_symlink() or status.st_nlink > 1 else status.st_size
