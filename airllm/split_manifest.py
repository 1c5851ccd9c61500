"""``airllm_split.json``: what ties a split folder to the weights it was made from, and each of its files to its bytes."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from airllm.checkpoint import DONE, visible
from airllm.errors import CheckpointError
from airllm.safetensors_format import read_header

MANIFEST = "airllm_split.json"
FORMAT = 1
_SECOND = 1_000_000_000


@dataclass
class Manifest:
    """``written``: file name -> {size, sha256, header_sha256} of finished module files; ``files``: all that will be."""

    source_folder: str = ""
    source: dict[str, dict[str, Any]] = field(default_factory=dict)
    compression: str | None = None
    files: list[str] = field(default_factory=list)
    written: dict[str, dict[str, Any]] = field(default_factory=dict)
    complete: bool = False
    removed: list[str] = field(default_factory=list)

    @classmethod
    def read(cls, target: Path) -> Manifest | None:
        """The manifest in ``target``; None where there is none. One that is damaged proves nothing: it comes empty."""
        try:
            content = json.loads((target / MANIFEST).read_bytes().decode("utf-8"))
        except FileNotFoundError:
            return None
        except (OSError, ValueError, RecursionError):
            return cls()
        kinds = {"source_folder": str, "source": dict, "files": list, "written": dict, "complete": bool, "removed": list}
        if not isinstance(content, dict) or content.pop("format", None) != FORMAT:
            return cls()
        if content.keys() != cls().__dict__.keys() or not all(isinstance(content[k], t) for k, t in kinds.items()):
            return cls()
        records = (*content["source"].values(), *content["written"].values())
        if not all(isinstance(name, str) for name in content["files"]) or not all(isinstance(r, dict) for r in records):
            return cls()
        return cls(**content)

    def write(self, target: Path) -> None:
        """Replace the manifest atomically."""
        text = json.dumps({"format": FORMAT, **asdict(self)}, indent=1)
        write_atomically(target / MANIFEST, text.encode())

    def fits(self, identity: Mapping[str, Mapping[str, Any]], compression: str | None) -> bool:
        """True when the split was begun from exactly these weights, in this form."""
        if self.compression != compression or self.source.keys() != identity.keys():
            return False
        return all(same_file(self.source[name], identity[name]) for name in identity)

    def prove(self, target: Path, identity: Mapping[str, Mapping[str, Any]] | None, compression: str | None) -> None:
        """Raise CheckpointError unless the split is finished, whole, and of the source with ``identity`` (if known)."""
        if not self.complete:
            raise CheckpointError(f"{target}: the split was not finished, {len(self.written)} of {len(self.files)} files")
        if identity is not None and not self.fits(identity, compression):
            raise CheckpointError(f"{target} was split from other weights than those in the checkpoint folder now")
        for name in self.files:
            self.prove_file(target, name)
        extra = {path.name for path in visible(target, "*.safetensors")} - set(self.files)
        if extra:
            raise CheckpointError(f"{target} holds files that do not belong to the split: {', '.join(sorted(extra)[:4])}")

    def prove_file(self, target: Path, name: str) -> None:
        """Raise CheckpointError unless this module file has its marker, its size and its header."""
        path, noted = target / name, self.written.get(name)
        if noted is None or not path.with_name(name + DONE).exists():
            raise CheckpointError(f"{path} was not finished")
        header = read_header(path)
        if (header.size, header.header_sha256) != (noted.get("size"), noted.get("header_sha256")):
            raise CheckpointError(f"{path} holds {header.size} B, not the {noted.get('size')} B that were written to it")

    def is_written(self, target: Path, name: str) -> bool:
        """As ``prove_file``, as an answer."""
        try:
            self.prove_file(target, name)
        except CheckpointError:
            return False
        return True


def same_file(noted: Mapping[str, Any], found: Mapping[str, Any]) -> bool:
    """The same size, header and time. A time without fractions was cut by an archive: then the second has to do."""
    if any(noted.get(key) != found[key] for key in ("size", "header_sha256")):
        return False
    before, now = noted.get("mtime_ns"), found["mtime_ns"]
    if not isinstance(before, int):
        return False
    cut = before % _SECOND == 0 or now % _SECOND == 0
    return before == now or (cut and before // _SECOND == now // _SECOND)


def write_atomically(path: Path, content: bytes) -> None:
    """Temporary file, fsync, rename: after a crash there is the old content or the new."""
    temporary = path.with_name(f".{path.name}.part")
    try:
        with open(temporary, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Make renames in ``folder`` last through a power cut, where the system can."""
    try:
        descriptor = os.open(folder, os.O_RDONLY)
    except OSError:  # Windows opens no folders
        return
    try:
        os.fsync(descriptor)
    except OSError:  # some network file systems refuse; their renames are synchronous anyway
        pass
    finally:
        os.close(descriptor)
