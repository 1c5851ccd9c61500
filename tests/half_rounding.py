"""What half precision's rounding does to a model, done to one in single precision."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

HALF_STEP = 2.0**-11  # float16 rounds by so much at most, relative


@contextmanager
def disturbed(model: Any) -> Iterator[None]:
    """Inside, each value that a layer of ``model`` gives is off by up to float16's rounding; the same each time."""
    generator = torch.Generator(model.device).manual_seed(0)

    def disturb(_module: Any, _args: Any, hidden: torch.Tensor) -> torch.Tensor:
        return hidden * (1 + HALF_STEP * (2 * torch.rand(hidden.shape, generator=generator, device=hidden.device) - 1))

    hooks = [layer.register_forward_hook(disturb) for layer in model.model.layers]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
