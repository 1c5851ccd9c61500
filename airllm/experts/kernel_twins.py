"""What the kernels of :mod:`airllm.experts.kernels` compute, in plain torch: their oracle, and their stand-in on the CPU.

Same names, same arguments, same results (up to rounding where numbers are added up). These wait for the device and take
their time; nothing here is meant for a GPU.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from airllm.experts.device_tables import AgedTables, Decisions, DeviceTables
from airllm.experts.gates import PLAIN, Gate
from airllm.experts.policy import FREE, HABIT_SHIFT, HABIT_USE, LEASED, RECENT_SHIFT, RECENT_USE, near

NAME = "plain torch"


class Misses(NamedTuple):
    """Where missed experts go: ``pool`` [places, bytes]; where from: ``bank`` [L*E, bytes] (uint8 both); which: ``tables``."""

    pool: torch.Tensor
    bank: torch.Tensor
    tables: Decisions


def route(tables: Decisions, ids: torch.Tensor, first_key: int, num_experts: int) -> None:
    """Decide one layer's call: ``ids`` [T, K]; writes the tables, ``places`` and the miss list. See device_tables."""
    if isinstance(tables, AgedTables):
        _route_aged(tables, ids, first_key, num_experts)
    elif isinstance(tables, DeviceTables):
        _route_lru(tables, ids, first_key, num_experts)


def _route_lru(tables: DeviceTables, ids: torch.Tensor, first_key: int, num_experts: int) -> None:
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


def _route_aged(tables: AgedTables, ids: torch.Tensor, first_key: int, num_experts: int) -> None:
    flat: list[int] = ids.reshape(-1).tolist()
    used = sorted({e for e in flat if 0 <= e < num_experts})
    layer = slice(first_key, first_key + num_experts)
    slot_of, owner, habit, recent = tables.slot_of, tables.owner, tables.habit, tables.recent
    habit[layer] -= habit[layer] >> HABIT_SHIFT
    recent[layer] -= recent[layer] >> RECENT_SHIFT
    keys = torch.tensor(used, dtype=torch.int64) + first_key
    habit[keys] += HABIT_USE
    recent[keys] += RECENT_USE
    first, end = tables.spans[first_key // num_experts]
    holders = owner[first:end]
    layers, now = len(tables.spans), first_key // num_experts
    nearness = torch.tensor([near(now, layer, layers) for layer in range(layers)], dtype=torch.int32, device=habit.device)
    counts = (habit + recent) * nearness.repeat_interleave(num_experts)
    worth = torch.where(holders == FREE, FREE, counts[holders.clamp(min=0)])
    place_of = {e: int(slot_of[first_key + e]) for e in used}
    missing = [e for e, slot in place_of.items() if slot == FREE]
    worth[[slot - first for slot in place_of.values() if slot != FREE]] = LEASED
    bypasses = 0
    for number, expert in enumerate(missing):
        key, at = first_key + expert, int(worth.argmin())
        old = int(owner[first + at])
        if bypasses < tables.scratch and int(worth[at]) >= int(counts[key]):
            place_of[expert] = tables.slots + bypasses
            bypasses += 1
        else:
            if old != FREE:
                slot_of[old] = FREE
                tables.counts[2] += 1
            place_of[expert] = first + at
            slot_of[key], owner[first + at], worth[at] = first + at, key, LEASED
        tables.miss_key[number], tables.miss_slot[number] = key, place_of[expert]
    for position, expert in enumerate(flat):
        tables.places[position] = place_of.get(expert, FREE)
    tables.miss_count[0] = len(missing)
    tables.counts += torch.tensor([len(used) - len(missing), len(missing), 0, bypasses])


def copy_misses(tables: Decisions, bank: torch.Tensor, pool: torch.Tensor, most: int) -> None:
    """Copy every expert of the miss list (``most`` at most) from ``bank`` [L*E, bytes] to ``pool`` [places, bytes] (uint8)."""
    for number in range(int(tables.miss_count)):
        pool[int(tables.miss_slot[number])].copy_(bank[int(tables.miss_key[number])])


def gate_up(
    hidden: torch.Tensor,
    places: torch.Tensor,
    weights: torch.Tensor,
    out: torch.Tensor,
    gate: Gate = PLAIN,
    bias: torch.Tensor | None = None,
    misses: Misses | None = None,
) -> None:
    """``out`` [T, K, I] = ``gate`` of the first product of ``hidden`` [T, H] with the expert in ``places`` [T*K].

    ``weights``: [places, parts * I, H] and ``bias``: [places, parts * I], views of the pool in the model's dtype; transposed
    weights are a view whose last axis is not the dense one. Sums in float32. With ``misses``, which is for one token, the
    missed experts are copied first, as `copy_misses` does.
    """
    tokens, k, _ = out.shape
    if misses is not None:
        copy_misses(misses.tables, misses.bank, misses.pool, k)
    for pair in range(tokens * k):
        place = int(places[pair])
        if place == FREE:
            continue
        both = weights[place].float() @ hidden[pair // k].float()
        if bias is not None:
            both += bias[place].float()
        out[pair // k, pair % k] = gate.apply(both).to(out.dtype)


def down(
    inner: torch.Tensor,
    places: torch.Tensor,
    ids: torch.Tensor,
    routing: torch.Tensor,
    weights: torch.Tensor,
    out: torch.Tensor,
    residual: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
) -> None:
    """``out`` [T, H] = ``residual`` [T, H] + sum over a token's experts, ascending, of routing weight * (down projection of
    ``inner`` [T, K, I] + ``bias``).

    ``places`` [T*K], ``ids`` and ``routing`` [T, K], ``weights`` [places, H, I] and ``bias`` [places, H] views of the pool, as
    for `gate_up`. Sums in float32.
    """
    tokens, k, _ = inner.shape
    for token in range(tokens):
        total = torch.zeros(out.shape[1], dtype=torch.float32, device=out.device)
        for position in ids[token].argsort(stable=True).tolist():
            place = int(places[token * k + position])
            if place == FREE:
                continue
            product = weights[place].float() @ inner[token, position].float()
            if bias is not None:
                product += bias[place].float()
            total += product * routing[token, position].float()
        if residual is not None:
            total += residual[token].float()
        out[token] = total.to(out.dtype)
