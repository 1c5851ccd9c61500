"""Where Triton kernels run in the tests: on a GPU as they are, elsewhere in Triton's interpreter, in a process of its own.

TRITON_INTERPRET=1 must be set before kernels are imported, so without a GPU a test file runs itself once more.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

HAS_TRITON = importlib.util.find_spec("triton") is not None
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = torch.device("cuda" if torch.cuda.is_available() and not INTERPRETED else "cpu")
KERNELS_RUN = HAS_TRITON and (INTERPRETED or DEVICE.type == "cuda")
if INTERPRETED:
    torch.set_num_threads(1)

needs_kernels = pytest.mark.skipif(not KERNELS_RUN, reason="needs Triton, and a GPU or TRITON_INTERPRET=1")


def runs_itself(test: object) -> object:
    """Marks the test that runs its file in the interpreter: not without Triton, and not where the kernels run anyway."""
    here = pytest.mark.skipif(INTERPRETED or DEVICE.type == "cuda", reason="the kernels run in this process")
    return pytest.mark.skipif(not HAS_TRITON, reason="Triton is not installed")(here(test))


def random_numbers() -> Any:
    """``draw(*shape, dtype=, scale=)``: normal numbers where kernels run, the same ones in every test."""
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int, dtype: torch.dtype = torch.float32, scale: float = 1.0) -> torch.Tensor:
        return (torch.randn(*shape, generator=generator) * scale).to(dtype).to(DEVICE)

    return draw


def close(ours: torch.Tensor, theirs: torch.Tensor, dtype: torch.dtype | None = None) -> bool:
    """Equal up to a few roundings (in ``dtype``): sums are added in another order."""
    room = {torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}[dtype or ours.dtype]
    return bool(((ours - theirs).float().abs().max() <= room * theirs.float().abs().max()).item())


def run_interpreted(file: str) -> None:
    """Run the tests of ``file`` in the interpreter."""
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", file]
    root = Path(__file__).resolve().parents[1]
    done = subprocess.run(command, env=environment, cwd=root, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout[-4000:]
    assert "passed" in done.stdout
