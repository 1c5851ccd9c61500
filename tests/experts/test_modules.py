"""What stands where the model's experts stood: found by contract, holding nothing, called positionally."""

from __future__ import annotations

import families
import pytest
import torch
import transformers
from slot_rig import Rig

from airllm.errors import UnsupportedModelError
from airllm.experts.modules import SlotExperts, find_experts


def on_meta(family: str) -> torch.nn.Module:
    with torch.device("meta"):
        return transformers.AutoModelForCausalLM.from_config(families.make_config(family))


@pytest.mark.parametrize(("family", "count"), [("phimoe", 3), ("mixtral", 3), ("qwen3_moe", 3), ("deepseek_v3", 2)])
def test_every_layer_with_experts_is_found_in_order(family: str, count: int) -> None:
    found = list(find_experts(on_meta(family)))
    assert len(found) == count
    layers = [int(name.split(".")[2]) for name in found]
    assert layers == sorted(layers) and all(name.endswith("mlp.experts") for name in found)


def test_a_dense_model_is_refused_with_the_remedy() -> None:
    with pytest.raises(UnsupportedModelError, match='LlamaForCausalLM.*expert_cache_backend="none"'):
        find_experts(on_meta("llama"))


def test_the_module_holds_no_weights_and_registers_nothing() -> None:
    rig = Rig(3)
    module = SlotExperts(rig.oracles[1], rig.runtime, 1)
    assert not list(module.parameters()) and not list(module.buffers()) and not module.state_dict()
    assert [name for name, _ in module.named_modules()] == [""]
    assert "layer=1" in repr(module) and "experts=8" in repr(module)


def test_the_call_is_that_of_the_module_it_replaces() -> None:
    rig = Rig(3)
    modules = [SlotExperts(oracle, rig.runtime, layer) for layer, oracle in enumerate(rig.oracles)]
    for tokens in (1, 9):
        for layer, module in enumerate(modules):
            asked = rig.draw(tokens)
            assert torch.equal(module(*asked), rig.expected(layer, *asked))
    rig.check()
