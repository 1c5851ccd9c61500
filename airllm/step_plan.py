"""Whether a model's decoded tokens can be steps, and what these need to know: asked of its configuration, then tried.

The trial is three tokens through the model's own forward with experts that answer zero. The last of them goes once as
transformers does it and once as a step; the logits must agree, every layer must get the mask that was made for it, and the
step must not read anything back from the device, for then it could not be recorded. How far each layer looks back shows in
the masks that transformers makes after a long sequence, which is only pretended.
"""

from __future__ import annotations

import contextlib
import inspect
import logging
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from airllm.experts.runtime import SlotExpertRuntime
from airllm.skeleton import decoder_layers
from airllm.step_cache import LayerShape, StepCache
from airllm.step_state import StepPlan, StepState

log = logging.getLogger(__name__)

_ATTENTION = ("sdpa", "eager")
_LAYER_TYPES = {"full_attention", "sliding_attention"}
_TRIED, _CAPACITY = 3, 8
_PRETENDED = 2**20
"""Positions before a token whose masks are looked at; a layer that looks back farther looks back all the way."""
_TOLERANCE = {torch.float32: 1e-3, torch.float16: 2e-2, torch.bfloat16: 1e-1}
"""By how much, of the largest logit, a step's logits may differ: what is wrong differs by more than rounding."""
_READS = {
    "_local_scalar_dense", "is_nonzero", "equal", "nonzero", "masked_select", "unique_dim", "_unique2", "unique_consecutive",
    "bincount",
}  # fmt: skip


_ABSENT = object()


class NoStepsError(Exception):
    """A model's tokens cannot be steps; the message is the reason. Never leaves `plan_steps`."""


def why_no_steps(model: PreTrainedModel) -> str:
    """Why no decoded token of this model can be a step, by its configuration; "" when nothing there speaks against it."""
    config: Any = model.config.get_text_config()
    for rope in _ropes(getattr(config, "rope_parameters", None)):
        if rope == "longrope" or "dynamic" in rope:
            return f"rope type {rope!r} picks its factors on the host"
    attention = model.config._attn_implementation
    if attention not in _ATTENTION:
        return f"attention {attention!r} is not one of {', '.join(_ATTENTION)}"
    types = set(getattr(config, "layer_types", None) or ()) - _LAYER_TYPES
    return f"it has layers of the types {', '.join(sorted(types))}, whose state is no keys and values" if types else ""


def _ropes(parameters: Any) -> Iterator[str]:
    """The rope types in a configuration's rope parameters, which may be given for each type of layer."""
    if not isinstance(parameters, dict):
        return
    if isinstance(parameters.get("rope_type"), str):
        yield parameters["rope_type"]
    for part in parameters.values():
        yield from _ropes(part)


def plan_steps(model: PreTrainedModel, runtime: SlotExpertRuntime, *, stock: bool) -> tuple[StepPlan | None, str]:
    """What the model's steps need to know, or None and the reason why it can have none.

    ``stock``: the steps run the model's own forward, which is then tried. Call when the weights are on the device.
    """
    if model.dtype not in _TOLERANCE:
        return None, f"the model is {model.dtype}"
    reason = why_no_steps(model)
    if reason:
        return None, reason
    trial = _Trial(model, runtime)
    try:
        with _stateless(model):
            plan = trial.plan()
            if stock:
                trial.check(plan)
    except NoStepsError as error:
        return None, str(error)
    except Exception as error:  # noqa: BLE001 - a family's own code, called in a way its authors may not have tried
        log.debug("a step was tried", exc_info=True)
        return None, f"a step failed when it was tried ({type(error).__name__}: {' '.join(str(error).split())[:200]})"
    return plan, ""


@contextlib.contextmanager
def _stateless(model: nn.Module) -> Iterator[None]:
    """Put attributes that forwards inside change back as they were, and raise NoStepsError for the first: a recorded step
    would not change them."""
    before = [(name, module, dict(vars(module))) for name, module in model.named_modules()]
    changed = ""
    try:
        yield
    finally:
        for name, module, attributes in before:
            for key, value in list(vars(module).items()):
                if value is attributes.get(key, _ABSENT):
                    continue
                changed = changed or f"{name}.{key}"
                if key in attributes:
                    setattr(module, key, attributes[key])
                else:
                    delattr(module, key)
    if changed:
        raise NoStepsError(f"its forward keeps something of its own for the next one ({changed})")


@dataclass
class _Noted:
    """What the experts were asked, and which masks came to each decoder layer."""

    top_k: int = 0
    calls: list[int] = field(default_factory=list)
    masks: dict[int, list[Any]] = field(default_factory=dict)


class _Trial:
    """A few tokens through the model."""

    def __init__(self, model: PreTrainedModel, runtime: SlotExpertRuntime) -> None:
        self._model, self._runtime = model, runtime
        self._config: Any = model.config.get_text_config()
        self._device = runtime.pool.blocks[0].device
        self._ids = torch.arange(1, 1 + _TRIED, device=self._device)[None]
        self._positions = torch.full((1, 1), _TRIED - 1, device=self._device)
        self._layers = [layer for _, layer in decoder_layers(model)[1]]
        self._noted = _Noted()

    def plan(self) -> StepPlan:
        """Run all tokens at once; what lies in the cache then tells its shapes."""
        cache = DynamicCache(config=self._model.config)
        odd = {type(layer).__name__ for layer in cache.layers if type(layer) not in (DynamicLayer, DynamicSlidingWindowLayer)}
        if odd:
            raise NoStepsError(f"its cache has parts that are no plain keys and values: {', '.join(sorted(odd))}")
        self._expected = self._forward(self._ids, cache)[:, -1]
        layers = tuple(_shape_of(layer, self._model.dtype) for layer in cache.layers)
        calls = self._noted.calls
        if calls != list(range(self._runtime.layers)):
            raise NoStepsError(f"a forward calls the layers' experts in the order {calls}")
        top_k = self._noted.top_k
        layers = tuple(map(_seen_through, layers, self._windows(layers)))
        return StepPlan(layers, self._types(layers), top_k)

    def _windows(self, layers: tuple[LayerShape, ...]) -> list[int | None]:
        """How far each layer looks back, by the mask it gets after a long sequence. No layer is computed."""
        cache = StepCache(layers, 1, 1, self._model.dtype, self._device)
        cache.advance(_PRETENDED)
        masks: list[Any] = []

        def pass_by(hidden: torch.Tensor, *_: Any, attention_mask: Any, **__: Any) -> torch.Tensor:
            masks.append(attention_mask)
            return hidden

        with contextlib.ExitStack() as restored:
            for layer in self._layers:
                layer.forward = pass_by
                restored.callback(delattr, layer, "forward")
            self._forward(self._ids[:, -1:], cache, position_ids=self._positions)
        windows = [_window_of(mask) for mask in masks]
        if len(windows) != len(layers) and len(set(windows)) > 1:
            raise NoStepsError(f"its {len(windows)} decoder layers look back differently far, and its cache has {len(layers)}")
        return windows if len(windows) == len(layers) else [windows[0]] * len(layers)

    def _types(self, layers: tuple[LayerShape, ...]) -> dict[str, int | None] | None:
        """A mask for each type of layer only where one for all does not do."""
        if len({layer.window for layer in layers}) == 1:
            return None
        types = getattr(self._config, "layer_types", None) or []
        if len(types) != len(layers):
            raise NoStepsError("its layers look back differently far, and its configuration does not say which")
        windows: dict[str, int | None] = {}
        for name, layer in zip(types, layers, strict=True):
            if windows.setdefault(name, layer.window) != layer.window:
                raise NoStepsError(f"its layers of the type {name} look back differently far")
        return windows

    def check(self, plan: StepPlan) -> None:
        """The last token as a step. Raises NoStepsError when that is not what the forward computes, or cannot be recorded."""
        state = StepState(self._model, plan, 1, _CAPACITY, self._device)
        self._forward(self._ids[:, :-1], state.cache)
        state.load(self._ids[:, -1:], self._positions, None)
        masks, reads = state.masks(), _HostReads()
        with self._noting_masks(), reads, state.cache.writing_at(state.slot):
            logits = self._forward(self._ids[:, -1:], state.cache, attention_mask=masks, position_ids=state.positions)[:, -1]
        if reads.first:
            raise NoStepsError(f"its forward reads back from the device ({reads.first})")
        self._check_masks(masks)
        worst = float((logits - self._expected).abs().max() / self._expected.abs().max())
        if not worst <= _TOLERANCE[self._model.dtype]:
            raise NoStepsError(f"a step's logits differ from the forward's by {worst:.2g} of the largest")

    def _check_masks(self, masks: Any) -> None:
        types = getattr(self._config, "layer_types", None)
        for number in range(len(self._layers)):
            wanted = masks[types[number]] if isinstance(masks, dict) and types is not None else masks
            came = self._noted.masks.get(number, [])
            if not came or any(mask is not wanted for mask in came):
                raise NoStepsError(f"decoder layer {number} does not look through the mask that the forward is given")

    def _forward(self, ids: torch.Tensor, cache: Any, **more: Any) -> torch.Tensor:
        model, more = self._model, {**more, cache_name(self._model): cache}
        self._noted.calls.clear()
        with torch.no_grad(), self._runtime.recording(self._answer):
            output = type(model).forward(model, input_ids=ids, use_cache=True, return_dict=True, **more)
        logits: torch.Tensor = output.logits.float()
        return logits

    def _answer(self, layer: int, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """In place of the experts."""
        self._noted.calls.append(layer)
        self._noted.top_k = max(self._noted.top_k, index.shape[-1])
        return torch.zeros_like(hidden)

    @contextlib.contextmanager
    def _noting_masks(self) -> Iterator[None]:
        with contextlib.ExitStack() as hooks:
            for number, layer in enumerate(self._layers):
                for module in layer.modules():
                    hook = module.register_forward_pre_hook(self._note_mask(number), with_kwargs=True)
                    hooks.callback(hook.remove)
            yield

    def _note_mask(self, number: int) -> Any:
        def note(_module: nn.Module, _args: Any, kwargs: dict[str, Any]) -> None:
            if "attention_mask" in kwargs:
                self._noted.masks.setdefault(number, []).append(kwargs["attention_mask"])

        return note


def cache_name(model: PreTrainedModel) -> str:
    """What the model's forward calls its cache: "cache" since transformers 5.24."""
    return "cache" if "cache" in inspect.signature(type(model).forward).parameters else "past_key_values"


def _shape_of(layer: Any, dtype: torch.dtype) -> LayerShape:
    keys, values = layer.keys, layer.values
    if keys is None or values is None or keys.dim() != 4 or values.dim() != 4 or keys.shape[1] != values.shape[1]:
        raise NoStepsError("its cache has layers without keys and values [batch, heads, positions, width]")
    if {keys.dtype, values.dtype} != {dtype}:
        raise NoStepsError(f"its cache holds {keys.dtype}, the model is {dtype}")
    return LayerShape(keys.shape[1], keys.shape[3], values.shape[3], getattr(layer, "sliding_window", None))


def _seen_through(layer: LayerShape, window: int | None) -> LayerShape:
    """``layer``, so far with the window of transformers' own cache, with that of its mask."""
    if layer.window is not None and (window is None or window > layer.window):
        raise NoStepsError(f"its cache forgets what is {layer.window} positions back, its masks do not")
    return layer._replace(window=window)


def _window_of(mask: Any) -> int | None:
    """How many positions the mask of one token, [1, 1, 1, positions], shows: the last ones, or all (None)."""
    if mask is None:
        return None
    if not isinstance(mask, torch.Tensor) or tuple(mask.shape[:3]) != (1, 1, 1) or mask.shape[3] <= _PRETENDED:
        raise NoStepsError(f"its masks are of another kind ({getattr(mask, 'shape', type(mask).__name__)})")
    shown = mask.flatten() if mask.dtype == torch.bool else mask.flatten() == 0
    count = int(shown.sum())
    if not bool(shown[len(shown) - count :].all()):
        raise NoStepsError("its masks show something else than the latest positions")
    return None if count == len(shown) else count


class _HostReads(TorchDispatchMode):
    """Notes the first operation that makes the host wait for the device's numbers, or the device for the host's."""

    def __init__(self) -> None:
        super().__init__()
        self.first = ""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if not self.first and (_reads(func, args) or _crosses(func, args, result)):
            self.first = str(func)
        return result


def _reads(func: Any, args: Any) -> bool:
    name = func.overloadpacket.__name__
    if name in _READS:
        return True
    if name in ("index", "index_put", "index_put_"):
        by_mask = any(part is not None and part.dtype in (torch.bool, torch.uint8) for part in args[1])
        return by_mask and not (name != "index" and args[2].numel() == 1)  # one number for all of a mask is filled in
    return name == "repeat_interleave" and func._overloadname == "Tensor"


def _crosses(func: Any, args: Any, result: Any) -> bool:
    """Whether a copy goes from one kind of device to another."""
    if func.overloadpacket.__name__ not in ("_to_copy", "copy_"):
        return False
    source = args[1] if func.overloadpacket.__name__ == "copy_" else args[0]
    return bool(source.device.type != result.device.type)
