"""A decoded token through a decoder layer as recorded graphs: the stock layer's own kernels without their launch cost.

A layer is recorded by running it once, cut where a token's own data decide what happens: at the KV cache and attention,
whose shapes grow with the sequence, and at the experts. What lies between the cuts is replayed for one new token of one
sequence (the idea of piecewise CUDA graphs, as in vLLM); attention and the cache stay transformers' own calls. So the bits
are those of the stock layer, and any other call of the layer runs the stock layer itself. A layer whose weights are streamed
finds them in one of a few blocks that never move: it is recorded once for each.
"""

from __future__ import annotations

import inspect
import logging
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import DynamicCache, PreTrainedModel

from airllm import transformers_private as private
from airllm.experts.assembly import record_experts
from airllm.experts.decode_graphs import ExpertGraphs, GraphPool
from airllm.experts.runtime import SlotExpertRuntime
from airllm.streaming import LayerStreamer

log = logging.getLogger(__name__)

_EXPECTED = ["cache", "attention", "experts"]
_ON_THE_WAY = {"attention_mask", "position_ids", "position_embeddings", "cache_position", "use_cache"}


class RecordingError(RuntimeError):
    """A layer does not do what can be recorded. Never leaves this module."""


class PositionEmbeddings:
    """The fixed cos and sin [1, 1, D] that every recorded layer reads."""

    def __init__(self, cos: torch.Tensor, sin: torch.Tensor) -> None:
        self.tensors = (cos.clone(), sin.clone())
        self._taken: Any = None

    def fits(self, embeddings: Any) -> bool:
        if embeddings is self._taken:
            return True
        return isinstance(embeddings, tuple) and all(
            a.shape == b.shape and a.dtype == b.dtype for a, b in zip(embeddings, self.tensors, strict=True)
        )

    def take(self, embeddings: Any) -> None:
        """One forward hands the same tuple to all its layers: it is copied once."""
        if embeddings is not self._taken:
            for mine, given in zip(self.tensors, embeddings, strict=True):
                mine.copy_(given)
            self._taken = embeddings


class Unchanged:
    """Whether what lies in a module still is what it was when this was made: the same modules and weights, in evaluation, and
    nobody listening in between who did not then. The module's own hooks and forward are not looked at."""

    def __init__(self, whole: nn.Module) -> None:
        modules = list(whole.modules())
        self._children = [_Child.of(m._modules, name) for m in modules for name in m._modules if m._modules[name] is not None]
        self._weights = [
            (m._parameters, name, weight, weight.data_ptr())
            for m in modules
            for name, weight in m._parameters.items()
            if weight is not None
        ]

    def __bool__(self) -> bool:
        everywhere = nn.modules.module
        if everywhere._global_forward_hooks or everywhere._global_forward_pre_hooks:
            return False
        if not all(child.is_as_it_was() for child in self._children):
            return False
        return all(mine.get(name) is weight and weight.data_ptr() == at for mine, name, weight, at in self._weights)


class SameSettings:
    """Whether the numbers, names and switches of a model's modules and configuration are what they were when this was made: a
    router's number of experts, the attention implementation. To be asked once a call of generate or a forward, not in every
    layer. ``modules``: those to look at instead of all of the model's."""

    def __init__(self, model: PreTrainedModel, modules: Iterable[nn.Module] | None = None) -> None:
        configs = {id(config): config for config in (model.config, model.config.get_text_config())}
        looked_at = model.modules() if modules is None else modules
        # Weak: a module may come to hold who asks, and a dropped model is freed at once. Names that come to be there later are
        # transformers' own notes.
        self._known = [(weakref.ref(owner), _settings(owner)) for owner in (*looked_at, *configs.values())]

    def __bool__(self) -> bool:
        for reference, known in self._known:
            owner = reference()
            if owner is None:
                return False
            now = vars(owner)
            for name, value in known:
                if now.get(name) != value:
                    return False
        return True


def _settings(owner: object) -> list[tuple[str, Any]]:
    return [(name, value) for name, value in vars(owner).items() if type(value) in (bool, int, float, str)]


class _Settings:
    """What all recorded layers of a model share: whether its settings are those they were recorded with."""

    def __init__(self, model: PreTrainedModel, layers: Sequence[nn.Module]) -> None:
        self._known = SameSettings(model, [module for layer in layers for module in layer.modules()])
        self.same = True

    def look(self) -> None:
        """Look again. The first layer does, for a whole forward."""
        self.same = bool(self._known)


class _Child(NamedTuple):
    """One module, where it hangs, and which hooks and forward of its own it had."""

    siblings: dict[str, nn.Module | None]
    name: str
    module: nn.Module
    hooks: frozenset[int]
    forward: Any

    @classmethod
    def of(cls, siblings: dict[str, nn.Module | None], name: str) -> _Child:
        module = siblings[name]
        assert module is not None
        hooks = frozenset((*module._forward_hooks, *module._forward_pre_hooks))
        return cls(siblings, name, module, hooks, module.__dict__.get("forward"))

    def is_as_it_was(self) -> bool:
        module, known = self.module, self.hooks
        if self.siblings.get(self.name) is not module or module.training or module.__dict__.get("forward") is not self.forward:
            return False
        if module._forward_pre_hooks and not known.issuperset(module._forward_pre_hooks):
            return False
        after = module._forward_hooks
        return not after or not private.listen({number: hook for number, hook in after.items() if number not in known})


class _Cuts:
    """Stands in for the KV cache, attention and the experts while a layer runs to be recorded, and cuts there.

    Without a pool nothing is recorded: the layer only runs, so that libraries are set up and dtypes are seen.
    """

    def __init__(self, pool: GraphPool | None, graphs: ExpertGraphs | None) -> None:
        self._pool, self._graphs = pool, graphs
        self.pieces: list[Any] = []
        self.places: list[str] = []

    def begin(self) -> None:
        if self._pool is not None:
            self._pool.begin()

    def end(self) -> None:
        if self._pool is not None:
            self.pieces.append(self._pool.end())

    def update(self, keys: torch.Tensor, values: torch.Tensor, layer: int, *_: Any, **__: Any) -> Any:
        """The cache's call."""
        self.end()
        self.places.append("cache")
        self.keys, self.values, self.cache_layer = keys, values, layer
        return keys, values

    def attention(
        self, module: nn.Module, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: Any, **options: Any
    ) -> tuple[torch.Tensor, None]:
        """The attention function's call."""
        self.places.append("attention")
        self.module, self.query, self.options = module, query, options
        batch, heads, tokens, _ = query.shape
        self.attended = query.new_zeros(batch, tokens, heads, values.shape[-1])
        self.begin()
        return self.attended, None

    def experts(self, layer: int, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """The experts module's call; from here on the graphs of the experts hold the token."""
        graphs, self.weight_dtype = self._graphs, weights.dtype
        if graphs is not None:
            if not graphs.fit(hidden, weights):
                raise RecordingError(f"the experts of layer {layer} get {tuple(hidden.shape)} in {hidden.dtype}")
            graphs.load(hidden, weights)
        self.end()
        self.places.append("experts")
        self.expert_layer, self.index = layer, index
        self.begin()
        return torch.zeros_like(hidden) if graphs is None else graphs.total.to(hidden.dtype)


class _StandIn:
    """Takes the place of a layer's ``forward``."""

    def __init__(self, layer: nn.Module) -> None:
        # The layer holds this object, and nothing here may hold the layer: a dropped model is freed at once.
        self._layer, self._forward = weakref.ref(layer), type(layer).forward

    def _plain(self, *args: Any, **kwargs: Any) -> Any:
        return self._forward(self._layer(), *args, **kwargs)

    def install(self) -> None:
        layer = self._layer()
        assert layer is not None
        layer.forward = self  # type: ignore[assignment]

    def remove(self) -> None:
        layer = self._layer()
        if layer is not None:
            layer.__dict__.pop("forward", None)


class RecordedLayer(_StandIn):
    """Stands in for the forward of a layer whose weights stay where they are.

    Args:
        hidden: the fixed input [1, 1, H].
        embeddings, settings: shared by all layers of the model.
        first: whether it is the one that looks at the settings.
    """

    def __init__(
        self,
        layer: nn.Module,
        config: Any,
        runtime: SlotExpertRuntime,
        hidden: torch.Tensor,
        embeddings: PositionEmbeddings,
        settings: _Settings,
        first: bool,
    ) -> None:
        super().__init__(layer)
        self._settings, self._first = settings, first
        self._config, self._runtime = config, runtime
        self._hidden, self._embeddings = hidden, embeddings
        names = inspect.signature(self._forward).parameters
        self._cache_name = "cache" if "cache" in names else "past_key_values"
        self._known = _ON_THE_WAY | {self._cache_name}

    def record(self, pool: GraphPool | None, graphs: ExpertGraphs | None) -> torch.dtype:
        """Record the layer; without a pool only run it. Returns the dtype of the routing weights."""
        cuts, layer = _Cuts(pool, graphs), self._layer()
        assert layer is not None
        call: dict[str, Any] = {"position_embeddings": self._embeddings.tensors, "attention_mask": None, self._cache_name: cuts}
        with self._runtime.recording(cuts.experts), private.attention_replaced(self._config, cuts.attention) as name:
            cuts.begin()
            self._output = self._forward(layer, self._hidden, **call)
            cuts.end()
        if cuts.places != _EXPECTED or not isinstance(self._output, torch.Tensor):
            raise RecordingError(f"{type(layer).__name__} goes through {', '.join(cuts.places) or 'nothing known'}")
        self._cuts, self._attention_name, self._unchanged = cuts, name, Unchanged(layer)
        return cuts.weight_dtype

    def _fits(self, hidden: torch.Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        mine = self._hidden
        if args or type(kwargs.get(self._cache_name)) is not DynamicCache or hidden.shape != mine.shape:
            return False
        if hidden.dtype != mine.dtype or hidden.requires_grad:
            return False
        if any(name not in self._known and value is not None and value is not False for name, value in kwargs.items()):
            return False
        if not self._embeddings.fits(kwargs.get("position_embeddings")) or torch.is_autocast_enabled(mine.device.type):
            return False
        same = self._settings.same and self._config._attn_implementation == self._attention_name
        return same and bool(self._unchanged)

    def __call__(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if self._first and hidden_states.shape == self._hidden.shape:
            self._settings.look()
        if not self._fits(hidden_states, args, kwargs):
            return self._plain(hidden_states, *args, **kwargs)
        cuts = self._cuts
        before, between, after = cuts.pieces
        self._hidden.copy_(hidden_states)
        self._embeddings.take(kwargs.pop("position_embeddings"))
        before.replay()
        keys, values = kwargs.pop(self._cache_name).update(cuts.keys, cuts.values, cuts.cache_layer)
        attention = private.attention_function(self._attention_name, cuts.module)
        attended, _ = attention(
            cuts.module, cuts.query, keys, values, kwargs.pop("attention_mask", None), **{**cuts.options, **kwargs}
        )
        cuts.attended.copy_(attended)
        between.replay()
        self._runtime.run_loaded(cuts.expert_layer, cuts.index)
        after.replay()
        return self._output.clone()


class MovingLayer(_StandIn):
    """Stands in for the forward of a layer whose weights come to lie in one of several blocks: one recording for each."""

    def __init__(self, layer: nn.Module, number: int, streamer: LayerStreamer, recordings: Sequence[RecordedLayer]) -> None:
        super().__init__(layer)
        self._number, self._streamer, self._recordings = number, streamer, recordings

    def record(self, pool: GraphPool | None, graphs: ExpertGraphs | None) -> torch.dtype:
        """As `RecordedLayer.record`, in every block."""
        for block, recording in enumerate(self._recordings):
            with self._streamer.lying_in(self._number, block):
                dtype = recording.record(pool, graphs)
        return dtype

    def __call__(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        block = self._streamer.current_block
        if block is None:
            return self._plain(hidden_states, *args, **kwargs)
        return self._recordings[block](hidden_states, *args, **kwargs)


def record_decode(
    model: PreTrainedModel,
    runtime: SlotExpertRuntime,
    layers: Sequence[nn.Module],
    streamer: LayerStreamer | None = None,
) -> tuple[str, Callable[[], None]]:
    """Let ``layers`` serve decoded tokens by recordings of themselves and of the experts in their places.

    Returns "" or the reason why they stay as they are, and a function that takes the recordings out again. Call with
    everything on the device that stays there, and before the first forward.
    """
    recorded: list[RecordedLayer | MovingLayer] = []
    try:
        with torch.inference_mode(False), torch.no_grad():
            _record(model, runtime, layers, streamer, recorded)
    except RuntimeError as error:
        runtime.graphs, recorded = None, []
        log.warning("decoded tokens take the plain way, they could not be recorded: %s", error)
        return f"recording failed: {error}", lambda: None
    finally:
        if streamer is not None and streamer.on_gpu:
            torch.cuda.synchronize(streamer.device)  # copies into a block wait for the layer that read it, not for recordings

    def remove() -> None:
        for layer in recorded:
            layer.remove()

    return "", remove


def _record(
    model: PreTrainedModel,
    runtime: SlotExpertRuntime,
    layers: Sequence[nn.Module],
    streamer: LayerStreamer | None,
    recorded: list[RecordedLayer | MovingLayer],
) -> None:
    pool = GraphPool(runtime.pool.blocks[0].device)
    hidden = torch.zeros(1, 1, model.config.hidden_size, dtype=model.dtype, device=pool.device)
    positions = torch.zeros(1, 1, dtype=torch.int64, device=pool.device)
    embeddings, settings = PositionEmbeddings(*model.model.rotary_emb(hidden, positions)), _Settings(model, layers)
    for number, layer in enumerate(layers):
        blocks = len(streamer.blocks_of(number)) if streamer is not None else 0
        made = [
            RecordedLayer(layer, model.config, runtime, hidden, embeddings, settings, number == 0) for _ in range(blocks or 1)
        ]
        recorded.append(MovingLayer(layer, number, streamer, made) if streamer is not None and blocks else made[0])
    with pool.aside():
        weight_dtype = recorded[0].record(None, None)
    # In memory of their own: the experts are replayed in the midst of a layer, whose intermediate results must outlive them,
    # and recordings that share memory reuse what earlier ones have given back.
    runtime.graphs = record_experts(runtime, model, GraphPool(pool.device), weight_dtype)
    with pool.aside():
        try:
            for stand_in in recorded:
                stand_in.record(pool, runtime.graphs)
        except BaseException:
            pool.abandon()
            raise
    for stand_in in recorded:
        stand_in.install()
