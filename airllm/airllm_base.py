"""The public model class: wires the rooms together and hands out what AirLLM's users expect to find on it."""

from __future__ import annotations

import contextlib
import copy
import logging
import os
from typing import Any

import torch
from transformers import AutoTokenizer, GenerationConfig, PretrainedConfig, PreTrainedModel

from airllm import guard
from airllm.checkpoint import CheckpointIndex, TensorReader, has_bin_weights
from airllm.compression import open_compressed
from airllm.dense_weights import DenseWeights, dense_resident_bytes
from airllm.errors import OptionError, UnsupportedModelError
from airllm.layer_files import find_or_create_split, open_unsplit
from airllm.locate import locate
from airllm.options import DEFAULT_DEVICE, Options, parse_options
from airllm.profiler import LayeredProfiler
from airllm.quantised import quantisation_of
from airllm.skeleton import build_skeleton, decoder_layers, load_config, resolve_dtype
from airllm.slot_backend import SlotBackend
from airllm.transformers_private import ASKED_OF_AN_ASSISTANT
from airllm.weight_map import WeightMap, build_weight_map

log = logging.getLogger(__name__)

_TOKENIZER_FILES = ("tokenizer*", "vocab*", "merges*", "spiece*", "sentencepiece*", "*.model", "*.tiktoken", "*.bpe")


class AirLLMBaseModel(SlotBackend):
    """A causal language model whose decoder layers pass through the device one at a time, or, with
    ``expert_cache_backend="slot"``, whose experts live in slots and whose dense weights stay there as far as ``resident_gb``
    reaches.

    ``generate``, ``forward`` and calling it do what the transformers model ``self.model`` does. One call runs at a
    time; calls from other threads wait. Attributes that this class does not have are those of ``self.model``.
    """

    def __init__(
        self,
        model_local_path_or_repo_id: str | os.PathLike[str],
        device: Any = DEFAULT_DEVICE,
        dtype: Any = None,
        max_seq_len: int = 512,
        layer_shards_saving_path: str | os.PathLike[str] | None = None,
        profiling_mode: bool = False,
        compression: str | None = None,
        hf_token: str | bool | None = None,
        prefetching: bool = True,
        delete_original: bool = False,
        **more: Any,
    ) -> None:
        """Load a model. ``more`` takes the other keywords of `airllm.options.Options`.

        Raises:
            OptionError, DeviceError: a keyword is wrong; nothing was touched.
            CheckpointError, WeightMapError, UnsupportedModelError: the checkpoint is damaged or does not fit.
        """
        self._start(
            parse_options(
                model_local_path_or_repo_id,
                device=device,
                dtype=dtype,
                max_seq_len=max_seq_len,
                layer_shards_saving_path=layer_shards_saving_path,
                profiling_mode=profiling_mode,
                compression=compression,
                hf_token=hf_token,
                prefetching=prefetching,
                delete_original=delete_original,
                **more,
            )
        )

    @classmethod
    def from_pretrained(cls, model_local_path_or_repo_id: str | os.PathLike[str], *args: Any, **kwargs: Any) -> Any:
        """The same as the constructor."""
        return cls(model_local_path_or_repo_id, *args, **kwargs)

    @classmethod
    def from_options(cls, options: Options) -> Any:
        """A model from keywords that were checked before."""
        made = cls.__new__(cls)
        made._start(options)
        return made

    # --- loading ------------------------------------------------------------------------------------------------------

    def _start(self, options: Options) -> None:
        self.options = options
        self.device = options.device
        self.running_device = str(options.device)
        self.max_seq_len = options.max_seq_len
        self.prefetching = options.prefetching
        self.compression = options.compression
        self.hf_token = options.hf_token
        self.profiler = LayeredProfiler() if options.profiling_mode else None
        self._warned_length = False
        self._resources = contextlib.ExitStack()
        self.model_local_path = locate(
            options.model,
            revision=options.revision,
            cache_dir=options.cache_dir,
            local_files_only=options.local_files_only,
            token=options.hf_token,
            trust_remote_code=options.trust_remote_code,
        )
        self.checkpoint_path = self.model_local_path
        self.config = load_config(self.model_local_path, trust_remote_code=options.trust_remote_code)
        self.refuse_backend(options, self.config)
        try:
            # The caller may be in inference mode, whose tensors could not be filled outside it, or have a default
            # device on which host memory would land.
            with torch.inference_mode(False), torch.device("cpu"):
                self._load()
        except BaseException:
            self._resources.close()
            raise
        self.dtype = self.running_dtype = self.model.dtype
        self.layer_names_dict = layer_names(self.model)
        self.tokenizer = self._load_tokenizer()

    @classmethod
    def refuse_backend(cls, options: Options, config: PretrainedConfig) -> None:
        """Raises UnsupportedModelError for slots asked of a model whose configuration knows of no experts.

        Said before the weights are fetched. Whether the experts are such that slots can serve them shows on the model.
        """
        if options.expert_cache_backend == "slot" and not _mentions_experts(config.to_dict()):
            raise UnsupportedModelError(
                f"expert_cache_backend='slot' keeps experts on the device, and model_type {config.model_type!r} is dense, it "
                "has none: leave it out to stream the layers"
            )

    def _load(self) -> None:
        if self.options.expert_cache_backend == "slot":
            self._load_slots()
        else:
            self._load_streamed()

    def _load_streamed(self) -> None:
        """Build the model, read what stays on the device, and let the decoder layers stream."""
        model, weight_map, reader = self._build(self.options.experts_implementation, self.options.trust_remote_code)
        dense = DenseWeights(model, weight_map, reader, self.options)
        streamer = dense.streamer
        assert streamer is not None
        self._resources.callback(streamer.close)
        dense.require_room()
        dense.load("reading embeddings and head")
        dense.assert_loaded()
        self._reader, self._streamer = reader, streamer
        self._finish(model, guard.ForwardGuard(streamer, self.profiler))

    def _build(
        self, experts_implementation: str | None, trust_remote_code: bool
    ) -> tuple[PreTrainedModel, WeightMap, TensorReader]:
        """The model on meta, where its weights are, and what reads them (closed with the model)."""
        options = self.options
        index, reader = self._open_weights()
        self._resources.callback(reader.close)
        dtype = resolve_dtype(options.dtype, self.config, index)
        model = build_skeleton(
            self.config,
            dtype=dtype,
            attn_implementation=options.attn_implementation,
            experts_implementation=experts_implementation,
            trust_remote_code=trust_remote_code,
            folder=self.model_local_path,
        )
        quantisation = quantisation_of(self.config)
        return model, build_weight_map(model, index, dtype=dtype, quantisation=quantisation), reader

    def _open_weights(self) -> tuple[CheckpointIndex, TensorReader]:
        """The files as they are; a split of them when it was asked for, or when nothing else can be streamed."""
        options, folder = self.options, self.model_local_path
        asked = options.layer_shards_saving_path or options.compression or options.delete_original
        if not asked and not has_bin_weights(folder):
            index = open_unsplit(folder)
            self.checkpoint_path = index.folder
            return index, TensorReader()
        self.checkpoint_path = find_or_create_split(
            folder,
            options.layer_shards_saving_path,
            compression=options.compression,
            delete_original=options.delete_original,
        )
        if options.compression is None:
            return CheckpointIndex.open(self.checkpoint_path), TensorReader()
        return open_compressed(self.checkpoint_path, dtype=options.dtype)

    def _finish(self, model: PreTrainedModel, forward_guard: guard.ForwardGuard) -> None:
        """The last steps of `_load`: guard the forward, and fix the model where it is."""
        forward_guard.attach(model)
        guard.fix_in_place(model, self.options.device, model.dtype)
        if model.generation_config is not None:
            # A static cache makes generate compile the forward, and compiled code cannot follow weights that move.
            model.generation_config.disable_compile = True
        self._guard = forward_guard
        self.model = model

    def _load_tokenizer(self) -> Any:
        """The checkpoint's tokenizer, or None: token ids can still be generated from token ids."""
        if not any(any(self.model_local_path.glob(pattern)) for pattern in _TOKENIZER_FILES):
            # Asked anyway, transformers makes some families' tokenizer out of nothing, with an empty vocabulary.
            log.warning("%s: no tokenizer (no such files in the folder)", self.model_local_path)
            return None
        try:
            return AutoTokenizer.from_pretrained(
                str(self.model_local_path),
                trust_remote_code=self.options.trust_remote_code,
                local_files_only=True,
            )
        except Exception as error:  # noqa: BLE001 - tokenizer classes raise whatever their files make them
            log.warning("%s: no tokenizer (%s: %s)", self.model_local_path, type(error).__name__, error)
            return None

    # --- use ----------------------------------------------------------------------------------------------------------

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """``model.generate`` of transformers. Tensors are moved to the device first.

        Raises:
            NonFiniteError: the logits hold NaN or +inf; the message names the layer they come from.
            OptionError: the token ids have another shape than [prompts, tokens].
            AirLLMError: the model was closed.
        """
        args = tuple(self._on_device(value) for value in args)
        kwargs = {name: self._on_device(value) for name, value in kwargs.items()}
        self._look_at_ids(args, kwargs)
        with contextlib.ExitStack() as locks:
            kwargs = self._unwrap_assistant(kwargs, locks)
            locks.enter_context(self._guard.checking())
            self._guard.refuse_closed()
            generate: Any = self.model.generate
            stepper = self._stepper if kwargs.get("assistant_model") is None else None
            if stepper is None:
                return generate(*args, **_without_compile(kwargs))
            locks.enter_context(stepper.generating())
            return stepper.hand_out(generate(*args, **_without_compile(kwargs)))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """One forward of ``self.model``, without gradients. Tensors are moved to the device first."""
        args = tuple(self._on_device(value) for value in args)
        kwargs = {name: self._on_device(value) for name, value in kwargs.items()}
        with torch.no_grad():
            return self.model(*args, **kwargs)

    __call__ = forward

    def _on_device(self, value: Any) -> Any:
        return value.to(self.device) if isinstance(value, torch.Tensor) else value

    def _look_at_ids(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        # AirLLM has the keyword, with 512 as its default, and never enforced it. Refusing here would break scripts
        # that have worked for years with longer prompts, and a streamed model needs no such limit; so it is said once.
        ids = _ids_of(args, kwargs)
        if ids is not None and not self._warned_length and ids.shape[1] > self.max_seq_len:
            self._warned_length = True
            log.warning(
                "the prompt has %d tokens, more than max_seq_len=%d: it is not cut off", ids.shape[1], self.max_seq_len
            )

    def _unwrap_assistant(self, kwargs: dict[str, Any], locks: contextlib.ExitStack) -> dict[str, Any]:
        """An assistant that is one of ours: its transformers model, and its lock for as long as it assists."""
        assistant = kwargs.get("assistant_model")
        if not isinstance(assistant, AirLLMBaseModel):
            return kwargs
        # Always in the same order, so that two models assisting each other cannot wait for one another.
        for each in sorted({self._guard, assistant._guard}, key=id):
            locks.enter_context(each.lock)
        return {**kwargs, "assistant_model": assistant.model}

    @property
    def generation_config(self) -> GenerationConfig | None:
        """That of ``self.model``."""
        return self.model.generation_config

    @generation_config.setter
    def generation_config(self, value: GenerationConfig) -> None:
        self.model.generation_config = value

    def get_stream_stats(self) -> dict[str, Any]:
        """What was read and moved since loading, and the sizes of what is held. Bytes and seconds; all measured."""
        if self._streamer is None:
            raise UnsupportedModelError(
                "nothing is streamed: all dense weights stay on the device (resident_gb) beside the slots, see "
                "get_expert_cache_stats()"
            )
        return {
            "bytes_read": self._reader.bytes_read,
            "reads": self._reader.reads,
            "dense_resident_bytes": dense_resident_bytes(self.model, self._streamer),
            "device_bytes": _allocated_bytes(self.device),
            **self._streamer.stats(),
        }

    # --- staying and going --------------------------------------------------------------------------------------------

    def to(self, *args: Any, **kwargs: Any) -> Any:
        """Itself when it is there already; UnsupportedModelError otherwise: its weights come and go."""
        guard.refuse_move(self.device, self.dtype, *args, **kwargs)
        return self

    def cuda(self, index: int | None = None) -> Any:
        """See `to`."""
        return self.to("cuda" if index is None else f"cuda:{index}")

    def cpu(self) -> Any:
        """See `to`."""
        return self.to("cpu")

    def half(self) -> Any:
        """See `to`."""
        return self.to(torch.float16)

    def bfloat16(self) -> Any:
        """See `to`."""
        return self.to(torch.bfloat16)

    def float(self) -> Any:
        """See `to`."""
        return self.to(torch.float32)

    def eval(self) -> Any:
        """Itself: it is always in evaluation mode."""
        return self

    def train(self, mode: bool = True) -> Any:
        """Refused: weights that come and go cannot be trained."""
        if mode:
            raise UnsupportedModelError("weights that come and go cannot be trained: take plain transformers")
        return self

    def close(self) -> None:
        """Give device and host memory back. Waits for a running call; a later call raises. Safe to call twice."""
        with self._guard.lock:
            if self._guard.closed:
                return
            with contextlib.suppress(RuntimeError):  # a device that has failed tells nothing any more
                self._last_stats = self.get_expert_cache_stats()
            self._guard.closed = True
            self._resources.close()
            guard.empty(self.model)
            self._runtime = self._stepper = None
            if self.device.type == "cuda":
                torch.cuda.empty_cache()

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __getattr__(self, name: str) -> Any:
        model = self.__dict__.get("model")
        if model is None or (name.startswith("_") and name not in ASKED_OF_AN_ASSISTANT):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(model, name)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.options.model!r}, device={self.running_device!r}, dtype={self.dtype})"


def layer_names(model: PreTrainedModel) -> dict[str, str]:
    """Module names by AirLLM's words: embed, layer_prefix, norm, lm_head. A model without one of them lacks its word."""
    prefix, _ = decoder_layers(model)
    names = {id(module): name for name, module in model.named_modules()}
    found = {"embed": names.get(id(model.get_input_embeddings())), "layer_prefix": prefix}
    parent = prefix.rpartition(".")[0]
    siblings = [name for name, _ in model.get_submodule(parent).named_children()]
    norms = [name for name in siblings if "norm" in name or name.startswith("ln")]
    if norms:
        found["norm"] = f"{parent}.{norms[-1]}" if parent else norms[-1]
    found["lm_head"] = names.get(id(model.get_output_embeddings()))
    return {word: name for word, name in found.items() if name is not None}


def _ids_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor | None:
    """The token ids [B, S] of a call of generate, if it has any. Raises OptionError for ids of another rank."""
    ids = args[0] if args else kwargs.get("input_ids", kwargs.get("inputs"))
    if not isinstance(ids, torch.Tensor) or ids.is_floating_point():
        return None
    if ids.dim() != 2:
        remedy = ": give ids[None] for one prompt" if ids.dim() == 1 else ""
        raise OptionError(f"token ids have the shape [prompts, tokens], these have {list(ids.shape)}{remedy}")
    return ids


def _without_compile(kwargs: dict[str, Any]) -> dict[str, Any]:
    """The same, with compilation of the forward switched off wherever generate would look for it."""
    own = kwargs.get("generation_config")
    if own is None:
        return {**kwargs, "disable_compile": True}
    own = copy.deepcopy(own)
    own.disable_compile = True
    return {**kwargs, "generation_config": own}


def _mentions_experts(config: dict[Any, Any]) -> bool:
    """Whether a configuration, or a part of it, counts experts: families spell that in many ways."""
    for name, value in config.items():
        if isinstance(value, dict) and _mentions_experts(value):
            return True
        counts = value if isinstance(value, list) else [value]
        if "experts" in str(name) and any(isinstance(count, int) and count > 1 for count in counts):
            return True
    return False


def _allocated_bytes(device: torch.device) -> int | None:
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else None

