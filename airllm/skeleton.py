"""The transformers model on meta, and its resident tensors: read, placed on the device, tied.

`build_skeleton` does what ``from_pretrained`` does up to the point where it reads weights; `load_resident` and
`tie_weights` do the rest for the tensors that the caller names.
"""

from __future__ import annotations

import copy
import logging
import os
import queue
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

import torch
import transformers
from torch import nn
from transformers import AutoConfig, PretrainedConfig, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from airllm import transformers_private as private
from airllm.checkpoint import TensorEntry, TensorReader
from airllm.errors import CheckpointError, UnsupportedModelError, WeightMapError
from airllm.experts.host_memory import HostBlock
from airllm.quantised import forget_quantisation, quantisation_of
from airllm.weight_map import Chunk, LoadGroup, WeightMap

log = logging.getLogger(__name__)

STAGE_BYTES = 1 << 24
"""Read and copied to the device as one; each reading thread has one such stage while loading."""

Progress = Callable[[int], None]
"""Called with a number of bytes as they arrive, from any thread."""


# --- configuration ----------------------------------------------------------------------------------------------------


def load_config(folder: str | os.PathLike[str], *, trust_remote_code: bool = False) -> PretrainedConfig:
    """The configuration in ``folder``. A model_type that transformers knows never runs the checkpoint's own code.

    Raises:
        CheckpointError: no readable config.json.
        UnsupportedModelError: transformers does not know the model_type, and its code is not there or not trusted.
    """
    if not os.path.isfile(os.path.join(folder, "config.json")):
        raise CheckpointError(f"{folder} has no config.json: give the folder that a model was downloaded or saved to")
    try:
        raw, _ = PretrainedConfig.get_config_dict(str(folder), local_files_only=True)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{folder}/config.json cannot be read: {error}") from error
    model_type = raw.get("model_type")
    if model_type is None:
        raise CheckpointError(f"{folder}/config.json does not say its model_type: download it again")
    native = model_type in CONFIG_MAPPING
    own_code = "AutoConfig" in (raw.get("auto_map") or {})
    if not native and own_code and not trust_remote_code:
        raise UnsupportedModelError(
            f"transformers {transformers.__version__} does not know model_type {model_type!r}; {folder} brings its own "
            "code for it: pass trust_remote_code=True if you have read and trust that code"
        )
    try:
        return AutoConfig.from_pretrained(
            str(folder), trust_remote_code=trust_remote_code and not native, local_files_only=True
        )
    except (ValueError, KeyError) as error:
        if native:
            raise CheckpointError(f"{folder}/config.json does not describe a {model_type} model: {error}") from error
        raise UnsupportedModelError(
            f"transformers {transformers.__version__} does not know model_type {model_type!r} of {folder}: {error}"
        ) from error


def resolve_dtype(
    dtype: torch.dtype | None, config: PretrainedConfig, index: Mapping[str, TensorEntry]
) -> torch.dtype:
    """``dtype``, else what config.json says, else that of the checkpoint's first floating point tensor."""
    if dtype is not None:
        return dtype
    stated = getattr(config, "dtype", None)
    if isinstance(stated, str):
        stated = getattr(torch, stated.removeprefix("torch."), None)
    if isinstance(stated, torch.dtype):
        return stated
    for entry in index.values():
        if entry.dtype.is_floating_point:
            return entry.dtype
    return torch.get_default_dtype()


# --- the model --------------------------------------------------------------------------------------------------------


def build_skeleton(
    config: PretrainedConfig,
    *,
    dtype: torch.dtype,
    attn_implementation: str | None = None,
    experts_implementation: str | None = None,
    trust_remote_code: bool = False,
    folder: str | os.PathLike[str] | None = None,
) -> PreTrainedModel:
    """The model with its parameters and persistent buffers on meta and its other buffers filled in, on the CPU.

    In evaluation mode, without gradients, untied (see `tie_weights`), each tensor in the dtype that transformers would
    load it in; of a quantised checkpoint, the plain model that its weights are read into. ``folder`` is where
    generation_config.json is looked for. ``config`` is not changed.
    """
    quantisation_of(config)
    config = copy.deepcopy(config)
    forget_quantisation(config)
    if attn_implementation is not None:
        config._attn_implementation = attn_implementation
    if experts_implementation is not None:
        config._experts_implementation = experts_implementation
    cls, config = private.causal_lm_class(config, folder, trust_remote_code)
    for part in (config, *(getattr(config, name, None) for name in config.sub_configs)):
        if part is not None:
            part.dtype = dtype
    if folder is not None:
        config.name_or_path = str(folder)
    model = private.build_on_meta(cls, config, dtype)
    plan = private.DtypePlan(model, dtype)
    for name, tensor in model.state_dict().items():
        if plan.of(name, tensor) != tensor.dtype:
            set_tensor(model, name, tensor.to(plan.of(name, tensor)))
    model.requires_grad_(False)
    if folder is not None:
        private.load_generation_config(model, folder, trust_remote_code)
    return model


def set_tensor(model: nn.Module, name: str, tensor: torch.Tensor) -> None:
    """Put ``tensor`` in the place of the parameter or buffer ``name``; nothing is copied."""
    owner, _, leaf = name.rpartition(".")
    module = model.get_submodule(owner)
    if leaf in module._buffers:
        module._buffers[leaf] = tensor
    elif leaf in module._parameters:
        module._parameters[leaf] = nn.Parameter(tensor, requires_grad=False)
    else:
        raise WeightMapError(f"{type(model).__name__} has no parameter or buffer {name}")


def get_tensor(model: nn.Module, name: str) -> torch.Tensor:
    """The parameter or buffer ``name``."""
    owner, _, leaf = name.rpartition(".")
    module = model.get_submodule(owner)
    found = module._buffers[leaf] if leaf in module._buffers else module._parameters.get(leaf)
    if found is None:
        raise WeightMapError(f"{type(model).__name__} has no parameter or buffer {name}")
    return found


def tie_weights(model: PreTrainedModel) -> None:
    """Make tied weights one tensor, as ``from_pretrained`` does: those still on meta take what was loaded."""
    names = {name for group in private.tied_groups(model) for name in group}
    private.tie(model, {name for name in names if get_tensor(model, name).is_meta})


def move_buffers(model: nn.Module, device: torch.device | str) -> None:
    """Move every buffer that has memory to ``device``; those on meta are left to be loaded."""
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and not buffer.is_meta:
                module._buffers[name] = buffer.to(device)


def assert_no_meta(model: nn.Module, except_under: Collection[str] = ()) -> None:
    """Raises WeightMapError naming what is still on meta, outside the modules in ``except_under``."""
    left = [
        name
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]
        if tensor.is_meta and not any(name.startswith(f"{prefix}.") for prefix in except_under)
    ]
    if left:
        raise WeightMapError(f"{len(left)} tensors were never loaded: {', '.join(left[:10])}")


def decoder_layers(model: PreTrainedModel) -> tuple[str, list[tuple[str, nn.Module]]]:
    """The name of the ModuleList of decoder layers, and its (full name, module) pairs in order.

    Found by its length (the configuration's number of layers) among the lists that lie in no other list; the one with
    most parameters wins where several fit (a vision tower may have as many layers).
    """
    lists: list[tuple[str, nn.ModuleList]] = []
    for name, module in model.named_modules():
        inside = any(name.startswith(f"{outer}.") for outer, _ in lists)
        if isinstance(module, nn.ModuleList) and len(module) > 0 and not inside:
            lists.append((name, module))
    text = model.config.get_text_config()
    count = getattr(text, "num_hidden_layers", None)
    fitting = [pair for pair in lists if len(pair[1]) == count] or lists
    if not fitting:
        raise UnsupportedModelError(f"{type(model).__name__} has no list of decoder layers: airllm cannot stream it")
    name, layers = max(fitting, key=lambda pair: sum(p.numel() for p in pair[1].parameters()))
    return name, [(f"{name}.{number}", layer) for number, layer in enumerate(layers)]


# --- resident tensors -------------------------------------------------------------------------------------------------


def load_resident(
    model: PreTrainedModel,
    weight_map: WeightMap,
    names: Iterable[str],
    reader: TensorReader,
    device: torch.device | str,
    progress: Progress | None = None,
) -> int:
    """Read the tensors ``names`` onto ``device``, into their places in ``model``; returns their bytes.

    On the CPU the bytes are read where they stay. On a GPU they pass through a few pinned chunks. Names
    that the checkpoint may leave out, and does, are initialised as transformers would.
    """
    device = torch.device(device)
    wanted = list(dict.fromkeys(names))
    optional = [name for name in wanted if name in weight_map.missing]
    specs = weight_map.targets()
    loaded = [name for name in wanted if name in specs]
    if unknown := set(wanted) - set(loaded) - set(optional):
        raise WeightMapError(f"the checkpoint does not fill {', '.join(sorted(unknown)[:10])}")
    out = {name: torch.empty(specs[name].shape, dtype=specs[name].dtype, device=device) for name in loaded}
    groups = {id(group): group for group in map(weight_map.group_of, loaded)}
    staging = _Staging(reader.threads if device.type != "cpu" else 0)
    jobs: list[Callable[[], None]] = []
    for group in groups.values():
        jobs += _resident_jobs(group, reader, out, staging, progress)
    try:
        reader.run(jobs)
    finally:
        staging.close()
    for name, tensor in out.items():
        set_tensor(model, name, tensor)
    private.fill_missing(model, optional)
    for name in optional:
        set_tensor(model, name, get_tensor(model, name).to(device))
    return sum(specs[name].nbytes for name in loaded)


class _Staging:
    """Chunks of pinned memory that the reading threads take turns with; plain memory where pinning is refused.

    One block of its own rather than torch's pinned allocator, which would keep what it once gave out.
    """

    def __init__(self, count: int) -> None:
        self._block = HostBlock(count * STAGE_BYTES)
        if count and not self._block.pin():
            log.warning("pinned memory was refused (%s): loading is several times slower", self._block.pin_reason)
        self._free: queue.LifoQueue[int] = queue.LifoQueue()
        for number in range(count):
            self._free.put(number)

    def copy(self, chunk: Chunk, reader: TensorReader, flat: torch.Tensor) -> None:
        """Read one chunk into ``flat``, a target on the device as one row."""
        number = self._free.get()
        try:
            first = number * STAGE_BYTES
            stored = self._block.tensor[first : first + chunk.count * chunk.entry.dtype.itemsize].view(chunk.entry.dtype)
            chunk.read_run(reader, stored)
            flat[chunk.start : chunk.start + chunk.count].copy_(stored)  # waits: the stage is free afterwards
        finally:
            self._free.put(number)

    def close(self) -> None:
        """Give the memory back to the system."""
        self._block.close()


def _resident_jobs(
    group: LoadGroup,
    reader: TensorReader,
    out: Mapping[str, torch.Tensor],
    staging: _Staging,
    progress: Progress | None,
) -> list[Callable[[], None]]:
    def reporting(job: Callable[..., None], nbytes: int, *args: Any) -> Callable[[], None]:
        def run() -> None:
            job(*args)
            if progress is not None:
                progress(nbytes)

        return run

    if not group.straight:
        return [reporting(_convert_resident, group.nbytes, group, reader, out)]
    flat = out[group.targets[0].name].view(-1)
    read = (lambda chunk: chunk.read(reader, flat)) if flat.device.type == "cpu" else (
        lambda chunk: staging.copy(chunk, reader, flat)
    )
    return [reporting(read, chunk.count * flat.element_size(), chunk) for chunk in group.chunks(STAGE_BYTES)]


def _convert_resident(group: LoadGroup, reader: TensorReader, out: Mapping[str, torch.Tensor]) -> None:
    assert group.conversion is not None
    made = group.conversion.run(reader)
    for spec in group.targets:
        if spec.name in out:
            out[spec.name].copy_(made[spec.name])
