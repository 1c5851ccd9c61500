"""Whether an experts module keeps transformers' contract, and what it computes: found out by trying it.

The flags of the contract say how the weights lie. What they leave open (the dtype of the sum, arithmetic in float32) and
whether a class does anything else is seen on a tiny copy: its own forward, and ours, on the same random numbers, must agree
bit for bit.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import replace
from types import MethodType
from typing import Any

import torch
from torch import nn

from airllm import transformers_private as private
from airllm.errors import UnsupportedModelError
from airllm.experts.compute import ApplyGate, ExpertMath, Routing
from airllm.experts.layout import identity_experts, projection_names

_EXPERTS, _TOKENS, _TOP_K = 4, 24, 3


def takes_copies(module: nn.Module) -> bool:
    """Whether these experts are handed every token once for each expert (see `airllm.experts.batched`): one argument, and
    weights that lie as [in, out]."""
    into, down = module._parameters.get("gate_up_proj"), module._parameters["down_proj"]
    if into is None or down is None or len(private.call_arguments(module)) != 1:
        return False
    return into.shape[1] == down.shape[2] and into.shape[2] == 2 * down.shape[1]


def expert_math(module: nn.Module) -> ExpertMath:
    """What the experts of ``module`` compute.

    Raises:
        UnsupportedModelError: its forward does something else than the contract says.
    """
    trial = _Trial(module)
    for math in _candidates(module):
        if trial.agrees(math):
            return math
    raise UnsupportedModelError(
        f"{type(module).__name__} computes something else than transformers' experts contract says, tried on random numbers"
    )


def _candidates(module: Any) -> Iterator[ExpertMath]:
    """All that the flags allow, commonest first."""
    gate = module.act_fn if not getattr(module, "has_gate", True) else getattr(module, "_apply_gate", None)
    gate = gate or _default_gate(module)
    fixed: dict[str, Any] = {
        "transposed": getattr(module, "is_transposed", False),
        "bias": getattr(module, "has_bias", False),
        "norm": module.post_expert_norm if getattr(module, "has_post_expert_norm", False) else None,
    }
    for sum_in in ("hidden", "weights", "float32"):
        yield ExpertMath(gate, **fixed, sum_in=sum_in)
    yield ExpertMath(gate, **fixed, sum_in="float32", upcast=True)


def _default_gate(module: Any) -> ApplyGate:
    """The contract's own gate, for a class that transformers did not give one."""

    def apply(gate_up: torch.Tensor) -> torch.Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        gated: torch.Tensor = module.act_fn(gate) * up
        return gated

    return apply


class _Trial:
    """A copy of an experts module with a few small experts of random weights."""

    def __init__(self, module: nn.Module) -> None:
        self._original = module
        self._random = torch.Generator().manual_seed(0)
        self._sizes = _small_sizes(module)
        self._experts = module.get_parameter("down_proj").shape[0]
        self._identities = min(identity_experts(module), 2)
        self.module: Any = self._shrunk(module)
        names = projection_names(module)
        stacked = [self.module.get_parameter(name) for name in names]
        self._views = [tuple(weight[expert] for weight in stacked) for expert in range(_EXPERTS)]
        down = stacked[names.index("down_proj")]
        self._dtype, self._width = down.dtype, down.shape[-1 if getattr(module, "is_transposed", False) else 1]

    def agrees(self, math: ExpertMath) -> bool:
        """Whether our sum has the bits of the module's own forward, with routing weights of either dtype."""
        norm = None if math.norm is None else self.module.post_expert_norm
        math = replace(math, apply_gate=_rebound(math.apply_gate, self._original, self.module), norm=norm)
        return all(self._same(math, dtype) for dtype in {self._dtype, torch.float32})

    def _same(self, math: ExpertMath, weights_dtype: torch.dtype) -> bool:
        hidden = self._normal(_TOKENS, self._width).to(self._dtype)
        index = torch.rand(_TOKENS, _EXPERTS + self._identities, generator=self._random).argsort(1)[:, :_TOP_K]
        handed = torch.where(index < _EXPERTS, index, index - _EXPERTS + self._experts)
        weights = self._normal(_TOKENS, _TOP_K).to(weights_dtype)
        forward = private.own_experts_forward(self.module)
        with torch.no_grad():
            try:
                theirs = forward(self.module, hidden, handed, weights)
            except (RuntimeError, TypeError, IndexError) as error:
                raise UnsupportedModelError(
                    f"{type(self._original).__name__} cannot be called as transformers' experts contract says: {error}"
                ) from error
            routing, total = Routing(index, _EXPERTS + self._identities, None), math.start(hidden, weights)
            for expert, views in enumerate(self._views):
                routing.add_expert(total, expert, hidden, weights, views, math)
            for expert in range(_EXPERTS, _EXPERTS + self._identities):
                routing.add_identity(total, expert, hidden, weights)
        return torch.equal(total.to(hidden.dtype), theirs)

    def _shrunk(self, module: nn.Module) -> nn.Module:
        small = copy.copy(module)
        small._parameters = {name: self._small(parameter) for name, parameter in module._parameters.items()}
        small._modules = {name: child and self._shrunk(child) for name, child in module._modules.items()}
        return small

    def _small(self, parameter: nn.Parameter | None) -> nn.Parameter | None:
        if parameter is None:
            return None
        shape = [self._sizes.get(size, size) for size in parameter.shape]
        if parameter.dim() > 1:
            shape[0] = _EXPERTS
        return nn.Parameter((self._normal(*shape) * 0.5).to(parameter.dtype), requires_grad=False)

    def _normal(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=self._random)


def _small_sizes(module: nn.Module) -> dict[int, int]:
    """Small widths in the place of the real ones, in the same proportion where one of them is once or twice the other."""
    inner, width = _widths(module)
    gates = 2 if getattr(module, "has_gate", True) else 1
    small = {inner: 16, gates * inner: 16 * gates}
    return {width: 24, **small} if width not in small else small


def _widths(module: nn.Module) -> tuple[int, int]:
    rows, columns = module.get_parameter("down_proj").shape[-2:]
    return (int(rows), int(columns)) if getattr(module, "is_transposed", False) else (int(columns), int(rows))


def _rebound(method: Any, original: nn.Module, trial: nn.Module) -> Any:
    """A method of ``original``, or a child of it, as that of ``trial``."""
    if getattr(method, "__self__", None) is original:
        return MethodType(method.__func__, trial)
    return trial.act_fn if method is getattr(original, "act_fn", None) else method
