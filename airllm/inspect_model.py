"""What `airllm inspect` knows about a checkpoint folder: sizes, slots, and what a link allows. Arithmetic only.

Reads config.json and the safetensors headers, and asks the model itself, built on meta, what its experts are: no weights, no
device.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from airllm.auto_model import model_class
from airllm.checkpoint import CheckpointIndex
from airllm.dense_budget import DensePlan, largest_that_fits, plan_dense, resident_gib
from airllm.errors import BudgetError, CheckpointError, UnsupportedModelError
from airllm.experts.assembly import RESERVE_BYTES, kv_cache_bytes
from airllm.experts.budget import GIB, SCRATCH_SLOTS, SlotPlan, plan_slots
from airllm.experts.layout import ModelLayout
from airllm.layer_files import open_unsplit
from airllm.layer_layout import plan_layers
from airllm.quantised import quantisation_of
from airllm.skeleton import build_skeleton, decoder_layers, load_config, resolve_dtype
from airllm.weight_map import WeightMap, build_weight_map

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
    """A checkpoint as its config and headers describe it. Without `experts`, `no_slots` says why slots cannot serve it.

    `dense_layers`: bytes of each decoder layer without what slots would hold, in the dtype that the model is loaded in;
    `rest_bytes` lie outside the layers.
    """

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
    dense_layers: tuple[int, ...]
    rest_bytes: int
    experts: ExpertSizes | None
    no_slots: str = ""

    def kv_bytes(self, tokens: int) -> int:
        """Bytes of the KV cache for `tokens` tokens."""
        return tokens * (self.kv_bytes_per_token or 0)

    def workspace_bytes(self, tokens: int) -> int:
        """Activations of one prompt, by the same estimate as expert_cache_gb="auto" (airllm.experts.assembly)."""
        if not self.hidden or not self.vocabulary:
            return 0
        row = self.bytes_per_value * (12 * self.hidden + (2 * self.experts.widest if self.experts is not None else 0))
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
    index = open_unsplit(root)
    text = config.get("text_config") or config
    dtypes: Counter[str] = Counter()
    item_bytes: Counter[int] = Counter()
    for entry in index.values():
        dtypes[str(entry.dtype).removeprefix("torch.")] += entry.nbytes
        item_bytes[entry.dtype.itemsize] += entry.nbytes
    bytes_per_value = item_bytes.most_common(1)[0][0] if item_bytes else 2
    weights = _weights(root, index)
    window = text.get("sliding_window") if text.get("use_sliding_window", True) else None
    return Inspection(
        folder=root,
        model_type=str(config.get("model_type", "unknown")),
        architectures=tuple(config.get("architectures") or ()),
        layers=first_int(text, ("num_hidden_layers", "n_layer", "num_layers")),
        hidden=first_int(text, ("hidden_size", "n_embd", "d_model")),
        vocabulary=first_int(text, ("vocab_size",)),
        bytes_per_value=bytes_per_value,
        sliding_window=int(window) if window else None,
        files=len(index.files),
        tensors=len(index),
        dtypes=dict(dtypes),
        total_bytes=index.total_bytes,
        layer_bytes=sum(e.nbytes for e in index.values() if _LAYER_NAME.search(e.name)),
        embedding_bytes=sum(e.nbytes for e in index.values() if _EMBEDDING_NAME.search(e.name)),
        **{"kv_bytes_per_token": kv_bytes_per_token(text, bytes_per_value), **weights},
    )


def _weights(root: Path, index: CheckpointIndex) -> dict[str, Any]:
    """The fields of `Inspection` that the model itself tells.

    Raises WeightMapError when tensors are missing or have other shapes than the model's.
    """
    known: dict[str, Any] = {"dense_bytes": index.total_bytes, "dense_layers": (), "rest_bytes": 0, "experts": None}
    try:
        config = load_config(root)
        dtype = resolve_dtype(None, config, index)
        model = build_skeleton(config, dtype=dtype)
        weight_map = build_weight_map(model, index, dtype=dtype, quantisation=quantisation_of(config))
        known |= _dense(model, weight_map, ())
        found = model_class(config).experts_of(model)
    except UnsupportedModelError as error:
        return {**known, "no_slots": str(error)}
    names = found.parameter_names()
    dense = sum(spec.nbytes for name, spec in weight_map.targets().items() if name not in names)
    return {
        "dense_bytes": dense,
        "experts": _sizes(found.top_k, found.layout),
        "kv_bytes_per_token": kv_cache_bytes(config, 1, found.layout),
        **_dense(model, weight_map, names),
    }


def _dense(model: PreTrainedModel, weight_map: WeightMap, in_slots: Collection[str]) -> dict[str, Any]:
    layouts = plan_layers(model, decoder_layers(model)[1], weight_map, in_slots)
    elsewhere = {place.spec.name for layout in layouts for place in layout.places}.union(in_slots)
    rest = sum(spec.nbytes for name, spec in weight_map.targets().items() if name not in elsewhere)
    return {"dense_layers": tuple(layout.nbytes for layout in layouts), "rest_bytes": rest}


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
        what = "has no config.json" if root.is_dir() else "is no folder here"
        raise CheckpointError(
            f"{root} {what}: give the folder of a checkpoint as transformers saves it; one on the hub is downloaded first "
            "(`hf download NAME --local-dir FOLDER`)"
        ) from None
    except NotADirectoryError:
        raise CheckpointError(f"{root} is a file: give the folder that holds config.json and the weights") from None
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
            f"{inspection.no_slots}; leave --expert-cache-gb out, and stream it"
        )
    return inspection.experts


def beside_weights(inspection: Inspection, max_seq_len: int) -> dict[str, int]:
    """What a card holds beside dense weights and slots, by the rule of expert_cache_gb="auto": name -> bytes."""
    parts = {
        f"KV cache for {max_seq_len} tokens": inspection.kv_bytes(max_seq_len),
        "activations": inspection.workspace_bytes(max_seq_len),
        "driver context": CONTEXT_BYTES,
        "reserve": RESERVE_BYTES,
    }
    if inspection.experts is not None:
        parts["scratch slots"] = SCRATCH_SLOTS * inspection.experts.expert_bytes
    return parts


def streamed_on_card(inspection: Inspection, vram_bytes: int, max_seq_len: int) -> DensePlan:
    """The most layers, experts and all, that stay on an empty card of `vram_bytes` while the others stream.

    Raises BudgetError when not even the blocks that they stream through fit.
    """
    beside = sum(beside_weights(inspection, max_seq_len).values()) + inspection.rest_bytes
    best = largest_that_fits(inspection.dense_layers, vram_bytes - beside)
    if best is None:
        need = beside + plan_dense(inspection.dense_layers, 0).device_bytes
        raise BudgetError(
            f"a card of {vram_bytes / GIB:g} GiB is too small to stream this model: weights outside the layers, KV cache for "
            f"{max_seq_len} tokens, workspace, driver and three blocks for layers need "
            f"{math.ceil(need / GIB * 1000) / 1000} GiB ({need} B; one block with prefetching=False)"
        )
    return best


def budget_for_card(inspection: Inspection, dense: DensePlan, vram_bytes: int, max_seq_len: int) -> int:
    """Bytes left for slots on an empty card of `vram_bytes`.

    Raises BudgetError, with the --resident-gb that would do, when they hold less than one token's experts in one layer.
    """
    experts = require_experts(inspection)
    beside = sum(beside_weights(inspection, max_seq_len).values())
    left = vram_bytes - beside - inspection.rest_bytes
    budget = left - dense.device_bytes
    one_token_bytes = experts.top_k * experts.expert_bytes
    if budget >= one_token_bytes:
        return budget
    least = math.ceil((vram_bytes + one_token_bytes - budget) / GIB * 1000) / 1000
    best = largest_that_fits(inspection.dense_layers, left - one_token_bytes)
    remedy = (
        f"--resident-gb {resident_gib(best):g} would do: {best.resident} of {len(best.layers)} layers stay, and "
        f"{best.moved_bytes} B a token are streamed"
        if best is not None
        else "even --resident-gb 0 does not fit; the model can be streamed instead"
    )
    raise BudgetError(
        f"a card of {vram_bytes / GIB:g} GiB is too small for slots, {least} GiB would do: beside dense weights, KV cache for "
        f"{max_seq_len} tokens, workspace, and {(CONTEXT_BYTES + RESERVE_BYTES) / GIB:g} GiB for the driver and in reserve it "
        f"must hold {one_token_bytes} B for {experts.top_k} experts (one token in one layer); {remedy}"
    )


def slot_outlook(
    experts: ExpertSizes, budget_bytes: int, link_bytes_per_s: float, streamed_bytes: int = 0
) -> SlotOutlook:
    """Slots of a budget, and the tokens a second that the link allows when `streamed_bytes` of dense weights cross it too.

    The estimate takes routing to be uniform and the slots to be shared evenly, so that a fraction slots / experts hits.
    Real routing repeats itself and does better; a policy that thrashes does worse. It is None when nothing crosses
    the link: then that is no limit.

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
    moved = token_bytes * (1 - hit_rate) + streamed_bytes
    return SlotOutlook(
        plan=plan,
        per_token=experts.per_token,
        uniform_hit_rate=hit_rate,
        tokens_per_s_all_missed=link_bytes_per_s / (token_bytes + streamed_bytes),
        tokens_per_s_estimated=link_bytes_per_s / moved if moved > 0 else None,
    )


def telling_budgets(experts: ExpertSizes) -> list[int]:
    """Budgets worth a row when the user named none: one layer's experts of a token, T, 2 T, and every expert."""
    slots = {experts.top_k, experts.per_token, 2 * experts.per_token, experts.total_experts}
    return [count * experts.expert_bytes for count in sorted(slots) if count <= experts.total_experts]
