"""A prompt's experts several at a time: kernels against twins, twins against transformers' experts in float32.

As in test_kernels.py: on a GPU as they are, elsewhere in Triton's interpreter, in a process of its own.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from slot_rig import EXPERTS, HIDDEN, LAYERS, Both
from triton_here import DEVICE, INTERPRETED, KERNELS_RUN, close, needs_kernels, random_numbers, run_interpreted, runs_itself

from airllm.experts import grouped
from airllm.experts import prompt_twins as twins
from airllm.experts.compute import Routing
from airllm.experts.prompt_twins import Rows

if KERNELS_RUN:
    from airllm.experts import prompt_kernels

    if INTERPRETED:
        prompt_kernels.ROWS, prompt_kernels.COLUMNS, prompt_kernels.DEPTH = 16, 16, 16

DTYPES = [torch.float32, torch.float16] if INTERPRETED else [torch.float32, torch.float16, torch.bfloat16]


@runs_itself
def test_the_kernels_agree_with_their_twins_in_the_interpreter() -> None:
    """Runs the rest of this file."""
    run_interpreted(__file__)


@pytest.fixture
def draw() -> Any:
    return random_numbers()


CHUNKS = {
    "one expert": [Rows(2, 0, 5)],
    "four, one without rows": [Rows(1, 0, 40), Rows(4, 40, 40), Rows(0, 40, 57), Rows(3, 57, 60)],
    "two in the middle": [Rows(0, 10, 27), Rows(4, 27, 30)],
}


@needs_kernels
@pytest.mark.parametrize("chunk", CHUNKS.values(), ids=list(CHUNKS))
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("hidden_width", "width"), [(64, 32), (40, 24), (136, 80)])
def test_kernels(hidden_width: int, width: int, dtype: torch.dtype, chunk: list[Rows], draw: Any) -> None:
    rows, tokens = 60, 30
    hidden, token = draw(tokens, hidden_width, dtype=dtype), torch.arange(rows, device=DEVICE) * 7 % tokens
    pool = draw(5, 3 * hidden_width * width + 8, dtype=dtype, scale=0.2)  # places are further apart than their weights
    gate_up = pool[:, : 2 * hidden_width * width].unflatten(1, (2 * width, hidden_width))
    down = pool[:, 2 * hidden_width * width : 3 * hidden_width * width].unflatten(1, (hidden_width, width))
    weights, row = draw(rows).abs(), torch.arange(rows, device=DEVICE).flip(0).view(2, tokens)
    results = []
    for ops in (prompt_kernels, twins):
        inner, outputs = (torch.full((rows, n), 0.5, dtype=dtype, device=DEVICE) for n in (width, hidden_width))
        ops.gate_up(hidden, token, chunk, gate_up, inner)
        ops.down(inner, weights, chunk, down, outputs)
        total = torch.full_like(hidden, torch.nan)
        ops.combine(outputs, row, total)
        results.append((inner, outputs, total))
    assert all(close(ours, theirs) for ours, theirs in zip(*results, strict=True))
    covered = {row for part in chunk for row in range(part.start, part.end)}
    rest = [row for row in range(rows) if row not in covered]
    assert (results[0][1][rest] == 0.5).all(), "rows of other experts are left alone"


def prompt_call(rig: Both, layer: int, tokens: int) -> None:
    rig.runtime.begin_forward(1, tokens, rig.device)
    hidden, index, weights = rig.draw(tokens)
    ours = rig.run(layer, hidden, index, weights)
    torch.testing.assert_close(ours, rig.expected(layer, hidden, index, weights), rtol=2e-5, atol=2e-5)
    rig.check()


@pytest.mark.parametrize(("slots", "most"), [(2, 1), (5, 1), (14, 3), (LAYERS * EXPERTS, 4)])
def test_a_prompt_is_what_transformers_experts_give(slots: int, most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rig, made = Both(slots, device=DEVICE), []
    monkeypatch.setattr(grouped.GroupedSum, "add", _counted(grouped.GroupedSum.add, made))
    for tokens in (200, 33, 64):
        for layer in range(LAYERS):
            prompt_call(rig, layer, tokens)
    assert made and max(made) == most, "as many at once as leave places for copies meanwhile"
    rig.close()


def _counted(add: Any, made: list[int]) -> Any:
    def counting(self: Any, experts: Any, places: Any) -> None:
        made.append(len(experts))
        add(self, experts, places)

    return counting


def test_short_calls_and_prompts_that_would_take_too_much_memory_keep_transformers_order(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rig = Both(5, device=DEVICE)
    hidden, index, weights = rig.draw(64)
    routing = Routing(index, EXPERTS, None)
    assert grouped.can_group(routing, hidden)
    monkeypatch.setattr(grouped, "OUTPUT_BYTES", 64 * 2 * HIDDEN * 4 - 1)
    assert not grouped.can_group(routing, hidden)
    rig.runtime.begin_forward(1, 64, rig.device)
    rig.call(0, hidden, index, weights)  # bit for bit
    monkeypatch.undo()
    rig.runtime.begin_forward(1, 4, rig.device)
    rig.call(0, *rig.draw(4))
    index[3, 1] = EXPERTS  # no expert
    assert not grouped.can_group(Routing(index, EXPERTS, None), hidden)
    rig.close()
