"""A decoded token's small kernels as recorded graphs: the same kernels on the same weights, without their launch cost.

A slot never moves, so "this row through the expert in this slot" can be recorded once per slot (CUDA or HIP graph) and
replayed for whichever expert lies there. The arithmetic is that of :mod:`airllm.experts.compute`, kernel for kernel, so
results stay bit-equal; only the host time of a launch goes.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, suppress
from functools import partial
from typing import Any

import torch

from airllm.experts.compute import ExpertMath
from airllm.experts.side_stream import on_stream
from airllm.experts.switched_off import no_collector

log = logging.getLogger(__name__)


class GraphPool:
    """Records graphs on one side stream into one shared memory pool: whatever a recording gives back, a later one may reuse, so
    graphs of one pool must be replayed in the order of their recording. Nothing is shared between models."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._stream = torch.cuda.Stream(device)
        self._pool: Any = None  # torch names the type of a pool handle differently in each release
        self._open: torch.cuda.CUDAGraph | None = None
        self._quiet = ExitStack()

    def aside(self) -> AbstractContextManager[None]:
        """Inside, work goes to the stream that records, after what the current stream was given and before what it gets."""
        return on_stream(self._stream)

    def begin(self) -> None:
        """Record from here on, instead of running. Call it, and ``end``, within ``aside``."""
        self._quiet.enter_context(no_collector())
        self._open = torch.cuda.CUDAGraph()
        self._open.capture_begin(pool=self._pool, capture_error_mode="thread_local")

    def end(self) -> torch.cuda.CUDAGraph:
        """The recording since ``begin``."""
        assert self._open is not None
        with self._quiet:
            graph, self._open = self._open, None
            graph.capture_end()
        self._pool = graph.pool()
        return graph

    def abandon(self) -> None:
        """After an exception: record no longer."""
        with self._quiet:
            if self._open is not None:
                with suppress(RuntimeError):  # a broken recording cannot be ended cleanly; the first error is the one to show
                    self.end()

    def record(self, work: Callable[[], object], warm_up: bool = True) -> torch.cuda.CUDAGraph:
        """Record ``work``; it runs once beforehand (``warm_up``), because libraries set themselves up on first use."""
        with self.aside():
            if warm_up:
                work()
            try:
                self.begin()
                work()
                return self.end()
            except BaseException:
                self.abandon()
                raise


class ExpertGraphs:
    """For one row: ``total += weights[k] * expert(row)`` as a graph per (place, k).

    Static tensors: ``row`` [1, H], ``weights`` [1, K], ``total`` [1, H].
    """

    def __init__(
        self,
        pool: GraphPool,
        views: Sequence[Sequence[torch.Tensor]],
        hidden_width: int,
        top_k: int,
        math: ExpertMath,
        weight_dtype: torch.dtype,
    ) -> None:
        self.math = math
        self.row = torch.zeros(1, hidden_width, dtype=views[0][0].dtype, device=pool.device)
        self.weights = torch.zeros(1, top_k, dtype=weight_dtype, device=pool.device)
        self.total = math.start(self.row, self.weights)
        self._graphs = [
            [pool.record(partial(self._add, place_views, k), warm_up=place == k == 0) for k in range(top_k)]
            for place, place_views in enumerate(views)
        ]

    def _add(self, views: Sequence[torch.Tensor], k: int) -> None:
        self.total.add_(self.math.weighted(self.row, views, self.weights[:, k, None]).to(self.total.dtype))

    def fit(self, hidden: torch.Tensor, weights: torch.Tensor) -> bool:
        """Whether this token is of the kind that was recorded."""
        same_types = hidden.dtype == self.row.dtype and weights.dtype == self.weights.dtype
        return same_types and hidden.shape == self.row.shape and not hidden.requires_grad

    def load(self, hidden: torch.Tensor, weights: torch.Tensor) -> None:
        """Take the token: ``hidden`` [1, H], ``weights`` [1, K]."""
        self.row.copy_(hidden)
        self.weights.copy_(weights)
        self.total.zero_()

    def replay(self, place: int, k: int) -> None:
        """Add the expert in ``place`` with the token's k-th weight."""
        self._graphs[place][k].replay()

