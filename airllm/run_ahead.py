"""The next step of greedy decoding, launched before generate asks for it, so that the device does not wait for the host.

Between two forwards generate looks at the token, asks the stopping criteria, hands the token to the streamer and prepares the
next forward: some tenths of a millisecond in which the device would stand still. But in greedy decoding the next token is known
on the device as soon as the logits are. So it is taken there, and its step launched on a stream of its own. When generate comes
with its token the two are compared, while that step runs; a step that is not the one asked for is thrown away: what it wrote
into the cache of keys and values lies behind all that counts, and is written over.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from airllm.experts.side_stream import join, on_stream
from airllm.step_state import StepState

Launch = Callable[[StepState], None]
"""Computes a step from the state's fixed inputs to its ``output``."""


class RunAhead:
    """At most one step that nobody has asked for yet.

    ``stream``: where steps run; None on the CPU, where nothing is launched ahead unless ``on`` is set: nothing would be gained.
    ``until``: the positions that this call of generate will have computed at its end at most, where it is greedy; else 0.
    ``launched``, ``discarded``: steps so far, and those of them that were not asked for.
    """

    def __init__(self, stream: torch.cuda.Stream | None, allowed: bool = True) -> None:
        self.on = allowed and stream is not None
        self.until = 0
        self.launched = self.discarded = 0
        self._stream = stream
        self._state: StepState | None = None  # whose next step has been launched
        self._overwritten: StepState | None = None  # see `overwritten`
        self._asked: tuple[torch.Tensor, torch.Tensor] | None = None  # ids and positions of that step

    @property
    def pending(self) -> bool:
        """Whether a step has been launched that nobody has asked for."""
        return self._state is not None

    @property
    def overwritten(self) -> bool:
        """Whether what the latest step that was asked for left in its layers is gone."""
        return self._overwritten is not None

    def start(
        self, launch: Launch, state: StepState, logits: torch.Tensor, ids: torch.Tensor, positions: torch.Tensor
    ) -> None:
        """Launch the step of the token that ``logits`` [B, 1, vocabulary] say, which came from ``ids`` at ``positions``."""
        self._overwritten = self._asked = None
        recorded = state.graph is not None or self._stream is None
        if not self.on or not recorded or state.cache.seen >= self.until:
            return
        torch.argmax(logits[:, -1].float(), dim=-1, keepdim=True, out=state.ids)  # as generate takes it
        state.positions.add_(1)
        state.slot.add_(1)
        self._run(launch, state, wait=False)
        self.launched += 1
        self._state = self._overwritten = state
        self._asked = ids, positions

    def take(self, state: StepState, ids: torch.Tensor, positions: torch.Tensor) -> bool:
        """Whether the step of ``ids`` and ``positions`` [B, 1] has been launched already; the current stream waits for it.

        After a wrong guess this call of generate makes no more: something stands between its logits and its tokens.
        """
        if self._state is None:
            return False
        same = self._state is state and torch.equal(ids, state.ids)
        if same and torch.equal(positions.expand_as(state.positions), state.positions):
            self._state = self._overwritten = self._asked = None
            join(self._stream)
            return True
        self.until = 0
        self.drop()
        return False

    def drop(self) -> None:
        """Throw away what was launched and not asked for. Its memory may be used again by what the current stream does next."""
        self.finish()
        self._overwritten = self._asked = None

    def finish(self) -> None:
        """At the end of a call: like `drop`, but `go_back` still can."""
        if self._state is not None:
            self._state = None
            self.discarded += 1
        join(self._stream)

    def go_back(self, launch: Launch) -> None:
        """Compute the latest step that was asked for once more, if the one launched after it has written over what it left."""
        state, asked = self._overwritten, self._asked
        self.drop()
        if state is None or asked is None:
            return
        state.cache.clear(state.cache.seen)  # a mask would let a NaN through that the other step left there
        state.ids.copy_(asked[0])
        state.positions.copy_(asked[1])
        state.slot.sub_(1)
        self._run(launch, state, wait=True)

    def _run(self, launch: Launch, state: StepState, *, wait: bool) -> None:
        with on_stream(self._stream, wait=wait):
            launch(state)
