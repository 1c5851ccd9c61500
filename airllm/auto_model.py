"""A checkpoint's model_type -> the class that runs it."""

from __future__ import annotations

import os
from importlib import import_module
from typing import TYPE_CHECKING, Any

from airllm.locate import locate
from airllm.options import Options, parse_options
from airllm.skeleton import load_config

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    from airllm.airllm_base import AirLLMBaseModel

# By model_type, never by the architecture's name: checkpoints of one family spell that in several ways.
_CLASSES = {
    "phimoe": "AirLLMPhiMoE",
    "llama": "AirLLMLlama2",
    "mistral": "AirLLMMistral",
    "mixtral": "AirLLMMixtral",
    "qwen": "AirLLMQWen",
    "qwen2": "AirLLMQWen2",
    "qwen3": "AirLLMQWen2",
    "chatglm": "AirLLMChatGLM",
    "baichuan": "AirLLMBaichuan",
    "internlm": "AirLLMInternLM",
    "internlm2": "AirLLMInternLM",
}
_ANY = "AirLLMBaseModel"


class AutoModel:
    """``AutoModel.from_pretrained(name_or_path, ...)`` gives the model in the class that fits it."""

    def __init__(self, *_: Any, **__: Any) -> None:
        raise OSError("AutoModel is not made directly: use AutoModel.from_pretrained(name_or_path, ...)")

    @classmethod
    def get_module_class(cls, pretrained_model_name_or_path: str | os.PathLike[str], **kwargs: Any) -> tuple[str, str]:
        """``("airllm", class name)`` for a checkpoint. Takes, and checks, the keywords of `from_pretrained`."""
        options = parse_options(pretrained_model_name_or_path, **kwargs)
        return "airllm", _class_name(_configuration(options))

    @classmethod
    def from_pretrained(
        cls, pretrained_model_name_or_path: str | os.PathLike[str], *args: Any, **kwargs: Any
    ) -> AirLLMBaseModel:
        """Load a model from a local folder or a hub id.

        Keywords are those of AirLLM (``device``, ``dtype``, ``compression``, ...) and `airllm.options.Options`.

        Raises:
            OptionError, DeviceError: a keyword is wrong; nothing was touched.
            CheckpointError, WeightMapError, UnsupportedModelError: the checkpoint is damaged or does not fit.
        """
        options = parse_options(pretrained_model_name_or_path, **_by_name(args, kwargs))
        config = _configuration(options)
        chosen = model_class(config)
        chosen.refuse_backend(options, config)  # before the weights are downloaded
        return chosen.from_options(options)


_POSITIONS = (
    "device", "dtype", "max_seq_len", "layer_shards_saving_path", "profiling_mode", "compression", "hf_token",
    "prefetching", "delete_original",
)  # fmt: skip


def _by_name(args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Positional arguments under the names they have in the model classes' constructor."""
    if len(args) > len(_POSITIONS):
        raise TypeError(f"at most {len(_POSITIONS)} positional arguments after the model, got {len(args)}")
    named = dict(zip(_POSITIONS, args, strict=False))
    if twice := named.keys() & kwargs.keys():
        raise TypeError(f"got multiple values for {', '.join(sorted(twice))}")
    return named | kwargs


def _configuration(options: Options) -> PretrainedConfig:
    """The model's configuration; of a hub repository nothing large is fetched for it."""
    folder = locate(
        options.model,
        revision=options.revision,
        cache_dir=options.cache_dir,
        local_files_only=options.local_files_only,
        token=options.hf_token,
        trust_remote_code=options.trust_remote_code,
        weights=False,
    )
    return load_config(folder, trust_remote_code=options.trust_remote_code)


def model_class(config: PretrainedConfig) -> type[AirLLMBaseModel]:
    """The class that runs a model of this configuration."""
    chosen: type[AirLLMBaseModel] = getattr(import_module("airllm"), _class_name(config))
    return chosen


def _class_name(config: PretrainedConfig) -> str:
    return _CLASSES.get(config.model_type, _ANY)
