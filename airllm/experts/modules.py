"""What stands where the model's own experts modules stood, and how those are found."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from airllm import transformers_private as private
from airllm.errors import UnsupportedModelError
from airllm.experts.compute import ApplyGate, ExpertMath
from airllm.experts.contract import expert_math, takes_copies
from airllm.experts.runtime import SlotExpertRuntime

_ARGUMENTS = 3
_TOP_K_NAMES = ("top_k", "num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_top_k", "moe_k", "top_k_experts")


def find_experts(model: nn.Module) -> dict[str, nn.Module]:
    """Experts modules by name, in model order: those with transformers' experts contract (weights stacked along E).

    The test is the contract itself, never the name of a family: a parameter with an expert axis, and a forward of three
    arguments (hidden states, expert ids, weights) or of one (see `airllm.experts.batched`). Others (shared experts, which
    run for every token) are dense weights.

    Raises:
        UnsupportedModelError: there is none; says which one cannot be called so.
    """
    stacked = dict(private.expert_modules(model))
    found = {name: module for name, module in stacked.items() if _served(module)}
    if found:
        return found
    kind, remedy = type(model).__name__, 'use expert_cache_backend="none"'
    for name, module in stacked.items():
        arguments = ", ".join(private.call_arguments(module))
        raise UnsupportedModelError(
            f"{kind}: {name} ({type(module).__name__}) is called with ({arguments}), not with hidden states, expert ids and "
            f"weights as transformers' experts contract says: {remedy}"
        )
    raise UnsupportedModelError(
        f"{kind} has no experts module that the slot backend can serve (a dense model, or experts outside transformers' "
        f"experts contract): {remedy}"
    )


def _served(module: nn.Module) -> bool:
    return len(private.call_arguments(module)) == _ARGUMENTS or takes_copies(module)


def find_top_k(model: nn.Module, experts: str) -> int | None:
    """Experts a token is routed to, as the block around the module ``experts`` or its router says; else the configuration.

    Only sizes hang on it (the least budget, what a prompt leaves free): a forward that brings more is served all the same.
    None where nobody says.
    """
    block = model.get_submodule(experts.rpartition(".")[0])
    said = [_stated(module) for module in (block, *block.children())]
    known = [number for number in said if number is not None]
    config: Any = model.config
    return max(known) if known else _stated(config.get_text_config())


def _stated(owner: Any) -> int | None:
    for name in _TOP_K_NAMES:
        value = getattr(owner, name, None)
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            return value
    return None


class SlotExperts(nn.Module):
    """The experts of one layer, served from slots. Holds no expert weights; what else the module held stays here.

    Same call as the module it replaces: ``forward(hidden_states [T, H], top_k_index [T, K], top_k_weights [T, K])``, positional
    because families name the arguments differently.
    """

    def __init__(self, replaced: nn.Module, runtime: SlotExpertRuntime, layer: int, math: ExpertMath | None = None) -> None:
        super().__init__()
        self.train(replaced.training)
        self._keep: dict[str, Any] = {"runtime": runtime}  # in a dict, so that nothing is registered as a submodule
        self.layer = layer
        self.num_experts = runtime.layout.layers[layer].num_experts
        self.math = math or expert_math(replaced)
        for name, child in replaced.named_children():
            if child.state_dict():
                self.add_module(name, child)

    @property
    def apply_gate(self) -> ApplyGate:
        """What lies between the expert's two products."""
        return self.math.apply_gate

    def forward(self, hidden_states: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        runtime: SlotExpertRuntime = self._keep["runtime"]
        return runtime.run(self.layer, hidden_states, index, weights, self.math)

    def extra_repr(self) -> str:
        return f"layer={self.layer}, experts={self.num_experts}"
