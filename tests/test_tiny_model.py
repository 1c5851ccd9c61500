"""The shipped model: is it what its folder claims, and good enough to test a cache with?"""

from __future__ import annotations

import hashlib
import json
import math
from pathlib import Path

import pytest
import torch
from half_rounding import disturbed
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer

FOLDER = Path(__file__).parents[1] / "airllm" / "tiny_phimoe"
FIXED_TEXT = (
    "And it came to pass in those days, that he went out into a mountain to pray, and continued all night in prayer "
    "to God.\nAnd when it was day, he called unto him his disciples: and of them he chose twelve, whom also he named "
    "apostles;\n\nIn the beginning God created the heaven and the earth.\nAnd the earth was without form, and void; and "
    "darkness was upon the face of the deep. And the Spirit of God moved upon the face of the waters.\n\nThe LORD is my "
    "shepherd; I shall not want.\nHe maketh me to lie down in green pastures: he leadeth me beside the still waters.\n"
    "He restoreth my soul: he leadeth me in the paths of righteousness for his name's sake.\n\nNow king Solomon had seven "
    "hundred wives, princesses, and three hundred concubines: and the sons of Judah were Er, and Onan, and Shelah.\n"
)
LARGEST_FP16_STEP = 1 / 64  # between numbers of 16 and 32, where the logits lie
NEW_TOKENS = 128


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(FOLDER)


@pytest.fixture(scope="module")
def model():
    """Plain transformers in fp32: half precision is slow on many CPUs."""
    return AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.float32, experts_implementation="eager").eval()


@pytest.fixture(scope="module")
def prompts() -> list[str]:
    return [item["prompt"] for item in json.loads((FOLDER / "prompts.json").read_text())["prompts"]]


@pytest.fixture(scope="module")
def greedy(model, tokenizer, prompts) -> tuple[list[list[int]], torch.Tensor]:
    """New ids of every prompt, cut at the end of text, and the gaps [prompts, tokens] between the two best logits."""
    inputs = tokenizer(prompts, return_tensors="pt", padding=True)
    with torch.no_grad():
        out = model.generate(
            **inputs, max_new_tokens=NEW_TOKENS, do_sample=False, output_logits=True, return_dict_in_generate=True
        )
    best = torch.stack(out.logits, dim=1).topk(2, dim=-1).values
    return out.sequences[:, inputs["input_ids"].shape[1] :].tolist(), best[..., 0] - best[..., 1]


@pytest.fixture(scope="module")
def chosen_experts(model, tokenizer) -> list[torch.Tensor]:
    """Per layer [T, E], 1 where the fixed text's token goes to the expert: read off the router as it runs."""
    picked: list[torch.Tensor] = []

    def keep(_module, _args, output):
        index = output[2]
        picked.append(torch.zeros(index.shape[0], model.config.num_local_experts).scatter(1, index, 1.0))

    hooks = [layer.mlp.router.register_forward_hook(keep) for layer in model.model.layers]
    with torch.no_grad():
        model(**tokenizer(FIXED_TEXT, return_tensors="pt"))
    for hook in hooks:
        hook.remove()
    return picked


def longest_loop(ids: list[int], longest_period: int = 32) -> int:
    """Tokens of the longest stretch that repeats one piece three times or more."""
    worst = 0
    for period in range(1, longest_period + 1):
        same = [a == b for a, b in zip(ids[period:], ids, strict=False)]
        runs = "".join("x" if s else " " for s in same).split()
        worst = max([worst, *(len(run) + period for run in runs if len(run) >= max(2 * period, 8))])
    return worst


def test_the_whole_folder_is_at_most_four_megabytes_and_holds_every_file():
    names = {
        "PROVENANCE.md",
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "prompts.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "training.json",
    }
    assert names == {file.name for file in FOLDER.iterdir()}
    assert sum(file.stat().st_size for file in FOLDER.iterdir()) <= 4_000_000


def test_every_tensor_is_finite_half_precision_under_the_hub_s_names():
    with safe_open(FOLDER / "model.safetensors", "pt") as file:
        names = set(file.keys())
        assert "model.layers.0.block_sparse_moe.experts.7.w3.weight" in names
        assert "model.layers.5.block_sparse_moe.gate.weight" in names
        for name in names:
            tensor = file.get_tensor(name)
            assert tensor.dtype == torch.float16, name
            assert tensor.isfinite().all(), name


def test_the_geometry_keeps_the_oddities_of_phi_tiny(model):
    config = model.config
    assert config.architectures == ["PhimoeForCausalLM"] and config.model_type == "phimoe"
    assert config.head_dim != config.hidden_size // config.num_attention_heads
    assert config.num_key_value_heads < config.num_attention_heads
    assert config.num_hidden_layers >= 4 and config.num_local_experts >= 8 and config.num_experts_per_tok == 2
    assert config.sliding_window == 128 < config.max_position_embeddings
    assert config.attention_bias and config.lm_head_bias and not config.tie_word_embeddings
    assert config.rope_parameters["rope_theta"] == 10000.0
    assert model.lm_head.weight.data_ptr() != model.model.embed_tokens.weight.data_ptr()


def test_biases_were_trained_and_did_not_stay_zero(model):
    state = model.state_dict()
    for name in ("self_attn.q_proj.bias", "self_attn.o_proj.bias", "input_layernorm.bias"):
        assert state[f"model.layers.0.{name}"].abs().max() > 1e-3, name
    assert state["lm_head.bias"].abs().max() > 1e-2


def test_plain_transformers_finds_every_weight():
    _, report = AutoModelForCausalLM.from_pretrained(FOLDER, output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"] and not report["mismatched_keys"]


@pytest.mark.parametrize(
    "text",
    [
        "In the beginning God created the heaven and the earth.",
        "line one\n\nline two\r\n\ttab  two spaces ",
        "🙏🏽 emoji, 中文, ﬁ, e\u0301, zero\u200bwidth, nul\x00",
        " don 't join , punctuation . ",
        "",
    ],
)
def test_the_tokenizer_gives_back_any_text(tokenizer, text):
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


def test_batches_are_padded_on_the_left_with_the_end_of_text(tokenizer):
    batch = tokenizer(["And", "And it came to pass"], padding=True)
    assert batch["input_ids"][0][0] == tokenizer.pad_token_id == tokenizer.eos_token_id == 0
    assert batch["attention_mask"][0][0] == 0 and batch["attention_mask"][0][-1] == 1


def test_every_expert_of_every_layer_is_used_and_none_takes_all(chosen_experts):
    for layer, picked in enumerate(chosen_experts):
        use = picked.mean(dim=0) / 2
        evenness = -(use * use.clamp(min=1e-9).log()).sum().item() / math.log(use.numel())
        assert use.min() > 0, f"layer {layer} leaves an expert idle: {use.tolist()}"
        assert evenness > 0.75, f"layer {layer} is collapsed: {use.tolist()}"


def test_neighbouring_tokens_share_experts_more_often_than_chance(chosen_experts):
    reuse = [(p[1:] * p[:-1]).sum(dim=1).mean().item() / 2 for p in chosen_experts]
    chance = [(p.mean(dim=0).square().sum() / 2).item() for p in chosen_experts]
    assert sum(reuse) / sum(chance) > 1.15, (reuse, chance)


def test_greedy_tokens_of_the_shipped_prompts_are_far_from_ties(prompts, greedy):
    assert len(prompts) == 20
    assert greedy[1].min() > 16 * LARGEST_FP16_STEP
    assert greedy[1].median() > 2


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_greedy_tokens_of_the_shipped_prompts_do_not_hang_on_half_precision(tokenizer, prompts, greedy, attention):
    """Nor on what attention rounds: "the same tokens" then says something about a program."""
    options = {"dtype": torch.float16, "experts_implementation": "eager", "attn_implementation": attention}
    half = AutoModelForCausalLM.from_pretrained(FOLDER, **options).eval()
    inputs = tokenizer(prompts, return_tensors="pt", padding=True)
    with torch.no_grad():
        said = half.generate(**inputs, max_new_tokens=NEW_TOKENS, do_sample=False)
    assert said[:, inputs["input_ids"].shape[1] :].tolist() == greedy[0]


def test_greedy_tokens_of_the_shipped_prompts_survive_what_rounding_does_to_a_layer(model, tokenizer, prompts, greedy):
    inputs = tokenizer(prompts, return_tensors="pt", padding=True)
    with disturbed(model), torch.no_grad():
        said = model.generate(**inputs, max_new_tokens=NEW_TOKENS, do_sample=False)
    assert said[:, inputs["input_ids"].shape[1] :].tolist() == greedy[0]


def test_greedy_text_does_not_fall_into_a_loop(greedy):
    assert [longest_loop(ids) for ids in greedy[0]] == [0] * len(greedy[0])


def test_the_loop_measure_sees_a_loop():
    assert longest_loop([1, 2, 3] * 5) == 15
    assert longest_loop([1, 2, 3, 4, 5, 1, 2, 3, 4, 6]) == 0


def test_it_has_learned_the_language(model, tokenizer):
    """Bits a byte on text that it knows, in order and in random order of the words."""

    def bits_per_byte(text: str) -> float:
        ids = tokenizer(text, return_tensors="pt")["input_ids"]
        with torch.no_grad():
            return model(ids, labels=ids).loss.item() * (ids.shape[1] - 1) / math.log(2) / len(text.encode())

    words = FIXED_TEXT.split()
    order = torch.randperm(len(words), generator=torch.Generator().manual_seed(0)).tolist()
    assert bits_per_byte(FIXED_TEXT) < 2.0
    assert bits_per_byte(" ".join(words[i] for i in order)) > 1.2 * bits_per_byte(FIXED_TEXT)


def test_the_model_goes_past_its_window_as_well_as_before_it(model, tokenizer):
    ids = tokenizer(FIXED_TEXT, return_tensors="pt")["input_ids"]
    assert ids.shape[1] > 2 * model.config.sliding_window
    with torch.no_grad():
        loss = torch.nn.functional.cross_entropy(model(ids).logits[0, :-1], ids[0, 1:], reduction="none")
    assert loss[model.config.sliding_window :].mean() < 1.5 * loss[: model.config.sliding_window].mean()


def test_the_provenance_belongs_to_these_weights():
    facts = json.loads((FOLDER / "training.json").read_text())
    digest = hashlib.sha256((FOLDER / "model.safetensors").read_bytes()).hexdigest()
    assert facts["model_sha256"] == digest
    page = (FOLDER / "PROVENANCE.md").read_text()
    for fact in (digest, facts["corpus"]["text_sha256"], facts["corpus"]["licence"], facts["device"]):
        assert fact in page
