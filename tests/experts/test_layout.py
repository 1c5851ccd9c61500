"""What one expert is: sizes of the real models, alignment, and refusal of what the slots do not serve."""

from __future__ import annotations

import families
import pytest
import torch
import transformers

from airllm.errors import UnsupportedModelError
from airllm.experts.layout import ALIGNMENT_BYTES, ExpertLayout, ModelLayout


def shapes(hidden: int, width: int, dtype: torch.dtype = torch.float16) -> list[tuple[str, tuple[int, ...], torch.dtype]]:
    return [("gate_up_proj", (2 * width, hidden), dtype), ("down_proj", (hidden, width), dtype)]


@pytest.mark.parametrize(("width", "expert_bytes"), [(448, 11_010_048), (960, 23_592_960), (6400, 157_286_400)])
def test_an_expert_of_the_published_models_has_the_published_bytes(width: int, expert_bytes: int) -> None:
    assert ExpertLayout.from_shapes(shapes(4096, width), 16).expert_bytes == expert_bytes


def test_every_projection_and_every_block_starts_on_the_boundary() -> None:
    layout = ExpertLayout.from_shapes(shapes(7, 5, torch.float32), 3)
    assert [p.offset_bytes for p in layout.projections] == [0, 512]
    assert layout.projections[0].nbytes == 280 and layout.expert_bytes == 768
    assert all(p.offset_bytes % ALIGNMENT_BYTES == 0 for p in layout.projections)
    assert layout.expert_bytes % ALIGNMENT_BYTES == 0


def test_views_are_the_block_itself_in_the_projections_shapes() -> None:
    layout = ExpertLayout.from_shapes(shapes(7, 5, torch.bfloat16), 3)
    block = torch.zeros(layout.expert_bytes, dtype=torch.uint8)
    gate_up, down = layout.views(block)
    assert gate_up.shape == (10, 7) and down.shape == (7, 5) and gate_up.dtype == torch.bfloat16
    gate_up.fill_(1.0), down.fill_(2.0)
    ends = [p.offset_bytes + p.nbytes for p in layout.projections]
    assert block[: ends[0]].view(torch.bfloat16).eq(1.0).all()
    assert not block[ends[0] : layout.projections[1].offset_bytes].any(), "the gap between projections stays as it was"
    assert block[layout.projections[1].offset_bytes : ends[1]].view(torch.bfloat16).eq(2.0).all()


def experts_of(family: str, **changes: object) -> torch.nn.Module:
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(families.make_config(family, **changes))
    return next(module for module in model.modules() if hasattr(type(module), "_apply_gate"))


def test_the_layout_comes_from_the_module_even_on_meta() -> None:
    layout = ExpertLayout.from_module(experts_of("phimoe"))
    assert layout.num_experts == 8
    assert [(p.name, p.shape) for p in layout.projections] == [("gate_up_proj", (256, 64)), ("down_proj", (64, 128))]
    assert ExpertLayout.from_module(experts_of("phimoe"), torch.float16).expert_bytes == 3 * 64 * 128 * 2


def test_biases_lie_behind_the_weight_they_belong_to() -> None:
    module = experts_of("phimoe")
    module.has_bias = True
    for name, size in (("gate_up_proj_bias", 256), ("down_proj_bias", 64)):
        module.register_parameter(name, torch.nn.Parameter(torch.empty(8, size, device="meta")))
    layout = ExpertLayout.from_module(module)
    assert [p.name for p in layout.projections] == ["gate_up_proj", "gate_up_proj_bias", "down_proj", "down_proj_bias"]
    assert layout.expert_bytes == (3 * 64 * 128 + 256 + 64) * 4


def test_a_flag_without_its_parameters_is_refused_by_name() -> None:
    module = experts_of("phimoe")
    module.has_bias = True
    with pytest.raises(UnsupportedModelError, match="expects gate_up_proj, gate_up_proj_bias, down_proj, down_proj_bias"):
        ExpertLayout.from_module(module)


def test_a_bias_beside_the_projections_is_refused_and_never_left_behind() -> None:
    module = experts_of("phimoe")
    module.register_parameter("down_proj_bias", torch.nn.Parameter(torch.empty(8, 64, device="meta")))
    with pytest.raises(UnsupportedModelError, match="down_proj_bias"):
        ExpertLayout.from_module(module)


def test_layers_that_differ_get_keys_one_behind_the_other_and_room_for_the_largest() -> None:
    one, two = ExpertLayout.from_shapes(shapes(8, 16), 4), ExpertLayout.from_shapes(shapes(8, 32), 3)
    assert ModelLayout((one, one)).uniform == one
    mixed = ModelLayout((one, two, one))
    assert mixed.uniform is None and mixed.first_keys == (0, 4, 7, 11) and mixed.total_experts == 11
    assert [mixed.locate(key) for key in (0, 3, 4, 6, 7, 10)] == [(0, 0), (0, 3), (1, 0), (1, 2), (2, 0), (2, 3)]
    assert mixed.expert_bytes == two.expert_bytes
    assert mixed.total_bytes == 8 * one.expert_bytes + 3 * two.expert_bytes
