#!/usr/bin/env python
"""Decoding of other families' shapes with some of the experts in slots, beside plain transformers with all on the device.

    python benchmarks/family_speed.py --shape qwen3-30b-a3b --output-json benchmarks/results/family-speed-qwen3.json
    python benchmarks/family_speed.py --shape mixtral-8x7b --engines device --portions 0.15,1
    python benchmarks/family_speed.py --shape qwen3-tiny --device cpu --tokens 4      # checks the script, times nothing

Random weights in bfloat16 (float32 on the CPU), batch 1, tokens forced from a fixed script. A budget is a portion of all
experts. A token's time is that of whole calls of generate, as in decode_engine.py; its floor is the larger of the missed bytes
over the pinned link, with the misses that one global LRU has at this budget on the same routing (recorded once, replayed), and
the bytes the device must read over its bandwidth. Random weights route as they happen to, so by default each token is sent to
experts by a random rule with habits (`--routing skewed`): an expert's score is its own, drawn once, times SKEW, plus noise.
`--routing own` leaves the model's routers alone. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from benchmarks import floors, forced_routing, machine, policy_replay  # noqa: E402
from benchmarks.decode_engine import PROMPT_TOKENS, Bench, add_run_options, decode  # noqa: E402
from benchmarks.family_shapes import SHAPES, Shape  # noqa: E402
from benchmarks.routing_traces import Token, Trace, Turn, random_trace, read_trace  # noqa: E402

SKEW = 0.75
"""With it one LRU hits 0.31, 0.65 and 0.93 of 128 experts, top 8, at 15, 30 and 60 %: what was published of a peer's run."""
RESIDENT = {"transformers, experts eager": "eager", "transformers, experts as it takes them": None}


class Warmed(Trace):
    """A trace of which only the last turn counts: the others warm the cache."""

    def tokens(self) -> Iterator[tuple[bool, Token]]:
        for number, turn in enumerate(self.turns, 1):
            yield from ((False, token) for token in turn.prompt[-1:])
            yield from ((number == len(self.turns), token) for token in turn.decode)


def record(bench: Bench, budget_gb: float) -> Warmed:
    """Two equal turns of the script's decoding."""
    with tempfile.TemporaryDirectory() as folder, bench.slots(budget_gb, engine="plain") as model:
        path = Path(folder) / "routing.csv"
        with model.record_routing(path):
            for _ in range(2):
                bench.call(model, bench.ids(PROMPT_TOKENS), bench.args.tokens + 1)
        found = read_trace(path)
    return Warmed(found.name, found.layers, found.experts, found.top_k, found.turns)


def skewed(shape: Shape, tokens: int, seed: int = 0) -> Warmed:
    """Two equal turns of random routing with habits."""
    rng = random.Random(seed)
    offsets = [[SKEW * rng.gauss(0, 1) for _ in range(shape.experts)] for _ in range(shape.layers)]
    noise = iter(lambda: rng.gauss(0, 1), None)
    drawn = random_trace("random, skewed", offsets, noise, shape.top_k, tokens).turns[0].decode
    return Warmed("random, skewed", shape.layers, shape.experts, shape.top_k, [Turn([], drawn), Turn([], drawn)])


@contextmanager
def following(model: Any, trace: Trace, own: bool) -> Iterator[None]:
    """Within the block the model's decoded tokens go where the trace says, unless that is its own routing anyway."""
    if own:
        yield
        return
    with forced_routing.forced(model, torch.tensor(trace.turns[0].decode), PROMPT_TOKENS):
        yield


def at_budget(bench: Bench, engine: str, budget_gb: float, trace: Trace) -> dict[str, Any]:
    """One engine at one budget, with its floor."""
    with bench.slots(budget_gb, engine=engine) as model:
        own = bench.args.routing == "own" or model.get_expert_cache_stats()["slot_count"] == bench.sizes.total_experts
        with following(model, trace, own):  # with all experts in slots it does not matter which of them are used
            found = decode(bench, model)
    slots, accesses = found["slots"], bench.args.tokens * trace.experts_per_token
    lru = policy_replay.replay(trace, policy_replay.lru(trace, slots))
    missed_bytes = (accesses - lru) / bench.args.tokens * bench.sizes.expert_bytes
    floor = floors.slot_floor(missed_bytes, bench.sizes.device_read_bytes, bench.rates)
    return found | {
        "floor_s": floor.seconds,
        "floor_set_by": floor.set_by,
        "lru_hit_rate": lru / accesses,
        "belady_hit_rate": policy_replay.belady(trace, slots) / accesses,
        "cannot_be_true": floors.impossible(found["moved_bytes"], found["step_s"], bench.rates),
    }


def resident_step_s(bench: Bench, experts: str | None, trace: Trace) -> dict[str, Any]:
    """Seconds a token of plain transformers with all weights on the device, and its memory."""
    ids, tokens = bench.ids(PROMPT_TOKENS), bench.args.tokens
    with bench.resident(bench.dtype, experts) as model, following(model, trace, bench.args.routing == "own"):
        bench.call(model, ids, tokens)
        steps = []
        for _ in range(bench.args.repeats):
            alone = min(bench.call(model, ids, 1)[0] for _ in range(2))
            steps.append((bench.call(model, ids, tokens + 1)[0] - alone) / tokens)
        peak = machine.device_memory(bench.device).get("peak_reserved_bytes")
    floor = floors.resident_floor(bench.sizes.device_read_bytes, bench.rates)
    return {"step_s": statistics.median(steps), "steps_s": steps, "floor_s": floor.seconds, "peak_reserved_bytes": peak}


def measure(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """The result so far, after each measurement."""
    shape, device = SHAPES[args.shape], machine.pick_device(args.device)
    dtype = "bfloat16" if device.type == "cuda" else "float32"
    bench = Bench(args, device, dtype, shape.ensure(args.work_dir / f"{shape.name}-{dtype}", dtype))
    sizes = bench.sizes
    budgets = {portion: (shape.total_experts * portion + 0.01) * sizes.expert_bytes / 2**30 for portion in args.portions}
    result: dict[str, Any] = {"benchmark": "family_speed", "shape": asdict(shape), "dtype": dtype, "tokens": args.tokens}
    result |= {"hardware": machine.hardware(device), "bandwidths": bench.rates, "resident": {}, "slots": []}
    result |= {"expert_bytes": sizes.expert_bytes, "dense_bytes": sizes.dense_bytes, "experts": shape.total_experts}
    own = args.routing == "own"
    trace = record(bench, budgets[min(budgets)]) if own else skewed(shape, args.tokens)
    result |= {"routing": trace.name if own else f"{trace.name} {SKEW}"}
    for portion, budget_gb in budgets.items():
        for engine in args.engines:
            row = {"portion": portion, "budget_gb": budget_gb, "asked_engine": engine}
            result["slots"].append(row | at_budget(bench, engine, budget_gb, trace))
            yield result
    for name in RESIDENT if args.resident else ():
        result["resident"][name] = resident_step_s(bench, RESIDENT[name], trace)
        yield result


def as_text(result: dict[str, Any]) -> Iterator[str]:
    hardware = result["hardware"]
    yield f"{result['shape']['name']}, {result['dtype']}, {hardware['device']}, transformers {hardware['transformers']}"
    yield f"  routing: {result['routing']}"
    for row in result["slots"]:
        yield (
            f"  {row['portion']:.0%} of the experts ({row['slots']} slots, {row['budget_gb']:.2f} GiB), {row['engine']} engine "
            f"{row['step_s'] * 1e3:.2f} ms a token: {row['step_s'] / row['floor_s']:.2f} x its floor ({row['floor_set_by']}), "
            f"hit rate {row['hit_rate']:.3f} (LRU {row['lru_hit_rate']:.3f}, Belady {row['belady_hit_rate']:.3f}), "
            f"{row['moved_bytes'] / 2**20:.1f} MiB moved{memory(row)}"
            + (f"; asked for {row['asked_engine']}: {row['reason']}" if row["engine"] != row["asked_engine"] else "")
            + (f"; not all tokens were steps: {row['reason']}" if row["engine"] == "device" and row["reason"] else "")
        )
    for name, row in result["resident"].items():
        ratio = row["step_s"] / row["floor_s"]
        yield f"  {name}, all on the device: {row['step_s'] * 1e3:.2f} ms a token, {ratio:.2f} x its floor{memory(row)}"


def memory(row: dict[str, Any]) -> str:
    peak = row["peak_reserved_bytes"]
    return f", peak {peak / 2**30:.2f} GiB" if peak else ""


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, required=True)
    parser.add_argument("--portions", default="0.15,0.3,0.6,1", help="of the experts; comma-separated")
    parser.add_argument("--engines", default="plain,device", help="comma-separated")
    parser.add_argument("--routing", choices=("skewed", "own"), default="skewed", help="whose experts the tokens go to")
    parser.add_argument("--no-resident", dest="resident", action="store_false", help="without plain transformers")
    add_run_options(parser, tokens=64)
    args = parser.parse_args(arguments)
    args.portions = [float(text) for text in args.portions.split(",")]
    args.engines = args.engines.split(",")
    return args


def main(arguments: list[str] | None = None) -> int:
    args = parse(arguments)
    result: dict[str, Any] = {}
    for result in measure(args):
        if args.output_json:  # a run that is stopped half-way is not lost
            args.output_json.write_text(json.dumps(result) + "\n", encoding="utf-8")
    print("\n".join(as_text(result)))
    print(json.dumps(result))
    return 1 if any(row["cannot_be_true"] for row in result["slots"]) else 0


if __name__ == "__main__":
    sys.exit(main())
