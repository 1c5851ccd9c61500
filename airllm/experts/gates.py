"""What lies between an expert's two products, as numbers that a kernel can take: found by trying, for families write it in
many ways."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch.nn.functional import gelu, relu

from airllm.experts.compute import ApplyGate

ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "relu", "relu2")
_STEP, _FAR = 0.25, 1e6


class Gate(NamedTuple):
    """``activation(min(gate, limit)) * (up within ±limit + offset)``; without ``gated`` the activation of all that there is.

    ``interleaved``: gate and up take turns, else all of gate comes first. ``slope``: of silu, x * sigmoid(slope * x).
    """

    activation: str = "silu"
    gated: bool = True
    interleaved: bool = False
    slope: float = 1.0
    offset: float = 0.0
    limit: float = math.inf

    @property
    def parts(self) -> int:
        """Rows of the first projection for each row of the second one's input."""
        return 2 if self.gated else 1

    def apply(self, both: torch.Tensor) -> torch.Tensor:
        """[..., I] of the first product [..., parts * I]."""
        if not self.gated:
            return self._activate(both)
        gate, up = (both[..., ::2], both[..., 1::2]) if self.interleaved else both.chunk(2, dim=-1)
        if math.isfinite(self.limit):
            gate, up = gate.clamp(max=self.limit), up.clamp(min=-self.limit, max=self.limit)
        return self._activate(gate) * (up + self.offset)

    def _activate(self, x: torch.Tensor) -> torch.Tensor:
        if self.activation == "silu":
            return x * torch.sigmoid(self.slope * x)
        if self.activation.startswith("gelu"):
            return gelu(x, approximate="tanh" if self.activation == "gelu_tanh" else "none")
        return relu(x) ** (2 if self.activation == "relu2" else 1)


PLAIN = Gate()
"""silu(gate) * up, gate first: that of most families."""


def find_gate(apply_gate: ApplyGate) -> Gate | None:
    """The gate that gives what ``apply_gate`` gives; None when none of those known does."""
    try:
        gated = apply_gate(torch.zeros(1, 4, dtype=torch.float64)).shape[-1] == 2
        candidates = _gated(apply_gate) if gated else _simple(apply_gate)
        return next((gate for gate in candidates if _agree(gate, apply_gate)), None)
    except (RuntimeError, TypeError, IndexError, ValueError):  # it takes no samples: weights of its own, on another device
        return None


def _simple(apply_gate: ApplyGate) -> Iterator[Gate]:
    for activation in ACTIVATIONS:
        yield Gate(activation, gated=False, slope=_slope(_at(apply_gate, [_STEP])) if activation == "silu" else 1.0)


def _gated(apply_gate: ApplyGate) -> Iterator[Gate]:
    """Offset, limit and slope are read off a few values; whether they explain all of them is seen afterwards."""
    for interleaved in (False, True):  # one gate and one up lie alike either way
        none, some, most = (_at(apply_gate, [_STEP, up]) for up in (0.0, _STEP, _FAR))
        activated = (some - none) / _STEP
        if not activated:
            return
        offset = _rounded(none / activated)
        limit = _rounded(most / activated - offset)
        limit = math.inf if limit > _FAR / 2 else limit
        for activation in ACTIVATIONS:
            slope = _slope(activated) if activation == "silu" else 1.0
            yield Gate(activation, True, interleaved, slope, offset, limit)


def _at(apply_gate: ApplyGate, values: list[float]) -> float:
    return float(apply_gate(torch.tensor([values], dtype=torch.float64)))


def _slope(activated: float) -> float:
    """The slope with which silu gives ``activated`` at _STEP; 1 where none does."""
    share = activated / _STEP
    return _rounded(math.log(share / (1 - share)) / _STEP) if 0 < share < 1 else 1.0


def _rounded(value: float) -> float:
    return float(f"{value:.5g}")


def _agree(gate: Gate, apply_gate: ApplyGate) -> bool:
    far = 3 * gate.limit if math.isfinite(gate.limit) else 20.0
    values = torch.cat([torch.linspace(-6, 6, 46), torch.tensor([far, -far])]).double()
    sample = torch.stack([values, values.flip(0), values.roll(7), values.roll(11).flip(0)])
    ours, theirs = gate.apply(sample), apply_gate(sample)
    return ours.shape == theirs.shape and torch.allclose(ours, theirs.double(), rtol=1e-4, atol=1e-5)
