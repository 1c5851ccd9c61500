"""The replay of routing under cache policies: its yardsticks against brute force, its traces, and what it must show."""

from __future__ import annotations

import itertools
import json
import random
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks import policy_replay, record_routing  # noqa: E402
from benchmarks.routing_traces import Trace, Turn, built_trace, read_trace, zipf_trace  # noqa: E402

TINY = read_trace(policy_replay.TINY)


def small_trace(seed: int, layers: int = 2, experts: int = 3, tokens: int = 7) -> Trace:
    rng = random.Random(seed)
    decode = [[[rng.randrange(experts)] for _ in range(layers)] for _ in range(tokens)]
    return Trace("small", layers, experts, 1, [Turn(decode[:1], decode[1:])])


def most_hits(trace: Trace, slots: int) -> int:
    """By trying every choice of what to keep after every access."""
    best = {frozenset(): 0}  # cache -> most hits so far
    for counted, key in trace.accesses():
        then: dict[frozenset[int], int] = {}
        for cache, hits in best.items():
            hits += counted and key in cache
            known = cache | {key}
            for kept in itertools.chain.from_iterable(itertools.combinations(known, n) for n in range(slots + 1)):
                then[frozenset(kept)] = max(hits, then.get(frozenset(kept), 0))
        best = then
    return max(best.values())


@pytest.mark.parametrize("slots", [1, 2, 3])
def test_beladys_hits_are_the_most_that_any_policy_can_have(slots):
    for seed in range(12):
        trace = small_trace(seed)
        assert policy_replay.belady(trace, slots) == most_hits(trace, slots)


def test_nothing_beats_belady_and_the_static_set_does_not_either():
    trace = zipf_trace(layers=4, experts=8, tokens=60)
    for slots in (2, 6, 9, 20):
        best = policy_replay.belady(trace, slots)
        assert policy_replay.static(trace, slots) <= best
        for name, make in policy_replay.POLICIES.items():
            assert policy_replay.replay(trace, make(trace, slots)) <= best, name


def test_one_lru_hits_nothing_below_the_experts_of_a_token_and_the_last_token_at_it():
    total = TINY.experts_per_token
    assert policy_replay.replay(TINY, policy_replay.lru(TINY, total - TINY.top_k)) == 0
    tokens = [token for _, token in TINY.tokens()]
    counted = [counted for counted, _ in TINY.tokens()]
    repeats = sum(
        len(set(a) & set(b))
        for before, now, counts in zip(tokens, tokens[1:], counted[1:], strict=False)
        for a, b in zip(before, now, strict=True)
        if counts
    )
    assert policy_replay.replay(TINY, policy_replay.lru(TINY, total)) == repeats > 0


@pytest.mark.parametrize("trace", [TINY, zipf_trace(tokens=100), built_trace(tokens=100)], ids=lambda trace: trace.name)
def test_the_librarys_policy_hits_at_least_as_often_as_one_lru_above_the_experts_of_a_token(trace):
    for multiple in (0.25, 0.5, 0.75, 1.14, 1.5, 2, 3, 4):
        slots = round(multiple * trace.experts_per_token)
        aged, lru = (policy_replay.replay(trace, policy_replay.POLICIES[name](trace, slots)) for name in ("aged", "lru"))
        assert aged >= lru and aged > 0


def test_below_the_experts_of_a_token_most_of_the_best_fixed_set_is_found():
    for multiple in (0.25, 0.5, 0.75):
        slots = round(multiple * TINY.experts_per_token)
        aged = policy_replay.replay(TINY, policy_replay.POLICIES["aged"](TINY, slots))
        assert aged >= 0.95 * policy_replay.static(TINY, slots)


def test_a_recording_of_the_shipped_model_is_what_its_experts_modules_were_asked(tmp_path):
    import airllm
    from airllm.experts.modules import SlotExperts

    out, asked = tmp_path / "trace.csv", []
    options = {"device": "cpu", "dtype": "float32", "expert_cache_backend": "slot", "expert_cache_gb": 1}
    with airllm.AutoModel.from_pretrained(airllm.tiny_model_path(), **options) as model:
        for module in model.model.modules():
            if isinstance(module, SlotExperts):
                module.register_forward_pre_hook(lambda module, args: asked.append((module.layer, args[1].tolist())))
        with model.record_routing(out):
            for prompt in ("In the beginning", "And Solomon built"):
                ids = model.tokenizer(prompt, return_tensors="pt")
                model.generate(**ids, max_new_tokens=4, do_sample=False)
        model.generate(**ids, max_new_tokens=2, do_sample=False)  # no longer recorded
    steps = [tuple(map(int, line.split(",")[:3])) for line in out.read_text().splitlines() if line[0].isdigit()]
    for turn in (0, 1):
        positions = [step for _, step in sorted({(phase, step) for number, phase, step in steps if number == turn})]
        assert positions == list(range(len(positions))), "prompt and decoded tokens are numbered through"
    trace = read_trace(out)
    assert (trace.layers, trace.experts, trace.top_k, len(trace.turns)) == (6, 8, 2, 2)
    forwards = [asked[n : n + 6] for n in range(0, len(asked) - 12, 6)]
    rows = [[sorted(layer[1][row]) for layer in forward] for forward in forwards for row in range(len(forward[0][1]))]
    assert [token for turn in trace.turns for token in (*turn.prompt, *turn.decode)] == rows
    assert [len(turn.decode) for turn in trace.turns] == [3, 3]


def test_routing_is_not_recorded_where_the_host_does_not_see_it(tmp_path):
    import airllm
    from airllm.errors import UnsupportedModelError

    for options in ({}, {"expert_cache_backend": "slot", "expert_cache_gb": 1, "expert_cache_engine": "device"}):
        with airllm.AutoModel.from_pretrained(airllm.tiny_model_path(), device="cpu", dtype="float32", **options) as model:
            with pytest.raises(UnsupportedModelError, match="plain"):
                model.record_routing(tmp_path / "none.csv")


def test_the_committed_trace_is_what_the_script_records(tmp_path):
    record_routing.main([str(tmp_path / "again.csv"), "--tokens", "5", "--prompt", "In the beginning God created"])
    again = read_trace(tmp_path / "again.csv").turns[0]
    assert again.prompt == TINY.turns[0].prompt and again.decode == TINY.turns[0].decode[:5]


def test_columns_are_found_by_name_and_more_of_them_are_ignored(tmp_path):
    path = tmp_path / "other.csv"
    path.write_text(
        "# route_trace v1\n# arch=other n_layer=2 n_expert=4 n_expert_used=2\n# layer=0 expert_bytes=7\n"
        "turn,phase,step,layer,slot,expert,weight,residency\n"
        "0,0,0,0,0,3,0.5,0\n0,0,0,0,1,1,0.5,0\n0,0,0,1,0,2,1.0,0\n0,1,1,0,0,0,1.0,1\n"
    )
    trace = read_trace(path)
    assert (trace.name, trace.layers, trace.experts, trace.top_k) == ("other", 2, 4, 2)
    assert trace.turns == [Turn(prompt=[[[1, 3], [2]]], decode=[[[0], []]])]
    assert list(trace.accesses()) == [(False, 1), (False, 3), (False, 6), (True, 0)]


def test_the_script_prints_a_table_and_ends_with_its_json(tmp_path, capsys):
    output = tmp_path / "out.json"
    assert policy_replay.main(["--tokens", "10", "--output-json", str(output)]) == 0
    printed = capsys.readouterr().out
    result = json.loads(printed.strip().splitlines()[-1])
    assert result == json.loads(output.read_text())
    assert [each["trace"] for each in result["traces"]] == ["phimoe", "random, zipf", "random, as built"]
    for each in result["traces"]:
        assert each["trace"] in printed and sum(slots < each["layers"] * each["top_k"] for slots in each["slots"]) >= 4
        assert set(each["hit_rates"]) == {*policy_replay.POLICIES, "static", "belady"}


def test_the_committed_replay_is_of_the_committed_policy_and_trace():
    result = json.loads((ROOT / "benchmarks" / "results" / "policy-replay.json").read_text())
    tiny = next(each for each in result["traces"] if each["trace"] == TINY.name)
    assert policy_replay.measure(TINY) == tiny
