"""PURE: what a token must cost at least, and which numbers cannot be true."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

# Clocks and bandwidths are measured a few percent apart; beyond this a rate is not noise but a mistake.
TOLERANCE = 1.05


@dataclass(frozen=True)
class Floor:
    """The least seconds of one decoded token, and what sets it."""

    seconds: float
    set_by: str


def resident_floor(device_read_bytes: float, bandwidths: Mapping[str, float]) -> Floor:
    """Every weight a token uses is read from device memory once."""
    return Floor(device_read_bytes / device_rate(bandwidths), "device memory")


def slot_floor(missed_bytes: float, device_read_bytes: float, bandwidths: Mapping[str, float]) -> Floor:
    """max(missed bytes / pinned link, bytes that the device must read / device memory): the two can overlap."""
    over_link = missed_bytes / link_rate(bandwidths)
    in_device = resident_floor(device_read_bytes, bandwidths)
    return Floor(over_link, "link") if over_link > in_device.seconds else in_device


def stream_floor(read_bytes: float, moved_bytes: float, bandwidths: Mapping[str, float]) -> Floor:
    """max(bytes read / host copy, bytes moved / pinned link), with the page cache warm."""
    reading = read_bytes / bandwidths["host_copy_bytes_per_s"]
    moving = moved_bytes / link_rate(bandwidths)
    return Floor(moving, "link") if moving > reading else Floor(reading, "host copy")


def dense_floor(
    streamed_bytes: float, missed_bytes: float, device_read_bytes: float, bandwidths: Mapping[str, float], from_files: bool
) -> Floor:
    """Experts in slots beside dense weights that stream. The largest of: streamed and missed bytes / pinned link; bytes that
    the device must read / device memory; and, where the files are read each time, streamed bytes / host copy, with the page
    cache warm."""
    moving = slot_floor(streamed_bytes + missed_bytes, device_read_bytes, bandwidths)
    reading = stream_floor(streamed_bytes if from_files else 0, 0, bandwidths)
    return max(reading, moving, key=lambda f: f.seconds)


def link_rate(bandwidths: Mapping[str, float]) -> float:
    """The better of the two ways of copying pinned memory, so that no floor is flattered."""
    return max(bandwidths["link_pinned_large_bytes_per_s"], bandwidths["link_pinned_expert_blocks_bytes_per_s"])


def device_rate(bandwidths: Mapping[str, float]) -> float:
    return bandwidths["device_copy_read_plus_write_bytes_per_s"]


def impossible(moved_bytes: float, seconds: float, bandwidths: Mapping[str, float]) -> str | None:
    """Why the pair cannot be true: faster than the link moves that many bytes. None when it can."""
    limit = link_rate(bandwidths)
    if seconds <= 0:
        return f"{moved_bytes:.0f} B moved in {seconds} s"
    rate = moved_bytes / seconds
    if rate <= limit * TOLERANCE:
        return None
    return f"{moved_bytes:.0f} B in {seconds:.6f} s is {rate / 1e9:.1f} GB/s, the link was measured at {limit / 1e9:.1f} GB/s"


def spread(values: Sequence[float], unit: str = "_s") -> dict[str, float]:
    """Median and spread of a list, under names that end in ``unit``."""
    ordered = sorted(values)
    figures = {
        "median": statistics.median(ordered),
        "mean": statistics.fmean(ordered),
        "p10": percentile(ordered, 0.1),
        "p90": percentile(ordered, 0.9),
        "min": ordered[0],
        "max": ordered[-1],
    }
    return {"count": len(ordered)} | {name + unit: value for name, value in figures.items()}


def percentile(ordered: Sequence[float], fraction: float) -> float:
    """Nearest rank."""
    return ordered[max(0, math.ceil(fraction * len(ordered)) - 1)]


def same_prefix(left: Sequence[Sequence[int]], right: Sequence[Sequence[int]]) -> dict[str, int | bool]:
    """Compare token ids prompt by prompt over the length that both have (slow cases decode fewer)."""
    compared = equal = 0
    for mine, theirs in zip(left, right, strict=False):
        pairs = list(zip(mine, theirs, strict=False))
        compared += len(pairs)
        equal += sum(a == b for a, b in pairs)
    return {"compared": compared, "equal": equal, "identical": compared > 0 and compared == equal}
