"""A streamed model does what the unmodified transformers model in the same process does, and says what it cannot do."""

from __future__ import annotations

import itertools
import logging
import shutil
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import families
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import CompileConfig, GenerationConfig

from airllm.airllm_base import AirLLMBaseModel
from airllm.compression import open_compressed
from airllm.errors import AirLLMError, CheckpointError, NonFiniteError, OptionError, UnsupportedModelError

FAMILIES = (
    "llama", "gpt2", "gpt_neox", "opt", "phi", "mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "deepseek_v3", "phimoe",
    "gemma2",
)  # fmt: skip
pytestmark = pytest.mark.usefixtures("one_thread")
LAYERS = 5  # more than the ring has blocks, so that every block is filled again and again


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """These models are so small that a second thread costs more than it brings."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def folder_of(checkpoint: Callable[..., Path]) -> Callable[..., Path]:
    """The family's checkpoint with LAYERS layers."""

    def build(family: str, **options: Any) -> Path:
        return checkpoint(family, **{"n_layer" if family == "gpt2" else "num_hidden_layers": LAYERS}, **options)

    return build


class Pair:
    """Ours and the oracle, on one device, and what both are asked."""

    def __init__(self, folder: Path, device: str, **keywords: Any) -> None:
        self.ours = AirLLMBaseModel(folder, device=device, **keywords)
        self.oracle = families.oracle(folder, experts=None).to(device)

    def same(self, ours: torch.Tensor, oracle: torch.Tensor) -> bool:
        """To 1e-5: a matrix library may sum in another order for another address, on a CPU as on a GPU."""
        return torch.allclose(ours, oracle, atol=1e-5, rtol=1e-5)

    def generate(self, batch: int = 3, **keywords: Any) -> tuple[Any, Any]:
        """Eight tokens of both after a left-padded batch."""
        ids, mask = padded(self.oracle, batch)
        answers = []
        for model in (self.ours, self.oracle):
            torch.manual_seed(5)
            device = self.oracle.device
            answers.append(
                model.generate(ids.to(device), attention_mask=mask.to(device), max_new_tokens=8, **keywords)
            )
        return answers[0], answers[1]


def padded(model: Any, batch: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Prompts of 9, 7 and 4 tokens, padded on the left."""
    ids = families.prompt(model, 9, batch)
    mask = torch.ones_like(ids)
    for row, pads in enumerate((0, 2, 5)[:batch]):
        mask[row, :pads] = 0
        ids[row, :pads] = 0
    return ids, mask


@pytest.fixture
def llama(folder_of: Callable[..., Path], device: str) -> Iterator[Pair]:
    pair = Pair(folder_of("llama"), device)
    yield pair
    pair.ours.close()


# --- the same answers -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_gives_the_oracles_logits_and_tokens(
    family: str, folder_of: Callable[..., Path], device: str
) -> None:
    pair = Pair(folder_of(family), device)
    ids = families.prompt(pair.oracle, 9, 2).to(device)
    with torch.no_grad():
        for _ in range(2):  # the second forward begins with layers that were read ahead
            assert pair.same(pair.ours(ids).logits, pair.oracle(ids).logits)
    ours, oracle = pair.generate()
    assert torch.equal(ours, oracle)
    assert pair.ours.get_stream_stats()["layer_loads"] >= 9 * LAYERS
    pair.ours.close()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("family", ["llama", "phimoe"])
def test_half_precision_is_the_checkpoints_own(
    family: str, dtype: torch.dtype, folder_of: Callable[..., Path]
) -> None:
    pair = Pair(folder_of(family, dtype=dtype), "cpu")
    assert pair.ours.dtype == pair.oracle.dtype == dtype
    ids = families.prompt(pair.oracle, 9)
    with torch.no_grad():
        assert torch.allclose(pair.ours(ids).logits, pair.oracle(ids).logits, atol=0.05)
    ours, oracle = pair.generate()
    assert torch.equal(ours, oracle)


def test_a_dtype_asked_for_is_cast_to_while_streaming(folder_of: Callable[..., Path]) -> None:
    folder = folder_of("mixtral", dtype=torch.bfloat16)
    ours = AirLLMBaseModel(folder, device="cpu", dtype="float32")
    oracle = families.oracle(folder, torch.float32, experts=None)
    ids = families.prompt(oracle, 9)
    with torch.no_grad():
        assert torch.allclose(ours(ids).logits, oracle(ids).logits, atol=1e-5)


@pytest.mark.parametrize(
    ("family", "keywords"),
    [
        ("llama", {"do_sample": True, "temperature": 0.8, "top_k": 20}),
        ("mixtral", {"do_sample": True, "num_return_sequences": 2}),
        ("llama", {"num_beams": 3}),
        ("mixtral", {"num_beams": 2, "do_sample": True}),
        ("phimoe", {"use_cache": False}),
        ("llama", {"cache_implementation": "static"}),
        ("llama", {"repetition_penalty": 1.3, "no_repeat_ngram_size": 2}),
    ],
)
def test_every_way_to_generate_gives_the_oracles_tokens(
    family: str, keywords: dict[str, Any], folder_of: Callable[..., Path], device: str
) -> None:
    pair = Pair(folder_of(family), device)
    ours, oracle = pair.generate(**keywords)
    assert torch.equal(ours, oracle)
    pair.ours.close()


def test_a_static_cache_does_not_compile_the_forward(llama: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("compiled code cannot follow weights that move")

    monkeypatch.setattr(torch, "compile", refuse)
    everywhere = CompileConfig()
    everywhere._compile_all_devices = True  # else transformers compiles on GPUs only
    config = GenerationConfig(
        cache_implementation="static", max_new_tokens=3, pad_token_id=0, compile_config=everywhere
    )
    ids = families.prompt(llama.oracle, 4)
    with pytest.raises(AssertionError, match="cannot follow"):
        llama.oracle.generate(ids.to(llama.oracle.device), generation_config=config)
    llama.ours.generate(ids, generation_config=config)
    assert config.disable_compile is None, "the caller's own object must stay as it was"
    llama.ours.model.generate(ids.to(llama.oracle.device), cache_implementation="static", max_new_tokens=3)
    llama.ours.generation_config = config
    llama.ours.generate(ids, max_new_tokens=3, cache_implementation="static")


def test_a_streamer_sees_the_oracles_tokens(llama: Pair) -> None:
    class Collect:
        def __init__(self) -> None:
            self.seen: list[int] = []
            self.ended = False

        def put(self, value: torch.Tensor) -> None:
            self.seen += value.flatten().tolist()

        def end(self) -> None:
            self.ended = True

    ours, oracle = Collect(), Collect()
    ids = families.prompt(llama.oracle, 6)
    llama.ours.generate(ids, max_new_tokens=6, streamer=ours)
    llama.oracle.generate(ids.to(llama.oracle.device), max_new_tokens=6, streamer=oracle)
    assert ours.seen == oracle.seen and ours.ended


def test_assisted_generation_with_plain_and_streamed_assistants(llama: Pair, checkpoint: Callable[..., Path]) -> None:
    small = checkpoint("llama", num_hidden_layers=1, seed=5)
    plain = families.oracle(small).to(llama.oracle.device)
    _, alone = llama.generate(batch=1)
    streamed = AirLLMBaseModel(small, device=str(llama.oracle.device))
    for assistant in (plain, streamed):
        ids, mask = padded(llama.oracle, 1)
        ours = llama.ours.generate(ids, attention_mask=mask, max_new_tokens=8, assistant_model=assistant)
        assert torch.equal(ours, alone)
    theirs = llama.oracle.generate(ids.to(llama.oracle.device), max_new_tokens=8, assistant_model=streamed)
    assert torch.equal(theirs, alone)
    ours, oracle = llama.generate(batch=1, prompt_lookup_num_tokens=2)
    assert torch.equal(ours, oracle)
    streamed.close()


def test_ids_of_another_shape_are_refused_with_their_remedy(llama: Pair) -> None:
    ids = families.prompt(llama.oracle, 6)
    for call in ({"input_ids": ids[0]}, {"inputs": ids[0]}):
        with pytest.raises(OptionError, match=r"these have \[6\]: give ids\[None\]"):
            llama.ours.generate(**call, max_new_tokens=2)
    with pytest.raises(OptionError, match=r"these have \[1, 1, 6\]$"):
        llama.ours.generate(ids[None], max_new_tokens=2)
    embedded = llama.oracle.get_input_embeddings()(ids.to(llama.oracle.device)).detach()
    assert llama.ours.generate(inputs_embeds=embedded, max_new_tokens=2).shape == (1, 2)


def test_hidden_states_and_scores_are_the_oracles(llama: Pair) -> None:
    ours, oracle = llama.generate(
        output_hidden_states=True, output_scores=True, return_dict_in_generate=True, output_attentions=False
    )
    assert torch.equal(ours.sequences, oracle.sequences)
    for one, other in zip(ours.hidden_states, oracle.hidden_states, strict=True):
        assert all(llama.same(a, b) for a, b in zip(one, other, strict=True))
    assert all(llama.same(a, b) for a, b in zip(ours.scores, oracle.scores, strict=True))


def test_a_cache_carried_from_call_to_call_by_hand_is_right(llama: Pair) -> None:
    ids = families.prompt(llama.oracle, 8).to(llama.oracle.device)
    first = llama.ours(ids[:, :5], use_cache=True)
    second = llama.ours(ids[:, 5:], past_key_values=first.past_key_values, use_cache=True)
    with torch.no_grad():
        begun = llama.oracle(ids[:, :5], use_cache=True)
        whole = llama.oracle(ids[:, 5:], past_key_values=begun.past_key_values, use_cache=True)
    assert llama.same(second.logits, whole.logits)


def test_each_row_of_a_padded_batch_equals_its_own_run(llama: Pair) -> None:
    ids, mask = padded(llama.oracle, 3)
    together = llama.ours.generate(ids, attention_mask=mask, max_new_tokens=6, do_sample=False)
    for row in range(3):
        own = ids[row : row + 1, mask[row].bool()]
        alone = llama.ours.generate(own, attention_mask=torch.ones_like(own), max_new_tokens=6, do_sample=False)
        assert torch.equal(together[row, ids.shape[1] :], alone[0, own.shape[1] :])


# --- how much stays, and what is read ---------------------------------------------------------------------------------


@pytest.mark.parametrize("resident", ["all", 1])
def test_a_model_that_fits_is_read_once(resident: object, folder_of: Callable[..., Path], device: str) -> None:
    pair = Pair(folder_of("mixtral"), device, resident_gb=resident)
    read = pair.ours.get_stream_stats()["bytes_read"]
    ours, oracle = pair.generate()
    assert torch.equal(ours, oracle)
    stats = pair.ours.get_stream_stats()
    assert stats["bytes_read"] == read, "nothing may be read once everything is there"
    assert (stats["streamed_layers"], stats["ring_bytes"], stats["staging_bytes"]) == (0, 0, 0)
    pair.ours.close()


def test_the_first_layers_that_fit_stay(folder_of: Callable[..., Path], device: str) -> None:
    streamed = AirLLMBaseModel(folder_of("llama"), device="cpu")
    layer = streamed.get_stream_stats()["streamed_bytes"] // LAYERS
    for gib, expected in ((2 * layer / 2**30, 2), ((2 * layer - 1) / 2**30, 1)):
        pair = Pair(folder_of("llama"), device, resident_gb=gib)
        stats = pair.ours.get_stream_stats()
        assert (stats["resident_layers"], stats["resident_bytes"]) == (expected, expected * layer)
        ours, oracle = pair.generate()
        assert torch.equal(ours, oracle)
        pair.ours.close()


def test_without_prefetching_one_block_does(folder_of: Callable[..., Path], device: str) -> None:
    pair = Pair(folder_of("llama"), device, prefetching=False)
    ours, oracle = pair.generate()
    assert torch.equal(ours, oracle)
    assert pair.ours.get_stream_stats()["ring_blocks"] == 1
    pair.ours.close()


def test_each_token_reads_each_layer_once(folder_of: Callable[..., Path]) -> None:
    ours = AirLLMBaseModel(folder_of("llama"), device="cpu")
    ids = families.prompt(ours, 5)
    loads = []
    for _ in range(5):
        ours(ids)
        for fill in ours._streamer._fills:  # what is read ahead for the next forward counts for that one
            fill.result(30)
        loads.append(ours.get_stream_stats()["layer_loads"])
    assert [after - before for before, after in itertools.pairwise(loads)] == [LAYERS] * 4
    ours.close()


def test_sharded_and_single_files_give_the_same(folder_of: Callable[..., Path]) -> None:
    one, many = (AirLLMBaseModel(folder_of("llama", shards=n), device="cpu") for n in (1, 3))
    ids = families.prompt(one, 6)
    assert torch.equal(one(ids).logits, many(ids).logits)


# --- splits and other files -------------------------------------------------------------------------------------------


def test_a_split_is_written_only_when_asked_for(folder_of: Callable[..., Path], tmp_path: Path) -> None:
    folder = folder_of("mixtral")
    names = sorted(path.name for path in folder.iterdir())
    plain = AirLLMBaseModel(folder, device="cpu")
    assert plain.checkpoint_path == folder
    split = AirLLMBaseModel(folder, device="cpu", layer_shards_saving_path=tmp_path)
    assert split.checkpoint_path == tmp_path / "splitted_model"
    ids = families.prompt(plain, 6)
    assert torch.equal(plain(ids).logits, split(ids).logits)
    assert sorted(path.name for path in folder.iterdir()) == names, "the checkpoint's own folder is left alone"


def test_a_folder_whose_originals_were_deleted_loads_its_split(folder_of: Callable[..., Path], tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(folder_of("llama"), folder)
    expected = AirLLMBaseModel(folder, device="cpu")(torch.tensor([[5, 6, 7]])).logits
    for keywords in ({"delete_original": True}, {}):
        model = AirLLMBaseModel(folder, device="cpu", **keywords)
        assert torch.equal(model(torch.tensor([[5, 6, 7]])).logits, expected)
    assert not list(folder.glob("*.safetensors"))


def test_a_bin_checkpoint_is_split_and_streamed(folder_of: Callable[..., Path], tmp_path: Path) -> None:
    source = folder_of("llama")
    folder = tmp_path / "model"
    shutil.copytree(source, folder)
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    ids = torch.tensor([[5, 6, 7]])
    expected = AirLLMBaseModel(source, device="cpu")(ids).logits
    assert torch.equal(AirLLMBaseModel(folder, device="cpu")(ids).logits, expected)


def test_a_damaged_file_is_refused_before_anything_is_allocated(
    folder_of: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(folder_of("llama"), tmp_path / "model")
    file = tmp_path / "model" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    monkeypatch.setattr("airllm.airllm_base.build_skeleton", None)
    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        AirLLMBaseModel(tmp_path / "model", device="cpu")


def test_compression_without_bitsandbytes_says_what_to_install(
    folder_of: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    with pytest.raises(OptionError, match="bitsandbytes"):
        AirLLMBaseModel(folder_of("llama"), device="cpu", compression="4bit", layer_shards_saving_path=tmp_path)


@pytest.mark.parametrize(
    ("family", "kind", "dtype"),
    [("llama", "4bit", torch.float16), ("llama", "8bit", torch.float16), ("mixtral", "4bit", torch.float32)],
)
def test_a_compressed_model_computes_with_exactly_the_unpacked_weights(
    family: str, kind: str, dtype: torch.dtype, folder_of: Callable[..., Path], tmp_path: Path
) -> None:
    pytest.importorskip("bitsandbytes", reason="compression needs the extra bitsandbytes")
    folder = folder_of(family, dtype=torch.float16)
    ours = AirLLMBaseModel(folder, device="cpu", dtype=dtype, compression=kind, layer_shards_saving_path=tmp_path)
    assert ours.checkpoint_path == tmp_path / f"splitted_model.{kind}"
    index, reader = open_compressed(ours.checkpoint_path)
    unpacked = tmp_path / "unpacked"
    unpacked.mkdir()
    shutil.copy(folder / "config.json", unpacked)
    save_file({name: reader.read(entry) for name, entry in index.items()}, unpacked / "model.safetensors")
    oracle, original = (families.oracle(each, dtype, experts=None) for each in (unpacked, folder))
    ids = families.prompt(oracle, 9)
    rounding = 1e-5 if dtype is torch.float32 else 0.01
    with torch.no_grad():
        assert torch.allclose(ours(ids).logits, oracle(ids).logits, atol=rounding)
        assert not torch.allclose(ours(ids).logits, original(ids).logits, atol=3 * rounding)


# --- the interface ----------------------------------------------------------------------------------------------------


def test_the_attributes_airllm_users_know_are_there(folder_of: Callable[..., Path]) -> None:
    folder = folder_of("llama")
    model = AirLLMBaseModel(str(folder), device="cpu", profiling_mode=True)
    assert model.model_local_path == model.checkpoint_path == folder
    assert (model.device, model.running_device) == (torch.device("cpu"), "cpu")
    assert model.dtype == model.running_dtype == torch.float32
    assert (model.max_seq_len, model.prefetching, model.compression) == (512, True, None)
    assert model.config.model_type == "llama"
    assert model.generation_config is model.model.generation_config
    assert model.layer_names_dict == {
        "embed": "model.embed_tokens", "layer_prefix": "model.layers", "norm": "model.norm", "lm_head": "lm_head",
    }  # fmt: skip
    model(torch.tensor([[5, 6]]))
    assert set(model.profiler.profiling_time_dict) == {"forward", "wait_for_layers", "compute", "read_and_copy"}
    assert AirLLMBaseModel(folder, device="cpu").profiler is None


@pytest.mark.parametrize(
    ("family", "layers", "norm"),
    [
        ("gpt2", "transformer.h", "transformer.ln_f"),
        ("opt", "model.decoder.layers", "model.decoder.final_layer_norm"),
        ("gpt_neox", "gpt_neox.layers", "gpt_neox.final_layer_norm"),
    ],
)
def test_layer_names_follow_the_model(family: str, layers: str, norm: str, folder_of: Callable[..., Path]) -> None:
    names = AirLLMBaseModel(folder_of(family), device="cpu").layer_names_dict
    assert (names["layer_prefix"], names["norm"]) == (layers, norm)


def test_what_the_class_lacks_is_the_models(llama: Pair) -> None:
    assert llama.ours.get_input_embeddings() is llama.ours.model.get_input_embeddings()
    with pytest.raises(AttributeError, match="no_such_thing"):
        _ = llama.ours.no_such_thing


def test_inputs_are_moved_to_the_device(llama: Pair) -> None:
    ids = families.prompt(llama.oracle, 4)
    assert ids.device.type == "cpu"
    assert llama.ours(ids).logits.device == llama.oracle.device
    assert llama.ours.generate(inputs=ids, max_new_tokens=2).device == llama.oracle.device


def test_a_missing_tokenizer_leaves_the_model_usable(
    folder_of: Callable[..., Path], caplog: pytest.LogCaptureFixture
) -> None:
    for family in ("llama", "opt"):  # transformers makes OPT's tokenizer out of nothing, with an empty vocabulary
        caplog.clear()
        model = AirLLMBaseModel(folder_of(family), device="cpu")
        assert model.tokenizer is None
        assert "no tokenizer" in caplog.text


def test_a_prompt_longer_than_max_seq_len_is_said_once_and_not_cut(
    folder_of: Callable[..., Path], caplog: pytest.LogCaptureFixture
) -> None:
    model = AirLLMBaseModel(folder_of("llama"), device="cpu", max_seq_len=4)
    ids = families.prompt(model, 6)
    with caplog.at_level(logging.WARNING, "airllm"):
        for _ in range(2):
            assert model.generate(ids, max_new_tokens=2, min_new_tokens=2).shape[1] == 8
    assert caplog.text.count("more than max_seq_len=4") == 1


@pytest.mark.parametrize("move", ["half", "bfloat16", "cuda"])
def test_moving_or_casting_is_refused_with_the_remedy(move: str, folder_of: Callable[..., Path]) -> None:
    model = AirLLMBaseModel(folder_of("llama"), device="cpu")
    for each in (model, model.model):
        with pytest.raises(UnsupportedModelError, match="load it again with d"):
            getattr(each, move)()
        with pytest.raises(UnsupportedModelError, match="load it again"):
            each.to("cuda:0")


def test_moving_to_where_it_is_changes_nothing(folder_of: Callable[..., Path]) -> None:
    model = AirLLMBaseModel(folder_of("llama"), device="cpu")
    assert model.to("cpu") is model and model.float() is model and model.eval() is model and model.cpu() is model
    assert model.model.to("cpu") is model.model and model.model.to(torch.float32) is model.model
    with pytest.raises(UnsupportedModelError, match="trained"):
        model.train()
    with pytest.raises(UnsupportedModelError, match="copy the checkpoint folder"):
        model.save_pretrained("anywhere")


def test_device_map_is_refused_with_the_reason(folder_of: Callable[..., Path]) -> None:
    with pytest.raises(OptionError, match="places every weight itself"):
        AirLLMBaseModel(folder_of("llama"), device="cpu", device_map="auto")


def test_slots_are_refused_by_name_for_dense_models(folder_of: Callable[..., Path]) -> None:
    with pytest.raises(UnsupportedModelError, match="'llama' is dense"):
        AirLLMBaseModel(folder_of("llama"), device="cpu", expert_cache_backend="slot")


@pytest.mark.parametrize("prefetching", [True, False])
def test_a_model_loaded_in_inference_mode_or_under_a_default_device_is_right_outside_it(
    prefetching: bool, folder_of: Callable[..., Path]
) -> None:
    folder = folder_of("mixtral", dtype=torch.bfloat16)
    ids = torch.tensor([[5, 6, 7]])
    plain = AirLLMBaseModel(folder, device="cpu", dtype="float32", prefetching=prefetching)
    expected = plain(ids).logits
    for context in (torch.inference_mode(), torch.device("meta")):
        with context:
            ours = AirLLMBaseModel(folder, device="cpu", dtype="float32", prefetching=prefetching)
            if not isinstance(context, torch.device):
                assert torch.equal(ours(ids).logits, expected)
        assert torch.equal(ours(ids).logits, expected)


def test_nothing_needs_a_gradient(llama: Pair) -> None:
    assert not llama.ours(families.prompt(llama.oracle, 4)).logits.requires_grad
    assert not any(parameter.requires_grad for parameter in llama.ours.model.parameters())


# --- numbers that went wrong ------------------------------------------------------------------------------------------


def poisoned(folder: Path, target: Path, name: str, value: float) -> Path:
    """A copy of the checkpoint with one value of one tensor changed."""
    shutil.copytree(folder, target)
    tensors = load_file(target / "model.safetensors")
    tensors[name].view(-1)[0] = value
    save_file(tensors, target / "model.safetensors", {"format": "pt"})
    return target


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("resident", [0, "all"])
def test_logits_that_are_not_finite_raise_and_name_the_layer(
    value: float, resident: object, folder_of: Callable[..., Path], tmp_path: Path, device: str
) -> None:
    name = "model.layers.2.self_attn.o_proj.weight"
    folder = poisoned(folder_of("llama"), tmp_path / "model", name, value)
    model = AirLLMBaseModel(folder, device=device, resident_gb=resident)
    with pytest.raises(NonFiniteError, match=r"model\.layers\.2.*float32"):
        model.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=2)
    model.close()


def test_a_head_that_is_not_finite_is_named_as_such(folder_of: Callable[..., Path], tmp_path: Path) -> None:
    folder = poisoned(folder_of("llama"), tmp_path / "model", "lm_head.weight", float("inf"))
    with pytest.raises(NonFiniteError, match="the head"):
        AirLLMBaseModel(folder, device="cpu").generate(torch.tensor([[5, 6, 7]]), max_new_tokens=2)


def test_minus_infinity_among_the_logits_is_no_fault(llama: Pair) -> None:
    def mask_one(module: Any, args: Any, output: torch.Tensor) -> torch.Tensor:
        output[..., 3] = -torch.inf
        return output

    llama.ours.model.lm_head.register_forward_hook(mask_one)
    assert llama.ours.generate(families.prompt(llama.oracle, 4), max_new_tokens=3).shape[1] >= 5


# --- coming to an end -------------------------------------------------------------------------------------------------


def test_a_closed_model_says_so_and_holds_nothing(folder_of: Callable[..., Path], device: str) -> None:
    with AirLLMBaseModel(folder_of("llama"), device=device) as model:
        ids = families.prompt(model, 4)
        expected = model(ids).logits
        blocks = [weakref.ref(block) for block in model._streamer._blocks]
    assert all(block() is None for block in blocks)
    assert all(tensor.is_meta for tensor in [*model.model.parameters(), *model.model.buffers()])
    for call in (model, model.model, lambda ids: model.generate(ids, max_new_tokens=1)):
        with pytest.raises(AirLLMError, match="load it again"):
            call(ids)
    model.close()
    again = AirLLMBaseModel(folder_of("llama"), device=device)
    assert torch.equal(again(ids).logits, expected)


def test_a_model_that_is_dropped_frees_its_memory_without_a_collector_run(folder_of: Callable[..., Path]) -> None:
    import gc

    model = AirLLMBaseModel(folder_of("llama"), device="cpu")
    model.generate(families.prompt(model, 4), max_new_tokens=3)
    inner, block = weakref.ref(model.model), weakref.ref(model._streamer._blocks[0])
    gc.collect()
    gc.disable()
    try:
        del model
        until = time.monotonic() + 20
        while block() is not None and time.monotonic() < until:
            time.sleep(0.01)  # a thread that reads ahead for the next token holds the block until it has read
        assert inner() is None and block() is None
    finally:
        gc.enable()


def test_a_failed_load_closes_its_files(
    folder_of: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    from airllm.checkpoint import TensorReader

    closed = []
    monkeypatch.setattr(TensorReader, "close", lambda self: closed.append(self))
    monkeypatch.setattr("airllm.dense_weights.LayerStreamer", None)
    with pytest.raises(TypeError):
        AirLLMBaseModel(folder_of("llama"), device="cpu")
    assert len(closed) == 1


@pytest.mark.gpu
def test_the_gpu_holds_at_most_embedding_head_and_three_layers(checkpoint: Callable[..., Path]) -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    folder = checkpoint("llama", num_hidden_layers=8, hidden_size=512, intermediate_size=2048, dtype=torch.float16)
    for turn in ("first", "second"):
        # The first turn makes the matrix libraries take their workspaces, which torch counts as allocated for good.
        before = torch.cuda.memory_allocated()
        with AirLLMBaseModel(folder, device="cuda:0") as model:
            stats = model.get_stream_stats()
            layer = stats["streamed_bytes"] // 8
            held = torch.cuda.memory_allocated() - before
            assert held <= stats["dense_resident_bytes"] + 3 * layer + 64 * 1024
            torch.cuda.reset_peak_memory_stats()
            model.generate(families.prompt(model, 5), max_new_tokens=4)
            if turn == "second":
                assert torch.cuda.max_memory_allocated() - before <= held + (2 << 20)
    assert torch.cuda.memory_allocated() <= before + 64 * 1024


@pytest.mark.gpu
def test_a_prompt_too_long_for_the_device_is_an_ordinary_error_and_the_next_call_is_right(
    folder_of: Callable[..., Path],
) -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    with AirLLMBaseModel(folder_of("llama"), device="cuda:0") as model:
        short = torch.tensor([[5, 6, 7, 8, 9]])
        expected = model(short).logits
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + (256 << 20)) / total)
        try:
            with pytest.raises(torch.OutOfMemoryError):
                for doubling in range(8, 24):
                    model(families.prompt(model, 64, 2**doubling // 64), use_cache=False)
        finally:
            torch.cuda.set_per_process_memory_fraction(1.0)
        assert torch.equal(model(short).logits, expected)


def test_open_files_and_threads_do_not_grow_with_calls(folder_of: Callable[..., Path]) -> None:
    descriptors = Path("/proc/self/fd")
    if not descriptors.exists():
        pytest.skip("counts open files the Linux way")
    with AirLLMBaseModel(folder_of("llama"), device="cpu") as model:
        ids = families.prompt(model, 4)
        model.generate(ids, max_new_tokens=2)
        before = len(list(descriptors.iterdir())), threading.active_count()
        for _ in range(15):
            model.generate(ids, max_new_tokens=2)
        assert (len(list(descriptors.iterdir())), threading.active_count()) == before


def test_a_streamed_model_has_the_names_of_the_expert_cache_statistics(checkpoint: Callable[..., Path]) -> None:
    with AirLLMBaseModel(checkpoint("mixtral"), device="cpu") as model:
        stats = model.get_expert_cache_stats()
        model.reset_expert_cache_stats(), model.clear_expert_cache()
    assert stats.pop("enabled") is False and stats.pop("backend") == "none"
    assert {"slot_count", "hits", "h2d_bytes", "host_bank_bytes"} <= set(stats) and set(stats.values()) == {None}
