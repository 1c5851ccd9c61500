"""Run language models that are far larger than the GPU's memory.

    from airllm import AutoModel

    model = AutoModel.from_pretrained("path or hub id")
    inputs = model.tokenizer("Hello", return_tensors="pt")
    print(model.tokenizer.decode(model.generate(**inputs, max_new_tokens=20)[0]))

Importing the package loads nothing: each name below is fetched from its own module when it is first used.
"""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

__version__ = "5.0.0.dev0"

_HOMES = {
    "AutoModel": "auto_model",
    "AirLLMBaseModel": "airllm_base",
    "AirLLMBaichuan": "airllm_families",
    "AirLLMChatGLM": "airllm_families",
    "AirLLMInternLM": "airllm_families",
    "AirLLMLlama2": "airllm_families",
    "AirLLMMistral": "airllm_families",
    "AirLLMMixtral": "airllm_families",
    "AirLLMQWen": "airllm_families",
    "AirLLMQWen2": "airllm_families",
    "AirLLMPhiMoE": "airllm_phimoe",
    "split_and_save_layers": "layer_files",
    "AirLLMError": "errors",
    "BudgetError": "errors",
    "CheckpointError": "errors",
    "DeviceError": "errors",
    "HostMemoryError": "errors",
    "NonFiniteError": "errors",
    "NotEnoughSpaceException": "errors",
    "OptionError": "errors",
    "UnsupportedModelError": "errors",
    "WeightMapError": "errors",
}

__all__ = [*_HOMES, "__version__", "tiny_model_path"]  # noqa: PLE0604 - the names come from the table above

if TYPE_CHECKING:  # for editors and type checkers, which do not run __getattr__
    from airllm.airllm_base import AirLLMBaseModel as AirLLMBaseModel
    from airllm.auto_model import AutoModel as AutoModel


def tiny_model_path() -> Path:
    """The folder of the small PhiMoE checkpoint that comes with the package: it needs no download and no GPU."""
    return Path(__file__).with_name("tiny_phimoe")


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'airllm' has no attribute {name!r}")
    value = getattr(import_module(f"airllm.{home}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(__all__))
