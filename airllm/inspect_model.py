"""What `airllm inspect` says about a checkpoint folder: sizes, slots, and what a link allows. Arithmetic only.

Reads config.json and the safetensors headers, and asks the model itself, built on meta, what its experts are: no weights, no
device.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from airllm.auto_model import model_class
from airllm.checkpoint import CheckpointIndex
from airllm.errors import BudgetError, CheckpointError, UnsupportedModelError
from airllm.experts.assembly import RESERVE_BYTES
from airllm.experts.budget import GIB, SCRATCH_SLOTS, SlotPlan, auto_budget_bytes, plan_slots
from airllm.experts.layout import ModelLayout
from airllm.quantised import quantisation_of
from airllm.skeleton import build_skeleton, load_config, resolve_dtype
from airllm.weight_map import build_weight_map

_LAYER_NAME = re.compile(r"(?:^|\.)(?:layers|h|blocks)\.\d+\.")
_EMBEDDING_NAME = re.compile(r"(?:^|\.)(?:embed_tokens|wte|embed_in)\.weight$")

# What a card loses to the driver's context and libraries before the first tensor; seen between 0.3 and 0.6 GiB.
CONTEXT_BYTES = 512 * 2**20


@dataclass(frozen=True)
class ExpertSizes:
    """The routed experts of a model, in the dtype that it is loaded in. ``expert_bytes`` is the largest one's."""

    moe_layers: int
    experts_per_layer: int
    total_experts: int
    top_k: int
    expert_bytes: int
    total_bytes: int
    widest: int

    @property
    def per_token(self) -> int:
        """T: experts that one decoded token uses over all layers."""
        return self.moe_layers * self.top_k


@dataclass(frozen=True)
class Inspection:
    """A checkpoint as its config and headers describe it. Without `experts`, `no_slots` says why slots cannot serve it."""

    folder: Path
    model_type: str
    architectures: tuple[str, ...]
    layers: int | None
    hidden: int | None
    vocabulary: int | None
    bytes_per_value: int
    kv_bytes_per_token: int | None
    sliding_window: int | None
    files: int
    tensors: int
    dtypes: Mapping[str, int]
    total_bytes: int
    layer_bytes: int
    embedding_bytes: int
    dense_bytes: int
    experts: ExpertSizes | None
    no_slots: str = ""

    def kv_bytes(self, tokens: int) -> int:
        """Bytes of the KV cache for `tokens` tokens."""
        return tokens * (self.kv_bytes_per_token or 0)

    def workspace_bytes(self, tokens: int) -> int:
        """Activations of one prompt, by the same estimate as expert_cache_gb="auto" (airllm.experts.assembly)."""
        if self.experts is None or not self.hidden or not self.vocabulary:
            return 0
        row = self.bytes_per_value * (12 * self.hidden + 2 * self.experts.widest)
        return tokens * row + self.vocabulary * (4 + self.bytes_per_value)


@dataclass(frozen=True)
class SlotOutlook:
    """What a budget buys. Rates are limits of the link alone, in tokens a second."""

    plan: SlotPlan
    per_token: int
    uniform_hit_rate: float
    tokens_per_s_all_missed: float
    tokens_per_s_estimated: float | None


def inspect_folder(folder: str | Path) -> Inspection:
    """Read config.json and every safetensors header of `folder`.

    Raises CheckpointError when a file is missing, damaged, or a header does not match its file.
    """
    root = Path(folder)
    config = read_config(root)
    index = CheckpointIndex.open(root)
    text = config.get("text_config") or config
    dtypes: Counter[str] = Counter()
    item_bytes: Counter[int] = Counter()
    for entry in index.values():
        dtypes[str(entry.dtype).removeprefix("torch.")] += entry.nbytes
        item_bytes[entry.dtype.itemsize] += entry.nbytes
    bytes_per_value = item_bytes.most_common(1)[0][0] if item_bytes else 2
    dense_bytes, experts, no_slots = _slots(root, index)
    window = text.get("sliding_window") if text.get("use_sliding_window", True) else None
    return Inspection(
        folder=root,
        model_type=str(config.get("model_type", "unknown")),
        architectures=tuple(config.get("architectures") or ()),
        layers=first_int(text, ("num_hidden_layers", "n_layer", "num_layers")),
        hidden=first_int(text, ("hidden_size", "n_embd", "d_model")),
        vocabulary=first_int(text, ("vocab_size",)),
        bytes_per_value=bytes_per_value,
        kv_bytes_per_token=kv_bytes_per_token(text, bytes_per_value),
        sliding_window=int(window) if window else None,
        files=len(index.files),
        tensors=len(index),
        dtypes=dict(dtypes),
        total_bytes=index.total_bytes,
        layer_bytes=sum(e.nbytes for e in index.values() if _LAYER_NAME.search(e.name)),
        embedding_bytes=sum(e.nbytes for e in index.values() if _EMBEDDING_NAME.search(e.name)),
        dense_bytes=dense_bytes,
        experts=experts,
        no_slots=no_slots,
    )


def _slots(root: Path, index: CheckpointIndex) -> tuple[int, ExpertSizes | None, str]:
    """Bytes of the dense weights, the experts, and why slots cannot serve the model.

    Raises WeightMapError when tensors are missing or have other shapes than the model's.
    """
    try:
        config = load_config(root)
        dtype = resolve_dtype(None, config, index)
        model = build_skeleton(config, dtype=dtype)
        targets = build_weight_map(model, index, dtype=dtype, quantisation=quantisation_of(config)).targets()
        found = model_class(config).experts_of(model)
    except UnsupportedModelError as error:
        return index.total_bytes, None, str(error)
    names, layout = found.parameter_names(), found.layout
    dense = sum(spec.nbytes for name, spec in targets.items() if name not in names)
    return dense, _sizes(found.top_k, layout), ""


def _sizes(top_k: int, layout: ModelLayout) -> ExpertSizes:
    return ExpertSizes(
        moe_layers=len(layout.layers),
        experts_per_layer=layout.num_experts,
        total_experts=layout.total_experts,
        top_k=top_k,
        expert_bytes=layout.expert_bytes,
        total_bytes=layout.total_bytes,
        widest=layout.widest,
    )


def read_config(root: Path) -> dict[str, Any]:
    path = root / "config.json"
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(
            f"{root} has no config.json: give the folder of a checkpoint as transformers saves it"
        ) from None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read as JSON ({error}): download it again") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} holds no JSON object: download it again")
    return content


def first_int(config: Mapping[str, Any], names: Iterable[str]) -> int | None:
    for name in names:
        value = config.get(name)
        if isinstance(value, int) and not isinstance(value, bool):
            return value
    return None


def kv_bytes_per_token(config: Mapping[str, Any], bytes_per_value: int) -> int | None:
    """Bytes of keys and values of one token over all layers, None where the config does not say enough."""
    layers = first_int(config, ("num_hidden_layers", "n_layer"))
    heads = first_int(config, ("num_attention_heads", "n_head"))
    hidden = first_int(config, ("hidden_size", "n_embd"))
    if not layers or not heads or not hidden or "kv_lora_rank" in config:
        return None
    kv_heads = first_int(config, ("num_key_value_heads",)) or heads
    head_dim = first_int(config, ("head_dim",)) or hidden // heads
    return 2 * layers * kv_heads * head_dim * bytes_per_value


def require_experts(inspection: Inspection) -> ExpertSizes:
    """The experts, or UnsupportedModelError for a model that slots cannot serve."""
    if inspection.experts is None:
        raise UnsupportedModelError(
            f"{inspection.folder} ({inspection.model_type}): slots need a mixture of experts that they can serve, and "
            f"{inspection.no_slots}; leave --expert-cache-gb and --vram-gb out, and stream it"
        )
    return inspection.experts


def budget_for_card(inspection: Inspection, vram_bytes: int, max_seq_len: int) -> int:
    """Bytes left for slots on an empty card of `vram_bytes`, by the rule of expert_cache_gb="auto"."""
    experts = require_experts(inspection)
    return auto_budget_bytes(
        free_bytes=vram_bytes - CONTEXT_BYTES - inspection.dense_bytes,
        kv_cache_bytes=inspection.kv_bytes(max_seq_len),
        workspace_bytes=inspection.workspace_bytes(max_seq_len),
        reserve_bytes=RESERVE_BYTES,
        scratch_bytes=SCRATCH_SLOTS * experts.expert_bytes,
    )


def slot_outlook(experts: ExpertSizes, budget_bytes: int, link_bytes_per_s: float) -> SlotOutlook:
    """Slots of a budget, and the tokens a second that the link allows.

    The estimate takes routing to be uniform and the slots to be shared evenly, so that a fraction slots / experts hits.
    Real routing repeats itself and does better; a policy that thrashes does worse. It is None when nothing is missed:
    then the link is no limit.

    Raises BudgetError for a budget below one token's experts in one layer.
    """
    plan = plan_slots(
        budget_bytes=budget_bytes,
        expert_bytes=experts.expert_bytes,
        total_experts=experts.total_experts,
        top_k=experts.top_k,
    )
    token_bytes = experts.per_token * experts.expert_bytes
    hit_rate = plan.slots / experts.total_experts
    missed = token_bytes * (1 - hit_rate)
    return SlotOutlook(
        plan=plan,
        per_token=experts.per_token,
        uniform_hit_rate=hit_rate,
        tokens_per_s_all_missed=link_bytes_per_s / token_bytes,
        tokens_per_s_estimated=link_bytes_per_s / missed if missed > 0 else None,
    )


def telling_budgets(experts: ExpertSizes) -> list[int]:
    """Budgets worth a row when the user named none: one layer's experts of a token, T, 2 T, and every expert."""
    slots = {experts.top_k, experts.per_token, 2 * experts.per_token, experts.total_experts}
    return [count * experts.expert_bytes for count in sorted(slots) if count <= experts.total_experts]


def stream_tokens_per_s(inspection: Inspection, link_bytes_per_s: float) -> float | None:
    """Tokens a second that the link allows when every layer crosses it for each token."""
    return link_bytes_per_s / inspection.layer_bytes if inspection.layer_bytes else None


def gib(nbytes: float) -> str:
    """Bytes for a person: 10.5 MiB, 5.25 GiB."""
    return f"{nbytes / GIB:.3g} GiB" if nbytes >= GIB else f"{nbytes / 2**20:.3g} MiB"


def describe(
    found: Inspection, budget_bytes: int | None, vram_bytes: int | None, link_bytes_per_s: float, max_seq_len: int
) -> list[str]:
    """The lines that `airllm inspect` prints. A budget or a card makes a dense model an UnsupportedModelError."""
    lines = describe_files(found, link_bytes_per_s)
    if found.experts is None and budget_bytes is None and vram_bytes is None:
        return [*lines, "", f"No slots, the model is streamed layer by layer: {found.no_slots}."]
    experts = require_experts(found)
    lines += ["", *describe_experts(experts), ""]
    if vram_bytes is not None:
        budget_bytes = budget_for_card(found, vram_bytes, max_seq_len)
        one_token_bytes = experts.top_k * experts.expert_bytes
        if budget_bytes < one_token_bytes:
            raise BudgetError(
                f"a card of {vram_bytes} B is {one_token_bytes - budget_bytes} B too small for slots: beside dense weights, KV "
                f"cache for {max_seq_len} tokens and workspace it must hold {one_token_bytes} B for {experts.top_k} experts "
                f"(one token in one layer); the model can be streamed instead"
            )
        lines += describe_card(found, vram_bytes, budget_bytes, max_seq_len)
    budgets = [budget_bytes] if budget_bytes is not None else telling_budgets(experts)
    return lines + slot_table([slot_outlook(experts, budget, link_bytes_per_s) for budget in budgets], link_bytes_per_s)


def describe_files(found: Inspection, link_bytes_per_s: float) -> list[str]:
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
        window = f", at most {found.sliding_window} tokens" if found.sliding_window else ""
        lines.append(f"  KV cache        {found.kv_bytes_per_token} B a token{window}")
    rate = stream_tokens_per_s(found, link_bytes_per_s)
    if rate is not None:
        limit = f"{gib(found.layer_bytes)} a token; {link_bytes_per_s / 1e9:g} GB/s allow {rate:.3g} tokens/s"
        lines.append(f"  streaming       {limit}")
    return lines


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


def describe_card(found: Inspection, vram_bytes: int, budget_bytes: int, max_seq_len: int) -> list[str]:
    parts = {
        "dense weights": found.dense_bytes,
        f"KV cache for {max_seq_len} tokens": found.kv_bytes(max_seq_len),
        "activations": found.workspace_bytes(max_seq_len),
        "driver context": CONTEXT_BYTES,
        "reserve": RESERVE_BYTES,
        "scratch slots": SCRATCH_SLOTS * require_experts(found).expert_bytes,
    }
    lines = [f"  card            {gib(vram_bytes)}"]
    lines += [f"                  - {gib(nbytes)} {name}" for name, nbytes in parts.items()]
    return [*lines, f"                  = {budget_bytes / GIB:.3f} GiB for slots", ""]


def slot_table(outlooks: list[SlotOutlook], link_bytes_per_s: float) -> list[str]:
    """What the link alone allows; the time of the arithmetic comes on top."""
    lines = [
        f"  expert_cache_gb  slots  scratch     T   all missed    uniform routing   (link {link_bytes_per_s / 1e9:g} GB/s)",
    ]
    for o in outlooks:
        estimate = "no misses" if o.tokens_per_s_estimated is None else f"{o.tokens_per_s_estimated:.3g} tok/s"
        lines.append(
            f"  {o.plan.budget_bytes / GIB:>15.4f}  {o.plan.slots:>5}  {o.plan.scratch:>7}  {o.plan.slots / o.per_token:>4.2f}"
            f"  {o.tokens_per_s_all_missed:>5.3g} tok/s  {estimate:>11} at {o.uniform_hit_rate:.2f}"
        )
    return lines
