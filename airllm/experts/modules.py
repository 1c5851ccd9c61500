"""What stands where the model's own experts modules stood, and how those are found."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from airllm import transformers_private as private
from airllm.errors import UnsupportedModelError
from airllm.experts.compute import ApplyGate
from airllm.experts.runtime import SlotExpertRuntime


def find_experts(model: nn.Module) -> dict[str, nn.Module]:
    """Experts modules by name, in model order: those with transformers' experts contract (weights stacked along E).

    The test is the contract itself: the class went through transformers' ``use_experts_implementation`` (which gives it
    ``_apply_gate``) and holds a parameter with an expert axis.

    Raises:
        UnsupportedModelError: there is none.
    """
    found = dict(private.expert_modules(model))
    if not found:
        raise UnsupportedModelError(
            f"{type(model).__name__} has no experts module that the slot backend can serve (a dense model, or experts "
            f'outside transformers\' experts contract): use expert_cache_backend="none"'
        )
    return found


class SlotExperts(nn.Module):
    """The experts of one layer, served from slots. Holds no weights.

    Same call as the module it replaces: ``forward(hidden_states [T, H], top_k_index [T, K], top_k_weights [T, K])``, positional
    because families name the arguments differently.
    """

    def __init__(self, replaced: nn.Module, runtime: SlotExpertRuntime, layer: int) -> None:
        super().__init__()
        self._keep: dict[str, Any] = {"runtime": runtime}  # in a dict, so that nothing is registered as a submodule
        self.layer = layer
        self.num_experts, self.top_k = runtime.num_experts, runtime.top_k
        self.apply_gate: ApplyGate = replaced._apply_gate  # type: ignore[assignment]

    def forward(self, hidden_states: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        runtime: SlotExpertRuntime = self._keep["runtime"]
        return runtime.run(self.layer, hidden_states, index, weights, self.apply_gate)

    def extra_repr(self) -> str:
        return f"layer={self.layer}, experts={self.num_experts}"
