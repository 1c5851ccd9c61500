#!/usr/bin/env python
"""Writes docs/FAMILIES.md and the README's list of models from the committed JSON of `family_table.py`.

    python benchmarks/family_docs.py            # rewrite both
    python benchmarks/family_docs.py --check    # exit 1 when they do not say what the JSON says
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
from benchmarks.marked_section import replaced  # noqa: E402

RESULTS = sorted((ROOT / "benchmarks" / "results").glob("families-*.json"))
DOCUMENT, README = ROOT / "docs" / "FAMILIES.md", ROOT / "README.md"
START, END = "<!-- families:start -->", "<!-- families:end -->"
INTRODUCTION = """# Model families on slots

One row for each modelling file of transformers that has experts. *exact*: a tiny random model, built and saved by transformers
itself, loaded with `AutoModel.from_pretrained(..., expert_cache_backend="slot")` on the CPU, gives the same logits, bit for
bit, as transformers with `experts_implementation="eager"`, and the same greedy tokens, at three budgets: the experts of one
token, one more, all. *refused*: an error that says why, before any weight is read; such a model can be streamed, unless
transformers has no class for it that generates text from token ids alone.

*device engine*: `expert_cache_engine="device"` serves every decoded token of that model and gives the same greedy tokens; tried
in float32 with its twins in plain torch. Otherwise the reason why the plain engine serves it, by the newest transformers.

Which models are served follows from what their experts modules hold and compute, not from this list.
Written by `benchmarks/family_docs.py` from the JSON of `benchmarks/family_table.py`; do not edit.
"""


def load() -> list[dict[str, Any]]:
    """Results, newest transformers first, float32 before half precision."""
    results = [json.loads(path.read_text()) for path in RESULTS]
    results.sort(key=lambda result: result["dtype"], reverse=True)
    return sorted(results, key=lambda result: [int(part) for part in result["transformers"].split(".")], reverse=True)


def counts(result: dict[str, Any]) -> str:
    """How many rows there are of each outcome."""
    outcomes = [row["outcome"] for row in result["rows"]]
    said = ", ".join(f"{outcomes.count(outcome)} {outcome}" for outcome in sorted(set(outcomes)))
    return f"transformers {result['transformers']}, {result['dtype']}: {said} of {len(outcomes)}"


def served(result: dict[str, Any]) -> list[str]:
    """Which the device engine serves; none where that was not tried."""
    return [row["folder"] for row in result["rows"] if row.get("device_engine") == "yes"]


def document(results: list[dict[str, Any]]) -> str:
    """All of docs/FAMILIES.md."""
    versions = [f"{result['transformers']} {result['dtype']}" for result in results]
    by_folder = [{row["folder"]: row for row in result["rows"]} for result in results]
    heads = [counts(each) + (f"; the device engine serves {len(served(each))}" if served(each) else "") for each in results]
    lines = [INTRODUCTION, *(f"* {head}" for head in heads), ""]
    lines += [f"| modelling file | class | {' | '.join(versions)} | why not | device engine |"]
    lines += ["|---" * (len(versions) + 4) + "|"]
    for folder in sorted({name for rows in by_folder for name in rows}):
        rows = [rows.get(folder) for rows in by_folder]
        known = [row for row in rows if row is not None]
        name = next((row["model_class"] for row in known if row["model_class"]), "")
        reason = next((row["reason"] for row in known if row["reason"]), "").replace("|", "\\|")
        cells = [row["outcome"] if row else "no such file" for row in rows]
        engine = next((row["device_engine"] for row in known if row.get("device_engine")), "").replace("|", "\\|")
        lines.append(f"| {folder} | {name} | {' | '.join(cells)} | {reason} | {engine} |")
    return "\n".join(lines) + "\n"


def section(result: dict[str, Any]) -> str:
    """What stands between the README's markers: the newest transformers' models."""
    exact = ", ".join(row["folder"] for row in result["rows"] if row["outcome"] == "exact")
    others = [row for row in result["rows"] if row["outcome"] != "exact"]
    streamed = ", ".join(row["folder"] for row in others if row["model_class"])
    unknown = ", ".join(row["folder"] for row in others if not row["model_class"])
    by_engine = served(result)
    return (
        f"Bit for bit on transformers {result['transformers']} ({counts(result).partition(': ')[2]} modelling files with "
        f"experts): {exact}.\n\n`expert_cache_engine=\"device\"` serves {len(by_engine)} of these: {', '.join(by_engine)}.\n\n"
        f"Not served, and streamed: {streamed}. Not loaded at all, since transformers has no class for them that generates "
        f"text from tokens alone: {unknown}. [docs/FAMILIES.md](docs/FAMILIES.md) has how it was tried, and the reasons."
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="compare instead of writing")
    options = parser.parse_args()
    results = load()
    wanted = {DOCUMENT: document(results), README: replaced(README.read_text(), START, END, section(results[0]))}
    if options.check:
        return int(any(not path.exists() or path.read_text() != text for path, text in wanted.items()))
    DOCUMENT.parent.mkdir(exist_ok=True)
    for path, text in wanted.items():
        path.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
