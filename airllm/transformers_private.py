"""The only module that touches private names of transformers.

Everything here follows ``PreTrainedModel.from_pretrained`` step by step, with transformers' own functions, so that what
airllm loads is what transformers would load. The names used are the same in transformers 5.8 to 5.24; `self_test`
proves that for the installed release.
"""

from __future__ import annotations

import copy
import functools
import inspect
import os
import sys
import tempfile
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
import transformers
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PretrainedConfig,
    PreTrainedModel,
    core_model_loading,
)
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.monkey_patching import patch_output_recorders
from transformers.utils import output_capturing

from airllm.errors import AirLLMError, UnsupportedModelError
from airllm.quantised import whole_blocks

# Building under transformers' contexts sets torch's default dtype and patches its initialisers, for the whole process.
_build_lock = threading.RLock()


# --- the model without its weights ------------------------------------------------------------------------------------


def causal_lm_class(
    config: PretrainedConfig, folder: str | os.PathLike[str] | None, trust_remote_code: bool
) -> tuple[type[PreTrainedModel], PretrainedConfig]:
    """The class ``AutoModelForCausalLM.from_pretrained`` would pick, and the configuration that class wants.

    A model that transformers has only together with what sees or hears is that model, whole: its text alone works too.

    A configuration class that transformers knows always gets transformers' own model, whatever ``auto_map`` says.
    """
    from transformers.models.auto import auto_factory

    for auto in (AutoModelForCausalLM, AutoModelForImageTextToText):
        mapping = auto._model_mapping
        if type(config) in mapping:
            cls = auto_factory._get_model_class(config, mapping)
            text_config = config.sub_configs.get("text_config")
            if text_config is not None and getattr(cls, "config_class", None) is text_config:
                config = config.get_text_config()
            return cls, config
    reference = (getattr(config, "auto_map", None) or {}).get("AutoModelForCausalLM")
    if reference is None or not trust_remote_code or folder is None:
        raise UnsupportedModelError(
            f"transformers {transformers.__version__} has no causal language model for {type(config).__name__} "
            f"(model_type {config.model_type!r})"
            + ("; the checkpoint brings its own code: pass trust_remote_code=True if you trust it" if reference else "")
        )
    from transformers.dynamic_module_utils import get_class_from_dynamic_module

    cls = get_class_from_dynamic_module(reference, str(folder))
    return auto_factory.add_generation_mixin_to_remote_model(cls), config


def build_on_meta(cls: type[PreTrainedModel], config: PretrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
    """An instance of ``cls`` in evaluation mode: parameters and persistent buffers on meta, other buffers filled in.

    Weights are left untied, as in ``from_pretrained``, until `tie` is called.
    """
    with _build_lock:
        contexts = cls.get_init_context(dtype, False, False, False)
        with transformers.utils.generic.ContextManagers(contexts):
            model = cls(config)
            patch_output_recorders(model)
        _fill_own_buffers(model)
    return model.eval()


def _fill_own_buffers(model: PreTrainedModel) -> None:
    """Give the non-persistent buffers (rotary frequencies, masks) memory and the values transformers computes."""
    for tensor in model.state_dict(keep_vars=True).values():
        if isinstance(tensor, torch.Tensor):
            tensor._is_hf_initialized = True  # type: ignore[attr-defined]
    for name, buffer in list(model.named_non_persistent_buffers()):
        _replace(model, name, torch.empty_like(buffer, device="cpu"))
    _initialise(model)


def fill_missing(model: PreTrainedModel, names: Iterable[str]) -> None:
    """Initialise tensors that the checkpoint may leave out, as transformers would; they become real CPU tensors."""
    names = set(names)
    if not names:
        return
    for name in names:
        _replace(model, name, torch.empty_like(model.get_parameter_or_buffer(name), device="cpu"))
    with _build_lock:
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            tensor._is_hf_initialized = name not in names  # type: ignore[attr-defined]
        for module in model.modules():  # the initialiser of a parent module may be the one that fills it
            module._is_hf_initialized = False  # type: ignore[assignment]
        _initialise(model)


def _initialise(model: Any) -> None:
    """Run transformers' initialisers on every tensor that is not marked as initialised."""
    model.initialize_weights()


def _replace(model: nn.Module, name: str, tensor: torch.Tensor) -> None:
    owner, _, leaf = name.rpartition(".")
    module = model.get_submodule(owner)
    is_buffer = leaf in module._buffers
    setattr(module, leaf, tensor if is_buffer else nn.Parameter(tensor, requires_grad=False))


def load_generation_config(model: PreTrainedModel, folder: str | os.PathLike[str], trust_remote_code: bool) -> None:
    """``generation_config.json`` where the folder has one, else what ``config.json`` says, as ``from_pretrained`` does.

    With ``trust_remote_code`` a ``custom_generate`` folder in the checkpoint replaces ``model.generate``.
    """
    adjust: Any = getattr(model, "adjust_generation_fn", None)
    if adjust is None or not model.can_generate():
        return
    adjust(
        None,
        False,
        None,
        str(folder),
        cache_dir=None,
        force_download=False,
        proxies=None,
        local_files_only=True,
        token=None,
        revision=None,
        subfolder="",
        trust_remote_code=trust_remote_code,
    )


# --- dtypes -----------------------------------------------------------------------------------------------------------


class DtypePlan:
    """The dtype each tensor of the model is loaded in: the model's, except what its class keeps in float32."""

    def __init__(self, model: PreTrainedModel, dtype: torch.dtype) -> None:
        self._plan: dict[str, torch.dtype] = model._get_dtype_plan(dtype)
        if self._plan:
            self._pattern, self._names, _ = core_model_loading.build_glob_alternation(list(self._plan))

    def of(self, name: str, on_meta: torch.Tensor) -> torch.dtype:
        """``name`` is the model's name, ``on_meta`` the tensor the model was built with."""
        if self._plan and (match := self._pattern.search(name)) is not None:
            return self._plan[self._names[match.lastgroup or ""]]
        return on_meta.dtype


# --- names ------------------------------------------------------------------------------------------------------------

natural_key = core_model_loading.dot_natural_key
"""Sort key in which transformers reads a checkpoint: experts come in the order of their numbers."""


class Conversions:
    """transformers' renamings and converters for one model, applied to checkpoint keys.

    Some renamings remember which keys they have seen, so keys must be passed once each, in the order of `natural_key`.
    """

    def __init__(self, model: PreTrainedModel, wanted: dict[str, torch.Tensor], quantiser: Any = None) -> None:
        self._model = model
        self._prefix = model.base_model_prefix
        self._wanted = wanted
        mapping = get_model_conversion_mapping(model, None, quantiser)
        self._renamings = [entry for entry in mapping if isinstance(entry, core_model_loading.WeightRenaming)]
        self._converters = [entry for entry in mapping if isinstance(entry, core_model_loading.WeightConverter)]
        self._block = getattr(getattr(quantiser, "quantization_config", None), "weight_block_size", None)
        self._by_pattern = {pattern: entry for entry in self._converters for pattern in entry.source_patterns}

    def rename(self, key: str) -> tuple[str, str | None]:
        """Checkpoint key -> (name in the model, source pattern of the converter it goes through or None).

        The name is not in the model when the key is not wanted. With a converter the name is that of its first target.
        """
        name, pattern = core_model_loading.rename_source_key(
            key, self._renamings, self._converters, self._prefix, self._wanted
        )
        if name not in self._wanted and key in self._wanted:  # already in the model's own naming
            name, pattern = core_model_loading.rename_source_key(key, [], [], self._prefix, self._wanted)
        return name, pattern

    def converter(self, pattern: str) -> Any:
        """The converter with this source pattern."""
        return self._by_pattern[pattern]

    def convert(
        self, converter: Any, target: str, sources: Mapping[str, Sequence[torch.Tensor]]
    ) -> dict[str, torch.Tensor]:
        """Run ``converter`` on tensors listed by source pattern; returns the model's names with their tensors."""
        # A converter keeps what it collects, so each conversion gets a converter of its own, as in transformers.
        own = copy.deepcopy(converter)
        cut = None
        if self._block is not None:
            sources, cut = whole_blocks(sources, self._block)
        for pattern, tensors in sources.items():
            for tensor in tensors:
                own.add_tensor(target, pattern, pattern, tensor)
        made = own.convert(target, model=self._model, config=self._model.config)
        plain = {name: value[0] if isinstance(value, list) else value for name, value in made.items()}
        return plain if cut is None else {name: value[: cut[0], : cut[1]] for name, value in plain.items()}


def layout_of(converter: Any) -> str | None:
    """How a converter arranges bytes, if it only arranges them.

    ``"stack"``: source e becomes target[e]. ``"stack_join"``: the sources numbered e fill the rows of target[e], in the
    order of the source patterns. ``"join"``: the sources fill the rows of the target. None: anything else.
    """
    ops = converter.operations
    if len(converter.target_patterns) != 1 or not ops:
        return None
    kinds = [(type(op), getattr(op, "dim", None)) for op in ops]
    stack = (core_model_loading.MergeModulelist, 0)
    if kinds == [stack]:
        return "stack" if len(converter.source_patterns) == 1 else None
    if kinds == [stack, (core_model_loading.Concatenate, 1)]:
        return "stack_join"
    if kinds == [(core_model_loading.Concatenate, 0)]:
        return "join"
    return None


def by_expert(converter: Any) -> str | None:
    """How one expert's part of the result can be made from that expert's sources alone.

    ``"listed"``: each source pattern lists a tensor per expert. ``"stacked"``: each source has the expert axis first. None:
    the operations look across experts, or cannot be told not to.
    """
    ops = [op for op in converter.operations if not _dequantises(op)]
    if len(converter.target_patterns) != 1:
        return None
    listed = bool(ops) and isinstance(ops[0], core_model_loading.MergeModulelist) and ops[0].dim == 0
    rest = ops[1:] if listed else ops
    if not all(_within_expert(op) for op in rest):
        return None
    return "listed" if listed else "stacked"


def _within_expert(op: Any) -> bool:
    """Whether an operation leaves the first axis alone."""
    axes = [getattr(op, name) for name in ("dim", "dim0", "dim1") if hasattr(op, name)]
    return bool(axes) and all(axis > 0 for axis in axes)


def _dequantises(op: Any) -> bool:
    return getattr(op, "hf_quantizer", None) is not None


def takes_stored_dtype(converter: Any) -> bool:
    """Whether a converter wants its sources as they are stored: it dequantises them."""
    return any(_dequantises(op) for op in converter.operations)


def leaves_alone(converter: Any, shape: tuple[int, ...], wanted: tuple[int, ...]) -> bool:
    """Whether a single source of this shape, stored unquantised, goes through a converter unchanged."""
    ops = [op for op in converter.operations if not _dequantises(op)]
    return shape == wanted and all(getattr(op, "check_dims", False) for op in ops)


def not_reported(model: PreTrainedModel, missing: set[str], unexpected: set[str]) -> tuple[set[str], set[str]]:
    """Drop the names that the model class declares harmless; both sets hold names as the model would spell them."""
    info: Any = SimpleNamespace(missing_keys=set(missing), unexpected_keys=set(unexpected))
    model._adjust_missing_and_unexpected_keys(info)
    return info.missing_keys, info.unexpected_keys


# --- tied weights -----------------------------------------------------------------------------------------------------


def tied_groups(model: PreTrainedModel) -> list[set[str]]:
    """Sets of names that share one tensor. A checkpoint needs to hold only one of each set."""
    groups: dict[str, set[str]] = {}
    for target, source in model.all_tied_weights_keys.items():
        groups.setdefault(source, {source}).add(target)
    return list(groups.values())


def tie(model: PreTrainedModel, missing: set[str]) -> None:
    """Tie the weights as ``from_pretrained`` does: from the tensor that was loaded to those in ``missing``.

    Where both were loaded and differ they stay apart, and transformers says so.
    """
    model.tie_weights(missing_keys=set(missing), recompute_mapping=False)


def layer_configs(config: PretrainedConfig) -> list[Any]:
    """The configuration of each decoder layer: since 5.20 layers may have heads and widths of their own."""
    text: Any = config.get_text_config()
    own = getattr(text, "per_layer_config", None)
    return [text] * text.num_hidden_layers if own is None else list(own)


# --- experts ----------------------------------------------------------------------------------------------------------


def expert_modules(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """The fused experts modules: a down projection with an expert axis beside one that leads into the experts."""
    return [(name, module) for name, module in model.named_modules() if _is_experts(module)]


def _is_experts(module: nn.Module) -> bool:
    own = module._parameters
    down, into = own.get("down_proj"), own.get("gate_up_proj", own.get("up_proj"))
    return down is not None and into is not None and down.dim() == into.dim() == 3


def call_arguments(module: nn.Module) -> list[str]:
    """The names of a module's arguments, of its own forward below transformers' dispatch between implementations."""
    forward = inspect.unwrap(type(module).forward)
    return list(inspect.signature(forward).parameters)[1:]


def own_experts_forward(module: nn.Module) -> Callable[..., torch.Tensor]:
    """transformers' eager forward of an experts module, below its dispatch between implementations: unbound."""
    return inspect.unwrap(type(module).forward)


# --- attention --------------------------------------------------------------------------------------------------------


@contextmanager
def attention_replaced(config: PretrainedConfig, function: Callable[..., Any]) -> Iterator[str]:
    """Inside, models with ``config`` compute attention by ``function``. Gives the name of what it stands in for."""
    name, stand_in = config._attn_implementation or "eager", f"airllm_{id(function)}"
    ALL_ATTENTION_FUNCTIONS[stand_in] = function
    config._attn_implementation = stand_in
    try:
        yield name
    finally:
        config._attn_implementation = name
        del ALL_ATTENTION_FUNCTIONS[stand_in]


def attention_function(name: str, module: nn.Module) -> Callable[..., Any]:
    """What an attention ``module`` calls under ``name``; "eager" is a function of the file that defines the module."""
    if name == "eager":
        function: Callable[..., Any] = sys.modules[type(module).__module__].eager_attention_forward
        return function
    return ALL_ATTENTION_FUNCTIONS[name]


# --- collected outputs ------------------------------------------------------------------------------------------------


def listen(hooks: Mapping[int, Callable[..., Any]]) -> bool:
    """Whether these forward hooks of a module do anything now.

    The hooks by which transformers collects hidden states, attentions and router logits stay in a model from the first
    forward that was asked for some on, and are idle in all others.
    """
    if not hooks:
        return False
    wanted = output_capturing._active_collector.get() or {}
    if any(not key.startswith("_") for key in wanted):
        return True
    return any(getattr(hook, "__module__", "") != output_capturing.__name__ for hook in hooks.values())


# --- generation -------------------------------------------------------------------------------------------------------

ASKED_OF_AN_ASSISTANT = frozenset({"_supports_logits_to_keep"})
"""What ``generate`` of a decoder-only model calls on its ``assistant_model`` beside public names."""


def replace_cache_preparation(model: PreTrainedModel, prepare: Callable[..., Any]) -> None:
    """Let ``model.generate`` ask ``prepare(original, generation_config, model_kwargs, mode, batch_size, max_length)`` for its
    cache. ``prepare`` puts one into ``model_kwargs``, or calls ``original`` with the rest of its arguments."""
    kind: Any = type(model)
    reference, original = weakref.ref(model), kind._prepare_cache_for_generation

    @functools.wraps(original)
    def replaced(*call: Any) -> Any:
        return prepare(functools.partial(original, reference()), *call)

    model._prepare_cache_for_generation = replaced  # type: ignore[assignment]


# --- self test --------------------------------------------------------------------------------------------------------


def self_test() -> None:
    """Load a random two-layer mixture of experts through this module and compare it bit for bit with transformers.

    Raises:
        AirLLMError: the installed transformers does not behave as this module expects; names the first difference.
    """
    from safetensors.torch import load_file

    # transformers 5.8 draws random numbers even where it loads every tensor
    with torch.random.fork_rng(devices=[]), tempfile.TemporaryDirectory() as folder:
        _tiny_model().save_pretrained(folder)
        reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, experts_implementation="eager")
        stored = load_file(os.path.join(folder, "model.safetensors"))
        config = copy.deepcopy(reference.config)
        cls, config = causal_lm_class(config, folder, False)
        model = build_on_meta(cls, config, torch.bfloat16)
        _load_in_memory(model, stored)
        load_generation_config(model, folder, False)
    tie(model, {name for name, tensor in model.state_dict().items() if tensor.is_meta})
    _compare(model, reference)


def _tiny_model() -> PreTrainedModel:
    from transformers import MixtralConfig

    config = MixtralConfig(
        vocab_size=64,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=12,
        num_local_experts=11,  # more than ten: their order is numeric, not alphabetic
        num_experts_per_tok=2,
        tie_word_embeddings=True,
    )
    with _build_lock, torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return AutoModelForCausalLM.from_config(config)


def _load_in_memory(model: PreTrainedModel, stored: Mapping[str, torch.Tensor]) -> None:
    wanted = model.state_dict()
    conversions = Conversions(model, wanted)
    plan = DtypePlan(model, torch.bfloat16)
    through: dict[str, tuple[Any, dict[str, list[torch.Tensor]]]] = {}
    for key in sorted(stored, key=natural_key):
        name, pattern = conversions.rename(key)
        if name not in wanted:
            raise AirLLMError(f"self test: transformers {transformers.__version__} has no place for {key}")
        tensor = stored[key].to(plan.of(name, wanted[name]))
        if pattern is None:
            _replace(model, name, tensor)
        else:
            through.setdefault(name, (conversions.converter(pattern), {}))[1].setdefault(pattern, []).append(tensor)
    if not through or any(layout_of(converter) is None for converter, _ in through.values()):
        raise AirLLMError(f"self test: the expert layout of transformers {transformers.__version__} is not known")
    for name, (converter, sources) in through.items():
        for made, tensor in conversions.convert(converter, name, sources).items():
            _replace(model, made, tensor)


def _compare(model: PreTrainedModel, reference: PreTrainedModel) -> None:
    ours = dict(model.named_parameters()) | dict(model.named_buffers())
    theirs = dict(reference.named_parameters()) | dict(reference.named_buffers())
    differing = sorted(ours.keys() ^ theirs.keys())
    for name in ours.keys() & theirs.keys():
        if ours[name].dtype != theirs[name].dtype or not torch.equal(ours[name], theirs[name]):
            differing.append(name)
    ids = torch.arange(7)[None]
    if not differing:
        with torch.no_grad():
            if not torch.equal(model(ids).logits, reference(ids).logits):
                differing.append("logits")
    if model.generation_config.to_dict() != reference.generation_config.to_dict():
        differing.append("generation_config")
    if not expert_modules(model):
        differing.append("no experts module found")
    if differing:
        raise AirLLMError(
            f"self test: transformers {transformers.__version__} loads differently: {', '.join(differing)}. "
            "Install a release between 5.8 and 5.24."
        )
