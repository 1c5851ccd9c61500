#!/usr/bin/env python
"""Expert slots against layer streaming, in one run, each in a process of its own.

    python benchmarks/expert_cache.py --model microsoft/Phi-tiny-MoE-instruct --revision 2fe50e8 \\
        --expert-cache-gb 0.75 --tokens 8 --dtype float16
    python benchmarks/expert_cache.py --geometry phi-tiny --tokens 64 --prompts 5 --vs eager,default,accelerate
    python benchmarks/expert_cache.py --geometry tiny --vs eager          # a CPU will do

Prompt and decoding are timed apart. Every floor comes from bandwidths measured in this run: for slots max(missed bytes /
pinned link, bytes the device must read / device memory), for streaming max(bytes read / host copy, bytes moved / link).
The speed of a shared host drifts within a run. So where `--vs eager` runs, slots and eager also decode in turn, prompt by
prompt in one process, and are compared turn by turn; and after each turn of streaming the bandwidths of its floor are
measured. Token ids are compared with plain transformers in eager mode where `--vs eager` runs it, else with streaming.

Decoding modes: `forced` decodes a fixed random script (free greedy decoding on random weights falls into loops) and
compares what greedy decoding would have taken at each step; `free` is plain greedy decoding.

A run that is stopped (a limit of time) goes on where it was with --resume and the same arguments; the result says which cases
were measured in the earlier run. The last line is one JSON object. The exit code is 1 when a case failed, tokens differ, or a
rate cannot be true.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from benchmarks import report as reporting  # noqa: E402
from benchmarks.build_checkpoint import DTYPES, ensure  # noqa: E402
from benchmarks.geometry import GEOMETRIES  # noqa: E402

CASES_FILE = Path(__file__).with_name("cases.py")
SLOW = ("streaming", "accelerate")
TEXTS = (
    "Why is the sky blue?",
    "Write a short story about a lighthouse keeper.",
    "Explain how a transformer language model works.",
    "List three uses of mathematics in cooking.",
    "Translate to French: the weather is nice today.",
)


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--model", help="checkpoint folder or hub id")
    source.add_argument("--geometry", choices=GEOMETRIES, help="random weights in this geometry, built on first use")
    parser.add_argument("--revision", help="branch, tag or commit of a hub id")
    parser.add_argument("--expert-cache-gb", type=float, help="budget in GiB (default 0.75; tiny: 1.14 T)")
    parser.add_argument("--tokens", type=int, default=8, help="new tokens a prompt")
    parser.add_argument("--prompts", type=int, default=1, help="how many prompts")
    parser.add_argument("--prompt-tokens", type=int, default=32, help="length of a random prompt")
    parser.add_argument("--slow-tokens", type=int, default=8, help="at most so many for streaming and accelerate")
    parser.add_argument("--slow-prompts", type=int, default=1, help="at most so many for streaming and accelerate")
    parser.add_argument("--dtype", choices=DTYPES, help="default float16; float32 on the CPU")
    parser.add_argument("--checkpoint-dtype", choices=DTYPES, help="of a built checkpoint (default: --dtype)")
    parser.add_argument("--decode", choices=("forced", "free", "both"), help="default: both with --geometry, else free")
    parser.add_argument("--cases", default="streaming,slots", help="of streaming, slots, slots_device; comma-separated")
    parser.add_argument("--vs", default="", help="also eager, default, accelerate; comma-separated")
    parser.add_argument("--accelerate-gb", type=float, help="device memory for accelerate (default: dense + budget)")
    parser.add_argument("--budgets", default="", help="budgets in GiB for the sweep, comma-separated")
    parser.add_argument("--sweep-tokens", type=int, default=64, help="at most so many at each budget, for one prompt")
    parser.add_argument("--device", help="default: a GPU if there is one")
    parser.add_argument("--threads", type=int, help="torch's CPU threads in each case")
    parser.add_argument("--work-dir", type=Path, default=Path(".bench"), help="where built checkpoints go")
    parser.add_argument("--case-timeout", type=int, default=900, help="seconds a case may take")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output-json", type=Path)
    parser.add_argument("--resume", action="store_true", help="reuse what a stopped run of this output has measured")
    parser.add_argument("--plot", type=Path, help="PNG of tokens/s and hit rate against budget (needs --budgets)")
    args = parser.parse_args(arguments)
    known = {"streaming", "slots", "slots_device", "eager", "default", "accelerate"}
    args.kinds = [name for name in (*args.vs.split(","), *args.cases.split(",")) if name]
    unknown = set(args.kinds) - known
    if unknown:
        parser.error(f"unknown cases {sorted(unknown)}; known are {sorted(known)}")
    if args.tokens < 2:
        parser.error("--tokens must be at least 2: the first comes from the prompt, the rest are decoded")
    if args.resume and not args.output_json:
        parser.error("--resume goes on beside an output: give --output-json too")
    if args.plot and not args.budgets:
        parser.error("--plot draws the sweep: give --budgets too")
    return args


def find_model(args: argparse.Namespace, dtype: str) -> Path:
    """The folder that every case reads: the same files for all."""
    if args.geometry:
        stored = args.checkpoint_dtype or dtype
        return ensure(args.work_dir / f"{args.geometry}-{stored}", GEOMETRIES[args.geometry], stored, args.seed)
    if Path(args.model).is_dir():
        return Path(args.model)
    from airllm.locate import locate

    return Path(locate(args.model, revision=args.revision))


def make_prompts(folder: Path, count: int, length: int, seed: int) -> list[list[int]]:
    """Texts through the checkpoint's tokenizer where it has one, else random ids."""
    if (folder / "tokenizer_config.json").is_file():
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(folder)
        return [tokenizer(TEXTS[number % len(TEXTS)])["input_ids"] for number in range(count)]
    return [random_ids(folder, length, seed * 1000 + number) for number in range(count)]


def random_ids(folder: Path, count: int, seed: int) -> list[int]:
    """Ids of ordinary tokens: from 3 up to the first end-of-text id."""
    config = json.loads((folder / "config.json").read_text())
    eos = config.get("eos_token_id")
    last = min([config["vocab_size"], *([eos] if isinstance(eos, int) and eos > 3 else eos or [])])
    draw = random.Random(seed)
    return [draw.randrange(3, last) for _ in range(count)]


def request_for(kind: str, args: argparse.Namespace, shared: dict[str, Any]) -> dict[str, Any]:
    """What one case is asked; slow cases get fewer prompts and tokens."""
    request = shared | {"kind": kind}
    if kind in SLOW:
        request["tokens"] = min(args.tokens, args.slow_tokens)
        request["prompts"] = shared["prompts"][: args.slow_prompts]
    return request


def sweep_requests(args: argparse.Namespace, shared: dict[str, Any]) -> list[dict[str, Any]]:
    """One for each budget, of one prompt in one mode: each costs the loading of a bank. The device engine's where it is asked
    for: in a process's first prompt transformers' own calls may take several times as long."""
    one = shared | {"kind": "sweep", "tokens": min(args.tokens, args.sweep_tokens)}
    one |= {"sweep_of": "slots_device" if "slots_device" in args.kinds else "slots"}
    one |= {"prompts": shared["prompts"][:1], "modes": shared["modes"][:1]}
    return [one | {"budgets_gb": [float(text)]} for text in args.budgets.split(",")]


class Runs:
    """Runs cases one after the other and keeps what each was asked and answered beside the output to be, so that a run that is
    stopped half-way is not lost: ``resume`` takes the answers to equal requests from there.

    Answers of another machine are not taken: its hardware is looked at anew each time.
    """

    def __init__(self, output: Path | None, timeout_s: int, resume: bool) -> None:
        self.partial = None if output is None else output.with_name(output.stem + ".partial.json")
        self.timeout_s, self.reused = timeout_s, []
        self._kept: list[dict[str, Any]] = []
        self._done: list[dict[str, Any]] = []
        if resume and self.partial is not None and self.partial.is_file():
            self._kept = json.loads(self.partial.read_text())["runs"]

    def machine(self, request: dict[str, Any]) -> dict[str, Any]:
        """The machine as it is, or as it was when the answers that are there were measured on it."""
        now = run_child(request, self.timeout_s)
        if "error" in now:
            raise SystemExit(f"the machine could not be measured: {now['error']}")
        then = self._known(request)
        if then is None or then["hardware"] != now["hardware"]:
            self._kept, then = [], None
        return self._keep(request, then or now)

    def case(self, request: dict[str, Any]) -> dict[str, Any]:
        """The answer to a request; a failed one is asked again."""
        known = self._known(request)
        if known is not None:
            self.reused.append(request["kind"])
        return self._keep(request, known or run_child(request, self.timeout_s))

    def finish(self) -> None:
        """The output is written: the answers are no longer needed, unless some of them should be asked again."""
        if self.partial is not None and not any("error" in run["answer"] for run in self._done):
            self.partial.unlink(missing_ok=True)

    def _known(self, request: dict[str, Any]) -> dict[str, Any] | None:
        answers = (run["answer"] for run in self._kept if run["request"] == request)
        return next((answer for answer in answers if "error" not in answer), None)

    def _keep(self, request: dict[str, Any], answer: dict[str, Any]) -> dict[str, Any]:
        self._done.append({"request": request, "answer": answer})
        if self.partial is not None:
            self.partial.parent.mkdir(parents=True, exist_ok=True)
            # What was known before stays until it is asked for: this run may be stopped too.
            later = [run for run in self._kept if all(run["request"] != each["request"] for each in self._done)]
            write_whole(self.partial, json.dumps({"runs": self._done + later}) + "\n")
        return answer


def write_whole(path: Path, text: str) -> None:
    """Never half of it, whenever the process ends."""
    beside = path.with_name(path.name + ".new")
    beside.write_text(text, encoding="utf-8")
    beside.replace(path)


def run_child(request: dict[str, Any], timeout_s: int) -> dict[str, Any]:
    """Run one case and return its answer, or {"kind", "error"} with the end of what it said."""
    start = time.perf_counter()
    print(f"-- {request['kind']} ...", file=sys.stderr, flush=True)
    command = [sys.executable, str(CASES_FILE), json.dumps(request)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=False)
    except subprocess.TimeoutExpired:
        return {"kind": request["kind"], "error": f"took longer than {timeout_s} s (--case-timeout)"}
    print(f"   {request['kind']}: {time.perf_counter() - start:.1f} s", file=sys.stderr, flush=True)
    lines = done.stdout.strip().splitlines()
    if done.returncode or not lines:
        return {"kind": request["kind"], "error": f"exit code {done.returncode}: {done.stderr.strip()[-2000:]}"}
    return json.loads(lines[-1])


def run_all(args: argparse.Namespace, runs: Runs) -> dict[str, Any]:
    """Every case, then the figures made of them."""
    from airllm.inspect_model import inspect_folder, require_experts
    from benchmarks.machine import pick_device

    device = pick_device(args.device)
    dtype = args.dtype or ("float32" if device.type == "cpu" else "float16")
    folder = find_model(args, dtype)
    sizes = reporting.Sizes.of(inspect_folder(folder), dtype)
    budget_gb = args.expert_cache_gb
    if budget_gb is None:
        budget_gb = 0.75 if args.geometry != "tiny" else GEOMETRIES["tiny"].default_budget_gb(sizes.bytes_per_value)
    decode = args.decode or ("both" if args.geometry else "free")
    shared = {
        "model": str(folder),
        "dtype": dtype,
        "device": str(device),
        "threads": args.threads,
        "budget_gb": budget_gb,
        "accelerate_gb": args.accelerate_gb or budget_gb + sizes.dense_bytes / 2**30,
        "tokens": args.tokens,
        "prompts": make_prompts(folder, args.prompts, args.prompt_tokens, args.seed),
        "scripts": [random_ids(folder, args.tokens, 7_000_000 + args.seed * 1000 + n) for n in range(args.prompts)],
        "modes": ["forced", "free"] if decode == "both" else [decode],
        "expert_bytes": sizes.expert_bytes,
        "max_seq_len": args.tokens + max(512, args.prompt_tokens),
    }
    where = runs.machine({"kind": "machine", "device": str(device), "expert_bytes": sizes.expert_bytes})
    cases: dict[str, dict[str, Any]] = {}
    for kind in args.kinds:
        if kind == "accelerate" and device.type == "cpu":
            cases[kind] = {"kind": kind, "skipped": "accelerate has nothing to offload from on the CPU"}
            continue
        cases[kind] = runs.case(request_for(kind, args, shared))
    pair = None
    if "eager" in args.kinds and "slots" in args.kinds:
        of = [kind for kind in ("eager", "slots", "slots_device") if kind in args.kinds]
        pair = runs.case(shared | {"kind": "pair", "of": of})
    sweep = run_sweep(args, shared, runs) if args.budgets else None
    asked = {name: shared[name] for name in ("dtype", "device", "budget_gb", "accelerate_gb", "tokens", "modes")}
    asked |= {"source": args.geometry or args.model, "revision": args.revision, "prompts": args.prompts}
    asked |= {"prompt_tokens": [len(prompt) for prompt in shared["prompts"]], "seed": args.seed}
    asked |= {"measured_in_an_earlier_run": runs.reused} if runs.reused else {}
    return reporting.assemble(asked, require_experts(inspect_folder(folder)), sizes, where, cases, sweep, pair)


def run_sweep(args: argparse.Namespace, shared: dict[str, Any], runs: Runs) -> dict[str, Any]:
    """All budgets, each in a process of its own; the first error, if there is one."""
    requests = sweep_requests(args, shared)
    answers = [runs.case(request) for request in requests]
    failed = next((answer for answer in answers if "error" in answer), None)
    points = [point for answer in answers for point in answer.get("points", ())]
    return failed or {"kind": "sweep", "of": requests[0]["sweep_of"], "points": points}


def main(arguments: list[str] | None = None) -> int:
    args = parse(arguments)
    runs = Runs(args.output_json, args.case_timeout, args.resume)
    result = run_all(args, runs)
    if args.plot and "points" in result["sweep"]:
        from benchmarks.plot import plot_sweep

        plot_sweep(result, args.plot)
    print(reporting.as_text(result))
    line = json.dumps(result, sort_keys=True)
    if args.output_json:
        args.output_json.write_text(line + "\n", encoding="utf-8")
        runs.finish()
    print(line)
    return 1 if result["faults"] else 0


if __name__ == "__main__":
    sys.exit(main())
