#!/usr/bin/env python
"""Writes the README's table of results from the committed JSON of a run, so that the README never quotes anything else.

    python benchmarks/readme_table.py            # rewrite README.md
    python benchmarks/readme_table.py --check    # exit 1 when README.md does not say what the JSON says
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULT = ROOT / "benchmarks" / "results" / "phi-tiny-h200.json"
PLOT = "benchmarks/results/phi-tiny-h200.png"
START, END = "<!-- results:start -->", "<!-- results:end -->"
NAMES = {
    "eager": "transformers, all weights on the GPU, experts eager (the baseline)",
    "default": "transformers, all weights on the GPU, its default experts",
    "accelerate": "accelerate, `device_map` in the memory the slots take",
    "streaming": "airllm, streaming",
    "slots": "airllm, slots",
    "slots_device": "airllm, slots, `expert_cache_engine=\"device\"` (opt-in, rounds on its own)",
}
GIB = 2**30


def row(kind: str, case: dict[str, Any], mode: str, baseline_s: float) -> str:
    """One line of the table for `case` in decoding mode `mode`."""
    summary = case["summary"][mode]
    decode, floor, hits = summary["decode"], summary["floor"], summary["hit_rate"]
    moved = summary["decode_per_token"].get("h2d_bytes")
    tokens = summary.get("tokens")
    cells = [
        NAMES[kind],
        f"{decode['median_s'] * 1e3:.1f} ({decode['p10_s'] * 1e3:.1f} to {decode['p90_s'] * 1e3:.1f})",
        f"{baseline_s / decode['median_s']:.2f} ×",
        f"{floor['seconds'] * 1e3:.1f} ms, {summary['floor_fraction']:.0%}" if floor else "",
        f"{hits:.2f}" if hits is not None else "",
        f"{moved / 2**20:.0f}" if moved else "",
        f"{case['device_memory']['peak_reserved_bytes'] / GIB:.2f}",
        f"{case['peak_process_bytes'] / GIB:.2f}",
        f"{tokens['equal']} of {tokens['compared']}" if tokens else "",
    ]
    return "| " + " | ".join(cells) + " |"


def table(result: dict[str, Any], mode: str) -> str:
    """The section between the README's markers."""
    if result["faults"]:
        raise SystemExit(f"this result must not be quoted: {result['faults']}")
    asked, hardware, rates = result["asked"], result["hardware"], result["bandwidths"]
    baseline_s = result["cases"]["eager"]["summary"][mode]["decode"]["median_s"]
    head = [
        f"Random weights in Phi-tiny-MoE's exact geometry, {asked['dtype']}, batch 1, {asked['budget_gb']} GiB of slots, "
        f"{asked['prompts']} prompts × {asked['tokens']} tokens of a fixed script, one run on one {hardware['device']} "
        f"({hardware['cpu_cores']} cores of {hardware['cpu']}; torch {hardware['torch']}, transformers "
        f"{hardware['transformers']}; pinned link {rates['link_pinned_large_bytes_per_s'] / 1e9:.1f} GB/s, host copy "
        f"{rates['host_copy_bytes_per_s'] / 1e9:.1f} GB/s). Page cache warm. The floor is the time that the missed or streamed "
        "bytes, or the bytes the device must read, need at the bandwidths measured in the same run.",
        "",
        "| | ms a decoded token (p10 to p90) | speed against the baseline | floor, reached | hit rate | MiB moved a token "
        "| device peak GiB | process peak GiB | tokens equal to the baseline's |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    rows = [row(kind, result["cases"][kind], mode, baseline_s) for kind in NAMES if kind in result["cases"]]
    tail = [
        "",
        "Reproduce it (needs a GPU and 16 GiB of host memory; builds the 7 GiB checkpoint on first use):",
        "",
        "```bash",
        "python benchmarks/expert_cache.py --geometry phi-tiny --dtype float16 --expert-cache-gb 0.75 --tokens 64 --prompts 5 "
        "--vs eager,default,accelerate",
        "```",
        "",
        "The same with the published weights, eight tokens:",
        "",
        "```bash",
        "python benchmarks/expert_cache.py --model microsoft/Phi-tiny-MoE-instruct --revision 2fe50e8 --tokens 8 "
        "--expert-cache-gb 0.75 --dtype float16",
        "```",
        "",
        f"Result file: `{RESULT.relative_to(ROOT)}`. Speed and hit rate against the budget: ![plot]({PLOT})",
    ]
    return "\n".join([*head, *rows, *tail])


def readme_with(section: str, text: str) -> str:
    """`text` with what stands between the markers replaced."""
    before, _, rest = text.partition(START)
    _, _, after = rest.partition(END)
    return f"{before}{START}\n{section}\n{END}{after}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="compare instead of writing")
    parser.add_argument("--mode", default="forced", choices=("forced", "free"))
    options = parser.parse_args()
    readme = ROOT / "README.md"
    old = readme.read_text()
    new = readme_with(table(json.loads(RESULT.read_text()), options.mode), old)
    if options.check:
        return int(old != new)
    readme.write_text(new)
    return 0


if __name__ == "__main__":
    sys.exit(main())
