"""Recorded routing on another geometry, and a way to make a model follow it.

A recorded trace of L layers and E experts becomes a table for more layers and more experts:

  * Layer l takes the trace of layer l mod L, from a token on that is its own for each l // L, so that no two layers go in step.
  * Each recorded expert stands for a group of experts. Which of the group it is comes from another recorded choice of the same
    layer, a fixed number of tokens away, so that it too stays for a while and then changes. All experts are used.
  * A fixed random permutation a layer says which expert is which.

So an expert that was just used comes again more often than by chance, as in the recording. Weights of the experts stay what the
model's own router gives for the ones it chose: they decide numbers, not which bytes move.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch

from benchmarks.routing_traces import Trace, Turn

SELECTOR_AHEAD = 29
"""Tokens between a choice and the choice that picks out of its group."""
ROW_AHEAD = 41
"""Tokens between neighbouring sequences of a batch."""


def mapped(trace: Trace, layers: int, experts: int, tokens: int, seed: int = 0) -> torch.Tensor:
    """The table: experts [tokens, layers, top_k] (int64), distinct and ascending for each token and layer.

    Raises ValueError for fewer experts than the trace has, or more than its choices can tell apart.
    """
    groups = experts // trace.experts
    if not 1 <= groups <= trace.experts:
        raise ValueError(f"{experts} experts: from {trace.experts} to {trace.experts**2} can be made of the trace's")
    recorded = torch.tensor([token for turn in trace.turns for token in turn.decode])
    rng = random.Random(seed)
    columns = []
    for layer in range(layers):
        own = layer // trace.layers * len(recorded) // -(-layers // trace.layers)
        at = torch.arange(own, own + tokens)
        source = recorded[:, layer % trace.layers]
        chosen = source[at % len(recorded)]
        selected = source[(at + SELECTOR_AHEAD) % len(recorded), 0] % groups
        name = torch.tensor(rng.sample(range(experts), groups * trace.experts))
        columns.append(name[chosen * groups + selected[:, None]].sort(dim=-1).values)
    return torch.stack(columns, dim=1)


def as_trace(table: torch.Tensor, experts: int, name: str) -> Trace:
    """The table as one turn of decoded tokens, for the replay of policies."""
    tokens, layers, top_k = table.shape
    return Trace(name, layers, experts, top_k, [Turn([], table.tolist())])


def reuse(trace: Trace) -> float:
    """Share of a token's experts that the token before used too."""
    tokens = [token for _, token in trace.tokens()]
    pairs = zip(tokens, tokens[1:], strict=False)
    same = sum(len(set(a) & set(b)) for before, now in pairs for a, b in zip(before, now, strict=True))
    return same / (trace.experts_per_token * (len(tokens) - 1))


class Forced:
    """Experts by position: a decoded token at cache position p has row (p - ``first``) of ``table``, over and over again.

    Prompts stay as they are routed. The sequences of a batch follow the table at places of their own.
    """

    def __init__(self, table: torch.Tensor, first: int, positions: int, device: torch.device) -> None:
        from airllm.experts.device_engine import MAX_ROWS

        at = torch.arange(positions)[:, None] - first + torch.arange(MAX_ROWS) * ROW_AHEAD
        by_layer = table[at % len(table)].transpose(0, 2).transpose(1, 2).contiguous().to(device)  # [L, P, rows, K]
        self._by_layer = {dtype: by_layer.to(dtype) for dtype in (torch.int32, torch.int64)}

    def at(self, layer: int, position: int | torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        """In place of ``index`` [rows, K], like it; ``position`` an integer, or a tensor [1] that is read on the device, once
        for all layers: they come in order."""
        table = self._by_layer[index.dtype]
        if not isinstance(position, torch.Tensor):
            return table[layer, position, : index.shape[0]]
        if layer == 0:
            self._row = table[:, :, : index.shape[0]].index_select(1, position)[:, 0]
        return self._row[layer]


@contextmanager
def forced(model: Any, table: torch.Tensor, first: int, positions: int = 1024) -> Iterator[None]:
    """Within the block every decoded token of ``model`` goes to the experts of ``table`` [tokens, layers, top_k].

    ``model``: one of airllm's on slots, with either engine, or a plain one of transformers. ``first``: the prompt's length, at
    least 2. ``positions``: the most of prompt and new tokens. In the device engine it costs one small kernel a token, within
    the recording.
    """
    runtime = getattr(model, "_runtime", None)
    follow = Forced(table, first, positions, model.device)
    with ExitStack() as stack:
        if runtime is None:
            stack.enter_context(_forced_modules(model, follow))
        else:
            stack.enter_context(_forced_runtime(runtime, follow))
        if runtime is not None and runtime.engine is not None:
            stack.enter_context(_forced_engine(model._stepper, runtime.engine, follow))
        yield


@contextmanager
def _forced_engine(stepper: Any, engine: Any, follow: Forced) -> Iterator[None]:
    experts = engine.experts

    def serve(layer: int, hidden: torch.Tensor, index: torch.Tensor, *more: Any, **named: Any) -> torch.Tensor:
        return experts(layer, hidden, follow.at(layer, stepper._active.slot, index), *more, **named)

    stepper._forget(stepper._states)  # what was recorded so far follows the router, and what is recorded now the table
    engine.experts = serve
    try:
        yield
    finally:
        del engine.experts
        stepper._forget(stepper._states)


@contextmanager
def _forced_runtime(runtime: Any, follow: Forced) -> Iterator[None]:
    """The plain engine, below its recorded layers: those would not be replayed if something hung on their modules."""
    now = _Now()
    begin, serve = runtime.begin_forward, runtime._run

    def begin_forward(batch: int, sequence: int, device: torch.device) -> None:
        now.begin(sequence)
        begin(batch, sequence, device)

    def run(call: Any) -> Any:
        if now.decoding:
            call.index = follow.at(call.layer, now.position, call.index)
        return serve(call)

    runtime.begin_forward, runtime._run = begin_forward, run
    try:
        yield
    finally:
        del runtime.begin_forward, runtime._run


@contextmanager
def _forced_modules(model: Any, follow: Forced) -> Iterator[None]:
    from airllm.experts.modules import find_experts

    now = _Now()

    def begin(_module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        now.begin((kwargs["input_ids"] if "input_ids" in kwargs else args[0]).shape[1])

    def replace(layer: int, _module: Any, args: tuple[Any, ...]) -> Any:
        hidden, index, *rest = args
        return (hidden, follow.at(layer, now.position, index), *rest) if now.decoding else None

    hooks = [model.base_model.register_forward_pre_hook(begin, with_kwargs=True)]
    for layer, module in enumerate(find_experts(model).values()):
        hooks.append(module.register_forward_pre_hook(partial(replace, layer)))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


class _Now:
    """Whether the forward that runs is that of a decoded token, and where in the cache it writes. A longer one is a prompt."""

    decoding, position, following = False, 0, 0

    def begin(self, sequence: int) -> None:
        self.decoding = sequence == 1
        self.position = self.following if self.decoding else 0
        self.following = self.position + sequence
