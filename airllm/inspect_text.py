"""The lines that `airllm inspect` prints."""

from __future__ import annotations

import math
from collections.abc import Mapping

from airllm.dense_budget import DensePlan, plan_dense, resident_gib
from airllm.experts.budget import GIB, SlotPlan
from airllm.inspect_model import (
    ExpertSizes,
    Inspection,
    SlotOutlook,
    beside_weights,
    budget_for_card,
    require_experts,
    slot_outlook,
    streamed_on_card,
    telling_budgets,
)
from airllm.streaming import HOST_BLOCKS


def gib(nbytes: float) -> str:
    """Bytes for a person: 10.5 MiB, 5.25 GiB."""
    return f"{nbytes / GIB:.3g} GiB" if nbytes >= GIB else f"{nbytes / 2**20:.3g} MiB"


def short(rate: float) -> str:
    """Three digits, or the whole number."""
    return f"{rate:.3g}" if rate < 1000 else f"{rate:.0f}"


def describe(
    found: Inspection,
    budget_bytes: int | None,
    vram_bytes: int | None,
    link_bytes_per_s: float,
    max_seq_len: int,
    resident_bytes: int | str | None = None,
) -> list[str]:
    """The lines that `airllm inspect` prints. A budget makes a dense model an UnsupportedModelError, a card that is too small
    any model a BudgetError.

    ``resident_bytes`` is what resident_gb says: None for its default, which is "all" beside slots and 0 for streaming.
    """
    lines = describe_files(found)
    streaming = plan_dense(found.dense_layers, resident_bytes or 0)
    lines += describe_streaming(found, streaming, link_bytes_per_s)
    if found.experts is None and budget_bytes is None and (vram_bytes is None or found.dense_layers):
        if vram_bytes is not None:
            lines += ["", *describe_streaming_card(found, vram_bytes, link_bytes_per_s, max_seq_len)]
        return [*lines, "", f"No slots, the model is streamed layer by layer: {found.no_slots}."]
    experts = require_experts(found)
    dense = plan_dense(found.dense_layers, "all" if resident_bytes is None else resident_bytes)
    lines += ["", *describe_experts(experts), *describe_dense(found, dense), ""]
    if vram_bytes is not None:
        budget_bytes = budget_for_card(found, dense, vram_bytes, max_seq_len)
        lines += describe_card(found, dense, vram_bytes, budget_bytes, max_seq_len)
        budget_bytes = min(budget_bytes, experts.total_experts * experts.expert_bytes)  # more would be of no use
    budgets = [budget_bytes] if budget_bytes is not None else telling_budgets(experts)
    outlooks = [slot_outlook(experts, budget, link_bytes_per_s, dense.moved_bytes) for budget in budgets]
    return lines + slot_table(outlooks, link_bytes_per_s)


def describe_files(found: Inspection) -> list[str]:
    dtypes = ", ".join(f"{name} {gib(nbytes)}" for name, nbytes in found.dtypes.items())
    lines = [
        f"{found.folder}",
        f"  model type      {found.model_type} ({', '.join(found.architectures) or 'no architecture named'})",
        f"  layers, hidden  {found.layers}, {found.hidden}",
        f"  weights         {found.total_bytes} B ({gib(found.total_bytes)}) in {found.tensors} tensors, {found.files} files",
        f"  dtypes          {dtypes}",
        f"  dense           {found.dense_bytes} B ({gib(found.dense_bytes)})",
    ]
    if found.kv_bytes_per_token is not None:
        window = f", attention to the last {found.sliding_window}" if found.sliding_window else ""
        lines.append(f"  KV cache        {found.kv_bytes_per_token} B a token{window}")
    return lines


def describe_streaming(found: Inspection, plan: DensePlan, link_bytes_per_s: float) -> list[str]:
    """Without slots: what crosses the link for each token, whole layers with their experts."""
    if found.experts is not None or not found.dense_layers:
        stays, moved = "", found.layer_bytes
    else:
        stays, moved = f"{plan.resident} of {len(plan.layers)} layers stay, ", plan.moved_bytes
    if not moved:
        return ["  streaming       every layer has memory of its own: nothing crosses the link"] if stays else []
    rate = link_bytes_per_s / moved
    return [f"  streaming       {stays}{gib(moved)} a token; {link_bytes_per_s / 1e9:g} GB/s allow {short(rate)} tokens/s"]


def describe_streaming_card(found: Inspection, vram_bytes: int, link_bytes_per_s: float, max_seq_len: int) -> list[str]:
    """How many layers may stay on an empty card, and what then crosses the link."""
    plan = streamed_on_card(found, vram_bytes, max_seq_len)
    parts = {"weights outside the layers": found.rest_bytes} | beside_weights(found, max_seq_len)
    keyword = "all" if not plan.streamed else f"{resident_gib(plan):g}"
    lines = [*card_lines(vram_bytes, parts), f"  --resident-gb {keyword} fits"]
    return lines + describe_streaming(found, plan, link_bytes_per_s)


def describe_dense(found: Inspection, plan: DensePlan) -> list[str]:
    """Beside slots: what stays on the device and what is streamed there, and what the host holds."""
    bank = require_experts(found).total_bytes
    if not plan.streamed:
        return ["  dense weights   all stay on the device", f"  host            {gib(bank)} of experts, pinned"]
    stays = found.rest_bytes + plan.resident_bytes
    host = f"{gib(HOST_BLOCKS * max(plan.layers))} of staging"
    if plan.moved_bytes:
        host = (
            f"with room, {gib(plan.streamed_bytes)} of streamed layers; else {host}, and as much page cache spares reading the "
            "disk for each token"
        )
    return [
        f"  dense, staying  {stays} B ({gib(stays)}): {gib(found.rest_bytes)} outside the layers, "
        f"{plan.resident} of {len(plan.layers)} layers",
        f"  dense, streamed {plan.moved_bytes} B ({gib(plan.moved_bytes)}) a token, through {plan.ring} blocks of "
        f"{gib(plan.block_bytes)}",
        f"  host, pinned    {gib(bank)} of experts and {host}",
    ]


def describe_experts(experts: ExpertSizes) -> list[str]:
    return [
        f"  experts         {experts.total_bytes} B ({gib(experts.total_bytes)}) in {experts.total_experts} experts: "
        f"{experts.moe_layers} layers of {_of_each(experts)}",
        f"  one expert      {experts.expert_bytes} B ({gib(experts.expert_bytes)})",
        f"  one token       T = {experts.moe_layers} layers x {experts.top_k} = {experts.per_token} experts, "
        f"{gib(experts.per_token * experts.expert_bytes)}",
    ]


def _of_each(experts: ExpertSizes) -> str:
    same = experts.total_experts == experts.moe_layers * experts.experts_per_layer
    return f"{experts.experts_per_layer}" if same else f"up to {experts.experts_per_layer}"


def describe_card(
    found: Inspection, dense: DensePlan, vram_bytes: int, budget_bytes: int, max_seq_len: int
) -> list[str]:
    parts = {"dense weights": found.rest_bytes + dense.resident_bytes}
    if dense.ring:
        parts["blocks that layers stream through"] = dense.ring_bytes
    parts |= beside_weights(found, max_seq_len)
    return [*card_lines(vram_bytes, parts), f"                  = {budget_bytes / GIB:.3f} GiB for slots", ""]


def card_lines(vram_bytes: int, parts: Mapping[str, int]) -> list[str]:
    """A card and what lies on it, by name."""
    return [
        f"  card            {gib(vram_bytes)}",
        *(f"                  - {gib(nbytes)} {name}" for name, nbytes in parts.items()),
    ]


def budget_gib(plan: SlotPlan) -> str:
    """The budget in GiB, rounded up to as few digits as still give as many slots."""
    for digits in range(4, 17):
        scaled = math.ceil(plan.budget_bytes / GIB * 10**digits) / 10**digits
        if int(scaled * GIB) // plan.expert_bytes == plan.budget_bytes // plan.expert_bytes:
            return f"{scaled:.{digits}f}"
    return f"{plan.budget_bytes / GIB!r}"


def slot_table(outlooks: list[SlotOutlook], link_bytes_per_s: float) -> list[str]:
    """What the link alone allows; the time of the arithmetic comes on top."""
    lines = [
        f"--expert-cache-gb  slots  scratch     T   all missed    uniform routing   (link {link_bytes_per_s / 1e9:g} GB/s)",
    ]
    for o in outlooks:
        estimate = "no misses" if o.tokens_per_s_estimated is None else f"{short(o.tokens_per_s_estimated)} tok/s"
        lines.append(
            f"  {budget_gib(o.plan):>15}  {o.plan.slots:>5}  {o.plan.scratch:>7}  {o.plan.slots / o.per_token:>4.2f}"
            f"  {short(o.tokens_per_s_all_missed):>5} tok/s  {estimate:>11} at {o.uniform_hit_rate:.2f}"
        )
    return lines
