"""Every keyword of ``from_pretrained`` and of the model classes: checked once, then frozen.

Nothing here opens a file. A wrong keyword costs the user no waiting: it is refused before the checkpoint is touched.
"""

from __future__ import annotations

import difflib
import logging
import math
import numbers
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from airllm.errors import DeviceError, OptionError

log = logging.getLogger(__name__)

GIB = 1 << 30

BACKENDS = ("none", "slot")
ENGINES = ("auto", "plain", "device")
POLICIES = ("auto", "aged", "lru")
COMPRESSIONS = ("4bit", "8bit")
STREAM_SOURCES = ("auto", "file", "host")

_DTYPES = {
    "float16": torch.float16, "fp16": torch.float16, "half": torch.float16,
    "bfloat16": torch.bfloat16, "bf16": torch.bfloat16,
    "float32": torch.float32, "fp32": torch.float32, "float": torch.float32,
    "float64": torch.float64, "double": torch.float64,
}  # fmt: skip

# Words that users bring along from transformers, and what to write instead.
_ELSEWHERE = {
    "device_map": "airllm places every weight itself: name one device with device=",
    "max_memory": "say how much may stay on the device with resident_gb= or expert_cache_gb=",
    "load_in_4bit": "use compression='4bit'",
    "load_in_8bit": "use compression='8bit'",
    "quantization_config": "use compression='4bit' or '8bit'",
    "use_auth_token": "use hf_token=",
    "offload_folder": "layers are read from the checkpoint as it is; for a split use layer_shards_saving_path=",
}


class _Default(str):
    """A default that reads like its text, yet can be told from the same text typed by the user."""


# The signature shows "cuda:0", as AirLLM's does; only a device the user did not name may fall back to the CPU.
DEFAULT_DEVICE: str = _Default("cuda:0")


@dataclass(frozen=True)
class Options:
    """The checked keywords. Sizes are bytes; ``dtype=None`` means the checkpoint's own.

    ``resident_bytes`` is the number of bytes of decoder layers (with slots, of their dense weights) that may stay on the
    device, or "all".
    ``stream_from`` is where the other layers come from for each forward: "file", or "host" memory; "auto" is host memory
    beside slots on a GPU where there is enough, else the files.
    ``expert_cache_engine`` is who serves decoded tokens from the slots; "auto" is "plain" for now.
    ``expert_cache_policy`` is which expert gives up its slot; "auto" is "aged".
    ``expert_cache_bytes`` is a number of bytes or "auto" with the slot backend, None without it.
    """

    model: str
    device: torch.device
    device_was_default: bool = False
    dtype: torch.dtype | None = None
    max_seq_len: int = 512
    layer_shards_saving_path: Path | None = None
    profiling_mode: bool = False
    compression: str | None = None
    hf_token: str | bool | None = None
    prefetching: bool = True
    delete_original: bool = False
    revision: str | None = None
    cache_dir: Path | None = None
    local_files_only: bool = False
    trust_remote_code: bool = False
    attn_implementation: str | None = None
    experts_implementation: str | None = None
    resident_bytes: int | str = 0
    stream_from: str = "auto"
    expert_cache_backend: str = "none"
    expert_cache_bytes: int | str | None = None
    pin_memory: bool = True
    expert_cache_engine: str = "auto"
    expert_cache_policy: str = "auto"


KEYWORDS = (
    "device", "dtype", "max_seq_len", "layer_shards_saving_path", "profiling_mode", "compression", "hf_token",
    "prefetching", "delete_original", "revision", "cache_dir", "local_files_only", "trust_remote_code",
    "attn_implementation", "experts_implementation", "resident_gb", "stream_from", "expert_cache_backend", "expert_cache_gb",
    "pin_memory", "expert_cache_engine", "expert_cache_policy",
)  # fmt: skip
_ALIASES = {"token": "hf_token", "torch_dtype": "dtype"}


def parse_options(model_name_or_path: str | os.PathLike[str], **keywords: Any) -> Options:
    """Check every keyword and return them frozen.

    Raises:
        OptionError: an unknown keyword (the message names the nearest known one), a value of the wrong kind, or two
            keywords that contradict each other. It is a ``ValueError``.
        DeviceError: the device is not there. It is a ``ValueError``.
    """
    given = _known(keywords)
    backend = _backend(given.get("expert_cache_backend"))
    compression = _choice("compression", given.get("compression"), COMPRESSIONS)
    cache_bytes = _expert_cache_bytes(backend, given.get("expert_cache_gb"))
    resident_bytes = resident_gb_bytes(given.get("resident_gb"), left_out="all" if backend == "slot" else 0)
    if backend == "slot":
        _refuse_beside_slots(compression, given)
    flags = {name: _flag(name, given.get(name), default) for name, default in _FLAGS.items()}
    device, was_default = _device(given.get("device"), slot=backend == "slot")
    return Options(
        model=_model_name(model_name_or_path),
        device=device,
        device_was_default=was_default,
        dtype=_dtype(given.get("dtype")),
        max_seq_len=_max_seq_len(given.get("max_seq_len")),
        layer_shards_saving_path=_folder("layer_shards_saving_path", given.get("layer_shards_saving_path")),
        compression=compression,
        hf_token=_token(given.get("hf_token")),
        revision=_text("revision", given.get("revision")),
        cache_dir=_folder("cache_dir", given.get("cache_dir")),
        attn_implementation=_text("attn_implementation", given.get("attn_implementation")),
        experts_implementation=_text("experts_implementation", given.get("experts_implementation")),
        resident_bytes=resident_bytes,
        stream_from=_choice("stream_from", given.get("stream_from"), STREAM_SOURCES) or "auto",
        expert_cache_backend=backend,
        expert_cache_bytes=cache_bytes,
        expert_cache_engine=_of_slots("expert_cache_engine", backend, given, ENGINES),
        expert_cache_policy=_of_slots("expert_cache_policy", backend, given, POLICIES),
        **flags,
    )


_FLAGS = {
    "profiling_mode": False,
    "prefetching": True,
    "delete_original": False,
    "local_files_only": False,
    "trust_remote_code": False,
    "pin_memory": True,
}


def _known(keywords: dict[str, Any]) -> dict[str, Any]:
    """The keywords under their own names; unknown ones are refused with the nearest known name."""
    given: dict[str, Any] = {}
    for word, value in keywords.items():
        name = _ALIASES.get(word, word)
        if name not in KEYWORDS:
            raise OptionError(_unknown_keyword(word))
        if given.get(name) is not None and value is not None and given[name] != value:
            raise OptionError(f"{word} is another word for {name}, and the two were given different values")
        if given.get(name) is None:
            given[name] = value
    return given


def _unknown_keyword(word: str) -> str:
    if word in _ELSEWHERE:
        return f"{word} is not a keyword of airllm: {_ELSEWHERE[word]}"
    near = difflib.get_close_matches(word.lower(), [*KEYWORDS, *_ALIASES], n=1, cutoff=0.6)
    hint = f"did you mean {near[0]}?" if near else f"the keywords are {', '.join(KEYWORDS)}"
    return f"unknown keyword {word!r}: {hint}"


def _model_name(name: str | os.PathLike[str]) -> str:
    if not isinstance(name, str | os.PathLike) or not os.fspath(name):
        raise OptionError(f"the model must be a hub id or the path of a checkpoint folder, got {name!r}")
    return os.fspath(name)


def _choice(name: str, value: Any, choices: tuple[str, ...]) -> str | None:
    """One of ``choices``, whatever its case; None stays None."""
    if value is None:
        return None
    if isinstance(value, str) and value.strip().lower() in choices:
        return value.strip().lower()
    near = difflib.get_close_matches(value.lower(), choices, n=1) if isinstance(value, str) else []
    hint = f": did you mean {near[0]!r}?" if near else ""
    raise OptionError(f"{name} must be {' or '.join(map(repr, choices))} or None, got {value!r}{hint}")


def _backend(value: Any) -> str:
    return _choice("expert_cache_backend", value, BACKENDS) or "none"


def _of_slots(name: str, backend: str, given: dict[str, Any], choices: tuple[str, ...]) -> str:
    choice = _choice(name, given.get(name), choices) or "auto"
    if choice != "auto" and backend != "slot":
        raise OptionError(f"{name}={choice!r} has no effect without expert_cache_backend='slot': add it")
    return choice


def _flag(name: str, value: Any, default: bool) -> bool:
    if value is None:
        return default
    if not isinstance(value, bool):
        raise OptionError(f"{name} must be True or False, got {value!r}")
    return value


def _text(name: str, value: Any) -> str | None:
    if value is not None and not (isinstance(value, str) and value):
        raise OptionError(f"{name} must be a non-empty text or None, got {value!r}")
    return value


def _token(value: Any) -> str | bool | None:
    if value is not None and not isinstance(value, str | bool):
        # The value itself stays out of the message: it may be a secret of another kind.
        raise OptionError(f"hf_token must be a text, True, False or None, got a {type(value).__name__}")
    return value


def _folder(name: str, value: Any) -> Path | None:
    if value is None:
        return None
    if not isinstance(value, str | os.PathLike) or not os.fspath(value):
        raise OptionError(f"{name} must be the path of a folder or None, got {value!r}")
    return Path(os.fspath(value)).expanduser()


def _max_seq_len(value: Any) -> int:
    if value is None:
        return Options.max_seq_len
    if isinstance(value, bool) or not isinstance(value, numbers.Integral) or value < 1:
        raise OptionError(f"max_seq_len must be a whole number of tokens, 1 or more, got {value!r}")
    return int(value)


def _dtype(value: Any) -> torch.dtype | None:
    """A floating torch dtype; None and "auto" mean the checkpoint's own."""
    if value is None or value == "auto":
        return None
    if isinstance(value, str):
        value = _DTYPES.get(value.strip().lower().removeprefix("torch."), value)
    if value not in set(_DTYPES.values()):
        names = "float16, bfloat16, float32, float64"
        raise OptionError(f"dtype must be None, 'auto' or one of {names} (as text or torch dtype), got {value!r}")
    return value


def _gib_to_bytes(name: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise OptionError(f"{name} must be a number of GiB, got {value!r} ({type(value).__name__})")
    try:
        gib = float(value)
    except OverflowError:  # a whole number beyond what a float holds
        gib = math.inf
    if not math.isfinite(gib) or gib < 0:
        raise OptionError(f"{name} must be a finite number of GiB, 0 or more, got {value!r}")
    return int(gib * GIB)


def resident_gb_bytes(value: Any, left_out: int | str = 0) -> int | str:
    """``resident_gb`` as a number of bytes or "all". Raises OptionError for anything else."""
    if value is None:
        return left_out
    if isinstance(value, str):
        if value.strip().lower() == "all":
            return "all"
        raise OptionError(f"resident_gb must be a number of GiB or 'all', got {value!r}")
    return _gib_to_bytes("resident_gb", value)


def _expert_cache_bytes(backend: str, value: Any) -> int | str | None:
    if backend != "slot":
        if value is not None:
            raise OptionError(f"expert_cache_gb={value!r} has no effect without expert_cache_backend='slot': add it")
        return None
    if value is None:
        return "auto"
    if isinstance(value, str):
        if value.strip().lower() == "auto":
            return "auto"
        raise OptionError(f"expert_cache_gb must be a number of GiB or 'auto', got {value!r}")
    size = _gib_to_bytes("expert_cache_gb", value)
    if size == 0:
        raise OptionError(
            f"expert_cache_gb={value!r} leaves 0 bytes for expert slots: give a larger number of GiB, "
            "leave it out for 'auto', or use expert_cache_backend='none' to stream"
        )
    return size


def _refuse_beside_slots(compression: str | None, given: dict[str, Any]) -> None:
    if compression is not None:
        raise OptionError(f"compression={compression!r} does not work with expert_cache_backend='slot': leave one out")
    if given.get("delete_original"):
        raise OptionError(
            "delete_original does not work with expert_cache_backend='slot', which reads the original checkpoint "
            "and writes no split: leave it out"
        )


def _device(value: Any, *, slot: bool) -> tuple[torch.device, bool]:
    """The device with its index, and whether it was the default rather than named by the user."""
    if value is None or isinstance(value, _Default):
        return _default_device(slot), True
    device = _as_device(value)
    if device.type == "cpu":
        if slot:
            log.warning("slot backend on the CPU: the same steps run one after the other, for tests rather than use")
        return torch.device("cpu"), False
    if device.type != "cuda":
        raise DeviceError(
            f"device {str(device)!r} is not supported: airllm runs on CUDA and ROCm (both called 'cuda') and 'cpu'"
        )
    if not torch.cuda.is_available():
        raise DeviceError(f"device {str(device)!r} was asked for, but {_why_no_gpu()}")
    index = _current_index() if device.index is None else device.index
    count = torch.cuda.device_count()
    if index >= count:
        there = ", ".join(f"'cuda:{i}'" for i in range(count))
        raise DeviceError(f"device {str(device)!r} is not there: this machine has {there} and 'cpu'")
    return torch.device("cuda", index), False


def _default_device(slot: bool) -> torch.device:
    if torch.cuda.is_available():
        return torch.device("cuda", 0)
    if slot:
        raise DeviceError(f"expert_cache_backend='slot' needs a CUDA or ROCm device, but {_why_no_gpu()}")
    log.warning("No GPU is used: %s. Running on the CPU; device='cpu' silences this.", _why_no_gpu())
    return torch.device("cpu")


def _why_no_gpu() -> str:
    if torch.version.cuda is None and torch.version.hip is None:
        return (
            f"this torch ({torch.__version__}) is built without GPU support: install a CUDA or ROCm build of torch, "
            "or pass device='cpu'"
        )
    return "torch sees no GPU on this machine: check the driver and CUDA_VISIBLE_DEVICES, or pass device='cpu'"


def _as_device(value: Any) -> torch.device:
    if isinstance(value, torch.device):
        return value
    if isinstance(value, bool) or not isinstance(value, str | int):
        raise DeviceError(f"device must be a text such as 'cuda:0', a GPU number or a torch.device, got {value!r}")
    if isinstance(value, int):
        if value < 0:
            raise DeviceError(f"device must be a GPU number of 0 or more, got {value}; use 'cpu' for the CPU")
        return torch.device("cuda", value)
    if value.strip().isdecimal():
        return torch.device("cuda", int(value))
    try:
        return torch.device(value.strip().lower())
    except RuntimeError as error:
        raise DeviceError(f"device {value!r} is not understood: use 'cuda:0', a GPU number or 'cpu'") from error


def _current_index() -> int:
    """The GPU that plain "cuda" means. Asking an uninitialised torch would start CUDA, and there it is 0 anyway."""
    return torch.cuda.current_device() if torch.cuda.is_initialized() else 0
