"""Gates are found by trying: every activation module of the installed transformers, and the gates of its families."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers.activations import ACT2FN
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssConfig, GptOssExperts

from airllm.experts.gates import Gate, find_gate

SAMPLE = torch.randn(40, 16, generator=torch.Generator().manual_seed(0)) * 4


def gated(activation):
    def apply(both):
        gate, up = both.chunk(2, dim=-1)
        return activation(gate) * up

    return apply


KNOWN = {
    "silu": Gate("silu"),
    "swish": Gate("silu"),
    "gelu": Gate("gelu"),
    "gelu_pytorch_tanh": Gate("gelu_tanh"),
    "quick_gelu": Gate("silu", slope=1.702),
    "relu": Gate("relu"),
    "relu2": Gate("relu2"),
}


@pytest.mark.parametrize("name", KNOWN)
def test_an_activation_is_recognised_with_and_without_a_gate(name):
    activation = ACT2FN[name]
    assert find_gate(gated(activation)) == KNOWN[name]
    alone = find_gate(activation)
    assert alone == KNOWN[name]._replace(gated=False)
    torch.testing.assert_close(alone.apply(SAMPLE), activation(SAMPLE), rtol=1e-4, atol=1e-5)


def test_the_interleaved_clamped_gate_of_gpt_oss_is_recognised():
    with torch.device("meta"):
        module = GptOssExperts(GptOssConfig(hidden_size=8, intermediate_size=8, num_local_experts=2))
    gate = find_gate(module._apply_gate)
    assert gate == Gate("silu", True, True, slope=1.702, offset=1.0, limit=7.0)
    torch.testing.assert_close(gate.apply(SAMPLE), module._apply_gate(SAMPLE))


def test_limits_without_an_offset_and_computing_in_float32_are_recognised():
    def clamped(both):
        gate, up = both.float().chunk(2, dim=-1)
        return (nn.functional.silu(gate.clamp(max=3.5)) * up.clamp(-3.5, 3.5)).to(both.dtype)

    assert find_gate(clamped) == Gate("silu", limit=3.5)


@pytest.mark.parametrize(
    "apply_gate",
    [
        gated(ACT2FN["tanh"]),
        gated(ACT2FN["mish"]),
        ACT2FN["sigmoid"],
        lambda both: both.chunk(2, dim=-1)[0],
        lambda both: nn.functional.silu(both[..., : both.shape[-1] // 2]),
        lambda both: both @ torch.ones(3, 3),  # weights of its own
        lambda both: gated(ACT2FN["silu"])(both) * torch.where(both[..., :1] > 2, 1.01, 1.0),
    ],
)
def test_what_is_not_known_is_no_gate(apply_gate):
    assert find_gate(apply_gate) is None
