"""Prompts of the shipped model: plain transformers, the plain engine and the device engine write the same tokens."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import families
import pytest
import slot_models
import torch
from half_rounding import disturbed
from slot_rig import DEVICES, gpu
from transformers import AutoModelForCausalLM, AutoTokenizer

import airllm

CLEAR = [each["prompt"] for each in json.loads((airllm.tiny_model_path() / "prompts.json").read_text())["prompts"]]
"""After these the model knows how to go on: the tokens hang on no rounding (test_tiny_model.py)."""
ANY = [
    "And Solomon built",
    "Then came the disciples",
    "The LORD is my shepherd",
    "And it came to pass in those days",
    "Blessed are they",
    "And the angel of the LORD",
    "O LORD, thou hast",
    "And I saw",
    "Hear, O Israel",
]
"""After the first four transformers goes on otherwise in half precision when nothing but its attention is another."""
SLOTS = 22
EXPERT_VALUES = 3 * 128 * 80
END_OF_TEXT = 0
LOGIT_STEP = 1 / 64  # what float16 rounds two logits between 8 and 32 by at most
DRAWS = 256


def tokens_of(model: object, texts: list[torch.Tensor], new: int) -> list:
    call = {"max_new_tokens": new, "min_new_tokens": new, "do_sample": False, "pad_token_id": END_OF_TEXT}
    return [model.generate(ids, attention_mask=torch.ones_like(ids), **call) for ids in texts]  # type: ignore[attr-defined]


@cache
def oracle(device: str, dtype: torch.dtype) -> Any:
    options = {"dtype": dtype, "experts_implementation": "eager"}
    return AutoModelForCausalLM.from_pretrained(airllm.tiny_model_path(), **options).to(device)


@cache
def asked(device: str, dtype: torch.dtype, prompts: tuple[str, ...], new: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Of some prompts: ids, and transformers' tokens."""
    tokenizer = AutoTokenizer.from_pretrained(airllm.tiny_model_path())
    texts = [tokenizer(text, return_tensors="pt")["input_ids"].to(device) for text in prompts]
    return texts, tokens_of(oracle(device, dtype), texts, new)


def rounding_decides(context: torch.Tensor, mine: int, theirs: int) -> bool:
    """Whether either token may follow ``context`` [1, T] in single precision when what each layer gives is disturbed as much as
    float16 rounds. (Such a disturbance can send a token to another expert, and then moves logits by more than itself.)"""
    exact = oracle(str(context.device), torch.float32)
    with disturbed(exact), torch.no_grad():
        logits = exact(context.expand(DRAWS, -1)).logits[:, -1]
    return bool((logits[:, theirs] - logits[:, mine]).min() <= LOGIT_STEP)


def ours(engine: str, device: str, dtype: torch.dtype, texts: list[torch.Tensor], new: int) -> list[torch.Tensor]:
    budget = SLOTS * EXPERT_VALUES * dtype.itemsize / 2**30 * (1 + 1e-9)
    options = {"expert_cache_backend": "slot", "expert_cache_gb": budget, "expert_cache_engine": engine}
    with airllm.AutoModel.from_pretrained(airllm.tiny_model_path(), device=device, dtype=dtype, **options) as model:
        tokens = tokens_of(model, texts, new)
        stats = model.get_expert_cache_stats()
    assert stats["slot_count"] == SLOTS and stats["engine"] == engine and stats["evictions"] > 0
    assert engine == "plain" or (stats["device_engine_steps"], stats["device_engine_reason"]) == (len(texts) * (new - 1), "")
    return tokens


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("policy", ["aged", "lru"])
@pytest.mark.parametrize("slots", [2, 3, 5])
def test_fewer_slots_than_layers_are_enough(checkpoint, slots, policy, device):
    """As in Phi-3.5-MoE at 0.75 GiB: five slots for 32 layers, most of which then have none."""
    folder = checkpoint("phimoe", num_hidden_layers=8)
    oracle, prompt = slot_models.oracle(folder, device=device), torch.tensor([[5, 91, 17, 230]], device=device)
    options = {"expert_cache_engine": "device", "expert_cache_policy": policy}
    with slot_models.load(folder, slots, device=device, **options) as model:
        for new in (12, 30):
            assert torch.equal(families.greedy(model, prompt, new), families.greedy(oracle, prompt, new))
        stats = model.get_expert_cache_stats()
        assert (stats["slot_count"], stats["device_engine_steps"], stats["device_engine_reason"]) == (slots, 40, "")
        assert (stats["hits"] > 0) == (policy == "aged"), "one LRU below the experts of a token has no hit"
        slot_models.check(model)


def compare(engine: str, device: str, dtype: torch.dtype, prompts: list[str], new: int) -> None:
    texts, expected = asked(device, dtype, tuple(prompts), new)
    for prompt, mine, theirs in zip(prompts, ours(engine, device, dtype, texts, new), expected, strict=True):
        assert torch.equal(mine, theirs), f"{prompt}: token {int((mine != theirs)[0].nonzero()[0])}"


@pytest.mark.parametrize("engine", ["plain", "device"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_five_prompts_go_on_as_in_transformers(engine, dtype):
    compare(engine, "cpu", dtype, CLEAR[:5], 48)


@gpu
@pytest.mark.parametrize("engine", ["plain", "device"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_twenty_prompts_go_on_as_in_transformers(engine, dtype):
    compare(engine, "cuda:0", dtype, CLEAR, 128)


@pytest.mark.parametrize(("engine", "dtype"), [("plain", torch.float16), ("device", torch.float32)])
@pytest.mark.parametrize("device", DEVICES)
def test_prompts_that_hang_on_rounding_go_on_as_in_transformers(engine, dtype, device):
    """The plain engine rounds where transformers does, and single precision is far finer than the margins."""
    compare(engine, device, dtype, ANY if device != "cpu" else ANY[:3], 64)


@pytest.mark.parametrize("device", DEVICES)
def test_the_device_engine_takes_another_token_only_where_rounding_decides(device):
    """In half precision it rounds on its own."""
    prompts, new = tuple(ANY) if device != "cpu" else tuple(ANY[:2]), 64
    texts, expected = asked(device, torch.float16, prompts, new)
    for prompt, mine, theirs in zip(prompts, ours("device", device, torch.float16, texts, new), expected, strict=True):
        differs = (mine != theirs)[0].nonzero()
        if len(differs):
            at = int(differs[0])
            tokens = int(mine[0, at]), int(theirs[0, at])
            assert rounding_decides(theirs[:, :at], *tokens), f"{prompt}: token {at}: {tokens}"


def test_rounding_decides_at_a_near_tie_alone():
    tokenizer = AutoTokenizer.from_pretrained(airllm.tiny_model_path())
    (text,), (said,) = asked("cpu", torch.float32, (ANY[0],), 24)
    with torch.no_grad():
        logits = oracle("cpu", torch.float32)(said).logits[0]
    gaps = {}
    for at in range(text.shape[1], said.shape[1]):
        best, second = logits[at - 1].topk(2).indices.tolist()
        gaps[float(logits[at - 1, best] - logits[at - 1, second])] = (said[:, :at], second, best)
    assert min(gaps) < 0.1 < 2 < max(gaps), tokenizer.decode(said[0])
    assert rounding_decides(*gaps[min(gaps)]) and not rounding_decides(*gaps[max(gaps)])
    assert not any(rounding_decides(*case) for gap, case in gaps.items() if gap > 0.5)
