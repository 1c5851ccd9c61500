"""Twenty prompts of the shipped model: plain transformers, the plain engine and the device engine write the same tokens."""

from __future__ import annotations

from collections.abc import Callable

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
NEAR_TIE = 1 / 32
"""Logits of the shipped model lie between 16 and 32, where float16 has steps of 1/64: two steps may come from rounding."""
END_OF_TEXT = 0


def tokens_of(model: object, texts: list[torch.Tensor], new: int, **more: object) -> list:
    call = {"max_new_tokens": new, "min_new_tokens": new, "do_sample": False, "pad_token_id": END_OF_TEXT, **more}
    return [model.generate(ids, attention_mask=torch.ones_like(ids), **call) for ids in texts]  # type: ignore[attr-defined]


@pytest.fixture(scope="module")
def asked() -> Callable[..., tuple[list[torch.Tensor], list[torch.Tensor], list[torch.Tensor]]]:
    """Of some prompts: ids, transformers' tokens, and how far its two best logits lay apart at each; made once."""
    made: dict = {}

    def of(device: str, dtype: torch.dtype, count: int, new: int) -> tuple:
        key = (device, dtype, count, new)
        if key not in made:
            path = airllm.tiny_model_path()
            oracle = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, experts_implementation="eager").to(device)
            tokenizer = AutoTokenizer.from_pretrained(path)
            texts = [tokenizer(text, return_tensors="pt")["input_ids"].to(device) for text in PROMPTS[:count]]
            said = tokens_of(oracle, texts, new, output_logits=True, return_dict_in_generate=True)
            made[key] = texts, [each.sequences for each in said], [margins(each.logits) for each in said]
        return made[key]

    return of


def margins(logits: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """Of each new token [T]; the end of the text, which is not allowed yet, is none of the two best."""
    scores = torch.stack([each[0] for each in logits]).float()
    scores[:, END_OF_TEXT] = -torch.inf
    best = scores.topk(2).values
    return best[:, 0] - best[:, 1]


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


def compare(asked: Callable[..., tuple], engine: str, device: str, dtype: torch.dtype, count: int, new: int) -> None:
    texts, expected, apart = asked(device, dtype, count, new)
    for text, mine, theirs, margin in zip(texts, ours(engine, device, dtype, texts, new), expected, apart, strict=True):
        different = (mine != theirs)[0, text.shape[1] :].nonzero().flatten().tolist()
        near_tie = engine == "device" and dtype != torch.float32 and different and margin[different[0]] <= NEAR_TIE
        assert not different or near_tie, f"token {different[0]} differs, the two best are {margin[different[0]]} apart"


@pytest.mark.parametrize("engine", ["plain", "device"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_five_prompts_go_on_as_in_transformers(asked, engine, dtype):
    compare(asked, engine, "cpu", dtype, 5, 48)


@gpu
@pytest.mark.parametrize("engine", ["plain", "device"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_twenty_prompts_go_on_as_in_transformers(asked, engine, dtype):
    """In half precision the device engine, which rounds on its own, may decide otherwise where the two best are that near."""
    compare(asked, engine, "cuda:0", dtype, 20, 128)
