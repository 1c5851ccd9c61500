"""What experts compute is found out by trying: each of the contract's variants is recognised, anything else is refused."""

from __future__ import annotations

from dataclasses import fields
from typing import Any
from unittest.mock import ANY

import pytest
import torch
from torch import nn
from torch.nn.functional import linear, silu

from airllm.errors import UnsupportedModelError
from airllm.experts.contract import expert_math
from airllm.experts.modules import find_experts, find_top_k


class Norm(nn.Module):
    """Scaled to a mean square of one, as families' own norms are: no width but that of its weight."""

    def __init__(self, width: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width, dtype=dtype, device="meta"))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.weight * (rows.float() * rows.float().pow(2).mean(-1, keepdim=True).rsqrt()).to(rows.dtype)


class Experts(nn.Module):
    """transformers' eager experts, written so that subclasses can deviate in one place."""

    has_gate, has_bias, is_transposed, has_post_expert_norm = True, False, False, False
    sum_dtype: Any = None

    def __init__(self, hidden: int = 32, width: int = 24, dtype: torch.dtype = torch.bfloat16) -> None:
        super().__init__()
        self.num_experts = 6
        self.act_fn = nn.SiLU()
        first, gates = ("gate_up_proj", 2) if self.has_gate else ("up_proj", 1)
        for name, rows, columns in ((first, gates * width, hidden), ("down_proj", hidden, width)):
            shape = (columns, rows) if self.is_transposed else (rows, columns)
            setattr(self, name, nn.Parameter(torch.empty(6, *shape, dtype=dtype, device="meta")))
            if self.has_bias:
                setattr(self, f"{name}_bias", nn.Parameter(torch.empty(6, rows, dtype=dtype, device="meta")))
        if self.has_post_expert_norm:
            self.post_expert_norm = Norm(hidden, dtype)

    def _apply_gate(self, gate_up: torch.Tensor) -> torch.Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return self.act_fn(gate) * up

    def product(self, rows: torch.Tensor, name: str, expert: int) -> torch.Tensor:
        weight = getattr(self, name)[expert]
        out = rows @ weight if self.is_transposed else linear(rows, weight)
        return out + getattr(self, f"{name}_bias")[expert] if self.has_bias else out

    def expert(self, rows: torch.Tensor, expert: int) -> torch.Tensor:
        if self.has_gate:
            inner = self._apply_gate(self.product(rows, "gate_up_proj", expert))
        else:
            inner = self.act_fn(self.product(rows, "up_proj", expert))
        out = self.product(inner, "down_proj", expert)
        return self.post_expert_norm(out) if self.has_post_expert_norm else out

    def start(self, hidden: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        return torch.zeros_like(hidden)

    def weigh(self, out: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return out * weight

    def forward(self, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        total = self.start(hidden, weights)
        for expert in self.order(index):
            token, position = torch.where(index == expert)
            out = self.weigh(self.expert(hidden[token], expert), weights[token, position, None])
            total.index_add_(0, token, out.to(total.dtype))
        return total.to(hidden.dtype)

    def order(self, index: torch.Tensor) -> list[int]:
        return sorted(set(index.flatten().tolist()))


class Transposed(Experts):
    is_transposed = True


class Biased(Experts):
    has_bias = is_transposed = True


class Gateless(Experts):
    has_gate = False


class Normed(Experts):
    has_post_expert_norm = True


class SumsInFloat32(Experts):
    def start(self, hidden: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        return torch.zeros_like(hidden, dtype=torch.float32)


class SumsInTheWeightsDtype(Experts):
    def start(self, hidden: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        return torch.zeros_like(hidden, dtype=weights.dtype)


class Interleaved(Experts):
    def _apply_gate(self, gate_up: torch.Tensor) -> torch.Tensor:
        return silu(gate_up[..., ::2].clamp(max=1.0)) * gate_up[..., 1::2]


class WeighsTheInput(Experts):
    def forward(self, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        total = torch.zeros_like(hidden)
        for expert in self.order(index):
            token, position = torch.where(index == expert)
            total.index_add_(0, token, self.expert(hidden[token] * weights[token, position, None].to(hidden.dtype), expert))
        return total


class AddsDescending(Experts):
    def order(self, index: torch.Tensor) -> list[int]:
        return super().order(index)[::-1]


class KeepsAScale(Experts):
    def weigh(self, out: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return out * weight * 1.5


@pytest.mark.parametrize(
    ("kind", "odd"),
    [
        (Experts, {}),
        (Interleaved, {}),
        (Transposed, {"transposed": True}),
        (Biased, {"transposed": True, "bias": True}),
        (Gateless, {}),
        (Normed, {"norm": ANY}),
        (SumsInFloat32, {"sum_in": "float32"}),
        (SumsInTheWeightsDtype, {"sum_in": "weights"}),
    ],
)
def test_a_variant_of_the_contract_is_recognised(kind: type[Experts], odd: dict[str, Any]) -> None:
    math = expert_math(kind())
    others = {each.name: (getattr(math, each.name), each.default) for each in fields(math) if each.name != "apply_gate"}
    assert {name: value for name, (value, default) in others.items() if value != default} == odd


@pytest.mark.parametrize("kind", [WeighsTheInput, AddsDescending, KeepsAScale])
def test_what_computes_something_else_is_refused_by_name(kind: type[Experts]) -> None:
    with pytest.raises(UnsupportedModelError, match=f"{kind.__name__} computes something else"):
        expert_math(kind())


@pytest.mark.parametrize(("hidden", "width"), [(32, 32), (48, 24), (24, 48), (7168, 2048)])
def test_any_proportion_of_widths_can_be_tried(hidden: int, width: int) -> None:
    for kind in (Experts, Transposed, Gateless):
        expert_math(kind(hidden, width, torch.float32))


def test_trying_leaves_the_module_as_it_was() -> None:
    module = Normed()
    before = {name: id(parameter) for name, parameter in module.named_parameters()}
    state = torch.get_rng_state()
    math = expert_math(module)
    assert {name: id(parameter) for name, parameter in module.named_parameters()} == before
    assert math.norm is module.post_expert_norm and torch.equal(torch.get_rng_state(), state)


class Block(nn.Module):
    def __init__(self, **said: Any) -> None:
        super().__init__()
        self.router, self.experts = nn.Linear(2, 2), Experts()
        for name, value in said.items():
            setattr(self.router, name, value)


def test_how_many_experts_a_token_uses_is_asked_of_the_router_before_the_configuration() -> None:
    class Model(nn.Module):
        def __init__(self, **said: Any) -> None:
            super().__init__()
            self.block = Block(**said)
            text = type("Text", (), {"moe_topk": 5})()
            self.config = type("Config", (), {"get_text_config": lambda self: text})()

    assert list(find_experts(Model())) == ["block.experts"]
    assert find_top_k(Model(top_k=3), "block.experts") == 3
    assert find_top_k(Model(top_k=True), "block.experts") == find_top_k(Model(), "block.experts") == 5
