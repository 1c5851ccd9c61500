"""PhiMoE on slots is transformers' PhiMoE, bit for bit: every budget, prompt length, way to generate and kind of checkpoint."""

from __future__ import annotations

import gc
import logging
import os
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import expert_files
import families
import pytest
import slot_models
import torch
from host_pages import process_bytes, resident_bytes
from safetensors.torch import load_file
from slot_models import EXPERTS, LAYERS, Pair, check, gib, load, padded, runtime
from slot_rig import DEVICES, gpu

import airllm
from airllm import airllm_phimoe, dense_weights
from airllm.airllm_phimoe import AirLLMPhiMoE
from airllm.errors import (
    AirLLMError,
    BudgetError,
    CheckpointError,
    DeviceError,
    HostMemoryError,
    NonFiniteError,
    OptionError,
    UnsupportedModelError,
)
from airllm.experts import assembly, host_memory

LENGTHS = (1, 2, 63, 64, 65, 200)  # the window is 64 tokens
CONTRACT = set(
    "enabled backend capacity_bytes allocated_cache_bytes resident_bytes resident_experts slot_count scratch_slots "
    "scratch_bytes allocated_device_bytes dense_resident_bytes host_bank_bytes host_bank_experts host_bank_load_seconds "
    "host_bank_tensor_reads pinned_staging_bytes generation_disk_expert_reads hits misses evictions bypasses "
    "prefill_skips oom_retries h2d_copies h2d_bytes".split()
)
REASONS = set(
    "host_bank_pinned host_bank_pin_reason budget_reason engine device_engine_reason decode_graphs decode_graphs_reason "
    "recoveries cache_policy cache_policy_reason dense_streamed_bytes dense_ring_bytes".split()
)
"""What the statistics hold beyond the contract: the reasons of automatic choices."""


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(autouse=True)
def hostile() -> Iterator[None]:
    with slot_models.late_transfers():
        yield


@pytest.fixture
def dtype(device: str) -> torch.dtype:
    return torch.float32 if device == "cpu" else torch.float16


@pytest.fixture
def pair(checkpoint: Callable[..., Path], device: str, dtype: torch.dtype) -> Iterator[Pair]:
    """Five slots for a model whose token needs six experts."""
    pair = Pair(checkpoint("phimoe", dtype=dtype), 5, device, dtype)
    yield pair
    check(pair.ours)
    pair.ours.close()


# --- the same bits ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def answers(checkpoint: Callable[..., Path]) -> Callable[..., dict[int, tuple[torch.Tensor, torch.Tensor, torch.Tensor]]]:
    """length -> (ids, the oracle's logits, its next six greedy tokens); asked once a session."""
    made: dict[Any, Any] = {}

    def of(dtype: torch.dtype, device: str) -> dict[int, tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        if (dtype, device) not in made:
            oracle = slot_models.oracle(checkpoint("phimoe", dtype=dtype), device=device)
            made[dtype, device] = {}
            for length in LENGTHS:
                ids = families.prompt(oracle, length, seed=length).to(device)
                with torch.no_grad():
                    made[dtype, device][length] = ids, oracle(ids).logits, families.greedy(oracle, ids, 6)
        return made[dtype, device]

    return of


@pytest.mark.parametrize("slots", [2, 3, 5, 8, 24])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, pytest.param(torch.float16, marks=pytest.mark.gpu)], ids=str)
def test_every_length_and_budget_gives_the_oracles_logits_and_tokens(
    slots: int, dtype: torch.dtype, device: str, checkpoint: Callable[..., Path], answers: Callable[..., Any]
) -> None:
    if dtype == torch.float16 and device == "cpu":
        pytest.skip("half precision on the CPU is bfloat16 here")
    model = load(checkpoint("phimoe", dtype=dtype), slots, device=device, dtype=dtype)
    assert model.get_expert_cache_stats()["slot_count"] == slots
    for _, (ids, logits, tokens) in sorted(answers(dtype, device).items(), key=lambda item: item[0] % 7):
        assert torch.equal(model(ids).logits, logits)
        assert torch.equal(families.greedy(model, ids, 6), tokens)
        check(model)
    model.close()


@pytest.mark.parametrize("use_cache", [True, False])
def test_tokens_past_the_window_are_right_with_and_without_a_cache(use_cache: bool, pair: Pair) -> None:
    ours, oracle = pair.generate(families.prompt(pair.oracle, 61), n=10, use_cache=use_cache)
    assert torch.equal(ours, oracle)


@pytest.mark.parametrize(
    "keywords",
    [
        {"do_sample": True, "temperature": 0.8, "top_k": 20},
        {"do_sample": True, "num_return_sequences": 2},
        {"num_beams": 3},
        {"num_beams": 2, "do_sample": True},
        {"cache_implementation": "static", "disable_compile": True},
        {"repetition_penalty": 1.3, "no_repeat_ngram_size": 2},
        {"prompt_lookup_num_tokens": 3},
    ],
    ids=lambda keywords: "-".join(keywords),
)
def test_every_way_to_generate_gives_the_oracles_tokens(keywords: dict[str, Any], pair: Pair) -> None:
    if "prompt_lookup_num_tokens" in keywords:
        ids, mask = families.prompt(pair.oracle, 6).repeat(1, 3), None
    else:
        ids, mask = padded((9, 7, 4))
    ours, oracle = pair.generate(ids, mask, **keywords)
    assert torch.equal(ours, oracle)


def test_a_left_padded_batch_is_the_oracles_and_each_row_is_its_own_run(pair: Pair) -> None:
    ids, mask = padded((3, 7, 20, 60))
    ours, oracle = pair.generate(ids, mask, n=6)
    assert torch.equal(ours, oracle)
    for row in range(4):
        own = ids[row : row + 1, mask[row].bool()]
        alone = families.greedy(pair.ours, own.to(pair.device), 6)
        assert torch.equal(ours[row, ids.shape[1] :], alone[0])


def test_a_missing_pad_token_is_no_crash(checkpoint: Callable[..., Path]) -> None:
    pair = Pair(checkpoint("phimoe", pad_token_id=None), 5, "cpu", torch.float32)
    ids, mask = padded((9, 4))
    ours, oracle = pair.generate(ids, mask)
    assert torch.equal(ours, oracle)


def test_an_assistant_plain_or_on_slots_changes_nothing(
    pair: Pair, checkpoint: Callable[..., Path], dtype: torch.dtype
) -> None:
    small = checkpoint("phimoe", dtype=dtype, num_hidden_layers=1, seed=3)
    ids = families.prompt(pair.oracle, 9)
    on_slots = load(small, 3, device=pair.device, dtype=dtype)

    def ask(model: Any, assistant: Any) -> torch.Tensor:
        return model.generate(
            ids.to(pair.device), max_new_tokens=8, min_new_tokens=8, do_sample=False, assistant_model=assistant
        )

    # A new assistant for each: generate leaves its latest number of guesses on it.
    expected = ask(pair.oracle, slot_models.oracle(small, device=pair.device))
    for assistant in (slot_models.oracle(small, device=pair.device), on_slots):
        assert torch.equal(ask(pair.ours, assistant), expected)
    with load(small, 3, device=pair.device, dtype=dtype) as of_transformers:
        assert torch.equal(ask(pair.oracle, of_transformers), expected)
        check(of_transformers)
    check(on_slots)


def test_a_streamer_sees_the_oracles_tokens(pair: Pair) -> None:
    class Collect:
        def __init__(self) -> None:
            self.seen: list[int] = []

        def put(self, value: torch.Tensor) -> None:
            self.seen += value.flatten().tolist()

        def end(self) -> None:
            self.seen.append(-1)

    ours, oracle = Collect(), Collect()
    ids = families.prompt(pair.oracle, 6)
    pair.ours.generate(ids, max_new_tokens=6, streamer=ours)
    pair.oracle.generate(ids.to(pair.device), max_new_tokens=6, streamer=oracle)
    assert ours.seen == oracle.seen and ours.seen[-1] == -1


def test_router_logits_hidden_states_and_scores_are_the_oracles(pair: Pair) -> None:
    ids, mask = padded((9, 4))
    ours, oracle = pair.generate(ids, mask, output_hidden_states=True, output_scores=True, return_dict_in_generate=True)
    assert torch.equal(ours.sequences, oracle.sequences)
    for one, other in zip(ours.hidden_states, oracle.hidden_states, strict=True):
        assert len(one) == LAYERS + 1 and all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(ours.scores, oracle.scores, strict=True))
    for length in (1, 9):
        whole = [model(ids[:1, :length].to(pair.device), output_router_logits=True) for model in (pair.ours, pair.oracle)]
        assert len(whole[0].router_logits) == LAYERS
        assert all(torch.equal(a, b) for a, b in zip(whole[0].router_logits, whole[1].router_logits, strict=True))
        assert torch.equal(whole[0].aux_loss, whole[1].aux_loss)


def test_router_logits_of_each_decoded_token_are_kept_apart(pair: Pair) -> None:
    kept = []
    for model in (pair.ours, pair.oracle):
        out, steps = None, []
        for token in (5, 6, 7):
            with torch.no_grad():
                out = model(
                    torch.tensor([[token]], device=pair.device),
                    past_key_values=None if out is None else out.past_key_values,
                    output_router_logits=True,
                    use_cache=True,
                )
            steps.append(out.router_logits)
        kept.append(steps)
    assert all(torch.equal(a, b) for x, y in zip(*kept, strict=True) for a, b in zip(x, y, strict=True))


def test_embeddings_in_place_of_ids(pair: Pair) -> None:
    ids = families.prompt(pair.oracle, 12).to(pair.device)
    with torch.no_grad():
        embeds = pair.oracle.get_input_embeddings()(ids)
    answers = [
        model.generate(inputs_embeds=embeds, max_new_tokens=6, min_new_tokens=6, do_sample=False)
        for model in (pair.ours, pair.oracle)
    ]
    assert torch.equal(*answers)


def test_a_cache_carried_from_call_to_call_by_hand_is_right(pair: Pair) -> None:
    ids = families.prompt(pair.oracle, 30).to(pair.device)
    ends = []
    for model in (pair.ours, pair.oracle):
        with torch.no_grad():
            out = model(ids[:, :20], use_cache=True)
            for end in (21, 24, 30):
                start = out.past_key_values.get_seq_length()
                out = model(ids[:, start:end], past_key_values=out.past_key_values, use_cache=True)
        ends.append(out.logits)
    assert torch.equal(*ends)


def test_a_loss_is_the_oracles(pair: Pair) -> None:
    ids = families.prompt(pair.oracle, 12).to(pair.device)
    with torch.no_grad():
        assert torch.equal(pair.ours(ids, labels=ids).loss, pair.oracle(ids, labels=ids).loss)


def test_two_models_in_one_process_do_not_meet(pair: Pair, checkpoint: Callable[..., Path], dtype: torch.dtype) -> None:
    other = Pair(checkpoint("phimoe", dtype=dtype, seed=4), 3, pair.device, dtype)
    ids = families.prompt(pair.oracle, 12)
    for _ in range(2):
        for each in (pair, other):
            ours, oracle = each.generate(ids, n=4)
            assert torch.equal(ours, oracle)
    other.ours.close()
    ours, oracle = pair.generate(ids, n=4)
    assert torch.equal(ours, oracle)


def test_the_streaming_way_and_the_slots_agree(checkpoint: Callable[..., Path]) -> None:
    folder = checkpoint("phimoe")
    streamed, on_slots = AirLLMPhiMoE(folder, device="cpu", experts_implementation="eager"), load(folder, 4)
    ids = families.prompt(on_slots, 30)
    assert torch.equal(streamed(ids).logits, on_slots(ids).logits)
    assert torch.equal(families.greedy(streamed, ids, 4), families.greedy(on_slots, ids, 4))
    assert not any(parameter.is_meta for parameter in on_slots.model.parameters())


# --- checkpoints ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("architecture", ["PhiMoEForCausalLM", "PhimoeForCausalLM"])
@pytest.mark.parametrize("trust", [False, True])
def test_every_spelling_is_served_and_the_checkpoints_code_is_never_run(
    architecture: str, trust: bool, checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    source = checkpoint("phimoe")
    folder = expert_files.with_remote_code(source, tmp_path / "model", architecture)
    assert airllm.AutoModel.get_module_class(folder, device="cpu", trust_remote_code=trust) == ("airllm", "AirLLMPhiMoE")
    model = airllm.AutoModel.from_pretrained(
        folder, device="cpu", trust_remote_code=trust, expert_cache_backend="Slot", expert_cache_gb=gib(4)
    )
    assert type(model) is AirLLMPhiMoE
    ids = torch.tensor([[5, 6, 7]])
    with torch.no_grad():
        assert torch.equal(model(ids).logits, slot_models.oracle(source)(ids).logits)


@pytest.mark.parametrize("kind", ["sharded", "stacked", "bin", "tied", "tied and sharded"])
def test_every_kind_of_checkpoint_gives_the_oracles_bits(
    kind: str, checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    tied = True if "tied" in kind else None
    source = checkpoint("phimoe", dtype=torch.bfloat16, shards=4 if "sharded" in kind else 1, tied=tied)
    folder = source
    if kind == "stacked":
        folder = expert_files.stacked(source, tmp_path / "model")
    if kind == "bin":
        folder = expert_files.as_bin(source, tmp_path / "model")
    model, oracle = load(folder, 5, dtype=torch.bfloat16), slot_models.oracle(source)
    assert model.dtype == torch.bfloat16
    ids = families.prompt(oracle, 20)
    with torch.no_grad():
        assert torch.equal(model(ids).logits, oracle(ids).logits)
    assert torch.equal(families.greedy(model, ids, 6), families.greedy(oracle, ids, 6))
    if tied:
        assert model.model.lm_head.weight is model.model.get_input_embeddings().weight


def test_nothing_is_written_into_the_checkpoints_folder(checkpoint: Callable[..., Path]) -> None:
    folder = checkpoint("phimoe")

    def listing() -> list[tuple[str, int, int]]:
        return sorted((path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in folder.rglob("*"))

    before = listing()
    families.greedy(load(folder, 3), torch.tensor([[5, 6, 7]]), 3)
    assert listing() == before


def test_a_dtype_asked_for_is_computed_in(checkpoint: Callable[..., Path]) -> None:
    folder = checkpoint("phimoe", dtype=torch.bfloat16)
    oracle = slot_models.oracle(folder, torch.float32)
    model = AirLLMPhiMoE(folder, device="cpu", dtype="float32", expert_cache_backend="slot", expert_cache_gb=gib(5))
    assert model.get_expert_cache_stats()["slot_count"] == 5
    ids = families.prompt(oracle, 20)
    with torch.no_grad():
        assert torch.equal(model(ids).logits, oracle(ids).logits)


def test_a_quantised_checkpoint_is_refused_by_name(checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    quantised = {"quant_method": "awq", "bits": 4}
    folder = expert_files.with_config(checkpoint("phimoe"), tmp_path / "model", quantization_config=quantised)
    with pytest.raises(UnsupportedModelError, match="awq"):
        load(folder, 4)


@pytest.mark.parametrize("damage", ["cut by one byte", "cut in half", "empty", "a web page"])
def test_a_damaged_file_is_refused_before_any_memory_is_taken(
    damage: str, checkpoint: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = expert_files.with_config(checkpoint("phimoe", dtype=torch.float16, shards=3), tmp_path / "model")
    shard = sorted(folder.glob("*.safetensors"))[1]
    content = shard.read_bytes()
    whole = {"cut by one byte": content[:-1], "cut in half": content[: len(content) // 2], "empty": b""}
    shard.write_bytes(whole.get(damage, b"<!DOCTYPE html><html>not here</html>"))
    for name in ("SlotPool", "HostBank"):
        monkeypatch.setattr(assembly, name, None)
    monkeypatch.setattr(dense_weights, "load_resident", None)
    with pytest.raises(CheckpointError, match=shard.name):
        load(folder, 4)


def test_numbers_that_overflow_are_an_error_that_names_the_layer(checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    def overflow(tensors: dict[str, torch.Tensor]) -> None:
        for name in tensors:
            if "layers.1.block_sparse_moe.experts" in name:
                tensors[name] = (tensors[name].float() * 3e4).clamp(-6e4, 6e4).half()

    folder = expert_files.edited(checkpoint("phimoe", dtype=torch.float16), tmp_path / "model", overflow)
    model = load(folder, 4, dtype=torch.float16)
    with pytest.raises(NonFiniteError, match=r"layers\.1.*bfloat16"):
        families.greedy(model, torch.tensor([[5, 6, 7, 8]]), 2)
    check(model)


# --- budgets ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("experts", "slots", "scratch"), [(2, 2, 2), (2.9, 2, 2), (3, 3, 2), (24, 24, 0), (500, 24, 0)])
def test_a_budget_that_holds_one_tokens_experts_works(
    experts: float, slots: int, scratch: int, checkpoint: Callable[..., Path], answers: Callable[..., Any]
) -> None:
    model = load(checkpoint("phimoe"), experts)
    stats = model.get_expert_cache_stats()
    assert (stats["slot_count"], stats["scratch_slots"]) == (slots, scratch)
    ids, logits, _ = answers(torch.float32, "cpu")[65]
    assert torch.equal(model(ids).logits, logits)


def test_a_budget_below_it_is_an_error_with_the_numbers_before_any_weight_is_read(
    checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dense_weights, "load_resident", None)
    monkeypatch.setattr(assembly, "HostBank", None)
    with pytest.raises(BudgetError, match=r"196608 B for 2 experts.*got 98304 B.*at least") as caught:
        load(checkpoint("phimoe"), 1)
    assert isinstance(caught.value, ValueError)
    suggested = float(str(caught.value).rpartition("at least ")[2])
    monkeypatch.undo()
    model = AirLLMPhiMoE(checkpoint("phimoe"), device="cpu", expert_cache_backend="slot", expert_cache_gb=suggested)
    assert model.get_expert_cache_stats()["slot_count"] >= 2


@pytest.mark.parametrize("keywords", [{}, {"expert_cache_gb": "auto"}])
def test_auto_is_what_leaving_the_budget_out_means(
    keywords: dict[str, Any], checkpoint: Callable[..., Path], answers: Callable[..., Any]
) -> None:
    model = AirLLMPhiMoE(checkpoint("phimoe"), device="cpu", expert_cache_backend="slot", **keywords)
    stats = model.get_expert_cache_stats()
    assert stats["slot_count"] == 24 and "auto" in stats["budget_reason"]
    ids, logits, _ = answers(torch.float32, "cpu")[64]
    assert torch.equal(model(ids).logits, logits)


def test_a_host_too_small_for_the_bank_is_an_error_with_the_numbers(
    checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_memory, "available_bytes", lambda: 2 * 2**20)
    monkeypatch.setattr(host_memory, "HostBlock", None)
    with pytest.raises(HostMemoryError, match=f"{24 * 98304} B.*{2 * 2**20} B of host memory"):
        load(checkpoint("phimoe"), 4)


# --- statistics -------------------------------------------------------------------------------------------------------


def test_the_statistics_have_the_contracts_names_and_measured_values(pair: Pair, dtype: torch.dtype) -> None:
    stats = pair.ours.get_expert_cache_stats()
    assert CONTRACT <= set(stats) <= CONTRACT | REASONS
    size = 3 * 64 * 128 * dtype.itemsize
    assert (stats["enabled"], stats["backend"]) == (True, "slot")
    assert stats["capacity_bytes"] == stats["allocated_cache_bytes"] == 5 * size
    assert (stats["scratch_slots"], stats["scratch_bytes"]) == (2, 2 * size)
    assert (stats["host_bank_experts"], stats["host_bank_bytes"]) == (24, 24 * size)
    assert stats["host_bank_tensor_reads"] == 48 and stats["host_bank_load_seconds"] > 0
    dense = sum(p.nbytes for p in pair.oracle.parameters()) - 24 * size
    assert stats["dense_resident_bytes"] == dense
    assert stats["allocated_device_bytes"] == dense + 7 * size
    assert stats["pinned_staging_bytes"] == 0
    counters = ("hits", "misses", "evictions", "bypasses", "prefill_skips", "oom_retries", "h2d_copies", "h2d_bytes")
    assert not any(stats[name] for name in (*counters, "resident_bytes", "resident_experts", "generation_disk_expert_reads"))
    pair.generate(families.prompt(pair.oracle, 20), n=6)
    stats = pair.ours.get_expert_cache_stats()
    assert stats["misses"] == stats["h2d_copies"] and stats["h2d_bytes"] == size * stats["h2d_copies"]
    assert stats["hits"] > 0 and stats["evictions"] > 0 and stats["bypasses"] >= stats["prefill_skips"] > 0
    assert stats["resident_bytes"] == size * stats["resident_experts"] == 5 * size


def test_every_name_is_there_without_slots_too(checkpoint: Callable[..., Path]) -> None:
    model = AirLLMPhiMoE(checkpoint("phimoe"), device="cpu")
    stats = model.get_expert_cache_stats()
    assert CONTRACT <= set(stats) <= CONTRACT | REASONS
    assert stats.pop("enabled") is False and stats.pop("backend") == "none"
    assert set(stats.values()) == {None}, "what is not measured is not known"
    model.reset_expert_cache_stats()
    model.clear_expert_cache()


def test_resetting_keeps_what_is_resident_and_clearing_keeps_the_counters(pair: Pair) -> None:
    ids = families.prompt(pair.oracle, 9)
    pair.generate(ids, n=3)
    pair.ours.reset_expert_cache_stats()
    stats = pair.ours.get_expert_cache_stats()
    assert stats["resident_experts"] == 5 and not stats["misses"] and not stats["hits"] and not stats["h2d_bytes"]
    pair.generate(ids, n=3)
    missed = pair.ours.get_expert_cache_stats()["misses"]
    pair.ours.clear_expert_cache()
    runtime(pair.ours).pool.poison()
    stats = pair.ours.get_expert_cache_stats()
    assert (stats["resident_experts"], stats["misses"]) == (0, missed) and missed > 0
    ours, oracle = pair.generate(ids, n=3)
    assert torch.equal(ours, oracle)


def test_no_expert_is_read_from_disk_while_generating_and_the_counter_is_alive(pair: Pair) -> None:
    read = pair.ours._reader.bytes_read
    for length in (1, 70):
        pair.generate(families.prompt(pair.oracle, length), n=5)
    assert pair.ours._reader.bytes_read == read
    assert pair.ours.get_expert_cache_stats()["generation_disk_expert_reads"] == 0
    bank = runtime(pair.ours).bank
    bank.read_expert(13, bank.layout.layers[0].views(torch.empty(bank.layout.expert_bytes, dtype=torch.uint8)))
    assert pair.ours.get_expert_cache_stats()["generation_disk_expert_reads"] == 2
    assert pair.ours._reader.bytes_read > read


class Routed:
    """Notes the experts that each layer's router picks, forward by forward."""

    def __init__(self, model: AirLLMPhiMoE) -> None:
        self.picked: list[torch.Tensor] = []
        for layer in model.model.model.layers:
            layer.mlp.router.register_forward_hook(lambda _m, _a, out: self.picked.append(out[2].cpu().clone()))

    def take(self) -> list[torch.Tensor]:
        picked, self.picked = self.picked, []
        return picked


def test_a_prompt_copies_each_expert_it_needs_once_a_layer(pair: Pair) -> None:
    routed = Routed(pair.ours)
    for length in (200, 30):
        pair.ours.clear_expert_cache()
        pair.ours.reset_expert_cache_stats()
        pair.ours(families.prompt(pair.oracle, length))
        needed = sum(len(index.unique()) for index in routed.take())
        assert pair.ours.get_expert_cache_stats()["h2d_copies"] == needed


def test_the_first_decoded_token_hits_what_the_prompt_left_behind(checkpoint: Callable[..., Path]) -> None:
    model = load(checkpoint("phimoe"), 4 * LAYERS)
    routed = Routed(model)
    hits = expected = 0
    for seed in range(6):
        ids = families.prompt(model, 50, seed=seed)
        out = model(ids, use_cache=True)
        last = [set(index[-1].tolist()) for index in routed.take()]
        model.reset_expert_cache_stats()
        model(out.logits[:, -1:].argmax(-1), past_key_values=out.past_key_values, use_cache=True)
        picked = [set(index[-1].tolist()) for index in routed.take()]
        expected += sum(len(a & b) for a, b in zip(last, picked, strict=True))
        hits += model.get_expert_cache_stats()["hits"]
    assert hits >= expected > 0


def test_a_prompt_does_not_wipe_what_decoding_needs(checkpoint: Callable[..., Path]) -> None:
    model = load(checkpoint("phimoe"), 20)
    families.greedy(model, torch.tensor([[5, 6, 7]]), 12)
    before = list(runtime(model).policy.residents())
    model(families.prompt(model, 60))
    kept = set(before) & set(runtime(model).policy.residents())
    assert len(kept) >= len(before) - 2 * LAYERS, "only what the last token needs may push others out"


@pytest.mark.parametrize("policy", ["aged", "lru"])
def test_decoding_a_batch_of_two_caches(checkpoint: Callable[..., Path], policy: str) -> None:
    model = load(checkpoint("phimoe"), 16, expert_cache_policy=policy)
    ids = families.prompt(model, 5, 2)
    families.greedy(model, ids, 1)
    model.reset_expert_cache_stats()
    families.greedy(model, ids, 12)
    stats = model.get_expert_cache_stats()
    assert stats["hits"] > stats["misses"]
    assert policy == "aged" or stats["bypasses"] == 0


def test_with_every_expert_in_a_slot_each_is_copied_once(checkpoint: Callable[..., Path]) -> None:
    model = load(checkpoint("phimoe"), 24)
    for length in (60, 3, 60):
        families.greedy(model, families.prompt(model, length), 6)
    stats = model.get_expert_cache_stats()
    assert stats["h2d_copies"] == stats["resident_experts"] <= 24 and stats["evictions"] == stats["bypasses"] == 0


def test_refused_pinning_is_said_once_and_in_the_statistics(
    checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(self: host_memory.HostBlock, device: torch.device | None = None) -> bool:
        self.pin_reason = "the driver says no"
        return False

    monkeypatch.setattr(host_memory.HostBlock, "pin", refuse)
    original = assembly.HostBank
    monkeypatch.setattr(assembly, "HostBank", lambda *args, pin, **more: original(*args, pin=True, **more))
    with caplog.at_level(logging.WARNING, "airllm.experts"):
        model = load(checkpoint("phimoe"), 4)
        families.greedy(model, torch.tensor([[5, 6, 7]]), 3)
    assert [record.name for record in caplog.records if "pageable" in record.message] == ["airllm.experts.bank"]
    stats = model.get_expert_cache_stats()
    assert stats["host_bank_pinned"] is False and stats["host_bank_pin_reason"] == "the driver says no"


# --- the interface ----------------------------------------------------------------------------------------------------


def test_slots_on_the_cpu_say_so(checkpoint: Callable[..., Path], caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "airllm"):
        load(checkpoint("phimoe"), 4)
    assert "slot backend on the CPU" in caplog.text


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_without_a_gpu_slots_need_an_explicit_cpu(checkpoint: Callable[..., Path]) -> None:
    for device in ({}, {"device": "cuda:1"}, {"device": 1}, {"device": torch.device("cuda")}):
        with pytest.raises(DeviceError, match="device='cpu'|cuda"):
            AirLLMPhiMoE(checkpoint("phimoe"), expert_cache_backend="slot", **device)


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({"expert_cache_bg": 1}, "expert_cache_gb"),
        ({"expert_cache_backend": "slots"}, "'slot'"),
        ({"expert_cache_gb": 1}, "expert_cache_backend='slot'"),
        ({"expert_cache_backend": "slot", "expert_cache_gb": 0}, "0 bytes"),
        ({"expert_cache_backend": "slot", "expert_cache_gb": float("nan")}, "finite"),
        ({"expert_cache_backend": "slot", "compression": "4bit"}, "compression"),
        ({"expert_cache_backend": "slot", "device_map": "auto"}, "places every weight itself"),
    ],
)
def test_wrong_keywords_are_refused_before_the_checkpoint_is_touched(keywords: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        AirLLMPhiMoE("/there/is/no/such/folder", device="cpu", **keywords)


def test_a_dense_model_is_refused_by_name(checkpoint: Callable[..., Path]) -> None:
    with pytest.raises(UnsupportedModelError, match="llama.*dense"):
        airllm.AutoModel.from_pretrained(checkpoint("llama"), device="cpu", expert_cache_backend="slot")


def test_moving_or_casting_is_refused_and_staying_is_not(pair: Pair) -> None:
    for each in (pair.ours, pair.ours.model):
        with pytest.raises(UnsupportedModelError, match="load it again"):
            each.double()
        assert each.to(pair.device) is each
    with pytest.raises(UnsupportedModelError):
        pair.ours.train()
    with pytest.raises(UnsupportedModelError):
        pair.ours.save_pretrained("anywhere")
    with pytest.raises(UnsupportedModelError, match="get_expert_cache_stats"):
        pair.ours.get_stream_stats()


def test_a_missing_tokenizer_leaves_the_model_usable(checkpoint: Callable[..., Path]) -> None:
    model = load(checkpoint("phimoe"), 4)
    assert model.tokenizer is None and model.generation_config is model.model.generation_config
    assert model.layer_names_dict["layer_prefix"] == "model.layers"


# --- giving back ------------------------------------------------------------------------------------------------------


def test_after_closing_a_call_raises_and_nothing_is_held(checkpoint: Callable[..., Path]) -> None:
    with load(checkpoint("phimoe"), 4) as model:
        families.greedy(model, torch.tensor([[5, 6, 7]]), 2)
        used, block = runtime(model), weakref.ref(runtime(model).bank._memory)
        last = model.get_expert_cache_stats()
    assert used.pool.nbytes == 0 and block()._map is None
    assert model.get_expert_cache_stats() == last and last["misses"] > 0
    for call in (lambda: model(torch.tensor([[5]])), lambda: model.generate(torch.tensor([[5]]), max_new_tokens=1)):
        with pytest.raises(AirLLMError, match="closed"):
            call()
    model.close()
    assert all(tensor.is_meta for tensor in (*model.model.parameters(), *model.model.buffers()))


@pytest.mark.parametrize("how", ["close", "drop"])
def test_host_memory_of_the_bank_comes_back(how: str, checkpoint: Callable[..., Path]) -> None:
    folder = checkpoint("phimoe", dtype=torch.bfloat16, intermediate_size=4096)
    load(folder, 2000, dtype=torch.bfloat16).close()  # whatever is loaded once and stays
    gc.collect()
    gc.disable()
    try:
        before = process_bytes()
        model = load(folder, 64, dtype=torch.bfloat16)
        place = runtime(model).bank.memory.data_ptr(), runtime(model).bank.nbytes
        assert resident_bytes(*place) == place[1]
        if how == "close":
            model.close()
        else:
            del model
        assert resident_bytes(*place) < 0.1 * place[1], "and without waiting for the garbage collector"
        assert process_bytes() - before < 0.35 * place[1]
    finally:
        gc.enable()


def test_many_generates_leave_threads_and_files_as_they_were(checkpoint: Callable[..., Path]) -> None:
    model = load(checkpoint("phimoe"), 4)

    def state() -> tuple[int, int]:
        return threading.active_count(), len(os.listdir("/proc/self/fd"))

    families.greedy(model, torch.tensor([[5, 6, 7]]), 2)
    before = state()
    for n in range(25):
        families.greedy(model, families.prompt(model, 1 + n * 7 % 40, seed=n), 1 + n % 3)
    assert state() == before
    assert len(load_file(checkpoint("phimoe") / "model.safetensors")) > 0


# --- on a GPU ---------------------------------------------------------------------------------------------------------


@gpu
def test_with_and_without_decode_graphs_the_bits_are_the_same(
    checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = checkpoint("phimoe", dtype=torch.float16)
    graphs = load(folder, 5, device="cuda:0", dtype=torch.float16)
    assert graphs.get_expert_cache_stats()["decode_graphs"] is True
    monkeypatch.setattr(airllm_phimoe, "record_decode", lambda *_: ("switched off by the test", lambda: None))
    plain = load(folder, 5, device="cuda:0", dtype=torch.float16)
    assert plain.get_expert_cache_stats()["decode_graphs"] is False
    oracle = slot_models.oracle(folder, device="cuda:0")
    ids = families.prompt(oracle, 9).to("cuda:0")
    outputs = [
        model.generate(
            ids, max_new_tokens=64, min_new_tokens=64, do_sample=False, output_logits=True, return_dict_in_generate=True
        )
        for model in (graphs, plain, oracle)
    ]
    for other in outputs[1:]:
        assert torch.equal(outputs[0].sequences, other.sequences)
        assert all(torch.equal(a, b) for a, b in zip(outputs[0].logits, other.logits, strict=True))


@gpu
def test_64_decoded_tokens_take_no_new_memory_from_the_device(checkpoint: Callable[..., Path]) -> None:
    model = load(checkpoint("phimoe", dtype=torch.float16), 5, device="cuda:0", dtype=torch.float16)
    ids = families.prompt(model, 9).to("cuda:0")
    families.greedy(model, ids, 64)
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()["segment.all.allocated"]
    families.greedy(model, ids, 64)
    torch.cuda.synchronize()
    assert torch.cuda.memory_stats()["segment.all.allocated"] == before


@gpu
def test_a_pinned_and_a_pageable_bank_give_the_same_tokens(checkpoint: Callable[..., Path]) -> None:
    folder = checkpoint("phimoe", dtype=torch.float16)
    pinned = load(folder, 3, device="cuda:0", dtype=torch.float16)
    pageable = load(folder, 3, device="cuda:0", dtype=torch.float16, pin_memory=False)
    stats = pinned.get_expert_cache_stats()
    assert stats["host_bank_pinned"] is True, stats["host_bank_pin_reason"]
    assert runtime(pinned).bank.block(3).is_pinned()
    stats = pageable.get_expert_cache_stats()
    assert stats["host_bank_pinned"] is False and stats["host_bank_pin_reason"] == "not asked for"
    for length in (1, 70):
        ids = families.prompt(pinned, length)
        assert torch.equal(families.greedy(pinned, ids, 8), families.greedy(pageable, ids, 8))


@gpu
def test_a_prompt_too_long_for_the_device_is_an_ordinary_error_and_a_short_one_is_right_afterwards(
    checkpoint: Callable[..., Path],
) -> None:
    folder = checkpoint("phimoe", dtype=torch.float16, max_position_embeddings=1 << 20)
    model, oracle = load(folder, 4, device="cuda:0", dtype=torch.float16), slot_models.oracle(folder, device="cuda:0")
    short = families.prompt(oracle, 5)
    expected = families.greedy(oracle, short.to("cuda:0"), 8)
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + 192 * 2**20) / total)
    try:
        length, failed = 256, False
        while not failed and length <= 1 << 19:
            try:
                model(families.prompt(oracle, length), logits_to_keep=1)
            except torch.OutOfMemoryError:
                failed = True
            length *= 2
        assert failed
        check(model)
        assert torch.equal(families.greedy(model, short, 8), expected)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


@gpu
def test_nothing_is_allocated_on_another_device(checkpoint: Callable[..., Path]) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    before = torch.cuda.memory_allocated(0)
    with load(checkpoint("phimoe", dtype=torch.float16), 4, device="cuda:1", dtype=torch.float16) as model:
        families.greedy(model, families.prompt(model, 20), 8)
        assert torch.cuda.memory_allocated(0) == before and {p.device.index for p in model.model.parameters()} == {1}
    assert EXPERTS == runtime_experts(model)


def runtime_experts(model: AirLLMPhiMoE) -> int:
    return model.config.num_local_experts
