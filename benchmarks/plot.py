"""A picture of the sweep: tokens a second and hit rate against budget."""

from __future__ import annotations

from pathlib import Path
from typing import Any

GIB = 2**30


def plot_sweep(result: dict[str, Any], path: Path) -> None:
    """Write a PNG. Needs matplotlib: pip install ".[bench]"."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    points = result["sweep"]["points"]
    mode = "forced" if "forced" in points[0]["summary"] else "free"
    budgets = [point["budget_gb"] for point in points]
    summaries = [point["summary"][mode] for point in points]
    figure, speed = pyplot.subplots(figsize=(8, 5.6), layout="constrained")
    hits = speed.twinx()
    draw_speed(speed, budgets, summaries, result, mode)
    hits.plot(budgets, [s["hit_rate"] for s in summaries], "s--", color="tab:orange", label="hit rate")
    hits.set_ylim(0, 1.05)
    hits.set_ylabel("hit rate of decoded tokens")
    handles = [*speed.get_legend_handles_labels()[0], *hits.get_legend_handles_labels()[0]]
    figure.legend(handles=handles, loc="outside lower center", ncols=2, fontsize=9)
    figure.suptitle(title(result, mode), fontsize=10)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def draw_speed(axes: Any, budgets: list[float], summaries: list[dict], result: dict[str, Any], mode: str) -> None:
    rates = [s["decode_tokens_per_s"] for s in summaries]
    slowest = [1 / s["decode"]["p90_s"] for s in summaries]
    fastest = [1 / s["decode"]["p10_s"] for s in summaries]
    axes.fill_between(budgets, slowest, fastest, color="tab:blue", alpha=0.2, linewidth=0)
    name = {"slots": "slots", "slots_device": "slots, device engine"}[result["sweep"]["of"]]
    axes.plot(budgets, rates, "o-", color="tab:blue", label=f"{name}: median, 10 % to 90 %")
    limits = [1 / s["floor"]["seconds"] for s in summaries]
    axes.plot(budgets, limits, ":", color="tab:green", label="floor: missed bytes / link, or device memory")
    for kind, colour in (("eager", "tab:red"), ("streaming", "tab:purple")):
        summary = result["cases"].get(kind, {}).get("summary", {}).get(mode)
        if summary:
            rate = summary["decode_tokens_per_s"]
            axes.axhline(rate, color=colour, linewidth=1, label=f"{kind}: {rate:.3g} tokens/s")
    axes.set_yscale("log")
    axes.set_xlabel("expert_cache_gb (GiB of slots)")
    axes.set_ylabel("decoded tokens a second")
    axes.grid(alpha=0.3, which="both")


def title(result: dict[str, Any], mode: str) -> str:
    asked, hardware = result["asked"], result["hardware"]
    experts = result["sizes"]["total_experts"] * result["sizes"]["expert_bytes"] / GIB
    return (
        f"{asked['source']}, {asked['dtype']}, batch 1, {mode} decoding, {hardware['device']}\n"
        f"all {result['sizes']['total_experts']} experts are {experts:.3g} GiB, one token uses "
        f"{result['sizes']['experts_per_token']}"
    )
