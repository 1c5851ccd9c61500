"""The device engine beside the plain one, on the same slots: same answers, one truth about who holds what."""

from __future__ import annotations

import pytest
import slot_rig
import torch
from torch import nn

from airllm.experts.compute import ExpertMath
from airllm.experts.contract import expert_math
from airllm.experts.device_engine import why_not
from airllm.experts.gates import PLAIN, find_gate
from airllm.experts.policy import AgedPolicy, LruPolicy, SlotPolicy

from .test_contract import Experts

pytestmark = pytest.mark.usefixtures("every_policy")


@pytest.fixture(params=[2, 5, 24], ids="{} slots".format)
def rig(request):
    made = slot_rig.Both(request.param)
    yield made
    made.close()


def test_calls_through_either_engine_in_any_order_give_the_oracles_answers(rig):
    generator = torch.Generator().manual_seed(3)
    for number in range(60):
        layer = int(torch.randint(0, slot_rig.LAYERS, (1,), generator=generator))
        if number % 7 < 4:
            rows = 1 if not rig.engine.fits(3) else 1 + number % 3
            rig.device_call(layer, *rig.draw(rows))
        else:
            rig.call(layer, *rig.draw(1 + number % 5))  # the rig checks that every slot holds what the table says
    rig.engine.leave()
    rig.check()


def test_what_a_prompt_fetched_ahead_is_not_believed_after_a_step_of_the_engine() -> None:
    rig = slot_rig.Both(2)
    rig.runtime.begin_forward(1, 64, rig.device)
    rig.call(0, *rig.draw(64))
    assert rig.runtime._ahead, "the prompt ends here: whoever called it was interrupted"
    for _ in range(8):
        rig.device_call(2, *rig.draw(1))
    rig.call(1, *rig.draw(64))
    rig.close()


class NoGate(Experts):
    has_gate = False


class Turned(Experts):
    """As gpt-oss's: [in, out], biases, gate and up in turns, limits."""

    is_transposed = has_bias = True

    def _apply_gate(self, gate_up):
        gate, up = gate_up[..., ::2].clamp(max=1.0), gate_up[..., 1::2].clamp(-1.0, 1.0)
        return (up + 1) * gate * torch.sigmoid(gate * 1.702)


class OwnKind(slot_rig.Both):
    """Two layers of experts that are not of the plain kind."""

    def __init__(self, kind: type[Experts]) -> None:
        generator, modules = torch.Generator().manual_seed(0), {}
        for layer in range(2):
            module = modules[f"layers.{layer}.experts"] = kind(slot_rig.HIDDEN, slot_rig.WIDTH, torch.float32)
            module.act_fn = nn.SiLU() if layer and kind.has_gate else nn.GELU()  # a gate of its own in each layer
            for name, meta in module._parameters.items():
                module._parameters[name] = nn.Parameter(torch.randn(meta.shape, generator=generator) * 0.3, requires_grad=False)
        super().__init__(5, modules=modules)

    def math(self, layer):
        return expert_math(self.oracles[layer])


@pytest.mark.parametrize("kind", [Experts, NoGate, Turned])
def test_experts_of_other_kinds_are_served(kind):
    rig = OwnKind(kind)
    for number in range(12):
        rig.device_call(number % 2, *rig.draw(1 + number % 3))
    rig.engine.leave()
    rig.check()
    rig.close()


def test_more_ids_than_the_tables_hold_are_refused(rig):
    hidden, index, weights = rig.draw(8)
    rig.engine.enter()
    with pytest.raises(ValueError, match="9 rows of 2 experts"):
        rig.engine.experts(0, *(torch.cat([part, part[:1]]) for part in (hidden, index, weights)))
    rig.engine.abandon()


def known(policy: SlotPolicy) -> tuple:
    """All that decides what happens next."""
    residents = policy.residents()
    return (residents, *policy.uses()) if isinstance(policy, AgedPolicy) else (residents, list(residents))


def test_the_engine_decides_as_the_plain_runtime_does(rig):
    plain = slot_rig.Rig(rig.pool.plan.slots)
    for number in range(40):
        hidden, index, weights = rig.draw(1)
        rig.device_call(number % slot_rig.LAYERS, hidden, index, weights)
        plain.run(number % slot_rig.LAYERS, hidden, index, weights)
    rig.engine.leave()
    assert known(rig.runtime.policy) == known(plain.runtime.policy)
    assert vars(rig.runtime.counters) == vars(plain.runtime.counters)
    plain.close()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_added_up_in_float32(dtype):
    rig = slot_rig.Both(6, dtype=dtype)
    hidden, index, weights = rig.draw(2)
    ours = rig.device_call(0, hidden, index, weights)
    exact = torch.zeros_like(hidden, dtype=torch.float32)
    module = rig.oracles[0]
    for row in range(2):
        for k in range(2):
            views = (module.gate_up_proj[index[row, k]].float(), module.down_proj[index[row, k]].float())
            exact[row] += ExpertMath(rig.gate(0)).output(hidden[row : row + 1].float(), views)[0] * weights[row, k].float()
    eager = rig.expected(0, hidden, index, weights)
    assert (ours - exact).abs().max() <= (eager - exact).abs().max() * 1.5
    rig.close()


def test_statistics_know_what_the_device_did_before_the_policy_does(rig):
    before = rig.runtime.stats()
    rig.device_call(0, *rig.draw(1))
    stats = rig.runtime.stats()
    assert stats["misses"] == before["misses"] + 2 and stats["resident_experts"] == 2
    assert stats["h2d_bytes"] == 2 * rig.pool.plan.expert_bytes
    assert stats["resident_bytes"] == 2 * rig.pool.plan.expert_bytes
    assert len(rig.runtime.policy) == 0, "reading statistics must not hand over in the middle of a call"
    rig.engine.leave()
    assert rig.runtime.stats() == stats
    rig.runtime.reset_counters()
    assert rig.runtime.stats()["misses"] == 0


def test_clearing_empties_the_tables_too(rig):
    rig.device_call(0, *rig.draw(1))
    rig.runtime.clear()
    assert rig.runtime.stats()["resident_experts"] == 0
    rig.device_call(0, *rig.draw(1))
    rig.engine.leave()
    rig.check()


@pytest.mark.parametrize(("rows", "kernel"), [(1, "route"), (1, "gate_up"), (2, "copy_misses"), (2, "down")])
def test_a_failed_step_leaves_nothing_to_be_believed(rows, kernel, rig, monkeypatch):
    rig.device_call(0, *rig.draw(1))

    def fail(*_):
        raise slot_rig.Injected

    with monkeypatch.context() as patch:
        patch.setattr(rig.engine.ops, kernel, fail)
        rig.engine.enter()
        with pytest.raises(slot_rig.Injected), rig.engine.step():
            rig.run(1, *rig.draw(rows))
    rig.engine.abandon()
    assert len(rig.runtime.policy) == 0 and not rig.engine.stepping
    assert rig.runtime.counters.recoveries == 1
    rig.call(1, *rig.draw(1))
    rig.device_call(1, *rig.draw(1))
    rig.engine.leave()
    rig.check()


def test_more_rows_than_places_can_serve_do_not_fit():
    rig = slot_rig.Both(5)
    lru = isinstance(rig.runtime.policy, LruPolicy)
    most = rig.pool.plan.slots if lru else min(end - first for first, end in rig.runtime.policy.spans) + rig.pool.plan.scratch
    assert [rig.engine.fits(rows) for rows in (1, 2, 3, 4, 9)] == [2 * rows <= most for rows in (1, 2, 3)] + [most >= 8, False]
    whole = slot_rig.Both(20)
    assert whole.engine.fits(8), "a layer has only 8 experts, so 8 rows never need more places"
    rig.close()
    whole.close()


def test_reasons_name_what_is_in_the_way():
    rig = slot_rig.Both(5)
    assert why_not(rig.bank, rig.pool, 2, [PLAIN]) == ""
    assert "17 experts" in why_not(rig.bank, rig.pool, 17, [PLAIN])
    assert "gate" in why_not(rig.bank, rig.pool, 2, [PLAIN, find_gate(lambda both: both.chunk(2, dim=-1)[0])])
    rig.close()


def test_a_closed_engine_holds_no_slots(rig):
    rig.runtime.close()
    assert rig.engine._pool.numel() == 0 and len(rig.runtime.policy) == 0
