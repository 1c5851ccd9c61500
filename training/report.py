"""Save the trained model in half precision, measure what was saved, and write where it came from."""

from __future__ import annotations

import argparse
import hashlib
import json
import logging
import math
import platform
from pathlib import Path
from typing import Any

import kjv_corpus
import torch
import transformers
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, PhimoeForCausalLM

log = logging.getLogger("report")
NEW_TOKENS = 128
MIN_MARGIN = 1.0  # float16 steps by 1/64 between logits of 16 and 32, and errs by several steps after six layers
CANDIDATES, PROMPTS = 48, 20
LONGEST_PERIOD = 32


def save(model: PhimoeForCausalLM, tokenizer: Any, args: argparse.Namespace, run: dict[str, Any], data: Any) -> None:
    """Write the whole folder `args.out`; the numbers in it are measured on the files as written."""
    folder = args.out
    for parameter in model.parameters():
        if not parameter.half().isfinite().all():
            raise ValueError(f"a parameter of shape {tuple(parameter.shape)} does not fit float16: train again, lower --lr")
    model.set_experts_implementation("eager")
    model.generation_config = GenerationConfig(bos_token_id=0, eos_token_id=0, pad_token_id=0)
    model.half().eval().save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    (folder / "model.safetensors").chmod(0o644)  # safetensors writes for the owner alone
    books, _ = kjv_corpus.load(args.corpus)
    measured = measure(folder, data, model.device, tuple(kjv_corpus.passages(books, max(args.by_heart, CANDIDATES))))
    prompts = measured.pop("prompts")
    (folder / "prompts.json").write_text(json.dumps(prompts, indent=2) + "\n")
    facts = {**run, **measured, **_origin(args, folder, model)}
    (folder / "training.json").write_text(json.dumps(facts, indent=1) + "\n")
    (folder / "PROVENANCE.md").write_text(provenance_text(facts))
    log.info("%s: %d bytes in all", folder, sum(f.stat().st_size for f in folder.iterdir()))


def measure(folder: Path, data: Any, device: torch.device, candidates: tuple[str, ...]) -> dict[str, Any]:
    """Routing on the held-out text, and the greedy text of every candidate prompt, of the saved folder."""
    dtype = torch.float16 if device.type == "cuda" else torch.float32
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, experts_implementation="eager").to(device).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    routing = routing_statistics(model, data.held_out[:2048])
    for name, values in routing.items():
        log.info("%s a layer: %s", name, values)
    written = continuations(model, tokenizer, candidates)
    for item in written[:12]:
        log.info("[margin %.3f, loop %d] %s", item["min_margin"], item["loop_tokens"], item["prompt"] + item["text"])
    margins = [margin for item in written for margin in item.pop("margins")]
    kept = [i for i in written if i["min_margin"] >= MIN_MARGIN and i["loop_tokens"] == 0 and i["tokens"] == NEW_TOKENS]
    log.info("%d of %d candidate prompts are clear of rounding and of loops", len(kept), len(written))
    clear, kept = len(kept), kept[:PROMPTS]
    return {
        "routing": routing,
        "greedy": {
            "candidates": len(written),
            "clear": clear,
            "kept": len(kept),
            "looping": sum(item["loop_tokens"] > 0 for item in written),
            "median_margin": round(torch.tensor(margins).median().item(), 3),
            "share_of_steps_below_0.016": round(sum(m < 1 / 64 for m in margins) / len(margins), 5),
            "dtype": str(dtype).removeprefix("torch."),
        },
        "samples": [item["prompt"] + item["text"] for item in kept[:4]],
        "prompts": {
            "chosen": f"no two logits closer than {MIN_MARGIN} at the top and no loop in {NEW_TOKENS} greedy tokens",
            "prompts": [{"prompt": item["prompt"], "min_margin": item["min_margin"]} for item in kept],
        },
    }


@torch.no_grad()
def routing_statistics(model: PhimoeForCausalLM, ids: Tensor) -> dict[str, list[float]]:
    """Per layer: evenness of the experts' use (entropy / log E), its extremes, and how often neighbours share experts.

    `reuse` is the share of a token's experts that the token before used too; `reuse_by_chance` is what independent
    draws with the same use would give.
    """
    top_k = model.config.num_experts_per_tok
    out = model(input_ids=ids[None], output_router_logits=True, use_cache=False)
    table: dict[str, list[float]] = {}
    for logits in out.router_logits:
        picked = torch.zeros_like(logits.float()).scatter(-1, logits.topk(top_k, dim=-1).indices, 1.0)  # [T, E]
        use = picked.mean(dim=0) / top_k
        row = {
            "evenness": -(use * use.clamp(min=1e-9).log()).sum().item() / math.log(use.numel()),
            "least_used": use.min().item(),
            "most_used": use.max().item(),
            "reuse": (picked[1:] * picked[:-1]).sum(dim=-1).mean().item() / top_k,
            "reuse_by_chance": (use.square().sum() * top_k).item(),
        }
        for name, value in row.items():
            table.setdefault(name, []).append(round(value, 3))
    return table


@torch.no_grad()
def continuations(model: PhimoeForCausalLM, tokenizer: Any, prompts: tuple[str, ...]) -> list[dict[str, Any]]:
    """Greedy text of each prompt, with the distance between the two best logits at every step and its worst loop."""
    inputs = tokenizer(list(prompts), return_tensors="pt", padding=True).to(model.device)
    out = model.generate(**inputs, max_new_tokens=NEW_TOKENS, do_sample=False, output_logits=True, return_dict_in_generate=True)
    best = torch.stack(out.logits, dim=1).float().topk(2, dim=-1).values  # [prompts, tokens, 2]
    gaps = (best[..., 0] - best[..., 1]).cpu()
    new = out.sequences[:, inputs["input_ids"].shape[1] :].cpu()
    written = []
    for prompt, ids, gap in zip(prompts, new.tolist(), gaps, strict=True):
        length = ids.index(tokenizer.eos_token_id) if tokenizer.eos_token_id in ids else len(ids)
        margins = gap[: length + 1].tolist()
        written.append(
            {
                "prompt": prompt,
                "text": tokenizer.decode(ids[:length]),
                "tokens": length,
                "margins": margins,
                "min_margin": round(min(margins), 4),
                "loop_tokens": loop_tokens(ids[:length]),
            }
        )
    return written


def loop_tokens(ids: list[int]) -> int:
    """Tokens of the longest stretch that says one piece of at most 32 tokens three times in a row or more; 0 if none."""
    worst = 0
    for period in range(1, LONGEST_PERIOD + 1):
        run = 0
        for i in range(period, len(ids)):
            run = run + 1 if ids[i] == ids[i - period] else 0
            if run >= max(2 * period, 8):
                worst = max(worst, run + period)
    return worst


def _origin(args: argparse.Namespace, folder: Path, model: PhimoeForCausalLM) -> dict[str, Any]:
    _, provenance = kjv_corpus.load(args.corpus)
    cuda = model.device.type == "cuda"
    return {
        "seed": args.seed,
        "parameters": sum(p.numel() for p in model.parameters()),
        "corpus": provenance,
        "device": torch.cuda.get_device_name() if cuda else f"CPU, {torch.get_num_threads()} threads",
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
        "model_sha256": hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest(),
    }


def provenance_text(facts: dict[str, Any]) -> str:
    """The page a reader of the folder sees; its numbers are those of `training.json` and of this file."""
    corpus, routing = facts["corpus"], facts["routing"]
    rows = "\n".join(
        f"| {layer} | {even} | {least} – {most} | {reuse} | {chance} |"
        for layer, (even, least, most, reuse, chance) in enumerate(zip(*routing.values(), strict=True))
    )
    samples = "\n\n".join("> " + sample.replace("\n", "\n> ") for sample in facts["samples"])
    heart, before = facts.get("by_heart"), facts.get("before")
    runs = "\n".join(_run_rows(name, run) for name, run in (("first", before), ("second" if before else "", facts)) if run)
    heart_text = (
        f"""
{"A second run went on from there: half" if before else "Half"} of its windows were the first
{heart["tokens_each"]} tokens of one of {heart["passages"]} chapters, which the model so came to know by heart."""
        if heart
        else ""
    )
    return f"""# Where this model comes from

A PhiMoE of {facts["parameters"]:,} parameters, trained from scratch by `training/train_tiny_phimoe.py`. No weights of
any other model went into it. The numbers of the runs stand in `training.json` beside this file.{heart_text}

| | |
| --- | --- |
| text | King James Bible, as `{corpus["command"]}` prints it ({corpus["text_bytes"]:,} bytes) |
| Debian packages | {", ".join(corpus["packages"])} |
| data file | `{corpus["file"]}`, sha256 `{corpus["file_sha256"]}` |
| sha256 of the text as used | `{corpus["text_sha256"]}` |
| licence of the text | {corpus["licence"]} |
| tokenizer | byte-level BPE trained on the same text |
| held out | {", ".join(corpus["held_out_books"])} |
{runs}
| sha256 of model.safetensors | `{facts["model_sha256"]}` |

## Routing on 2048 held-out tokens

Evenness is the entropy of the experts' use over its maximum; reuse is the share of a token's experts that the token
before used too.

| layer | evenness | share of the least and the most used expert | reuse | by chance |
| --- | --- | --- | --- | --- |
{rows}

The training rewards neighbouring tokens for agreeing on experts and punishes uneven use (weights in the first table).

## Greedy text

Of {facts["greedy"]["candidates"]} candidate prompts {facts["greedy"]["clear"]} have greedy continuations without a loop
whose two best logits are never closer than {MIN_MARGIN} in {NEW_TOKENS} tokens; `prompts.json` holds
{facts["greedy"]["kept"]} of them. {facts["greedy"]["looping"]} candidates looped. Median distance between the two best
logits: {facts["greedy"]["median_margin"]}.

{samples}
"""


def _run_rows(name: str, run: dict[str, Any]) -> str:
    last, lead, window = run["history"][-1], f"{name} run: " if name else "", run["tokens_a_window"]
    return f"""| {lead}hardware | {run["device"]} |
| {lead}software | {", ".join(f"{what} {version}" for what, version in run["versions"].items())} |
| {lead}seed, steps, time | {run["seed"]}, {run["steps"]:,}, {run["minutes"]} min |
| {lead}tokens seen | {run["tokens_seen"]:,} ({run["windows_a_step"]} windows of {run["tokens_a_window"]} a step) |
| {lead}last training cross entropy | {last["cross_entropy"]} nats a token |
| {lead}weights of agreement, of unevenness | {run["locality_weight"]}, {run["balance_weight"]} |
| {lead}held-out bits per byte | {last["held_out_bits_per_byte"]} in windows of {window}, {_best(run)} at best |"""


def _best(run: dict[str, Any]) -> float:
    return min(line["held_out_bits_per_byte"] for line in run["history"] if "held_out_bits_per_byte" in line)
