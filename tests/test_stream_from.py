"""Layers that stream out of host memory instead of the files: the same bits, no read after loading, and who decides."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import families
import pytest
import slot_models
import torch
from broken_disk import breaking_disk
from slot_rig import gpu
from test_dense_streaming import LAYERS, load, quarter

from airllm import AutoModel, dense_weights
from airllm.airllm_base import AirLLMBaseModel
from airllm.errors import HostMemoryError, OptionError, UnsupportedModelError
from airllm.options import parse_options

Checkpoint = Callable[..., Path]
IDS = torch.tensor([[5, 91, 17, 230, 44]])


@pytest.fixture(scope="module")
def folder(checkpoint: Checkpoint) -> Path:
    return checkpoint("qwen3_moe", num_hidden_layers=LAYERS)


@pytest.fixture(scope="module")
def expected(folder: Path) -> list[int]:
    return families.greedy(slot_models.oracle(folder, torch.float32), IDS, 8).tolist()


def whole(folder: Path, **keywords: Any) -> AirLLMBaseModel:
    """Streamed without slots, experts and all."""
    return AirLLMBaseModel(folder, device="cpu", dtype="float32", experts_implementation="eager", **keywords)


MAKERS = {"beside slots": load, "whole layers": whole}


@pytest.mark.parametrize("prefetching", [True, False])
@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_no_file_is_read_after_loading_and_the_tokens_are_the_same(
    make: Callable[..., Any], prefetching: bool, folder: Path, expected: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    with make(folder, stream_from="host", prefetching=prefetching) as model:
        plan, before = model._streamer.plan, model.get_stream_stats()
        breaking_disk(monkeypatch)[0].set()
        for _ in range(2):
            assert families.greedy(model, IDS, 8).tolist() == expected
        after = model.get_stream_stats()
    assert plan.streamed > plan.ring == (3 if prefetching else 1)
    assert (before["bytes_read"], before["reads"]) == (after["bytes_read"], after["reads"])
    assert after["layer_loads"] >= before["layer_loads"] + 16 * (plan.streamed - plan.ring)
    assert (after["streamed_from"], after["streamed_from_reason"]) == ("host", "as asked")
    assert (after["host_memory_bytes"], after["staging_bytes"]) == (plan.streamed_bytes, 0)


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_the_files_serve_unless_asked(make: Callable[..., Any], folder: Path) -> None:
    with make(folder) as model:
        stats = model.get_stream_stats()
    assert (stats["streamed_from"], stats["host_memory_bytes"]) == ("file", 0)
    assert stats["streamed_from_reason"].startswith("auto: ")


def test_layers_with_a_block_each_are_not_kept_twice(folder: Path) -> None:
    with load(folder, stream_from="host", resident_gb=3.2 * quarter(folder)) as model:
        stats = model.get_stream_stats()
        assert 0 < stats["streamed_layers"] <= stats["ring_blocks"]
        assert (stats["streamed_from"], stats["host_memory_bytes"]) == ("file", 0)
        assert "a block of its own" in stats["streamed_from_reason"]


def test_memory_goes_back_with_close_and_when_loading_fails(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from airllm import streaming

    made: list[Any] = []

    class Counted(streaming.HostBlock):
        def __init__(self, nbytes: int) -> None:
            super().__init__(nbytes)
            made.append(self)

    monkeypatch.setattr(streaming, "HostBlock", Counted)
    with load(folder, stream_from="host") as model:
        assert sum(block.nbytes for block in made) == model._streamer.plan.streamed_bytes
        assert all(block._map is not None for block in made)
    assert made and all(block._map is None for block in made)
    made.clear()
    read = streaming.LayerViews.straight_reads

    def broken(self: Any, *args: Any) -> Any:
        if len(made) == 3:
            raise OSError("the disk is gone")
        return read(self, *args)

    monkeypatch.setattr(streaming.LayerViews, "straight_reads", broken)
    with pytest.raises(OSError, match="gone"):
        load(folder, stream_from="host")
    assert len(made) == 3 and all(block._map is None for block in made)


def test_an_interrupt_at_any_copy_leaves_the_next_call_right(
    folder: Path, expected: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    with load(folder, stream_from="host") as model:
        transfer = model._streamer._transfer
        copy, countdown = transfer.copy, [0]

        def interrupted(*args: Any) -> None:
            countdown[0] -= 1
            if countdown[0] == 0:
                raise KeyboardInterrupt
            copy(*args)

        monkeypatch.setattr(transfer, "copy", interrupted)
        for moment in range(1, model._streamer.plan.streamed + 1):
            countdown[0] = moment
            with pytest.raises(KeyboardInterrupt):
                model(IDS)
            assert families.greedy(model, IDS, 8).tolist() == expected


# --- who decides ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_host_memory_too_small_is_an_error_before_anything_is_read(
    make: Callable[..., Any], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dense_weights, "available_bytes", lambda: 1000)
    monkeypatch.setattr(dense_weights, "load_resident", None)
    with pytest.raises(HostMemoryError, match=r"\d+ B of reserve, 1000 B of host memory available: use stream_from='file'"):
        make(folder, stream_from="host")


@pytest.fixture
def choice(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[bool, str]]:
    """What is decided for a device of a type, with slots or not, and so many bytes available beside what is needed."""
    with load(folder) as model:
        dense = object.__new__(dense_weights.DenseWeights)
        dense.plan = model._streamer.plan
        monkeypatch.setattr(dense_weights.DenseWeights, "rest_bytes", 0)

    def decide(device: str, slots: bool, spare: int | None, asked: str = "auto") -> tuple[bool, str]:
        dense.options = parse_options(folder, device="cpu", stream_from=asked)
        object.__setattr__(dense.options, "device", torch.device(device))
        dense._in_slots = ("an expert",) if slots else ()
        available = None if spare is None else 5000 + dense.plan.streamed_bytes + spare
        monkeypatch.setattr(dense_weights, "available_bytes", lambda: available)
        return dense._keep_in_host_memory(bank_bytes=5000)

    return decide


def test_auto_takes_host_memory_beside_slots_on_a_gpu_where_there_is_enough(choice: Any) -> None:
    reserve = dense_weights.HOST_RESERVE_BYTES
    assert choice("cuda:0", True, reserve)[0] and not choice("cuda:0", True, reserve - 1)[0]
    assert f"{reserve} B of reserve" in choice("cuda:0", True, reserve - 1)[1]
    assert not choice("cuda:0", True, None)[0], "nobody says how much there is"
    assert not choice("cuda:0", False, 2**60)[0] and not choice("cpu", True, 2**60)[0]
    assert choice("cuda:0", True, 2**60, "file") == (False, "as asked")
    assert choice("cpu", False, None, "host") == (True, "as asked")
    assert choice("cuda:0", True, dense_weights.HEADROOM_BYTES, "host") == (True, "as asked")


def test_on_a_cpu_what_would_lie_on_the_device_counts_too(choice: Any) -> None:
    with pytest.raises(HostMemoryError):
        choice("cpu", True, dense_weights.HEADROOM_BYTES, "host")
    assert choice("cuda:0", True, dense_weights.HEADROOM_BYTES, "host")[0]


def test_the_statistics_name_the_block_that_is_not_pinned_and_outlive_the_model(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with load(folder, stream_from="host") as model:
        blocks = list(model._streamer._sources.values())
        for block in blocks:
            block.pinned, block.pin_reason = True, "registered"
        blocks[2].pinned, blocks[2].pin_reason = False, "registration refused"
        stats = model.get_stream_stats()
        for block in blocks:
            block.pinned = False
        assert (stats["pinned"], stats["pin_reason"]) == (False, "registration refused")
    assert model.get_stream_stats()["streamed_from"] == "host"


def test_copies_made_by_the_thread_that_runs_the_model_count_as_waiting(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with load(folder, stream_from="host", profiling_mode=True) as model:
        transfer, copy = model._streamer._transfer, model._streamer._transfer.copy
        monkeypatch.setattr(transfer, "copy", lambda *args: (time.sleep(0.01), copy(*args)))
        model(IDS)
        (waited,) = model.profiler.profiling_time_dict["wait_for_layers"][-1:]
        assert waited >= 0.01 * model._streamer.plan.streamed


@pytest.mark.parametrize("source", ["file", "host"])
@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_gradients_are_refused_where_weights_come_and_go(make: Callable[..., Any], source: str, folder: Path) -> None:
    with make(folder, stream_from=source) as model:
        embedded = model.model.get_input_embeddings()(IDS).detach().requires_grad_()
        with pytest.raises(UnsupportedModelError, match="gradients"):
            model.model(inputs_embeds=embedded)
        with torch.no_grad():
            assert torch.equal(model.model(inputs_embeds=embedded).logits, model(IDS).logits)


def test_gradients_are_transformers_where_every_layer_stays(folder: Path) -> None:
    gradients = []
    oracle = slot_models.oracle(folder, torch.float32)
    with whole(folder, resident_gb="all") as model:
        for each in (oracle, model.model):
            embedded = oracle.get_input_embeddings()(IDS).detach().requires_grad_()
            each(inputs_embeds=embedded).logits.sum().backward()
            gradients.append(embedded.grad)
    assert torch.equal(*gradients)


def test_experts_in_slots_refuse_gradients_with_all_dense_weights_resident(folder: Path) -> None:
    with load(folder, resident_gb="all") as model:
        embedded = model.model.get_input_embeddings()(IDS).detach().requires_grad_()
        with pytest.raises(UnsupportedModelError, match="gradients"):
            model.model(inputs_embeds=embedded)


@pytest.mark.parametrize(("layers", "warned"), [(0, False), (0.99, True), (1, False)])
def test_a_resident_gb_that_holds_no_layer_is_said(
    layers: float, warned: bool, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with load(folder) as model:
        first = model._streamer.plan.layers[0]
    with load(folder, resident_gb=layers * first / 2**30) as model:
        assert model._streamer.plan.resident == int(layers)
    assert (f"the first one has {first} B" in caplog.text) is warned


@pytest.mark.parametrize("value", ["disk", 1, True])
def test_a_wrong_source_is_refused(value: Any, folder: Path) -> None:
    with pytest.raises(OptionError, match="stream_from must be 'auto' or 'file' or 'host'"):
        parse_options(folder, device="cpu", stream_from=value)


@gpu
@pytest.mark.parametrize("slots", [True, False], ids=["beside slots", "whole layers"])
def test_on_a_gpu_the_layers_are_pinned_and_only_copied(slots: bool, folder: Path) -> None:
    oracle = slot_models.oracle(folder, torch.float32, device="cuda:0")
    ids = IDS.to("cuda:0")
    more: dict[str, Any] = {"expert_cache_backend": "slot", "expert_cache_gb": 0.0005, "resident_gb": 0} if slots else {}
    more |= {} if slots else {"stream_from": "host", "experts_implementation": "eager"}
    with AutoModel.from_pretrained(folder, device="cuda:0", dtype="float32", **more) as model:
        before = model.get_stream_stats()
        assert torch.equal(families.greedy(model, ids, 8), families.greedy(oracle, ids, 8))
        after = model.get_stream_stats()
        assert (after["streamed_from"], after["pinned"], after["bytes_read"]) == ("host", True, before["bytes_read"])
        assert after["h2d_bytes"] > before["h2d_bytes"]
