"""Twenty prompts of the shipped model: plain transformers, the plain engine and the device engine write the same tokens."""

from __future__ import annotations

from functools import cache
from typing import Any

import families
import pytest
import slot_models
import torch
from slot_rig import DEVICES, gpu
from transformers import AutoModelForCausalLM, AutoTokenizer

import airllm

PROMPTS = [
    "In the beginning",
    "And the angel of the LORD",
    "O LORD, thou hast",
    "And Solomon built",
    "Then came the disciples",
    "And I saw",
    "The LORD is my shepherd",
    "And it came to pass in those days",
    "Blessed are they",
    "Hear, O Israel",
    "And God said unto Moses",
    "Now the sons of Judah were",
    "Behold, I come quickly",
    "In those days there was no king",
    "Woe unto you",
    "And David said",
    "A soft answer turneth away",
    "Paul, an apostle",
    "The word of the LORD came",
    "Praise ye the LORD",
]
SLOTS = 22
EXPERT_VALUES = 3 * 128 * 80
END_OF_TEXT = 0


def tokens_of(model: object, texts: list[torch.Tensor], new: int, **more: object) -> list:
    call = {"max_new_tokens": new, "min_new_tokens": new, "do_sample": False, "pad_token_id": END_OF_TEXT, **more}
    return [model.generate(ids, attention_mask=torch.ones_like(ids), **call) for ids in texts]  # type: ignore[attr-defined]


@cache
def oracle(device: str, dtype: torch.dtype, attention: str = "sdpa") -> Any:
    options = {"dtype": dtype, "experts_implementation": "eager", "attn_implementation": attention}
    return AutoModelForCausalLM.from_pretrained(airllm.tiny_model_path(), **options).to(device)


@cache
def asked(device: str, dtype: torch.dtype, count: int, new: int) -> tuple[list[torch.Tensor], list[torch.Tensor], list[Any]]:
    """Of some prompts: ids, transformers' tokens, and its logits for each."""
    tokenizer = AutoTokenizer.from_pretrained(airllm.tiny_model_path())
    texts = [tokenizer(text, return_tensors="pt")["input_ids"].to(device) for text in PROMPTS[:count]]
    said = tokens_of(oracle(device, dtype), texts, new, output_logits=True, return_dict_in_generate=True)
    return texts, [each.sequences for each in said], [each.logits for each in said]


@cache
def unlike_itself(device: str, dtype: torch.dtype, count: int, new: int) -> int:
    """On how many of the prompts transformers goes on otherwise when nothing but its attention is implemented otherwise."""
    texts, usual, _ = asked(device, dtype, count, new)
    other = tokens_of(oracle(device, dtype, "eager"), texts, new)
    return sum(not torch.equal(a, b) for a, b in zip(usual, other, strict=True))


def rounding_decides(context: torch.Tensor, mine: int, theirs: int, logits: torch.Tensor) -> bool:
    """Whether an engine that errs no more than transformers' own half precision (``logits`` [V], after ``context`` [1, T]) may
    take either token: in single precision they lie within twice that error."""
    with torch.no_grad():
        exact = oracle(str(context.device), torch.float32)(context).logits[0, -1]
    return bool(exact[theirs] - exact[mine] <= 2 * (logits.float() - exact).abs().max())


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


def compare(engine: str, device: str, dtype: torch.dtype, count: int, new: int) -> None:
    texts, expected, logits = asked(device, dtype, count, new)
    rounds_on_its_own, differ = engine == "device" and dtype != torch.float32, 0
    for text, mine, theirs, scores in zip(texts, ours(engine, device, dtype, texts, new), expected, logits, strict=True):
        if torch.equal(mine, theirs):
            continue
        at = int((mine != theirs)[0].nonzero()[0])
        tokens = int(mine[0, at]), int(theirs[0, at])
        assert rounds_on_its_own, f"token {at} is {tokens[0]}, transformers' is {tokens[1]}"
        assert rounding_decides(theirs[:, :at], *tokens, scores[at - text.shape[1]][0]), f"token {at}: {tokens}"
        differ += 1
    if differ > count // 5:
        usual = unlike_itself(device, dtype, count, new)
        assert differ <= usual, f"{differ} of {count} prompts go on otherwise, transformers beside itself {usual}"


@pytest.mark.parametrize("engine", ["plain", "device"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_five_prompts_go_on_as_in_transformers(engine, dtype):
    compare(engine, "cpu", dtype, 5, 48)


@gpu
@pytest.mark.parametrize("engine", ["plain", "device"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_twenty_prompts_go_on_as_in_transformers(engine, dtype):
    """In half precision the device engine, which rounds on its own, may take another token where rounding decides."""
    compare(engine, "cuda:0", dtype, 20, 128)
