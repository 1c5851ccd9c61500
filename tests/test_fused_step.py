"""Decoded tokens as fused kernels: tokens and logits of the stock modules, for every family that has them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import families
import pytest
import torch
from transformers import StoppingCriteria, StoppingCriteriaList

import airllm
from airllm import fused_step

DEVICE = "cuda:0" if torch.cuda.is_available() else "cpu"
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "phimoe": ("phimoe", {}),
    "mixtral": ("mixtral", {"sliding_window": 9}),
    "mixtral, llama 3 rope": ("mixtral", {"rope_parameters": {
        "rope_type": "llama3", "rope_theta": 500.0, "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }}),
    "qwen3_moe": ("qwen3_moe", {}),
    "qwen3_moe, shares that do not add up to one": ("qwen3_moe", {"norm_topk_prob": False, "attention_bias": True}),
    "qwen3_moe, top 8 of 20": ("qwen3_moe", {"num_experts": 20, "num_experts_per_tok": 8}),
}  # fmt: skip


@pytest.fixture(scope="module", params=list(CASES))
def pair(request: pytest.FixtureRequest, checkpoint: Callable[..., Path]) -> Iterator[tuple[Any, Any]]:
    """transformers' model, and ours with the device engine, in float32."""
    family, changes = CASES[request.param]
    folder = checkpoint(family, **changes)
    expert = 3 * 48 * 32 * 4 if family == "mixtral" else 3 * (128 * 64 if family == "phimoe" else 24 * 32) * 4
    slots = {"expert_cache_backend": "slot", "expert_cache_engine": "device", "expert_cache_gb": 25.5 * expert / 2**30}
    with airllm.AutoModel.from_pretrained(folder, device=DEVICE, dtype="float32", **slots) as model:
        yield families.oracle(folder).to(DEVICE), model


def generate(model: Any, ids: torch.Tensor, **more: Any) -> Any:
    options = {"max_new_tokens": 12, "min_new_tokens": 12, "do_sample": False, "pad_token_id": 0}
    wanted = {"output_logits": True, "return_dict_in_generate": True}
    return model.generate(input_ids=ids.to(DEVICE), **{**options, **wanted, **more})


def same(pair: tuple[Any, Any], ids: torch.Tensor, **more: Any) -> None:
    theirs, ours = (generate(model, ids, **more) for model in pair)
    assert torch.equal(ours.sequences, theirs.sequences)
    for mine, other in zip(ours.logits, theirs.logits, strict=True):
        torch.testing.assert_close(mine, other, rtol=2e-5, atol=2e-5 * float(other.abs().max()))


def test_tokens_and_logits_are_the_stock_models(pair: tuple[Any, Any]) -> None:
    before = pair[1].get_expert_cache_stats()
    same(pair, families.prompt(pair[0]))
    stats = pair[1].get_expert_cache_stats()
    assert stats["device_engine_fused"] and stats["device_engine_reason"] == ""
    assert stats["device_engine_steps"] == before["device_engine_steps"] + 11


def test_a_left_padded_batch(pair: tuple[Any, Any]) -> None:
    ids = families.prompt(pair[0], batch=3)
    mask = torch.ones_like(ids)
    mask[0, :4], mask[2, :1] = 0, 0
    same(pair, ids, attention_mask=mask.to(DEVICE))


def test_beams_and_sampling(pair: tuple[Any, Any]) -> None:
    same(pair, families.prompt(pair[0], seed=4), num_beams=3)
    drawn = []
    for model in pair:
        torch.manual_seed(5)
        drawn.append(generate(model, families.prompt(pair[0]), do_sample=True).sequences)
    assert torch.equal(*drawn)


def test_a_family_without_kernels_and_odd_weights_say_so(pair: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    model = pair[1].model
    assert fused_step.why_not_fused(model) == ""
    monkeypatch.setattr(model.config, "head_dim", 34)
    assert "only part of each head" in fused_step.why_not_fused(model)
    monkeypatch.setattr(model.config, "head_dim", 300)
    assert "above 256" in fused_step.why_not_fused(model)
    monkeypatch.setattr(model.config, "model_type", "other")
    assert "model_type 'other'" in fused_step.why_not_fused(model)


class Asking(StoppingCriteria):
    """Generates with the same model in the middle of a call."""

    def __init__(self, model: Any) -> None:
        self.model, self.calls = model, 0

    def __call__(self, ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        self.calls += 1
        if self.calls == 3:
            generate(self.model, families.prompt(getattr(self.model, "model", self.model), seed=8), max_new_tokens=3)
        return torch.zeros(ids.shape[0], dtype=torch.bool, device=ids.device)


def test_a_call_within_a_call_leaves_the_outer_ones_cache_alone(pair: tuple[Any, Any]) -> None:
    theirs, ours = (
        generate(model, families.prompt(pair[0]), stopping_criteria=StoppingCriteriaList([Asking(model)])) for model in pair
    )
    assert torch.equal(ours.sequences, theirs.sequences)
    assert pair[1].get_expert_cache_stats()["device_engine_reason"] == ""


def test_a_prompt_in_chunks_of_one_token_keeps_its_padding(pair: tuple[Any, Any]) -> None:
    ids = families.prompt(pair[0], batch=2)
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    for chunk in (1, 2):
        same(pair, ids, attention_mask=mask.to(DEVICE), prefill_chunk_size=chunk)
        assert pair[1].get_expert_cache_stats()["device_engine_reason"] == ("prefill_chunk_size=1" if chunk == 1 else "")


def test_settings_changed_after_loading_are_followed(pair: tuple[Any, Any]) -> None:
    same(pair, families.prompt(pair[0]))
    models = [pair[0], pair[1].model]
    for model in models:
        model.set_attn_implementation("eager")
    same(pair, families.prompt(pair[0]))
    assert "settings" in pair[1].get_expert_cache_stats()["device_engine_reason"]
    for model in models:
        model.set_attn_implementation("sdpa")
    same(pair, families.prompt(pair[0]))
    assert pair[1].get_expert_cache_stats()["device_engine_reason"] == ""
    routers = [layer.mlp.gate for model in models for layer in model.model.layers if hasattr(layer.mlp, "gate")]
    before = [router.top_k for router in routers]
    for router in routers:
        router.top_k = 1
    same(pair, families.prompt(pair[0]))
    for router, top_k in zip(routers, before, strict=True):
        router.top_k = top_k
