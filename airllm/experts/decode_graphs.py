"""A decoded token's small kernels as recorded graphs: the same kernels on the same weights, without their launch cost.

A slot never moves, so "this row through the expert in this slot" can be recorded once per slot (CUDA or HIP graph) and
replayed for whichever expert lies there. The arithmetic is that of :mod:`airllm.experts.compute`, kernel for kernel, so
results stay bit-equal; only the host time of a launch goes.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from airllm.experts.compute import ApplyGate, gated_mlp

log = logging.getLogger(__name__)


class GraphPool:
    """Records graphs on one side stream into one shared memory pool. One owner per model; nothing is shared between models."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._stream = torch.cuda.Stream(device)
        self._pool: Any = None  # torch names the type of a pool handle differently in each release

    def record(self, work: Callable[[], object], warm_up: bool = True) -> torch.cuda.CUDAGraph:
        """Record ``work``; it runs once beforehand (``warm_up``), because libraries set themselves up on first use."""
        graph = torch.cuda.CUDAGraph()
        self._stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._stream):
            if warm_up:
                work()
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                work()
            finally:
                graph.capture_end()
        torch.cuda.current_stream(self.device).wait_stream(self._stream)
        self._pool = graph.pool()
        return graph


class ExpertGraphs:
    """For one row: ``total += weights[k] * expert(row)`` as a graph per (place, k).

    Static tensors: ``row`` [1, H], ``weights`` [1, K], ``total`` [1, H].
    """

    def __init__(
        self,
        pool: GraphPool,
        views: Sequence[Sequence[torch.Tensor]],
        top_k: int,
        apply_gate: ApplyGate,
        weight_dtype: torch.dtype,
    ) -> None:
        hidden_width, dtype, device = views[0][1].shape[0], views[0][1].dtype, pool.device
        self.row = torch.zeros(1, hidden_width, dtype=dtype, device=device)
        self.total = torch.zeros_like(self.row)
        self.weights = torch.zeros(1, top_k, dtype=weight_dtype, device=device)
        self._graphs = [
            [pool.record(partial(self._add, place_views, k, apply_gate), warm_up=place == k == 0) for k in range(top_k)]
            for place, place_views in enumerate(views)
        ]

    def _add(self, views: Sequence[torch.Tensor], k: int, apply_gate: ApplyGate) -> None:
        result = gated_mlp(self.row, views, apply_gate) * self.weights[:, k, None]
        self.total.add_(result.to(self.total.dtype))

    def load(self, hidden: torch.Tensor, weights: torch.Tensor) -> None:
        """Take the token: ``hidden`` [1, H], ``weights`` [1, K]."""
        self.row.copy_(hidden)
        self.weights.copy_(weights)
        self.total.zero_()

    def replay(self, place: int, k: int) -> None:
        """Add the expert in ``place`` with the token's k-th weight."""
        self._graphs[place][k].replay()


class GraphedRouter:
    """A router's own forward, recorded for one row. Anything else (more rows, hooks, training) runs the module as it is."""

    def __init__(self, pool: GraphPool, router: torch.nn.Module, hidden_width: int, dtype: torch.dtype) -> None:
        self._router, self._plain = router, router.forward
        self._row = torch.zeros(1, hidden_width, dtype=dtype, device=pool.device)
        self._outputs: tuple[torch.Tensor, ...] = ()

        def work() -> None:
            outputs = self._plain(self._row)
            self._outputs = outputs if isinstance(outputs, tuple) else (outputs,)

        self._graph = pool.record(work)

    def __call__(self, hidden: torch.Tensor, *args: object, **kwargs: object) -> object:
        fits = hidden.shape == self._row.shape and hidden.dtype == self._row.dtype and not (args or kwargs)
        if not fits or hidden.requires_grad or self._router.training:
            return self._plain(hidden, *args, **kwargs)
        self._row.copy_(hidden)
        self._graph.replay()
        if self._router._forward_hooks:
            # Somebody collects the outputs (output_router_logits): the next token must not overwrite them.
            return tuple(output.clone() for output in self._outputs)
        return self._outputs

    def install(self) -> None:
        self._router.forward = self  # type: ignore[assignment]

    def remove(self) -> None:
        self._router.__dict__.pop("forward", None)
