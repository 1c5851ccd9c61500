"""The soak run: calls are what they say, nothing grows in a short run, and planted growth is seen."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

from airllm import decode_step

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks import soak  # noqa: E402

SHORT = ["--generates", "20", "--device", "cpu"]


def last_json(capsys: pytest.CaptureFixture[str]) -> dict:
    return json.loads(capsys.readouterr().out.strip().splitlines()[-1])


@pytest.mark.parametrize("engine", ["plain", "device"])
def test_a_short_run_finds_no_fault_and_ends_with_its_json(engine, tmp_path, capsys):
    output = tmp_path / "soak.json"
    assert soak.main([*SHORT, "--engine", engine, "--output-json", str(output)]) == 0
    result = last_json(capsys)
    assert result == json.loads(output.read_text())
    assert result["statistics"]["engine"] == engine and result["answers_compared"] == 10
    assert list(result["counts"]) == ["loaded", *(f"{part}0 %" for part in range(1, 10)), "end"]


LEAKS = {
    "memory": (lambda kept: kept.append(torch.ones(2**20)), "own_bytes grew"),
    "objects": (lambda kept: kept.extend([] for _ in range(500)), "objects grew"),
    "files": (lambda kept: kept.append(open(__file__)), "open_files grew"),
}


@pytest.mark.parametrize("leak", LEAKS)
def test_what_a_call_leaves_behind_is_seen(leak, monkeypatch, capsys):
    kept: list = []
    plain = soak.answer

    def leaking(model, call):
        LEAKS[leak][0](kept)
        return plain(model, call)

    monkeypatch.setattr(soak, "answer", leaking)
    try:
        assert soak.main([*SHORT, "--engine", "plain"]) == 1
        assert any(LEAKS[leak][1] in fault for fault in last_json(capsys)["faults"])
    finally:
        for each in kept:
            getattr(each, "close", int)()


def test_an_answer_that_is_not_the_first_one_is_a_fault(monkeypatch, capsys):
    given = iter(range(10**6))
    monkeypatch.setattr(soak, "answer", lambda model, call: [[next(given)]])
    assert soak.main(SHORT) == 1
    assert last_json(capsys)["faults"] == ["10 of 10 answers differ from the first ones"]


def test_calls_are_the_same_for_the_same_seed_and_the_second_half_is_the_first():
    made, other = (list(soak.calls(600, seed, 768)) for seed in (0, 1))
    assert made == list(soak.calls(600, 0, 768)) and made != other and made[300:] == made[:300]
    assert {call.kind for call in made} == {"greedy", "sample", "beams"}
    assert {call.rows for call in made} == {1, 2, 3, 4, 6}
    assert min(call.length for call in made) < 8 and max(call.length for call in made) > 256


def test_recordings_are_needed_for_shapes_that_are_not_among_the_last(monkeypatch):
    monkeypatch.setattr(decode_step, "MAX_STATES", 4)
    assert soak.most_recordings([(1, 10), (2, 10), (1, 255), (2, 9)]) == 2
    assert soak.most_recordings([(1, 255), (1, 256), (1, 10)]) == 2, "256 positions and one more need a larger cache"
    assert soak.most_recordings([(rows, 10) for rows in (1, 2, 3, 4, 1, 6, 2, 1)]) == 6
    judged = {"counts": {"warm": {}, "end": {}}, "different_answers": [], "answers_compared": 1, "most_recordings": 2}
    stats = {"device_engine_captures": 3, "misses": 1, "h2d_copies": 1}
    assert soak.judge(judged, stats) == ["3 steps were recorded where 2 would do"]


def test_growth_beyond_a_bound_is_named(monkeypatch):
    even = dict.fromkeys(soak.BOUNDS, 0)
    for name, bound in soak.BOUNDS.items():
        counts = {"10 %": even, "50 %": even, "end": even | {name: bound + 1}}
        result = {"counts": counts, "different_answers": [], "most_recordings": 0}
        (fault,) = soak.judge(result, {"misses": 0, "h2d_copies": 0})
        assert fault.startswith(f"{name} grew by {bound + 1} ")
