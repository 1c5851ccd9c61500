"""Which keys go into which module file. PURE: names, dtypes and shapes in, a plan out."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from airllm.errors import CheckpointError, OptionError

LAYER_NAME_KEYS = ("embed", "layer_prefix", "norm", "lm_head")
NAME_LIMIT = 200  # file systems stop at 255 bytes, and suffixes are added
_NUMBERED = re.compile(r"^((?:[^.]+\.)*?\d+)\.")
_FILE_NAME = re.compile(r"^[A-Za-z0-9_][A-Za-z0-9_.-]*$")


@dataclass(frozen=True, slots=True)
class Module:
    """One file of the split: ``model.layers.3`` and the checkpoint's own keys in it."""

    name: str
    keys: tuple[str, ...]

    @property
    def file_name(self) -> str:
        return f"{self.name}.safetensors"


def plan_modules(keys: Iterable[str], layer_names: Mapping[str, str] | None = None) -> tuple[Module, ...]:
    """Group ``keys`` by module, in the order a forward pass would want them: as found, layers by number.

    A key belongs to its first numbered path (``model.layers.3.mlp.experts.0.w1.weight`` to ``model.layers.3``), else to
    its parent (``model.norm.weight`` to ``model.norm``). ``layer_names`` names modules that are taken whole first.
    Raises CheckpointError for a key that cannot be a file name, or when ``layer_prefix`` owns no key.
    """
    explicit = _explicit(layer_names)
    groups: dict[str, list[str]] = {}
    for key in keys:
        groups.setdefault(_owner(key, explicit), []).append(key)
    for name in groups:
        if not _FILE_NAME.match(name) or len(name) > NAME_LIMIT:
            raise CheckpointError(
                f"the module name {name[:80]!r} (tensor {groups[name][0][:80]!r}) cannot be a file name: do not trust "
                "this checkpoint"
            )
    if layer_names and not any(name.startswith(layer_names["layer_prefix"] + ".") for name in groups):
        raise CheckpointError(
            f"no tensor of the checkpoint begins with layer_prefix {layer_names['layer_prefix']!r}; it has "
            f"{', '.join(sorted(groups)[:4])}, …: correct layer_names, or leave it out"
        )
    return tuple(Module(name, tuple(groups[name])) for name in _in_order(groups))


def _explicit(layer_names: Mapping[str, str] | None) -> tuple[str, ...]:
    """Module names that the caller fixed; ``<layer_prefix>.N`` comes out of the numbered rule."""
    if layer_names is None:
        return ()
    absent = [key for key in LAYER_NAME_KEYS if not isinstance(layer_names.get(key), str)]
    if absent:
        raise OptionError(f"layer_names lacks {', '.join(absent)}: it needs {', '.join(LAYER_NAME_KEYS)}")
    return tuple(name for key, name in layer_names.items() if key != "layer_prefix" and isinstance(name, str))


def _owner(key: str, explicit: tuple[str, ...]) -> str:
    for name in explicit:
        if key == name or key.startswith(name + "."):
            return name
    numbered = _NUMBERED.match(key)
    if numbered:
        return numbered.group(1)
    return key.rpartition(".")[0] or key


def _in_order(groups: Mapping[str, list[str]]) -> list[str]:
    """As first met in the checkpoint, but numbered siblings by number (files list layer 10 before layer 2)."""
    first: dict[str, int] = {}
    for position, name in enumerate(groups):
        first.setdefault(_family(name)[0], position)
    return sorted(groups, key=lambda name: (first[_family(name)[0]], _family(name)[1]))


def _family(name: str) -> tuple[str, int]:
    parent, _, last = name.rpartition(".")
    return (parent + ".", int(last)) if last.isdigit() else (name, 0)
