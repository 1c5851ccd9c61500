#!/usr/bin/env python
"""Writes the README's table of results from the committed JSON of a run, so that the README never quotes anything else.

    python benchmarks/readme_table.py            # rewrite README.md
    python benchmarks/readme_table.py --check    # exit 1 when README.md does not say what the JSON says
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
from benchmarks.marked_section import replaced  # noqa: E402

RESULT = ROOT / "benchmarks" / "results" / "phi-tiny-h200.json"
ENGINE = RESULT.with_name("decode-engine-h200.json")
DENSE = RESULT.with_name("dense-streaming-h200.json")
SOAK = RESULT.with_name("soak-h200.json")
GAINS = [RESULT.with_name(f"gain-{name}-h200.json") for name in ("phi-mini", "phi-3.5")]
SHAPES = [RESULT.with_name(f"family-speed-{name}-h200.json") for name in ("qwen3", "mixtral")]
PATHS = (RESULT, ENGINE, DENSE, SOAK, *GAINS, *SHAPES)
PLOTS = "benchmarks/results/phi-tiny-h200.png", "benchmarks/results/tiny-cpu.png"
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


def where(result: dict[str, Any]) -> str:
    """What ran, on what."""
    asked, hardware, rates = result["asked"], result["hardware"], result["bandwidths"]
    return (
        f"{asked['dtype']}, batch 1, {asked['budget_gb']} GiB of slots, {asked['prompts']} prompts × {asked['tokens']} "
        f"tokens, one {hardware['device']} ({hardware['cpu_cores']} cores of {hardware['cpu']}; torch {hardware['torch']}, "
        "transformers "
        f"{hardware['transformers']}; pinned link {rates['link_pinned_large_bytes_per_s'] / 1e9:.1f} GB/s, host copy "
        f"{rates['host_copy_bytes_per_s'] / 1e9:.1f} GB/s)"
    )


def rows_of(result: dict[str, Any], mode: str, kinds: Iterable[str] = tuple(NAMES)) -> list[str]:
    """The table of one run in one decoding mode."""
    if result["faults"]:
        raise SystemExit(f"this result must not be quoted: {result['faults']}")
    baseline_s = result["cases"]["eager"]["summary"][mode]["decode"]["median_s"]
    head = [
        "| | ms a decoded token, median (p10 to p90) | speed against the baseline | floor, reached | hit rate "
        "| MiB moved a token | device peak GiB | process peak GiB | tokens equal to the baseline's |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    return head + [row(kind, result["cases"][kind], mode, baseline_s) for kind in kinds if kind in result["cases"]]


def in_turn(result: dict[str, Any]) -> str:
    """Median and spread of streaming's ratio to its floor."""
    ratios = result["cases"]["streaming"]["turn_ratios"]
    return f"{ratios['median']:.2f} ({ratios['p10']:.2f} to {ratios['p90']:.2f})"


def engine_rows(engine: dict[str, Any]) -> list[str]:
    """What decode_engine.py measured: steps, prompts, and the error of the logits."""
    lines = ["| | ms | floor ms | ratio | hit rate |", "|---|---|---|---|---|"]
    steps = {name: row for name, row in engine["decoding"].items() if isinstance(row, dict)}
    for name, row in (steps | {"budget, routing recorded of the shipped model": engine["routing"]}).items():
        ours = row["ours"]
        times = f"{ours['step_s'] * 1e3:.2f} | {row['floor_s'] * 1e3:.2f} | {ours['step_s'] / row['floor_s']:.2f}"
        lines.append(f"| a decoded step, {name} ({ours['slots']} slots) | {times} | {ours['hit_rate']:.2f} |")
    for name, row in engine["prompts"].items():
        floor_s, each_ms = max(row["bank_over_link_s"], row["arithmetic_s"]), [second * 1e3 for second in row["prompts_s"]]
        times = f"{row['prompt_s'] * 1e3:.0f} ({min(each_ms):.0f} to {max(each_ms):.0f})"
        times += f" | {floor_s * 1e3:.0f} | {row['ratio']:.2f}"
        lines.append(f"| a prompt of {name} | {times} | |")
    errors = ", ".join(f"{name} {row['mean']:.2f}" for name, row in engine["logits_error"].items())
    host_ms = engine["decoding"]["host_s_a_token"] * 1e3
    host = f"Host time a token outside the recorded step, where nothing is launched ahead: {host_ms:.2f} ms."
    return [*lines, "", f"{host} Mean error of the logits against a float32 model: {errors}."]


def turns(result: dict[str, Any]) -> str:
    """What slots and eager say when they decode in turn."""
    (ratios,) = (row for row in result["pair"]["ratios"] if (row["of"], row["mode"]) == ("slots", "forced"))
    return (
        f"In turn, prompt by prompt in one process, slots take {ratios['median']:.2f} ({ratios['p10']:.2f} to "
        f"{ratios['p90']:.2f}) of eager's time a token."
    )


def dense_rows(result: dict[str, Any]) -> list[str]:
    """What dense_streaming.py measured."""
    lines = ["| | ms a token | floor ms | ratio | MiB of dense weights, of experts moved a token |", "|---|---|---|---|---|"]
    for name, row in result["runs"].items():
        times = f"{row['step_s'] * 1e3:.1f} | {row['floor']['seconds'] * 1e3:.1f} | {row['times_floor']:.2f}"
        lines.append(f"| {name} | {times} | {row['streamed_bytes'] / 2**20:.0f}, {row['missed_bytes'] / 2**20:.0f} |")
    same = result["tokens"]
    return [*lines, "", f"Tokens: {same['equal']} of {same['compared']} equal those with everything resident."]


def soaked(result: dict[str, Any]) -> str:
    """What soak.py found."""
    if result["faults"]:
        raise SystemExit(f"this result must not be quoted: {result['faults']}")
    growth = ", ".join(f"{name} {value}" for name, value in result["growth"].items())
    return (
        f"{result['generates']} calls of generate of random length, batch and kind in the {result['statistics']['engine']} "
        f"engine (`benchmarks/soak.py`), the second half asking what the first did: {result['answers_compared']} of "
        f"{result['answers_compared']} answers the same; growth: {growth}."
    )


def gained(result: dict[str, Any]) -> str:
    """What the policy gains a model whose slots are few."""
    gain = result["gain"]
    return (
        f"Geometry of {result['geometry']}, {result['budget_gb']:g} GiB ({gain['aged']['slots']} slots), device engine: "
        f"{gain['aged']['step_s'] * 1e3:.1f} ms a token, hit rate {gain['aged']['hit_rate']:.2f}; with one LRU "
        f"{gain['lru']['step_s'] * 1e3:.1f} ms and {gain['lru']['hit_rate']:.2f}."
    )


def shape_rows(results: list[dict[str, Any]]) -> list[str]:
    """What family_speed.py measured."""
    lines = [
        "| layers of | experts in slots | ms a token | floor ms | ratio | hit rate (one LRU's) | device peak GiB |",
        "|---|---|---|---|---|---|---|",
    ]
    for result in results:
        name = f"{result['shape']['name']}, {result['shape']['layers']} of them"
        for row in result["slots"]:
            cells = (
                name, f"{row['portion']:.0%}", f"{row['step_s'] * 1e3:.2f}", f"{row['floor_s'] * 1e3:.2f}",
                f"{row['step_s'] / row['floor_s']:.2f}", f"{row['hit_rate']:.2f} ({row['lru_hit_rate']:.2f})",
                f"{row['peak_reserved_bytes'] / GIB:.1f}",
            )  # fmt: skip
            lines.append("| " + " | ".join(cells) + " |")
        for kind, row in result["resident"].items():
            times = f"{row['step_s'] * 1e3:.2f} | {row['floor_s'] * 1e3:.2f} | {row['step_s'] / row['floor_s']:.2f}"
            peak = f"{row['peak_reserved_bytes'] / GIB:.1f}"
            lines.append(f"| {name} | {kind}, all on the GPU | {times} | | {peak} |")
    return lines


def table(
    result: dict[str, Any],
    engine: dict[str, Any],
    dense: dict[str, Any],
    soak: dict[str, Any],
    gains: list[dict[str, Any]],
    shapes: list[dict[str, Any]],
) -> str:
    """The section between the README's markers."""
    lines = [
        f"Random weights in Phi-tiny-MoE's exact geometry, {where(result)}, page cache warm. The floor is the time that the "
        "missed or streamed bytes, or the bytes the device must read, need at the bandwidths measured in the same run. "
        "Decoding here is bound by the host that launches the kernels, and that host was shared: see how far p10 and p90 lie "
        "apart. Random weights blow up rounding (the error of the logits is below), so what rounds on its own soon takes other "
        "tokens. "
        f"Streaming, each turn held against the bandwidths of its own moment: {in_turn(result)} times its floor.",
        "",
        "Greedy decoding:",
        "",
        *rows_of(result, "free"),
        "",
        "A fixed script of tokens (free greedy decoding on random weights falls into loops):",
        "",
        *rows_of(result, "forced"),
        "",
        turns(result),
        "",
        "The device engine alone (another run, on a machine of that kind; its floor takes the misses of one global LRU). "
        "In greedy decoding the next step is launched ahead; \"nothing ahead\" is what sampling or a logits processor leaves:",
        "",
        *engine_rows(engine),
        "",
        "Prompts: another one each time into an empty cache, of a length that the process has had before or, where it says "
        "so, a new one. For a new length cuDNN makes a plan of its attention on Hopper (36 ms, `benchmarks/LOG.md`) and CUDA "
        "loads kernels that it meets for the first time; the device engine's prompts of up to 4096 tokens do without that "
        "plan.",
        "",
        *(gained(gain) for gain in gains),
        "",
        "A quarter of the dense weights on the device, the others streamed, plain engine:",
        "",
        *dense_rows(dense),
        "",
        soaked(soak),
        "",
        "Other families, device engine, random bfloat16 weights, batch 1, a fixed script of tokens; tokens go to experts by a "
        "random rule with habits, and the floor takes the misses that one global LRU has on it (`benchmarks/family_speed.py`):",
        "",
        *shape_rows(shapes),
        "",
        "Reproduce it (needs a GPU and 16 GiB of host memory; builds the 7 GiB checkpoint on first use):",
        "",
        "```bash",
        "python benchmarks/expert_cache.py --geometry phi-tiny --dtype float16 --expert-cache-gb 0.75 --tokens 64 --prompts 5 "
        "--vs eager,default,accelerate --cases slots,slots_device,streaming",
        "```",
        "",
        "The same with the published weights, eight tokens:",
        "",
        "```bash",
        "python benchmarks/expert_cache.py --model microsoft/Phi-tiny-MoE-instruct --revision 2fe50e8 --tokens 8 "
        "--expert-cache-gb 0.75 --dtype float16",
        "```",
        "",
        "Result files: "
        + ", ".join(f"`{path.relative_to(ROOT)}`" for path in PATHS)
        + ".",
        "",
        f"Hit rate and speed of the device engine against the budget, one prompt each: ![plot]({PLOTS[0]})",
        "",
        "The same for the shipped tiny model and the plain engine on a CPU (T = 12 experts, 0.0014 GiB in float32): "
        f"![plot]({PLOTS[1]})",
    ]
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="compare instead of writing")
    options = parser.parse_args()
    readme = ROOT / "README.md"
    old = readme.read_text()
    result, engine, dense, soak, *more = (json.loads(path.read_text()) for path in PATHS)
    section = table(result, engine, dense, soak, more[: len(GAINS)], more[len(GAINS) :])
    new = replaced(old, START, END, section)
    if options.check:
        return int(old != new)
    readme.write_text(new)
    return 0


if __name__ == "__main__":
    sys.exit(main())
