"""Layers come and go through a few blocks: whatever is asked, read, skipped or broken, the weights are the right ones.

Every test runs with poison: a block is filled with NaN just before it is read into, and when its layer has ended.
"""

from __future__ import annotations

import math
import random
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import families
import pytest
import torch
from broken_disk import breaking_disk
from torch import nn

from airllm import layer_layout, skeleton
from airllm.airllm_base import AirLLMBaseModel
from airllm.checkpoint import CheckpointIndex, TensorReader
from airllm.dense_budget import following, plan_dense
from airllm.errors import CheckpointError
from airllm.layer_layout import plan_layers
from airllm.weight_map import build_weight_map

LAYERS = 7


class Stop(Exception):
    """Raised by tests inside layers and reads."""


@pytest.fixture(autouse=True)
def poison(poisoned_blocks: None) -> None:
    """See conftest."""


@pytest.fixture(params=[True, False], ids=["prefetch", "no-prefetch"])
def prefetching(request: pytest.FixtureRequest) -> bool:
    return request.param


@pytest.fixture
def folder(checkpoint: Callable[..., Path]) -> Path:
    return checkpoint("llama", num_hidden_layers=LAYERS)


@pytest.fixture
def model(folder: Path, device: str, prefetching: bool) -> Iterator[AirLLMBaseModel]:
    made = AirLLMBaseModel(folder, device=device, prefetching=prefetching)
    yield made
    made.close()


@pytest.fixture
def expected(folder: Path) -> Callable[[torch.Tensor], torch.Tensor]:
    """The oracle's logits, on the CPU."""
    oracle = families.oracle(folder)

    def logits(ids: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            return oracle(ids).logits

    return logits


def ids(length: int = 6) -> torch.Tensor:
    return torch.randint(3, 256, (1, length), generator=torch.Generator().manual_seed(1))


def close_to(ours: torch.Tensor, oracle: torch.Tensor) -> bool:
    return torch.allclose(ours.cpu(), oracle, atol=1e-5, rtol=1e-5)


def layers_of(model: AirLLMBaseModel) -> list[nn.Module]:
    return list(model.model.model.layers)


# --- the ring ---------------------------------------------------------------------------------------------------------


def test_forward_after_forward_is_right(model: AirLLMBaseModel, expected: Any) -> None:
    for length in (6, 1, 9):
        assert close_to(model(ids(length)).logits, expected(ids(length)))


def test_nothing_is_allocated_for_a_layer(model: AirLLMBaseModel) -> None:
    seen = []

    def note(module: nn.Module, *_: Any) -> None:
        seen.append({p.untyped_storage().data_ptr() for p in module.parameters()})

    for layer in layers_of(model):
        layer.self_attn.register_forward_pre_hook(note)
    for _ in range(3):
        model(ids())
    blocks = {block.untyped_storage().data_ptr() for block in model._streamer._blocks}
    assert len(seen) == 3 * LAYERS
    assert set().union(*seen) == blocks and len(blocks) <= 3
    made = len(model._streamer._parameters)
    model(ids())
    assert len(model._streamer._parameters) == made, "views are made once for a layout and a block"


def test_parameters_are_on_meta_outside_their_layer_and_aligned_inside(model: AirLLMBaseModel) -> None:
    inside = []

    def note(module: nn.Module, *_: Any) -> None:
        here = [p for p in module.parameters()]
        others = [p for layer in layers_of(model) if layer is not module for p in layer.parameters()]
        inside.append(all(p.data_ptr() % 64 == 0 and not p.is_meta for p in here) and all(p.is_meta for p in others))

    for layer in layers_of(model):
        layer.register_forward_pre_hook(note)  # runs after the streamer's own
    before = [id(p) for p in model.model.parameters()]
    model(ids())
    assert inside == [True] * LAYERS
    assert all(p.is_meta for layer in layers_of(model) for p in layer.parameters())
    assert [id(p) for p in model.model.parameters()] == before


def test_the_layers_of_the_next_token_are_read_ahead(folder: Path, device: str) -> None:
    model = AirLLMBaseModel(folder, device=device)
    model(ids())
    for fill in model._streamer._fills:
        fill.result(10)
    assert set(model._streamer._holds) >= {0, 1}
    model(ids())
    assert model.get_stream_stats()["layers_ready_in_time"] >= 1
    model.close()


def test_layers_of_different_sizes_share_the_blocks(checkpoint: Callable[..., Path], device: str) -> None:
    folder = checkpoint("deepseek_v3", num_hidden_layers=5, first_k_dense_replace=2, intermediate_size=1024)
    with AirLLMBaseModel(folder, device=device) as model:
        layouts = model._streamer._layouts
        assert len({layout.nbytes for layout in layouts}) > 1
        assert {block.numel() for block in model._streamer._blocks} == {max(layout.nbytes for layout in layouts)}
        oracle = families.oracle(folder, experts=None)
        with torch.no_grad():
            assert close_to(model(ids()).logits, oracle(ids()).logits)
            assert close_to(model(ids()).logits, oracle(ids()).logits)


def test_layers_read_in_many_pieces_are_whole(folder: Path, monkeypatch: pytest.MonkeyPatch, expected: Any) -> None:
    monkeypatch.setattr(layer_layout, "PIECE_BYTES", 1000)
    with AirLLMBaseModel(folder, device="cpu") as model:
        assert len(model._streamer._layouts[0].pieces) > 20
        assert close_to(model(ids()).logits, expected(ids()))


@pytest.mark.parametrize("shards", [1, 4])
def test_a_layer_spread_over_files_is_whole(shards: int, checkpoint: Callable[..., Path]) -> None:
    folder = checkpoint("mixtral", num_hidden_layers=5, shards=shards)
    oracle = families.oracle(folder, experts=None)
    with AirLLMBaseModel(folder, device="cpu") as model, torch.no_grad():
        assert close_to(model(ids()).logits, oracle(ids()).logits)


# --- layers that are not asked for in order ---------------------------------------------------------------------------


def test_layers_called_in_any_order_have_their_own_weights(model: AirLLMBaseModel, folder: Path) -> None:
    oracle = families.oracle(folder)
    order = random.Random(3).choices(range(LAYERS), k=60) + [2, 2, 2]
    for number in order:
        asked = oracle.model.layers[number].mlp
        hidden = torch.randn(1, 3, 32, generator=torch.Generator().manual_seed(number))
        seen = {}
        # An interrupt skips the hook that takes the weights back: the next layer's beginning has to do it.
        error = KeyboardInterrupt if number % 2 else Stop

        def take(
            module: nn.Module, args: Any, seen: Any = seen, hidden: torch.Tensor = hidden, error: Any = error
        ) -> None:
            seen["mlp"] = module.mlp(hidden.to(module.mlp.up_proj.weight.device))
            assert sum(not layer.mlp.up_proj.weight.is_meta for layer in layers_of(model)) == 1
            raise error

        hook = layers_of(model)[number].register_forward_pre_hook(take)
        with pytest.raises(error), torch.no_grad():
            layers_of(model)[number](hidden)
        hook.remove()
        with torch.no_grad():
            assert close_to(seen["mlp"], asked(hidden)), f"layer {number} has another layer's weights"


def test_skipped_and_swapped_layers_are_right(model: AirLLMBaseModel, folder: Path) -> None:
    oracle = families.oracle(folder)
    for order in ([0, 2, 4, 6], [6, 5, 4, 3, 2, 1, 0], [1, 1, 3, 3], [5]):
        ours, theirs = layers_of(model), list(oracle.model.layers)
        for one, all_layers in ((model.model, ours), (oracle, theirs)):
            one.model.layers = nn.ModuleList([all_layers[number] for number in order])
            one.config.num_hidden_layers = len(order)
        with torch.no_grad():
            for _ in range(2):
                got = model(ids(), use_cache=False).logits
                assert close_to(got, oracle(ids(), use_cache=False).logits), order
        model.model.model.layers, oracle.model.layers = nn.ModuleList(ours), nn.ModuleList(theirs)
        model.model.config.num_hidden_layers = oracle.config.num_hidden_layers = LAYERS


# --- ordering ---------------------------------------------------------------------------------------------------------


def test_slow_reads_change_nothing(model: AirLLMBaseModel, monkeypatch: pytest.MonkeyPatch, expected: Any) -> None:
    scatter, rng = TensorReader.scatter, random.Random(1)

    def slow(self: TensorReader, read: Any) -> None:
        time.sleep(rng.random() * 0.01)
        scatter(self, read)

    monkeypatch.setattr(TensorReader, "scatter", slow)
    for _ in range(3):
        assert close_to(model(ids()).logits, expected(ids()))


def test_slow_layers_change_nothing(model: AirLLMBaseModel, expected: Any) -> None:
    for layer in layers_of(model):
        layer.self_attn.register_forward_pre_hook(lambda *_: time.sleep(0.003))
    for _ in range(3):
        assert close_to(model(ids()).logits, expected(ids()))


@pytest.mark.gpu
@pytest.mark.parametrize("where", ["copy", "compute"])
def test_a_delay_on_either_stream_changes_nothing(where: str, folder: Path, expected: Any) -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    with AirLLMBaseModel(folder, device="cuda:0") as model:
        transfer: Any = model._streamer._transfer
        if where == "copy":
            copy = transfer.copy

            def late(source: torch.Tensor, target: torch.Tensor, place: int) -> None:
                with torch.cuda.stream(transfer._stream):
                    torch.cuda._sleep(5_000_000)
                copy(source, target, place)

            transfer.copy = late
        else:
            for layer in layers_of(model):
                layer.mlp.register_forward_pre_hook(lambda *_: torch.cuda._sleep(5_000_000))
        for _ in range(4):
            assert close_to(model(ids()).logits, expected(ids()))


# --- what breaks ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("error", [Stop, KeyboardInterrupt])
@pytest.mark.parametrize("moment", ["before", "in", "after"])
def test_an_exception_at_any_layer_reaches_the_caller_and_the_next_call_is_right(
    moment: str, error: type[BaseException], model: AirLLMBaseModel, expected: Any
) -> None:
    clean = model.generate(ids(), max_new_tokens=4, min_new_tokens=4, do_sample=False)
    for number in range(0, LAYERS, 2):
        for forward in (0, 2):  # the prompt, the third token
            original = error("here")
            count = iter(range(100))

            def fail(
                *_: Any, count: Any = count, forward: int = forward, original: BaseException = original
            ) -> None:
                if next(count) == forward:
                    raise original

            layer = layers_of(model)[number]
            hook = {
                "before": lambda layer=layer, fail=fail: layer.register_forward_pre_hook(fail, prepend=True),
                "in": lambda layer=layer, fail=fail: layer.mlp.act_fn.register_forward_pre_hook(fail),
                "after": lambda layer=layer, fail=fail: layer.register_forward_hook(fail),
            }[moment]()
            with pytest.raises(error) as raised:
                model.generate(ids(), max_new_tokens=4, min_new_tokens=4, do_sample=False)
            hook.remove()
            assert raised.value is original
            assert all(p.is_meta for each in layers_of(model) for p in each.parameters())
            again = model.generate(ids(), max_new_tokens=4, min_new_tokens=4, do_sample=False)
            assert torch.equal(again, clean)


def test_a_read_error_reaches_the_caller_and_the_next_call_is_right(
    model: AirLLMBaseModel, monkeypatch: pytest.MonkeyPatch, expected: Any
) -> None:
    broken, original = breaking_disk(monkeypatch)
    for _ in range(3):
        model(ids())
        broken.set()
        with pytest.raises(CheckpointError) as raised:
            model(ids())
        assert raised.value is original
        broken.clear()
        assert close_to(model(ids()).logits, expected(ids()))


def test_a_read_that_failed_while_guessing_is_tried_again(
    folder: Path, monkeypatch: pytest.MonkeyPatch, expected: Any
) -> None:
    scatter, failures = TensorReader.scatter, iter([CheckpointError("for a moment")])

    def fail(self: TensorReader, read: Any) -> None:
        for error in failures:
            raise error
        scatter(self, read)

    with AirLLMBaseModel(folder, device="cpu") as model:
        monkeypatch.setattr(TensorReader, "scatter", fail)
        model._streamer._begin_fill(0, 1)
        assert isinstance(model._streamer._fills[1].exception(10), CheckpointError)
        assert close_to(model(ids()).logits, expected(ids()))


def test_an_interrupt_just_after_a_read_was_queued_does_not_mix_up_the_blocks(
    folder: Path, monkeypatch: pytest.MonkeyPatch, expected: Any
) -> None:
    with AirLLMBaseModel(folder, device="cpu") as model:
        worker = model._streamer._worker
        submit, countdown = worker.submit, [0]

        def interrupted(*args: Any) -> Any:
            future = submit(*args)
            countdown[0] -= 1
            if countdown[0] == 0:
                raise KeyboardInterrupt
            return future

        monkeypatch.setattr(worker, "submit", interrupted)
        for moment in range(1, LAYERS):
            model(ids())
            countdown[0] = moment
            with pytest.raises(KeyboardInterrupt):
                model(ids())
            assert close_to(model(ids()).logits, expected(ids()))


def test_a_fill_whose_turn_comes_too_late_leaves_the_block_alone(folder: Path) -> None:
    with AirLLMBaseModel(folder, device="cpu") as model:
        streamer = model._streamer
        for number in (5, 2):
            streamer._begin_fill(number, 0)
            streamer._fills[0].result(30)
        held = streamer._blocks[0].clone()
        streamer._fill(5, 0, streamer._tickets[0] - 1)
        assert torch.equal(streamer._blocks[0], held)


def test_a_streamer_that_raises_leaves_the_model_usable(model: AirLLMBaseModel) -> None:
    class Full:
        seen = 0

        def put(self, value: torch.Tensor) -> None:
            self.seen += 1
            if self.seen == 3:
                raise Stop("the consumer is gone")

        def end(self) -> None: ...

    clean = model.generate(ids(), max_new_tokens=4, min_new_tokens=4)
    with pytest.raises(Stop, match="the consumer is gone"):
        model.generate(ids(), max_new_tokens=4, min_new_tokens=4, streamer=Full())
    assert torch.equal(model.generate(ids(), max_new_tokens=4, min_new_tokens=4), clean)


def test_a_file_cut_short_after_loading_is_an_error_not_zeros(checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    folder = families.make_checkpoint("llama", tmp_path / "m", num_hidden_layers=LAYERS)
    with AirLLMBaseModel(folder, device="cpu") as model:
        file = folder / "model.safetensors"
        whole = file.read_bytes()
        with open(file, "r+b") as handle:
            handle.truncate(len(whole) // 2)
        with pytest.raises(CheckpointError, match="changed since it was checked"):
            for _ in range(2):
                model(ids())
        file.write_bytes(whole)


# --- what is streamed -------------------------------------------------------------------------------------------------


def plan(folder: Path, change: Callable[[Any], None] = lambda model: None) -> tuple[Any, list[Any]]:
    index = CheckpointIndex.open(folder)
    model = skeleton.build_skeleton(skeleton.load_config(folder), dtype=torch.float32, folder=folder)
    change(model)
    weight_map = build_weight_map(model, index, dtype=torch.float32)
    return model, plan_layers(model, skeleton.decoder_layers(model)[1], weight_map)


@pytest.mark.parametrize("family", families.FAMILIES)
def test_every_parameter_of_every_layer_is_streamed_and_no_two_overlap(
    family: str, checkpoint: Callable[..., Path]
) -> None:
    model, layouts = plan(checkpoint(family))
    prefix = skeleton.decoder_layers(model)[0]
    names = {place.spec.name for layout in layouts for place in layout.places}
    assert names == {name for name, _ in model.named_parameters() if name.startswith(f"{prefix}.")}
    for layout in layouts:
        end = 0
        for place in sorted(layout.places, key=lambda place: place.offset):
            assert place.offset >= end and place.offset % layer_layout.ALIGN_BYTES == 0
            end = place.offset + place.spec.nbytes
        assert end <= layout.nbytes
        read = {place.spec.name: 0 for place in layout.places}
        for piece in layout.pieces:
            for chunk in piece.chunks:
                read[chunk.target] += chunk.count
            for spec in piece.converted.targets if piece.converted else ():
                read[spec.name] += math.prod(spec.shape)
        assert read == {place.spec.name: math.prod(place.spec.shape) for place in layout.places}


def test_a_persistent_buffer_of_a_layer_stays_on_the_device(checkpoint: Callable[..., Path]) -> None:
    _, layouts = plan(checkpoint("deepseek_v3"))
    names = {place.spec.name for layout in layouts for place in layout.places}
    assert not any("e_score_correction_bias" in name for name in names)
    with AirLLMBaseModel(checkpoint("deepseek_v3"), device="cpu") as model:
        biases = [buffer for name, buffer in model.model.named_buffers() if "e_score_correction_bias" in name]
        assert biases and all(not buffer.is_meta and buffer.any() for buffer in biases)


def test_a_parameter_of_two_layers_is_left_to_the_caller(folder: Path) -> None:
    def share(model: Any) -> None:
        model.model.layers[3].input_layernorm.weight = model.model.layers[1].input_layernorm.weight

    _, layouts = plan(folder, share)
    names = {place.spec.name for layout in layouts for place in layout.places}
    assert "model.layers.1.input_layernorm.weight" not in names
    assert "model.layers.3.input_layernorm.weight" not in names
    assert "model.layers.2.input_layernorm.weight" in names


def test_the_read_order_is_the_files_order(folder: Path) -> None:
    _, layouts = plan(folder)
    for layout in layouts:
        offsets = [chunk.entry.offset for piece in layout.pieces for chunk in piece.chunks]
        assert offsets == sorted(offsets)


@pytest.mark.parametrize(
    ("budget", "fit"), [(0, 0), (99, 0), (100, 1), (299, 1), (300, 2), (301, 2), (600, 3), (10**9, 3), ("all", 3)]
)
def test_as_many_first_layers_as_fit_stay(budget: int | str, fit: int) -> None:
    sizes = (100, 200, 300)
    assert plan_dense(sizes, budget).resident == fit


def test_what_follows_wraps_round_to_the_next_token() -> None:
    assert following([2, 3, 4, 5], 4, 2) == (5, 2)
    assert following([2, 3], 2, 2) == (3,)
    assert following([2], 2, 2) == ()
    assert following([0, 1, 2], 1, 0) == ()


def test_closing_ends_the_threads_and_may_be_repeated(folder: Path) -> None:
    before = threading.active_count()
    model = AirLLMBaseModel(folder, device="cpu")
    model(ids())
    assert threading.active_count() > before
    model._streamer.close()
    model.close()
    model.close()
    assert threading.active_count() == before
