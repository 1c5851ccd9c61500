"""Host memory: how much there is, a block of exactly the bytes asked for, pinning and every way in which it is refused."""

from __future__ import annotations

import gc
import os
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from host_pages import process_bytes, resident_bytes
from slot_rig import gpu

from airllm.experts import host_memory
from airllm.experts.host_memory import HostBlock

MIB = 2**20


# --- how much there is ------------------------------------------------------------------------------------------------


@pytest.fixture
def files(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """The system's files, as far as the module under test sees them."""
    content: dict[str, str] = {}

    def read_text(path: Path, *_: object, **__: object) -> str:
        if str(path) not in content:
            raise FileNotFoundError(path)
        return content[str(path)]

    monkeypatch.setattr(host_memory.Path, "read_text", read_text)
    return content


MEMINFO = "MemTotal:  900 kB\nMemFree:  10 kB\nMemAvailable:    700 kB\n"


def test_what_is_available_counts_and_not_what_is_free(files: dict[str, str]) -> None:
    files["/proc/meminfo"] = MEMINFO
    assert host_memory.available_bytes() == 700 * 1024


def test_a_container_limit_below_the_machines_memory_wins(files: dict[str, str]) -> None:
    files["/proc/meminfo"] = MEMINFO
    files["/sys/fs/cgroup/memory.max"] = "500000\n"
    files["/sys/fs/cgroup/memory.current"] = "450000\n"
    files["/sys/fs/cgroup/memory.stat"] = "anon 1\ninactive_file 20000\nfile 9\n"
    assert host_memory.available_bytes() == 70_000, "page cache is given back by the kernel when it is wanted"


@pytest.mark.parametrize("limit", ["max", "9223372036854771712"])
def test_no_limit_is_no_limit(limit: str, files: dict[str, str]) -> None:
    files["/proc/meminfo"] = MEMINFO
    files["/sys/fs/cgroup/memory.max"], files["/sys/fs/cgroup/memory.current"] = limit, "5"
    assert host_memory.available_bytes() == 700 * 1024


def test_the_older_control_groups_are_read_too(files: dict[str, str]) -> None:
    files["/sys/fs/cgroup/memory/memory.limit_in_bytes"] = "5000"
    files["/sys/fs/cgroup/memory/memory.usage_in_bytes"] = "1000"
    assert host_memory.available_bytes() == 4000


def test_without_any_file_the_system_is_asked_and_may_not_know(
    files: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert host_memory.available_bytes() == os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    monkeypatch.delattr(os, "sysconf")
    assert host_memory.available_bytes() is None


# --- a block ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("nbytes", [1, 4095, 3 * MIB + 17])
def test_a_block_has_exactly_the_bytes_asked_for_and_starts_as_zeros(nbytes: int) -> None:
    block = HostBlock(nbytes)
    assert block.tensor.shape == (nbytes,) and block.tensor.dtype == torch.uint8
    assert not block.tensor.any()
    block.tensor.fill_(7)
    assert int(block.tensor.sum()) == 7 * nbytes
    block.close()


def test_an_empty_block_is_fine() -> None:
    assert HostBlock(0).tensor.numel() == 0


def test_memory_is_taken_when_touched_and_goes_when_closed() -> None:
    gc.collect()
    before = process_bytes()
    block = HostBlock(64 * MIB)
    place = block.tensor.data_ptr(), 64 * MIB
    assert resident_bytes(*place) < 8 * MIB and process_bytes() - before < 8 * MIB
    block.tensor.fill_(1)
    assert resident_bytes(*place) == 64 * MIB
    assert process_bytes() - before < 70 * MIB, "one copy, not rounded up to a power of two"
    block.close()
    block.close()
    assert resident_bytes(*place) < 8 * MIB and process_bytes() - before < 8 * MIB


def huge_pages() -> bool:
    """Whether the system gives huge pages to those who ask."""
    setting = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    return setting.exists() and "[never]" not in setting.read_text()


@pytest.mark.skipif(not huge_pages(), reason="the system gives no huge pages")
def test_a_block_lies_in_huge_pages_where_the_system_gives_them() -> None:
    block = HostBlock(64 * MIB)
    block.tensor.fill_(1)
    assert resident_bytes(block.tensor.data_ptr(), 64 * MIB, "AnonHugePages") >= 32 * MIB, "all but the ends, memory permitting"
    block.close()


# --- pinning ----------------------------------------------------------------------------------------------------------


class Driver:
    """A driver of which a test says how it answers."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, status: int | Exception = 0, really: bool = True) -> None:
        self.status, self.calls = status, []
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: self.calls.append("synchronize"))
        monkeypatch.setattr(
            torch.cuda,
            "cudart",
            lambda: SimpleNamespace(cudaHostRegister=self.register, cudaHostUnregister=self.unregister),
        )
        monkeypatch.setattr(torch.Tensor, "is_pinned", lambda *_: really)

    def register(self, _address: int, nbytes: int, _flags: int) -> int:
        self.calls.append(("register", nbytes))
        if isinstance(self.status, Exception):
            raise self.status
        return self.status

    def unregister(self, _address: int) -> int:
        self.calls.append("unregister")
        return 0


def test_pinning_registers_the_exact_size_and_closing_undoes_it_after_the_last_copy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    driver = Driver(monkeypatch)
    block = HostBlock(5 * MIB + 4096)
    assert block.pin() and block.pinned
    assert driver.calls == [("register", 5 * MIB + 4096)]
    block.close()
    block.close()
    assert driver.calls[1:] == ["synchronize", "unregister"] and not block.pinned


def test_a_pinned_block_that_is_dropped_is_unregistered(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver(monkeypatch)
    block = HostBlock(4096)
    block.pin()
    del block
    gc.collect()
    assert driver.calls[-1] == "unregister"


@pytest.mark.parametrize(
    ("status", "really", "reason"),
    [(2, True, "status 2 for 4096 B.*ulimit"), (RuntimeError("boom"), True, "boom"), (0, False, "not pinned")],
    ids=["refused", "raised", "silently not done"],
)
def test_every_way_not_to_pin_leaves_a_reason_and_a_usable_block(
    status: int | Exception, really: bool, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = Driver(monkeypatch, status=status, really=really)
    block = HostBlock(4096)
    assert not block.pin() and not block.pinned
    assert re.search(reason, block.pin_reason)
    assert ("unregister" in driver.calls) == (not really)
    block.tensor.fill_(3)
    block.close()


def test_without_a_gpu_pinning_is_not_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    block = HostBlock(4096)
    assert not block.pin() and "no CUDA or ROCm device" in block.pin_reason


@gpu
def test_on_a_gpu_the_block_is_pinned_with_its_exact_size() -> None:
    warm = HostBlock(MIB)
    warm.tensor.fill_(1)
    warm.pin()
    warm.tensor.to("cuda:0").cpu()  # whatever the driver takes once
    gc.collect()
    nbytes = 65 * MIB
    before = process_bytes()
    block = HostBlock(nbytes)
    block.tensor.fill_(1)
    assert block.pin() and block.tensor.is_pinned(), block.pin_reason
    assert process_bytes() - before < nbytes + 8 * MIB, "torch's own pinned memory would take 128 MiB"
    assert torch.equal(block.tensor.to("cuda:0", non_blocking=True).cpu(), block.tensor)
    block.close()
    assert process_bytes() - before < 8 * MIB


@gpu
def test_a_refused_registration_leaves_the_device_usable() -> None:
    block = HostBlock(MIB)
    block.tensor.fill_(1)
    assert block.pin()
    assert not block.pin(), "it is registered already"
    assert "status" in block.pin_reason and block.pinned
    assert float(torch.ones(3, device="cuda:0").sum()) == 3
    block.close()
