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
from typing import TextIO

import torch

from airllm.experts.runtime import SlotExpertRuntime

COLUMNS = "turn,phase,step,layer,slot,expert"


class RoutingRecorder:
    """Writes the routing of every forward it is shown. One sequence at a time: a forward of several rows is a prompt, one of
    a single row a decoded token."""

    def __init__(self, out: TextIO, experts: int) -> None:
        self._out, self._experts = out, experts
        self._turn = self._phase = self._step = self._next_step = 0

    def write_head(self, name: str, layers: int, top_k: int) -> None:
        head = f"# route_trace v1\n# arch={name} n_layer={layers} n_expert={self._experts} n_expert_used={top_k}\n"
        self._out.write(f"{head}{COLUMNS}\n")

    def note(self, layer: int, index: torch.Tensor) -> None:
        """``index`` [T, K]: the experts that each token chose in ``layer``."""
        rows = index.tolist()
        if layer == 0:
            self._begin(len(rows))
        for row, chosen in enumerate(rows):
            for rank, expert in enumerate(chosen):
                if expert < self._experts:
                    self._out.write(f"{self._turn},{self._phase},{self._step + row},{layer},{rank},{expert}\n")

    def _begin(self, rows: int) -> None:
        if rows > 1 and self._phase == 1:
            self._turn += 1
            self._next_step = 0
        self._phase = 0 if rows > 1 else 1
        self._step, self._next_step = self._next_step, self._next_step + rows


@contextmanager
def record_routing(runtime: SlotExpertRuntime, path: str | os.PathLike[str], name: str) -> Iterator[None]:
    """Within the block, the routing of every forward that ``runtime`` serves goes to the file ``path``; ``name`` says whose.

    Costs one more read-back a layer.
    """
    with open(path, "w", encoding="ascii") as out:
        recorder = RoutingRecorder(out, runtime.num_experts)
        recorder.write_head(name, runtime.layers, runtime.top_k)
        runtime.on_routing = recorder.note
        try:
            yield
        finally:
            runtime.on_routing = None
