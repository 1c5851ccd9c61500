"""The benchmark of other families' shapes: their checkpoints, and whole runs on the CPU at a size that times nothing."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks import family_speed, policy_replay  # noqa: E402
from benchmarks.family_shapes import SHAPES  # noqa: E402
from benchmarks.routing_traces import Turn  # noqa: E402

TINY = ["qwen3-tiny", "mixtral-tiny"]


@pytest.mark.parametrize(("name", "layers", "parameters_bn"), [("qwen3-30b-a3b", 48, 30.5), ("mixtral-8x7b", 32, 46.7)])
def test_all_layers_would_have_the_published_number_of_parameters(name, layers, parameters_bn):
    shape = SHAPES[name]
    total = sum(tensor.values for tensor in shape.tensors())
    one = sum(tensor.values for tensor in shape.tensors() if tensor.name.startswith("model.layers.0."))
    assert (total + (layers - shape.layers) * one) / 1e9 == pytest.approx(parameters_bn, abs=0.05)


@pytest.mark.parametrize("name", TINY)
def test_transformers_loads_the_checkpoint_without_a_missing_or_unexpected_key(name, tmp_path):
    folder = SHAPES[name].ensure(tmp_path / name, "float32")
    model, info = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]
    assert model.config.model_type == SHAPES[name].model_type and model.config.num_experts_per_tok == SHAPES[name].top_k
    assert type(model).__name__ == SHAPES[name].architecture
    weights = sorted(folder.glob("*.safetensors"))
    before = [path.stat().st_mtime_ns for path in weights]
    SHAPES[name].ensure(folder, "float32")
    assert [path.stat().st_mtime_ns for path in weights] == before and len(before) >= 2


@pytest.mark.parametrize("name", TINY)
def test_a_run_on_the_cpu_ends_with_its_json(name, tmp_path, capsys):
    output = tmp_path / "out.json"
    arguments = ["--shape", name, "--device", "cpu", "--tokens", "4", "--repeats", "1", "--portions", "0.3,1"]
    assert family_speed.main([*arguments, "--work-dir", str(tmp_path), "--output-json", str(output)]) == 0
    printed = capsys.readouterr().out.strip().splitlines()
    result = json.loads(printed[-1])
    assert result == json.loads(output.read_text())
    assert [(row["portion"], row["asked_engine"]) for row in result["slots"]] == [
        (0.3, "plain"), (0.3, "device"), (1.0, "plain"), (1.0, "device")
    ]  # fmt: skip
    for row in result["slots"]:
        assert row["slots"] == int(SHAPES[name].total_experts * row["portion"] + 0.01)
        assert row["step_s"] > 0 and row["floor_s"] > 0
        assert row["engine"] == row["asked_engine"] or row["reason"], "an engine that does not serve says why"
        whole = row["portion"] == 1
        assert (row["hit_rate"] == row["lru_hit_rate"] == row["belady_hit_rate"] == 1) == whole
        assert (row["moved_bytes"] == 0) == whole
    assert set(result["resident"]) == set(family_speed.RESIDENT)
    assert "30% of the experts" in "\n".join(printed) and "all on the device" in "\n".join(printed)


def test_only_the_last_turn_of_a_warmed_trace_counts():
    turns = [Turn([[[7]], [[0]]], [[[1]], [[2]]]), Turn([[[0]]], [[[1]], [[3]]])]
    trace = family_speed.Warmed("two turns", 1, 8, 1, turns)
    assert list(trace.accesses()) == [(False, 0), (False, 1), (False, 2), (False, 0), (True, 1), (True, 3)]
    assert policy_replay.replay(trace, policy_replay.lru(trace, 3)) == 1 == policy_replay.belady(trace, 3)
