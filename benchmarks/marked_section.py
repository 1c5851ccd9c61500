"""A section of a document between two markers, which a script writes and `--check` compares."""

from __future__ import annotations


def replaced(text: str, start: str, end: str, section: str) -> str:
    """`text` with what stands between the first `start` and the `end` behind it replaced by `section`."""
    before, _, rest = text.partition(start)
    _, _, after = rest.partition(end)
    return f"{before}{start}\n{section}\n{end}{after}"
