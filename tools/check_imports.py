#!/usr/bin/env python
"""Imports flow one way, the pure rooms stay pure, and `import airllm` does nothing.

    python tools/check_imports.py

Every module has a place in ORDER and may import, from this package, only modules before it. The check reads the source,
so imports inside functions and under TYPE_CHECKING count as well.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

ORDER = (
    "errors",
    "gradients",
    "experts.host_memory",
    "options",
    "locate",
    "safetensors_format",
    "checkpoint",
    "folder_lock",
    "bin_files",
    "compression",
    "quantised",
    "transformers_private",
    "weight_sources",
    "weight_map",
    "skeleton",
    "split_manifest",
    "split_plan",
    "split_writer",
    "split_originals",
    "layer_files",
    "dense_budget",
    "layer_layout",
    "layer_watch",
    "phimoe_rope",
    "experts.stats",
    "experts.budget",
    "experts.policy",
    "experts.plan",
    "experts.passing",
    "experts.layout",
    "experts.bank",
    "experts.slots",
    "experts.transfer",
    "experts.compute",
    "experts.prompt_twins",
    "experts.prompt_kernels",
    "experts.grouped",
    "experts.gates",
    "experts.side_stream",
    "experts.switched_off",
    "experts.decode_graphs",
    "experts.device_ops",
    "experts.device_tables",
    "experts.kernel_twins",
    "experts.route_aged",
    "experts.kernels",
    "experts.step_twins",
    "experts.step_kernels",
    "experts.device_engine",
    "experts.runtime",
    "experts.contract",
    "experts.modules",
    "experts.trace",
    "experts.batched",
    "experts.assembly",
    "streaming",
    "recorded_layers",
    "step_cache",
    "step_state",
    "run_ahead",
    "step_plan",
    "fused_step",
    "decode_step",
    "profiler",
    "dense_weights",
    "guard",
    "slot_backend",
    "airllm_base",
    "airllm_families",
    "airllm_phimoe",
    "auto_model",
    "token_clock",
    "inspect_model",
    "inspect_text",
    "demo",
    "cli",
    "__main__",
)

# Rooms that decide and hold no tensors: they are tested anywhere, and fast.
WITHOUT_TORCH = (
    "errors", "dense_budget", "experts.budget", "experts.policy", "experts.plan", "experts.passing", "experts.stats",
)  # fmt: skip
# Rooms that own a dependency.
ONLY_USER = {"huggingface_hub": ("locate",), "bitsandbytes": ("compression",), "typer": ("cli",)}


def modules(package: Path) -> Iterator[tuple[str, Path]]:
    """Name relative to the package, and file, of every module that is not a package's __init__."""
    for path in sorted(package.rglob("*.py")):
        if path.name != "__init__.py":
            yield ".".join(path.relative_to(package).with_suffix("").parts), path


def imported(path: Path, package: Path) -> Iterator[tuple[int, str]]:
    """(line, absolute dotted name) of everything that the file imports, wherever the import stands."""
    here = [package.name, *path.relative_to(package).parent.parts]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"), str(path))):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parts = here[: len(here) - node.level + 1] if node.level else []
            stem = ".".join([*parts, *([node.module] if node.module else [])])
            # "from package import module" names a module only if there is such a file; the caller looks.
            yield from ((node.lineno, f"{stem}.{alias.name}") for alias in node.names)


def resolve(name: str, package: Path) -> str | None:
    """The module of this package that a dotted name lies in ("" for the package itself), None for foreign names."""
    parts = name.split(".")
    if parts[0] != package.name:
        return None
    inside = parts[1:]
    while inside:
        base = package.joinpath(*inside)
        if base.with_suffix(".py").is_file():
            return ".".join(inside)
        inside = inside[:-1]
    return ""


def check_order(package: Path, order: tuple[str, ...] = ORDER) -> list[str]:
    """One line for every import that goes against the flow, and for every module that has no place in it."""
    place = {name: index for index, name in enumerate(order)}
    faults = []
    for name, path in modules(package):
        if name not in place:
            faults.append(f"{name} has no place in ORDER of tools/check_imports.py: put it after what it imports")
            continue
        for line, target in imported(path, package):
            found = resolve(target, package)
            if found and place.get(found, -1) >= place[name]:
                faults.append(f"{path.relative_to(package.parent)}:{line}: {name} must not import {found}, which comes later")
    return faults


def check_ownership(package: Path) -> list[str]:
    """Pure rooms import no torch or transformers; a dependency with an owner is imported by nobody else."""
    faults = []
    for name, path in modules(package):
        for line, target in imported(path, package):
            top = target.split(".")[0]
            where = f"{path.relative_to(package.parent)}:{line}"
            if name in WITHOUT_TORCH and top in ("torch", "transformers", "numpy"):
                faults.append(f"{where}: {name} must work without {top}")
            if top in ONLY_USER and name not in ONLY_USER[top]:
                faults.append(f"{where}: only {', '.join(ONLY_USER[top])} may import {top}")
    return faults


PROBE = """
import sys
import airllm
heavy = sorted({"torch", "transformers", "numpy", "huggingface_hub", "tqdm"} & set(sys.modules))
sys.exit("import airllm also imports " + ", ".join(heavy) if heavy else 0)
"""


def check_silent_import(root: Path = ROOT) -> list[str]:
    """`import airllm` in a fresh interpreter prints nothing and imports no heavy package, so it cannot touch a device."""
    done = subprocess.run([sys.executable, "-c", PROBE], cwd=root, capture_output=True, text=True, check=False)
    said = (done.stdout + done.stderr).strip()
    return [f"import airllm is not silent: {said or done.returncode}"] if said or done.returncode else []


def main() -> int:
    package = ROOT / "airllm"
    faults = check_order(package) + check_ownership(package) + check_silent_import()
    for fault in faults:
        print(fault)
    count = sum(1 for _ in modules(package))
    print(f"import order: {count} modules, {len(faults)} faults")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
