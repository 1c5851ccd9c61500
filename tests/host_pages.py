"""Which pages of a piece of address space lie in memory, whatever else the process takes or gives back meanwhile."""

from __future__ import annotations

import re
from pathlib import Path

AREA = re.compile(r"([0-9a-f]+)-([0-9a-f]+) [rwxps-]{4} ")


def resident_bytes(address: int, nbytes: int) -> int:
    """Bytes in memory of the mappings that overlap [address, address + nbytes), each counted up to what overlaps."""
    found = overlap = 0
    for line in Path("/proc/self/smaps").read_text().splitlines():
        area = AREA.match(line)
        if area:
            start, end = (int(side, 16) for side in area.groups())
            overlap = max(0, min(end, address + nbytes) - max(start, address))
        elif line.startswith("Rss:"):
            found += min(int(line.split()[1]) * 1024, overlap)
    return found
