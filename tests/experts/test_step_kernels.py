"""The kernels of a decoded token's dense part against their twins, and the twins against torch and transformers.

As in test_kernels.py: on a GPU as they are, elsewhere in Triton's interpreter, in a process of its own.
"""

from __future__ import annotations

import importlib
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers.models.phimoe.modeling_phimoe import sparsemixer
from triton_here import DEVICE, INTERPRETED, KERNELS_RUN, close, needs_kernels, random_numbers, run_interpreted, runs_itself

from airllm.experts import step_twins as twins

if KERNELS_RUN:
    from airllm.experts import step_kernels

    if INTERPRETED:
        step_kernels.FEW_OUTPUTS = 8

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
FEW_DTYPES = DTYPES[:2] if INTERPRETED else DTYPES  # the interpreter takes seconds for each case, and truncates to bfloat16


@runs_itself
def test_the_kernels_agree_with_their_twins_in_the_interpreter() -> None:
    """Runs the rest of this file."""
    run_interpreted(__file__)


@pytest.fixture
def draw() -> Any:
    return random_numbers()


# --- project ----------------------------------------------------------------------------------------------------------

SHAPES = [(1, 64, (16, 8, 8)), (3, 80, (24,)), (8, 48, (44,)), (2, 40, (6,))]


@needs_kernels
@pytest.mark.parametrize("kind", ["none", "layer", "rms"])
@pytest.mark.parametrize("dtype", FEW_DTYPES, ids=str)
@pytest.mark.parametrize(("batch", "inputs", "outputs"), SHAPES)
def test_project(batch: int, inputs: int, outputs: tuple[int, ...], dtype: torch.dtype, kind: str, draw: Any) -> None:
    x = draw(batch, inputs) + 2
    weights = [draw(n, inputs, dtype=dtype) for n in outputs]
    biases = [draw(n, dtype=dtype) if kind != "rms" else None for n in outputs]
    bias = draw(inputs, dtype=dtype) if kind == "layer" else None
    norm = None if kind == "none" else twins.Norm(draw(inputs, dtype=dtype), bias, 1e-5)
    residual = draw(batch, sum(outputs)) if kind == "layer" else None
    results = []
    for ops in (step_kernels, twins):
        out = torch.full((batch, sum(outputs)), torch.nan, device=DEVICE)
        normed = torch.full((batch, inputs), torch.nan, dtype=dtype, device=DEVICE) if norm else None
        ops.project(x, weights, biases, out, norm=norm, residual=residual, normed=normed)
        results.append((out, normed))
    (ours, our_norm), (theirs, their_norm) = results
    assert close(ours, theirs)
    assert our_norm is None or close(our_norm, their_norm)


@needs_kernels
def test_project_in_several_turns_over_a_long_row(draw: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_kernels, "PROJECT_COLUMNS", 16)
    x, weight, norm = draw(2, 72), draw(8, 72), twins.Norm(draw(72), draw(72), 1e-5)
    ours, theirs = torch.empty(2, 8, device=DEVICE), torch.empty(2, 8, device=DEVICE)
    step_kernels.project(x, [weight], [None], ours, norm=norm)
    twins.project(x, [weight], [None], theirs, norm=norm)
    assert close(ours, theirs)


def test_the_twin_of_project_is_norm_linear_and_residual(draw: Any) -> None:
    layer_norm = torch.nn.LayerNorm(24, eps=1e-5, device=DEVICE)
    linears = [torch.nn.Linear(24, n, device=DEVICE) for n in (10, 4)]
    with torch.no_grad():
        layer_norm.weight.copy_(draw(24))
        layer_norm.bias.copy_(draw(24))
        x, residual, out = draw(3, 24), draw(3, 14), torch.empty(3, 14, device=DEVICE)
        norm = twins.Norm(layer_norm.weight, layer_norm.bias, 1e-5)
        twins.project(x, [m.weight for m in linears], [m.bias for m in linears], out, norm=norm, residual=residual)
        assert close(out, residual + torch.cat([linear(layer_norm(x)) for linear in linears], dim=-1))
        rms = torch.nn.RMSNorm(24, eps=1e-5, device=DEVICE)
        assert close(twins.Norm(rms.weight, None, 1e-5)(x), rms(x))


# --- attention --------------------------------------------------------------------------------------------------------


def attention_case(draw: Any, batch: int, heads: int, kv_heads: int, dims: int, capacity: int, now: int, dtype: Any) -> Any:
    """Keyword arguments of ``attend`` with a cache that holds NaN from position ``now`` on."""
    keys, values = (draw(batch, kv_heads, capacity, dims, dtype=dtype) for _ in range(2))
    keys[:, :, now:], values[:, :, now:] = torch.nan, torch.nan
    angle = draw(batch, dims // 2).repeat(1, 2)
    padding = torch.ones(batch, capacity, dtype=torch.bool, device=DEVICE)
    for row in range(batch):
        padding[row, : min(3 * row, now)] = False
    return {
        "qkv": draw(batch, (heads + 2 * kv_heads) * dims),
        "cos": angle.cos(),
        "sin": angle.sin(),
        "keys": keys,
        "values": values,
        "slot": torch.tensor([now], device=DEVICE),
        "padding": padding,
        "out": torch.full((batch, heads * dims), torch.nan, device=DEVICE),
        "arrived": torch.zeros(batch * heads, dtype=torch.int32, device=DEVICE),
        "heads": heads,
        "scale": dims**-0.5,
    }


CASES = [
    (1, 4, 1, 16, 256, 0),
    (1, 4, 2, 16, 256, 1),
    (2, 4, 2, 12, 256, 130),
    (3, 2, 2, 32, 512, 511),
    (1, 8, 2, 64, 512, 300),
    (2, 4, 2, 16, 128, 77),
]


@needs_kernels
@pytest.mark.parametrize("window", [None, 50] if INTERPRETED else [None, 1, 50, 200])
@pytest.mark.parametrize("dtype", FEW_DTYPES[-1:] if INTERPRETED else DTYPES, ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_attend(case: tuple[int, ...], dtype: torch.dtype, window: int | None, draw: Any) -> None:
    attends(case, dtype, window, draw)


@needs_kernels
@pytest.mark.parametrize("case", [CASES[0], CASES[2], CASES[3]], ids=str)
def test_attend_put_together_by_a_kernel_of_its_own(
    case: tuple[int, ...], draw: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(step_kernels, "LAST_COMBINES", not step_kernels.LAST_COMBINES)
    attends(case, torch.float32, None, draw)


def attends(case: tuple[int, ...], dtype: torch.dtype, window: int | None, draw: Any) -> None:
    ours = attention_case(draw, *case, dtype)
    theirs = {name: value.clone() if isinstance(value, torch.Tensor) else value for name, value in ours.items()}
    step_kernels.attend(**ours, window=window)
    twins.attend(**theirs, window=window)
    assert close(ours["out"], theirs["out"], dtype)
    now = case[-1]
    for name in ("keys", "values"):
        assert close(ours[name][:, :, : now + 1], theirs[name][:, :, : now + 1])
        assert ours[name][:, :, now + 1 :].isnan().all()
    assert not ours["arrived"].any(), "ready for the next launch"


@needs_kernels
@pytest.mark.parametrize("dims", [16, 12])
def test_attend_with_norms_of_queries_and_keys(dims: int, draw: Any) -> None:
    ours = attention_case(draw, 2, 4, 2, dims, 256, 130, torch.float32)
    ours["norms"] = (twins.Norm(1 + draw(dims), None, 1e-6), twins.Norm(1 + draw(dims), None, 1e-6))
    theirs = {name: value.clone() if isinstance(value, torch.Tensor) else value for name, value in ours.items()}
    step_kernels.attend(**ours, window=None)
    twins.attend(**theirs, window=None)
    assert close(ours["out"], theirs["out"]) and close(ours["keys"][:, :, 130], theirs["keys"][:, :, 130])


@pytest.mark.parametrize("window", [None, 20])
def test_the_twin_of_attend_is_rotation_and_masked_attention(window: int | None, draw: Any) -> None:
    from transformers.models.phimoe.modeling_phimoe import apply_rotary_pos_emb

    batch, heads, kv_heads, dims, capacity, now = 2, 4, 2, 16, 64, 40
    case = attention_case(draw, batch, heads, kv_heads, dims, capacity, now, torch.float32)
    query, key, value = case["qkv"].view(batch, -1, 1, dims).split([heads, kv_heads, kv_heads], dim=1)
    query, key = apply_rotary_pos_emb(query, key, case["cos"][:, None], case["sin"][:, None])
    known = torch.cat((case["keys"][:, :, :now], key), 2).repeat_interleave(2, 1)
    told = torch.cat((case["values"][:, :, :now], value), 2).repeat_interleave(2, 1)
    at = torch.arange(now + 1, device=DEVICE)
    seen = case["padding"][:, None, None, : now + 1] & (at > now - (window or 1000))
    expected = torch.nn.functional.scaled_dot_product_attention(query, known, told, attn_mask=seen)
    twins.attend(**case, window=window)
    assert close(case["out"], expected.reshape(batch, -1))


# --- the router -------------------------------------------------------------------------------------------------------


def scores(experts: int, draw: Any) -> torch.Tensor:
    """Among them rows whose scores lie close together, where the threshold decides, and a row of equal ones."""
    rows = torch.cat((draw(20, experts), 3 + draw(40, experts, scale=0.05), -2 + draw(20, experts, scale=0.03)))
    rows[0] = 1.0
    return rows


@pytest.mark.parametrize("experts", [8, 16, 33])
def test_the_twin_of_the_router_is_transformers_own(experts: int, draw: Any) -> None:
    logits = scores(experts, draw)[1:]
    expected_weights, expected_ids = sparsemixer(logits, 0.01, training=False)
    ids, weights = torch.empty(len(logits), 2, dtype=torch.int32), torch.empty(len(logits), 2)
    ids, weights = ids.to(DEVICE), weights.to(DEVICE)
    twins.sparsemixer(logits, 0.01, ids, weights)
    assert torch.equal(ids.long(), expected_ids) and torch.allclose(weights, expected_weights, rtol=1e-5)
    assert (weights < 0.9).any() and (weights > 0.999).any()


@needs_kernels
@pytest.mark.parametrize("experts", [8, 16, 33])
def test_sparsemixer(experts: int, draw: Any) -> None:
    logits = scores(experts, draw)
    results = []
    for ops in (step_kernels, twins):
        ids = torch.full((len(logits), 2), -1, dtype=torch.int32, device=DEVICE)
        weights = torch.full((len(logits), 2), torch.nan, device=DEVICE)
        ops.sparsemixer(logits, 0.01, ids, weights)
        results.append((ids, weights))
    (ours, our_weights), (theirs, their_weights) = results
    assert torch.equal(ours[1:], theirs[1:]) and torch.allclose(our_weights, their_weights, rtol=1e-5)
    assert ours[0, 0] != ours[0, 1]


@pytest.mark.parametrize(("family", "normalise"), [("qwen3_moe", True), ("qwen3_moe", False), ("mixtral", True)])
def test_the_twin_of_the_usual_router_is_transformers_own(family: str, normalise: bool, draw: Any) -> None:
    sizes = {"num_experts_per_tok": 4, "num_experts": 16, "num_local_experts": 16, "hidden_size": 24}
    config = SimpleNamespace(**sizes, norm_topk_prob=normalise)
    module = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    router = getattr(module, {"qwen3_moe": "Qwen3MoeTopKRouter", "mixtral": "MixtralTopKRouter"}[family])(config).to(DEVICE)
    router.weight.data.copy_(draw(16, 24))
    logits, shares, chosen = router(draw(30, 24))
    ids, weights = torch.empty(30, 4, dtype=torch.int32, device=DEVICE), torch.empty(30, 4, device=DEVICE)
    twins.softmax_top_k(logits.detach(), ids, weights, normalise=normalise)
    assert torch.equal(ids.long(), chosen) and torch.allclose(weights, shares, rtol=1e-6)


@needs_kernels
@pytest.mark.parametrize("normalise", [True, False])
@pytest.mark.parametrize(("experts", "top_k"), [(8, 2), (33, 6), (128, 8), (300, 16)])
def test_softmax_top_k(experts: int, top_k: int, normalise: bool, draw: Any) -> None:
    logits = torch.cat((draw(6, experts, scale=4.0), -50 + draw(2, experts)))
    results = []
    for ops in (step_kernels, twins):
        ids = torch.full((len(logits), top_k), -1, dtype=torch.int32, device=DEVICE)
        weights = torch.full((len(logits), top_k), torch.nan, device=DEVICE)
        ops.softmax_top_k(logits, ids, weights, normalise=normalise)
        results.append((ids, weights))
    (ours, our_weights), (theirs, their_weights) = results
    assert torch.equal(ours, theirs) and torch.allclose(our_weights, their_weights, rtol=1e-5)


@needs_kernels
def test_of_equal_shares_different_experts_are_picked(draw: Any) -> None:
    ids, weights = torch.empty(1, 4, dtype=torch.int32, device=DEVICE), torch.empty(1, 4, device=DEVICE)
    step_kernels.softmax_top_k(torch.full((1, 10), -3.0, device=DEVICE), ids, weights, normalise=True)
    assert ids[0].tolist() == [0, 1, 2, 3] and torch.allclose(weights, torch.tensor(0.25, device=DEVICE))
