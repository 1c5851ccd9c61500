"""Puts the slot backend into a model: finds the experts modules, plans the budget, fills the bank, swaps the modules."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers import PreTrainedModel

from airllm import transformers_private as private
from airllm.experts.bank import HostBank
from airllm.experts.batched import BatchedSlotExperts, batched_math
from airllm.experts.budget import MIB, SCRATCH_SLOTS, SlotPlan, auto_budget_bytes, most_scratch, plan_slots
from airllm.experts.compute import ExpertMath
from airllm.experts.contract import expert_math, takes_copies
from airllm.experts.decode_graphs import ExpertGraphs, GraphPool
from airllm.experts.device_engine import DeviceEngine, why_not
from airllm.experts.gates import find_gate
from airllm.experts.layout import ExpertLayout, ModelLayout
from airllm.experts.modules import SlotExperts, find_experts, find_top_k
from airllm.experts.runtime import SlotExpertRuntime
from airllm.experts.slots import SlotPool
from airllm.experts.transfer import StreamTransfer, SyncTransfer, Transfer

if TYPE_CHECKING:
    from airllm.checkpoint import TensorReader
    from airllm.weight_map import WeightMap

log = logging.getLogger(__name__)

RESERVE_BYTES = 256 * MIB
"""What expert_cache_gb="auto" leaves free on the device beyond what it can count: BLAS workspaces, fragmentation, a desktop."""


@dataclass(frozen=True)
class ExpertsFound:
    """The experts modules of a model, what their experts look like, and what they compute."""

    modules: dict[str, nn.Module]
    layout: ModelLayout
    top_k: int
    maths: tuple[ExpertMath, ...]
    scratch: int = SCRATCH_SLOTS

    @classmethod
    def of(cls, model: nn.Module, top_k: int | None = None) -> ExpertsFound:
        """``top_k``: experts a token is routed to; learned from the model when left out.

        Raises:
            UnsupportedModelError: no experts modules, or one outside transformers' experts contract; says what is missing.
        """
        modules = find_experts(model)
        layout = ModelLayout(tuple(ExpertLayout.from_module(module) for module in modules.values()))
        maths = tuple(batched_math(m) if takes_copies(m) else expert_math(m) for m in modules.values())
        if top_k is None:
            stated = (find_top_k(model, name) for name in modules)
            top_k = max((number for number in stated if number is not None), default=1)
        return cls(modules, layout, min(top_k, layout.num_experts), maths)

    @property
    def total(self) -> int:
        return self.layout.total_experts

    def parameter_names(self) -> set[str]:
        """Full names of the parameters that live in the bank and never on the device as such."""
        layers = zip(self.modules, self.layout.layers, strict=True)
        return {f"{prefix}.{p.name}" for prefix, layout in layers for p in layout.projections}

    def for_engine(self, engine: str) -> ExpertsFound:
        """The same, planned with as many scratch slots as this engine makes use of."""
        return replace(self, scratch=most_scratch(engine, self.top_k))

    def plan(self, budget_bytes: int, reason: str = "as asked") -> SlotPlan:
        return plan_slots(
            budget_bytes=budget_bytes,
            expert_bytes=self.layout.expert_bytes,
            total_experts=self.total,
            top_k=self.top_k,
            scratch=self.scratch,
            reason=reason,
        )

    def least_bytes(self) -> int:
        """Device bytes of the fewest slots, those of one token in one layer, and of scratch."""
        return (self.top_k + SCRATCH_SLOTS) * self.layout.expert_bytes

    def least_auto_bytes(self, config: Any, max_seq_len: int) -> int:
        """The same with all that ``expert_cache_gb="auto"`` leaves free beside."""
        beside = kv_cache_bytes(config, max_seq_len, self.layout) + workspace_bytes(config, max_seq_len, self.layout)
        return self.least_bytes() + beside + RESERVE_BYTES

    def plan_auto(self, config: Any, device: torch.device, max_seq_len: int, unwritten_bytes: int = 0) -> SlotPlan:
        """``expert_cache_gb="auto"``; call when the dense weights are on the device, and the blocks that others stream through.

        ``unwritten_bytes`` of those have no memory yet where the device is the CPU, which gives it to who writes.
        """
        from airllm.experts.host_memory import available_bytes

        if device.type == "cpu":
            free = (available_bytes() or 0) - self.layout.total_bytes - unwritten_bytes
        else:
            free = torch.cuda.mem_get_info(device)[0]
        kv, workspace = kv_cache_bytes(config, max_seq_len, self.layout), workspace_bytes(config, max_seq_len, self.layout)
        budget = auto_budget_bytes(
            free_bytes=free,
            kv_cache_bytes=kv,
            workspace_bytes=workspace,
            reserve_bytes=RESERVE_BYTES,
            scratch_bytes=self.scratch * self.layout.expert_bytes,
        )
        reason = (
            f"auto: {free // MIB} MiB free after the dense weights, less {kv // MIB} MiB KV cache for {max_seq_len} tokens, "
            f"{workspace // MIB} MiB workspace, {RESERVE_BYTES // MIB} MiB reserve and scratch"
        )
        return self.plan(budget, reason)


def kv_cache_bytes(config: Any, tokens: int, layout: ModelLayout) -> int:
    """Keys and values of one sequence of ``tokens`` tokens in the model's dtype. An upper bound: layers that keep a window, a
    compressed or a fixed state need less."""
    values = sum(_kv_values(layer) for layer in private.layer_configs(config))
    return values * tokens * layout.projections[0].dtype.itemsize


def _kv_values(config: Any) -> int:
    """Numbers that one layer keeps of one token. Latent attention (DeepSeek) has keys and values of widths of their own."""
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    latent = getattr(config, "qk_nope_head_dim", None)
    key = head_dim if latent is None else latent + config.qk_rope_head_dim
    return int(heads * (key + (getattr(config, "v_head_dim", None) or key)))


def workspace_bytes(config: Any, tokens: int, layout: ModelLayout) -> int:
    """An upper estimate of the activations of one prompt of ``tokens`` tokens: a dozen tensors of hidden width, the widest
    expert product, one row of logits in float32 and in the model's dtype."""
    config = config.get_text_config()
    itemsize = layout.projections[0].dtype.itemsize
    return tokens * itemsize * (12 * config.hidden_size + 2 * layout.widest) + config.vocab_size * (4 + itemsize)


def install(
    model: nn.Module,
    found: ExpertsFound,
    plan: SlotPlan,
    *,
    weight_map: WeightMap,
    reader: TensorReader,
    device: torch.device,
    pin: bool,
    policy: str = "auto",
    progress: bool = True,
) -> tuple[SlotExpertRuntime, Callable[[], None]]:
    """Allocate slots, fill the bank, and swap the experts modules of ``model`` for slot ones.

    Returns the runtime, and a function that takes out the forward hook again.
    """
    pool = SlotPool(found.layout, plan, device)  # first: a device that is too small must not cost the time of a bank
    pin = pin and device.type == "cuda"
    bank = HostBank(found.layout, list(found.modules), weight_map, reader, pin=pin, device=device, progress=progress)
    transfer: Transfer = SyncTransfer() if device.type == "cpu" else StreamTransfer(len(pool.blocks), device, urgent=True)
    runtime = SlotExpertRuntime(bank, pool, transfer, top_k=found.top_k, layers=len(found.modules), policy=policy)
    for layer, (name, module) in enumerate(found.modules.items()):
        kind = BatchedSlotExperts if takes_copies(module) else SlotExperts
        for projection in found.layout.layers[layer].projections:
            module._parameters.pop(projection.name, None)
        parent, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(parent), leaf, kind(module, runtime, layer, found.maths[layer]))
    # On the inner model: its forward runs under the lock that lets one forward pass at a time, hooks of the outer one do not.
    inner = getattr(model, "base_model", model)
    hook = inner.register_forward_pre_hook(_shape_hook(runtime), with_kwargs=True)
    return runtime, hook.remove


def _shape_hook(runtime: SlotExpertRuntime) -> Callable[..., None]:
    def note(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        tokens = kwargs.get("input_ids", args[0] if args else None)
        if tokens is None:
            tokens = kwargs.get("inputs_embeds")
        if tokens is not None:
            runtime.begin_forward(tokens.shape[0], tokens.shape[1], runtime.pool.blocks[0].device)

    return note


def add_device_engine(runtime: SlotExpertRuntime, model: nn.Module, top_k: int | None = None) -> str:
    """Give the runtime its second engine, which serves decoded steps. Returns "" or the reason why there is none.

    ``top_k``: experts a token is routed to, where more is known than when the slots were planned.
    """
    modules = [module for module in model.modules() if isinstance(module, SlotExperts)]
    reason = _why_not_alike(runtime, modules)
    if reason:
        return reason
    top_k = top_k or runtime.top_k
    gates = [find_gate(module.apply_gate) for module in modules]
    reason = why_not(runtime.bank, runtime.pool, top_k, gates)
    if not reason:
        runtime.engine = DeviceEngine(
            runtime.bank,
            runtime.pool,
            runtime.transfer,
            runtime.policy,
            runtime.counters,
            top_k=top_k,
            gates=[gate for gate in gates if gate is not None],
            transposed=modules[0].math.transposed,
        )
    return reason


def _why_not_alike(runtime: SlotExpertRuntime, modules: list[SlotExperts]) -> str:
    """What these experts are or do that the kernels do not know; "" when there is nothing."""
    if any(isinstance(module, BatchedSlotExperts) for module in modules):
        return "the experts are handed copies of every token, and which of them count is read on the host"
    layout = runtime.layout.uniform
    if layout is None or len({module.math.transposed for module in modules}) > 1:
        return "the layers' experts have different layouts"
    if layout.identities:
        return "some of the experts stand for no weights"
    return "the experts have a norm after their second product" if any(module.math.norm for module in modules) else ""


def record_experts(
    runtime: SlotExpertRuntime, model: PreTrainedModel, pool: GraphPool, weight_dtype: torch.dtype
) -> ExpertGraphs:
    """Record every place's expert for one row; ``weight_dtype`` is that of the router's weights."""
    experts = next(module for module in model.modules() if isinstance(module, SlotExperts))
    width = model.config.hidden_size
    return ExpertGraphs(pool, runtime.pool.views, width, runtime.top_k, experts.math, weight_dtype)
