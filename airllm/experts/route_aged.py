"""The aged policy's routing kernel in Triton: which slot each routed expert has, gets, or passes by.

Its twin in plain torch is ``route`` of :mod:`airllm.experts.kernel_twins`; the rule is ``AgedPolicy``'s. One program. It reads
the counts of one layer and of the experts in the slots of that layer's group, at most ``GROUP_SLOTS``, so that its time does
not grow with the number of slots.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from airllm.experts.device_tables import AgedTables
from airllm.experts.policy import FAR_LESS, FREE, HABIT_SHIFT, HABIT_USE, LEASED, NEAREST, RECENT_SHIFT, RECENT_USE

_FREE, _LEASED = tl.constexpr(FREE), tl.constexpr(LEASED)
_HABIT_SHIFT, _HABIT_USE = tl.constexpr(HABIT_SHIFT), tl.constexpr(HABIT_USE)
_RECENT_SHIFT, _RECENT_USE = tl.constexpr(RECENT_SHIFT), tl.constexpr(RECENT_USE)
_NEAREST, _FAR_LESS = tl.constexpr(NEAREST), tl.constexpr(FAR_LESS)


MOST_PAIRS = 8192
"""Comparisons of ids with experts or slots that are made at once: more would not fit in registers."""


@triton.jit
def among(wanted, ids, num_ids, num_experts, values, IDS: tl.constexpr, PART: tl.constexpr):
    """Which of ``values`` are among the experts ``wanted`` [IDS], compared PART at a time; those of ``ids`` are the same."""
    if PART == IDS:
        same = (wanted[None, :] == values[:, None]) & (wanted[None, :] >= 0)
        found = tl.sum(same.to(tl.int32), axis=1) > 0
    else:
        found = values != values  # nothing yet
        for first in range(0, IDS, PART):  # not unrolled: that takes a minute to compile
            j = first + tl.arange(0, PART)
            part = tl.load(ids + j, mask=j < num_ids, other=-1).to(tl.int32)
            same = (part[None, :] == values[:, None]) & ((part[None, :] >= 0) & (part[None, :] < num_experts))
            found = found | (tl.sum(same.to(tl.int32), axis=1) > 0)
    return found


@triton.jit(do_not_specialize=["first_key", "first_slot", "num_slots", "end_slot", "num_scratch"])
def _route_aged(
    ids,
    slot_of,
    owner,
    habit,
    recent,
    counts,
    places,
    miss_key,
    miss_slot,
    miss_count,
    first_key,
    num_ids,
    first_slot,
    end_slot,
    num_slots,
    num_scratch,
    num_experts: tl.constexpr,  # these two are divided by
    num_layers: tl.constexpr,
    IDS: tl.constexpr,
    PART: tl.constexpr,
    EXPERTS: tl.constexpr,
    SLOTS: tl.constexpr,
):
    j = tl.arange(0, IDS)
    e = tl.arange(0, EXPERTS)
    s = first_slot + tl.arange(0, SLOTS)
    wanted = tl.load(ids + j, mask=j < num_ids, other=-1).to(tl.int32)
    wanted = tl.where((wanted >= 0) & (wanted < num_experts), wanted, -1)
    held = tl.load(slot_of + first_key + e, mask=e < num_experts, other=-1)
    place = tl.load(slot_of + first_key + wanted, mask=wanted >= 0, other=-1)
    steady = tl.load(habit + first_key + e, mask=e < num_experts, other=0)
    fresh = tl.load(recent + first_key + e, mask=e < num_experts, other=0)
    key_in = tl.load(owner + s, mask=s < end_slot, other=-1)
    steady_in = tl.load(habit + key_in, mask=key_in >= 0, other=0)
    fresh_in = tl.load(recent + key_in, mask=key_in >= 0, other=0)
    # Warps that lag behind must have read the tables before the first one writes.
    tl.debug_barrier()
    used = among(wanted, ids, num_ids, num_experts, e, IDS, PART).to(tl.int32)
    steady = steady - (steady >> _HABIT_SHIFT) + used * _HABIT_USE
    fresh = fresh - (fresh >> _RECENT_SHIFT) + used * _RECENT_USE
    local = key_in - first_key
    ours = (local >= 0) & (local < num_experts)  # their counts, read before, age in this call too
    steady_in = tl.where(ours, steady_in - (steady_in >> _HABIT_SHIFT), steady_in)
    fresh_in = tl.where(ours, fresh_in - (fresh_in >> _RECENT_SHIFT), fresh_in)
    is_hit = among(wanted, ids, num_ids, num_experts, local, IDS, PART)
    layers_on = key_in // num_experts - first_key // num_experts
    layers_on = tl.where(layers_on <= 0, layers_on + num_layers, layers_on)
    nearness = _NEAREST - _FAR_LESS * layers_on // num_layers
    worth = tl.where(key_in < 0, _FREE, (steady_in + fresh_in) * nearness)
    worth = tl.where(is_hit | (s >= end_slot), _LEASED, worth)
    missing = used * (held < 0).to(tl.int32)
    misses = tl.sum(missing, axis=0)
    evictions = 0
    bypasses = 0
    number = 0
    while number < misses:  # not range(): Triton's interpreter cannot take its bound from a tensor
        expert = tl.min(tl.where(missing > 0, e, EXPERTS), axis=0)
        missing = tl.where(e == expert, 0, missing)
        least = tl.min(worth, axis=0)
        slot = first_slot + tl.argmin(worth, axis=0)
        old = tl.max(tl.where(s == slot, key_in, -1), axis=0)
        own_worth = tl.sum(tl.where(e == expert, steady + fresh, 0), axis=0) * (_NEAREST - _FAR_LESS)
        passes = (bypasses < num_scratch) & (least >= own_worth)
        tl.store(slot_of + old, -1, mask=(old >= 0) & (passes == 0))
        tl.store(slot_of + first_key + expert, slot, mask=passes == 0)
        taken = (s == slot) & (passes == 0)
        key_in = tl.where(taken, first_key + expert, key_in)
        worth = tl.where(taken, _LEASED, worth)
        slot = tl.where(passes, num_slots + bypasses, slot)
        tl.store(miss_key + number, first_key + expert)
        tl.store(miss_slot + number, slot)
        place = tl.where(wanted == expert, slot, place)
        evictions += tl.where((old >= 0) & (passes == 0), 1, 0)
        bypasses += tl.where(passes, 1, 0)
        number += 1
    tl.store(owner + s, key_in, mask=s < end_slot)
    tl.store(habit + first_key + e, steady, mask=e < num_experts)
    tl.store(recent + first_key + e, fresh, mask=e < num_experts)
    tl.store(places + j, place, mask=j < num_ids)
    tl.store(miss_count, misses)
    tl.store(counts, tl.load(counts) + tl.sum(used, axis=0) - misses)
    tl.store(counts + 1, tl.load(counts + 1) + misses)
    tl.store(counts + 2, tl.load(counts + 2) + evictions)
    tl.store(counts + 3, tl.load(counts + 3) + bypasses)


def route_aged(tables: AgedTables, ids: torch.Tensor, first_key: int, num_experts: int) -> None:
    """Decide one layer's call, as the twin does."""
    first, end = tables.spans[first_key // num_experts]
    numbers, experts = triton.next_power_of_2(ids.numel()), triton.next_power_of_2(num_experts)
    slots = triton.next_power_of_2(tables.widest)
    _route_aged[(1,)](
        ids,
        tables.slot_of,
        tables.owner,
        tables.habit,
        tables.recent,
        tables.counts,
        tables.places,
        tables.miss_key,
        tables.miss_slot,
        tables.miss_count,
        first_key,
        ids.numel(),
        first,
        end,
        tables.slots,
        tables.scratch,
        num_experts=num_experts,
        num_layers=len(tables.spans),
        IDS=numbers,
        PART=part_of(numbers, max(experts, slots)),
        EXPERTS=experts,
        SLOTS=slots,
        num_warps=warps_for(max(experts, slots)),
    )


def part_of(numbers: int, widest: int) -> int:
    """How many of so many ids are compared at once with so many experts or slots; all of them powers of two."""
    return max(1, min(numbers, MOST_PAIRS // widest))


def warps_for(widest: int) -> int:
    """Warps of a routing program whose longest table has so many entries."""
    return 1 if widest <= 256 else 4 if widest <= 2048 else 8
