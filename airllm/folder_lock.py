"""One writer at a time for a folder, across processes and threads, with nothing beyond the standard library."""

from __future__ import annotations

import errno
import logging
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from airllm.errors import CheckpointError

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

log = logging.getLogger(__name__)

POLL_S = 0.1
_NO_LOCKS_HERE = (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS, errno.EINVAL)


@contextmanager
def folder_lock(path: Path, timeout_s: float = 24 * 3600.0) -> Iterator[None]:
    """Hold the lock file ``path``; wait (saying so once) while another process or thread holds it.

    The kernel frees an fcntl lock when its process dies. Where there are no such locks, the file's existence is the
    lock: one left by a killed process has to be deleted by hand, and the error after ``timeout_s`` says so.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644) if fcntl is not None else None
    try:
        if descriptor is not None and _flock(descriptor, path, timeout_s):
            yield
            return
    finally:
        if descriptor is not None:
            os.close(descriptor)  # frees the lock
    with _existence_lock(path.with_name(path.name + ".held"), timeout_s):
        yield


def _flock(descriptor: int, path: Path, timeout_s: float) -> bool:
    """True when the lock is held; False where the file system has no locks."""
    deadline = time.monotonic() + timeout_s
    waiting = False
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except OSError as error:
            if error.errno in _NO_LOCKS_HERE:
                return False
            if error.errno not in (errno.EWOULDBLOCK, errno.EAGAIN, errno.EACCES):
                raise
        waiting = _wait(path, deadline, timeout_s, waiting)


@contextmanager
def _existence_lock(path: Path, timeout_s: float) -> Iterator[None]:
    deadline = time.monotonic() + timeout_s
    waiting = False
    while True:
        try:
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
            break
        except FileExistsError:
            waiting = _wait(path, deadline, timeout_s, waiting)
    try:
        os.write(descriptor, f"{os.getpid()}\n".encode())
        os.close(descriptor)
        yield
    finally:
        path.unlink(missing_ok=True)


def _wait(path: Path, deadline: float, timeout_s: float, waiting: bool) -> bool:
    if time.monotonic() >= deadline:
        raise CheckpointError(
            f"{path} was held by another process for {timeout_s:.0f} s: wait for it, or delete that file if no process "
            "is splitting this checkpoint"
        )
    if not waiting:
        log.info("waiting for another process that is splitting this checkpoint (%s)", path)
    time.sleep(POLL_S)
    return True
