"""PhiMoE's rotary embedding with its tables kept on the device.

The stock module builds its frequencies on the host in every forward and copies them over, and since transformers 5.15 it
uses the short factors of LongRoPE at every length. Here both tables are made once. For plain rope results are bit-equal to
the stock module's; for LongRoPE they follow the published formula (LongRoPE, Ding et al. 2024, as released with Phi-3.5-MoE):
inverse frequencies 1 / (factor_i * theta^(2i/d)), long factors and ``long_mscale`` when the sequence is longer than
``original_max_position_embeddings``, short ones otherwise.
"""

from __future__ import annotations

import functools
import weakref
from typing import Any

import torch
from torch import nn

from airllm.errors import UnsupportedModelError


def _inverse_frequencies(theta: float, dim: int, factors: list[float] | None) -> torch.Tensor:
    exponents = torch.arange(0, dim, 2, dtype=torch.int64).float() / dim
    if factors is None:
        return 1.0 / (theta**exponents)
    if len(factors) != dim // 2:
        raise UnsupportedModelError(f"rope factors have {len(factors)} entries, head_dim {dim} needs {dim // 2}")
    return 1.0 / (torch.tensor(factors, dtype=torch.float32) * theta**exponents)


def _complete(rope: dict[str, Any], config: Any) -> dict[str, Any]:
    """LongRoPE's entries; the length where factors change may stand beside them in the configuration."""
    known = {"original_max_position_embeddings": getattr(config, "original_max_position_embeddings", None)}
    rope = known | {name: value for name, value in rope.items() if value is not None}
    needed = ("short_factor", "long_factor", "short_mscale", "long_mscale", "original_max_position_embeddings")
    missing = [name for name in needed if rope.get(name) is None]
    if missing:
        raise UnsupportedModelError(f"LongRoPE needs {', '.join(missing)} in config.json's rope_scaling: download it again")
    return rope


class PhiMoERotaryEmbedding(nn.Module):
    """cos and sin for positions: ``forward(x [B, T, H], position_ids [B, T])`` gives two [B, T, head_dim] in x's dtype."""

    inv_freq: torch.Tensor
    long_inv_freq: torch.Tensor

    def __init__(self, config: Any) -> None:
        super().__init__()
        rope = config.rope_parameters
        self.rope_type = rope["rope_type"]
        if self.rope_type not in ("default", "longrope"):
            raise UnsupportedModelError(f"PhiMoE with rope type {self.rope_type!r}: only default and longrope are published")
        dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        theta, is_long = rope["rope_theta"], self.rope_type == "longrope"
        if is_long:
            rope = _complete(rope, config)
        self.switch_length = rope["original_max_position_embeddings"] if is_long else None
        self.short_mscale = rope["short_mscale"] if is_long else 1.0
        self.long_mscale = rope["long_mscale"] if is_long else 1.0
        short = _inverse_frequencies(theta, dim, rope["short_factor"] if is_long else None)
        self.register_buffer("inv_freq", short, persistent=False)
        long = _inverse_frequencies(theta, dim, rope["long_factor"]) if is_long else short
        self.register_buffer("long_inv_freq", long, persistent=False)

    @torch.no_grad()
    def forward(self, x: torch.Tensor, position_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        inv_freq, mscale = self.inv_freq, self.short_mscale
        # Reading the length back waits for the device; only LongRoPE models pay for it, once a forward.
        if self.switch_length is not None and int(position_ids.max()) + 1 > self.switch_length:
            inv_freq, mscale = self.long_inv_freq, self.long_mscale
        angles = position_ids[..., None].float() * inv_freq
        angles = torch.cat((angles, angles), dim=-1)
        cos, sin = angles.cos(), angles.sin()
        if mscale != 1.0:
            cos, sin = cos * mscale, sin * mscale
        return cos.to(x.dtype), sin.to(x.dtype)


def reread_at_switch(model: Any) -> None:
    """Make ``model.generate`` read the whole sequence again when it grows past the length where LongRoPE changes factors.

    transformers drops the cache at that point, as it must, but before 5.24 then feeds only the newest token. Models without
    LongRoPE are left alone.
    """
    switch_length = model.model.rotary_emb.switch_length
    if switch_length is None:
        return
    reference, original = weakref.ref(model), type(model).prepare_inputs_for_generation

    @functools.wraps(original)
    def prepare(input_ids: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        cache = kwargs.get("past_key_values", kwargs.get("cache"))
        if cache is not None and input_ids.shape[1] > switch_length and 0 < cache.get_seq_length() <= switch_length:
            kwargs["next_sequence_length"] = None
        return original(reference(), input_ids, *args, **kwargs)

    model.prepare_inputs_for_generation = prepare
