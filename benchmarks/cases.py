#!/usr/bin/env python
"""One case of the benchmark in a process of its own, so that its peak memory is its own.

    python benchmarks/cases.py '{"kind": "slots", "model": "…", …}'

The last line of output is one JSON object. `expert_cache.py` writes the request and reads the answer.
"""

from __future__ import annotations

import contextlib
import gc
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from benchmarks import machine  # noqa: E402
from benchmarks.forced_tokens import nothing_ahead  # noqa: E402

WARM_TOKENS = 3
SLOTS = {"slots": "plain", "slots_device": "device"}
"""Cases of the slot backend, and the engine each runs."""
TURNS = 5
COUNTED = ("hits", "misses", "evictions", "bypasses", "h2d_copies", "h2d_bytes", "generation_disk_expert_reads", "bytes_read")


class Script:
    """A logits processor that decodes a fixed list of tokens and notes what greedy decoding would have taken.

    On random weights free greedy decoding falls into loops, whose hit rate means nothing.
    """

    def __init__(self, tokens: list[int]) -> None:
        self.tokens = tokens
        self.wanted: list[torch.Tensor] = []

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        token = self.tokens[len(self.wanted)]
        self.wanted.append(scores.argmax(-1))
        scores.fill_(-torch.inf)
        scores[:, token] = 0
        return scores

    def predictions(self) -> list[int]:
        return [int(token) for token in torch.cat(self.wanted).tolist()]


@contextlib.contextmanager
def loaded(request: dict[str, Any], device: torch.device) -> Iterator[Any]:
    """The model of the case; closed afterwards where it can be."""
    kind, path, dtype = request["kind"], request["model"], getattr(torch, request["dtype"])
    if kind in SLOTS or kind == "streaming":
        from airllm import AutoModel

        options: dict[str, Any] = {"device": str(device), "dtype": dtype, "max_seq_len": request["max_seq_len"]}
        if kind in SLOTS:
            options |= {"expert_cache_backend": "slot", "expert_cache_gb": request["budget_gb"]}
            options["expert_cache_engine"] = SLOTS[kind]
        else:
            options["experts_implementation"] = "eager"  # like the reference; others round differently in half precision
        with AutoModel.from_pretrained(path, **options) as model:
            yield model
        return
    from transformers import AutoModelForCausalLM

    extra: dict[str, Any] = {"device_map": {"": str(device)}}
    if kind == "eager":
        extra["experts_implementation"] = "eager"
    if kind == "accelerate":
        extra = {"device_map": "auto", "max_memory": {0: int(request["accelerate_gb"] * 2**30), "cpu": 2**40}}
    yield AutoModelForCausalLM.from_pretrained(path, dtype=dtype, **extra)


def import_libraries(kind: str) -> None:
    """Imports cost seconds and memory of their own: before the clock of loading starts."""
    import transformers

    _ = transformers.AutoModelForCausalLM  # transformers loads its parts on first use
    if kind in SLOTS or kind == "streaming":
        import airllm

        _ = airllm.AutoModel, airllm.AirLLMPhiMoE


def counters(model: Any, kind: str) -> dict[str, Any]:
    """The library's counters and the process's own, so that a difference of two calls says what happened in between."""
    stats: dict[str, Any] = {}
    if kind in SLOTS:
        stats = model.get_expert_cache_stats()
    elif kind == "streaming":
        stats = model.get_stream_stats()
    taken = {name: stats[name] for name in COUNTED if isinstance(stats.get(name), int)}
    return taken | {f"process_{name}": value for name, value in machine.io_bytes().items()}


def difference(after: dict[str, int], before: dict[str, int]) -> dict[str, int]:
    return {name: value - before.get(name, 0) for name, value in after.items()}


def generate(model: Any, prompt: list[int], tokens: int, clock: Any, device: torch.device, script: Script | None) -> None:
    ids = torch.tensor([prompt], device=device)
    options: dict[str, Any] = {"max_new_tokens": tokens, "min_new_tokens": tokens, "do_sample": False, "streamer": clock}
    if script is not None:
        options["logits_processor"] = [script]
    with torch.no_grad(), nothing_ahead(model) if script is not None else contextlib.nullcontext():
        model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), **options)


def measure(request: dict[str, Any], model: Any, device: torch.device, number: int, forced: bool) -> dict[str, Any]:
    """One prompt: its time, the time of each token after the first, and what moved in each of the two parts."""
    from airllm.token_clock import TokenClock

    kind, tokens = request["kind"], request["tokens"]
    middle: dict[str, Any] = {}

    def after_prompt() -> None:
        middle.update(counters=counters(model, kind), device=machine.device_memory(device))

    script = Script(request["scripts"][number]) if forced else None
    clock = TokenClock(after_prompt=after_prompt)
    start = counters(model, kind)
    generate(model, request["prompts"][number], tokens, clock, device, script)
    end, end_device = counters(model, kind), machine.device_memory(device)
    taken = difference(end_device, middle["device"])
    return {
        "prompt_tokens": len(request["prompts"][number]),
        "prompt_s": clock.prompt_s,
        "decode_s": clock.decode_s,
        "tokens": script.predictions() if script else clock.tokens,
        "prompt": difference(middle["counters"], start),
        "decode": difference(end, middle["counters"]),
        "decode_device": {name: taken.get(name) for name in ("segments_taken", "tensors_taken", "alloc_retries")},
    }


def measure_all(request: dict[str, Any], model: Any, device: torch.device) -> dict[str, list[dict[str, Any]]]:
    """Every prompt in every mode, after one short run that is not counted."""
    from airllm.token_clock import TokenClock

    generate(model, request["prompts"][0], min(WARM_TOKENS, request["tokens"]), TokenClock(), device, None)
    return {
        mode: [measure(request, model, device, number, mode == "forced") for number in range(len(request["prompts"]))]
        for mode in request["modes"]
    }


def run_case(request: dict[str, Any], device: torch.device) -> dict[str, Any]:
    """Load, measure, and say what the process and the device held at most."""
    peak = machine.PeakMemory()
    stages = {"start": machine.memory_now()}
    if device.type == "cuda":
        torch.zeros(1, device=device)
        stages["device_ready"] = machine.memory_now()
    import_libraries(request["kind"])
    stages["imported"] = machine.memory_now()
    start = time.perf_counter()
    with loaded(request, device) as model:
        load_s = time.perf_counter() - start
        stages["loaded"] = machine.memory_now() | {"peak_bytes": peak.bytes()}
        modes = measure_all(request, model, device)
        stats = stats_of(model, request["kind"])
        stages["generated"] = machine.memory_now()
        answer = {
            "kind": request["kind"],
            "load_s": load_s,
            "modes": modes,
            "stats": stats,
            "peak_process_bytes": peak.bytes(),
            "peak_process_source": peak.source,
            "stages": stages,
            "device_memory": machine.device_memory(device),
        }
        if request["kind"] == "streaming":  # last: measuring bandwidths takes memory of its own
            answer["turns"] = [stream_turn(request, model, device) for _ in range(TURNS)]
    return answer


def stream_turn(request: dict[str, Any], model: Any, device: torch.device) -> dict[str, Any]:
    """A few streamed tokens, then at once the bandwidths their floor is made of: the host's speed drifts in a run."""
    run = measure(request, model, device, 0, request["modes"][0] == "forced")
    moved = {name: value / len(run["decode_s"]) for name, value in run["decode"].items()}
    size = 2**28 if device.type == "cuda" else 2**24
    link = machine.link_bandwidths(device, request["expert_bytes"], size)
    copying = max(machine.host_copy_bandwidth(size, threads) for threads in machine.thread_counts())
    rates = {f"{name}_bytes_per_s": rate for name, rate in {**link, "host_copy": copying}.items()}
    return {"decode_s": run["decode_s"], "per_token": moved, "bandwidths": rates}


def run_pair(request: dict[str, Any], device: torch.device) -> dict[str, Any]:
    """Several kinds in one process, a prompt each in turn, so that all of them meet the same moods of the host."""
    from airllm.token_clock import TokenClock

    turns = []
    with contextlib.ExitStack() as stack:
        models = {}
        for kind in request["of"]:
            models[kind] = stack.enter_context(loaded(request | {"kind": kind}, device))
            generate(models[kind], request["prompts"][0], min(WARM_TOKENS, request["tokens"]), TokenClock(), device, None)
        for mode in request["modes"]:
            for number in range(len(request["prompts"])):
                times = {
                    kind: measure(request | {"kind": kind}, model, device, number, mode == "forced")["decode_s"]
                    for kind, model in models.items()
                }
                turns.append({"mode": mode, "decode_s": times})
    return {"kind": "pair", "turns": turns}


def stats_of(model: Any, kind: str) -> dict[str, Any] | None:
    if kind in SLOTS:
        return model.get_expert_cache_stats()
    return model.get_stream_stats() if kind == "streaming" else None


def run_sweep(request: dict[str, Any], device: torch.device) -> dict[str, Any]:
    """The case ``sweep_of`` at one budget after another. Peaks are not reported: they would be those of the largest."""
    points = []
    for budget in request["budgets_gb"]:
        one = request | {"kind": request["sweep_of"], "budget_gb": budget}
        with loaded(one, device) as model:
            modes = measure_all(one, model, device)
            stats = stats_of(model, one["kind"]) or {}
        names = ("slot_count", "scratch_slots", "allocated_cache_bytes")
        points.append({"budget_gb": budget, "modes": modes} | {name: stats.get(name) for name in names})
        del model
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
    return {"kind": "sweep", "points": points}


def run_machine(request: dict[str, Any], device: torch.device) -> dict[str, Any]:
    large = 2**31 if device.type == "cuda" else 2**26
    return {
        "kind": "machine",
        "hardware": machine.hardware(device),
        "bandwidths": machine.bandwidths(device, request["expert_bytes"], large),
    }


def jsonable(value: Any) -> Any:
    """Anything json does not know (paths, dtypes, devices in statistics) becomes text."""
    return str(value)


def answer(text: str) -> str:
    """The JSON answer to a JSON request."""
    request = json.loads(text)
    device = machine.pick_device(request.get("device"))
    if request.get("threads"):
        torch.set_num_threads(request["threads"])
    run = {"machine": run_machine, "sweep": run_sweep, "pair": run_pair}.get(request["kind"], run_case)
    return json.dumps(run(request, device), default=jsonable)


def main() -> None:
    print(answer(sys.argv[1]), flush=True)


if __name__ == "__main__":
    main()
