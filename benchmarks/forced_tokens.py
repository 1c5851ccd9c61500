"""A fixed list of tokens that a model on the device engine decodes of itself, and decoding without steps launched ahead.

A logits processor that forces tokens (cases.Script) stands between a step's logits and the next step's token. Then no step can
be launched before the host has seen the token, as it is in a user's greedy call. So here the step's own logits are made to say
the token of the list, by two small kernels within the recording.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

LARGEST = 30_000.0
"""Above any logit of a sane model, and a number in half precision too."""


@contextmanager
def said(model: Any, tokens: list[int], first: int, positions: int = 1024) -> Iterator[None]:
    """Within the block the largest logit of the step at cache position p is that of ``tokens[p - first + 1]``, in every row.

    ``first``: the prompt's length. Models without steps stay as they are.
    """
    stepper = getattr(model, "_stepper", None)
    if stepper is None:
        yield
        return
    at = (torch.arange(positions) - first + 1).clamp(0, len(tokens) - 1)
    table = torch.tensor(tokens)[at].to(model.device)
    body = stepper._body

    def follow(state: Any) -> Any:
        output = body(state)
        with torch.no_grad():
            output.logits.index_fill_(2, table.index_select(0, state.slot), LARGEST)
        return output

    stepper._forget(stepper._states)  # what was recorded so far says what the weights say
    stepper._body = follow
    try:
        yield
    finally:
        del stepper._body
        stepper._forget(stepper._states)


@contextmanager
def nothing_ahead(model: Any) -> Iterator[None]:
    """Within the block no step is launched ahead: a script that a logits processor forces would make the first one of each call
    a wrong guess, whose bytes nobody asked for."""
    stepper = getattr(model, "_stepper", None)
    if stepper is None:
        yield
        return
    before, stepper._ahead.on = stepper._ahead.on, False
    try:
        yield
    finally:
        stepper._ahead.on = before
