"""The Triton kernels against their twins and against the pure policy: on a GPU as they are, elsewhere in Triton's interpreter.

Without a GPU this file runs itself once more in a process of its own with TRITON_INTERPRET=1, which must be set before
the kernels are imported.
"""

from __future__ import annotations

import random

import pytest
import torch
from triton_here import DEVICE, INTERPRETED, KERNELS_RUN, close, needs_kernels, run_interpreted, runs_itself

from airllm.experts import kernel_twins as twins
from airllm.experts import policy as policies
from airllm.experts.device_tables import AgedTables, Decisions, DeviceTables
from airllm.experts.gates import Gate
from airllm.experts.plan import plan_layer
from airllm.experts.policy import AgedPolicy, LruPolicy

if KERNELS_RUN:
    from airllm.experts import kernels

    if INTERPRETED:
        kernels.COPY_BLOCKS = 2  # a program takes milliseconds there


@runs_itself
def test_the_kernels_agree_with_their_twins_in_the_interpreter():
    """Runs the rest of this file."""
    run_interpreted(__file__)


def routing(rng: random.Random, tokens: int, top_k: int, experts: int) -> torch.Tensor:
    """[T, K] distinct experts a token, skewed to low ids as real routing is skewed to some."""
    rows = []
    for _ in range(tokens):
        weights = [1 / (1 + e) for e in range(experts)]
        row: list[int] = []
        while len(row) < top_k:
            expert = rng.choices(range(experts), weights)[0]
            if expert not in row:
                row.append(expert)
        rows.append(row)
    return torch.tensor(rows, device=DEVICE)


def tables_equal(ours: Decisions, theirs: Decisions) -> None:
    state = ("habit", "recent") if isinstance(ours, AgedTables) else ("last_use", "clock")
    for name in ("slot_of", "owner", "counts", "miss_count", *state):
        assert getattr(ours, name).tolist() == getattr(theirs, name).tolist(), name
    misses = int(ours.miss_count)
    for name in ("miss_key", "miss_slot"):
        assert getattr(ours, name)[:misses].tolist() == getattr(theirs, name)[:misses].tolist(), name


@needs_kernels
@pytest.mark.parametrize(
    ("layers", "experts", "top_k", "slots", "steps"),
    [(3, 4, 2, 2, 30), (4, 8, 2, 11, 60), (2, 16, 2, 32, 30), (3, 7, 3, 9, 30), (1, 20, 16, 17, 10), (40, 16, 2, 600, 10)],
)
def test_routing_follows_the_policy_step_by_step(layers, experts, top_k, slots, steps):
    steps *= 1 if INTERPRETED else 50  # a launch takes 0.1 s in the interpreter
    rng, policy = random.Random(slots), LruPolicy(slots)
    ours = DeviceTables(layers * experts, slots, 8 * top_k, DEVICE)
    theirs = DeviceTables(layers * experts, slots, 8 * top_k, torch.device("cpu"))
    most_rows = max(rows for rows in range(1, 9) if slots >= min(rows * top_k, experts))
    for step in range(steps):
        layer = rng.randrange(layers)
        ids = routing(rng, rng.randint(1, most_rows), top_k, experts)
        kernels.route(ours, ids, layer * experts, experts)
        twins.route(theirs, ids, layer * experts, experts)
        tables_equal(ours, theirs)
        count = ids.numel()
        assert ours.places[:count].tolist() == theirs.places[:count].tolist()
        used = sorted(set(ids.reshape(-1).tolist()))
        plan_layer(policy, first_key=layer * experts, experts=used, admit=set(used), scratch=0)
        policy.release_all()
        if step % 20 == 0 or step == steps - 1:
            assert list(ours.residents().items()) == list(policy.residents().items())
    assert ours.take_counts().evictions == policy.evictions


@needs_kernels
@pytest.mark.parametrize(
    ("layers", "experts", "top_k", "slots", "scratch", "group", "steps"),
    [
        (3, 4, 2, 2, 2, 512, 40),
        (4, 8, 2, 11, 2, 4, 60),
        (2, 16, 2, 32, 0, 512, 20),
        (3, 7, 3, 9, 0, 512, 20),
        (1, 20, 16, 17, 2, 512, 6),
        (40, 16, 2, 600, 2, 2048, 10),
        (16, 128, 8, 1228, 2, 2048, 16),
        (32, 16, 2, 5, 2, 512, 40),
    ],
)
def test_routing_follows_the_aged_policy_step_by_step(layers, experts, top_k, slots, scratch, group, steps, monkeypatch):
    monkeypatch.setattr(policies, "GROUP_SLOTS", group)
    steps *= 1 if INTERPRETED else 50
    rng, policy = random.Random(slots), AgedPolicy(slots, layers, experts)
    ours = AgedTables(layers, experts, slots, scratch, 8 * top_k, DEVICE)
    theirs = AgedTables(layers, experts, slots, scratch, 8 * top_k, torch.device("cpu"))
    most_rows = max(rows for rows in range(1, 9) if ours.most_ids() >= min(rows * top_k, experts))
    for step in range(steps):
        layer = step % layers if step < steps // 2 else rng.randrange(min(layers, 4))
        ids = routing(rng, 1 if step % 2 else rng.randint(1, most_rows), top_k, experts)
        kernels.route(ours, ids, layer * experts, experts)
        twins.route(theirs, ids.cpu(), layer * experts, experts)
        tables_equal(ours, theirs)
        assert ours.places[: ids.numel()].tolist() == theirs.places[: ids.numel()].tolist()
        used = sorted(set(ids.reshape(-1).tolist()))
        plan_layer(policy, first_key=layer * experts, experts=used, admit=set(used), scratch=scratch)
        policy.release_all()
        assert (ours.habit.tolist(), ours.recent.tolist()) == policy.uses()
    ours.check()
    assert {key: slot for key, slot in enumerate(ours.slot_of.tolist()) if slot >= 0} == policy.residents()
    assert ours.take_counts().evictions == policy.evictions


@needs_kernels
@pytest.mark.parametrize("aged", [False, True])
def test_an_id_beyond_the_experts_is_skipped(aged):
    def tables(device):
        return AgedTables(3, 4, 5, 2, 16, device) if aged else DeviceTables(12, 5, 16, device)

    ours, theirs = tables(DEVICE), tables(torch.device("cpu"))
    for ids in ([[4, 1]], [[4, 4]], [[0, 1], [4, 0]]):
        index = torch.tensor(ids, device=DEVICE)
        kernels.route(ours, index, 4, 4)
        twins.route(theirs, index, 4, 4)
        tables_equal(ours, theirs)
        assert ours.places[: index.numel()].tolist() == theirs.places[: index.numel()].tolist()


@needs_kernels
@pytest.mark.parametrize("expert_bytes", [256, 768, 70_144])
def test_copying_moves_the_missed_experts_and_nothing_else(expert_bytes):
    bank = torch.randint(0, 256, (12, expert_bytes), dtype=torch.uint8)
    if DEVICE.type == "cuda":
        bank = bank.pin_memory()
    pool = torch.zeros(5, expert_bytes, dtype=torch.uint8, device=DEVICE)
    tables = DeviceTables(12, 5, 4, DEVICE)
    tables.miss_key[:3], tables.miss_slot[:3] = torch.tensor([7, 0, 11]), torch.tensor([4, 2, 0])
    tables.miss_count.fill_(2)
    kernels.copy_misses(tables, bank, pool, 4)
    assert torch.equal(pool[4].cpu(), bank[7]) and torch.equal(pool[2].cpu(), bank[0])
    assert not pool[[0, 1, 3]].any()


SHAPES = [(1, 32, 24, 2), (3, 40, 7, 3), (8, 24, 9, 2), (1, 600, 5, 1), (2, 9, 520, 3), (1, 16, 8, 16)]


DTYPES = [torch.float32, torch.float16, torch.bfloat16]
SHAPES_AND_DTYPES = [
    (*shape, dtype) for shape in SHAPES for dtype in (DTYPES[:1] if INTERPRETED and shape is not SHAPES[1] else DTYPES)
]
"""Programs take milliseconds in the interpreter: there one shape in all of them, the others in float32."""


@needs_kernels
@pytest.mark.parametrize(("tokens", "hidden_width", "width", "top_k", "dtype"), SHAPES_AND_DTYPES)
def test_the_arithmetic_agrees_with_the_twins(tokens, hidden_width, width, top_k, dtype, monkeypatch):
    if INTERPRETED and width > 100:
        monkeypatch.setattr(kernels, "GATE_UP_ROWS", 32)  # fewer programs
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(dtype).to(DEVICE)

    places, experts = 5, 32
    pool = draw(places, 3 * hidden_width * width + 128) * 0.3
    gate_up_weights = pool[:, : 2 * hidden_width * width].unflatten(1, (2 * width, hidden_width))
    down_weights = pool[:, 2 * hidden_width * width : 3 * hidden_width * width].unflatten(1, (hidden_width, width))
    hidden, weights = draw(tokens, hidden_width), draw(tokens, top_k)
    ids = torch.stack([torch.randperm(experts, generator=generator)[:top_k] for _ in range(tokens)]).to(DEVICE)
    at = torch.randint(0, places, (tokens * top_k,), generator=generator).to(DEVICE, torch.int32)
    if top_k > 1:
        at[1] = -1  # a skipped id
    results = []
    for ops in (kernels, twins):
        inner = torch.zeros(tokens, top_k, width, dtype=dtype, device=DEVICE)
        out = torch.full((tokens, hidden_width), 9.0, dtype=dtype, device=DEVICE)
        ops.gate_up(hidden, at, gate_up_weights, inner)
        ops.down(inner, at, ids, weights, down_weights, out)
        results.append((inner.float(), out.float()))
    tolerance = {torch.float32: 1e-4, torch.float16: 4e-3, torch.bfloat16: 3e-2}[dtype]
    for ours, theirs in zip(*results, strict=True):
        scale = float(theirs.abs().max()) + 1e-6
        assert float((ours - theirs).abs().max()) <= tolerance * scale


VARIANTS = {
    "biases": (Gate(), True, False),
    "no gate": (Gate("relu2", gated=False), False, False),
    "no gate, biases": (Gate("gelu", gated=False), True, False),
    "interleaved, clamped, transposed, biases": (Gate("silu", True, True, 1.702, 1.0, 1.5), True, True),
    "interleaved": (Gate("silu", True, True), False, False),
    "transposed": (Gate("gelu_tanh"), False, True),
    "transposed, no gate": (Gate("silu", gated=False, slope=1.702), False, True),
    "gelu": (Gate("gelu"), False, False),
    "relu": (Gate("relu", limit=0.7), False, False),
}


@needs_kernels
@pytest.mark.parametrize("variant", VARIANTS)
def test_every_variant_agrees_with_the_twins(variant):
    gate, biased, transposed = VARIANTS[variant]
    tokens, hidden_width, width, top_k = 2, 70, 9, 3
    dtype = torch.bfloat16 if gate.interleaved else torch.float32
    generator, places = torch.Generator().manual_seed(0), 5
    into = gate.parts * width

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(dtype).to(DEVICE)

    sizes = [into * hidden_width, into, hidden_width * width, hidden_width]
    pool = draw(places, sum(sizes) + 12) * 0.3
    up, up_bias, back, back_bias = pool[:, : sum(sizes)].split(sizes, dim=1)
    shapes = [(into, hidden_width), (hidden_width, width)]
    if transposed:
        up, back = (part.unflatten(1, shape[::-1]).transpose(1, 2) for part, shape in zip((up, back), shapes, strict=True))
    else:
        up, back = (part.unflatten(1, shape) for part, shape in zip((up, back), shapes, strict=True))
    hidden, weights = draw(tokens, hidden_width), draw(tokens, top_k)
    ids = torch.stack([torch.randperm(32, generator=generator)[:top_k] for _ in range(tokens)]).to(DEVICE)
    at = torch.randint(-1, places, (tokens * top_k,), generator=generator).to(DEVICE, torch.int32)
    results = []
    for ops in (kernels, twins):
        inner = torch.zeros(tokens, top_k, width, dtype=dtype, device=DEVICE)
        out = torch.full((tokens, hidden_width), 9.0, dtype=dtype, device=DEVICE)
        ops.gate_up(hidden, at, up, inner, gate, up_bias if biased else None)
        ops.down(inner, at, ids, weights, back, out, None, back_bias if biased else None)
        results.append((inner.float(), out.float()))
    for ours, theirs in zip(*results, strict=True):
        scale = float(theirs.abs().max()) + 1e-6
        assert float((ours - theirs).abs().max()) <= (1e-4 if dtype == torch.float32 else 3e-2) * scale


MISSED = ["plain", "biases", "no gate", "no gate, biases", "interleaved, biases"]
ORDERS = [(v, first) for n, v in enumerate(MISSED) for first in (False, True) if not INTERPRETED or first == (n % 2 == 0)]


@needs_kernels
@pytest.mark.parametrize(("variant", "down_first"), ORDERS)
@pytest.mark.parametrize(("hidden_width", "width", "top_k", "dtype"), [
    (70, 10, 3, torch.float32), (600, 7, 2, torch.float16), (33, 5, 16, torch.float16), (4, 40, 1, torch.float16),
])  # fmt: skip
def test_missed_experts_are_computed_on_their_way_into_their_places(
    hidden_width, width, top_k, dtype, variant, down_first, monkeypatch
):
    monkeypatch.setattr(kernels, "COPY_WORDS", 64)
    gate = Gate(gated="no gate" not in variant, interleaved="interleaved" in variant, activation="relu")
    generator, experts, slots = torch.Generator().manual_seed(top_k), 40, 20
    into = gate.parts * width
    sizes = {"up": into * hidden_width, "up_bias": into, "down": hidden_width * width, "down_bias": hidden_width}
    order = ["down", "up", "up_bias", "down_bias"] if down_first else list(sizes)
    values = -(-sum(sizes.values()) // 8) * 8

    def drawn(*shape: int) -> torch.Tensor:
        return (torch.randn(*shape, generator=generator) * 0.3).to(dtype)

    bank = drawn(experts, values).view(torch.uint8)
    bank = bank.pin_memory() if DEVICE.type == "cuda" else bank
    start = dict(zip(order, [sum(sizes[n] for n in order[:i]) for i in range(4)], strict=True))
    keys = torch.randperm(experts, generator=generator)[:top_k]
    places = torch.randperm(slots, generator=generator)[:top_k].int()
    hidden, filled = drawn(1, hidden_width).to(DEVICE), drawn(slots, values)
    misses = range(0, top_k, 2)
    results = []
    for ops in (kernels, twins):
        pool = filled.clone()
        for pair in set(range(top_k)) - set(misses):
            pool[places[pair]] = bank[keys[pair]].view(dtype)
        pool = pool.to(DEVICE)
        tables = AgedTables(2, experts // 2, slots, 2, 8 * top_k, DEVICE)
        tables.miss_key[:], tables.miss_slot[:] = 39, int(places[-1])  # left over from calls before
        for number, pair in enumerate(misses):
            tables.miss_key[number], tables.miss_slot[number] = int(keys[pair]), int(places[pair])
        tables.miss_count.fill_(len(misses))
        at = places.clone()
        if top_k > 4:
            at[3] = -1  # a skipped id
        up = pool[:, start["up"] :][:, : sizes["up"]].unflatten(1, (into, hidden_width))
        bias = pool[:, start["up_bias"] :][:, :into] if "biases" in variant else None
        out = torch.zeros(1, top_k, width, dtype=dtype, device=DEVICE)
        moved = twins.Misses(pool.view(torch.uint8), bank, tables)
        ops.gate_up(hidden, at.to(DEVICE), up, out, gate, bias, moved)
        results.append((out.float(), pool))
    (ours, our_pool), (theirs, their_pool) = results
    assert torch.equal(our_pool, their_pool), "each missed expert is there as a whole, and nothing else has changed"
    for pair in misses:
        assert torch.equal(our_pool[places[pair]].cpu(), bank[keys[pair]].view(dtype))
    assert close(ours, theirs, dtype)


@needs_kernels
@pytest.mark.parametrize("aged", [False, True])
@pytest.mark.parametrize(("layers", "experts", "top_k", "slots"), [(2, 128, 8, 60), (2, 512, 10, 600), (12, 512, 16, 5000)])
def test_many_experts_are_routed_too(layers, experts, top_k, slots, aged):
    def tables(device):
        if aged:
            return AgedTables(layers, experts, slots, top_k, 8 * top_k, device)
        return DeviceTables(layers * experts, slots, 8 * top_k, device)

    rng, ours, theirs = random.Random(slots), tables(DEVICE), tables(torch.device("cpu"))
    for step in range(4):
        layer = step % 2
        rows = 8 if step > 1 and slots > 100 else 1
        ids = torch.tensor([rng.sample(range(experts), top_k) for _ in range(rows)], device=DEVICE)
        kernels.route(ours, ids, layer * experts, experts)
        twins.route(theirs, ids.cpu(), layer * experts, experts)
        tables_equal(ours, theirs)
        assert ours.places[: ids.numel()].tolist() == theirs.places[: ids.numel()].tolist()


@needs_kernels
def test_a_large_gate_does_not_overflow():
    hidden = torch.full((1, 16), 60.0, dtype=torch.float32, device=DEVICE)
    weights = torch.full((1, 32, 16), -1.0, device=DEVICE)
    out = torch.empty(1, 1, 16, device=DEVICE)
    kernels.gate_up(hidden, torch.zeros(1, dtype=torch.int32, device=DEVICE), weights, out)
    assert torch.equal(out, torch.zeros_like(out))


@needs_kernels
@pytest.mark.skipif(not INTERPRETED, reason="on a GPU the decode tests do this")
def test_a_whole_model_decodes_through_the_kernels():
    import airllm
    from airllm.experts import device_engine

    path = airllm.tiny_model_path()
    options = dict(device="cpu", dtype="float32", expert_cache_backend="slot", expert_cache_gb=0.0016)
    ids = torch.tensor([[5, 9, 11, 40, 7]])
    with airllm.AutoModel.from_pretrained(path, **options) as plain:
        expected = plain.generate(ids, max_new_tokens=3, do_sample=False)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(device_engine, "ops_for", lambda *_: kernels)
        patch.setattr(kernels, "GATE_UP_ROWS", 32)  # fewer programs
        patch.setattr(kernels, "DOWN_NARROW", (64, 64, 4))
        with airllm.AutoModel.from_pretrained(path, **options, expert_cache_engine="device") as ours:
            assert torch.equal(ours.generate(ids, max_new_tokens=3, do_sample=False), expected)
            stats = ours.get_expert_cache_stats()
    assert stats["device_engine_steps"] == 2 and stats["device_engine_kernels"].startswith("triton")
