"""Positions of PhiMoE: plain rope as transformers has it, LongRoPE as its formula was published, in every way to generate.

Since transformers 5.15 its own LongRoPE takes the short factors at every length, so the oracle is the formula, written down
here a second time, and the same model without a cache.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import expert_files
import families
import pytest
import slot_models
import torch
import transformers
from slot_rig import DEVICES
from transformers.models.phimoe.modeling_phimoe import PhimoeRotaryEmbedding

from airllm.airllm_phimoe import AirLLMPhiMoE
from airllm.errors import AirLLMError, UnsupportedModelError
from airllm.phimoe_rope import PhiMoERotaryEmbedding, reread_at_switch
from airllm.skeleton import load_config

SWITCH, DIM, THETA = 64, 32, 10000.0
SHORT = [1.0 + 0.02 * n for n in range(DIM // 2)]
LONG = [1.5 + 0.75 * n for n in range(DIM // 2)]
LONG_ROPE: dict[str, Any] = {
    "type": "longrope",
    "short_factor": SHORT,
    "long_factor": LONG,
    "short_mscale": 1.1,
    "long_mscale": 1.3,
    "original_max_position_embeddings": SWITCH,
}
STOCK_IS_RIGHT = tuple(int(part) for part in transformers.__version__.split(".")[:2]) < (5, 15)
V5_ROPE = {("rope_type" if key == "type" else key): value for key, value in LONG_ROPE.items()} | {"rope_theta": THETA}


def published(position: int, length: int) -> tuple[list[float], list[float]]:
    """cos and sin of one position of a sequence of ``length`` tokens, in plain Python and double precision."""
    factors, scale = (LONG, 1.3) if length > SWITCH else (SHORT, 1.1)
    angles = [position / (factors[n] * THETA ** (2 * n / DIM)) for n in range(DIM // 2)] * 2
    return [math.cos(angle) * scale for angle in angles], [math.sin(angle) * scale for angle in angles]


def config(**changes: Any) -> Any:
    return families.make_config("phimoe", **changes)


@pytest.fixture
def long_rope(checkpoint: Callable[..., Path], tmp_path: Path) -> Path:
    """A checkpoint whose configuration says LongRoPE the way that the hub's files say it."""
    return expert_files.with_config(
        checkpoint("phimoe"),
        tmp_path / "hub",
        "rope_parameters",
        rope_scaling=LONG_ROPE,
        rope_theta=THETA,
        original_max_position_embeddings=SWITCH,
    )


# --- the tables -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("changes", [{}, {"head_dim": 16}, {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}}])
def test_plain_rope_is_the_stock_modules_bit_for_bit(changes: dict[str, Any], dtype: torch.dtype, device: str) -> None:
    made = config(**changes)
    ours, stock = PhiMoERotaryEmbedding(made).to(device), PhimoeRotaryEmbedding(made).to(device)
    x = torch.zeros(2, 1, 64, dtype=dtype, device=device)
    for start, length in ((0, 1), (0, 64), (3, 65), (400, 111), (4095, 2)):
        positions = (torch.arange(length, device=device) + start)[None].expand(2, -1)
        for one, other in zip(ours(x, positions), stock(x, positions), strict=True):
            assert one.dtype == dtype and torch.equal(one, other)


def test_rows_of_a_padded_batch_have_positions_of_their_own() -> None:
    made = config()
    positions = torch.tensor([[1, 1, 0, 1, 2], [0, 1, 2, 3, 4]])
    x = torch.zeros(2, 5, 64)
    for one, other in zip(PhiMoERotaryEmbedding(made)(x, positions), PhimoeRotaryEmbedding(made)(x, positions), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("length", [1, 2, SWITCH - 1, SWITCH, SWITCH + 1, 5 * SWITCH])
def test_long_rope_is_the_published_formula(length: int) -> None:
    rope = PhiMoERotaryEmbedding(config(rope_parameters=V5_ROPE))
    cos, sin = rope(torch.zeros(1, length, 64), torch.arange(length)[None])
    assert cos.shape == sin.shape == (1, length, DIM)
    for position in {0, 1, length // 2, length - 1}:
        expected = torch.tensor(published(position, length), dtype=torch.float64)
        got = torch.stack([cos[0, min(position, length - 1)], sin[0, min(position, length - 1)]]).double()
        if position < length:
            assert torch.allclose(got, expected, atol=2e-5, rtol=0)


def test_one_token_far_along_takes_the_long_factors() -> None:
    rope = PhiMoERotaryEmbedding(config(rope_parameters=V5_ROPE))
    for position in (SWITCH - 1, SWITCH):
        cos, _ = rope(torch.zeros(1, 1, 64), torch.tensor([[position]]))
        assert torch.allclose(cos[0, 0].double(), torch.tensor(published(position, position + 1)[0]).double(), atol=2e-5)


def test_transformers_own_embedding_agrees_wherever_it_is_right() -> None:
    made = config(rope_parameters=V5_ROPE)
    ours, stock = PhiMoERotaryEmbedding(made), PhimoeRotaryEmbedding(made)
    positions = torch.arange(SWITCH)[None]
    x = torch.zeros(1, SWITCH, 64)
    for one, other in zip(ours(x, positions), stock(x, positions), strict=True):
        assert torch.allclose(one, other, atol=1e-6)
    far = torch.arange(2 * SWITCH)[None]
    same = all(torch.allclose(a, b, atol=1e-5) for a, b in zip(ours(x, far), stock(x, far), strict=True))
    assert same == STOCK_IS_RIGHT, "another release of transformers than those known: is the replacement still needed?"


def test_nothing_of_it_is_a_weight_of_the_checkpoint() -> None:
    rope = PhiMoERotaryEmbedding(config(rope_parameters=V5_ROPE))
    assert not rope.state_dict() and not list(rope.parameters()) and len(list(rope.buffers())) == 2


@pytest.mark.parametrize("kind", ["yarn", "linear"])
def test_rope_types_nobody_published_are_refused_by_name(kind: str) -> None:
    made = config()
    made.rope_parameters = {"rope_type": kind, "rope_theta": THETA, "factor": 2.0}
    with pytest.raises(UnsupportedModelError, match=kind):
        PhiMoERotaryEmbedding(made)


def test_factors_that_do_not_fit_the_heads_are_refused_with_the_numbers() -> None:
    made = config(rope_parameters=V5_ROPE)
    made.rope_parameters = {**made.rope_parameters, "long_factor": LONG[:-1]}
    with pytest.raises(UnsupportedModelError, match=f"{DIM // 2 - 1} entries, head_dim {DIM} needs {DIM // 2}"):
        PhiMoERotaryEmbedding(made)


@pytest.mark.parametrize("name", ["short_mscale", "long_factor", "original_max_position_embeddings"])
def test_a_missing_entry_is_an_error_that_names_it(name: str) -> None:
    made = config(rope_parameters=V5_ROPE)
    made.rope_parameters = {key: value for key, value in made.rope_parameters.items() if key != name}
    made.original_max_position_embeddings = None
    with pytest.raises(UnsupportedModelError, match=name):
        PhiMoERotaryEmbedding(made)


def test_the_length_of_the_switch_may_stand_beside_the_factors() -> None:
    made = config(rope_parameters=V5_ROPE)
    made.rope_parameters = {k: v for k, v in made.rope_parameters.items() if k != "original_max_position_embeddings"}
    made.original_max_position_embeddings = 77
    assert PhiMoERotaryEmbedding(made).switch_length == 77


# --- in a model -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["both", "in rope_scaling only", "v5"])
def test_every_way_to_write_long_rope_down_loads(where: str, checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    if where == "v5":
        folder = expert_files.with_config(checkpoint("phimoe"), tmp_path / "m", rope_parameters=V5_ROPE)
    else:
        more = {"original_max_position_embeddings": SWITCH} if where == "both" else {}
        folder = expert_files.with_config(
            checkpoint("phimoe"), tmp_path / "m", "rope_parameters", rope_scaling=LONG_ROPE, rope_theta=THETA, **more
        )
    made = load_config(folder)
    rope = PhiMoERotaryEmbedding(made)
    assert (rope.switch_length, rope.short_mscale, rope.long_mscale) == (SWITCH, 1.1, 1.3)
    expected = PhiMoERotaryEmbedding(config(rope_parameters=V5_ROPE))
    assert torch.equal(rope.inv_freq, expected.inv_freq) and torch.equal(rope.long_inv_freq, expected.long_inv_freq)
    model = slot_models.load(folder, 4)
    assert type(model.model.model.rotary_emb) is PhiMoERotaryEmbedding
    assert model(torch.tensor([[5, 6, 7]])).logits.isfinite().all()


def formula_oracle(folder: Path) -> Any:
    """Unmodified transformers but for its rotary embedding, which follows `published` at any length."""

    class Published(torch.nn.Module):
        def forward(self, x: torch.Tensor, position_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            length = int(position_ids.max()) + 1
            rows = [[published(int(p), length) for p in row] for row in position_ids]
            table = torch.tensor(rows, dtype=torch.float64)  # [B, T, 2, D]
            return table[:, :, 0].to(x.dtype), table[:, :, 1].to(x.dtype)

    oracle = slot_models.oracle(folder)
    oracle.model.rotary_emb = Published()
    return oracle


@pytest.mark.parametrize("streamed", [False, True], ids=["slots", "streamed"])
def test_logits_on_both_sides_of_the_switch_follow_the_formula(long_rope: Path, streamed: bool) -> None:
    model = AirLLMPhiMoE(long_rope, device="cpu") if streamed else slot_models.load(long_rope, 4)
    oracle = formula_oracle(long_rope)
    stock = slot_models.oracle(long_rope)
    for length in (SWITCH, SWITCH + 1, 3 * SWITCH):
        ids = families.prompt(oracle, length)
        with torch.no_grad():
            ours, expected = model(ids).logits, oracle(ids).logits
            assert torch.allclose(ours, expected, atol=2e-3), (ours - expected).abs().max()
            assert torch.equal(ours.argmax(-1), expected.argmax(-1))
            if length > SWITCH and not STOCK_IS_RIGHT:
                assert not torch.allclose(stock(ids).logits, expected, atol=0.05), "the difference is one that shows"


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("length", "new"), [(SWITCH - 6, 14), (SWITCH, 5), (SWITCH + 1, 5), (SWITCH - 1, 2)])
def test_growing_past_the_switch_with_a_cache_equals_without_one(long_rope: Path, length: int, new: int, device: str) -> None:
    model = slot_models.load(long_rope, 4, device=device)
    ids = families.prompt(model, length)
    # the window (64 tokens) would make both differ from a model that reads everything, and equally so
    with_cache, without = (generate(model, ids, new, use_cache=use_cache) for use_cache in (True, False))
    assert torch.equal(with_cache, without)
    slot_models.check(model)


def generate(model: Any, ids: torch.Tensor, new: int, **keywords: Any) -> torch.Tensor:
    mask = keywords.pop("attention_mask", torch.ones_like(ids))
    torch.manual_seed(3)
    return model.generate(
        ids, attention_mask=mask, **{"max_new_tokens": new, "min_new_tokens": new, "do_sample": False, **keywords}
    )


@pytest.mark.parametrize("keywords", [{"num_beams": 2}, {"do_sample": True}], ids=["beams", "sampling"])
def test_growing_past_the_switch_is_right_for_beams_and_samples(long_rope: Path, keywords: dict[str, Any]) -> None:
    model = slot_models.load(long_rope, 4)
    ids = families.prompt(model, SWITCH - 3, 2)
    answers = [generate(model, ids, 7, use_cache=use_cache, **keywords) for use_cache in (True, False)]
    assert torch.equal(*answers)


def test_growing_past_the_switch_is_right_for_a_left_padded_batch(long_rope: Path) -> None:
    model = slot_models.load(long_rope, 4)
    ids, mask = slot_models.padded((SWITCH - 3, SWITCH - 20))
    answers = [generate(model, ids, 7, use_cache=use_cache, attention_mask=mask) for use_cache in (True, False)]
    assert torch.equal(*answers)


def test_growing_past_the_switch_is_right_when_layers_stream(long_rope: Path) -> None:
    model = AirLLMPhiMoE(long_rope, device="cpu")
    ids = families.prompt(model, SWITCH - 3)
    assert torch.equal(generate(model, ids, 7), generate(model, ids, 7, use_cache=False))


def test_the_whole_sequence_is_read_again_once_and_only_at_the_switch(long_rope: Path) -> None:
    model = slot_models.load(long_rope, 4)
    read: list[int] = []

    def note(_module: Any, _args: Any, kwargs: dict[str, Any]) -> None:
        read.append(kwargs["input_ids"].shape[1])

    model.model.model.register_forward_pre_hook(note, with_kwargs=True)
    generate(model, families.prompt(model, SWITCH - 3), 8)
    assert read == [SWITCH - 3, 1, 1, 1, SWITCH + 1, 1, 1, 1]


def test_plain_rope_is_left_alone(checkpoint: Callable[..., Path]) -> None:
    model = slot_models.load(checkpoint("phimoe"), 4)
    assert model.model.model.rotary_emb.switch_length is None
    assert "prepare_inputs_for_generation" not in vars(model.model)
    with pytest.raises(AttributeError):
        reread_at_switch(torch.nn.Module())
    assert issubclass(UnsupportedModelError, AirLLMError)
