"""Triton's compiler takes every kernel for GPUs of both vendors, none of which need be there (see compile_kernels.py)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from triton_here import HAS_TRITON, INTERPRETED

SCRIPT = Path(__file__).resolve().parents[1] / "compile_kernels.py"
TARGETS = ["hip:gfx1100"]
"""The vendor that no machine here has. By hand also others, as cuda:80, or hip:gfx90a, whose waves have 64 threads: half a
minute each."""


@pytest.mark.slow
@pytest.mark.skipif(not HAS_TRITON, reason="Triton is not installed")
@pytest.mark.skipif(INTERPRETED, reason="the interpreter compiles nothing")
@pytest.mark.parametrize("target", TARGETS)
def test_every_kernel_compiles(target: str, tmp_path: Path) -> None:
    environment = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(SCRIPT), target]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600, check=False)
    if "ROCm linker" in done.stderr:
        pytest.skip("this Triton links for AMD only where ROCm is installed")
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert not found["missing"], "compile_kernels.py launches every kernel"
    assert len(found["compiled"]) >= 12 and min(found["compiled"].values()) > 0
