#!/usr/bin/env python
"""Write the README's table of measurements from the committed JSON, so that no number there is typed by hand.

    python benchmarks/readme_table.py            rewrite the part between the marks
    python benchmarks/readme_table.py --check    exit 1 when README.md and benchmarks/results/ disagree
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from benchmarks.report import GIB, mib, shown  # noqa: E402

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
START, END = "<!-- results:start -->", "<!-- results:end -->"
COLUMNS = ("", "prompt", "a token", "tokens/s", "floor", "reached", "hits", "moved a token")
COLUMNS += ("device peak", "process peak", "tokens equal")
NAMES = {
    "eager": "transformers, all resident, experts eager",
    "default": "transformers, all resident, its default experts",
    "accelerate": 'accelerate, device_map="auto"',
    "streaming": "airllm, streaming",
    "slots": "airllm, slots",
}


def tables(folder: Path = RESULTS) -> str:
    """One table for every result file that ran whole cases, in the order of the file names."""
    results = [(path, json.loads(path.read_text(encoding="utf-8"))) for path in sorted(folder.glob("*.json"))]
    ours = [pair for pair in results if pair[1].get("benchmark") == "expert_cache" and pair[1]["cases"]]
    parts = ["\n".join(table(path, result)) for path, result in ours]
    return "\n\n".join(parts)


def table(path: Path, result: dict[str, Any]) -> Iterator[str]:
    asked, hardware = result["asked"], result["hardware"]
    mode = asked["modes"][0]
    yield (
        f"{hardware['device']}, link {link(result) / 1e9:.1f} GB/s, {asked['source']} in {asked['dtype']}, "
        f"`expert_cache_gb={asked['budget_gb']:g}`, batch 1, {mode} decoding "
        f"([{path.name}](benchmarks/results/{path.name})):"
    )
    yield ""
    yield "| " + " | ".join(COLUMNS) + " |"
    yield "|" + "---|" * len(COLUMNS)
    for kind, case in result["cases"].items():
        if mode in case.get("summary", {}):
            yield row(NAMES[kind], case, case["summary"][mode])


def link(result: dict[str, Any]) -> float:
    return result["bandwidths"]["link_pinned_large_bytes_per_s"]


def row(name: str, case: dict[str, Any], summary: dict[str, Any]) -> str:
    floor, same = summary["floor"], summary["tokens"]
    moved = mib(summary["decode_per_token"].get("h2d_bytes"))
    device = case["device_memory"].get("peak_reserved_bytes")
    cells = [
        name,
        f"{summary['prompt']['median_s'] * 1e3:.0f} ms",
        f"{summary['decode']['median_s'] * 1e3:.1f} ms",
        f"{summary['decode_tokens_per_s']:.2f}",
        shown(floor and floor["seconds"] * 1e3, ".1f") + (" ms" if floor else ""),
        shown(summary["floor_fraction"], ".0%"),
        shown(summary["hit_rate"], ".2f"),
        shown(moved, ".0f") + ("" if moved is None else " MiB"),
        shown(device and device / GIB, ".2f") + (" GiB" if device else ""),
        f"{case['peak_process_bytes'] / GIB:.2f} GiB",
        f"{same['equal']}/{same['compared']}",
    ]
    return "| " + " | ".join(cells) + " |"


def with_tables(readme: str, block: str) -> str:
    """The README with everything between the marks replaced."""
    head, start, rest = readme.partition(START)
    _, end, tail = rest.partition(END)
    if not start or not end:
        raise SystemExit(f"README.md lacks the marks {START} and {END}")
    return f"{head}{start}\n{block}\n{end}{tail}"


def main() -> int:
    path = ROOT / "README.md"
    readme = path.read_text(encoding="utf-8")
    wanted = with_tables(readme, tables())
    if "--check" in sys.argv[1:]:
        if wanted != readme:
            print("README.md does not show what benchmarks/results/ holds: run python benchmarks/readme_table.py")
        return int(wanted != readme)
    path.write_text(wanted, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
