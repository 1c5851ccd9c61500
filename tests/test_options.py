"""Every keyword is checked before anything else happens, and a refusal says what to write instead."""

from __future__ import annotations

import decimal
import fractions
import inspect
from pathlib import Path

import pytest
import torch

from airllm import options as module
from airllm.errors import DeviceError, OptionError
from airllm.options import DEFAULT_DEVICE, GIB, Options, parse_options


def cpu(**keywords: object) -> Options:
    return parse_options("a/model", **{"device": "cpu", **keywords})


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


def test_left_out_keywords_have_the_values_that_airllm_users_know() -> None:
    options = cpu()
    assert (options.dtype, options.max_seq_len, options.compression, options.hf_token) == (None, 512, None, None)
    assert (options.prefetching, options.delete_original, options.profiling_mode) == (True, False, False)
    assert options.layer_shards_saving_path is None
    assert (options.expert_cache_backend, options.expert_cache_bytes, options.resident_bytes) == ("none", None, 0)
    assert (options.trust_remote_code, options.local_files_only, options.pin_memory) == (False, False, True)


def test_none_means_left_out_for_every_keyword() -> None:
    assert cpu(**{name: None for name in module.KEYWORDS if name != "device"}) == cpu()


def test_every_field_but_the_derived_ones_is_a_keyword() -> None:
    derived = {"model", "device_was_default", "resident_bytes", "expert_cache_bytes"}
    fields = set(inspect.signature(Options).parameters) - derived | {"resident_gb", "expert_cache_gb"}
    assert fields == set(module.KEYWORDS)


@pytest.mark.parametrize(
    ("word", "near"),
    [
        ("expert_cache_bg", "expert_cache_gb"),
        ("expert_cache_backen", "expert_cache_backend"),
        ("Device", "device"),
        ("compresion", "compression"),
        ("prefetch", "prefetching"),
        ("max_seq_length", "max_seq_len"),
        ("layer_shard_saving_path", "layer_shards_saving_path"),
    ],
)
def test_a_misspelt_keyword_is_refused_with_its_near_match(word: str, near: str) -> None:
    with pytest.raises(OptionError, match=rf"{word}.*did you mean {near}\?"):
        cpu(**{word: 1})


def test_a_word_near_to_nothing_lists_the_keywords() -> None:
    with pytest.raises(OptionError, match="the keywords are device, dtype"):
        cpu(zzzz=1)


@pytest.mark.parametrize("word", ["device_map", "load_in_4bit", "quantization_config", "max_memory"])
def test_words_from_transformers_say_what_to_write_here(word: str) -> None:
    with pytest.raises(OptionError, match="="):
        cpu(**{word: "auto"})


def test_aliases_mean_the_same_and_may_not_disagree() -> None:
    assert cpu(token="t").hf_token == "t"
    assert cpu(torch_dtype="float16").dtype == torch.float16
    assert cpu(token="t", hf_token="t").hf_token == "t"
    with pytest.raises(OptionError, match="another word for hf_token"):
        cpu(token="a", hf_token="b")


@pytest.mark.parametrize("backend", ["slot", "Slot", "SLOT", " slot "])
def test_case_does_not_matter_for_the_backend(backend: str) -> None:
    options = cpu(expert_cache_backend=backend, expert_cache_gb=0.75)
    assert (options.expert_cache_backend, options.expert_cache_bytes) == ("slot", 805306368)


@pytest.mark.parametrize("backend", ["none", "None", None])
def test_the_backend_none_streams(backend: str | None) -> None:
    assert cpu(expert_cache_backend=backend).expert_cache_backend == "none"


@pytest.mark.parametrize("backend", ["slots", "", "lru", 1, True])
def test_other_backends_are_refused(backend: object) -> None:
    with pytest.raises(OptionError, match="expert_cache_backend must be 'none' or 'slot'"):
        cpu(expert_cache_backend=backend)


def test_a_near_backend_is_named() -> None:
    with pytest.raises(OptionError, match="did you mean 'slot'"):
        cpu(expert_cache_backend="slots")


@pytest.mark.parametrize("gib", [-1, -0.001, float("nan"), float("inf"), -float("inf"), "0.75", "much", True, [1], 1j, 10**400])
@pytest.mark.parametrize("name", ["expert_cache_gb", "resident_gb"])
def test_a_size_that_is_no_finite_number_from_zero_up_is_refused(name: str, gib: object) -> None:
    backend = {"expert_cache_backend": "slot"} if name == "expert_cache_gb" else {}
    with pytest.raises(OptionError, match=f"{name} must be a"):
        cpu(**{name: gib}, **backend)


def test_a_decimal_is_no_real_number_to_python_and_is_refused() -> None:
    with pytest.raises(OptionError, match="must be a number of GiB"):
        cpu(resident_gb=decimal.Decimal("1"))


def test_gib_become_bytes() -> None:
    assert cpu(resident_gb=2).resident_bytes == 2 * GIB
    assert cpu(resident_gb=fractions.Fraction(1, 2)).resident_bytes == GIB // 2
    assert cpu(resident_gb="All").resident_bytes == "all"
    assert cpu(expert_cache_backend="slot", expert_cache_gb="AUTO").expert_cache_bytes == "auto"
    assert cpu(expert_cache_backend="slot").expert_cache_bytes == "auto"


@pytest.mark.parametrize("gib", [0, 0.0, 1e-12])
def test_slots_with_a_budget_of_nothing_are_refused(gib: float) -> None:
    with pytest.raises(OptionError, match="leaves 0 bytes"):
        cpu(expert_cache_backend="slot", expert_cache_gb=gib)


@pytest.mark.parametrize("gib", [1, 0, "auto"])
@pytest.mark.parametrize("backend", [None, "none"])
def test_a_budget_without_slots_is_refused(gib: object, backend: str | None) -> None:
    with pytest.raises(OptionError, match="no effect without expert_cache_backend='slot'"):
        cpu(expert_cache_gb=gib, expert_cache_backend=backend)


@pytest.mark.parametrize("other", [{"compression": "4bit"}, {"delete_original": True}])
def test_slots_refuse_what_contradicts_them(other: dict[str, object]) -> None:
    with pytest.raises(OptionError, match=next(iter(other))):
        cpu(expert_cache_backend="slot", **other)


@pytest.mark.parametrize("value", ["2bit", "int8", 4, True, "4 bit"])
def test_an_unknown_compression_is_refused(value: object) -> None:
    with pytest.raises(OptionError, match="compression must be '4bit' or '8bit'"):
        cpu(compression=value)


def test_compression_ignores_case() -> None:
    assert cpu(compression="4Bit").compression == "4bit"


@pytest.mark.parametrize("value", ["float16", "fp16", "half", "torch.float16", "Float16", torch.float16])
def test_a_dtype_may_be_text(value: object) -> None:
    assert cpu(dtype=value).dtype is torch.float16


@pytest.mark.parametrize("value", ["float8", "int8", torch.int8, "fp", 16, torch.float8_e4m3fn])
def test_a_dtype_that_cannot_compute_is_refused_at_once(value: object) -> None:
    with pytest.raises(OptionError, match="dtype must be"):
        cpu(dtype=value)


def test_dtype_auto_is_the_checkpoints_own() -> None:
    assert cpu(dtype="auto").dtype is None


@pytest.mark.parametrize("value", [0, -1, 1.5, "512", True, float("inf")])
def test_max_seq_len_is_a_whole_number_of_tokens(value: object) -> None:
    with pytest.raises(OptionError, match="max_seq_len"):
        cpu(max_seq_len=value)


@pytest.mark.parametrize("name", sorted(module._FLAGS))
@pytest.mark.parametrize("value", [1, 0, "yes", "False"])
def test_a_flag_is_true_or_false(name: str, value: object) -> None:
    with pytest.raises(OptionError, match=f"{name} must be True or False"):
        cpu(**{name: value})


@pytest.mark.parametrize("value", ["", None, 3, ["a"]])
def test_a_model_is_a_text_or_a_path(value: object) -> None:
    with pytest.raises(OptionError, match="hub id or the path"):
        parse_options(value, device="cpu")  # type: ignore[arg-type]


def test_a_path_object_names_a_model_or_a_folder(tmp_path: Path) -> None:
    options = parse_options(tmp_path, device="cpu", layer_shards_saving_path=str(tmp_path), cache_dir=tmp_path)
    assert options.model == str(tmp_path)
    assert (options.layer_shards_saving_path, options.cache_dir) == (tmp_path, tmp_path)


def test_a_token_of_the_wrong_kind_is_not_printed() -> None:
    with pytest.raises(OptionError, match="hf_token") as refused:
        cpu(hf_token=["secret"])
    assert "secret" not in str(refused.value)


@pytest.mark.usefixtures("two_gpus")
@pytest.mark.parametrize(
    ("value", "index"),
    [("cuda:1", 1), ("CUDA:1", 1), ("cuda", 0), (1, 1), (0, 0), (torch.device("cuda:1"), 1), (torch.device("cuda"), 0)],
)
def test_every_way_to_name_a_gpu(value: object, index: int) -> None:
    options = parse_options("m", device=value)
    assert (options.device, options.device_was_default) == (torch.device("cuda", index), False)


@pytest.mark.usefixtures("two_gpus")
@pytest.mark.parametrize("value", [None, DEFAULT_DEVICE])
def test_the_default_device_is_the_first_gpu(value: object) -> None:
    options = parse_options("m", device=value)
    assert (options.device, options.device_was_default) == (torch.device("cuda", 0), True)


@pytest.mark.usefixtures("two_gpus")
@pytest.mark.parametrize("value", ["cuda:2", 2, torch.device("cuda", 7)])
def test_an_absent_gpu_is_refused_and_the_present_ones_named(value: object) -> None:
    with pytest.raises(DeviceError, match="'cuda:0', 'cuda:1' and 'cpu'"):
        parse_options("m", device=value)


@pytest.mark.parametrize("value", [-1, "gpu", "cuda:-1", "", True, 1.0, ["cuda"], "0"])
def test_what_is_no_device_is_refused(value: object) -> None:
    with pytest.raises(DeviceError):
        parse_options("m", device=value)


@pytest.mark.parametrize("value", ["mps", "meta", "xpu:0"])
def test_a_device_airllm_cannot_use_is_refused_by_name(value: str) -> None:
    with pytest.raises(DeviceError, match="not supported"):
        parse_options("m", device=value)


@pytest.mark.usefixtures("no_gpu")
@pytest.mark.parametrize("value", ["cuda:0", "cuda", 0])
def test_a_gpu_asked_for_where_there_is_none_says_what_to_do(value: object) -> None:
    with pytest.raises(DeviceError, match="device='cpu'"):
        parse_options("m", device=value)


@pytest.mark.usefixtures("no_gpu")
@pytest.mark.parametrize("keywords", [{}, {"device": None}, {"device": DEFAULT_DEVICE}])
def test_the_default_device_falls_back_to_the_cpu_with_one_warning(
    keywords: dict[str, object], caplog: pytest.LogCaptureFixture
) -> None:
    options = parse_options("m", **keywords)
    assert (options.device, options.device_was_default) == (torch.device("cpu"), True)
    assert len(caplog.records) == 1
    assert "device='cpu' silences this" in caplog.text


def test_an_explicit_cpu_is_silent(caplog: pytest.LogCaptureFixture) -> None:
    assert cpu().device == torch.device("cpu")
    assert not caplog.records


@pytest.mark.usefixtures("no_gpu")
def test_slots_without_a_gpu_are_refused_unless_the_cpu_was_named(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(DeviceError, match="needs a CUDA or ROCm device"):
        parse_options("m", expert_cache_backend="slot")
    assert cpu(expert_cache_backend="slot").device == torch.device("cpu")
    assert "slot backend on the CPU" in caplog.text


def test_options_are_frozen() -> None:
    with pytest.raises(AttributeError):
        cpu().max_seq_len = 5  # type: ignore[misc]


def test_every_refusal_is_a_value_error() -> None:
    assert issubclass(OptionError, ValueError) and issubclass(DeviceError, ValueError)


@pytest.mark.parametrize(("word", "choice"), [("expert_cache_engine", "plain"), ("expert_cache_policy", "lru")])
def test_choices_about_slots_need_slots(word, choice):
    assert getattr(parse_options("m", device="cpu", expert_cache_backend="slot", **{word: choice.upper()}), word) == choice
    assert getattr(parse_options("m", device="cpu", **{word: "auto"}), word) == "auto"
    with pytest.raises(OptionError, match="no effect without expert_cache_backend='slot'"):
        parse_options("m", device="cpu", **{word: choice})
    with pytest.raises(OptionError, match=f"{word} must be"):
        parse_options("m", device="cpu", expert_cache_backend="slot", **{word: "newest"})
