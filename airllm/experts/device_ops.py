"""Kernels where there is a GPU, their twins in plain torch where there is none."""

from __future__ import annotations

import importlib
from types import ModuleType

import torch


def ops_for(device: torch.device, kernels: str, twins: ModuleType) -> ModuleType:
    """``twins`` on the CPU, else the module ``airllm.experts.<kernels>``, imported only now since it needs Triton."""
    return twins if device.type == "cpu" else importlib.import_module(f"airllm.experts.{kernels}")
