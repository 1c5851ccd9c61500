"""``delete_original``: remove weight files whose every byte was split and read back. Nothing else, ever.

What is removed: files that the checkpoint's own index names, in the checkpoint folder. In a hub cache those are links;
the link goes, and the blob it points to only when it lies in the ``blobs`` folder of the same cached model and no other
snapshot links to it. A link to anywhere else is left alone.
"""

from __future__ import annotations

import logging
from pathlib import Path

from airllm.errors import CheckpointError
from airllm.split_manifest import MANIFEST, Manifest
from airllm.split_writer import SplitSource, file_digest

log = logging.getLogger(__name__)


def delete_originals(source: SplitSource, target: Path) -> list[Path]:
    """Remove the weight files of ``source`` after proving the split in ``target`` by its hashes. Returns what went.

    Raises CheckpointError, before anything is removed, when the split or the source is not what the manifest says.
    """
    manifest = Manifest.read(target)
    if manifest is None:
        log.warning("delete_original: %s has no %s, so the original weights are kept", target, MANIFEST)
        return []
    if not manifest.complete or not manifest.fits(source.identity(), manifest.compression):
        raise CheckpointError(f"{target} is not the finished split of {source.folder}: nothing was deleted, split again")
    for name in manifest.files:
        found, noted = file_digest(target / name), manifest.written[name].get("sha256")
        if found != noted:
            raise CheckpointError(
                f"{target / name} reads back with sha256 {found}, {noted} was written: the disk is failing or the file "
                "was changed; nothing was deleted"
            )
    manifest.removed = [path.relative_to(source.folder).as_posix() for path in source.files]
    manifest.write(target)
    gone: list[Path] = []
    sizes = {each: each.lstat().st_size for path in source.files for each in (path, path.resolve())}
    for path in source.files:
        gone += _remove(path)
    names, nbytes = ", ".join(map(str, gone)) or "nothing", sum(sizes[path] for path in gone)
    log.warning("delete_original: removed %s (%d B in all; the split is %s)", names, nbytes, target)
    return gone


def _remove(path: Path) -> list[Path]:
    if not path.is_symlink():
        path.unlink()
        return [path]
    blob = path.resolve()
    model = path.parent.parent.parent
    in_cache = path.parent.parent.name == "snapshots" and blob.parent == (model / "blobs").resolve()
    if not in_cache:
        log.warning("delete_original: %s is a link to %s outside the checkpoint; both are kept", path, blob)
        return []
    path.unlink()
    if any(other.is_symlink() and other.resolve() == blob for other in (model / "snapshots").rglob("*")):
        log.info("delete_original: %s is used by another snapshot and is kept", blob)
        return [path]
    blob.unlink()
    return [path, blob]
