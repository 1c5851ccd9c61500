"""The benchmark's parts: the checkpoint builder, the arithmetic of floors, the judge, and one whole run on the CPU."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks import cases, dense_streaming, expert_cache, floors, machine, report  # noqa: E402
from benchmarks.build_checkpoint import build, ensure, tensors  # noqa: E402
from benchmarks.geometry import GEOMETRIES  # noqa: E402

TINY = GEOMETRIES["tiny"]
RATES = {
    "link_pinned_large_bytes_per_s": 50e9,
    "link_pinned_expert_blocks_bytes_per_s": 40e9,
    "host_copy_bytes_per_s": 10e9,
    "device_copy_read_plus_write_bytes_per_s": 4000e9,
}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    folder = tmp_path_factory.mktemp("built")
    build(folder, TINY, "float32")
    return folder


@pytest.fixture(scope="module")
def tiny_model(tiny):
    from transformers import AutoModelForCausalLM

    model, info = AutoModelForCausalLM.from_pretrained(
        tiny, dtype=torch.float32, experts_implementation="eager", output_loading_info=True
    )
    return model, info


# ---- the builder


def weights(folder):
    return b"".join(path.read_bytes() for path in sorted(folder.glob("*.safetensors")))


def test_phi_tiny_has_the_hubs_number_of_bytes():
    values = sum(tensor.values for tensor in tensors(GEOMETRIES["phi-tiny"]))
    assert 2 * values == 7_510_440_576
    assert 2 * GEOMETRIES["phi-tiny"].expert_values == 11_010_048


def test_phi_mini_has_the_published_number_of_parameters():
    values = sum(tensor.values for tensor in tensors(GEOMETRIES["phi-mini"]))
    assert round(values / 1e9, 2) == 7.65 or round(values / 1e9, 1) == 7.6


def test_transformers_loads_the_built_checkpoint_without_a_missing_or_unexpected_key(tiny_model):
    model, info = tiny_model
    assert type(model).__name__ == "PhimoeForCausalLM"
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]


def test_the_built_checkpoint_is_sharded_and_its_index_adds_up(tiny):
    from airllm.checkpoint import CheckpointIndex

    index = json.loads((tiny / "model.safetensors.index.json").read_text())
    files = sorted(path.name for path in tiny.glob("*.safetensors"))
    assert files == ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    assert CheckpointIndex.open(tiny).total_bytes == index["metadata"]["total_size"]


def test_routing_is_skewed_but_every_expert_is_used_and_tokens_are_not_ties(tiny_model):
    model, _ = tiny_model
    routed: list[torch.Tensor] = []
    hooks = [
        layer.mlp.experts.register_forward_pre_hook(lambda module, args: routed.append(args[1])) for layer in model.model.layers
    ]
    ids = torch.randint(3, 500, (1, 400), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        logits = model(ids).logits
    for hook in hooks:
        hook.remove()
    shares = torch.stack([torch.bincount(ids.flatten(), minlength=TINY.experts) / ids.numel() for ids in routed])
    assert shares.max() < 0.45 and shares.max() > 1.5 / TINY.experts
    assert (shares.sum(0) > 0).all()
    best = logits[0].topk(2).values
    assert (best[:, 0] - best[:, 1]).median() > 0.1


def test_two_builds_are_the_same_bytes_and_another_seed_is_not(tmp_path):
    small = replace(TINY, layers=1)
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        build(tmp_path / name, small, "float16", seed)
    first, second, other = (weights(tmp_path / name) for name in "abc")
    assert first == second and first != other


def test_ensure_builds_once_and_again_when_something_else_is_asked(tmp_path):
    small = replace(TINY, layers=1)
    ensure(tmp_path / "x", small, "float16")
    config = tmp_path / "x" / "config.json"
    before = config.stat().st_mtime_ns
    ensure(tmp_path / "x", small, "float16")
    assert config.stat().st_mtime_ns == before
    ensure(tmp_path / "x", small, "bfloat16")
    assert json.loads(config.read_text())["torch_dtype"] == "bfloat16"
    assert not list((tmp_path / "x").glob("*.partial"))


# ---- floors


def test_the_slot_floor_is_the_link_or_device_memory_whichever_is_slower():
    by_link = floors.slot_floor(400e6, 2e9, RATES)
    assert by_link.set_by == "link" and by_link.seconds == pytest.approx(400e6 / 50e9)
    by_device = floors.slot_floor(0, 2e9, RATES)
    assert by_device.set_by == "device memory" and by_device.seconds == pytest.approx(2e9 / 4000e9)


def test_the_stream_floor_is_the_host_copy_or_the_link_whichever_is_slower():
    assert floors.stream_floor(7e9, 7e9, RATES) == floors.Floor(0.7, "host copy")
    assert floors.stream_floor(1e9, 7e9, RATES) == floors.Floor(0.14, "link")


@pytest.mark.parametrize(
    ("streamed", "missed", "read", "from_files", "seconds", "set_by"),
    [
        (2e9, 1e9, 1e9, True, 0.2, "host copy"),
        (2e9, 1e9, 1e9, False, 0.06, "link"),
        (1e9, 9e9, 1e9, True, 0.2, "link"),
        (0, 1e9, 1200e9, True, 0.3, "device memory"),
    ],
)
def test_the_floor_of_streamed_dense_weights_is_the_slowest_of_three(streamed, missed, read, from_files, seconds, set_by):
    floor = floors.dense_floor(streamed, missed, read, RATES, from_files)
    assert floor.seconds == pytest.approx(seconds) and floor.set_by == set_by


def test_a_rate_above_the_link_is_impossible_and_one_below_is_not():
    assert floors.impossible(50e9, 1.0, RATES) is None
    assert "the link was measured at 50.0 GB/s" in floors.impossible(60e9, 1.0, RATES)
    assert floors.impossible(0, 1e-9, RATES) is None
    assert floors.impossible(1, 0, RATES)


def test_spread_of_known_times():
    got = floors.spread([float(n) for n in range(1, 11)])
    assert (got["median_s"], got["p10_s"], got["p90_s"], got["min_s"], got["max_s"]) == (5.5, 1.0, 9.0, 1.0, 10.0)


def test_tokens_are_compared_over_the_length_that_both_have():
    assert floors.same_prefix([[1, 2, 3], [4]], [[1, 2], [4, 5]]) == {"compared": 3, "equal": 3, "identical": True}
    assert floors.same_prefix([[1, 9]], [[1, 2]]) == {"compared": 2, "equal": 1, "identical": False}
    assert not floors.same_prefix([], [[1]])["identical"]


# ---- the judge


def run(tokens, decode_s=0.02, **decode):
    return {
        "prompt_tokens": 32,
        "prompt_s": 0.1,
        "decode_s": [decode_s] * (len(tokens) - 1),
        "tokens": tokens,
        "prompt": {},
        "decode": decode,
        "decode_device": {"segments_taken": 0, "tensors_taken": 5, "alloc_retries": 0},
    }


def judged(slots_run, reference_run, **extra):
    sizes = report.Sizes(2, 11_010_048, 64, 512, 1_873_295_872, 262_668_288)
    cases_run = {
        "eager": {"kind": "eager", "modes": {"free": [reference_run]}},
        "slots": {"kind": "slots", "modes": {"free": [slots_run]}},
    } | extra
    where = {"hardware": {}, "bandwidths": RATES}
    return report.assemble({}, Experts(), sizes, where, cases_run, None)


@dataclass
class Experts:
    moe_layers: int = 32


SOUND = {"hits": 30, "misses": 34, "h2d_bytes": 34 * 11_010_048, "generation_disk_expert_reads": 0}


def test_a_sound_result_has_no_faults_and_names_the_baseline_of_every_ratio():
    result = judged(run([1, 2, 3], **SOUND), run([1, 2, 3], decode_s=0.05))
    assert result["faults"] == []
    summary = result["cases"]["slots"]["summary"]["free"]
    assert summary["hit_rate"] == pytest.approx(30 / 64)
    assert summary["floor"]["set_by"] == "link"
    assert summary["floor_fraction"] == pytest.approx(34 * 11_010_048 / 2 / 50e9 / 0.02)
    token, whole = result["ratios"]
    assert (token["baseline"], token["of"], token["times_faster"]) == ("eager", "slots", pytest.approx(2.5))
    assert whole["what"] == "prompt and 3 tokens" and whole["slots_s"] == pytest.approx(0.1 + 2 * 0.02)


def test_other_tokens_are_a_fault():
    result = judged(run([1, 2, 4], **SOUND), run([1, 2, 3]))
    assert any("2 of 3 tokens equal those of plain transformers, experts eager" in fault for fault in result["faults"])


def test_a_rate_above_the_link_is_a_fault():
    result = judged(run([1, 2, 3], decode_s=0.001, **SOUND), run([1, 2, 3]))
    assert any("cannot be true" in fault for fault in result["faults"])


def test_expert_reads_from_disk_while_decoding_are_a_fault():
    result = judged(run([1, 2, 3], **(SOUND | {"generation_disk_expert_reads": 2})), run([1, 2, 3]))
    assert any("reads from disk" in fault for fault in result["faults"])


def test_a_case_that_failed_is_a_fault_and_does_not_hide_the_others():
    result = judged(run([1, 2], **SOUND), run([1, 2]), streaming={"kind": "streaming", "error": "boom"})
    assert result["faults"] == ["streaming failed: boom"]
    assert result["cases"]["slots"]["summary"]["free"]["tokens"]["identical"]


def test_what_ran_in_turn_is_compared_turn_by_turn():
    slow = {"mode": "free", "decode_s": {"eager": [0.2, 0.4, 0.2], "slots": [0.08, 0.08, 0.8]}}
    fast = {"mode": "free", "decode_s": {"eager": [0.05, 0.05, 0.05], "slots": [0.03, 0.03, 0.03]}}
    (ratio,) = report.pair_ratios([slow, fast, fast])
    assert (ratio["of"], ratio["baseline"], ratio["mode"], ratio["count"]) == ("slots", "eager", "free", 3)
    assert (ratio["median"], ratio["min"], ratio["max"]) == pytest.approx((0.6, 0.4, 0.6))
    assert report.spread_text(ratio) == "0.600 (p10 0.400, p90 0.600, 3 turns)"


def test_a_turn_of_streaming_is_held_against_the_bandwidths_of_its_moment():
    turn = {"decode_s": [0.3, 0.3, 0.9], "per_token": {"bytes_read": 2e9, "h2d_bytes": 2e9}, "bandwidths": RATES}
    assert report.turn_ratio(turn) == pytest.approx(1.5)
    halved = turn | {"bandwidths": {name: rate / 2 for name, rate in RATES.items()}}
    assert report.turn_ratio(halved) == pytest.approx(0.75)


# ---- the machine probe and the measuring of one case


def test_peak_memory_sees_a_block_that_is_gone_again():
    peak = machine.PeakMemory()
    before = machine.status_bytes("VmRSS") or 0
    block = torch.ones(64 * 2**20, dtype=torch.uint8)
    del block
    assert peak.bytes() >= before + 48 * 2**20


def test_bandwidths_are_positive_and_named_by_unit():
    rates = machine.bandwidths(torch.device("cpu"), 2**20, 2**22)
    assert all(name.endswith("_bytes_per_s") and rate > 0 for name, rate in rates.items())
    assert set(RATES) <= set(rates)


def test_a_script_forces_its_tokens_and_notes_what_greedy_decoding_wanted(tiny_model):
    model, _ = tiny_model
    prompt = torch.tensor([[5, 6, 7, 8]])
    script = cases.Script([100, 200, 300])
    with torch.no_grad():
        out = model.generate(prompt, max_new_tokens=3, do_sample=False, logits_processor=[script])
        logits = model(out[:, :-1]).logits[0, 3:]
    assert out[0, 4:].tolist() == [100, 200, 300]
    assert script.predictions() == logits.argmax(-1).tolist()


def test_one_case_times_the_prompt_and_every_decoded_token_apart(tiny_model):
    model, _ = tiny_model
    request = {"kind": "eager", "tokens": 4, "prompts": [[5, 6, 7]], "scripts": [[9, 10, 11, 12]], "modes": ["forced", "free"]}
    modes = cases.measure_all(request, model, torch.device("cpu"))
    for mode in ("forced", "free"):
        (got,) = modes[mode]
        assert got["prompt_s"] > 0 and len(got["decode_s"]) == 3 and len(got["tokens"]) == 4


def test_random_prompts_and_scripts_hold_no_end_of_text(tiny):
    ids = expert_cache.random_ids(tiny, 5000, 1)
    eos = json.loads((tiny / "config.json").read_text())["eos_token_id"]
    assert min(ids) == 3 and max(ids) < eos


@pytest.fixture
def in_this_process(monkeypatch):
    """Cases without the seconds that a process of its own takes to import everything."""
    monkeypatch.setattr(
        expert_cache, "run_child", lambda request, timeout_s: json.loads(cases.answer(json.dumps(request | {"threads": 1})))
    )


def test_the_benchmark_runs_on_the_cpu_and_ends_with_its_json(tmp_path, capsys, in_this_process):
    output, picture = tmp_path / "out.json", tmp_path / "out.png"
    drawn = importlib.util.find_spec("matplotlib") is not None  # of the bench extra
    arguments = ["--geometry", "tiny", "--tokens", "3", "--vs", "eager", "--device", "cpu", "--budgets", "0.001,0.01"]
    arguments += ["--work-dir", str(tmp_path / "work"), "--output-json", str(output)]
    assert expert_cache.main([*arguments, *(["--plot", str(picture)] if drawn else [])]) == 0
    result = json.loads(capsys.readouterr().out.strip().splitlines()[-1])
    assert result == json.loads(output.read_text())
    assert result["faults"] == []
    assert not drawn or picture.stat().st_size > 10_000
    assert [path.name for path in tmp_path.glob("*.json")] == ["out.json"]
    assert result["cases"]["slots"]["stats"]["slot_count"] == 9
    for kind in ("streaming", "slots"):
        for mode in ("forced", "free"):
            assert result["cases"][kind]["summary"][mode]["tokens"] == {"compared": 3, "equal": 3, "identical": True}
    assert len(result["cases"]["streaming"]["turns"]) == result["cases"]["streaming"]["turn_ratios"]["count"] == cases.TURNS
    assert [(ratio["of"], ratio["mode"]) for ratio in result["pair"]["ratios"]] == [("slots", "forced"), ("slots", "free")]
    assert result["sweep"]["of"] == "slots"
    small, whole = result["sweep"]["points"]
    assert (small["slot_count"], whole["slot_count"]) == (5, 32)
    assert small["summary"]["forced"]["hit_rate"] < whole["summary"]["forced"]["hit_rate"]


DENSE = ["--geometry", "tiny", "--tokens", "3", "--repeats", "1", "--device", "cpu"]


def test_dense_streaming_runs_on_the_cpu_and_gives_the_tokens_of_the_resident_run(tmp_path, capsys):
    output = tmp_path / "out.json"
    arguments = [*DENSE, "--resident-part", "0", "--work-dir", str(tmp_path / "work"), "--output-json", str(output)]
    assert dense_streaming.main(arguments) == 0
    result = json.loads(capsys.readouterr().out.strip().splitlines()[-1])
    assert result == json.loads(output.read_text())
    assert result["tokens"] == {"compared": 8, "equal": 8, "identical": True}
    *parts, whole = result["runs"].values()
    assert [part["streams"]["streamed_from"] for part in parts] == ["host", "file"] and whole["streams"] is None
    for part in parts:
        assert part["streamed_bytes"] == part["stats"]["dense_streamed_bytes"] == result["layer_dense_bytes"]
        assert whole["streamed_bytes"] == 0 and part["missed_bytes"] == whole["missed_bytes"] > 0
    for row in (*parts, whole):
        assert row["step_s"] > 0 and row["times_floor"] == pytest.approx(row["step_s"] / row["floor"]["seconds"])


def test_dense_streaming_exits_1_when_the_tokens_differ(tmp_path, capsys, monkeypatch):
    honest = dense_streaming.measure

    def wrong(bench, budget_gb, resident_gb, stream_from="auto"):
        row = honest(bench, budget_gb, resident_gb, stream_from)
        return row if resident_gb == "all" else row | {"wanted": [-1, *row["wanted"][1:]]}

    monkeypatch.setattr(dense_streaming, "measure", wrong)
    assert dense_streaming.main([*DENSE, "--work-dir", str(tmp_path)]) == 1
    assert "6 of 8 equal" in capsys.readouterr().out


@pytest.mark.parametrize(("kinds", "of"), [(["slots"], "slots"), (["eager", "slots", "slots_device"], "slots_device")])
def test_the_sweep_is_of_the_device_engine_where_that_is_asked_for(kinds, of):
    args = SimpleNamespace(kinds=kinds, tokens=9, sweep_tokens=4, budgets="0.5,1")
    shared = {"prompts": [[1], [2]], "modes": ["forced", "free"]}
    for request, budget in zip(expert_cache.sweep_requests(args, shared), (0.5, 1.0), strict=True):
        assert (request["kind"], request["sweep_of"], request["budgets_gb"]) == ("sweep", of, [budget])
        assert (request["tokens"], request["prompts"], request["modes"]) == (4, [[1]], ["forced"])


def test_a_run_that_was_stopped_goes_on_where_it_was(tmp_path, monkeypatch, capsys):
    output, ran, stop_at = tmp_path / "out.json", [], ["pair"]

    def child(request, timeout_s):
        if request["kind"] in stop_at:
            raise KeyboardInterrupt
        ran.append(request["kind"] if request["kind"] != "sweep" else request["budgets_gb"])
        return json.loads(cases.answer(json.dumps(request | {"threads": 1})))

    monkeypatch.setattr(expert_cache, "run_child", child)
    arguments = ["--geometry", "tiny", "--tokens", "3", "--cases", "slots", "--vs", "eager", "--device", "cpu"]
    arguments += ["--budgets", "0.001,0.01", "--work-dir", str(tmp_path / "work"), "--output-json", str(output)]
    with pytest.raises(KeyboardInterrupt):
        expert_cache.main(arguments)
    assert ran == ["machine", "eager", "slots"] and not output.exists()
    stop_at[0] = "nothing"
    ran.clear()
    assert expert_cache.main([*arguments, "--resume"]) == 0
    assert ran == ["machine", "pair", [0.001], [0.01]]
    result = json.loads(output.read_text())
    assert result["asked"]["measured_in_an_earlier_run"] == ["eager", "slots"]
    assert [path.name for path in tmp_path.glob("*.json*")] == ["out.json"]
    ran.clear()
    assert expert_cache.main([*arguments[:-2], "--output-json", str(tmp_path / "other.json")]) == 0
    assert ran == ["machine", "eager", "slots", "pair", [0.001], [0.01]]
    assert "measured_in_an_earlier_run" not in json.loads((tmp_path / "other.json").read_text())["asked"]


def test_answers_to_other_requests_of_other_machines_and_failed_ones_are_not_reused(tmp_path, monkeypatch):
    output, hardware, failing = tmp_path / "out.json", ["one"], [True]

    def child(request, timeout_s):
        if request["kind"] == "machine":
            return {"hardware": hardware[0], "bandwidths": len(ran)}
        ran.append(request["kind"])
        return {"error": "boom"} if failing[0] and request["kind"] == "b" else {"said": len(ran)}

    monkeypatch.setattr(expert_cache, "run_child", child)

    def ask(resume, **more):
        runs = expert_cache.Runs(output, 1, resume)
        ran.clear()
        found = runs.machine({"kind": "machine"}), runs.case({"kind": "a"} | more), runs.case({"kind": "b"})
        if failing[0]:
            runs.finish()  # keeps the others for another try
        return found, list(ran)

    ran: list[str] = []
    first = ask(False)
    assert first[1] == ["a", "b"]
    failing[0] = False
    assert ask(True) == (({"hardware": "one", "bandwidths": 0}, {"said": 1}, {"said": 1}), ["b"])
    assert ask(True, tokens=2)[1] == ["a"]
    assert ask(True)[1] == [], "what was not asked for in between stays"
    hardware[0] = "another"
    assert ask(True)[1] == ["a", "b"]
    assert ask(False)[1] == ["a", "b"]


def test_a_case_in_a_process_of_its_own_reports_its_own_peak(tiny):
    request = {"kind": "eager", "model": str(tiny), "dtype": "float32", "device": "cpu", "threads": 1, "tokens": 2}
    request |= {"prompts": [[5, 6]], "scripts": [[7, 8]], "modes": ["free"], "max_seq_len": 64}
    got = expert_cache.run_child(request, 300)
    assert "error" not in got and len(got["modes"]["free"][0]["tokens"]) == 2
    assert got["peak_process_bytes"] >= got["stages"]["generated"]["rss_bytes"] > 0


def test_a_case_that_dies_is_an_error_with_what_it_said_and_one_that_hangs_is_ended(monkeypatch, tmp_path):
    script = tmp_path / "case.py"
    monkeypatch.setattr(expert_cache, "CASES_FILE", script)
    script.write_text("raise SystemExit('no such device')")
    assert "exit code 1: no such device" in expert_cache.run_child({"kind": "slots"}, 60)["error"]
    script.write_text("import time\ntime.sleep(60)")
    assert "took longer than 1 s" in expert_cache.run_child({"kind": "slots"}, 1)["error"]


# ---- the README's table


def test_the_readme_shows_what_the_committed_results_hold():
    if not (ROOT / "benchmarks" / "results" / "phi-tiny-h200.json").is_file():
        pytest.skip("no results are committed under benchmarks/results")
    command = [sys.executable, str(ROOT / "benchmarks" / "readme_table.py"), "--check"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
