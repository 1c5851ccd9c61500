"""A slot runtime over experts in memory, transfers that punish a missing edge, and transformers' own experts as the oracle."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import families
import pytest
import torch
from transformers.models.phimoe.modeling_phimoe import PhimoeExperts

from airllm.checkpoint import TensorReader
from airllm.experts.bank import HostBank
from airllm.experts.budget import plan_slots
from airllm.experts.compute import ExpertMath
from airllm.experts.device_engine import DeviceEngine
from airllm.experts.gates import find_gate
from airllm.experts.layout import ExpertLayout, ModelLayout
from airllm.experts.runtime import SlotExpertRuntime
from airllm.experts.slots import SlotPool
from airllm.experts.transfer import StreamTransfer, SyncTransfer

LAYERS, EXPERTS, HIDDEN, WIDTH = 3, 8, 32, 24

GPU = (pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"))
DEVICES = ["cpu", pytest.param("cuda:0", marks=GPU)]


def gpu(test: Any) -> Any:
    """Marks a test that needs a GPU, and skips it where there is none."""
    for mark in GPU:
        test = mark(test)
    return test


RIG_POLICY = "auto"
"""What every rig is given; the fixture every_policy changes it."""


class Injected(Exception):
    """What the fault experiments raise: no code under test knows it."""


class MemoryWeights:
    """Stands where a weight map stands: experts come from modules in memory."""

    def __init__(self, modules: dict[str, torch.nn.Module]) -> None:
        self.modules = modules

    def read_expert(self, target: str, expert: int, _reader: Any, out: torch.Tensor) -> None:
        prefix, _, name = target.rpartition(".")
        out.copy_(getattr(self.modules[prefix], name)[expert])

    def forget_conversions(self) -> None:
        """Nothing is kept."""


class LateTransfer(SyncTransfer):
    """The worst that two streams can do: bytes arrive only when somebody waits for them, and until then the place holds NaN.

    A copy into a place that is being read is an error, which no test is likely to catch by its numbers.
    """

    overlaps = True

    def __init__(self) -> None:
        self.pending: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self.reading: set[int] = set()
        self.copies: list[int] = []

    def copy(self, source: torch.Tensor, target: torch.Tensor, place: int) -> None:
        if place in self.reading:
            raise AssertionError(f"place {place} is copied over while it is read")
        for begun, (_, there) in list(self.pending.items()):
            if there.data_ptr() == source.data_ptr():  # copies come in order: what is copied on has arrived
                self._arrive(begun)
        source = source.clone()
        target.fill_(255)
        self.pending[place] = (source, target)
        self.copies.append(place)

    def wait(self, place: int) -> None:
        self.reading.add(place)
        self._arrive(place)

    def done_reading(self, place: int) -> None:
        self.reading.discard(place)

    def synchronize(self) -> None:
        for place in list(self.pending):
            self._arrive(place)

    def close(self) -> None:
        self.synchronize()

    def _arrive(self, place: int) -> None:
        source, target = self.pending.pop(place, (None, None))
        if source is not None and target is not None:
            target.copy_(source)


def experts_modules(
    dtype: torch.dtype = torch.float32,
    *,
    layers: int = LAYERS,
    experts: int = EXPERTS,
    seed: int = 0,
    widths: Sequence[int] = (),
) -> dict[str, PhimoeExperts]:
    """Random experts modules of transformers, in eager mode, one a layer; of these ``widths`` where they are given."""
    config = families.make_config(
        "phimoe", num_local_experts=experts, hidden_size=HIDDEN, intermediate_size=WIDTH, num_hidden_layers=layers
    )
    config._experts_implementation = "eager"
    generator = torch.Generator().manual_seed(seed)
    made = {}
    for layer in range(layers):
        config.intermediate_size = widths[layer] if widths else WIDTH
        module = PhimoeExperts(config)
        for parameter in module.parameters():
            parameter.data = (torch.randn(parameter.shape, generator=generator) * 0.2).to(dtype)
            parameter.requires_grad_(False)
        made[f"model.layers.{layer}.mlp.experts"] = module
    return made


class Rig:
    """A runtime and its oracle. ``call(layer, ...)`` runs both and demands the same bits."""

    def __init__(
        self,
        slots: int,
        *,
        dtype: torch.dtype = torch.float32,
        device: str = "cpu",
        top_k: int = 2,
        transfer: Any = None,
        layers: int = LAYERS,
        experts: int = EXPERTS,
        widths: Sequence[int] = (),
        modules: dict[str, Any] | None = None,
    ) -> None:
        self.device, self.dtype, self.top_k = torch.device(device), dtype, top_k
        self.modules: dict[str, Any] = modules or experts_modules(dtype, layers=layers, experts=experts, widths=widths)
        layers = len(self.modules)
        layout = ModelLayout(tuple(map(ExpertLayout.from_module, self.modules.values())))
        plan = plan_slots(
            budget_bytes=slots * layout.expert_bytes,
            expert_bytes=layout.expert_bytes,
            total_experts=layout.total_experts,
            top_k=top_k,
        )
        self.pool = SlotPool(layout, plan, self.device)
        self.pool.poison()
        self.reader = TensorReader(2)
        on_gpu = self.device.type == "cuda"
        self.bank = HostBank(
            layout, list(self.modules), MemoryWeights(self.modules), self.reader, pin=on_gpu, progress=False  # type: ignore[arg-type]
        )
        if transfer is None:
            transfer = StreamTransfer(len(self.pool.blocks), self.device) if on_gpu else LateTransfer()
        self.transfer = transfer
        self.runtime = SlotExpertRuntime(self.bank, self.pool, transfer, top_k=top_k, layers=layers, policy=RIG_POLICY)
        self.oracles = [module.to(self.device) for module in self.modules.values()]
        self._generator = torch.Generator().manual_seed(7)

    def draw(self, tokens: int, choices: Sequence[int] | None = None) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Random hidden [T, H], distinct experts [T, K] out of ``choices``, and weights [T, K] that do not sum to one."""
        generator = self._generator
        hidden = torch.randn(tokens, HIDDEN, generator=generator).to(self.dtype)
        allowed = torch.tensor(list(choices if choices is not None else range(self.runtime.num_experts)))
        ranks = torch.rand(tokens, len(allowed), generator=generator).argsort(dim=1)[:, : self.top_k]
        weights = (torch.rand(tokens, self.top_k, generator=generator) + 0.4).to(self.dtype)
        return hidden.to(self.device), allowed[ranks].to(self.device), weights.to(self.device)

    def gate(self, layer: int) -> Any:
        return self.oracles[layer]._apply_gate

    def math(self, layer: int) -> ExpertMath:
        return ExpertMath(self.gate(layer))

    def run(self, layer: int, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        return self.runtime.run(layer, hidden, index, weights, self.math(layer))

    def expected(self, layer: int, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        return self.oracles[layer](hidden, index, weights)

    def call(self, layer: int, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        ours = self.run(layer, hidden, index, weights)
        assert torch.equal(ours, self.expected(layer, hidden, index, weights))
        self.check()
        return ours

    def check(self) -> None:
        check(self.runtime)

    def close(self) -> None:
        self.runtime.close()
        self.reader.close()


class Both(Rig):
    """A rig whose runtime has the device engine too."""

    def __init__(self, slots: int, **options: Any) -> None:
        super().__init__(slots, **options)
        runtime = self.runtime
        maths = [self.math(layer) for layer in range(runtime.layers)]
        self.engine = runtime.engine = DeviceEngine(
            self.bank,
            self.pool,
            self.transfer,
            runtime.policy,
            runtime.counters,
            top_k=self.top_k,
            gates=[find_gate(math.apply_gate) for math in maths],
            transposed=maths[0].transposed,
        )

    def device_call(self, layer: int, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Through the engine; close to the oracle, whose sums are rounded elsewhere."""
        self.engine.enter()
        with self.engine.step():
            ours = self.run(layer, hidden, index, weights)
        expected = self.expected(layer, hidden, index, weights)
        tolerance = 1e-5 if self.dtype == torch.float32 else 2e-2
        torch.testing.assert_close(ours, expected, rtol=tolerance, atol=tolerance)
        return ours


def check(runtime: SlotExpertRuntime) -> None:
    """What must hold between any two forwards: the table is whole, nothing is leased, every slot holds what it says."""
    if runtime.engine is not None:
        assert not runtime.engine.stepping, "a step was left open"
        if runtime.engine.ahead:
            runtime.engine.tables.check()
        runtime.engine.leave()
    runtime.policy.check()
    assert not runtime.policy._leased, "a lease survived"
    runtime.transfer.synchronize()
    for key, slot in runtime.policy.residents().items():
        block = runtime.bank.block(key)
        assert torch.equal(runtime.pool.blocks[slot][: block.nbytes].cpu(), block), f"slot {slot} does not hold expert {key}"
