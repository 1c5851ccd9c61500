"""The command line: what it teaches, what it refuses, and that what it prints is true."""

from __future__ import annotations

import logging
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import airllm  # noqa: E402
from airllm import cli, demo, inspect_model  # noqa: E402
from airllm.cli import shell_words  # noqa: E402
from airllm.dense_budget import plan_dense  # noqa: E402
from airllm.errors import BudgetError, CheckpointError  # noqa: E402
from airllm.experts.budget import plan_slots  # noqa: E402
from airllm.inspect_text import budget_gib  # noqa: E402
from airllm.layer_files import find_or_create_split  # noqa: E402
from airllm.token_clock import TokenClock  # noqa: E402
from benchmarks.build_checkpoint import DTYPES, build, safetensors_header, shards, tensors, write_json  # noqa: E402
from benchmarks.geometry import GEOMETRIES, Geometry  # noqa: E402

TINY = GEOMETRIES["tiny"]


def command(*arguments):
    return CliRunner().invoke(cli.app, [str(argument) for argument in arguments])


@pytest.fixture(autouse=True)
def put_back(monkeypatch):
    """The command owns its process and sets what it likes; here it shares one with other tests."""
    monkeypatch.setenv("TQDM_DISABLE", "1")
    threads, level = torch.get_num_threads(), logging.getLogger("airllm").level
    yield
    torch.set_num_threads(threads)
    logging.getLogger("airllm").setLevel(level)


@pytest.fixture(scope="module")
def speaking(tmp_path_factory):
    """A tiny PhiMoE with a byte tokenizer."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    folder = tmp_path_factory.mktemp("speaking")
    build(folder, TINY, "float16")
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={sign: number for number, sign in enumerate(alphabet, 3)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<pad>").save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def dense(tmp_path_factory):
    from transformers import LlamaConfig, LlamaForCausalLM

    folder = tmp_path_factory.mktemp("dense")
    config = LlamaConfig(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, vocab_size=64)
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def hollow(folder: Path, geometry: Geometry, dtype: str) -> Path:
    """A checkpoint whose files have the right headers and sizes and take no disk: holes where the weights would be."""
    code, torch_dtype = DTYPES[dtype]
    cut = shards(list(tensors(geometry)), torch_dtype.itemsize, 5 * 10**9)
    weight_map = {}
    for number, shard in enumerate(cut, 1):
        name = f"model-{number:05d}-of-{len(cut):05d}.safetensors"
        header = safetensors_header(shard, code, torch_dtype.itemsize)
        with open(folder / name, "wb") as file:
            file.write(header)
            file.truncate(len(header) + torch_dtype.itemsize * sum(tensor.values for tensor in shard))
        weight_map |= {tensor.name: name for tensor in shard}
    write_json(folder / "model.safetensors.index.json", {"metadata": {}, "weight_map": weight_map})
    write_json(folder / "config.json", geometry.config(dtype))
    return folder


@pytest.fixture(scope="module")
def phi_tiny(tmp_path_factory):
    return hollow(tmp_path_factory.mktemp("phi-tiny"), GEOMETRIES["phi-tiny"], "bfloat16")


# ---- help


def test_the_help_of_the_command_shows_where_to_start():
    result = command("--help")
    assert result.exit_code == 0
    for text in ("airllm demo", "airllm inspect FOLDER", "airllm generate FOLDER --prompt", "streaming (default)", "slots"):
        assert text in result.output


@pytest.mark.parametrize("name", ["demo", "generate", "inspect"])
def test_every_command_has_examples_that_start_with_itself(name):
    result = command(name, "--help")
    assert result.exit_code == 0
    assert "Examples:" in result.output
    examples = [line for line in result.output.splitlines() if line.strip().startswith("airllm ")]
    assert len(examples) >= 3 and all(line.split()[1] == name for line in examples)


def test_the_examples_of_the_help_parse(phi_tiny):
    lines = [line.split() for line in command("inspect", "--help").output.splitlines() if line.strip().startswith("airllm ")]
    for words in lines:
        result = command(words[1], phi_tiny, *words[3:])
        assert result.exit_code == 0, result.output


def test_no_arguments_show_the_help_instead_of_doing_something():
    assert "Start here" in command().output


def test_python_dash_m_airllm_is_the_command():
    done = subprocess.run([sys.executable, "-m", "airllm", "--version"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.stdout.strip() == f"airllm {airllm.__version__}" and done.returncode == 0


# ---- inspect


def test_inspect_says_phi_tinys_known_figures(phi_tiny):
    result = command("inspect", phi_tiny, "--expert-cache-gb", 0.75, "--link-gbs", 55)
    assert result.exit_code == 0, result.output
    for text in (
        "phimoe (PhiMoEForCausalLM)",
        "7510440576 B",
        "5637144576 B (5.25 GiB) in 512 experts: 32 layers of 16",
        "11010048 B (10.5 MiB)",
        "dense           1873296000 B (1.74 GiB)",
        "T = 32 layers x 2 = 64 experts",
    ):
        assert text in result.output
    row = result.output.strip().splitlines()[-1].split()
    assert row[:4] == ["0.7500", "73", "2", "1.14"]
    assert float(row[4]) == pytest.approx(55e9 / (64 * 11_010_048), rel=0.01)


def test_inspect_counts_the_same_experts_in_files_that_stack_them(tmp_path, speaking):
    from safetensors.torch import load_file, save_file

    merged = {}
    for path in sorted(speaking.glob("*.safetensors")):
        merged |= load_file(path)
    stacked = {name: tensor for name, tensor in merged.items() if ".experts." not in name}
    for layer in range(TINY.layers):
        stem = f"model.layers.{layer}.block_sparse_moe.experts."
        first, second, third = (
            torch.stack([merged[f"{stem}{expert}.w{number}.weight"] for expert in range(TINY.experts)]) for number in (1, 2, 3)
        )
        stacked[f"model.layers.{layer}.mlp.experts.gate_up_proj"] = torch.cat([first, third], 1).contiguous()
        stacked[f"model.layers.{layer}.mlp.experts.down_proj"] = second.contiguous()
    save_file(stacked, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((speaking / "config.json").read_text())
    one, other = inspect_model.inspect_folder(speaking), inspect_model.inspect_folder(tmp_path)
    assert one.experts == other.experts and one.total_bytes == other.total_bytes
    assert one.experts.expert_bytes == 2 * TINY.expert_values


def test_inspect_counts_of_any_family_what_slots_would_hold(checkpoint):
    found = inspect_model.inspect_folder(checkpoint("deepseek_v3"))
    assert found.experts is not None and found.no_slots == ""
    sizes = found.experts  # the first layer is dense, and shared experts are dense weights
    assert (sizes.moe_layers, sizes.experts_per_layer, sizes.top_k, sizes.total_experts) == (2, 8, 3, 16)
    assert sizes.expert_bytes == 3 * 32 * 24 * 4 and sizes.total_bytes == 16 * sizes.expert_bytes
    assert found.dense_bytes == found.total_bytes - sizes.total_bytes


def test_inspect_counts_a_quantised_checkpoint_in_the_dtype_it_is_loaded_in(tmp_path):
    from test_quantised import mxfp4_checkpoint

    sizes = inspect_model.inspect_folder(mxfp4_checkpoint(tmp_path / "mxfp4")).experts
    assert sizes is not None and sizes.total_bytes == 10 * (64 * 64 * 2 + 256 + 32 * 64 * 2 + 256)  # biases padded


def test_inspect_says_why_slots_cannot_serve_a_model(tmp_path):
    import transformers

    config = transformers.JetMoeConfig(
        vocab_size=64, hidden_size=32, num_hidden_layers=2, num_key_value_heads=2, kv_channels=8, intermediate_size=16,
        num_local_experts=4,
    )  # fmt: skip
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    result = command("inspect", tmp_path)
    assert result.exit_code == 0 and "No slots" in result.output and "experts contract" in result.output


@pytest.mark.parametrize(("experts_held", "fits"), [(1, False), (2, True), (3, True)])
def test_inspect_refuses_a_budget_below_one_tokens_experts_and_names_the_smallest(phi_tiny, experts_held, fits):
    budget = (experts_held * 11_010_048 + 1) / 2**30
    result = command("inspect", phi_tiny, "--expert-cache-gb", f"{budget:.9f}")
    assert (result.exit_code == 0) is fits
    if not fits:
        assert "needs 22020096 B" in result.output and "at least 0.021" in result.output


def test_inspect_of_a_card_leaves_room_for_dense_weights_and_the_rest(phi_tiny):
    result = command("inspect", phi_tiny, "--vram-gb", 4)
    assert result.exit_code == 0, result.output
    slots = int(result.output.strip().splitlines()[-1].split()[1])
    assert 64 < slots < (4 * 2**30 - 1_873_295_872) // 11_010_048


def test_inspect_of_a_card_counts_as_the_auto_budget_does(phi_tiny):
    from transformers import AutoConfig

    from airllm.experts.assembly import kv_cache_bytes, workspace_bytes
    from airllm.experts.layout import ExpertLayout, ModelLayout

    found, config = inspect_model.inspect_folder(phi_tiny), AutoConfig.from_pretrained(phi_tiny)
    shapes = [(896, 4096), (4096, 448)]
    layout = ModelLayout.of(ExpertLayout.from_shapes([(str(shape), shape, torch.bfloat16) for shape in shapes], 16), 32)
    for tokens in (1, 512, 4096):
        assert found.kv_bytes(tokens) == kv_cache_bytes(config, tokens, layout)
        assert found.workspace_bytes(tokens) == workspace_bytes(config, tokens, layout)


def test_inspect_of_a_card_that_is_too_small_says_so(phi_tiny):
    result = command("inspect", phi_tiny, "--vram-gb", 1.5)
    assert result.exit_code == 1 and "22020096 B for 2 experts" in result.output and "too small" in result.output
    assert "-" not in result.output.partition("too small")[0].rpartition(" is ")[2], "a lack is not a negative number"


def test_inspect_of_a_card_that_is_too_small_names_a_resident_gb_that_fits_it(phi_tiny):
    result = command("inspect", phi_tiny, "--vram-gb", 1.5)
    found = re.search(r"--resident-gb (\S+) would do: (\d+) of 32 layers stay, and (\d+) B a token are streamed", result.output)
    assert found is not None, result.output
    fits = command("inspect", phi_tiny, "--vram-gb", 1.5, "--resident-gb", found[1])
    assert fits.exit_code == 0, fits.output
    assert f"dense, streamed {found[3]} B" in fits.output and f"{found[2]} of 32 layers" in fits.output
    assert int(fits.output.strip().splitlines()[-1].split()[1]) >= 2
    smaller = command("inspect", phi_tiny, "--vram-gb", 1.2)
    assert smaller.exit_code == 1 and "even --resident-gb 0 does not fit" in smaller.output


def test_every_resident_gb_that_inspect_names_leaves_room_for_one_tokens_experts(phi_tiny):
    found, one_token = inspect_model.inspect_folder(phi_tiny), 2 * 11_010_048
    whole = plan_dense(found.dense_layers, "all")
    named = set()
    for vram in range(1_620_000_000, 2_600_000_000, 19_000_000):
        with pytest.raises(BudgetError) as caught:
            inspect_model.budget_for_card(found, whole, vram, 512)
        text = str(caught.value).partition("--resident-gb ")[2].split()[0]
        named.add(text)
        held = plan_dense(found.dense_layers, int(float(text) * 2**30))
        assert one_token <= inspect_model.budget_for_card(found, held, vram, 512) < one_token + found.dense_layers[0]
    assert len(named) > 5


@pytest.fixture
def dense_model(tmp_path):
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(hidden_size=64, intermediate_size=96, num_hidden_layers=6, num_attention_heads=4, vocab_size=256)
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(tmp_path / "dense")
    return tmp_path / "dense"


def test_inspect_says_of_a_dense_model_what_fits_a_card(dense_model):
    found = inspect_model.inspect_folder(dense_model)
    layer = found.dense_layers[0]
    beside = sum(inspect_model.beside_weights(found, 512).values()) + found.rest_bytes
    for layers_of_room, stay in ((3, 0), (4, 1), (5, 2), (6, 6), (60, 6)):
        card = (beside + layers_of_room * layer + 1) / 2**30
        result = command("inspect", dense_model, "--vram-gb", f"{card:.12f}")
        assert result.exit_code == 0, result.output
        named = re.search(r"--resident-gb (\S+) fits", result.output)[1]
        assert plan_dense(found.dense_layers, "all" if named == "all" else int(float(named) * 2**30)).resident == stay
    result = command("inspect", dense_model, "--vram-gb", f"{(beside + 3 * layer - 1) / 2**30:.12f}")
    assert result.exit_code == 1 and "too small to stream this model" in result.output
    assert f"{beside + 3 * layer} B" in result.output


def test_inspect_reads_a_split_whose_original_is_gone(dense_model):
    before = inspect_model.inspect_folder(dense_model)
    find_or_create_split(dense_model, delete_original=True)
    assert not list(dense_model.glob("*.safetensors"))
    after = inspect_model.inspect_folder(dense_model)
    assert after.dense_layers == before.dense_layers
    assert (after.rest_bytes, after.total_bytes) == (before.rest_bytes, before.total_bytes)
    next(dense_model.glob("splitted_model/*.safetensors")).unlink()
    with pytest.raises(CheckpointError):
        inspect_model.inspect_folder(dense_model)


def test_inspect_of_a_damaged_checkpoint_with_a_split_refuses_as_loading_does(dense_model):
    find_or_create_split(dense_model)
    weights = next(dense_model.glob("*.safetensors"))
    weights.write_bytes(weights.read_bytes()[:-8])
    with pytest.raises(CheckpointError) as loading:
        airllm.AutoModel.from_pretrained(dense_model, device="cpu")
    with pytest.raises(CheckpointError) as inspecting:
        inspect_model.inspect_folder(dense_model)
    assert str(inspecting.value) == str(loading.value)


def test_inspect_of_a_name_on_the_hub_says_to_download_it():
    result = command("inspect", "Qwen/Qwen3-30B-A3B")
    assert result.exit_code == 1 and "no folder here" in result.output and "hf download" in result.output


@pytest.mark.parametrize("slots", [2, 12, 63, 64, 73, 512])
@pytest.mark.parametrize("expert_bytes", [61_440, 11_010_048, 157_286_400])
def test_a_budget_that_inspect_prints_gives_the_slots_beside_it(slots, expert_bytes):
    plan = plan_slots(budget_bytes=slots * expert_bytes, expert_bytes=expert_bytes, total_experts=512, top_k=2)
    text = budget_gib(plan)
    again = plan_slots(budget_bytes=int(float(text) * 2**30), expert_bytes=expert_bytes, total_experts=512, top_k=2)
    assert again.slots == slots and len(text) < 12


def test_inspect_counts_streamed_dense_weights_against_the_link(phi_tiny):
    layers = inspect_model.inspect_folder(phi_tiny).dense_layers
    assert len(layers) == 32 and len(set(layers)) == 1
    held = 8.5 * layers[0] / 2**30
    result = command("inspect", phi_tiny, "--expert-cache-gb", 0.75, "--link-gbs", 55, "--resident-gb", held)
    assert result.exit_code == 0, result.output
    assert f"dense, streamed {24 * layers[0]} B" in result.output
    assert f"3 blocks of {layers[0] / 2**20:.3g} MiB" in result.output
    row = result.output.strip().splitlines()[-1].split()
    assert float(row[4]) == pytest.approx(55e9 / (64 * 11_010_048 + 24 * layers[0]), rel=0.01)


def test_inspect_of_a_dense_model_says_what_stays(checkpoint):
    folder = checkpoint("llama", num_hidden_layers=7)
    layers = inspect_model.inspect_folder(folder).dense_layers
    none, two, kept = (command("inspect", folder, *held) for held in ((), ("--resident-gb", 2.1 * layers[0] / 2**30), ALL))
    assert "0 of 7 layers stay" in none.output and "2 of 7 layers stay" in two.output
    assert float(two.output.partition("allow ")[2].split()[0]) == pytest.approx(25e9 / (5 * layers[0]), rel=0.01)
    assert kept.exit_code == 0 and "nothing crosses the link" in kept.output


@pytest.mark.parametrize(
    ("given", "message"), [("some", "--resident-gb takes a number of GiB or all"), ("-1", "--resident-gb must")]
)
def test_a_wrong_resident_gb_is_refused_on_one_line(phi_tiny, given, message):
    for asked in (["inspect", phi_tiny], ["generate", phi_tiny, "--prompt", "x", "--device", "cpu"]):
        result = command(*asked, "--resident-gb", given)
        assert result.exit_code == 1 and message in result.output and "Traceback" not in result.output


def test_an_empty_prompt_is_refused_before_anything_is_loaded(phi_tiny):
    for asked in (["generate", phi_tiny, "--prompt", ""], ["demo", "--prompt", ""]):
        result = command(*asked)
        assert result.exit_code == 1 and "--prompt is empty" in result.output


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_the_demo_on_a_device_that_is_not_there_says_so():
    result = command("demo", "--device", "cuda:0")
    assert result.exit_code == 1 and "device" in result.output and "Traceback" not in result.output


def test_a_budget_that_holds_every_expert_has_no_misses_to_limit_it(phi_tiny):
    found = inspect_model.inspect_folder(phi_tiny)
    outlook = inspect_model.slot_outlook(found.experts, 2**40, 25e9)
    assert outlook.plan.slots == 512 and outlook.tokens_per_s_estimated is None
    half = inspect_model.slot_outlook(found.experts, 256 * 11_010_048, 25e9)
    assert half.tokens_per_s_estimated == pytest.approx(2 * half.tokens_per_s_all_missed)


def test_inspect_of_a_dense_model_streams_and_refuses_slots(dense):
    plain = command("inspect", dense)
    assert plain.exit_code == 0 and "dense model" in plain.output and "streaming" in plain.output
    slots = command("inspect", dense, "--expert-cache-gb", 1)
    assert slots.exit_code == 1 and "mixture of experts" in slots.output and "Traceback" not in slots.output


def test_inspect_of_a_cut_file_names_it_on_one_line(tmp_path, dense):
    for path in dense.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    whole = (tmp_path / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(whole[:-1])
    result = command("inspect", tmp_path)
    assert result.exit_code == 1 and "model.safetensors" in result.output
    assert len(result.output.strip().splitlines()) == 1


def test_inspect_of_a_folder_that_is_no_checkpoint_says_what_is_missing(tmp_path):
    result = command("inspect", tmp_path)
    assert result.exit_code == 1 and "no config.json" in result.output


def test_inspect_takes_a_budget_or_a_card_but_not_both(phi_tiny):
    result = command("inspect", phi_tiny, "--expert-cache-gb", 1, "--vram-gb", 4)
    assert result.exit_code == 2 and "not both" in result.output


def test_inspect_of_a_checkpoint_that_lacks_an_expert_names_it(tmp_path, speaking):
    from safetensors.torch import load_file, save_file

    merged = {}
    for path in sorted(speaking.glob("*.safetensors")):
        merged |= load_file(path)
    lacking = {name: tensor for name, tensor in merged.items() if ".layers.1.block_sparse_moe.experts.7." not in name}
    save_file(lacking, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((speaking / "config.json").read_text())
    result = command("inspect", tmp_path)
    assert result.exit_code == 1 and "layers.1.block_sparse_moe.experts.7" in result.output and "Traceback" not in result.output


# ---- generate


def transformers_text(folder, prompt, tokens):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, experts_implementation="eager")
    inputs = tokenizer(prompt, return_tensors="pt")
    output = model.generate(**inputs, max_new_tokens=tokens)
    return tokenizer.decode(output[0][inputs["input_ids"].shape[1] :], skip_special_tokens=True)


ALL = ("--resident-gb", "all")
HELD = ("--expert-cache-gb", "0.001", "--resident-gb", "0.0001")


@pytest.mark.parametrize("way", [(), ("--expert-cache-gb", "0.001"), ("--expert-cache-gb", "0.001", "--stream"), HELD])
def test_generate_prints_what_transformers_would(speaking, way):
    expected = transformers_text(speaking, "In the beginning", 12)
    arguments = ["--prompt", "In the beginning", "--max-new-tokens", 12, "--device", "cpu", "--dtype", "float32"]
    result = command("generate", speaking, *arguments, *way)
    assert result.exit_code == 0, result.output
    assert result.stdout.rstrip("\n") == expected.rstrip("\n")
    assert "tokens in" in result.stderr
    assert ("hit rate" in result.stderr) is bool(way)
    assert ("dense weights streamed" in result.stderr) is (way == HELD)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--expert-cache-gb", "plenty"), "takes a number of GiB or auto"),
        (("--expert-cache-gb", "-1"), "--expert-cache-gb must be a finite number"),
        (("--dtype", "float17"), "--dtype must be"),
    ],
)
def test_generate_refuses_on_one_line_with_exit_code_1(speaking, arguments, message):
    result = command("generate", speaking, "--prompt", "x", "--device", "cpu", *arguments)
    assert result.exit_code == 1 and message in result.stderr and "Traceback" not in result.output


def test_generate_says_that_a_tokenizer_is_missing(tmp_path):
    build(tmp_path, replace(TINY, layers=1), "float32")
    result = command("generate", tmp_path, "--prompt", "x", "--device", "cpu")
    assert result.exit_code == 1 and "no tokenizer files" in result.stderr


# ---- demo


@pytest.fixture
def small_demo(monkeypatch, speaking):
    monkeypatch.setattr(airllm, "tiny_model_path", lambda: speaking)


def test_the_demo_compares_four_ways_and_ends_well(small_demo):
    result = command("demo", "--max-new-tokens", 8, "--device", "cpu")
    assert result.exit_code == 0, result.output
    assert "8 tokens on CPU, the same in all four." in result.output
    for name in ("transformers, eager", "streaming", "slots, tight", "slots, all experts"):
        assert name in result.output


def test_the_demo_exits_1_and_names_the_way_that_differs(small_demo, monkeypatch):
    honest = demo.run_airllm

    def wrong(name, *arguments):
        row = honest(name, *arguments)
        return replace(row, tokens=[*row.tokens[:-1], -1]) if name == "streaming" else row

    monkeypatch.setattr(demo, "run_airllm", wrong)
    result = command("demo", "--max-new-tokens", 4, "--device", "cpu")
    assert result.exit_code == 1 and "DIFFERENT: streaming" in result.output


def test_the_demos_budgets_are_just_above_one_token_and_everything():
    sizes = inspect_model.ExpertSizes(32, 16, 512, 2, 11_010_048, 512 * 11_010_048, 4096)
    assert demo.demo_slots(sizes) == (73, 512)


def test_the_demo_on_the_built_in_model_gives_the_same_tokens_in_all_four():
    report = demo.run_demo(airllm.tiny_model_path(), "In the beginning God", 24, "cpu")
    assert report.identical and len(report.rows) == 4 and len(report.rows[0].tokens) == 24
    tight, whole = report.rows[2], report.rows[3]
    assert 0 < tight.hit_rate < whole.hit_rate <= 1
    assert tight.device_bytes < whole.device_bytes and tight.moved_bytes > whole.moved_bytes
    assert report.text.strip()


# ---- the clock


def test_the_clock_keeps_prompt_and_decoding_apart_and_does_not_count_its_callback():
    import time

    calls = []

    def slow():
        calls.append(1)
        time.sleep(0.2)

    clock = TokenClock(after_prompt=slow)
    clock.put(torch.tensor([[1, 2, 3]]))
    for token in (7, 8, 9):
        clock.put(torch.tensor([token]))
    clock.end()
    assert clock.tokens == [7, 8, 9] and len(clock.decode_s) == 2 and calls == [1]
    assert clock.prompt_s < 0.1 and sum(clock.decode_s) < 0.1


@pytest.mark.parametrize(
    ("message", "said"),
    [
        ("raise expert_cache_gb to at least 0.12", "raise --expert-cache-gb to at least 0.12"),
        ("expert_cache_gb=0.0 leaves", "--expert-cache-gb 0.0 leaves"),
        ("resident_gb must be finite", "--resident-gb must be finite"),
        ("or pass device='cpu'", "or pass --device cpu"),
        ("expert_cache_backend='slot' needs a GPU", "--expert-cache-gb needs a GPU"),
        ('use expert_cache_backend="none".', "leave --expert-cache-gb out."),
        ("more than max_seq_len=512: it", "more than --max-seq-len 512: it"),
        ("dtype must be one of", "--dtype must be one of"),
        ("and pass hf_token if", "and run `hf auth login` if"),
        ("--resident-gb 0.4 would do, the dtype stays", "--resident-gb 0.4 would do, the dtype stays"),
        ("expert_cache_engine='device': plain", "expert_cache_engine='device': plain"),
    ],
)
def test_messages_speak_the_words_of_the_shell(message, said):
    assert shell_words(message) == said


@pytest.mark.parametrize(
    ("name", "said"),
    [("airllm.slot_backend", "airllm: --expert-cache-gb: 4 slots"), ("elsewhere", "elsewhere: expert_cache_gb: 4 slots")],
)
def test_what_is_logged_speaks_the_words_of_the_shell_too(name, said, monkeypatch):
    level = logging.root.level
    monkeypatch.setattr(logging.root, "handlers", [])
    command("--verbose", "inspect", "nowhere")
    logging.root.setLevel(level)
    (handler,) = logging.root.handlers
    record = logging.LogRecord(name, logging.INFO, "", 0, "expert_cache_gb: %d slots", (4,), None)
    assert handler.format(record) == said


def test_inspect_looks_at_the_split_of_bin_files(dense_model):
    before = inspect_model.inspect_folder(dense_model)
    (file,) = dense_model.glob("*.safetensors")
    weights = load_file(file)
    file.unlink()
    torch.save(weights, dense_model / "pytorch_model.bin")
    refused = command("inspect", dense_model)
    assert refused.exit_code == 1 and "no split of them that is up to date" in refused.output
    find_or_create_split(dense_model)
    files = sorted(dense_model.rglob("*"))
    assert inspect_model.inspect_folder(dense_model).dense_layers == before.dense_layers
    torch.save({name: tensor + 1 for name, tensor in weights.items()}, dense_model / "pytorch_model.bin")
    assert command("inspect", dense_model).exit_code == 1, "a split of other weights"
    assert sorted(dense_model.rglob("*")) == files


def test_inspect_of_a_file_says_that_it_is_one(tmp_path):
    (tmp_path / "file.txt").write_text("x")
    result = command("inspect", tmp_path / "file.txt")
    assert result.exit_code == 1 and "is a file: give the folder" in result.output


def test_inspect_of_a_card_with_room_for_every_expert_prints_no_more_than_they_take(phi_tiny):
    (line,) = [line for line in command("inspect", phi_tiny, "--vram-gb", 24).output.splitlines() if " no misses" in line]
    assert line.split()[:2] == ["5.2500", "512"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there it is a device")
def test_a_device_may_be_a_number():
    result = command("generate", airllm.tiny_model_path(), "--prompt", "x", "--device", "0")
    assert result.exit_code == 1 and "device 'cuda:0' was asked for" in result.output


def test_no_budget_at_all_is_refused_in_the_words_of_the_shell(speaking):
    result = command("generate", speaking, "--prompt", "x", "--device", "cpu", "--expert-cache-gb", "0")
    assert result.exit_code == 1 and "leave it out to stream the model" in result.output
