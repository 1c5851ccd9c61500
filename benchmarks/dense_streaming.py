#!/usr/bin/env python
"""Dense weights that stream beside experts in slots: time per token against its floor, and the same tokens as all-resident.

    python benchmarks/dense_streaming.py --geometry phi-tiny --output-json benchmarks/results/dense-streaming.json
    python benchmarks/dense_streaming.py --geometry tiny --resident-part 0 --device cpu --tokens 4      # seconds: checks it

The decoder layers' dense weights are held to a part of their size (a quarter unless said otherwise), the others coming out of
host memory and then out of the files, and then not at all, with the same slots, in one process. A decoded token's time is taken
from whole calls of generate without a streamer: (time of N + 1 new tokens - time of 1) / N, the median of several. Its floor is
the largest of: dense bytes streamed and expert bytes missed over the pinned link; bytes the device must read over its
bandwidth; where files are read, dense bytes streamed over the host's copy bandwidth. The tokens are a fixed random script; what
greedy decoding would have taken at each step is compared. The last line is one JSON object; exit code 1 when the tokens differ.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Iterator
from concurrent.futures import wait
from dataclasses import asdict
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from benchmarks import floors, machine  # noqa: E402
from benchmarks.cases import Script  # noqa: E402
from benchmarks.decode_engine import PROMPT_TOKENS, PhiBench, add_run_options, bench_of  # noqa: E402
from benchmarks.geometry import GEOMETRIES, GIB  # noqa: E402


def moved(model: Any) -> dict[str, float]:
    """Bytes so far: of experts over the link, of dense weights into the ring, once what is read ahead has arrived."""
    experts, streamer = model.get_expert_cache_stats()["h2d_bytes"], model._streamer
    if streamer is None:
        return {"experts": experts, "dense": 0}
    wait([fill for fill in streamer._fills if fill is not None])
    return {"experts": experts, "dense": model.get_stream_stats()["filled_bytes"]}


def decode(bench: PhiBench, model: Any) -> dict[str, Any]:
    """Seconds a decoded token, what moved for it, and the tokens wanted."""
    tokens, prompt, script = bench.args.tokens, bench.ids(PROMPT_TOKENS), Script(bench.script)
    bench.call(model, prompt, tokens + 1, script)
    steps, added = bench.steps(model, prompt, lambda: moved(model))
    return {
        "step_s": statistics.median(steps),
        "steps_s": steps,
        "missed_bytes": statistics.median(each["experts"] / tokens for each in added),
        "streamed_bytes": statistics.median(each["dense"] / tokens for each in added),
        "wanted": script.predictions(),
    }


def measure(bench: PhiBench, budget_gb: float, resident_gb: float | str, stream_from: str = "auto") -> dict[str, Any]:
    """One model with so much of its layers resident, the others from there, and the floor of its decoded token."""
    from airllm import AutoModel

    bench.forget()
    keywords: dict[str, Any] = {"expert_cache_backend": "slot", "expert_cache_gb": budget_gb}
    keywords |= {"resident_gb": resident_gb, "stream_from": stream_from}
    with AutoModel.from_pretrained(bench.folder, device=str(bench.device), dtype=bench.dtype, **keywords) as model:
        row = decode(bench, model)
        stats = model.get_expert_cache_stats()
        row["stats"] = {name: stats[name] for name in sorted(stats) if "dense" in name or "reason" in name or "alloc" in name}
        row["slots"] = stats["slot_count"]
        row["streams"] = model.get_stream_stats() if model._streamer is not None else None
    moved, from_files = (row["streamed_bytes"], row["missed_bytes"]), stream_from == "file"
    floor = floors.dense_floor(*moved, bench.sizes.device_read_bytes, bench.rates, from_files)
    peak = machine.device_memory(bench.device).get("peak_reserved_bytes")
    return row | {"floor": asdict(floor), "times_floor": row["step_s"] / floor.seconds, "peak_reserved_bytes": peak}


def as_text(result: dict[str, Any]) -> Iterator[str]:
    hardware = result["hardware"]
    yield f"{hardware['device']}, torch {hardware['torch']}, transformers {hardware['transformers']}, {result['dtype']}"
    for name, row in result["runs"].items():
        stats = row["stats"]
        yield (
            f"  {name}: {row['step_s'] * 1e3:.2f} ms a token, {row['times_floor']:.2f} x its floor ({row['floor']['set_by']}); "
            f"{row['streamed_bytes'] / 2**20:.1f} MiB of dense weights and {row['missed_bytes'] / 2**20:.1f} MiB of experts "
            f"moved a token, {stats['allocated_device_bytes'] / 2**20:.1f} MiB held on the device"
        )
    same = result["tokens"]
    yield f"  tokens: {same['equal']} of {same['compared']} equal those of the run with everything resident"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--geometry", choices=GEOMETRIES, default="phi-tiny")
    parser.add_argument("--resident-part", type=float, default=0.25, help="of the decoder layers' dense bytes")
    parser.add_argument("--expert-cache-gb", type=float, help="default 0.75; tiny: 1.14 T")
    add_run_options(parser, tokens=32)
    args = parser.parse_args(arguments)
    bench = bench_of(args)
    layer_bytes, budget_gb = sum(bench.found.dense_layers), args.expert_cache_gb
    part_gb = args.resident_part * layer_bytes / GIB
    runs = {
        "dense weights held to a part, the others in host memory": measure(bench, budget_gb, part_gb, "host"),
        "dense weights held to a part, the others read from the files": measure(bench, budget_gb, part_gb, "file"),
        "all dense weights resident": measure(bench, budget_gb, "all"),
    }
    *parts, whole = (row.pop("wanted") for row in runs.values())
    result = {
        "benchmark": "dense_streaming",
        "geometry": args.geometry,
        "dtype": bench.dtype,
        "hardware": machine.hardware(bench.device),
        "bandwidths": bench.rates,
        "expert_cache_gb": budget_gb,
        "resident_gb": part_gb,
        "layer_dense_bytes": layer_bytes,
        "runs": runs,
        "tokens": floors.same_prefix(parts, [whole, whole]),
    }
    print("\n".join(as_text(result)))
    line = json.dumps(result)
    if args.output_json:
        args.output_json.write_text(line + "\n", encoding="utf-8")
    print(line)
    return 0 if result["tokens"]["identical"] else 1


if __name__ == "__main__":
    sys.exit(main())
