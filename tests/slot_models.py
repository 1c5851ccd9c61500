"""A PhiMoE on slots beside the unmodified transformers model, on one device."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import families
import pytest
import slot_rig
import torch

from airllm.airllm_phimoe import AirLLMPhiMoE
from airllm.experts import assembly

LAYERS, EXPERTS = 3, 8
EXPERT_VALUES = 3 * 64 * 128


def gib(slots: float, dtype: torch.dtype = torch.float32) -> float:
    """The ``expert_cache_gb`` that holds exactly ``slots`` experts of the tiny PhiMoE."""
    return slots * EXPERT_VALUES * dtype.itemsize / 2**30


def load(
    folder: Path, slots: float, *, device: str = "cpu", dtype: torch.dtype = torch.float32, **keywords: Any
) -> AirLLMPhiMoE:
    """The model with ``slots`` slots full of NaN; ``dtype`` is the checkpoint's."""
    model = AirLLMPhiMoE(
        folder, device=device, expert_cache_backend="slot", expert_cache_gb=gib(slots, dtype), **keywords
    )
    runtime(model).pool.poison()
    return model


def runtime(model: AirLLMPhiMoE) -> Any:
    assert model._runtime is not None
    return model._runtime


def check(model: AirLLMPhiMoE) -> None:
    """No lease, a whole table, and in every slot the bytes of the expert that the table says."""
    slot_rig.check(runtime(model))


@contextmanager
def late_transfers() -> Iterator[None]:
    """On the CPU: bytes come only to those who wait for them (see slot_rig.LateTransfer)."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(assembly, "SyncTransfer", slot_rig.LateTransfer)
        yield


def padded(lengths: tuple[int, ...], vocabulary: int = 512, pad: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Random prompts of these lengths, padded on the left: ids and mask, both [batch, longest]."""
    generator = torch.Generator().manual_seed(11)
    ids = torch.randint(3, vocabulary, (len(lengths), max(lengths)), generator=generator)
    mask = torch.ones_like(ids)
    for row, length in enumerate(lengths):
        ids[row, : max(lengths) - length] = pad
        mask[row, : max(lengths) - length] = 0
    return ids, mask


def oracle(folder: Path, dtype: torch.dtype | None = None, device: str = "cpu", **options: Any) -> Any:
    """Unmodified transformers, put into the state in which two equal models give equal bits.

    Weights in memory of their own: as loaded they lie wherever the file has them, and on a CPU products of one row depend, in
    the last bit, on how a weight is aligned. No gradients, as for ours: torch multiplies a batch of slices (the last rows of
    several prompts) as one matrix or row by row, depending on whether the weight wants a gradient.
    """
    model = families.oracle(folder, dtype, **options).requires_grad_(False)
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()
    return model.to(device)


class Pair:
    """Ours and the oracle. ``generate`` asks both the same and gives both answers."""

    def __init__(self, folder: Path, slots: float, device: str, dtype: torch.dtype, **keywords: Any) -> None:
        self.device = device
        self.oracle = oracle(folder, device=device)
        self.ours = load(folder, slots, device=device, dtype=dtype, **keywords)

    def generate(self, ids: torch.Tensor, mask: torch.Tensor | None = None, n: int = 8, **keywords: Any) -> tuple[Any, Any]:
        mask = torch.ones_like(ids) if mask is None else mask
        answers = []
        for model in (self.ours, self.oracle):
            torch.manual_seed(5)
            answers.append(
                model.generate(
                    ids.to(self.device),
                    attention_mask=mask.to(self.device),
                    **{"max_new_tokens": n, "min_new_tokens": n, "do_sample": False, **keywords},
                )
            )
        return answers[0], answers[1]

    def logits(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        with torch.no_grad():
            return self.ours(ids).logits, self.oracle(ids.to(self.device)).logits
