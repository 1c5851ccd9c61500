"""Counters of the expert cache and what each of them means. All measured; what is unknown is None."""

from __future__ import annotations

from dataclasses import dataclass, fields


@dataclass
class Counters:
    """Events since the last reset.

    hits/misses: routed experts of a layer's forward found / not found in a slot (an expert counts once a layer a forward,
    however many tokens chose it). evictions: experts that lost their slot. bypasses: misses that went through scratch.
    prefill_skips: misses of prompt tokens that were kept out of the cache although they took a copy. oom_retries: forwards
    repeated after the device ran out of memory. h2d_copies, h2d_bytes: expert copies from the bank to the device.
    recoveries: forwards that ended in an exception and were cleaned up after.

    The device engine may have launched a step before generate asks for it (airllm/run_ahead.py): it counts when it runs, so
    also when it is thrown away afterwards, and not behind a reset that came between.
    """

    hits: int = 0
    misses: int = 0
    evictions: int = 0
    bypasses: int = 0
    prefill_skips: int = 0
    oom_retries: int = 0
    h2d_copies: int = 0
    h2d_bytes: int = 0
    recoveries: int = 0

    def reset(self) -> None:
        for field in fields(self):
            setattr(self, field.name, 0)


def disabled_stats() -> dict[str, object]:
    """The public statistics of a model without an expert cache: every name is there, nothing was measured."""
    names = (
        "capacity_bytes allocated_cache_bytes resident_bytes resident_experts slot_count scratch_slots scratch_bytes "
        "allocated_device_bytes dense_resident_bytes dense_streamed_bytes dense_ring_bytes host_bank_bytes host_bank_experts "
        "host_bank_load_seconds "
        "host_bank_tensor_reads host_bank_pinned host_bank_pin_reason pinned_staging_bytes generation_disk_expert_reads "
        "budget_reason cache_policy cache_policy_reason engine device_engine_reason decode_graphs decode_graphs_reason"
    ).split()
    counters = (field.name for field in fields(Counters))
    return {"enabled": False, "backend": "none", **dict.fromkeys([*names, *counters])}
