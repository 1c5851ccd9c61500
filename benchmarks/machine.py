#!/usr/bin/env python
"""What the machine is and what it can move: hardware, versions, bandwidths, and the memory of this process.

    python benchmarks/machine.py

Bandwidths are medians of several repeats, in bytes a second. On a machine without a GPU the "link" is a copy in host
memory, which is what a device="cpu" run pays for a miss.
"""

from __future__ import annotations

import argparse
import os
import platform
import resource
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

MIB = 2**20


def hardware(device: torch.device) -> dict[str, Any]:
    """Names and versions, so that a figure can be placed."""
    import transformers

    facts: dict[str, Any] = {
        "cpu": cpu_name(),
        "cpu_cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "host_memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "system": platform.platform(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "torch_threads": torch.get_num_threads(),
        "device": "cpu",
    }
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        facts |= {
            "device": properties.name,
            "device_memory_bytes": properties.total_memory,
            "cuda": torch.version.cuda,
            "hip": torch.version.hip,
        }
    return facts


def cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.processor())


# ---- bandwidths


def bandwidth(action: Callable[[], None], nbytes: int, device: torch.device, repeats: int = 7) -> float:
    """Median bytes a second of `action`, which moves `nbytes`; the device is idle before and after each repeat."""
    action()
    rates = []
    for _ in range(repeats):
        synchronize(device)
        start = time.perf_counter()
        action()
        synchronize(device)
        rates.append(nbytes / (time.perf_counter() - start))
    return statistics.median(rates)


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def touched(nbytes: int, pin: bool = False) -> torch.Tensor:
    """Host bytes whose pages exist."""
    return torch.empty(nbytes, dtype=torch.uint8, pin_memory=pin).fill_(1)


def link_bandwidths(device: torch.device, block_bytes: int, large_bytes: int) -> dict[str, float]:
    """Host to device: pinned in one large copy and in blocks of one expert, and pageable."""
    pin = device.type == "cuda"
    source = touched(large_bytes, pin)
    target = torch.empty(large_bytes, dtype=torch.uint8, device=device)
    blocks = max(1, min(64, large_bytes // block_bytes))
    size = min(block_bytes, large_bytes)

    def copy_blocks() -> None:
        for block in range(blocks):
            part = slice(block * size, (block + 1) * size)
            target[part].copy_(source[part], non_blocking=True)

    rates = {
        "link_pinned_large": bandwidth(lambda: copy(target, source), large_bytes, device),
        "link_pinned_expert_blocks": bandwidth(copy_blocks, blocks * size, device),
    }
    if pin:
        pageable = touched(large_bytes // 8)
        rates["link_pageable"] = bandwidth(lambda: copy(target[: pageable.numel()], pageable), pageable.numel(), device)
    return rates


def copy(target: torch.Tensor, source: torch.Tensor) -> None:
    target.copy_(source, non_blocking=True)


def host_copy_bandwidth(nbytes: int, threads: int) -> float:
    """Bytes copied a second from host memory to host memory, by `threads` threads at once."""
    source, target = touched(nbytes), touched(nbytes)
    step = -(-nbytes // threads)
    parts = [slice(start, min(start + step, nbytes)) for start in range(0, nbytes, step)]
    cpu = torch.device("cpu")
    torch_threads = torch.get_num_threads()
    torch.set_num_threads(1)  # else every thread of the pool would start threads of its own
    try:
        with ThreadPoolExecutor(threads) as pool:

            def action() -> None:
                list(pool.map(lambda part: target[part].copy_(source[part]), parts))

            return bandwidth(action, nbytes, cpu)
    finally:
        torch.set_num_threads(torch_threads)


def thread_counts() -> list[int]:
    cores = os.cpu_count() or 1
    return [count for count in (1, 2, 4, 8, 16) if count <= cores]


def page_cache_bandwidth(nbytes: int, threads: int) -> float:
    """Bytes read a second from a file that is in the page cache, by the reads that loading and streaming use."""
    from safetensors.torch import save_file

    from airllm.checkpoint import CheckpointIndex, TensorReader

    target = touched(nbytes)
    with tempfile.TemporaryDirectory() as folder, TensorReader(threads) as reader:
        save_file({"block": target}, Path(folder) / "model.safetensors")
        entry = CheckpointIndex.open(folder)["block"]
        step = max(MIB, -(-nbytes // threads))
        starts = range(0, nbytes, step)
        jobs = [partial(reader.read_into, entry, target[start : start + step], start) for start in starts]
        return bandwidth(lambda: reader.run(jobs), nbytes, torch.device("cpu"))


def device_bandwidth(device: torch.device, nbytes: int) -> float:
    """Device memory, bytes read plus bytes written a second by a copy."""
    source = torch.empty(nbytes, dtype=torch.uint8, device=device).fill_(1)
    target = torch.empty_like(source)
    return bandwidth(lambda: copy(target, source), 2 * nbytes, device)


def bandwidths(device: torch.device, expert_bytes: int, large_bytes: int = 2**31) -> dict[str, float]:
    """Every bandwidth a floor is made of, measured here and now."""
    host_bytes = min(large_bytes, 2**30)
    rates = link_bandwidths(device, expert_bytes, large_bytes)
    # The best of several thread counts, so that no floor is flattered.
    rates["host_copy"] = max(host_copy_bandwidth(host_bytes, threads) for threads in thread_counts())
    rates["page_cache_read"] = max(page_cache_bandwidth(host_bytes, threads) for threads in thread_counts()[-2:])
    rates["device_copy_read_plus_write"] = device_bandwidth(device, large_bytes)
    return {f"{name}_bytes_per_s": rate for name, rate in rates.items()}


# ---- this process


def status_bytes(field: str) -> int | None:
    """A field of /proc/self/status (VmHWM, VmRSS, RssAnon, RssFile, RssShmem) in bytes, or None where it is missing."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    return None


def io_bytes() -> dict[str, int]:
    """rchar: bytes this process asked of read calls; read_bytes: bytes fetched from storage. Empty where unknown."""
    try:
        lines = Path("/proc/self/io").read_text().splitlines()
    except OSError:
        return {}
    pairs = (line.split(":") for line in lines)
    return {name: int(value) for name, value in pairs if name in ("rchar", "read_bytes")}


class PeakMemory:
    """Peak resident bytes of this process, from the kernel's own mark where it has one, else by sampling.

    The mark is set back at the start where the kernel allows it (/proc/self/clear_refs). `source` says which way.
    """

    def __init__(self) -> None:
        self.sampled = 0
        self.stop = threading.Event()
        self.thread: threading.Thread | None = None
        if status_bytes("VmHWM"):
            self.source = "VmHWM since the start of the process" if not reset_high_water() else "VmHWM"
        elif status_bytes("VmRSS"):
            self.source = "VmRSS sampled every 5 ms"
            self.thread = threading.Thread(target=self.sample, daemon=True)
            self.thread.start()
        else:
            self.source = "ru_maxrss"

    def sample(self) -> None:
        while not self.stop.wait(0.005):
            self.sampled = max(self.sampled, status_bytes("VmRSS") or 0)

    def bytes(self) -> int:
        if self.source.startswith("VmHWM"):
            return status_bytes("VmHWM") or 0
        if self.thread is not None:
            return max(self.sampled, status_bytes("VmRSS") or 0)
        unit = 1 if sys.platform == "darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def reset_high_water() -> bool:
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return False
    return True


def memory_now() -> dict[str, int | None]:
    fields = {"rss_bytes": "VmRSS", "anonymous_bytes": "RssAnon", "file_bytes": "RssFile", "shared_bytes": "RssShmem"}
    return {name: status_bytes(field) for name, field in fields.items()}


def device_memory(device: torch.device) -> dict[str, int]:
    """Counters of torch's allocator: peaks, and how often it took memory from the driver. Empty on the CPU."""
    if device.type != "cuda":
        return {}
    stats = torch.cuda.memory_stats(device)
    names = {
        "peak_reserved_bytes": "reserved_bytes.all.peak",
        "peak_allocated_bytes": "allocated_bytes.all.peak",
        "reserved_bytes": "reserved_bytes.all.current",
        "allocated_bytes": "allocated_bytes.all.current",
        "segments": "segment.all.current",
        "segments_taken": "segment.all.allocated",
        "tensors_taken": "allocation.all.allocated",
        "alloc_retries": "num_alloc_retries",
    }
    return {name: int(stats.get(key, 0)) for name, key in names.items()}


def pick_device(name: str | None) -> torch.device:
    if name:
        return torch.device(name)
    return torch.device("cuda:0" if torch.cuda.is_available() else "cpu")


def main() -> None:
    parser = argparse.ArgumentParser(description="This machine, and the bandwidths of its memories and of the link to its GPU.")
    parser.add_argument("device", nargs="?", help="default: a GPU if there is one")
    device = pick_device(parser.parse_args().device)
    peak = PeakMemory()
    for name, value in hardware(device).items():
        print(f"{name:>40}  {value}")
    large = 2**31 if device.type == "cuda" else 2**27
    for name, rate in bandwidths(device, 11_010_048, large).items():
        print(f"{name:>40}  {rate / 1e9:.2f} GB/s")
    print(f"{'peak memory of this process':>40}  {peak.bytes() / 2**30:.3f} GiB ({peak.source})")


if __name__ == "__main__":
    main()
