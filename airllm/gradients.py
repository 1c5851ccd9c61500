"""No gradients through weights that others take the place of before the way back."""

from __future__ import annotations

import torch

from airllm.errors import UnsupportedModelError


def refuse_gradients(*inputs: object) -> None:
    """Raises UnsupportedModelError when autograd would keep weights, of a streamed layer or of experts in slots, for later."""
    if torch.is_grad_enabled() and any(isinstance(each, torch.Tensor) and each.requires_grad for each in inputs):
        raise UnsupportedModelError(
            "gradients cannot flow through weights that come and go: compute under torch.no_grad(), or take plain transformers"
        )
