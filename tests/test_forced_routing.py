"""Recorded routing on another geometry: what the table is like, and that every way of running a model follows it."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path

import pytest
import torch
from slot_rig import gpu
from transformers import AutoModelForCausalLM

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import airllm  # noqa: E402
from benchmarks import forced_routing, forced_tokens, policy_replay  # noqa: E402
from benchmarks.routing_traces import read_trace  # noqa: E402

RECORDED = read_trace(policy_replay.TINY)
DEVICE = "cuda:0" if torch.cuda.is_available() else "cpu"
PROMPT = torch.tensor([[5, 91, 17, 230, 44, 8], [9, 4, 3, 77, 6, 12]])
TABLE = forced_routing.mapped(RECORDED, 6, 8, 40)


def test_the_table_has_distinct_experts_in_range_and_uses_all_of_them():
    table = forced_routing.mapped(RECORDED, 32, 16, 300)
    assert table.shape == (300, 32, 2) and table.min() == 0 and table.max() == 15
    assert (table[..., 0] < table[..., 1]).all()
    for layer in range(32):
        assert len(table[:, layer].unique()) == 16
    assert torch.equal(table, forced_routing.mapped(RECORDED, 32, 16, 300))
    assert not torch.equal(table, forced_routing.mapped(RECORDED, 32, 16, 300, seed=1))


def test_with_as_many_experts_a_layer_is_the_recorded_one_under_other_names():
    table = forced_routing.mapped(RECORDED, 6, 8, 40)
    decoded = [token for turn in RECORDED.turns for token in turn.decode][:40]
    for layer in range(6):
        pairs = [(token[layer], row) for token, row in zip(decoded, table[:, layer].tolist(), strict=True)]
        for recorded in {expert for then, _ in pairs for expert in then}:
            followed = set.intersection(*(set(now) for then, now in pairs if recorded in then))
            assert followed, f"expert {recorded} of layer {layer} has no name of its own"


def chance(trace):
    """The reuse of tokens in random order."""
    total = 0.0
    tokens = [token for _, token in trace.tokens()]
    for layer in range(trace.layers):
        counts = Counter(expert for token in tokens for expert in token[layer])
        total += sum((count / len(tokens)) ** 2 for count in counts.values())
    return total / trace.experts_per_token


def test_locality_is_that_of_the_recording():
    trace = forced_routing.as_trace(forced_routing.mapped(RECORDED, 32, 16, 384), 16, "mapped")
    recorded, mapped = (forced_routing.reuse(each) / chance(each) for each in (RECORDED, trace))
    assert recorded > 1.15 and 0.9 * recorded < mapped < 1.5 * recorded, (recorded, mapped)


def test_layers_do_not_go_in_step():
    table = forced_routing.mapped(RECORDED, 12, 8, 100)
    for layer in range(6):
        same = [len({tuple(row) for row in table[:, each].tolist()}) for each in (layer, layer + 6)]
        both = len({(*a, *b) for a, b in zip(table[:, layer].tolist(), table[:, layer + 6].tolist(), strict=True)})
        assert both > max(same)


@pytest.mark.parametrize("experts", [7, 72])
def test_a_number_of_experts_that_cannot_be_made_is_an_error(experts):
    with pytest.raises(ValueError, match=f"{experts} experts: from 8 to 64"):
        forced_routing.mapped(RECORDED, 6, experts, 4)


def greedy(model, ids):
    return model.generate(ids, max_new_tokens=8, min_new_tokens=8, do_sample=False, pad_token_id=0)


def expected(device="cpu"):
    """Plain transformers' tokens: free, and following the table."""
    path, prompt = airllm.tiny_model_path(), PROMPT.to(device)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, experts_implementation="eager").to(device)
    free = greedy(model, prompt)
    with forced_routing.forced(model, TABLE, prompt.shape[1]):
        followed = greedy(model, prompt)
    assert torch.equal(greedy(model, prompt), free) and not torch.equal(followed, free)
    return free, followed


@pytest.fixture(scope="module")
def oracle():
    return expected()


@pytest.mark.parametrize("engine", ["plain", "device"])
def test_both_engines_follow_the_table_as_plain_transformers_does(engine, oracle, monkeypatch):
    options = {"device": "cpu", "dtype": "float32", "expert_cache_backend": "slot", "expert_cache_gb": 0.0026}
    with airllm.AutoModel.from_pretrained(airllm.tiny_model_path(), expert_cache_engine=engine, **options) as model:
        asked: list[tuple[int, list[list[int]]]] = []
        with forced_routing.forced(model, TABLE, PROMPT.shape[1]):
            if engine == "plain":
                model._runtime.on_routing = lambda layer, index: asked.append((layer, index.tolist()))
            else:
                route, experts = model._runtime.engine.ops.route, 8
                monkeypatch.setattr(
                    model._runtime.engine.ops,
                    "route",
                    lambda t, ids, key, *n: (asked.append((key // experts, ids.tolist())), route(t, ids, key, *n)),
                )
            assert torch.equal(greedy(model, PROMPT), oracle[1])
        model._runtime.on_routing = None
        assert torch.equal(greedy(model, PROMPT), oracle[0])
        if engine == "device":
            assert model.get_expert_cache_stats()["device_engine_steps"] == 14
    decoded = [call for call in asked if len(call[1]) == 2][: 7 * 6]
    for number, (layer, index) in enumerate(decoded):
        step = number // 6
        assert layer == number % 6
        assert index == [TABLE[(step + row * forced_routing.ROW_AHEAD) % 40, layer].tolist() for row in range(2)]


@gpu
@pytest.mark.parametrize("engine", ["plain", "device"])
def test_recorded_steps_and_layers_follow_the_table_too(engine):
    free, followed = expected("cuda:0")
    options = {"device": "cuda:0", "dtype": "float32", "expert_cache_backend": "slot", "expert_cache_gb": 0.0026}
    with airllm.AutoModel.from_pretrained(airllm.tiny_model_path(), expert_cache_engine=engine, **options) as model:
        for _ in range(2):
            assert torch.equal(greedy(model, PROMPT.to("cuda:0")), free)
            with forced_routing.forced(model, TABLE, PROMPT.shape[1]):
                for _ in range(2):
                    assert torch.equal(greedy(model, PROMPT.to("cuda:0")), followed)
        assert engine == "plain" or model.get_expert_cache_stats()["device_engine_captures"] == 4


def test_a_model_says_a_list_of_tokens_of_itself_and_then_its_own_again():
    options = {"expert_cache_backend": "slot", "expert_cache_engine": "device", "expert_cache_gb": 0.0026}
    call = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    tokens, prompt = [11, 7, 300, 7, 52, 9], PROMPT[:1].to(DEVICE)
    with airllm.AutoModel.from_pretrained(airllm.tiny_model_path(), device=DEVICE, dtype="float32", **options) as model:
        own = model.generate(prompt, **call)[0, 6:].tolist()
        model._stepper._ahead.on = True
        with forced_tokens.said(model, tokens, prompt.shape[1]):
            for _ in range(2):
                said = model.generate(prompt, **call)[0, 6:].tolist()
                assert said == [own[0], *tokens[1:]], "the first token comes from the prompt's forward"
        stats = model.get_expert_cache_stats()
        assert stats["device_engine_steps_ahead"] > 0 and stats["device_engine_steps_discarded"] == 0
        assert model.generate(prompt, **call)[0, 6:].tolist() == own
