"""What the kernels of :mod:`airllm.experts.kernels` compute, in plain torch: their oracle, and their stand-in on the CPU.

Same names, same arguments, same results (up to rounding where numbers are added up). These wait for the device and take
their time; nothing here is meant for a GPU.
"""

from __future__ import annotations

import torch
from torch.nn.functional import silu

from airllm.experts.device_tables import FREE, DeviceTables

NAME = "plain torch"


def route(tables: DeviceTables, ids: torch.Tensor, first_key: int, num_experts: int) -> None:
    """Decide one layer's call: ``ids`` [T, K]; writes the tables, ``places`` and the miss list. See device_tables."""
    flat: list[int] = ids.reshape(-1).tolist()
    used = sorted({e for e in flat if 0 <= e < num_experts})
    now = int(tables.clock)
    slot_of, owner, last_use = tables.slot_of, tables.owner, tables.last_use
    missing = []
    for expert in used:
        slot = int(slot_of[first_key + expert])
        if slot == FREE:
            missing.append(expert)
        else:
            last_use[slot] = now + expert
    for number, expert in enumerate(missing):
        slot = int(last_use.argmin())
        old = int(owner[slot])
        if old != FREE:
            slot_of[old] = FREE
            tables.counts[2] += 1
        slot_of[first_key + expert], owner[slot] = slot, first_key + expert
        last_use[slot] = now + num_experts + expert
        tables.miss_key[number], tables.miss_slot[number] = first_key + expert, slot
    for position, expert in enumerate(flat):
        tables.places[position] = int(slot_of[first_key + expert]) if 0 <= expert < num_experts else FREE
    tables.miss_count[0] = len(missing)
    tables.clock[0] = now + 2 * num_experts
    tables.counts[0] += len(used) - len(missing)
    tables.counts[1] += len(missing)


def copy_misses(tables: DeviceTables, bank: torch.Tensor, pool: torch.Tensor, most: int) -> None:
    """Copy every expert of the miss list (``most`` at most) from ``bank`` [L*E, bytes] to ``pool`` [places, bytes] (uint8)."""
    for number in range(int(tables.miss_count)):
        pool[int(tables.miss_slot[number])].copy_(bank[int(tables.miss_key[number])])


def gate_up(hidden: torch.Tensor, places: torch.Tensor, weights: torch.Tensor, out: torch.Tensor) -> None:
    """``out`` [T, K, I] = silu(gate) * up of ``hidden`` [T, H] through the expert in ``places`` [T*K].

    ``weights``: [places, 2I, H] a view of the pool in the model's dtype (gate rows first). Sums in float32.
    """
    tokens, k, width = out.shape
    for pair in range(tokens * k):
        place = int(places[pair])
        if place == FREE:
            continue
        both = weights[place].float() @ hidden[pair // k].float()
        out[pair // k, pair % k] = (silu(both[:width]) * both[width:]).to(out.dtype)


def down(
    inner: torch.Tensor,
    places: torch.Tensor,
    ids: torch.Tensor,
    routing: torch.Tensor,
    weights: torch.Tensor,
    out: torch.Tensor,
    residual: torch.Tensor | None = None,
) -> None:
    """``out`` [T, H] = ``residual`` [T, H] + sum over a token's experts, ascending, of routing weight * down projection of ``inner`` [T, K, I].

    ``places`` [T*K], ``ids`` and ``routing`` [T, K], ``weights`` [places, H, I] a view of the pool. Sums in float32.
    """
    tokens, k, _ = inner.shape
    for token in range(tokens):
        total = torch.zeros(out.shape[1], dtype=torch.float32, device=out.device)
        for position in ids[token].argsort(stable=True).tolist():
            place = int(places[token * k + position])
            if place != FREE:
                total += weights[place].float() @ inner[token, position].float() * routing[token, position].float()
        if residual is not None:
            total += residual[token].float()
        out[token] = total.to(out.dtype)
