"""Checkpoints whose weights are stored in FP8 or MXFP4: transformers' own dequantisation, into the model's dtype.

Nothing is kept quantised: what is computed is what transformers computes after ``dequantize=True``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from transformers import PretrainedConfig
from transformers.quantizers import AutoHfQuantizer, AutoQuantizationConfig

from airllm.errors import UnsupportedModelError

DEQUANTISED = ("fp8", "mxfp4")
"""Methods that are read; other methods are refused by name."""


def quantisation_of(config: PretrainedConfig) -> dict[str, Any] | None:
    """What config.json says about stored quantised weights, None for plain weights.

    Raises:
        UnsupportedModelError: they are quantised with a method that is not read; names it.
    """
    for part in (config, config.get_text_config()):
        found = getattr(part, "quantization_config", None)
        if not found:
            continue
        raw = dict(found) if isinstance(found, dict) else found.to_dict()
        method = getattr(raw.get("quant_method"), "value", raw.get("quant_method")) or "an unnamed method"
        if method not in DEQUANTISED:
            raise UnsupportedModelError(
                f"the checkpoint is quantised with {method}; airllm reads plain weights, {' and '.join(DEQUANTISED)} only: use "
                "the unquantised checkpoint (compression='4bit' or '8bit' then quantises it while it is split)"
            )
        return raw
    return None


def dequantiser(raw: dict[str, Any] | None) -> Any:
    """transformers' quantiser for such a checkpoint, set to give plain weights; None for plain weights."""
    if raw is None:
        return None
    wanted = AutoQuantizationConfig.from_dict({**raw, "dequantize": True})
    return AutoHfQuantizer.from_config(wanted, pre_quantized=True)


def whole_blocks(
    sources: Mapping[str, Sequence[torch.Tensor]], block: Sequence[int]
) -> tuple[Mapping[str, Sequence[torch.Tensor]], tuple[int, int] | None]:
    """The same sources, an FP8 matrix whose last blocks are cut short (DeepSeek-V3's 576 rows) padded to whole blocks; and
    what it measured before, None where nothing was padded.

    transformers up to 5.24 takes the number of blocks to divide the matrix, and fails where it does not. Only for a matrix
    with factors of its own: the padding must be cut off the result.
    """
    factors = [pattern for pattern in sources if "scale_inv" in pattern]
    weights = [pattern for pattern in sources if "scale" not in pattern]
    if len(weights) != 1 or len(factors) != 1 or len(sources[weights[0]]) != 1 or len(sources[factors[0]]) != 1:
        return sources, None
    (weight,), (factor,) = sources[weights[0]], sources[factors[0]]
    if not weight.dim() == factor.dim() == 2 or weight.dtype.itemsize != 1:
        return sources, None
    rows, columns = weight.shape
    more = tuple(count * size - have for count, size, have in zip(factor.shape, block, weight.shape, strict=True))
    if not any(more) or not all(0 <= few < size for few, size in zip(more, block, strict=True)):
        return sources, None
    padded = torch.nn.functional.pad(weight.view(torch.uint8), (0, more[1], 0, more[0])).view(weight.dtype)
    return {**sources, weights[0]: [padded]}, (rows, columns)


def forget_quantisation(config: PretrainedConfig) -> None:
    """Let ``config`` describe the plain model."""
    for part in (config, config.get_text_config()):
        if getattr(part, "quantization_config", None) is not None:
            del part.quantization_config
