"""The bank: every expert's bytes as transformers would load them, whatever the files look like, checked before it is made."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable
from pathlib import Path

import expert_files
import families
import pytest
import torch
from host_pages import process_bytes, resident_bytes
from slot_rig import Injected, MemoryWeights, experts_modules

from airllm.checkpoint import CheckpointIndex, TensorReader
from airllm.errors import HostMemoryError, WeightMapError
from airllm.experts import bank as bank_module
from airllm.experts import host_memory
from airllm.experts.bank import HEADROOM_BYTES, HostBank
from airllm.experts.layout import ExpertLayout, ModelLayout
from airllm.experts.modules import find_experts
from airllm.skeleton import build_skeleton, load_config
from airllm.weight_map import build_weight_map

from .test_host_memory import MIB, Driver


def bank_of(folder: Path, dtype: torch.dtype, reader: TensorReader, *, pin: bool = False) -> HostBank:
    model = build_skeleton(load_config(folder), dtype=dtype)
    weight_map = build_weight_map(model, CheckpointIndex.open(folder), dtype=dtype)
    modules = find_experts(model)
    layout = ModelLayout(tuple(map(ExpertLayout.from_module, modules.values())))
    return HostBank(layout, list(modules), weight_map, reader, pin=pin, progress=False)


def memory_bank(*, pin: bool = False, dtype: torch.dtype = torch.float32) -> HostBank:
    modules = experts_modules(dtype)
    layout = ModelLayout(tuple(map(ExpertLayout.from_module, modules.values())))
    return HostBank(layout, list(modules), MemoryWeights(modules), TensorReader(2), pin=pin, progress=False)  # type: ignore[arg-type]


def assert_holds_what_transformers_loads(bank: HostBank, folder: Path, dtype: torch.dtype) -> None:
    oracle = families.oracle(folder, dtype)
    for layer, prefix in enumerate(bank.prefixes):
        module = oracle.get_submodule(prefix)
        for expert in range(bank.layout.num_experts):
            gate_up, down = bank.layout.layers[layer].views(bank.block(layer * bank.layout.num_experts + expert))
            assert torch.equal(gate_up, module.gate_up_proj[expert]) and torch.equal(down, module.down_proj[expert])


@pytest.mark.parametrize("shards", [1, 4])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_a_checkpoint_with_a_file_entry_per_expert_fills_the_bank_without_a_second_copy(
    shards: int, dtype: torch.dtype, checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = checkpoint("phimoe", dtype=dtype, shards=shards)

    def refuse(*_: object) -> None:
        raise AssertionError("a tensor of its own was made; the bytes must land in the bank")

    with monkeypatch.context() as patch, TensorReader(2) as reader:
        patch.setattr(TensorReader, "read", refuse)
        bank = bank_of(folder, dtype, reader)
        assert reader.bytes_read == bank.experts * 3 * 64 * 128 * 2, "each byte is read once"
    assert (bank.experts, bank.nbytes) == (24, 24 * bank.layout.expert_bytes)
    assert (bank.tensor_reads, bank.reads_at_load, bank.reads_since_load) == (48, 48, 0)
    assert_holds_what_transformers_loads(bank, folder, dtype)


def test_a_stacked_checkpoint_gives_the_same_bank(checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    source = checkpoint("phimoe", dtype=torch.float16)
    folder = expert_files.stacked(source, tmp_path / "stacked")
    with TensorReader(2) as reader:
        one, two = bank_of(source, torch.float16, reader), bank_of(folder, torch.float16, reader)
    assert torch.equal(one.memory, two.memory)
    assert_holds_what_transformers_loads(two, folder, torch.float16)


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe", "olmoe"])
def test_other_families_fill_it_through_the_same_seam(family: str, checkpoint: Callable[..., Path]) -> None:
    folder = checkpoint(family)
    with TensorReader(2) as reader:
        bank = bank_of(folder, torch.float32, reader)
    assert_holds_what_transformers_loads(bank, folder, torch.float32)


def test_a_dtype_asked_for_is_cast_to_as_transformers_casts(checkpoint: Callable[..., Path]) -> None:
    folder = checkpoint("phimoe", dtype=torch.float32)
    with TensorReader(2) as reader:
        bank = bank_of(folder, torch.bfloat16, reader)
    assert_holds_what_transformers_loads(bank, folder, torch.bfloat16)


@pytest.mark.parametrize("change", ["one expert missing", "a shape that disagrees"])
def test_a_checkpoint_without_exactly_l_times_e_experts_is_an_error_that_names_them(
    change: str, checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    name = "model.layers.1.block_sparse_moe.experts.5.w2.weight"

    def damage(tensors: expert_files.Tensors) -> None:
        found = tensors.pop(name)
        if change != "one expert missing":
            tensors[name] = found[:-1].clone()

    folder = expert_files.edited(checkpoint("phimoe", dtype=torch.float16), tmp_path / "model", damage)
    with TensorReader(1) as reader, pytest.raises(WeightMapError, match=r"layers\.1.*experts"):
        bank_of(folder, torch.float16, reader)


def test_reading_an_expert_later_moves_the_counter_that_says_so() -> None:
    bank = memory_bank()
    assert bank.reads_since_load == 0
    bank.read_expert(9, [torch.empty(p.shape) for p in bank.layout.projections])
    assert bank.reads_since_load == 2 and bank.reads_at_load == 48


def test_blocks_by_key_are_the_bank_itself() -> None:
    bank = memory_bank()
    blocks = bank.blocks()
    assert len(blocks) == 24
    assert all(blocks[key].data_ptr() == bank.block(key).data_ptr() for key in range(24))


# --- before it is made ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("missing", [0, 1])
def test_memory_is_checked_before_any_is_taken(missing: int, monkeypatch: pytest.MonkeyPatch) -> None:
    need = 24 * memory_bank().layout.expert_bytes
    free = need + HEADROOM_BYTES - missing
    monkeypatch.setattr(host_memory, "available_bytes", lambda: free)
    if not missing:
        assert memory_bank().nbytes == need
        return
    monkeypatch.setattr(host_memory, "HostBlock", None)
    with pytest.raises(HostMemoryError, match=f'{need} B .24 experts.*{free} B of host memory.*backend="none"') as caught:
        memory_bank()
    assert isinstance(caught.value, MemoryError)


def test_a_system_that_does_not_say_how_much_is_free_is_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_memory, "available_bytes", lambda: None)
    assert memory_bank().experts == 24


@pytest.mark.parametrize("error", [Injected("a read failed"), KeyboardInterrupt()])
def test_a_failure_while_filling_gives_the_memory_back(error: BaseException, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[host_memory.HostBlock] = []

    class Noted(host_memory.HostBlock):
        def __init__(self, nbytes: int) -> None:
            super().__init__(nbytes)
            made.append(self)

    monkeypatch.setattr(host_memory, "HostBlock", Noted)
    left = [17]

    def read_expert(*args: object) -> None:
        left[0] -= 1
        if left[0] == 0:
            raise error

    monkeypatch.setattr(MemoryWeights, "read_expert", read_expert)
    with pytest.raises(type(error)) as caught:
        memory_bank()
    assert caught.value is error
    assert made[0].tensor.numel() == 0 and made[0]._map is None


# --- pinned or not ----------------------------------------------------------------------------------------------------


def test_refused_pinning_is_one_warning_and_a_reason(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    Driver(monkeypatch, status=2)
    with caplog.at_level(logging.WARNING, "airllm"):
        bank = memory_bank(pin=True)
    assert not bank.pinned and "ulimit" in bank.pin_reason
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "pageable" in caplog.text and "slower" in caplog.text and bank.pin_reason in caplog.text


def test_pinning_is_not_tried_when_not_asked_for(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    driver = Driver(monkeypatch)
    bank = memory_bank()
    assert driver.calls == [] and not bank.pinned and bank.pin_reason == "not asked for" and not caplog.records


def test_a_pinned_bank_is_registered_once_filled_with_its_exact_size(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver(monkeypatch)
    bank = memory_bank(pin=True)
    assert bank.pinned and driver.calls == [("register", bank.nbytes)]
    bank.close()
    assert driver.calls[-1] == "unregister"


def test_closing_a_bank_gives_its_memory_back(monkeypatch: pytest.MonkeyPatch) -> None:
    gc.collect()
    shapes = [("gate_up_proj", (2048, 512), torch.float16), ("down_proj", (512, 1024), torch.float16)]
    layout = ModelLayout.of(ExpertLayout.from_shapes(shapes, 8), 2)
    monkeypatch.setattr(bank_module.HostBank, "_fill", lambda self, _: self.memory.fill_(1))
    before = process_bytes()
    bank = HostBank(layout, ["a", "b"], MemoryWeights({}), None, pin=False)  # type: ignore[arg-type]
    place = bank.memory.data_ptr(), bank.nbytes
    assert resident_bytes(*place) == bank.nbytes
    assert process_bytes() - before < 1.05 * bank.nbytes + 2 * MIB
    bank.close()
    bank.close()
    assert resident_bytes(*place) < 0.1 * place[1] and process_bytes() - before < 0.1 * place[1]
