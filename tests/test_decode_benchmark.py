"""The device engine's benchmark: its geometries, and its sections on the CPU at a size that times nothing."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks import decode_engine  # noqa: E402
from benchmarks.build_checkpoint import tensors  # noqa: E402
from benchmarks.geometry import GEOMETRIES, GIB  # noqa: E402

SIBLINGS = [("phi-tiny", 73, 3.8), ("phi-mini", 34, 7.6), ("phi-3.5", 5, 41.9)]


@pytest.mark.parametrize(("name", "slots", "parameters_bn"), SIBLINGS)
def test_the_siblings_have_the_published_sizes(name, slots, parameters_bn):
    geometry = GEOMETRIES[name]
    assert int(0.75 * GIB / (2 * geometry.expert_values)) == slots
    assert sum(tensor.values for tensor in tensors(geometry)) / 1e9 == pytest.approx(parameters_bn, abs=0.06)


def test_a_cut_geometry_has_a_name_of_its_own():
    cut = GEOMETRIES["phi-3.5"].cut(8)
    assert (cut.layers, cut.name, cut.expert_values) == (8, "phi-3.5-8-layers", GEOMETRIES["phi-3.5"].expert_values)
    assert GEOMETRIES["phi-3.5"].cut(None) is GEOMETRIES["phi-3.5"] is GEOMETRIES["phi-3.5"].cut(32)


@pytest.fixture(scope="module")
def result(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bench")
    output = folder / "out.json"
    arguments = ["--geometry", "tiny", "--layers", "3", "--device", "cpu", "--tokens", "6", "--repeats", "1"]
    arguments += ["--sections", "decoding,routing,gain", "--work-dir", str(folder), "--output-json", str(output)]
    assert decode_engine.main(arguments) == 0
    return json.loads(output.read_text())


def test_budgets_and_batches_are_served_by_steps(result):
    assert result["geometry"] == "tiny-3-layers"
    for name in ("budget", "every expert in a slot"):
        ours = result["decoding"][name]["ours"]
        assert ours["reason"] == "" and ours["steps_served"] > 0 and ours["step_s"] > 0
    assert result["decoding"]["every expert in a slot"]["ours"]["slots"] == 24
    assert result["decoding"]["every expert in a slot"]["ours"]["hit_rate"] == 1


def test_recorded_routing_is_decoded_and_replayed(result):
    routing = result["routing"]
    assert routing["ours"]["reason"] == routing["lru"]["reason"] == ""
    assert routing["ours"]["moved_bytes"] > 0 and routing["floor_s"] > 0
    rates = routing["replayed_hit_rates"]
    assert 0 < rates["lru"] < rates["aged"] < rates["belady"] < 1


def test_the_gain_is_against_one_lru_and_no_cache(result):
    gain = result["gain"]
    assert gain["no cache"]["slots"] == 2 and gain["no cache"]["hit_rate"] == 0 < gain["aged"]["hit_rate"]
    assert set(gain["times_faster_than"]) == {"lru", "no cache"}
    text = "\n".join(decode_engine.as_text(result))
    assert "recorded routing (7 slots)" in text and "belady" in text and "without a cache" in text
