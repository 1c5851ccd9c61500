#!/usr/bin/env python
"""The device engine: its kernels, decoding at several budgets, batches and routings, prompts, and the error of its logits.

    python benchmarks/decode_engine.py --geometry phi-tiny --output-json benchmarks/results/decode-engine.json
    python benchmarks/decode_engine.py --geometry phi-3.5 --layers 8 --sections gain,routing
    python benchmarks/decode_engine.py --geometry tiny --device cpu --tokens 4       # twins: checks the script, times nothing

A decoded token's time is taken from whole calls of generate without a streamer: (time of N + 1 new tokens - time of 1) / N,
the median of several. Its floor is the larger of the missed bytes over the pinned link, with the misses that one global LRU
has on the same script at the same budget, and the bytes the device must read over its bandwidth. The script is a fixed list of
random tokens: free greedy decoding on random weights falls into loops. The model is made to say it of itself
(forced_tokens.py), as in a greedy call; "nothing ahead" is with a logits processor that forces it. In the section "routing"
every decoded token goes where the recorded routing of the shipped model says, mapped onto the geometry (forced_routing.py).
The section "gain" sets the cache's policy against one LRU and against no cache (the slots of one layer). The last line is one
JSON object.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from benchmarks import floors, forced_routing, forced_tokens, kernel_table, machine, policy_replay  # noqa: E402
from benchmarks.build_checkpoint import ensure  # noqa: E402
from benchmarks.cases import Script  # noqa: E402
from benchmarks.expert_cache import random_ids  # noqa: E402
from benchmarks.geometry import GEOMETRIES, Geometry  # noqa: E402
from benchmarks.report import Sizes  # noqa: E402
from benchmarks.routing_traces import read_trace  # noqa: E402

PROMPT_TOKENS = 32
REPLAYED_TOKENS = 384
_COUNTED = ("h2d_bytes", "hits", "misses")


class Bench:
    """One checkpoint on one device, and what every measurement shares. ``args``: ``tokens``, ``repeats``."""

    def __init__(self, args: argparse.Namespace, device: torch.device, dtype: str, folder: Path) -> None:
        self.args, self.device, self.dtype, self.folder = args, device, dtype, folder
        from airllm.inspect_model import inspect_folder

        self.found = inspect_folder(self.folder)
        self.sizes = Sizes.of(self.found, self.dtype)
        self.script = random_ids(self.folder, args.tokens + 1, 7_000_000)
        large = 2**31 if self.device.type == "cuda" else 2**24
        self.rates = machine.bandwidths(self.device, self.sizes.expert_bytes, large)

    def ids(self, length: int, batch: int = 1, seed: int = 1000) -> torch.Tensor:
        rows = [random_ids(self.folder, length, seed + row) for row in range(batch)]
        return torch.tensor(rows, device=self.device)

    @contextmanager
    def slots(self, budget_gb: float, engine: str = "device", policy: str = "auto") -> Iterator[Any]:
        from airllm import AutoModel

        options = {"expert_cache_backend": "slot", "expert_cache_engine": engine, "expert_cache_policy": policy}
        with AutoModel.from_pretrained(
            self.folder, device=str(self.device), dtype=self.dtype, expert_cache_gb=budget_gb, **options
        ) as model:
            yield model
        del model
        self.forget()

    @contextmanager
    def resident(self, dtype: str, experts: str | None = "eager") -> Iterator[Any]:
        """The model in plain transformers, all of it on the device; ``experts`` None is what transformers takes by itself."""
        from transformers import AutoModelForCausalLM

        options = {"dtype": getattr(torch, dtype), "device_map": {"": str(self.device)}}
        options |= {} if experts is None else {"experts_implementation": experts}
        yield AutoModelForCausalLM.from_pretrained(self.folder, **options)
        self.forget()

    def forget(self) -> None:
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()

    def call(
        self, model: Any, ids: torch.Tensor, tokens: int, script: Script | None = None, **more: Any
    ) -> tuple[float, Any]:
        """Seconds, and what generate gave, decoding the script. ``script``: one to ask afterwards what was wanted."""
        script = script or Script(self.script)
        options = {"max_new_tokens": tokens, "min_new_tokens": tokens, "do_sample": False, "pad_token_id": 0}
        machine.synchronize(self.device)
        start = time.perf_counter()
        with torch.no_grad():
            mask = torch.ones_like(ids)
            out = model.generate(input_ids=ids, attention_mask=mask, logits_processor=[script], **options, **more)
        machine.synchronize(self.device)
        return time.perf_counter() - start, out

    def steps(
        self, model: Any, ids: torch.Tensor, counters: Callable[[], dict[str, float]]
    ) -> tuple[list[float], list[dict[str, float]]]:
        """Of each repeat: seconds a decoded token, and what all of them added to the counters, less what the prompt adds."""
        seconds, added, tokens = [], [], self.args.tokens
        for _ in range(self.args.repeats):
            alone = self.call(model, ids, 1)[0]
            before = counters()
            again = self.call(model, ids, 1)[0]
            between = counters()
            whole = self.call(model, ids, tokens + 1)[0]
            after = counters()
            seconds.append((whole - min(alone, again)) / tokens)
            added.append({name: after[name] - 2 * between[name] + before[name] for name in after})
        return seconds, added


class PhiBench(Bench):
    """A PhiMoE of a known geometry."""

    def __init__(self, args: argparse.Namespace, device: torch.device, dtype: str, folder: Path, geometry: Geometry) -> None:
        super().__init__(args, device, dtype, folder)
        self.geometry = geometry


def counters(model: Any) -> dict[str, float]:
    """What the cache has counted so far, of one moment."""
    stats = model.get_expert_cache_stats()
    return {name: stats[name] for name in _COUNTED}


def decode(bench: Bench, model: Any, batch: int = 1, said: bool = True) -> dict[str, Any]:
    """Seconds a step of ``batch`` tokens, and what moved in it. ``said``: the model itself says the script's tokens."""
    ids, tokens = bench.ids(PROMPT_TOKENS, batch), bench.args.tokens
    with forced_tokens.said(model, bench.script, PROMPT_TOKENS) if said else forced_tokens.nothing_ahead(model):
        bench.call(model, ids, tokens)
        steps, counted = bench.steps(model, ids, lambda: counters(model))
        after, moved = model.get_expert_cache_stats(), [each["h2d_bytes"] / tokens for each in counted]
        replayed = replay_s(bench, model)
    hits, misses = (sum(each[name] for each in counted) for name in ("hits", "misses"))
    return {"step_s": statistics.median(steps), "steps_s": steps, "moved_bytes": statistics.median(moved)} | {
        "hit_rate": hits / (hits + misses) if hits + misses else None,
        "slots": after["slot_count"],
        "engine": after["engine"],
        "reason": after["device_engine_reason"],
        "steps_served": after.get("device_engine_steps"),
        "steps_ahead": after.get("device_engine_steps_ahead"),
        "steps_discarded": after.get("device_engine_steps_discarded"),
        "replay_s": replayed,
        "peak_reserved_bytes": machine.device_memory(bench.device).get("peak_reserved_bytes"),
    }


def replay_s(bench: Bench, model: Any) -> float | None:
    """Seconds of the recorded step alone (its experts resident, since the token is the same again)."""
    stepper = getattr(model, "_stepper", None)
    state = stepper._states[-1] if stepper is not None and stepper._states else None
    if state is None or state.graph is None:
        return None
    state.graph.replay()
    machine.synchronize(bench.device)
    start = time.perf_counter()
    for _ in range(20):
        state.graph.replay()
    machine.synchronize(bench.device)
    return (time.perf_counter() - start) / 20


def decoding(bench: PhiBench) -> dict[str, Any]:
    """Budgets and batches: time, floor with an LRU's misses, hit rate."""
    tokens_read = bench.sizes.device_read_bytes
    everything = (bench.sizes.total_experts + 0.5) * bench.sizes.expert_bytes / 2**30
    found: dict[str, Any] = {}
    for name, budget, batch in (("budget", bench.args.expert_cache_gb, 1), ("budget, batch 4", bench.args.expert_cache_gb, 4)):
        with bench.slots(budget, policy="lru") as model:
            lru = decode(bench, model, batch)
        with bench.slots(budget) as model:
            ours = decode(bench, model, batch)
        floor = floors.slot_floor(lru["moved_bytes"], tokens_read, bench.rates)
        found[name] = {"ours": ours, "lru": lru, "floor_s": floor.seconds, "floor_set_by": floor.set_by}
    with bench.slots(everything) as model:
        ours, waits = decode(bench, model), decode(bench, model, said=False)
    resident_s = floors.resident_floor(tokens_read, bench.rates).seconds
    found["every expert in a slot"] = {"ours": ours, "floor_s": resident_s}
    found["every expert in a slot, nothing ahead"] = {"ours": waits, "floor_s": resident_s}
    if waits["replay_s"]:
        found["host_s_a_token"] = waits["step_s"] - waits["replay_s"]
        found["host_s_a_token_ahead"] = ours["step_s"] - ours["replay_s"]
    return found


def routing(bench: PhiBench) -> dict[str, Any]:
    """Decoding on recorded routing: time, floor with an LRU's misses, hit rates; and those of a replay, Belady's among them."""
    g, budget = bench.geometry, bench.args.expert_cache_gb
    table = forced_routing.mapped(read_trace(policy_replay.TINY), g.layers, g.experts, REPLAYED_TOKENS)
    found: dict[str, Any] = {}
    for name, policy in (("lru", "lru"), ("ours", "aged")):
        with bench.slots(budget, policy=policy) as model, forced_routing.forced(model, table, PROMPT_TOKENS):
            found[name] = decode(bench, model)
    floor = floors.slot_floor(found["lru"]["moved_bytes"], bench.sizes.device_read_bytes, bench.rates)
    trace, slots = forced_routing.as_trace(table, g.experts, "mapped"), found["ours"]["slots"]
    accesses = REPLAYED_TOKENS * g.experts_per_token
    replayed = {name: policy_replay.replay(trace, policy_replay.POLICIES[name](trace, slots)) for name in ("lru", "aged")}
    replayed["belady"] = policy_replay.belady(trace, slots)
    return found | {
        "floor_s": floor.seconds,
        "floor_set_by": floor.set_by,
        "replayed_tokens": REPLAYED_TOKENS,
        "replayed_hit_rates": {name: hits / accesses for name, hits in replayed.items()},
        "experts_used_again_by_the_next_token": forced_routing.reuse(trace),
    }


def gain(bench: PhiBench) -> dict[str, Any]:
    """Seconds a token with the cache's policy, with one LRU, and with the slots of one layer alone, where nothing stays."""
    budget, one_layer = bench.args.expert_cache_gb, (bench.geometry.top_k + 0.5) * bench.sizes.expert_bytes / 2**30
    found: dict[str, Any] = {}
    for name, policy, size in (("aged", "aged", budget), ("lru", "lru", budget), ("no cache", "lru", one_layer)):
        with bench.slots(size, policy=policy) as model:
            found[name] = decode(bench, model)
    faster = {name: found[name]["step_s"] / found["aged"]["step_s"] for name in ("lru", "no cache")}
    return found | {"times_faster_than": faster}


def prompts(bench: PhiBench) -> dict[str, Any]:
    """The time to the first token into an empty cache, each time of another prompt, of the same or of a new length (one less
    than the last new one of either engine); its floor: the whole bank over the link, or the arithmetic of the prompt."""
    found, less = {}, dict.fromkeys(bench.args.prompt_tokens, 0)
    rate = kernel_table.matmul_flops(bench.device, getattr(torch, bench.dtype), bench.geometry.hidden)
    values = bench.sizes.device_read_bytes / bench.sizes.bytes_per_value
    bank = bench.sizes.total_experts * bench.sizes.expert_bytes / floors.link_rate(bench.rates)
    for engine in ("plain", "device"):
        with bench.slots(bench.args.expert_cache_gb, engine=engine) as model:
            for length, new in itertools.product(bench.args.prompt_tokens, (False, True)):
                bench.call(model, bench.ids(length), 1)
                seconds, lengths, copies = [], [], model.get_expert_cache_stats()["h2d_copies"]
                for number in range(bench.args.repeats):
                    model.clear_expert_cache()
                    less[length] += new
                    lengths.append(length - new * less[length])
                    seconds.append(bench.call(model, bench.ids(lengths[-1], seed=2000 + number), 1)[0])
                arithmetic = 2 * values * length / rate
                found[f"{length}, {engine} engine" + ", new lengths" * new] = {
                    "prompt_s": statistics.median(seconds),
                    "prompts_s": seconds,
                    "lengths": lengths,
                    "copies": (model.get_expert_cache_stats()["h2d_copies"] - copies) / bench.args.repeats,
                    "bank_over_link_s": bank,
                    "arithmetic_s": arithmetic,
                    "ratio": statistics.median(seconds) / max(bank, arithmetic),
                }
    return found


def logits_error(bench: PhiBench) -> dict[str, Any]:
    """Mean and largest absolute error of the script's logits against a float32 model, of plain eager and of both engines."""
    ids, wanted = bench.ids(PROMPT_TOKENS), {"output_logits": True, "return_dict_in_generate": True}

    def logits(model: Any) -> torch.Tensor:
        return torch.stack(bench.call(model, ids, bench.args.tokens, **wanted)[1].logits).float()

    with bench.resident("float32") as model:
        exact = logits(model)
    runs: dict[str, torch.Tensor] = {}
    with bench.resident(bench.dtype) as model:
        runs["transformers, experts eager"] = logits(model)
    for engine in ("plain", "device"):
        with bench.slots(bench.args.expert_cache_gb, engine=engine) as model:
            runs[f"airllm, {engine} engine"] = logits(model)
    return {
        name: {
            "mean": float((run - exact).abs().mean()),
            "largest": float((run - exact).abs().max()),
            "same_best_token": float((run.argmax(-1) == exact.argmax(-1)).float().mean()),
        }
        for name, run in runs.items()
    }


def sections(bench: PhiBench) -> dict[str, Callable[[], Any]]:
    return {
        "kernels": lambda: kernel_table.measure(bench.geometry, bench.device, getattr(torch, bench.dtype), bench.rates),
        "decoding": lambda: decoding(bench),
        "routing": lambda: routing(bench),
        "gain": lambda: gain(bench),
        "prompts": lambda: prompts(bench),
        "logits_error": lambda: logits_error(bench),
    }


def decoding_line(name: str, row: dict[str, Any]) -> str:
    ours = row["ours"]
    return (
        f"  {name} ({ours['slots']} slots): {ours['step_s'] * 1e3:.2f} ms a step, floor {row['floor_s'] * 1e3:.2f} ms, "
        f"ratio {ours['step_s'] / row['floor_s']:.2f}; hit rate {ours['hit_rate']:.3f}"
        + (f" (LRU {row['lru']['hit_rate']:.3f}, {row['lru']['step_s'] * 1e3:.2f} ms)" if "lru" in row else "")
        + (f"; peak reserved {ours['peak_reserved_bytes'] / 2**30:.3f} GiB" if ours["peak_reserved_bytes"] else "")
        + (f"; served otherwise: {ours['reason']}" if ours["reason"] else "")
    )


def as_text(result: dict[str, Any]) -> Iterator[str]:
    hardware = result["hardware"]
    yield f"{hardware['device']}, torch {hardware['torch']}, transformers {hardware['transformers']}, {result['dtype']}"
    for name, row in result.get("kernels", {}).items():
        share = f"{row['fraction']:.0%} of the {row['of']}" if row.get("fraction") else ""
        yield f"  {name}: {row['seconds'] * 1e6:.2f} us {share}"
    for name, row in result.get("decoding", {}).items():
        if isinstance(row, float):
            ahead = " with steps launched ahead" if name.endswith("ahead") else ""
            yield f"  time a token outside the recorded step{ahead}: {row * 1e3:.2f} ms"
        else:
            yield decoding_line(name, row)
    if "routing" in result:
        row = result["routing"]
        rates = ", ".join(f"{name} {rate:.3f}" for name, rate in row["replayed_hit_rates"].items())
        yield decoding_line("recorded routing", row)
        yield f"  hit rates of a replay of {row['replayed_tokens']} tokens from empty slots: {rates}"
    if "gain" in result:
        rows = {name: row for name, row in result["gain"].items() if "step_s" in row}
        yield "  " + "; ".join(
            f"{name} ({row['slots']} slots) {row['step_s'] * 1e3:.2f} ms, hit rate {row['hit_rate']:.3f}"
            + (f", served otherwise: {row['reason']}" if row["reason"] else "")
            for name, row in rows.items()
        )
        faster = result["gain"]["times_faster_than"]
        yield f"  aged is {faster['lru']:.2f} times as fast as one LRU, {faster['no cache']:.2f} times as without a cache"
    for name, row in result.get("prompts", {}).items():
        yield f"  prompt of {name}: {row['prompt_s'] * 1e3:.1f} ms, {row['ratio']:.2f} x its floor"
    for name, row in result.get("logits_error", {}).items():
        yield f"  error against float32, {name}: mean {row['mean']:.2e}, largest {row['largest']:.2e}"


def bench_of(args: argparse.Namespace, layers: int | None = None) -> PhiBench:
    """The bench of ``args.geometry``, cut to so many layers. ``args.expert_cache_gb`` gets its default where none was given."""
    device = machine.pick_device(args.device)
    dtype = "float16" if device.type == "cuda" else "float32"
    geometry = GEOMETRIES[args.geometry].cut(layers)
    folder = ensure(args.work_dir / f"{geometry.name}-{dtype}", geometry, dtype, 0)
    bench = PhiBench(args, device, dtype, folder, geometry)
    args.expert_cache_gb = args.expert_cache_gb or geometry.default_budget_gb(bench.sizes.bytes_per_value)
    return bench


def add_run_options(parser: argparse.ArgumentParser, tokens: int) -> None:
    """The options that every script which times decoded tokens takes; ``tokens``: the default number of them."""
    parser.add_argument("--tokens", type=int, default=tokens)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--device")
    parser.add_argument("--work-dir", type=Path, default=Path(".bench"))
    parser.add_argument("--output-json", type=Path)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--geometry", choices=GEOMETRIES, default="phi-tiny")
    parser.add_argument("--layers", type=int, help="build only so many of the geometry's layers")
    parser.add_argument("--expert-cache-gb", type=float, help="default 0.75; tiny: 1.14 T")
    add_run_options(parser, tokens=64)
    parser.add_argument("--prompt-tokens", type=int, nargs="*", default=[512, 4096])
    parser.add_argument("--sections", default="kernels,decoding,routing,prompts,logits_error", help="comma-separated")
    args = parser.parse_args(arguments)
    if min(args.prompt_tokens, default=sys.maxsize) <= 2 * args.repeats:
        parser.error(f"--prompt-tokens: more than {2 * args.repeats} each, for --repeats new lengths below it of both engines")
    bench = bench_of(args, args.layers)
    result: dict[str, Any] = {"benchmark": "decode_engine", "geometry": bench.geometry.name, "dtype": bench.dtype}
    result |= {"hardware": machine.hardware(bench.device), "bandwidths": bench.rates, "budget_gb": args.expert_cache_gb}
    for name in args.sections.split(","):
        result[name] = sections(bench)[name]()
        if args.output_json:
            args.output_json.write_text(json.dumps(result) + "\n", encoding="utf-8")
    print("\n".join(as_text(result)))
    print(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
