#!/usr/bin/env python
"""Runs every modelling file of the installed transformers that has experts on slots, against transformers itself.

    python benchmarks/family_table.py --json out.json                 # all of them, minutes on a CPU
    python benchmarks/family_table.py --only mixtral,qwen3_moe

`benchmarks/family_docs.py` makes docs/FAMILIES.md and the README's list of models out of the JSON.

For each file transformers builds a tiny random model and saves it; `AutoModel` loads it with slots on the CPU at three
budgets: the experts of one token, one more, all. Exact means: the logits of a prompt equal transformers' eager experts bit for
bit at every budget, and so do greedy tokens. Of a float32 checkpoint that is exact so far, greedy tokens are compared with
`expert_cache_engine="device"` too (its twins in plain torch), or the reason is kept why that engine does not serve it.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
import tempfile
import time
import traceback
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import PreTrainedModel

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(1, str(Path(__file__).resolve().parents[1]))

import family_models
from family_models import Family

from airllm import AutoModel
from airllm.errors import AirLLMError

PROMPT, TOKENS = 19, 6
GIB = 2**30


@dataclass
class Row:
    """What came out for one modelling file. ``outcome``: exact, refused, differs, error, or not built (by transformers)."""

    folder: str
    model_type: str | None
    model_class: str
    outcome: str
    reason: str = ""
    device_engine: str = ""
    """"yes" (it served every decoded token, and the tokens are the same), "tokens differ", or why not; "" where not tried."""
    experts: int = 0
    top_k: int = 0
    seconds: float = 0.0


def run_family(family: Family, dtype: torch.dtype = torch.float32) -> Row:
    """Build, save, load and compare one family."""
    started = time.perf_counter()
    row = Row(family.folder, family.model_type, "", "not built")
    try:
        if family.kind is None:
            row.outcome, row.reason = "refused", "no class that generates text from token ids alone"
            return row
        model = family_models.make_model(family).to(dtype)
        row.model_class = type(model).__name__
        with tempfile.TemporaryDirectory() as folder:
            model.config.dtype = dtype
            model.save_pretrained(folder)
            compare(family, Path(folder), row)
    except AirLLMError as error:
        row.outcome, row.reason = "refused", _short(error)
    except Exception as error:  # noqa: BLE001 - a row says whatever went wrong
        logging.debug("%s", traceback.format_exc())
        row.reason = _short(error)
    row.seconds = round(time.perf_counter() - started, 2)
    return row


def _short(error: Exception) -> str:
    return _one_line(f"{type(error).__name__}: {error}")


def _one_line(text: str) -> str:
    return " ".join(text.split())[:300]


def compare(family: Family, folder: Path, row: Row) -> None:
    """Fill ``row`` with how ours and transformers' model from ``folder`` compare."""
    oracle = load_oracle(family, folder)
    ids = torch.randint(3, family_models.VOCABULARY, (1, PROMPT), generator=torch.Generator().manual_seed(1))
    expected = answers(oracle, ids)
    row.outcome = "error"
    with slots(folder, "auto") as model:
        plan, row.top_k = model._runtime.pool.plan, model._runtime.top_k
        row.experts = model._runtime.bank.experts
    for count in sorted({row.top_k, row.top_k + 1, row.experts}):
        with slots(folder, count * plan.expert_bytes / GIB) as model:
            model._runtime.pool.poison()
            difference = differs(answers(model, ids), expected)
            served = model.get_expert_cache_stats()["hits"] + model.get_expert_cache_stats()["misses"]
        if difference or not served:
            row.outcome, row.reason = "differs", f"{count} slots: {difference or 'no expert was ever asked for'}"
            return
    row.outcome = "exact"
    if oracle.dtype == torch.float32:
        row.device_engine = try_device_engine(folder, ids, expected[1], (row.top_k + 1) * plan.expert_bytes / GIB)


def try_device_engine(folder: Path, ids: torch.Tensor, expected: torch.Tensor, budget_gb: float) -> str:
    """What ``Row.device_engine`` says."""
    with slots(folder, budget_gb, expert_cache_engine="device") as model:
        model._runtime.pool.poison()
        tokens = answers(model, ids)[1]
        stats = model.get_expert_cache_stats()
    if not torch.equal(tokens, expected):
        return "tokens differ"
    if stats["engine"] == "device" and stats["device_engine_steps"] == TOKENS - 1:
        return "yes"
    return _one_line(stats["device_engine_reason"] or f"{stats.get('device_engine_steps', 0)} of {TOKENS - 1} steps served")


def load_oracle(family: Family, folder: Path) -> PreTrainedModel:
    """transformers' own model with eager experts. Its weights get memory of their own: products of one row depend, on a CPU,
    on where in memory they lie."""
    model = family_models.model_class(family).from_pretrained(folder, dtype="auto", experts_implementation="eager")
    for parameter in model.parameters():
        parameter.requires_grad_(False)
        parameter.data = parameter.data.clone()
    return model


def slots(folder: Path, budget_gb: Any, **more: Any) -> Any:
    """Ours, on the CPU."""
    return AutoModel.from_pretrained(folder, device="cpu", expert_cache_backend="slot", expert_cache_gb=budget_gb, **more)


@torch.no_grad()
def answers(model: Any, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits of the prompt, and greedy tokens after it."""
    torch.manual_seed(0)  # a diffusion model begins with noise
    mask = torch.ones_like(ids)
    logits = model(input_ids=ids, attention_mask=mask).logits
    tokens = model.generate(ids, attention_mask=mask, max_new_tokens=TOKENS, min_new_tokens=TOKENS, do_sample=False)
    return logits, getattr(tokens, "sequences", tokens)


def differs(ours: tuple[torch.Tensor, torch.Tensor], theirs: tuple[torch.Tensor, torch.Tensor]) -> str:
    """What differs, or ""."""
    if not theirs[0].isfinite().all():
        return "transformers' own logits are not finite"
    if not torch.equal(ours[0], theirs[0]):
        return f"logits differ by up to {(ours[0] - theirs[0]).abs().max():.3g}"
    return "" if torch.equal(ours[1], theirs[1]) else "tokens differ"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", help="comma-separated folders of transformers/models")
    parser.add_argument("--dtype", default="float32", help="of the checkpoint")
    parser.add_argument("--json", type=Path, help="where to write the rows")
    parser.add_argument("--verbose", action="store_true", help="tracebacks of errors")
    options = parser.parse_args()
    logging.basicConfig(level=logging.DEBUG if options.verbose else logging.ERROR)
    transformers.logging.set_verbosity_error()
    only = set(options.only.split(",")) if options.only else None
    rows = []
    for family in family_models.families():
        if only is None or family.folder in only:
            rows.append(run_family(family, getattr(torch, options.dtype)))
            row = rows[-1]
            why = row.reason or f"device engine: {row.device_engine}"
            print(f"{row.outcome:9} {row.folder:22} {row.model_class:34} {row.seconds:5.1f} s  {why}", flush=True)
    outcomes = [row.outcome for row in rows]
    print(", ".join(f"{outcomes.count(outcome)} {outcome}" for outcome in sorted(set(outcomes))))
    if options.json:
        result = {
            "transformers": transformers.__version__,
            "torch": torch.__version__,
            "dtype": options.dtype,
            "rows": [asdict(row) for row in rows],
        }
        options.json.write_text(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
