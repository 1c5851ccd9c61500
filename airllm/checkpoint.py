"""Tensor name -> (file, offset, shape, dtype), and the positional reads of those bytes.

``CheckpointIndex.open`` proves every file whole before anything else happens; it renames nothing and reads no tensor.
"""

from __future__ import annotations

import json
import logging
import os
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import torch

from airllm.errors import CheckpointError
from airllm.safetensors_format import DOWNLOAD_AGAIN, FileHeader, TensorEntry, read_header

__all__ = ["CheckpointIndex", "ScatterRead", "TensorEntry", "TensorReader", "has_bin_weights", "plan_scatter"]

log = logging.getLogger(__name__)

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
DONE = ".done"
IOVEC_LIMIT = 512  # destinations of one scattered read; systems allow at least 1024
READ_CHUNK_BYTES = 1 << 26  # Linux caps one read at 2 GiB; smaller pieces also let a cancelled job end soon
_SHARD = re.compile(r"-\d{5}-of-(\d{5})\.safetensors$")


class MissingWeightsError(CheckpointError):
    """No weights, or some of their files, are there (as opposed to damaged ones)."""


class CheckpointIndex(Mapping[str, TensorEntry]):
    """Every tensor of one checkpoint folder, each in a file that was proved whole."""

    def __init__(self, folder: Path, headers: Sequence[FileHeader], entries: Mapping[str, TensorEntry]) -> None:
        self.folder = folder
        self.files: tuple[Path, ...] = tuple(header.path for header in headers)
        self.total_bytes: int = sum(entry.nbytes for entry in entries.values())
        self.headers: tuple[FileHeader, ...] = tuple(headers)
        self._entries = dict(entries)

    @classmethod
    def open(cls, folder: str | os.PathLike[str]) -> CheckpointIndex:
        """Index ``model.safetensors``, the shards that an index.json names, or a folder split by module.

        Raises CheckpointError for a folder without such weights, a missing shard or tensor, or a damaged file.
        """
        root = Path(folder)
        if not root.is_dir():
            raise CheckpointError(f"{root} is not a folder: give the folder that holds config.json and the weights")
        paths, weight_map = _weight_files(root)
        refuse_missing(root, paths)
        headers = [read_header(path) for path in paths]
        return cls(root, headers, _merge(root, headers, weight_map))

    def identity(self) -> dict[str, dict[str, Any]]:
        """What ties a derived file to this source: size, header hash and modification time of every file."""
        return {header.path.relative_to(self.folder).as_posix(): header.identity() for header in self.headers}

    def __getitem__(self, name: str) -> TensorEntry:
        return self._entries[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def __repr__(self) -> str:
        return f"CheckpointIndex({str(self.folder)!r}: {len(self)} tensors, {self.total_bytes} B)"


def has_bin_weights(folder: str | os.PathLike[str]) -> bool:
    """True when the folder's only weights are ``pytorch_model*.bin``; safetensors beside them win."""
    root = Path(folder)
    if any(root.glob("model*.safetensors")) or (root / INDEX_FILE).exists() or visible(root, "*.safetensors" + DONE):
        return False
    return any(root.glob("pytorch_model*.bin"))


def visible(root: Path, pattern: str) -> list[Path]:
    """Files by pattern, in order, without dot files (macOS leaves ``._model.safetensors`` on foreign disks)."""
    return sorted(path for path in root.glob(pattern) if not path.name.startswith("."))


def refuse_missing(root: Path, paths: Sequence[Path]) -> None:
    """Raise CheckpointError listing those of ``paths`` that are not there."""
    missing = [path.name for path in paths if not path.exists()]
    if missing:
        raise MissingWeightsError(
            f"{root}: {len(missing)} of {len(paths)} weight files are missing: {some(missing)}: "
            "download the checkpoint again"
        )


def some(names: Sequence[str], limit: int = 8) -> str:
    """The first few names, for an error message."""
    return ", ".join(names[:limit]) + (f" and {len(names) - limit} more" if len(names) > limit else "")


def _weight_files(root: Path) -> tuple[list[Path], dict[str, str] | None]:
    """The files that hold the weights, and the index's tensor -> file table where there is one."""
    markers = visible(root, "*.safetensors" + DONE)
    if markers:
        return _split_files(root, markers), None
    if (root / SINGLE_FILE).exists() or (root / SINGLE_FILE).is_symlink():
        return [root / SINGLE_FILE], None
    if (root / INDEX_FILE).exists():
        weight_map = read_index(root / INDEX_FILE, ".safetensors")
        return [root / name for name in sorted(set(weight_map.values()))], weight_map
    found = visible(root, "*.safetensors")
    if not found or has_bin_weights(root):
        raise MissingWeightsError(_no_weights(root))
    if len(found) == 1 and not _SHARD.search(found[0].name):
        return found, None
    raise CheckpointError(
        f"{root} has {len(found)} safetensors files ({some([path.name for path in found])}) but no {INDEX_FILE} that "
        f"says which tensors they must hold: download {INDEX_FILE} too"
    )


def _no_weights(root: Path) -> str:
    if any(root.glob("pytorch_model*.bin")):
        return (
            f"{root} has pytorch .bin weights only, and no split of them that is up to date: loading the model once "
            "(`airllm generate`, from_pretrained) or airllm.split_and_save_layers writes one, into splitted_model there"
        )
    return f"{root} has no weights: expected {SINGLE_FILE}, or {INDEX_FILE} with its shards, or a split folder"


def _split_files(root: Path, markers: Sequence[Path]) -> list[Path]:
    """A split folder's files; one without its marker was being written when the split stopped."""
    paths = [marker.with_name(marker.name[: -len(DONE)]) for marker in markers]
    unfinished = sorted({path.name for path in visible(root, "*.safetensors")} - {path.name for path in paths})
    if unfinished:
        raise CheckpointError(
            f"{root}: the split was not finished, no {DONE} marker for {some(unfinished)}: split the checkpoint again"
        )
    return paths


def read_index(path: Path, suffix: str) -> dict[str, str]:
    """The weight_map (tensor -> file) of an index.json, every file name proved to end so and to stay in the folder."""
    try:
        content = json.loads(path.read_bytes().decode("utf-8"))
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    except (ValueError, RecursionError) as error:
        size = path.stat().st_size
        raise CheckpointError(f"{path} ({size} B) is not JSON ({error}): {DOWNLOAD_AGAIN}") from error
    weight_map = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{path} has no weight_map: {DOWNLOAD_AGAIN}")
    for tensor, name in weight_map.items():
        if not isinstance(name, str) or not _stays_inside(name, suffix):
            raise CheckpointError(
                f"{path}: tensor {tensor} is said to be in {name!r}, not a {suffix} file of this folder: "
                "do not trust this checkpoint"
            )
    return weight_map


def _stays_inside(name: str, suffix: str) -> bool:
    plain = PurePosixPath(name)
    if plain.is_absolute() or ".." in plain.parts or any(sign in name for sign in "\\:\0"):
        return False
    return name.endswith(suffix)


def _merge(root: Path, headers: Sequence[FileHeader], weight_map: Mapping[str, str] | None) -> dict[str, TensorEntry]:
    """One table of all tensors. With an index, a name in two files is taken from the file that the index gives."""
    table: dict[str, TensorEntry] = {}
    for header in headers:
        for entry in header.entries:
            home = weight_map.get(entry.name) if weight_map is not None else None
            if home is not None and root / home != entry.path:
                continue
            if entry.name in table:
                other = table[entry.name].path.name
                raise CheckpointError(f"{root}: tensor {entry.name} is in both {other} and {entry.path.name}")
            table[entry.name] = entry
    absent = [f"{name} ({file})" for name, file in (weight_map or {}).items() if name not in table]
    if absent:
        raise CheckpointError(
            f"{root}: {len(absent)} tensors that {INDEX_FILE} names are not in their files: {some(absent)}: "
            "download the checkpoint again"
        )
    return table


class _OpenFile:
    """One file, read at any offset by any thread."""

    def __init__(self, path: Path) -> None:
        try:
            self._file = open(path, "rb", buffering=0)  # noqa: SIM115 - closed by TensorReader.close
        except OSError as error:
            raise CheckpointError(f"{path} cannot be opened: {error}") from error
        self._seek_lock = threading.Lock()

    def read_at(self, view: memoryview, offset: int) -> int:
        """Read up to ``len(view)`` bytes at ``offset``; 0 means the file ends there."""
        if hasattr(os, "preadv"):
            return os.preadv(self._file.fileno(), [view], offset)
        with self._seek_lock:  # Windows has no positional read: the offset is shared
            self._file.seek(offset)
            return self._file.readinto(view) or 0

    def scatter_at(self, views: Sequence[memoryview], offset: int) -> int:
        """Read up to the views' bytes at ``offset``, one view after the other, in one call of the system where it can."""
        if hasattr(os, "preadv"):
            return os.preadv(self._file.fileno(), views[:IOVEC_LIMIT], offset)
        return self.read_at(views[0], offset)

    def close(self) -> None:
        self._file.close()


def default_threads() -> int:
    """Reading threads: three quarters of the processors, 2 to 16. The thread that runs the model needs one for itself, and
    with a reader on every processor streaming was measured to be slower, not faster."""
    return max(2, min(16, (os.cpu_count() or 1) * 3 // 4))


class TensorReader:
    """Positional reads of tensors' bytes from any thread, and a small pool to run many at once.

    Files are opened once and stay open until ``close``. ``bytes_read`` and ``reads`` count what really arrived.
    """

    def __init__(self, threads: int | None = None) -> None:
        if threads is not None and threads < 1:
            raise ValueError(f"threads must be at least 1, got {threads}")
        self.threads = threads or default_threads()
        self.bytes_read = 0
        self.reads = 0
        self._files: dict[Path, _OpenFile] = {}
        self._scratch: list[torch.Tensor] = []
        self._pool: ThreadPoolExecutor | None = None
        self._inside = threading.local()
        self._state = threading.Condition()
        self._active = 0
        self._closed = False

    def read_into(self, entry: TensorEntry, out: torch.Tensor, byte_offset: int = 0) -> None:
        """Fill ``out`` (CPU, contiguous, any dtype) with its own number of bytes, from ``byte_offset`` into the tensor.

        Raises CheckpointError when the file ends early or cannot be read, ValueError for bytes outside the tensor.
        """
        if out.device.type != "cpu" or not out.is_contiguous():
            raise ValueError(f"{entry.name}: the bytes can only be read into a contiguous CPU tensor")
        length = out.numel() * out.element_size()
        if byte_offset < 0 or byte_offset + length > entry.nbytes:
            raise ValueError(f"{entry.name}: bytes {byte_offset}+{length} lie outside its {entry.nbytes} B")
        if length == 0:
            return
        view = memoryview(out.detach().reshape(-1).view(torch.uint8).numpy().data)
        file = self._acquire(entry.path)
        count = 0
        try:
            count = _read_exactly(file, entry, view, entry.offset + byte_offset)
        finally:
            self._release(count)

    def as_stored(self, entry: TensorEntry) -> bool:
        """True when the tensor's bytes are those in its file, so that `scatter` may read them; else use `read_into`."""
        return True

    def scatter(self, read: ScatterRead) -> None:
        """Fill the read's destinations with one run of its file. Raises CheckpointError when the file ends early."""
        file = self._acquire(read.path)
        count = 0
        try:
            count = _scatter_exactly(file, read)
        finally:
            self._release(count)

    def read(self, entry: TensorEntry) -> torch.Tensor:
        """A new CPU tensor with the entry's shape and dtype."""
        out = torch.empty(entry.shape, dtype=entry.dtype, device="cpu")
        self.read_into(entry, out)
        return out

    @contextmanager
    def scratch(self, nbytes: int) -> Iterator[torch.Tensor]:
        """Memory (uint8 [nbytes]) for bytes that are converted on their way. It is lent again, as many blocks as were ever lent
        at once: fresh pages cost more than the conversion does."""
        with self._state:
            block = self._scratch.pop() if self._scratch else None
        if block is None or block.numel() < nbytes:
            with torch.inference_mode(False):  # else it could not be filled outside the caller's inference mode
                block = torch.empty(nbytes, dtype=torch.uint8, device="cpu")
        try:
            yield block[:nbytes]
        finally:
            with self._state:
                if not self._closed:
                    self._scratch.append(block)

    def run(self, jobs: Sequence[Callable[[], None]]) -> None:
        """Run the jobs on the pool and wait for all. The first exception is raised once no job writes any more."""
        if len(jobs) <= 1 or getattr(self._inside, "pool", False):  # a job must not wait for its own pool
            for job in jobs:
                job()
            return
        failed = threading.Event()
        futures = [self._executor().submit(self._run_one, job, failed) for job in jobs]
        try:
            done, _ = wait(futures, return_when=FIRST_EXCEPTION)
        finally:
            # Also on Ctrl-C: the caller may reuse its memory once this returns, so nothing may still be writing.
            _cancel_and_wait(futures)
        for future in futures:
            if not future.cancelled() and future.exception() is not None:
                future.result()

    def close(self) -> None:
        """Wait for running reads, then close the files. A later read raises CheckpointError. Safe to call twice."""
        with self._state:
            self._closed = True
            pool, self._pool = self._pool, None
            self._scratch.clear()
        if pool is not None:
            pool.shutdown(wait=True, cancel_futures=True)
        with self._state:
            self._state.wait_for(lambda: self._active == 0)
            files, self._files = self._files, {}
        for file in files.values():
            file.close()

    def __enter__(self) -> TensorReader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _run_one(self, job: Callable[[], None], failed: threading.Event) -> None:
        self._inside.pool = True
        if failed.is_set():  # a worker is quicker to take the next job than `run` is to cancel it
            return
        try:
            job()
        except BaseException:
            failed.set()
            raise

    def _executor(self) -> ThreadPoolExecutor:
        with self._state:
            self._refuse_closed()
            if self._pool is None:
                self._pool = ThreadPoolExecutor(self.threads, thread_name_prefix="airllm-read")
            return self._pool

    def _refuse_closed(self) -> None:
        if self._closed:
            raise CheckpointError("this TensorReader is closed: load the model again")

    def _acquire(self, path: Path) -> _OpenFile:
        with self._state:
            self._refuse_closed()
            file = self._files.get(path)
            if file is None:
                file = self._files[path] = _OpenFile(path)
            self._active += 1
            return file

    def _release(self, count: int) -> None:
        with self._state:
            self._active -= 1
            self.bytes_read += count
            self.reads += 1
            self._state.notify_all()


@dataclass(frozen=True, slots=True)
class ScatterRead:
    """One run of a file, from byte ``offset`` on, into the ``views`` one after the other."""

    path: Path
    offset: int
    views: tuple[memoryview, ...]


def plan_scatter(wanted: Iterable[tuple[TensorEntry, int, torch.Tensor]]) -> list[ScatterRead]:
    """Join reads (entry, byte offset in it, CPU tensor to fill) that are neighbours in their file, in the order given."""
    planned: list[ScatterRead] = []
    ends: list[int] = []
    for entry, byte_offset, out in wanted:
        view = memoryview(out.detach().reshape(-1).view(torch.uint8).numpy().data)
        if byte_offset < 0 or byte_offset + len(view) > entry.nbytes:
            raise ValueError(f"{entry.name}: bytes {byte_offset}+{len(view)} lie outside its {entry.nbytes} B")
        offset = entry.offset + byte_offset
        if planned and planned[-1].path == entry.path and ends[-1] == offset:
            planned[-1] = ScatterRead(entry.path, planned[-1].offset, (*planned[-1].views, view))
            ends[-1] += len(view)
        else:
            planned.append(ScatterRead(entry.path, offset, (view,)))
            ends.append(offset + len(view))
    return planned


def _scatter_exactly(file: _OpenFile, read: ScatterRead) -> int:
    left, done = list(read.views), 0
    while left:
        try:
            count = file.scatter_at(left, read.offset + done)
        except OSError as error:
            raise CheckpointError(f"{read.path}: reading at byte {read.offset + done} failed: {error}") from error
        if count == 0:
            need = read.offset + sum(len(view) for view in read.views)
            raise CheckpointError(
                f"{read.path} ends at byte {read.offset + done}, bytes up to {need} are needed: the file changed since it "
                f"was checked; {DOWNLOAD_AGAIN}"
            )
        done += count
        while left and count >= len(left[0]):
            count -= len(left.pop(0))
        if count:
            left[0] = left[0][count:]
    return done


def _cancel_and_wait(futures: Sequence[Future[None]]) -> None:
    for future in futures:
        future.cancel()
    wait(futures)


def _read_exactly(file: _OpenFile, entry: TensorEntry, view: memoryview, offset: int) -> int:
    """Fill ``view``; a file that became shorter since its header was proved is an error, never zeros."""
    done = 0
    while done < len(view):
        try:
            count = file.read_at(view[done : done + READ_CHUNK_BYTES], offset + done)
        except OSError as error:
            raise CheckpointError(f"{entry.path}: reading tensor {entry.name} failed: {error}") from error
        if count == 0:
            raise CheckpointError(
                f"{entry.path} ends at byte {offset + done}, tensor {entry.name} needs bytes up to "
                f"{offset + len(view)}: the file changed since it was checked; {DOWNLOAD_AGAIN}"
            )
        done += count
    return done
