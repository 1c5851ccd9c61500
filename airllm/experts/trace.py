"""Writes down which experts each token was routed to, for ``benchmarks/policy_replay.py``.

A CSV file in the format "route_trace v1": comment lines with ``n_layer``, ``n_expert`` and ``n_expert_used``, a line of
column names, then one line for each expert of each token: ``turn`` (one call of ``generate``), ``phase`` (0 prompt, 1 decode),
``step`` (the token's position in its turn), ``layer``, ``slot`` (the rank in the router's choice), ``expert``. The format is
that of the traces published with BigMoeOnEdge, less their last three columns.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TextIO

import torch
from torch import nn

from airllm.experts.modules import SlotExperts

COLUMNS = "turn,phase,step,layer,slot,expert"


class RoutingRecorder:
    """Writes the routing of every forward it is shown. One sequence at a time: a forward of several rows is a prompt, one of
    a single row a decoded token."""

    def __init__(self, out: TextIO) -> None:
        self._out = out
        self._turn = self._phase = self._step = self._next_step = 0

    def write_head(self, model_type: str, layers: int, experts: int, top_k: int) -> None:
        self._out.write(f"# route_trace v1\n# arch={model_type} n_layer={layers} n_expert={experts} n_expert_used={top_k}\n")
        self._out.write(COLUMNS + "\n")

    def note(self, module: SlotExperts, args: tuple[torch.Tensor, torch.Tensor, torch.Tensor]) -> None:
        """A pre-hook of each experts module; its second argument is the experts chosen, [T, K]."""
        rows = args[1].tolist()
        if module.layer == 0:
            self._begin(len(rows))
        for row, chosen in enumerate(rows):
            for rank, expert in enumerate(chosen):
                if expert < module.num_experts:
                    self._out.write(f"{self._turn},{self._phase},{self._step + row},{module.layer},{rank},{expert}\n")

    def _begin(self, rows: int) -> None:
        if rows > 1 and self._phase == 1:
            self._turn += 1
            self._next_step = 0
        self._phase = 0 if rows > 1 else 1
        self._step, self._next_step = self._next_step, self._next_step + rows


@contextmanager
def record_routing(model: nn.Module, path: str | os.PathLike[str]) -> Iterator[None]:
    """Within the block, the routing of every forward of ``model``, whose experts are in slots, goes to the file ``path``.

    Costs one more read-back a layer.
    """
    found: list[Any] = [module for module in model.modules() if isinstance(module, SlotExperts)]
    with open(path, "w", encoding="ascii") as out:
        recorder = RoutingRecorder(out)
        config: Any = getattr(model, "config", None)
        recorder.write_head(config.model_type, len(found), found[0].num_experts, found[0].top_k)
        hooks = [module.register_forward_pre_hook(recorder.note) for module in found]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()
