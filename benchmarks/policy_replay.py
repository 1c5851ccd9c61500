#!/usr/bin/env python
"""Replay decode routing under cache policies and budgets: hit rates, beside Belady's optimum.

    python benchmarks/policy_replay.py [TRACE.csv …] [--output-json OUT.json]

Traces are files that `model.record_routing` writes (or others of that format); the shipped tiny model's and two random ones
are always replayed. "lru" and "aged" are the library's own classes, driven by the library's own planner.

  * T is the experts of one token, layers * top-k; budgets are slots, written as multiples of T as well.
  * Before the first decoded token of a turn the cache sees the last token of its prompt. Only decoding is counted.
  * A missed expert is always copied, but need not enter the cache (bypass). belady: the most hits that any choice of
    residents gives, knowing the future (Belady 1966, with bypass). static: the best set that never changes, chosen knowing
    how often each expert will be used; its first uses count as misses. What beats static needs to follow changes.
  * The library promises at least lru's hits; below T, 0.6 of belady's is aimed at.
"""

from __future__ import annotations

import argparse
import heapq
import json
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from airllm.experts.plan import PlanCounts, plan_layer  # noqa: E402
from airllm.experts.policy import AgedPolicy, LruPolicy, SlotPolicy  # noqa: E402
from benchmarks.routing_traces import Trace, built_trace, read_trace, zipf_trace  # noqa: E402

TINY = Path(__file__).parent / "results" / "tiny-routing.csv"
MULTIPLES = (5 / 64, 0.25, 34 / 64, 0.75, 1.0, 1.14, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Budgets in units of T; of 32 layers and top-2 the first, third and sixth are 5, 34 and 73 slots."""
PORTIONS = (0.15, 0.3, 0.6)
"""More budgets, as portions of all experts, for models with many."""
NEVER = 1 << 60

Pools = list[tuple[SlotPolicy | None, int]]
"""For each layer its policy (None: no slots) and the first of its keys there."""


class FarAsNear(AgedPolicy):
    """How soon a layer comes round again counts for nothing."""

    def __init__(self, slots: int, layers: int, experts: int) -> None:
        super().__init__(slots, layers, experts)
        self._near = [[1] * layers] * layers


class Lfu(FarAsNear):
    """Uses are counted for ever."""

    habit_shift, habit_use, recent_use = 40, 1 << 8, 0


class HabitOnly(FarAsNear):
    """One aged count."""

    recent_use = 0


class NoBypass(AgedPolicy):
    """Every miss is admitted, at the cost of the least worth."""

    def admit(self, key: int, *, cold: bool = False, must: bool = False) -> int | None:
        return super().admit(key, cold=cold, must=True)


def shared(kind: type[AgedPolicy]) -> Callable[[Trace, int], Pools]:
    """One policy for all layers."""

    def make(trace: Trace, slots: int) -> Pools:
        policy = kind(slots, trace.layers, trace.experts)
        return [(policy, layer * trace.experts) for layer in range(trace.layers)]

    return make


def lru(trace: Trace, slots: int) -> Pools:
    policy = LruPolicy(slots)
    return [(policy, layer * trace.experts) for layer in range(trace.layers)]


def shares(make: Callable[[int, int], SlotPolicy]) -> Callable[[Trace, int], Pools]:
    """Slots divided among the layers, each with a policy of its own."""

    def divide(trace: Trace, slots: int) -> Pools:
        edges = [slots * layer // trace.layers for layer in range(trace.layers + 1)]
        sizes = [end - first for first, end in zip(edges, edges[1:], strict=False)]
        return [(make(size, trace.experts) if size else None, 0) for size in sizes]

    return divide


def dedicated(trace: Trace, slots: int) -> Pools:
    """The first layers hold all of their experts, the next one what is left over."""
    sizes = [max(0, min(trace.experts, slots - layer * trace.experts)) for layer in range(trace.layers)]
    return [(LruPolicy(size) if size else None, 0) for size in sizes]


POLICIES: dict[str, Callable[[Trace, int], Pools]] = {
    "lru": lru,
    "lfu": shared(Lfu),
    "lru, shares": shares(lambda slots, _experts: LruPolicy(slots)),
    "dedicated layers": dedicated,
    "habit only": shared(HabitOnly),
    "aged, far as near": shared(FarAsNear),
    "aged, no bypass": shared(NoBypass),
    "aged, shares": shares(lambda slots, experts: AgedPolicy(slots, 1, experts)),
    "aged": shared(AgedPolicy),
}


def replay(trace: Trace, pools: Pools) -> int:
    """Hits of the trace's decoded tokens."""
    counts = {True: PlanCounts(), False: PlanCounts()}
    for counted, token in trace.tokens():
        step(pools, token, trace.top_k, counts[counted])
    return counts[True].hits


def step(pools: Pools, token: list[list[int]], scratch: int, counts: PlanCounts) -> None:
    for (policy, first_key), chosen in zip(pools, token, strict=True):
        if policy is not None:
            plan_layer(policy, first_key=first_key, experts=chosen, admit=set(chosen), scratch=scratch, counts=counts)
            policy.release_all()


def belady(trace: Trace, slots: int) -> int:
    """Hits when each miss replaces the expert used furthest in the future, or nothing when it is itself that one."""
    accesses = list(trace.accesses())
    following, last = [NEVER] * len(accesses), {}
    for at, (_, key) in reversed(list(enumerate(accesses))):
        following[at] = last.get(key, NEVER)
        last[key] = at
    cache: dict[int, int] = {}  # key -> its next use
    furthest: list[tuple[int, int]] = []  # (-next use, key); out of date where the cache says otherwise
    hits = 0
    for (counted, key), again in zip(accesses, following, strict=True):
        hits += counted and key in cache
        if key not in cache and len(cache) == slots:
            while cache.get(furthest[0][1]) != -furthest[0][0]:
                heapq.heappop(furthest)
            if -furthest[0][0] <= again:
                continue
            del cache[heapq.heappop(furthest)[1]]
        cache[key] = again
        heapq.heappush(furthest, (-again, key))
    return hits


def static(trace: Trace, slots: int) -> int:
    seen, hits = set(), Counter()
    for counted, key in trace.accesses():
        hits[key] += counted and key in seen
        seen.add(key)
    return sum(count for _, count in hits.most_common(slots))


def budgets(trace: Trace) -> list[int]:
    total = trace.layers * trace.experts
    wanted = {max(1, round(multiple * trace.experts_per_token)) for multiple in MULTIPLES}
    if trace.experts > 64:
        wanted |= {round(portion * total) for portion in PORTIONS}
    return sorted(slots for slots in wanted if slots < total)


def measure(trace: Trace) -> dict[str, Any]:
    """Hit rates of every policy at every budget."""
    slots, accesses = budgets(trace), sum(counted for counted, _ in trace.accesses())
    rates = {name: [replay(trace, make(trace, s)) / accesses for s in slots] for name, make in POLICIES.items()}
    rates["static"] = [static(trace, s) / accesses for s in slots]
    rates["belady"] = [belady(trace, s) / accesses for s in slots]
    return {
        "trace": trace.name,
        "layers": trace.layers,
        "experts": trace.experts,
        "top_k": trace.top_k,
        "decoded_tokens": sum(len(turn.decode) for turn in trace.turns),
        "slots": slots,
        "slots_in_T": [round(s / trace.experts_per_token, 3) for s in slots],
        "hit_rates": {name: [round(rate, 4) for rate in row] for name, row in rates.items()},
        "aged_of_belady": [round(a / b, 3) for a, b in zip(rates["aged"], rates["belady"], strict=True)],
        "aged_below_lru_at_slots": [s for s, a, b in zip(slots, rates["aged"], rates["lru"], strict=True) if a < b],
    }


def table(result: dict[str, Any]) -> str:
    rows = [
        f"{result['trace']}: {result['layers']} layers x {result['experts']} experts, top-{result['top_k']}, "
        f"{result['decoded_tokens']} decoded tokens",
        line("slots", result["slots"], "d"),
        line("in T", result["slots_in_T"], ".2f"),
        *(line(name, row, ".3f") for name, row in result["hit_rates"].items()),
        line("aged / belady", result["aged_of_belady"], ".2f"),
    ]
    return "\n".join(rows) + "\n"


def line(name: str, values: list[Any], form: str) -> str:
    return f"{name:<17}" + "".join(f"{value:>7{form}}" for value in values)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("traces", nargs="*", type=Path, metavar="TRACE.csv")
    parser.add_argument("--output-json", type=Path)
    parser.add_argument("--tokens", type=int, default=512, help="decoded tokens of the random traces")
    given = parser.parse_args(arguments)
    traces = [read_trace(path) for path in (*given.traces, TINY)]
    traces += [zipf_trace(tokens=given.tokens), built_trace(tokens=given.tokens)]
    results = []
    for trace in traces:
        results.append(measure(trace))
        print(table(results[-1]), flush=True)
    text = json.dumps({"benchmark": "policy_replay", "traces": results})
    if given.output_json:
        given.output_json.write_text(text + "\n", encoding="utf-8")
    print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
