"""From what the cases measured to figures: floors, fractions, comparisons, and the text and JSON that say them."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks import floors

GIB = 2**30
_ITEM_BYTES = {"float16": 2, "bfloat16": 2, "float32": 4}


@dataclass(frozen=True)
class Sizes:
    """Bytes of the model in the dtype that it runs in, which may not be the one on disk."""

    bytes_per_value: int
    expert_bytes: int
    experts_per_token: int
    total_experts: int
    dense_bytes: int
    embedding_bytes: int

    @classmethod
    def of(cls, found: Any, dtype: str) -> Sizes:
        """`found` is what airllm.inspect_model says of the folder."""
        stored = max(found.dtypes, key=lambda name: found.dtypes[name])
        scale = _ITEM_BYTES[dtype] / _ITEM_BYTES[stored]
        experts = found.experts
        if experts is None:
            raise SystemExit(f"{found.folder} is a dense model: this benchmark is about experts")
        return cls(
            bytes_per_value=_ITEM_BYTES[dtype],
            expert_bytes=int(experts.expert_bytes * scale),
            experts_per_token=experts.per_token,
            total_experts=experts.total_experts,
            dense_bytes=int(found.dense_bytes * scale),
            embedding_bytes=int(found.embedding_bytes * scale),
        )

    @property
    def device_read_bytes(self) -> int:
        """What one token must read on the device: dense weights less the embedding table, and its experts."""
        return self.dense_bytes - self.embedding_bytes + self.experts_per_token * self.expert_bytes


def assemble(
    asked: dict[str, Any],
    experts: Any,
    sizes: Sizes,
    where: dict[str, Any],
    cases: dict[str, dict[str, Any]],
    sweep: dict[str, Any] | None,
    pair: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """The whole result. `faults` lists everything that makes it unfit to be quoted."""
    result: dict[str, Any] = {
        "benchmark": "expert_cache",
        "asked": asked,
        "sizes": asdict(sizes) | {"device_read_bytes_per_token": sizes.device_read_bytes},
        "experts": asdict(experts),
        "hardware": where["hardware"],
        "bandwidths": where["bandwidths"],
        "cases": {},
        "faults": [],
    }
    for kind, case in cases.items():
        result["cases"][kind] = judged(case, sizes, where["bandwidths"]) if "modes" in case else case
    compare_tokens(result)
    result["ratios"] = list(ratios(result["cases"]))
    if pair is not None:
        result["pair"] = pair | {"ratios": list(pair_ratios(pair.get("turns", [])))}
    if sweep is not None:
        result["sweep"] = judge_sweep(sweep, sizes, where["bandwidths"])
    result["faults"] += list(find_faults(result))
    return result


def judged(case: dict[str, Any], sizes: Sizes, bandwidths: Mapping[str, float]) -> dict[str, Any]:
    """The case with a summary for every mode."""
    case["summary"] = {
        mode: summarise(case["kind"], runs, sizes, bandwidths) for mode, runs in case["modes"].items() if runs
    }
    if "turns" in case:
        case["turn_ratios"] = floors.spread([turn_ratio(turn) for turn in case["turns"]], "")
    return case


def turn_ratio(turn: dict[str, Any]) -> float:
    """A streamed token's time over its floor, both of the same moment."""
    moved = turn["per_token"]
    floor = floors.stream_floor(moved["bytes_read"], moved["h2d_bytes"], turn["bandwidths"])
    return statistics.median(turn["decode_s"]) / floor.seconds


def pair_ratios(turns: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Each kind's time a token over eager's of the same turn."""
    for mode in sorted({turn["mode"] for turn in turns}):
        times = [turn["decode_s"] for turn in turns if turn["mode"] == mode]
        for kind in times[0]:
            if kind != "eager":
                ratios = [statistics.median(each[kind]) / statistics.median(each["eager"]) for each in times]
                yield {"of": kind, "baseline": "eager", "mode": mode} | floors.spread(ratios, "")


def summarise(kind: str, runs: list[dict], sizes: Sizes, bandwidths: Mapping[str, float]) -> dict[str, Any]:
    """Medians over all prompts; bytes a decoded token; floor and the fraction of it that was reached."""
    decode_s = [seconds for run in runs for seconds in run["decode_s"]]
    per_token = {name: total(runs, "decode", name) / len(decode_s) for name in names_of(runs, "decode")}
    times = floors.spread(decode_s)
    floor = floor_of(kind, per_token, sizes, bandwidths)
    hits, misses = total(runs, "decode", "hits"), total(runs, "decode", "misses")
    summary = {
        "prompt": floors.spread([run["prompt_s"] for run in runs]),
        "prompt_tokens": sum(run["prompt_tokens"] for run in runs) / len(runs),
        "decode": times,
        "decode_tokens_per_s": 1 / times["median_s"],
        "tokens_a_prompt": len(runs[0]["tokens"]),
        "whole_run_s": floors.spread([run["prompt_s"] + sum(run["decode_s"]) for run in runs])["median_s"],
        "decode_per_token": per_token,
        "prompt_totals": {name: total(runs, "prompt", name) / len(runs) for name in names_of(runs, "prompt")},
        "hit_rate": hits / (hits + misses) if hits + misses else None,
        "segments_taken_in_decode": total(runs, "decode_device", "segments_taken"),
        "tensors_taken_in_decode": total(runs, "decode_device", "tensors_taken"),
        "alloc_retries_in_decode": total(runs, "decode_device", "alloc_retries"),
        "floor": asdict(floor) if floor else None,
        "floor_fraction": floor.seconds / times["median_s"] if floor else None,
    }
    moved = per_token.get("h2d_bytes")
    summary["impossible"] = floors.impossible(moved, times["mean_s"], bandwidths) if moved is not None else None
    return summary


def names_of(runs: list[dict], part: str) -> list[str]:
    return sorted({name for run in runs for name in run[part]})


def total(runs: list[dict], part: str, name: str) -> int:
    return sum(run[part].get(name) or 0 for run in runs)


def floor_of(
    kind: str, per_token: Mapping[str, float], sizes: Sizes, bandwidths: Mapping[str, float]
) -> floors.Floor | None:
    """The floor of a decoded token; None for accelerate, whose moved bytes are not counted."""
    if kind in ("slots", "slots_device"):
        return floors.slot_floor(per_token["h2d_bytes"], sizes.device_read_bytes, bandwidths)
    if kind == "streaming":
        return floors.stream_floor(per_token["bytes_read"], per_token["h2d_bytes"], bandwidths)
    if kind in ("eager", "default"):
        return floors.resident_floor(sizes.device_read_bytes, bandwidths)
    return None


def compare_tokens(result: dict[str, Any]) -> None:
    """Compare every case with plain transformers in eager mode, or with the first case where that was not run."""
    ran = {kind: case for kind, case in result["cases"].items() if "modes" in case}
    if not ran:
        return
    reference = "eager" if "eager" in ran else next(iter(ran))
    result["token_reference"] = {"eager": "plain transformers, experts eager"}.get(reference, reference)
    for kind, case in ran.items():
        for mode, summary in case["summary"].items():
            mine = [run["tokens"] for run in case["modes"][mode]]
            theirs = [run["tokens"] for run in ran[reference]["modes"][mode]]
            summary["tokens"] = floors.same_prefix(mine, theirs)
            # Another experts implementation, layers spread by accelerate, or the device engine's own kernels may round
            # differently: not a fault.
            if kind in ("slots", "streaming") and not summary["tokens"]["identical"]:
                same = summary["tokens"]
                result["faults"].append(
                    f"{kind}, {mode}: {same['equal']} of {same['compared']} tokens equal those of {result['token_reference']}"
                )


def ratios(cases: Mapping[str, dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Slots against every other case, each ratio with its baseline named."""
    slots = cases.get("slots", {}).get("summary", {})
    for kind, case in cases.items():
        for mode, summary in case.get("summary", {}).items():
            if kind == "slots" or mode not in slots:
                continue
            mine = slots[mode]
            yield ratio("a decoded token", mode, kind, mine["decode"]["median_s"], summary["decode"]["median_s"])
            if mine["tokens_a_prompt"] == summary["tokens_a_prompt"]:
                what = f"prompt and {mine['tokens_a_prompt']} tokens"
                yield ratio(what, mode, kind, mine["whole_run_s"], summary["whole_run_s"])


def ratio(what: str, mode: str, baseline: str, slots_s: float, baseline_s: float) -> dict[str, Any]:
    return {
        "what": what,
        "mode": mode,
        "of": "slots",
        "baseline": baseline,
        "slots_s": slots_s,
        "baseline_s": baseline_s,
        "times_faster": baseline_s / slots_s,
    }


def judge_sweep(sweep: dict[str, Any], sizes: Sizes, bandwidths: Mapping[str, float]) -> dict[str, Any]:
    if "points" not in sweep:
        return sweep
    for point in sweep["points"]:
        point["summary"] = judged({"kind": sweep["of"], "modes": point.pop("modes")}, sizes, bandwidths)["summary"]
    return sweep


def find_faults(result: dict[str, Any]) -> Iterator[str]:
    for kind, case in [*result["cases"].items(), *((name, result.get(name) or {}) for name in ("sweep", "pair"))]:
        if "error" in case:
            yield f"{kind} failed: {case['error']}"
        for mode, summary in case.get("summary", {}).items():
            if summary["impossible"]:
                yield f"{kind}, {mode}: cannot be true: {summary['impossible']}"
    for point in (result.get("sweep") or {}).get("points", []):
        for mode, summary in point["summary"].items():
            if summary["impossible"]:
                yield f"sweep at {point['budget_gb']} GiB, {mode}: cannot be true: {summary['impossible']}"
    for kind in ("slots", "slots_device"):
        for mode, summary in result["cases"].get(kind, {}).get("summary", {}).items():
            reads = summary["decode_per_token"].get("generation_disk_expert_reads")
            if reads:
                yield f"{kind}, {mode}: {reads} expert reads from disk a decoded token, promised 0"


# ---- text


def as_text(result: dict[str, Any]) -> str:
    lines = [*heading(result), "", *table(result), ""]
    lines += [ratio_line(ratio) for ratio in result["ratios"]]
    lines += turn_lines(result)
    lines += memory_lines(result)
    if "points" in (result.get("sweep") or {}):
        lines += ["", *sweep_lines(result["sweep"])]
    lines += [f"FAULT: {fault[-700:]}" for fault in result["faults"]]
    return "\n".join(lines)


def heading(result: dict[str, Any]) -> Iterator[str]:
    asked, hardware, sizes = result["asked"], result["hardware"], result["sizes"]
    yield f"{asked['source']} in {asked['dtype']}, expert_cache_gb {asked['budget_gb']:.6g}"
    yield (
        f"{hardware['device']}, {hardware['cpu']} x {hardware['cpu_cores']}, torch {hardware['torch']}, "
        f"transformers {hardware['transformers']}"
    )
    yield (
        f"one expert {sizes['expert_bytes']} B, T = {sizes['experts_per_token']} experts a token, "
        f"{sizes['total_experts']} in all; dense {sizes['dense_bytes']} B"
    )
    yield ", ".join(f"{name.removesuffix('_bytes_per_s')} {rate / 1e9:.2f} GB/s" for name, rate in result["bandwidths"].items())


def table(result: dict[str, Any]) -> Iterator[str]:
    yield (
        f"{'case':<11} {'mode':<6} {'prompt':>9} {'token':>9} {'p10':>8} {'p90':>8} {'tokens/s':>9} {'floor':>8} "
        f"{'reached':>7} {'hits':>5} {'moved':>9} {'read':>9} {'tokens equal':>13}"
    )
    yield (
        f"{'':<11} {'':<6} {'ms':>9} {'ms':>9} {'ms':>8} {'ms':>8} {'decode':>9} {'ms':>8} {'':>7} "
        f"{'':>5} {'MiB/tok':>9} {'MiB/tok':>9} {'to reference':>13}"
    )
    for kind, case in result["cases"].items():
        if "skipped" in case or "error" in case:
            yield f"{kind:<11} {'skipped: ' + case['skipped'] if 'skipped' in case else 'FAILED'}"
        for mode, summary in case.get("summary", {}).items():
            yield table_row(kind, mode, summary)
    yield f"reference: {result.get('token_reference')}; floors are those of a decoded token"


def table_row(kind: str, mode: str, summary: dict[str, Any]) -> str:
    decode, floor, per_token, same = (summary[key] for key in ("decode", "floor", "decode_per_token", "tokens"))
    return (
        f"{kind:<11} {mode:<6} {summary['prompt']['median_s'] * 1e3:>9.2f} {decode['median_s'] * 1e3:>9.3f} "
        f"{decode['p10_s'] * 1e3:>8.3f} {decode['p90_s'] * 1e3:>8.3f} {summary['decode_tokens_per_s']:>9.2f} "
        f"{shown(floor and floor['seconds'] * 1e3, '.3f'):>8} {shown(summary['floor_fraction'], '.0%'):>7} "
        f"{shown(summary['hit_rate'], '.2f'):>5} {shown(mib(per_token.get('h2d_bytes')), '.1f'):>9} "
        f"{shown(mib(per_token.get('bytes_read')), '.1f'):>9} {same['equal']:>6}/{same['compared']:<6}"
    )


def shown(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def mib(nbytes: float | None) -> float | None:
    return None if nbytes is None else nbytes / 2**20


def ratio_line(ratio: dict[str, Any]) -> str:
    return (
        f"{ratio['what']} ({ratio['mode']}): slots {ratio['slots_s'] * 1e3:.2f} ms, {ratio['baseline']} "
        f"{ratio['baseline_s'] * 1e3:.2f} ms: {ratio['times_faster']:.2f} x the speed of the baseline {ratio['baseline']}"
    )


def turn_lines(result: dict[str, Any]) -> Iterator[str]:
    for ratio in (result.get("pair") or {}).get("ratios", []):
        yield f"in turn, {ratio['mode']}: {ratio['of']} / {ratio['baseline']}, time a token: {spread_text(ratio)}"
    for kind, case in result["cases"].items():
        if "turn_ratios" in case:
            yield f"{kind}: time a token / its floor, measured in turn: {spread_text(case['turn_ratios'])}"


def spread_text(spread: Mapping[str, float]) -> str:
    return f"{spread['median']:.3f} (p10 {spread['p10']:.3f}, p90 {spread['p90']:.3f}, {spread['count']} turns)"


def memory_lines(result: dict[str, Any]) -> Iterator[str]:
    for kind, case in result["cases"].items():
        if "peak_process_bytes" not in case:
            continue
        device = case["device_memory"]
        peaks = ""
        if device:
            peaks = (
                f", device peak reserved {device['peak_reserved_bytes'] / GIB:.3f} GiB, "
                f"allocated {device['peak_allocated_bytes'] / GIB:.3f} GiB"
            )
        taken = ", ".join(
            f"{mode}: {summary['segments_taken_in_decode']} segments, {summary['alloc_retries_in_decode']} retries"
            for mode, summary in case["summary"].items()
        )
        yield (
            f"{kind}: process peak {case['peak_process_bytes'] / GIB:.3f} GiB ({case['peak_process_source']}){peaks}; "
            f"loaded in {case['load_s']:.1f} s; device memory taken from the driver in decoding: {taken}"
        )


def sweep_lines(sweep: dict[str, Any]) -> Iterator[str]:
    yield f"sweep of {sweep['of']}: budget GiB, slots, ms a token, tokens/s, hit rate, floor ms"
    for point in sweep["points"]:
        for mode, summary in point["summary"].items():
            yield (
                f"  {point['budget_gb']:.6g} {point['slot_count']} {summary['decode']['median_s'] * 1e3:.3f} "
                f"{summary['decode_tokens_per_s']:.2f} {shown(summary['hit_rate'], '.3f')} "
                f"{summary['floor']['seconds'] * 1e3:.3f} ({mode})"
            )
