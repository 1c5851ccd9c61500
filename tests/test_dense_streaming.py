"""Experts in slots and dense weights that stream, both at once: transformers' own logits and tokens, whatever goes wrong.

The decoder layers' dense weights are held to a quarter of their size, so most layers pass through the ring in every forward.
"""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import families
import pytest
import slot_models
import slot_rig
import test_quantised
import torch
import transformers
from broken_disk import breaking_disk
from slot_rig import gpu

import airllm
from airllm import AutoModel, dense_weights
from airllm.airllm_base import AirLLMBaseModel
from airllm.checkpoint import TensorReader
from airllm.errors import BudgetError, CheckpointError, DeviceError, UnsupportedModelError
from airllm.experts import assembly
from airllm.inspect_model import inspect_folder
from airllm.layer_layout import ALIGN_BYTES

GIB = 2**30
LAYERS = 8
FAMILIES = ["phimoe", "qwen3_moe", "deepseek_v3", "gpt_oss", "mixtral"]
Checkpoint = Callable[..., Path]


class Stop(Exception):
    """Raised by tests inside layers and reads."""


def gpt_oss(folder: Path) -> Path:
    config = transformers.GptOssConfig(
        vocab_size=256, hidden_size=32, intermediate_size=24, num_hidden_layers=LAYERS, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, num_local_experts=5, num_experts_per_tok=3, sliding_window=16,
        pad_token_id=0, bos_token_id=1, eos_token_id=2, tie_word_embeddings=False,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        families._randomise(model)
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def folder_of(checkpoint: Checkpoint, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Eight layers of the family; phimoe is the model that comes with the package."""
    stacked = gpt_oss(tmp_path_factory.mktemp("gpt_oss"))
    special = {"phimoe": Path(airllm.tiny_model_path()), "gpt_oss": stacked}
    return lambda family: special.get(family) or checkpoint(family, num_hidden_layers=LAYERS)


def quarter(folder: Path) -> float:
    """The ``resident_gb`` that holds a quarter of the decoder layers' dense weights in float32."""
    found = inspect_folder(folder)
    return sum(found.dense_layers) * 4 / found.bytes_per_value / 4 / GIB


def load(folder: Path, slots: int = 5, *, device: str = "cpu", **keywords: Any) -> Any:
    """The model in float32 with ``slots`` slots full of NaN and its dense weights held to a quarter."""
    sizes = inspect_folder(folder)
    assert sizes.experts is not None
    budget = slots * sizes.experts.expert_bytes * 4 / sizes.bytes_per_value / GIB
    given = {"resident_gb": quarter(folder), "dtype": "float32", **keywords}
    model = AutoModel.from_pretrained(folder, device=device, expert_cache_backend="slot", expert_cache_gb=budget, **given)
    assert model._runtime.pool.plan.slots == min(slots, model._runtime.bank.experts)
    model._runtime.pool.poison()
    return model


def layers_of(model: Any) -> list[Any]:
    return list(model.model.model.layers)


def check(model: Any) -> None:
    """Nothing leased, every slot as the table says, and no layer's weights left on the device but of those that stay."""
    slot_rig.check(model._runtime)
    stay = model._streamer.plan.resident
    dense = [[p.is_meta for name, p in layer.named_parameters()] for layer in layers_of(model)]
    assert not any(any(metas) for metas in dense[:stay]) and all(all(metas) for metas in dense[stay:])


def settle(model: Any) -> None:
    """Wait until nothing is read ahead any more."""
    for fill in model._streamer._fills:
        if fill is not None:
            fill.result(30)


# --- the same bits ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def oracle_of(folder_of: Callable[[str], Path]) -> Callable[[str], Any]:
    made: dict[str, Any] = {}
    return lambda family: made.setdefault(family, slot_models.oracle(folder_of(family), torch.float32))


@pytest.mark.parametrize("source", ["file", "host"])
@pytest.mark.parametrize("slots", [3, 7, 10_000], ids=["tight", "few", "all"])
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_and_tokens_are_those_of_transformers(
    family: str,
    slots: int,
    source: str,
    folder_of: Callable[[str], Path],
    oracle_of: Callable[[str], Any],
    poisoned_blocks: None,
) -> None:
    oracle, top_k = oracle_of(family), inspect_folder(folder_of(family)).experts.top_k
    with load(folder_of(family), max(slots, top_k), stream_from=source) as model, torch.no_grad():
        plan = model._streamer.plan
        assert plan.resident >= 1 and plan.streamed > plan.ring and plan.resident_bytes <= sum(plan.layers) / 4
        for length in (9, 1, 40):
            ids = families.prompt(oracle, length)
            assert torch.equal(model(ids).logits, oracle(ids).logits)
        assert torch.equal(families.greedy(model, ids, 6), families.greedy(oracle, ids, 6))
        check(model)
        stats = model.get_expert_cache_stats()
        assert stats["misses"] > 0 and stats["generation_disk_expert_reads"] == 0


@pytest.mark.parametrize("use_cache", [True, False], ids=["cache", "no cache"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_batch_padded_on_the_left_gives_transformers_tokens(
    family: str, use_cache: bool, folder_of: Callable[[str], Path], oracle_of: Callable[[str], Any], poisoned_blocks: None
) -> None:
    oracle = oracle_of(family)
    ids, mask = slot_models.padded((3, 12, 7), vocabulary=250)
    options = {"attention_mask": mask, "max_new_tokens": 5, "min_new_tokens": 5, "do_sample": False, "use_cache": use_cache}
    options |= {"output_logits": True, "return_dict_in_generate": True}
    with load(folder_of(family), 6) as model:
        ours, theirs = model.generate(ids, **options), oracle.generate(ids, **options)
        assert torch.equal(ours.sequences, theirs.sequences)
        assert all(torch.equal(a, b) for a, b in zip(ours.logits, theirs.logits, strict=True))
        check(model)


@pytest.mark.parametrize("resident", [0, 0.4, 10.0, "all"])
@pytest.mark.parametrize("prefetching", [True, False])
def test_how_much_stays_changes_no_bit(
    resident: float | str, prefetching: bool, folder_of: Callable[[str], Path], oracle_of: Callable[[str], Any]
) -> None:
    oracle, folder = oracle_of("deepseek_v3"), folder_of("deepseek_v3")
    budget = resident if isinstance(resident, str) else resident * 4 * quarter(folder)
    ids = families.prompt(oracle, 11)
    with load(folder, 5, resident_gb=budget, prefetching=prefetching) as model, torch.no_grad():
        assert (model._streamer is None) is (resident in (10.0, "all"))
        for _ in range(2):
            assert torch.equal(model(ids).logits, oracle(ids).logits)


def test_an_fp8_checkpoint_streams_its_dense_weights_dequantised(checkpoint: Checkpoint, tmp_path: Path) -> None:
    source = checkpoint("deepseek_v3", num_hidden_layers=LAYERS, moe_intermediate_size=32, intermediate_size=48)
    folder = test_quantised.as_fp8(source, tmp_path / "fp8")
    theirs = test_quantised.oracle(folder, transformers.FineGrainedFP8Config(dequantize=True), torch.float32)
    test_quantised.assert_same(
        folder, theirs, dtype="float32", expert_cache_backend="slot", expert_cache_gb=0.0001, resident_gb=quarter(source)
    )


def test_a_split_serves_as_well_as_the_files_themselves(
    folder_of: Callable[[str], Path], oracle_of: Callable[[str], Any], tmp_path: Path
) -> None:
    oracle, ids = oracle_of("qwen3_moe"), families.prompt(oracle_of("qwen3_moe"), 9)
    with load(folder_of("qwen3_moe"), layer_shards_saving_path=tmp_path) as model:
        assert str(tmp_path) in str(model.checkpoint_path)
        assert torch.equal(families.greedy(model, ids, 5), families.greedy(oracle, ids, 5))


# --- what is measured -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_each_forward_moves_the_streamed_layers_dense_weights_and_reads_nothing_else(
    family: str, folder_of: Callable[[str], Path], oracle_of: Callable[[str], Any]
) -> None:
    oracle = oracle_of(family)
    experts = {id(p) for module in oracle.modules() if hasattr(module, "down_proj") for p in module._parameters.values()}
    dense = [[p.nbytes for p in layer.parameters() if id(p) not in experts] for layer in oracle.model.layers]
    with load(folder_of(family)) as model:
        plan, ids = model._streamer.plan, families.prompt(oracle, 9)
        streamed = dense[plan.resident :]
        stored = inspect_folder(folder_of(family)).bytes_per_value / 4
        padded = sum(ALIGN_BYTES * math.ceil(nbytes / ALIGN_BYTES) for layer in streamed for nbytes in layer)
        model(ids)  # from here on a forward begins with the same layers in the ring
        settle(model)
        before, cache = model.get_stream_stats(), model.get_expert_cache_stats()
        for _ in range(3):
            model(ids)
        settle(model)
        after = model.get_stream_stats()
    assert cache["dense_streamed_bytes"] == after["streamed_bytes"] == padded
    assert after["filled_bytes"] - before["filled_bytes"] == 3 * padded
    assert after["layer_loads"] - before["layer_loads"] == 3 * len(streamed)
    assert after["bytes_read"] - before["bytes_read"] == 3 * stored * sum(map(sum, streamed))


def test_the_statistics_add_up(folder_of: Callable[[str], Path], oracle_of: Callable[[str], Any]) -> None:
    oracle = oracle_of("deepseek_v3")
    with load(folder_of("deepseek_v3"), 5, profiling_mode=True) as model:
        plan = model._streamer.plan
        outside = {p.data_ptr(): p.nbytes for name, p in oracle.named_parameters() if ".layers." not in name}
        families.greedy(model, families.prompt(oracle, 9), 4)
        stats, streams = model.get_expert_cache_stats(), model.get_stream_stats()
        assert stats["dense_resident_bytes"] == streams["dense_resident_bytes"] == sum(outside.values()) + plan.resident_bytes
        assert stats["dense_ring_bytes"] == streams["ring_bytes"] == 3 * max(plan.layers[plan.resident :])
        parts = stats["dense_resident_bytes"] + stats["dense_ring_bytes"] + stats["capacity_bytes"] + stats["scratch_bytes"]
        assert stats["allocated_device_bytes"] == parts
        assert (streams["resident_layers"], streams["streamed_layers"]) == (plan.resident, LAYERS - plan.resident)
        times = model.profiler.profiling_time_dict
        assert len(times["forward"]) == 4 and sum(times["read_and_copy"]) > 0


def test_statistics_asked_for_inside_a_layer_do_not_count_it_as_staying(folder_of: Callable[[str], Path]) -> None:
    with load(folder_of("mixtral")) as model:
        seen = []
        hook = layers_of(model)[-1].mlp.register_forward_pre_hook(
            lambda *_: seen.append(model.get_expert_cache_stats()["dense_resident_bytes"])
        )
        model(torch.tensor([[5, 6, 7]]))
        hook.remove()
        assert seen == [model.get_expert_cache_stats()["dense_resident_bytes"]]


def test_nothing_streams_by_default(folder_of: Callable[[str], Path]) -> None:
    with load(folder_of("mixtral"), resident_gb=None) as model:
        stats = model.get_expert_cache_stats()
        assert (stats["dense_streamed_bytes"], stats["dense_ring_bytes"]) == (0, 0)
        assert not any(p.is_meta for p in model.model.parameters())
        with pytest.raises(UnsupportedModelError, match="resident_gb"):
            model.get_stream_stats()


def test_inspect_says_beforehand_what_loading_does(folder_of: Callable[[str], Path]) -> None:
    for family in ("qwen3_moe", "deepseek_v3", "mixtral"):
        found = inspect_folder(folder_of(family))
        with load(folder_of(family)) as model:
            assert found.dense_layers == model._streamer.plan.layers
            plan, stats = model._streamer.plan, model.get_expert_cache_stats()
            stored = set(model.model.state_dict())
            buffers = sum(buffer.nbytes for name, buffer in model.model.named_buffers() if name in stored)
        assert found.rest_bytes + plan.resident_bytes == stats["dense_resident_bytes"] + buffers


# --- what cannot be ---------------------------------------------------------------------------------------------------


def test_the_device_engine_leaves_such_a_model_to_the_plain_one_and_says_why(
    folder_of: Callable[[str], Path], oracle_of: Callable[[str], Any], caplog: pytest.LogCaptureFixture
) -> None:
    ids = families.prompt(oracle_of("phimoe"), 9)
    with caplog.at_level(logging.WARNING), load(folder_of("phimoe"), expert_cache_engine="device") as model:
        stats = model.get_expert_cache_stats()
        assert stats["engine"] == "plain" and "decoder layers are streamed" in stats["device_engine_reason"]
        assert "resident_gb" in stats["device_engine_reason"] and stats["device_engine_reason"] in caplog.text
        assert torch.equal(families.greedy(model, ids, 5), families.greedy(oracle_of("phimoe"), ids, 5))


@pytest.fixture
def small_device(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """A device with so many bytes free; the expert bank must not be filled."""

    def shrink(nbytes: int) -> None:
        monkeypatch.setattr(dense_weights, "free_bytes", lambda device: nbytes)
        monkeypatch.setattr(assembly, "HostBank", None)
        monkeypatch.setattr(dense_weights, "load_resident", None)

    return shrink


@pytest.mark.parametrize("given", [{"resident_gb": None}, {"resident_gb": "all"}, {"resident_gb": 1}])
def test_a_device_too_small_for_the_dense_part_is_an_error_that_names_a_resident_gb_that_does(
    given: dict[str, Any], folder_of: Callable[[str], Path], small_device: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = folder_of("qwen3_moe")
    found = inspect_folder(folder)
    free = found.rest_bytes + 5 * found.dense_layers[0] + (5 + 2) * found.experts.expert_bytes
    small_device(free)
    with pytest.raises(DeviceError, match=rf"{free} B are free: pass resident_gb=(\S+), so that [1-9] of 8") as caught:
        load(folder, **given)
    fits = float(str(caught.value).partition("resident_gb=")[2].partition(",")[0])
    monkeypatch.undo()
    with load(folder, resident_gb=fits) as model:
        held = model.get_expert_cache_stats()["allocated_device_bytes"]
    assert held <= free


def test_a_device_too_small_for_the_ring_is_an_error_with_the_least_it_needs(
    folder_of: Callable[[str], Path], small_device: Any
) -> None:
    small_device(1000)
    with pytest.raises(DeviceError, match=r"1000 B are free: even resident_gb=0 needs \d+ B"):
        load(folder_of("qwen3_moe"))
    with pytest.raises(DeviceError, match="even resident_gb=0 needs"):
        AirLLMBaseModel(folder_of("qwen3_moe"), device="cpu")


def test_the_automatic_budget_counts_what_the_dense_weights_take(
    folder_of: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    from airllm.experts import host_memory

    folder = folder_of("qwen3_moe")
    found = inspect_folder(folder)
    kv, workspace = found.kv_bytes(512), found.workspace_bytes(512)
    wanted = 20 * found.experts.expert_bytes
    free = wanted + found.experts.total_bytes + kv + workspace + assembly.RESERVE_BYTES + 2 * found.experts.expert_bytes
    monkeypatch.setattr(host_memory, "available_bytes", lambda: free + 3 * found.dense_layers[0])
    monkeypatch.setattr("airllm.experts.bank._check_available", lambda *_: None)
    options = {"device": "cpu", "expert_cache_backend": "slot", "resident_gb": quarter(folder)}
    with AutoModel.from_pretrained(folder, **options) as model:
        assert model.get_expert_cache_stats()["slot_count"] == 20


@pytest.mark.parametrize("value", [-1, float("nan"), "some", True, [1]])
def test_a_wrong_resident_gb_is_refused_with_its_unit(value: Any, folder_of: Callable[[str], Path]) -> None:
    with pytest.raises(ValueError, match="resident_gb must be a .*GiB"):
        load(folder_of("mixtral"), resident_gb=value)


def test_slots_that_do_not_fit_beside_the_dense_weights_name_both_keywords(
    folder_of: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    from airllm.experts import slots

    def full(*_: Any, **__: Any) -> None:
        raise torch.OutOfMemoryError("full")

    class Torch:
        empty, uint8, OutOfMemoryError = staticmethod(full), torch.uint8, torch.OutOfMemoryError

    monkeypatch.setattr(slots, "torch", Torch)
    with pytest.raises(BudgetError, match="lower expert_cache_gb or resident_gb"):
        load(folder_of("mixtral"))


# --- what breaks ------------------------------------------------------------------------------------------------------


@pytest.fixture
def model(folder_of: Callable[[str], Path], poisoned_blocks: None) -> Iterator[Any]:
    with load(folder_of("deepseek_v3"), 5) as made:
        yield made


@pytest.fixture
def answers(oracle_of: Callable[[str], Any]) -> Callable[[Any], bool]:
    """Whether the model gives the oracle's tokens, and is whole afterwards."""
    oracle = oracle_of("deepseek_v3")
    ids = families.prompt(oracle, 20)
    expected = families.greedy(oracle, ids, 4)

    def right(model: Any) -> bool:
        same = torch.equal(families.greedy(model, ids, 4), expected)
        check(model)
        return same

    return right


@pytest.mark.parametrize("error", [Stop, KeyboardInterrupt])
@pytest.mark.parametrize("forward", [0, 2], ids=["prompt", "third token"])
@pytest.mark.parametrize("where", ["before", "attention", "shared experts", "expert copy", "expert sum", "after"])
def test_an_exception_anywhere_reaches_the_caller_and_leaves_a_model_that_answers_right(
    where: str, forward: int, error: type[BaseException], model: Any, answers: Callable[[Any], bool]
) -> None:
    for number in (1, 4, LAYERS - 1):
        layer, original = layers_of(model)[number], error("here")
        left = [forward + 1]

        def fail(*_: Any, left: list[int] = left, original: BaseException = original) -> None:
            left[0] -= 1
            if left[0] == 0:
                raise original

        with pytest.MonkeyPatch.context() as patch:
            if where.startswith("expert "):
                plant(patch, model, number - 1, where, fail)
                hook = None
            else:
                target = {"attention": layer.self_attn, "shared experts": layer.mlp.shared_experts}.get(where, layer)
                hook = (
                    target.register_forward_hook(fail)
                    if where == "after"
                    else target.register_forward_pre_hook(fail, prepend=where == "before")
                )
            with pytest.raises(error) as caught:
                families.greedy(model, torch.tensor([[7, 8, 9, 10, 11, 12]]), 4)
            if hook is not None:
                hook.remove()
        assert caught.value is original
        check(model)
        assert answers(model)


def plant(patch: pytest.MonkeyPatch, model: Any, moe_layer: int, where: str, fail: Callable[[], None]) -> None:
    """Let ``fail`` be called once in each forward of one layer's experts: before their copies, or after their sum."""
    runtime = model._runtime
    run, copy = runtime._run_once, runtime._copy
    armed = [False]

    def run_once(call: Any) -> Any:
        armed[0] = call.layer == moe_layer
        if armed[0] and where == "expert copy":
            runtime.policy.clear()  # a token that only hits copies nothing
        total = run(call)
        if armed[0] and where == "expert sum":
            fail()
        return total

    def copying(*step: Any) -> None:
        if armed[0] and where == "expert copy":
            armed[0] = False
            fail()
        copy(*step)

    patch.setattr(runtime, "_run_once", run_once)
    patch.setattr(runtime, "_copy", copying)


def test_a_read_that_fails_once_while_generating_is_tried_again(
    model: Any, answers: Callable[[Any], bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert answers(model)
    settle(model)
    scatter, count = TensorReader.scatter, iter(range(10**6))

    def fail(self: TensorReader, read: Any) -> None:
        if next(count) in (5, 40):
            raise CheckpointError("for a moment")
        scatter(self, read)

    # Every read of a forward after another was begun ahead, and such guesses have a second try.
    monkeypatch.setattr(TensorReader, "scatter", fail)
    assert answers(model)
    assert next(count) > 40


def test_a_disk_that_is_gone_is_the_callers_error_and_one_that_is_back_serves_again(
    model: Any, answers: Callable[[Any], bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert answers(model)
    broken, original = breaking_disk(monkeypatch)
    broken.set()
    with pytest.raises(CheckpointError) as caught:
        families.greedy(model, torch.tensor([[7, 8, 9]]), 4)
    assert caught.value is original
    check(model)
    broken.clear()
    assert answers(model)


def test_threads_take_turns(model: Any, answers: Callable[[Any], bool]) -> None:
    wrong: list[object] = []

    def serve() -> None:
        try:
            for _ in range(2):
                if not torch.equal(model.generate(torch.tensor([[7, 8, 9]]), max_new_tokens=3, do_sample=False), expected):
                    wrong.append("tokens")
        except BaseException as error:  # noqa: BLE001 - shown by the assertion
            wrong.append(error)

    expected = model.generate(torch.tensor([[7, 8, 9]]), max_new_tokens=3, do_sample=False)
    threads = [threading.Thread(target=serve) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert not wrong and not any(thread.is_alive() for thread in threads)
    assert answers(model)


def test_a_load_that_fails_late_ends_its_threads_and_closes_its_files(
    folder_of: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    closed: list[Any] = []
    close, before = TensorReader.close, threading.active_count()
    monkeypatch.setattr(TensorReader, "close", lambda self: (closed.append(self), close(self))[1])
    monkeypatch.setattr(assembly, "HostBank", None)
    with pytest.raises(TypeError):
        load(folder_of("mixtral"))
    assert len(closed) == 1 and threading.active_count() == before


def test_closing_gives_everything_back_and_may_be_repeated(folder_of: Callable[[str], Path]) -> None:
    before = threading.active_count()
    model = load(folder_of("mixtral"))
    model(torch.tensor([[5, 6, 7]]))
    assert threading.active_count() > before
    streamer, runtime = model._streamer, model._runtime
    model.close()
    model.close()
    assert threading.active_count() == before
    assert not streamer._blocks and not streamer._kept and not streamer._hosts and not runtime.pool.blocks
    assert all(p.is_meta for p in model.model.parameters())
    with pytest.raises(airllm.AirLLMError, match="closed"):
        model(torch.tensor([[5, 6, 7]]))


# --- on a GPU ---------------------------------------------------------------------------------------------------------


@gpu
@pytest.mark.parametrize("source", ["file", "host"])
@pytest.mark.parametrize("family", FAMILIES)
def test_on_a_gpu_logits_and_tokens_are_those_of_transformers(
    family: str, source: str, folder_of: Callable[[str], Path], poisoned_blocks: None
) -> None:
    oracle = slot_models.oracle(folder_of(family), torch.float32, device="cuda:0")
    ids = families.prompt(oracle, 20).to("cuda:0")
    with load(folder_of(family), 6, device="cuda:0", stream_from=source) as model, torch.no_grad():
        streams = model.get_stream_stats()
        assert streams["streamed_from"] == source and streams["pinned"] is not None
        for _ in range(2):
            assert torch.equal(model(ids).logits, oracle(ids).logits)
            assert torch.equal(families.greedy(model, ids, 6), families.greedy(oracle, ids, 6))
        check(model)


@gpu
@pytest.mark.parametrize("source", ["file", "host"])
@pytest.mark.parametrize("where", ["layers' copies", "experts' copies", "arithmetic"])
def test_a_delay_on_any_stream_changes_nothing(where: str, source: str, folder_of: Callable[[str], Path]) -> None:
    oracle = slot_models.oracle(folder_of("deepseek_v3"), torch.float32, device="cuda:0")
    ids = families.prompt(oracle, 20).to("cuda:0")
    expected = families.greedy(oracle, ids, 6)
    with load(folder_of("deepseek_v3"), 6, device="cuda:0", stream_from=source) as model:
        if where == "arithmetic":
            for layer in layers_of(model):
                layer.mlp.register_forward_pre_hook(lambda *_: torch.cuda._sleep(3_000_000))
        else:
            transfer = model._streamer._transfer if where == "layers' copies" else model._runtime.transfer
            move = transfer._move

            def late(source: torch.Tensor, target: torch.Tensor) -> None:
                torch.cuda._sleep(3_000_000)
                move(source, target)

            transfer._move = late
        for _ in range(2):
            assert torch.equal(families.greedy(model, ids, 6), expected)
        check(model)


@gpu
def test_the_gpu_holds_embeddings_head_what_stays_three_layers_slots_and_little_more(checkpoint: Checkpoint) -> None:
    sizes = {"hidden_size": 1024, "head_dim": 64, "num_attention_heads": 64}
    folder = checkpoint("qwen3_moe", num_hidden_layers=LAYERS, **sizes)
    outside = inspect_folder(folder).rest_bytes
    spare = 8 * 2**20  # activations, the recordings' own, and what each allocation is rounded up by
    for _ in range(2):  # in the first turn the matrix libraries take their workspaces, for good
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        with load(folder, 5, device="cuda:0") as model:
            plan, stats = model._streamer.plan, model.get_expert_cache_stats()
            families.greedy(model, torch.randint(3, 250, (1, 20), device="cuda:0"), 6)
            peak = torch.cuda.max_memory_allocated() - before
    held = outside + plan.resident_bytes + 3 * max(plan.layers) + stats["capacity_bytes"] + stats["scratch_bytes"]
    assert min(plan.layers) > spare, "a layer too many must show"
    assert peak <= held + spare
