"""The demonstration: one line of text continued four ways on a small built-in model, and what each way cost.

The ways are plain transformers (the reference), layer streaming, and expert slots at two budgets. All must give the same
tokens. Works without a network and without a GPU.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from airllm.auto_model import AutoModel
from airllm.inspect_model import ExpertSizes, inspect_folder, require_experts
from airllm.options import parse_options
from airllm.token_clock import TokenClock

GIB = 2**30
TIGHT_BUDGET = 1.14
"""In units of the experts of one token: what 0.75 GiB is to Phi-tiny-MoE."""


@dataclass(frozen=True)
class Row:
    """One way to run the model. Bytes and rates are measured; None where the way has no such thing."""

    name: str
    tokens: list[int]
    prompt_tokens_per_s: float
    decode_tokens_per_s: float | None
    hit_rate: float | None
    moved_bytes: int | None
    device_bytes: int
    host_bytes: int


@dataclass(frozen=True)
class DemoReport:
    prompt: str
    text: str
    device: str
    rows: list[Row]

    @property
    def identical(self) -> bool:
        return all(row.tokens == self.rows[0].tokens for row in self.rows)


def run_demo(folder: Path, prompt: str, max_new_tokens: int, device: str | None = None) -> DemoReport:
    """Run all four ways on the checkpoint in `folder`. On the CPU in float32, where half precision may be emulated."""
    given = {"device": device} if device else {}
    where = parse_options(folder, **given).device  # says what to do about a device that is not there
    dtype = torch.float32 if where.type == "cpu" else None
    sizes = require_experts(inspect_folder(folder))
    scale = 2 if dtype is torch.float32 else 1  # the files hold half precision
    tight, whole = (slots * sizes.expert_bytes * scale / GIB for slots in demo_slots(sizes))
    ask = Ask(prompt, max_new_tokens, where)
    oracle, text = run_plain(folder, ask, dtype)
    rows = [
        oracle,
        run_airllm("streaming", folder, ask, {"dtype": dtype}),
        run_airllm("slots, tight", folder, ask, slot_options(dtype, tight)),
        run_airllm("slots, all experts", folder, ask, slot_options(dtype, whole)),
    ]
    return DemoReport(prompt, text, device_name(where), rows)


def demo_slots(sizes: ExpertSizes) -> tuple[int, int]:
    """Slots of the two budgets: a little more than one token's experts, and every expert."""
    return math.ceil(TIGHT_BUDGET * sizes.per_token), sizes.total_experts


def slot_options(dtype: torch.dtype | None, budget_gb: float) -> dict[str, Any]:
    # A hair above, so that the conversion from GiB never rounds a slot away.
    return {"dtype": dtype, "expert_cache_backend": "slot", "expert_cache_gb": budget_gb * (1 + 1e-9)}


def device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"


@dataclass(frozen=True)
class Ask:
    """What every way is asked."""

    prompt: str
    max_new_tokens: int
    device: torch.device

    def timed(
        self, generate: Callable[..., Any], tokenizer: Any, clock: TokenClock, once_warm: Callable[[], Any] = int
    ) -> int:
        """Generate greedily under `clock`, after a short run that is not counted and then `once_warm`.

        Returns the number of prompt tokens.
        """
        inputs = tokenizer(self.prompt, return_tensors="pt").to(self.device)
        warm = TokenClock()
        generate(**inputs, max_new_tokens=2, do_sample=False, streamer=warm)
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        once_warm()
        generate(**inputs, max_new_tokens=self.max_new_tokens, do_sample=False, streamer=clock)
        return int(inputs["input_ids"].shape[1])


def run_plain(folder: Path, ask: Ask, dtype: torch.dtype | None) -> tuple[Row, str]:
    """Unmodified transformers, all weights on the device, experts in eager mode; also the text that it wrote."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype or "auto", experts_implementation="eager")
    model.to(ask.device)  # type: ignore[arg-type]  # the stub wants a model
    clock = TokenClock()
    count = ask.timed(model.generate, tokenizer, clock)
    held = sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))
    row = Row(
        name="transformers, eager",
        tokens=clock.tokens,
        prompt_tokens_per_s=count / clock.prompt_s,
        decode_tokens_per_s=clock.decode_tokens_per_s(),
        hit_rate=None,
        moved_bytes=None,
        device_bytes=device_peak(ask.device, held),
        host_bytes=0,
    )
    return row, str(tokenizer.decode(clock.tokens, skip_special_tokens=True))


def device_peak(device: torch.device, held_bytes: int) -> int:
    """Peak bytes of the device's allocator; on the CPU, where "device" is ordinary memory, the bytes that are held."""
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else held_bytes


def run_airllm(name: str, folder: Path, ask: Ask, options: dict[str, Any]) -> Row:
    """This package with `options`."""
    slots = options.get("expert_cache_backend") == "slot"
    with AutoModel.from_pretrained(str(folder), device=str(ask.device), **options) as model:
        clock = TokenClock()
        before: list[dict[str, int]] = []
        count = ask.timed(model.generate, model.tokenizer, clock, lambda: before.append(traffic(model, slots)))
        used = {name: value - before[0][name] for name, value in traffic(model, slots).items()}
        stats = model.get_expert_cache_stats() if slots else model.get_stream_stats()
        return Row(
            name=name,
            tokens=clock.tokens,
            prompt_tokens_per_s=count / clock.prompt_s,
            decode_tokens_per_s=clock.decode_tokens_per_s(),
            hit_rate=used["hits"] / max(1, used["hits"] + used["misses"]) if slots else None,
            moved_bytes=used["moved_bytes"],
            device_bytes=device_peak(ask.device, held_device_bytes(stats, slots)),
            host_bytes=held_host_bytes(stats, slots),
        )


def traffic(model: Any, slots: bool) -> dict[str, int]:
    """Counters so far. On the CPU a streamed layer is read straight to where it is used: its reads are what moved."""
    if slots:
        stats = model.get_expert_cache_stats()
        return {"moved_bytes": stats["h2d_bytes"], "hits": stats["hits"], "misses": stats["misses"]}
    stats = model.get_stream_stats()
    on_cpu = model.device.type == "cpu"
    return {"moved_bytes": stats["bytes_read"] if on_cpu else stats["h2d_bytes"]}


def held_device_bytes(stats: dict[str, Any], slots: bool) -> int:
    """Dense weights with slots and scratch, or with the streamed layers' blocks."""
    if slots:
        return stats["allocated_device_bytes"]
    return stats["dense_resident_bytes"] + stats["resident_bytes"] + stats["ring_bytes"]


def held_host_bytes(stats: dict[str, Any], slots: bool) -> int:
    if slots:
        return stats["host_bank_bytes"]
    return stats["staging_bytes"]


def format_report(report: DemoReport) -> str:
    """The report as a person reads it: the text, the verdict, the table."""
    count = len(report.rows[0].tokens)
    verdict = "the same in all four" if report.identical else "DIFFERENT: " + different(report)
    lines = [
        f"{report.prompt}|{report.text}",
        "",
        f"{count} tokens on {report.device}, {verdict}.",
        "",
        f"{'':<20} {'prompt':>8} {'decode':>8} {'hit':>5} {'moved':>10} {'device':>10} {'host':>10}",
        f"{'':<20} {'tokens/s':>8} {'tokens/s':>8} {'rate':>5} {'MiB':>10} {'MiB':>10} {'MiB':>10}",
    ]
    lines += [format_row(row) for row in report.rows]
    lines += ["", "moved: to the device over the whole run. device, host: memory that the way held for the model."]
    return "\n".join(lines)


def different(report: DemoReport) -> str:
    return ", ".join(row.name for row in report.rows[1:] if row.tokens != report.rows[0].tokens)


def format_row(row: Row) -> str:
    rate = "" if row.hit_rate is None else f"{row.hit_rate:.2f}"
    decode = "" if row.decode_tokens_per_s is None else f"{row.decode_tokens_per_s:.1f}"
    moved_mib = "" if row.moved_bytes is None else f"{row.moved_bytes / 2**20:.1f}"
    return (
        f"{row.name:<20} {row.prompt_tokens_per_s:>8.1f} {decode:>8} {rate:>5} {moved_mib:>10} "
        f"{row.device_bytes / 2**20:>10.2f} {row.host_bytes / 2**20:>10.2f}"
    )
