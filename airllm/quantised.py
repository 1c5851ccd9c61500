"""Checkpoints whose weights are stored in FP8 or MXFP4: transformers' own dequantisation, into the model's dtype.

Nothing is kept quantised: what is computed is what transformers computes after ``dequantize=True``.
"""

from __future__ import annotations

from typing import Any

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


def forget_quantisation(config: PretrainedConfig) -> None:
    """Let ``config`` describe the plain model."""
    for part in (config, config.get_text_config()):
        if getattr(part, "quantization_config", None) is not None:
            del part.quantization_config
