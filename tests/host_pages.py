"""How much of a piece of address space lies in memory, and how much of the whole process.

What a block must have at least is held against its own pages: the process may give back other memory meanwhile. What it may
have at most is held against the process, in which a second copy would show.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

AREA = re.compile(r"([0-9a-f]+)-([0-9a-f]+) [rwxps-]{4} ")


def resident_bytes(address: int, nbytes: int, kind: str = "Rss") -> int:
    """Bytes in memory of the mappings that overlap [address, address + nbytes), each counted up to what overlaps. ``kind``:
    "AnonHugePages" counts those in huge pages only."""
    found = overlap = 0
    for line in Path("/proc/self/smaps").read_text().splitlines():
        area = AREA.match(line)
        if area:
            start, end = (int(side, 16) for side in area.groups())
            overlap = max(0, min(end, address + nbytes) - max(start, address))
        elif line.startswith(f"{kind}:"):
            found += min(int(line.split()[1]) * 1024, overlap)
    return found


def process_bytes() -> int:
    """Bytes in memory of the whole process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
