"""Host memory of an exact size: how much there is, a block of it, and pinning it without rounding up.

torch's own pinned allocator rounds large requests up to a power of two (5.25 GiB would take 8), so the block is mapped
here, filled, and then registered with the driver: registration of touched pages is also the faster way to pin. It is private
memory, since Linux backs only that with huge pages when asked to (`madvise`, its documentation of transparent huge pages);
filling and registering those take a third of the time. What they do not change is how fast a kernel reads over the link.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import weakref
from pathlib import Path
from typing import Any

import torch

from airllm.errors import HostMemoryError

_CGROUP_LIMITS = (
    ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
    ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
)

_PRIVATE: dict[str, Any] = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if hasattr(mmap, "MAP_PRIVATE") else {}


def _meminfo_bytes(field: str) -> int | None:
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith(field + ":"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return None


def _cgroup_free_bytes() -> int | None:
    for limit_file, used_file in _CGROUP_LIMITS:
        try:
            limit, used = Path(limit_file).read_text().strip(), Path(used_file).read_text().strip()
        except OSError:
            continue
        if limit.isdigit() and int(limit) < 2**60:
            # The page cache counts as used there although the kernel gives it back; count it as free.
            return int(limit) - int(used) + _cgroup_file_cache_bytes(Path(limit_file).parent)
    return None


def _cgroup_file_cache_bytes(folder: Path) -> int:
    try:
        for line in (folder / "memory.stat").read_text().splitlines():
            key, _, value = line.partition(" ")
            if key == "inactive_file":
                return int(value)
    except OSError:
        pass
    return 0


def available_bytes() -> int | None:
    """Host memory that can be taken now without swapping; None where the system does not tell."""
    known = [value for value in (_meminfo_bytes("MemAvailable"), _cgroup_free_bytes()) if value is not None]
    if known:
        return min(known)
    try:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):
        return None


class HostBlock:
    """``nbytes`` of host memory as one uint8 tensor, zero-filled lazily by the system, never rounded up beyond a (huge) page.

    ``pin()`` after filling; ``close()`` unregisters and lets the memory go. Raises HostMemoryError where the system refuses.
    """

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        try:
            self._map: mmap.mmap | None = mmap.mmap(-1, max(nbytes, 1), **_PRIVATE)
        except OSError as error:
            raise HostMemoryError(f"the system does not give {nbytes} B of host memory ({error}): see `ulimit -v`") from error
        _advise(self._map, "MADV_HUGEPAGE")  # a kernel that has none refuses: ordinary pages do
        whole = torch.frombuffer(self._map, dtype=torch.uint8)
        self.tensor = whole[:nbytes]
        self.pinned = False
        self.pin_reason = "not asked for"

    def pin(self, device: torch.device | None = None) -> bool:
        """Register the block with the driver. False, with ``pin_reason`` saying why, when that is refused or has no effect.

        ``device``: the one whose copies and kernels will read the block; the current one when left out.
        """
        if not torch.cuda.is_available():
            self.pin_reason = "no CUDA or ROCm device"
            return False
        runtime = torch.cuda.cudart()
        try:
            status = int(runtime.cudaHostRegister(self.tensor.data_ptr(), self.nbytes, 0))
        except RuntimeError as error:
            status, self.pin_reason = -1, f"registration failed: {error}"
        else:
            self.pin_reason = f"registration refused with status {status} for {self.nbytes} B (check `ulimit -l`)"
        if status != 0:
            _read_off_error()
            return False
        if not self.tensor.is_pinned():
            # Seen on some ROCm versions: success is reported and nothing is pinned.
            runtime.cudaHostUnregister(self.tensor.data_ptr())
            self.pin_reason = "registration reported success but the memory is not pinned"
            return False
        self.pinned, self.pin_reason = True, f"registered {self.nbytes} B"
        assert self._map is not None
        _advise(self._map, "MADV_DONTFORK")  # else a child process gets a copy of every page that the driver holds
        # A model that is dropped without close() must not leave pages registered that the system hands out again.
        self._unpin = weakref.finalize(self, _unregister, self.tensor.data_ptr(), device)
        self._unpin.atexit = False  # the driver goes first then, and takes its registrations along
        return True

    def close(self) -> None:
        """Unpin and give the memory back to the system. Idempotent."""
        if self._map is None:
            return
        if self.pinned:
            self._unpin()
            self.pinned = False
            _advise(self._map, "MADV_DOFORK")
        # Only the references go: views that somebody still holds keep the mapping alive, and it is unmapped with the last one.
        self.tensor = torch.empty(0, dtype=torch.uint8)
        self._map = None


def _advise(area: mmap.mmap, advice: str) -> None:
    """Tell the system, where it can be told."""
    if hasattr(mmap, advice):
        with contextlib.suppress(OSError):
            area.madvise(getattr(mmap, advice))


def _read_off_error() -> None:
    """The runtime keeps the error of a refused call, and torch would raise it at the next kernel launch, whoever launches."""
    with contextlib.suppress(RuntimeError, AssertionError):
        torch.zeros(1, device="cuda")


def _unregister(address: int, device: torch.device | None) -> None:
    torch.cuda.synchronize(device)  # a copy or a kernel may still be reading
    torch.cuda.cudart().cudaHostUnregister(address)
