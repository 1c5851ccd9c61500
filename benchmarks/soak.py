#!/usr/bin/env python
"""Thousands of calls of generate of random length on one model: does anything grow, and are the last answers the first ones?

    python benchmarks/soak.py --engine device --generates 5000 --output-json benchmarks/results/soak.json
    python benchmarks/soak.py --engine plain --generates 200 --device cpu

Prompts of 1 to 40 tokens (one in a hundred: 260 to 300), one to eight new tokens, one to four left-padded rows, greedy, sampled
with a seed, or three beams (now and then of two prompts, so that there are more shapes than the device engine keeps recordings
of); all drawn from --seed. The second half of the calls asks what the first half asked, in the same order. Memory, files,
threads and objects are counted when the model is loaded, after each tenth of the calls, and at the end.

A fault is an answer that is not that of the first time; more recordings than one for each time that a shape is met which is not
among the last ones; or growth beyond BOUNDS. Growth counts from the first tenth to the end, the process's own memory from the
half: CUDA and its libraries load the kernels of each new size when it is first met, and keep them; with nothing new to load
nothing may grow. The exit code is 1 then. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import random
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from benchmarks import machine  # noqa: E402

MIB = 2**20
BOUNDS = {
    "allocated_bytes": 8 * MIB,
    "reserved_bytes": 64 * MIB,
    "segments": 24,
    "own_bytes": 32 * MIB,
    "open_files": 0,
    "threads": 0,
    "objects": 2000,
}
"""The most that each may grow. ``own_bytes`` is resident memory of the process that no file backs (pages of program files are
shown beside it as ``file_bytes``: the system takes them back). Bytes depend on the order of sizes and on whose caches are kept
just then, the rest does not: 5 000 calls that each lose 2 KiB of device memory, 13 KiB of host memory or half an object are
seen."""
LATE = {"own_bytes"}
"""Counted from the half on, when every call was made once; the others from the first tenth."""
TOP_K, BEAMS, PAD = 20, 3, 0


@dataclass(frozen=True)
class Call:
    """One call of generate: prompts (of any lengths), new tokens, and how they are chosen."""

    prompts: list[list[int]]
    new_tokens: int
    kind: str
    seed: int

    @property
    def rows(self) -> int:
        return len(self.prompts) * (BEAMS if self.kind == "beams" else 1)

    @property
    def length(self) -> int:
        """Positions of the longest row at the end."""
        return max(map(len, self.prompts)) + self.new_tokens

    def inputs(self, device: torch.device) -> dict[str, Any]:
        longest = max(map(len, self.prompts))
        ids = [[PAD] * (longest - len(prompt)) + prompt for prompt in self.prompts]
        mask = [[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in self.prompts]
        how: dict[str, Any] = {"do_sample": self.kind == "sample", "max_new_tokens": self.new_tokens, "pad_token_id": PAD}
        how |= {"top_k": TOP_K} if self.kind == "sample" else {}
        how |= {"num_beams": BEAMS} if self.kind == "beams" else {}
        return how | {"input_ids": torch.tensor(ids, device=device), "attention_mask": torch.tensor(mask, device=device)}


def draw_call(number: int, seed: int, vocabulary: int) -> Call:
    """The same for the same number and seed."""
    rng = random.Random(f"{seed}:{number}")
    kind = rng.choices(("greedy", "sample", "beams"), (6, 3, 1))[0]
    weights = (9, 1) if kind == "beams" else (5, 2, 1, 2)
    rows = 1 + rng.choices(range(len(weights)), weights)[0]
    longest = rng.randint(260, 300) if rng.random() < 0.01 else rng.randint(1, 40)
    lengths = [longest, *(rng.randint(1, longest) for _ in range(rows - 1))]
    prompts = [[rng.randrange(1, vocabulary) for _ in range(length)] for length in lengths]
    return Call(prompts, rng.randint(1, 8), kind, rng.randrange(2**31))


def calls(count: int, seed: int, vocabulary: int) -> Iterator[Call]:
    """``count`` calls, an even number: the second half are the first."""
    for number in range(count):
        yield draw_call(number % (count // 2), seed, vocabulary)


def answer(model: Any, call: Call) -> list[list[int]]:
    torch.manual_seed(call.seed)
    with torch.no_grad():
        return model.generate(**call.inputs(model.device)).tolist()


def count_all(device: torch.device) -> dict[str, int]:
    """What must not grow, as it is now. Host memory that was freed and that the allocator keeps is given back first."""
    machine.synchronize(device)
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc's
    if trim is not None:
        trim(0)
    memory = machine.device_memory(device)
    held = {name: memory[name] for name in ("allocated_bytes", "reserved_bytes", "segments") if name in memory}
    files = Path("/proc/self/fd")
    return held | {
        "own_bytes": (machine.status_bytes("RssAnon") or 0) + (machine.status_bytes("RssShmem") or 0),
        "file_bytes": machine.status_bytes("RssFile") or 0,
        "open_files": len(list(files.iterdir())) if files.is_dir() else 0,
        "threads": max(threading.active_count(), kernel_threads()),
        "objects": len(gc.get_objects()),
    }


def kernel_threads() -> int:
    """Threads of this process that Python knows nothing of are among these; 0 where nobody says."""
    tasks = Path("/proc/self/task")
    return len(list(tasks.iterdir())) if tasks.is_dir() else 0


def run(model: Any, count: int, seed: int) -> dict[str, Any]:
    """All calls; counts by moment, and what was wrong with the answers."""
    device, vocabulary = model.device, model.config.vocab_size
    moments = {count * part // 10: f"{part * 10} %" for part in range(1, 10)}
    counts = {"loaded": count_all(device)}
    first: list[str] = []  # text: lists would count as objects
    different, shapes, tokens = [], [], 0
    start = time.perf_counter()
    for number, call in enumerate(calls(count, seed, vocabulary)):
        if number in moments:
            counts[moments[number]] = count_all(device)
        tokens_got = answer(model, call)
        got = str(tokens_got)
        tokens += sum(map(len, tokens_got))
        if number < count // 2:
            first.append(got)
            shapes.append((call.rows, call.length))
        elif got != first[number - count // 2]:
            different.append(number)
    counts["end"] = count_all(device)
    return {
        "seconds": time.perf_counter() - start,
        "tokens": tokens,
        "counts": counts,
        "answers_compared": count // 2,
        "different_answers": different,
        "most_recordings": most_recordings(shapes * 2),
    }


def most_recordings(shapes: list[tuple[int, int]]) -> int:
    """Steps to record for calls of these rows and lengths when those of the last ``MAX_STATES`` numbers of rows are kept."""
    from airllm.decode_step import CAPACITY_STEP, MAX_STATES

    kept: dict[int, int] = {}  # rows -> positions of their cache; the one used last is the last
    made = 0
    for rows, length in shapes:
        positions = kept.pop(rows, 0)
        if positions <= length:  # one position more than the call has is asked for
            made += 1
            positions = (length // CAPACITY_STEP + 1) * CAPACITY_STEP
        kept[rows] = positions
        if len(kept) > MAX_STATES:
            del kept[next(iter(kept))]
    return made


def judge(result: dict[str, Any], stats: dict[str, Any]) -> list[str]:
    """What is wrong, in words; [] when nothing is."""
    counts = result["counts"]
    faults = [
        f"{name} grew by {growth} from {since(name)} of the calls to the end, bound {BOUNDS[name]}"
        for name, growth in growth_of(counts).items()
        if growth > BOUNDS[name]
    ]
    if result["different_answers"]:
        faults.append(f"{len(result['different_answers'])} of {result['answers_compared']} answers differ from the first ones")
    recorded, most = stats.get("device_engine_captures") or 0, result["most_recordings"]
    if recorded > most:
        faults.append(f"{recorded} steps were recorded where {most} would do")
    if stats["misses"] > stats["h2d_copies"]:  # a prompt may fetch ahead what it then does not need
        faults.append(f"{stats['misses']} misses but {stats['h2d_copies']} copies")
    return faults


def growth_of(counts: dict[str, dict[str, int]]) -> dict[str, int]:
    return {name: counts["end"][name] - counts[since(name)][name] for name in BOUNDS if name in counts["end"]}


def since(name: str) -> str:
    """The moment from which on it is counted."""
    return "50 %" if name in LATE else "10 %"


def soak(args: argparse.Namespace) -> dict[str, Any]:
    from airllm import AutoModel, tiny_model_path

    device = machine.pick_device(args.device)
    options: dict[str, Any] = {"expert_cache_backend": "slot", "expert_cache_gb": args.expert_cache_gb}
    options |= {"dtype": args.dtype or ("float32" if device.type == "cpu" else None)}
    folder = args.model or tiny_model_path()
    with AutoModel.from_pretrained(folder, device=str(device), expert_cache_engine=args.engine, **options) as model:
        result = run(model, args.generates, args.seed)
        stats = model.get_expert_cache_stats()
    names = ("engine", "slot_count", "hits", "misses", "evictions", "bypasses", "recoveries", "oom_retries")
    names += ("device_engine_steps", "device_engine_captures", "step_cache_bytes", "step_graph_bytes", "device_engine_reason")
    faults = judge(result, stats)
    return {
        "benchmark": "soak",
        "model": str(args.model or "the shipped tiny model"),
        "generates": args.generates,
        "seed": args.seed,
        "hardware": machine.hardware(device),
        "growth": growth_of(result["counts"]),
        "bounds": BOUNDS,
        "statistics": {name: stats.get(name) for name in names},
        "faults": faults,
    } | result


def as_text(result: dict[str, Any]) -> Iterator[str]:
    yield f"{result['generates']} calls, {result['tokens']} tokens, {result['seconds']:.1f} s on {result['hardware']['device']}"
    for name in result["counts"]["end"]:
        row = "  ".join(f"{moment} {values[name]}" for moment, values in result["counts"].items())
        growth = result["growth"].get(name)
        yield f"  {name}: {row}" + ("" if growth is None else f"  growth {growth} (bound {BOUNDS[name]})")
    yield f"  {result['statistics']}, recordings at most {result['most_recordings']}"
    yield from (f"FAULT: {fault}" for fault in result["faults"])


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="checkpoint folder (default: the shipped tiny model)")
    parser.add_argument("--engine", choices=("plain", "device"), default="device")
    parser.add_argument("--generates", type=int, default=5000, help="an even number, at least 20")
    parser.add_argument("--expert-cache-gb", type=float, default=0.0013, help="default: 22 of 48 experts in half precision")
    parser.add_argument("--dtype", help="default: the checkpoint's own; float32 on the CPU")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device")
    parser.add_argument("--output-json", type=Path)
    args = parser.parse_args(arguments)
    if args.generates < 20 or args.generates % 2:
        parser.error(f"--generates must be an even number, at least 20: {args.generates}")
    result = soak(args)
    print("\n".join(as_text(result)))
    line = json.dumps(result)
    if args.output_json:
        args.output_json.write_text(line + "\n", encoding="utf-8")
    print(line)
    return 1 if result["faults"] else 0


if __name__ == "__main__":
    sys.exit(main())
