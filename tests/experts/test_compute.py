"""The arithmetic of an expert and the grouping of tokens, against what transformers' eager experts do."""

from __future__ import annotations

import pytest
import slot_rig
import torch

from airllm.experts import compute
from airllm.experts.compute import ExpertMath, ExpertSum, GatheredSum, Routing


def routed(tokens: int, top_k: int = 2, experts: int = 8, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(tokens, experts, generator=generator).argsort(dim=1)[:, :top_k]


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
@pytest.mark.parametrize(("tokens", "top_k"), [(1, 2), (2, 2), (64, 2), (65, 4), (5, 1)])
def test_tokens_are_grouped_in_the_order_in_which_transformers_lists_them(
    tokens: int, top_k: int, dtype: torch.dtype
) -> None:
    index = routed(tokens, top_k).to(dtype)
    routing = Routing(index, 8, None)
    assert routing.experts == sorted(index.unique().tolist()) and routing.last_experts == set(routing.experts)
    mask = torch.nn.functional.one_hot(index.long(), num_classes=9).permute(2, 1, 0)
    for expert in routing.experts:
        position, token = torch.where(mask[expert])
        span = slice(*routing.rows(expert))
        assert torch.equal(routing.token[span], token) and torch.equal(routing._position[span], position)


def test_the_last_rows_experts_are_told_apart() -> None:
    index = torch.tensor([[0, 1], [2, 3], [4, 5], [6, 7]])
    routing = Routing(index, 8, torch.tensor([1, 3]))
    assert routing.experts == list(range(8)) and routing.last_experts == {2, 3, 6, 7}


def test_ids_that_mean_no_expert_are_left_out() -> None:
    routing = Routing(torch.tensor([[8, 3], [8, 8]]), 8, torch.tensor([1]))
    assert routing.experts == [3]
    assert not set(routing.experts) & routing.last_experts


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_expert_by_expert_the_sum_is_the_oracles(dtype: torch.dtype) -> None:
    module = next(iter(slot_rig.experts_modules(dtype).values()))
    hidden, index = torch.randn(33, slot_rig.HIDDEN).to(dtype), routed(33, 4)
    weights = (torch.rand(33, 4) + 0.4).to(dtype)
    total, routing = torch.zeros_like(hidden), Routing(index, 8, None)
    for expert in routing.experts:
        views = (module.gate_up_proj[expert], module.down_proj[expert])
        routing.add_expert(total, expert, hidden, weights, views, ExpertMath(module._apply_gate))
    assert torch.equal(total, module(hidden, index, weights))


@pytest.mark.parametrize("gathered", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("top_k", [1, 2, 4])
def test_gathered_or_not_the_sum_is_the_oracles(
    top_k: int, dtype: torch.dtype, gathered: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compute, "GATHER_BYTES", 2**20 if gathered else 0)
    monkeypatch.setattr(compute, "ALIGNMENT_BYTES", 1)
    module = next(iter(slot_rig.experts_modules(dtype).values()))
    for tokens in (1, 2, 33):
        hidden, index = torch.randn(tokens, slot_rig.HIDDEN).to(dtype), routed(tokens, top_k)
        weights = (torch.rand(tokens, top_k) + 0.4).to(dtype)
        routing = Routing(index, 8, None)
        places = [(module.gate_up_proj[expert], module.down_proj[expert]) for expert in range(8)]
        total = routing.sum_of(hidden, weights, ExpertMath(module._apply_gate), places)
        assert isinstance(total, GatheredSum) is gathered
        for expert in routing.experts:
            total.add([expert], [expert])
        assert torch.equal(total.result(), module(hidden, index, weights))


def test_rows_are_not_gathered_where_some_ids_mean_no_expert_or_rows_are_not_aligned() -> None:
    module = next(iter(slot_rig.experts_modules(torch.float32).values()))
    math, wide = ExpertMath(module._apply_gate), torch.randn(2, 64)
    whole, partial = Routing(torch.tensor([[1, 3], [2, 0]]), 8, None), Routing(torch.tensor([[8, 3], [2, 0]]), 8, None)
    assert isinstance(whole.sum_of(wide, torch.ones(2, 2), math, []), GatheredSum)
    for total in (
        partial.sum_of(wide, torch.ones(2, 2), math, []),
        whole.sum_of(wide[:, :60].contiguous(), torch.ones(2, 2), math, []),
    ):
        assert type(total) is ExpertSum


def test_the_modules_own_gate_is_used() -> None:
    gate_up, down = torch.randn(6, 4), torch.randn(4, 3)
    rows = torch.randn(2, 4)
    got = ExpertMath(lambda z: z[:, ::2] - z[:, 1::2]).output(rows, (gate_up, down))
    z = rows @ gate_up.t()
    assert torch.allclose(got, (z[:, ::2] - z[:, 1::2]) @ down.t())
