"""Decoded tokens as steps, through generate as users call it. The oracle is transformers' own model in the same process."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM, LogitsProcessor, StoppingCriteria
from transformers.generation.streamers import BaseStreamer

import airllm
from airllm import decode_step, step_plan
from airllm.errors import NonFiniteError

GPU = torch.cuda.is_available()
DEVICE = "cuda:0" if GPU else "cpu"
PROMPT = [[5, 91, 17, 230, 44, 8]]
SLOTS_GB = 0.0026  # 22 of the tiny model's 48 experts in float32


@pytest.fixture(scope="module")
def oracle():
    path = airllm.tiny_model_path()
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, experts_implementation="eager").to(DEVICE)


@pytest.fixture(scope="module")
def shared():
    with load() as model:
        yield model


@pytest.fixture
def model(shared):
    yield shared
    shared._guard.stepper.engine.leave()
    runtime = shared._runtime
    runtime.policy.check()
    for key, slot in runtime.policy.residents().items():
        assert torch.equal(runtime.pool.blocks[slot].cpu(), runtime.bank.block(key)), f"slot {slot} lost expert {key}"


def load(**more):
    options = dict(device=DEVICE, dtype="float32", expert_cache_backend="slot", expert_cache_gb=SLOTS_GB)
    return airllm.AutoModel.from_pretrained(airllm.tiny_model_path(), **{**options, "expert_cache_engine": "device", **more})


def ids(rows=PROMPT):
    return torch.tensor(rows, device=DEVICE)


def steps(model):
    return model.get_expert_cache_stats()["device_engine_steps"]


def reason(model):
    return model.get_expert_cache_stats()["device_engine_reason"]


def both(oracle, model, **call):
    """The same greedy call to both; the tokens, which must be the same."""
    call = {"max_new_tokens": 10, "do_sample": False, "pad_token_id": 0, **call}
    call.setdefault("input_ids", ids())
    expected = oracle.generate(**call)
    assert torch.equal(model.generate(**call), expected)
    return expected


def test_greedy_tokens_are_transformers_own(oracle, model):
    before = steps(model)
    both(oracle, model, max_new_tokens=12)
    assert steps(model) == before + 11, "the first token comes from the prompt's forward"
    assert reason(model) == ""


def test_a_left_padded_batch_gets_its_own_tokens(oracle, model):
    rows = [[0, 0, 0, 5, 91], [17, 4, 8, 44, 230], [0, 9, 9, 31, 2]]
    mask = torch.tensor([[0, 0, 0, 1, 1], [1] * 5, [0, 1, 1, 1, 1]], device=DEVICE)
    before = steps(model)
    both(oracle, model, input_ids=ids(rows), attention_mask=mask)
    assert steps(model) == before + 9


def test_a_padded_call_leaves_nothing_behind_for_the_next(oracle, model):
    mask = torch.tensor([[0, 0, 1, 1, 1, 1]], device=DEVICE)
    both(oracle, model, attention_mask=mask)
    both(oracle, model)


def test_tokens_beyond_the_sliding_window_do_not_see_what_left_it(oracle, model):
    prompt = ids([[1 + (7 * n) % 250 for n in range(model.config.sliding_window - 4)]])
    both(oracle, model, input_ids=prompt, max_new_tokens=14, eos_token_id=None)


def test_sampling_draws_the_same_tokens(oracle, model):
    drawn = []
    for each in (oracle, model):
        torch.manual_seed(3)
        drawn.append(each.generate(ids(), max_new_tokens=12, do_sample=True, top_k=20, num_return_sequences=2, pad_token_id=0))
    assert torch.equal(*drawn) and reason(model) == ""


class Collected(BaseStreamer):
    def __init__(self):
        self.tokens, self.ended = [], False

    def put(self, value):
        self.tokens += value.reshape(-1).tolist()

    def end(self):
        self.ended = True


class StopAt(StoppingCriteria):
    def __call__(self, input_ids, scores, **_):
        return torch.full((input_ids.shape[0],), input_ids.shape[1] >= 9, device=input_ids.device)


class NeverEven(LogitsProcessor):
    def __call__(self, input_ids, scores):
        scores = scores.clone()
        scores[:, ::2] = -torch.inf
        return scores


def test_streamers_criteria_and_processors_work(oracle, model):
    streamer = Collected()
    call = dict(max_new_tokens=8, do_sample=False, pad_token_id=0, stopping_criteria=[StopAt()], logits_processor=[NeverEven()])
    before = steps(model)
    tokens = model.generate(ids(), streamer=streamer, **call)
    assert torch.equal(tokens, oracle.generate(ids(), **call)) and tokens.shape[1] == 9
    assert streamer.tokens == tokens[0].tolist() and streamer.ended
    assert steps(model) == before + 2


BEAMS = {
    "one prompt": dict(num_beams=3),
    "a padded batch": dict(num_beams=2, input_ids=[[0, 0, 7, 5], [3, 9, 4, 8]], attention_mask=[[0, 0, 1, 1], [1] * 4]),
    "several answers": dict(num_beams=4, num_return_sequences=2, length_penalty=0.5),
}


@pytest.mark.parametrize("call", BEAMS)
def test_beams_are_steps(oracle, model, call):
    before = steps(model)
    tensors = {name: ids(value) for name, value in BEAMS[call].items() if isinstance(value, list)}
    both(oracle, model, **{**BEAMS[call], **tensors})
    assert steps(model) >= before + 8 and reason(model) == ""


def test_beams_that_are_sampled_are_steps(oracle, model):
    before, call = steps(model), dict(num_beams=3, do_sample=True, max_new_tokens=8, pad_token_id=0, input_ids=ids())
    torch.manual_seed(5)
    expected = oracle.generate(**call)
    torch.manual_seed(5)
    assert torch.equal(model.generate(**call), expected) and steps(model) > before


PLAIN_WAYS = {
    "nine beams": (dict(num_beams=9), "9 sequences"),
    "no cache": (dict(use_cache=False), "use_cache"),
    "hidden states": (dict(output_hidden_states=True, return_dict_in_generate=True), "output_hidden_states"),
    "a static cache": (dict(cache_implementation="static"), "cache"),
    "prompt look-up": (dict(prompt_lookup_num_tokens=2), "assisted"),
    "a batch of 9": (dict(input_ids=[PROMPT[0]] * 9), "9 sequences"),
}


@pytest.mark.parametrize("way", PLAIN_WAYS)
def test_what_is_no_step_goes_the_plain_way_and_says_why(oracle, model, way):
    call, why = PLAIN_WAYS[way]
    call = {"input_ids": PROMPT, "max_new_tokens": 6, "do_sample": False, "pad_token_id": 0, **call}
    call["input_ids"] = ids(call["input_ids"])
    before = steps(model)
    ours, expected = model.generate(**call), oracle.generate(**call)
    ours, expected = (getattr(each, "sequences", each) for each in (ours, expected))
    assert torch.equal(ours, expected)
    assert steps(model) == before and why in reason(model)


@pytest.fixture
def attended(model, monkeypatch):
    """Calls generate; gives, of each attention of transformers' own in it, the queries, keys, and whether cuDNN may do it."""
    seen, attend = [], torch.nn.functional.scaled_dot_product_attention

    def spy(query, key, *args, **kwargs):
        seen.append((query.shape[-2], key.shape[-2], torch.backends.cuda.cudnn_sdp_enabled()))
        return attend(query, key, *args, **kwargs)

    def called(**call):
        seen.clear()
        call = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0, "eos_token_id": None, **call}
        model.generate(**{"input_ids": ids(), **call} if "inputs_embeds" not in call else call)
        assert torch.backends.cuda.cudnn_sdp_enabled()
        return set(seen)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", spy)
    assert torch.backends.cuda.cudnn_sdp_enabled()
    return called


LENGTH = len(PROMPT[0])


def test_prompts_of_steps_do_without_the_attention_that_needs_a_plan(attended, model):
    whole = (LENGTH, LENGTH, False)
    assert attended() == {whole}
    assert attended(num_beams=2) == {whole}
    assert attended(input_ids=ids([[5]])) == {(1, 1, False)}
    assert attended(inputs_embeds=model.model.get_input_embeddings()(ids()).detach()) == {whole}


def test_what_is_no_step_has_the_attention_that_torch_chooses(attended, model):
    assert {planned for *_, planned in attended(use_cache=False)} == {True}

    class Asks(BaseStreamer):
        def put(self, value):
            model(input_ids=ids([[1, 2, 3]]))

        def end(self):
            pass

    before = steps(model)
    assert attended(streamer=Asks()) == {(LENGTH, LENGTH, False), (3, 3, True)}
    assert steps(model) == before + 3


def test_prompts_that_end_beyond_the_limit_have_it_too(attended, monkeypatch):
    for limit in (LENGTH, LENGTH - 1):
        monkeypatch.setattr(decode_step, "UNPLANNED_TOKENS", limit)
        assert attended() == {(LENGTH, LENGTH, limit < LENGTH)}
    monkeypatch.setattr(decode_step, "UNPLANNED_TOKENS", LENGTH // 2)
    assert attended(prefill_chunk_size=LENGTH // 2) == {(LENGTH // 2, LENGTH // 2, False), (LENGTH // 2, LENGTH, True)}


LISTENED = ["model", "model.embed_tokens", "model.layers.1", "model.layers.1.mlp", "model.norm", "lm_head"]


@pytest.mark.parametrize("where", LISTENED)
@pytest.mark.parametrize("when", ["before", "after"])
def test_who_listens_to_a_module_hears_every_token(oracle, model, where, when):
    heard = []
    module = model.model.get_submodule(where)
    register = module.register_forward_hook if when == "after" else module.register_forward_pre_hook
    hook = register(lambda *_: heard.append(1))
    before = steps(model)
    both(oracle, model)
    hook.remove()
    assert len(heard) == 10 and steps(model) == before and "hooks" in reason(model)
    both(oracle, model)
    assert steps(model) == before + 9


def test_another_head_is_the_one_that_is_used(oracle, model):
    kept = [each.lm_head for each in (oracle, model.model)]
    other = torch.nn.Linear(kept[0].in_features, kept[0].out_features, device=DEVICE).eval()
    try:
        oracle.lm_head = model.model.lm_head = other
        both(oracle, model)
        assert "changed" in reason(model)
    finally:
        oracle.lm_head, model.model.lm_head = kept


def test_a_cache_too_large_for_the_limit_goes_the_plain_way(oracle, model, monkeypatch):
    monkeypatch.setattr(decode_step, "MAX_CACHE_BYTES", 1000)
    both(oracle, model)
    assert "above the limit of 1000 B" in reason(model)


def rows_kept(model):
    return [state.batch for state in model._stepper._states]


def test_calls_share_their_fixed_tensors_while_these_fit(oracle, model):
    both(oracle, model)
    kept = model._stepper._states[-1]
    both(oracle, model, input_ids=ids([[3, 4]]), max_new_tokens=7)
    assert model._stepper._states[-1] is kept
    both(oracle, model, input_ids=ids([[3, 4], [9, 1]]))
    assert model._stepper._states[-1] is not kept
    both(oracle, model)
    assert model._stepper._states[-1] is kept, "batches in turn must not record anew"


def test_the_least_recently_used_fixed_tensors_go_first(oracle, monkeypatch):
    monkeypatch.setattr(decode_step, "MAX_STATES", 4)
    with load() as model:
        for rows in (1, 2, 3, 4, 1, 5):
            both(oracle, model, input_ids=ids([[3, 4]] * rows), max_new_tokens=3)
        assert rows_kept(model) == [3, 4, 1, 5]
        bytes_kept = model.get_expert_cache_stats()["step_cache_bytes"]
        assert bytes_kept == sum(state.cache.nbytes for state in model._stepper._states)
        monkeypatch.setattr(decode_step, "MAX_CACHE_BYTES", bytes_kept * 7 // 13)
        both(oracle, model, input_ids=ids([[3, 4]] * 2), max_new_tokens=3)
        assert rows_kept(model) == [5, 2], "7 rows' bytes of the 13 that were kept"


def test_a_longer_call_replaces_the_fixed_tensors_of_its_batch(oracle, model):
    both(oracle, model, max_new_tokens=3)
    both(oracle, model, input_ids=ids([[1 + n % 200 for n in range(260)]]), max_new_tokens=3)
    assert rows_kept(model).count(1) == 1 and model._stepper._states[-1].capacity == 2 * decode_step.CAPACITY_STEP


def test_a_cache_that_is_handed_out_is_the_callers_own(oracle, model):
    call = dict(max_new_tokens=5, do_sample=False, return_dict_in_generate=True, pad_token_id=0)
    first = model.generate(ids(), **call)
    cache = getattr(first, model._stepper.cache_name)
    assert type(cache).__name__ == "DynamicCache" and cache.get_seq_length() == first.sequences.shape[1] - 1
    kept = cache.layers[0].keys.clone()
    model.generate(ids([[7, 7, 7]]), **call)
    assert torch.equal(cache.layers[0].keys, kept)
    longer = {model._stepper.cache_name: cache, "max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    ours = model.generate(first.sequences, **longer)
    assert torch.equal(ours, oracle.generate(first.sequences, max_new_tokens=4, do_sample=False, pad_token_id=0))
    assert "caller's choice" in reason(model)


def test_the_models_own_forward_between_calls_sees_what_the_device_did(oracle, model):
    both(oracle, model)
    expected = oracle(ids()).logits
    torch.testing.assert_close(model(ids()).logits, expected, rtol=1e-4, atol=1e-4)
    both(oracle, model)


def test_an_inference_mode_call_and_a_normal_one_do_not_disturb_each_other(oracle, model):
    with torch.inference_mode():
        first = model.generate(ids([[6, 5, 4]]), max_new_tokens=5, do_sample=False, pad_token_id=0)
    again = both(oracle, model, input_ids=ids([[6, 5, 4]]), max_new_tokens=5)
    assert torch.equal(first, again)


def test_threads_wait_for_each_other(oracle, model):
    prompts = [[[5, 6, 7]], [[80, 81, 82, 83]], [[9]]]
    expected = [oracle.generate(ids(p), max_new_tokens=8, do_sample=False, pad_token_id=0) for p in prompts]
    got: dict[int, torch.Tensor] = {}

    def work(number):
        # One of them calls the inner model, as a pipeline does: it takes no lock for the whole call, and no steps.
        each = model.model if number == 2 else model
        got[number] = each.generate(ids(prompts[number]), max_new_tokens=8, do_sample=False, pad_token_id=0)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(torch.equal(got[number], expected[number]) for number in range(3))


class Injected(Exception):
    pass


@pytest.mark.skipif(GPU, reason="a replayed step runs no Python that could fail")
@pytest.mark.parametrize("error", [Injected, KeyboardInterrupt, torch.OutOfMemoryError])
def test_after_a_failed_step_everything_is_right(oracle, error):
    with load() as model:
        both(oracle, model)
        engine, calls = model._runtime.engine, []
        whole = engine.experts

        def fail(*args, **more):
            calls.append(args)
            if len(calls) == 9:
                raise error
            return whole(*args, **more)

        engine.experts = fail
        if error is torch.OutOfMemoryError:
            both(oracle, model)  # that token and the rest go the plain way
            assert "ran out of memory" in reason(model)
        else:
            with pytest.raises(error):
                model.generate(ids(), max_new_tokens=10, do_sample=False)
            assert len(model._runtime.policy) == 0
        assert model.get_expert_cache_stats()["recoveries"] == 1
        both(oracle, model)


def test_numbers_that_are_not_finite_are_reported(model):
    weight = model.model.model.norm.weight
    kept = weight.clone()
    try:
        with torch.no_grad():
            weight.fill_(torch.nan)
        with pytest.raises(NonFiniteError):
            model.generate(ids(), max_new_tokens=4, do_sample=False)
    finally:
        with torch.no_grad():
            weight.copy_(kept)
    model.generate(ids(), max_new_tokens=4, do_sample=False)


def test_eager_attention_is_served_too(oracle):
    with load(attn_implementation="eager") as model:
        both(oracle, model, attention_mask=torch.tensor([[0, 1, 1, 1, 1, 1]], device=DEVICE))
        assert reason(model) == "" and steps(model) == 9


@pytest.mark.parametrize("engine", [None, "auto", "plain"])
def test_without_the_keyword_there_are_no_steps(engine):
    with load(expert_cache_engine=engine) as model:
        assert model._guard.stepper is None and model._runtime.engine is None
        stats = model.get_expert_cache_stats()
        assert stats["engine"] == "plain" and "not asked for" in stats["device_engine_reason"]
        assert "_prepare_cache_for_generation" not in vars(model.model)


@pytest.mark.parametrize(
    ("rope", "attention", "types", "why"),
    [
        ({"rope_type": "longrope"}, "sdpa", None, "rope type 'longrope'"),
        ({"full": {"rope_type": "default"}, "sliding": {"rope_type": "dynamic"}}, "sdpa", None, "rope type 'dynamic'"),
        ({"rope_type": "default"}, "flex", None, "'flex'"),
        (None, "sdpa", ["full_attention", "mamba"], "the types mamba"),
    ],
)
def test_models_that_cannot_be_stepped_say_why(rope, attention, types, why):
    text = SimpleNamespace(rope_parameters=rope, layer_types=types)
    config = SimpleNamespace(_attn_implementation=attention, get_text_config=lambda: text)
    assert why in step_plan.why_no_steps(SimpleNamespace(config=config))


def test_an_engine_that_cannot_serve_is_replaced_by_the_plain_one(oracle, monkeypatch, caplog):
    monkeypatch.setattr(step_plan, "why_no_steps", lambda _: "it is Monday")
    with load() as model:
        both(oracle, model)
        stats = model.get_expert_cache_stats()
    assert stats["engine"] == "plain" and stats["device_engine_reason"] == "it is Monday" and "Monday" in caplog.text


def test_a_closed_model_gives_the_cache_back():
    model = load()
    model.generate(ids(), max_new_tokens=3, do_sample=False, pad_token_id=0)
    stepper = model._stepper
    model.close()
    assert not stepper._states


@pytest.mark.gpu
@pytest.mark.skipif(not GPU, reason="needs a GPU")
def test_a_step_is_recorded_once_and_replayed(oracle):
    with load() as model:
        both(oracle, model, max_new_tokens=12)
        both(oracle, model, max_new_tokens=20)
        stats = model.get_expert_cache_stats()
        assert stats["device_engine_captures"] == 1 and stats["device_engine_reason"] == ""


@pytest.mark.gpu
@pytest.mark.skipif(not GPU, reason="needs a GPU")
def test_batches_in_turn_are_recorded_once_each(oracle):
    with load() as model:
        for rows in (1, 2, 4, 1, 4, 2, 1):
            both(oracle, model, input_ids=ids([[3, 4]] * rows))
        stats = model.get_expert_cache_stats()
        assert stats["device_engine_captures"] == 3 and stats["step_graph_bytes"] > 0


@pytest.mark.gpu
@pytest.mark.skipif(not GPU, reason="needs a GPU")
def test_a_recording_that_fails_is_reported_and_the_tokens_stay_right(oracle, monkeypatch):
    with load() as model:
        body = model._stepper._body

        def refuse(state):
            torch.ones(1, device=DEVICE).item() if torch.cuda.is_current_stream_capturing() else None
            return body(state)

        monkeypatch.setattr(model._stepper, "_body", refuse)
        both(oracle, model)
        assert "recording failed" in reason(model)
        both(oracle, model)
