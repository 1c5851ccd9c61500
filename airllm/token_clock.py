"""When each token of a `generate` call arrived. Used by the demo and by the benchmarks."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from transformers.generation.streamers import BaseStreamer


@dataclass
class TokenClock(BaseStreamer):
    """A streamer for batches of one that notes the time of every token.

    `generate` hands tokens over as CPU tensors, so the device has finished the step by then. The first call is the prompt
    itself, before any forward. `after_prompt` is called once, when the first new token is there; its time is not counted.
    """

    after_prompt: Callable[[], None] | None = None
    prompt_s: float = 0.0
    decode_s: list[float] = field(default_factory=list)
    """Seconds of each token after the first new one."""
    tokens: list[int] = field(default_factory=list)
    _last: float | None = None

    def put(self, value: Any) -> None:
        now = time.perf_counter()
        if self._last is None:
            self._last = now
            return
        self.tokens.extend(int(token) for token in value.reshape(-1))
        if len(self.tokens) == 1:
            self.prompt_s = now - self._last
            if self.after_prompt is not None:
                self.after_prompt()
        else:
            self.decode_s.append(now - self._last)
        self._last = time.perf_counter()

    def end(self) -> None:
        """Nothing to flush."""

    def decode_tokens_per_s(self) -> float | None:
        total = sum(self.decode_s)
        return len(self.decode_s) / total if total > 0 else None
