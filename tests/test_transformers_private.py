from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import families
import pytest
import torch
from transformers.core_model_loading import Chunk, Concatenate, MergeModulelist, Transpose, WeightConverter

from airllm import transformers_private as private
from airllm.errors import AirLLMError
from airllm.skeleton import build_skeleton, load_config

Checkpoint = Callable[..., Path]


def test_the_installed_transformers_loads_as_this_package_expects() -> None:
    private.self_test()


def plant_no_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(private, "_initialise", lambda model: None)


def plant_alphabetic_experts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(private, "natural_key", str)


def plant_unknown_layout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(private, "layout_of", lambda converter: None)


def plant_other_values(monkeypatch: pytest.MonkeyPatch) -> None:
    convert = private.Conversions.convert

    def nudged(self: private.Conversions, *args: object) -> dict[str, torch.Tensor]:
        return {name: tensor * 1.01 for name, tensor in convert(self, *args).items()}  # type: ignore[arg-type]

    monkeypatch.setattr(private.Conversions, "convert", nudged)


@pytest.mark.parametrize(
    "plant, names",
    [
        (plant_no_buffers, "inv_freq"),
        (plant_alphabetic_experts, "gate_up_proj"),
        (plant_unknown_layout, "expert layout"),
        (plant_other_values, "down_proj"),
    ],
)
def test_the_self_test_names_what_differs(
    monkeypatch: pytest.MonkeyPatch, plant: Callable[[pytest.MonkeyPatch], None], names: str
) -> None:
    plant(monkeypatch)
    with pytest.raises(AirLLMError, match=names):
        private.self_test()


def test_the_self_test_leaves_the_random_state_and_the_default_dtype_alone() -> None:
    before, dtype = torch.random.get_rng_state(), torch.get_default_dtype()
    private.self_test()
    assert torch.equal(before, torch.random.get_rng_state()) and torch.get_default_dtype() == dtype


@pytest.mark.parametrize(
    "sources, operations, layout",
    [
        (["a.*.w"], [MergeModulelist(0)], "stack"),
        (["a.*.w", "b.*.w"], [MergeModulelist(0), Concatenate(1)], "stack_join"),
        (["a.w", "b.w"], [Concatenate(0)], "join"),
        (["a.*.w", "b.*.w"], [MergeModulelist(0), Concatenate(2)], None),
        (["a.*.w"], [MergeModulelist(1)], None),
        (["a.w", "b.w"], [Concatenate(1)], None),
        (["a.w"], [Transpose(0, 1)], None),
        (["a.*.w"], [MergeModulelist(0), Transpose(1, 2)], None),
        (["a.w"], [Chunk(0)], None),
    ],
)
def test_only_byte_preserving_converters_are_read_straight(
    sources: list[str], operations: list[object], layout: str | None
) -> None:
    assert private.layout_of(WeightConverter(sources, ["t"], operations)) == layout


def test_a_converter_with_several_targets_is_not_read_straight() -> None:
    assert private.layout_of(WeightConverter(["a.w"], ["s", "t"], [Chunk(0)])) is None


@pytest.mark.parametrize("family", families.FAMILIES)
def test_experts_modules_are_found_in_mixtures_only(checkpoint: Checkpoint, family: str) -> None:
    model = build_skeleton(load_config(checkpoint(family)), dtype=torch.float32)
    model.convolution = torch.nn.Conv1d(1, 1, 1)  # three dimensions do not make it experts
    found = private.expert_modules(model)
    sparse = {"deepseek_v3": 2}.get(family, 3) if family in families.MOE_FAMILIES else 0
    assert len(found) == sparse
    assert all(name.endswith("mlp.experts") for name, _ in found)
