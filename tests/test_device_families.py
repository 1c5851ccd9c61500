"""Families on the device engine, through generate, beside unmodified transformers: in float32 the tokens are the same, and
the logits differ by no more than a sum in another order does. On the CPU by the kernels' twins; on a GPU by the kernels."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import slot_rig
import torch
import transformers

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "benchmarks"))

import family_models  # noqa: E402
import family_table  # noqa: E402

from airllm import AutoModel, step_plan  # noqa: E402
from airllm.experts.modules import SlotExperts  # noqa: E402

FOLDERS = {family.folder: family for family in family_models.families()}
VERSION = tuple(int(part) for part in transformers.__version__.split(".")[:2])
TOKENS = 14
FOUR_HEADS = {"num_key_value_heads": 4}
SERVED: dict[str, dict[str, Any]] = {
    "mixtral": {},
    "qwen2_moe": {},
    "qwen3_moe": {},
    "olmoe": {},
    "granitemoe": {},
    "glm4_moe": {},
    "minimax_m2": {},
    "ernie4_5_moe": {},
    "deepseek_v2": FOUR_HEADS,  # keys and values of different widths, or their latents; a dense first layer
    "deepseek_v3": FOUR_HEADS | {"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4}},
    "gpt_oss": {},  # windows in every other layer; transposed, interleaved, clamped, biases
    "aria": {},  # transposed
    "gemma4": {},  # gelu; windows, and layers with heads of their own
    "exaone_moe": {},
}
REFUSED = {
    "jamba": "layers of the types",
    "nemotron_h": "layers of the types",
    "minimax": "layers of the types",
    "qwen3_next": "layers of the types",
    "deepseek_v4": "layers of the types",
    "llama4": "layers of the types chunked_attention",
    "ernie4_5_vl_moe": "calls the layers' experts in the order",
    "muse_spark": "norm",
    "qwen3_omni_moe": "its cache forgets what is 16 positions back, its masks do not",
}
SINCE = {"granitemoe": (5, 9), "aria": (5, 18), "muse_spark": (5, 18)}
"""The release of transformers that made a family's experts such that slots can hold them, or that brought the family."""
CALLS: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False},
    "sampling": {"do_sample": True, "top_k": 20, "num_return_sequences": 2},
    "beams": {"do_sample": False, "num_beams": 3},
}


def make(folder: str, path: Path, **changes: Any) -> Any:
    """A checkpoint of the family in ``path``; gives transformers' model of it."""
    if VERSION < SINCE.get(folder, VERSION):
        pytest.skip(f"transformers {transformers.__version__} has no {folder} whose experts slots can hold")
    with pytest.MonkeyPatch.context() as patch:
        if changes:
            patch.setitem(family_models.SPECIAL, folder, family_models.SPECIAL.get(folder, {}) | changes)
        family_models.make_model(FOLDERS[folder]).save_pretrained(path)
    return family_table.load_oracle(FOLDERS[folder], path)


def load(path: Path, device: str = "cpu", slots: int | None = None, **more: Any) -> Any:
    """Ours with the device engine; ``slots`` of its experts' size, or as many as there is memory for."""
    options = {"device": device, "expert_cache_backend": "slot", "expert_cache_engine": "device", **more}
    if slots is None:
        return AutoModel.from_pretrained(path, expert_cache_gb="auto", **options)
    with AutoModel.from_pretrained(path, expert_cache_gb="auto", device="cpu", expert_cache_backend="slot") as all_of_them:
        expert_bytes = all_of_them._runtime.pool.plan.expert_bytes
    return AutoModel.from_pretrained(path, expert_cache_gb=slots * expert_bytes / 2**30, **options)


@pytest.fixture(scope="module", params=slot_rig.DEVICES)
def place(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module", params=SERVED)
def pair(request: pytest.FixtureRequest, place: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Any, Any]]:
    """(ours, transformers' own) of one family, with slots for less than half of the experts."""
    path = tmp_path_factory.mktemp(request.param)
    oracle = make(request.param, path, **SERVED[request.param]).to(place)
    with load(path, place, slots=9) as model:
        model._runtime.pool.poison()
        yield model, oracle


@pytest.mark.parametrize("call", CALLS)
def test_decoded_tokens_are_steps_and_transformers_own(pair: tuple[Any, Any], place: str, call: str) -> None:
    model, oracle = pair
    before = model.get_expert_cache_stats()["device_engine_steps"]
    ours, theirs = (answer(each, place, CALLS[call]) for each in pair)
    stats = model.get_expert_cache_stats()
    assert (stats["engine"], stats["device_engine_reason"]) == ("device", "")
    assert stats["device_engine_steps"] >= before + TOKENS - 1
    assert stats["device_engine_captures"] >= (place != "cpu")
    assert torch.equal(ours.sequences, theirs.sequences)
    ours, theirs = (torch.stack(each.logits) for each in (ours, theirs))
    torch.testing.assert_close(ours, theirs, rtol=2e-5, atol=2e-5 * float(theirs.abs().max()))
    model._stepper.engine.leave()
    slot_rig.check(model._runtime)
    assert stats["misses"] > 0 and stats["evictions"] + stats["bypasses"] > 0


def answer(model: Any, place: str, call: dict[str, Any]) -> Any:
    """Two prompts, the shorter one padded on the left, longer with their answers than the windows of 16."""
    ids = torch.randint(3, family_models.VOCABULARY, (2, 9), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    ids[0, :4] = mask[0, :4] = 0
    torch.manual_seed(3)
    return model.generate(
        ids.to(place),
        attention_mask=mask.to(place),
        max_new_tokens=TOKENS,
        min_new_tokens=TOKENS,
        return_dict_in_generate=True,
        output_logits=True,
        **call,
    )


@pytest.mark.parametrize("folder", REFUSED)
def test_what_cannot_be_stepped_gets_the_plain_engine_and_the_reason(
    folder: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    oracle = make(folder, tmp_path)
    ids = torch.tensor([[5, 9, 11, 40, 7]])
    with load(tmp_path) as model:
        stats = model.get_expert_cache_stats()
        assert stats["engine"] == "plain" and REFUSED[folder] in stats["device_engine_reason"]
        assert stats["device_engine_reason"] in caplog.text
        call = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 4, "do_sample": False}
        assert torch.equal(model.generate(ids, **call), oracle.generate(ids, **call))


def _reads_back(module: Any, args: Any, output: Any) -> None:
    bool((output[0] if isinstance(output, tuple) else output).sum() > 0)


def _sees_less(module: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    return args, kwargs | {"attention_mask": None}


def _reckons_otherwise(module: Any, args: Any, output: Any) -> Any:
    return output + 1 if output.shape[1] == 1 else output


def _asks_twice(module: Any, args: Any, output: Any) -> None:
    experts, rows = next(each for each in module.modules() if isinstance(each, SlotExperts)), args[0][0]
    experts(rows, torch.zeros(len(rows), 1, dtype=torch.int64), torch.ones(len(rows), 1))


def _remembers(module: Any, args: Any, output: Any) -> None:
    module.last = output


PLANTED = {
    "keeps something of its own for the next one (model.layers.0.last)": lambda layer: layer.register_forward_hook(_remembers),
    "reads back from the device (aten._local_scalar_dense": lambda layer: layer.register_forward_hook(_reads_back),
    "does not look through the mask": lambda layer: layer.self_attn.register_forward_pre_hook(_sees_less, with_kwargs=True),
    "logits differ from the forward's": lambda layer: layer.mlp.register_forward_hook(_reckons_otherwise),
    "in the order [0, 0, 1": lambda layer: layer.mlp.register_forward_hook(_asks_twice),
}


@pytest.mark.parametrize("why", PLANTED)
def test_a_forward_that_cannot_be_a_step_is_found_by_trying(why: str, tmp_path: Path) -> None:

    make("olmoe", tmp_path)
    with load(tmp_path) as model:
        assert model._stepper is not None
        inner = model.model.model.layers[0]
        hook = PLANTED[why](inner)
        plan, reason = step_plan.plan_steps(model.model, model._runtime, stock=True)
        hook.remove()
    assert plan is None and why in reason


def test_positions_of_three_dimensions_go_the_plain_way(tmp_path: Path) -> None:
    oracle = make("qwen3_vl_moe", tmp_path)
    with load(tmp_path) as model:
        assert torch.equal(*(answer(each, "cpu", CALLS["greedy"]).sequences for each in (model, oracle)))
        stats = model.get_expert_cache_stats()
        assert (stats["device_engine_steps"], stats["device_engine_reason"]) == (0, "position_ids of 3 dimensions")


@pytest.mark.parametrize(
    ("folder", "windows"),
    [("gpt_oss", [16, None, 16, None]), ("gemma4", [16, 16, 16, None]), ("mixtral", [16] * 4), ("olmoe", [None] * 4)],
)
def test_how_far_layers_look_back_is_read_off_their_masks(folder: str, windows: list[int | None], tmp_path: Path) -> None:
    make(folder, tmp_path)
    with load(tmp_path) as model:
        assert [layer.window for layer in model._stepper._plan.layers] == windows


def test_a_model_of_half_precision_is_served(tmp_path: Path) -> None:
    make("qwen3_moe", tmp_path)
    with load(tmp_path, dtype="bfloat16") as model:
        ids = torch.tensor([[5, 9, 11, 40, 7]])
        model.generate(ids, max_new_tokens=5, min_new_tokens=5, do_sample=False, pad_token_id=0)
        assert model.get_expert_cache_stats()["device_engine_steps"] == 4


def test_a_hook_put_in_later_runs_on_every_token(tmp_path: Path) -> None:
    make("qwen3_moe", tmp_path)
    ids, seen = torch.tensor([[5, 9, 11, 40, 7]]), []
    with load(tmp_path) as model:
        call = {"max_new_tokens": 5, "min_new_tokens": 5, "do_sample": False, "pad_token_id": 0}
        expected = model.generate(ids, **call)
        hook = model.model.model.layers[1].mlp.register_forward_hook(lambda *_: seen.append(1))
        assert torch.equal(model.generate(ids, **call), expected)
        assert len(seen) == 5 and "hooks" in model.get_expert_cache_stats()["device_engine_reason"]
        hook.remove()
        model.generate(ids, **call)
        assert model.get_expert_cache_stats()["device_engine_reason"] == ""
