"""Putting the slot backend into a model: what is found, planned, allocated in which order, swapped and taken out again."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import families
import pytest
import torch

from airllm.checkpoint import CheckpointIndex, TensorReader
from airllm.errors import BudgetError, HostMemoryError, UnsupportedModelError
from airllm.experts import assembly, host_memory
from airllm.experts.assembly import ExpertsFound, install, kv_cache_bytes, workspace_bytes
from airllm.experts.budget import MIB
from airllm.experts.layout import ExpertLayout, ModelLayout
from airllm.experts.modules import SlotExperts
from airllm.skeleton import build_skeleton, load_config, load_resident, move_buffers, tie_weights
from airllm.weight_map import build_weight_map

CPU = torch.device("cpu")
EXPERT_BYTES = 3 * 64 * 128 * 4


class Built:
    """A model on meta with all that `install` wants."""

    def __init__(self, folder: Path) -> None:
        self.config = load_config(folder)
        self.reader = TensorReader(2)
        self.model = build_skeleton(self.config, dtype=torch.float32, experts_implementation="eager")
        self.weight_map = build_weight_map(self.model, CheckpointIndex.open(folder), dtype=torch.float32)
        self.found = ExpertsFound.of(self.model, 2)

    def install(self, slots: int = 5) -> Any:
        plan = self.found.plan(slots * EXPERT_BYTES)
        return install(
            self.model, self.found, plan, weight_map=self.weight_map, reader=self.reader, device=CPU, pin=True, progress=False
        )

    def load_dense(self) -> None:
        names = [name for name in self.weight_map.targets() if name not in self.found.parameter_names()]
        load_resident(self.model, self.weight_map, names, self.reader, CPU)
        tie_weights(self.model)
        move_buffers(self.model, CPU)


@pytest.fixture
def built(checkpoint: Callable[..., Path]) -> Built:
    return Built(checkpoint("phimoe"))


def test_the_cache_of_latent_attention_is_counted_by_its_own_widths() -> None:
    config = families.make_config("deepseek_v3")
    layout = ModelLayout.of(ExpertLayout.from_shapes([("down_proj", (4, 4), torch.float32)], 1), 1)
    assert kv_cache_bytes(config, 10, layout) == 3 * 4 * (8 + 8 + 8) * 10 * 4


def test_all_experts_of_the_model_are_found(built: Built) -> None:
    assert built.found.total == 24 and built.found.layout.expert_bytes == EXPERT_BYTES
    assert built.found.parameter_names() == {
        f"model.layers.{layer}.mlp.experts.{name}" for layer in range(3) for name in ("gate_up_proj", "down_proj")
    }


def test_a_dense_model_has_none() -> None:
    with torch.device("meta"):
        model = families.transformers.AutoModelForCausalLM.from_config(families.make_config("llama"))
    with pytest.raises(UnsupportedModelError, match="dense"):
        ExpertsFound.of(model, 2)


@pytest.mark.parametrize(("experts", "slots", "scratch"), [(2, 2, 2), (3, 3, 2), (23, 23, 2), (24, 24, 0), (999, 24, 0)])
def test_the_plan_counts_whole_experts(experts: int, slots: int, scratch: int, built: Built) -> None:
    plan = built.found.plan(experts * EXPERT_BYTES + EXPERT_BYTES - 1)
    reason = "as asked; every expert has a slot" if slots == 24 else "as asked"
    assert (plan.slots, plan.scratch, plan.reason) == (slots, scratch, reason)


def test_a_budget_below_one_token_is_refused(built: Built) -> None:
    with pytest.raises(BudgetError, match=f"{2 * EXPERT_BYTES} B for 2 experts.*got {2 * EXPERT_BYTES - 1} B"):
        built.found.plan(2 * EXPERT_BYTES - 1)


def test_the_kv_cache_is_counted_with_the_heads_own_width(built: Built) -> None:
    # two (keys and values) x 3 layers x 2 heads x head_dim 32 (not 64/4) x 10 tokens x 4 B
    assert kv_cache_bytes(built.config, 10, built.found.layout) == 2 * 3 * 2 * 32 * 10 * 4
    assert workspace_bytes(built.config, 20, built.found.layout) > workspace_bytes(built.config, 10, built.found.layout) > 0


def test_auto_takes_what_is_left_and_says_what_it_left(built: Built, monkeypatch: pytest.MonkeyPatch) -> None:
    bank = 24 * EXPERT_BYTES
    needed = kv_cache_bytes(built.config, 512, built.found.layout) + workspace_bytes(built.config, 512, built.found.layout)
    needed += assembly.RESERVE_BYTES + 2 * EXPERT_BYTES
    monkeypatch.setattr(host_memory, "available_bytes", lambda: bank + needed + 7 * EXPERT_BYTES)
    plan = built.found.plan_auto(built.config, CPU, 512)
    assert (plan.slots, plan.scratch) == (7, 2)
    assert "auto" in plan.reason and "KV cache for 512 tokens" in plan.reason and "reserve" in plan.reason
    assert built.found.plan_auto(built.config, CPU, 256).slots > 7
    monkeypatch.setattr(host_memory, "available_bytes", lambda: bank + needed + 2 * EXPERT_BYTES - 1)
    with pytest.raises(BudgetError):
        built.found.plan_auto(built.config, CPU, 512)


def test_auto_on_a_gpu_asks_the_device(built: Built, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (asked.append(device), (2**30, 2**32))[1])
    plan = built.found.plan_auto(built.config, torch.device("cuda:3"), 512)
    assert asked == [torch.device("cuda:3")] and plan.slots == 24 and f"{2**30 // MIB} MiB free" in plan.reason


def test_installing_swaps_every_experts_module_and_leaves_nothing_of_them(built: Built) -> None:
    runtime, _ = built.install()
    swapped = [module for module in built.model.modules() if isinstance(module, SlotExperts)]
    assert [module.layer for module in swapped] == [0, 1, 2]
    assert not built.found.parameter_names() & set(dict(built.model.named_parameters()))
    assert all(not list(module.parameters()) for module in built.found.modules.values())
    assert (runtime.layers, runtime.top_k, runtime.num_experts) == (3, 2, 8)
    assert runtime.bank.experts == 24 and not runtime.bank.pinned, "on the CPU there is nothing to pin for"


def test_a_device_that_is_too_small_costs_no_bank(built: Built, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise BudgetError("too small")

    monkeypatch.setattr(assembly, "SlotPool", refuse)
    monkeypatch.setattr(assembly, "HostBank", None)
    with pytest.raises(BudgetError, match="too small"):
        built.install()


def test_a_host_that_is_too_small_leaves_the_model_as_it_was(built: Built, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_memory, "available_bytes", lambda: 1000)
    with pytest.raises(HostMemoryError):
        built.install()
    assert not any(isinstance(module, SlotExperts) for module in built.model.modules())
    assert built.found.parameter_names() <= set(dict(built.model.named_parameters()))


def test_each_forward_tells_its_shape_until_the_hook_is_taken_out(built: Built, monkeypatch: pytest.MonkeyPatch) -> None:
    runtime, remove = built.install()
    built.load_dense()
    told: list[tuple[int, int]] = []
    monkeypatch.setattr(runtime, "begin_forward", lambda batch, sequence, _device: told.append((batch, sequence)))
    ids = families.prompt(built.model, 9, 2)
    with torch.no_grad():
        built.model(ids)
        built.model(input_ids=ids[:, :3])
        built.model(inputs_embeds=built.model.get_input_embeddings()(ids[:1]))
        built.model.model(ids[:1, :4])
        assert told == [(2, 9), (2, 3), (1, 9), (1, 4)]
        remove()
        built.model(ids)
    assert len(told) == 4


def test_the_installed_model_is_the_oracle(built: Built, checkpoint: Callable[..., Path]) -> None:
    runtime, _ = built.install()
    built.load_dense()
    oracle = families.oracle(checkpoint("phimoe"))
    ids = families.prompt(oracle, 21, 2)
    with torch.no_grad():
        assert torch.equal(built.model(ids).logits, oracle(ids).logits)
    runtime.policy.check()
