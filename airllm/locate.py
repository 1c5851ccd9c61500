"""A hub id or a folder -> a local folder. The only user of the hub client."""

from __future__ import annotations

import glob
import logging
import os
import re
from collections.abc import Sequence
from pathlib import Path

from airllm.errors import CheckpointError

log = logging.getLogger(__name__)

ANSWER_TIMEOUT_S = 15.0
SINGLE_FILE = "model.safetensors"
_HUB_ID = re.compile(r"^[A-Za-z0-9][A-Za-z0-9._-]*(/[A-Za-z0-9][A-Za-z0-9._-]*)?$")
_SHARD = re.compile(r"^model-\d+-of-\d+\.safetensors$")
_SMALL_FILES = (".json", ".txt", ".model", ".jinja", ".tiktoken", ".spm", ".bpe", ".vocab")
_TEMPLATES = "additional_chat_templates/"


def locate(
    model: str | os.PathLike[str],
    *,
    revision: str | None = None,
    cache_dir: str | os.PathLike[str] | None = None,
    local_files_only: bool = False,
    token: str | bool | None = None,
    trust_remote_code: bool = False,
    weights: bool = True,
) -> Path:
    """The local folder of ``model``: itself, or a snapshot of a hub repository (downloaded when it is not cached).

    From a hub repository come the configuration, the tokenizer and one set of weights: safetensors, or
    ``pytorch_model*.bin`` where there are none. Python files come only with ``trust_remote_code``. With
    ``weights=False`` the weights are left where they are, for a look at the configuration.
    Raises CheckpointError when there is no such folder or repository, or it cannot be reached and is not cached.
    """
    text = os.fspath(model)
    folder = Path(text).expanduser()
    if text and folder.is_dir():
        return folder
    if folder.is_file():
        raise CheckpointError(f"{text} is a file: give the folder that holds config.json and the weights")
    if not _HUB_ID.match(text) or ".." in text or "--" in text:
        raise CheckpointError(f"{text!r} is neither a folder here nor a hub id like 'microsoft/Phi-tiny-MoE-instruct'")
    cache = os.fspath(cache_dir) if cache_dir is not None else None
    if local_files_only:
        return _cached(text, revision, cache)
    return _download(text, revision, cache, token, trust_remote_code, weights)


def wanted_files(names: Sequence[str], *, trust_remote_code: bool = False, weights: bool = True) -> list[str]:
    """Those of a repository's file names that loading needs: small files, and one set of weights (no duplicates)."""
    top = [name for name in names if "/" not in name]
    small = [name for name in top if name.endswith(_SMALL_FILES)]
    small += [name for name in names if name.startswith(_TEMPLATES) and name.endswith(".jinja")]
    if trust_remote_code:
        small += [name for name in names if name.endswith(".py")]
    return sorted({*small, *(_weights(top) if weights else ())})


def _weights(top: Sequence[str]) -> list[str]:
    """As transformers chooses: the single file, else the numbered shards, else any safetensors, else .bin."""
    if SINGLE_FILE in top:
        return [SINGLE_FILE]
    shards = [name for name in top if _SHARD.match(name)]
    if shards:
        return shards
    bins = [name for name in top if name.startswith("pytorch_model") and name.endswith(".bin")]
    others = [name for name in top if name.endswith(".safetensors")]
    if f"{SINGLE_FILE}.index.json" in top or not bins:
        return others
    return bins


def _cached(name: str, revision: str | None, cache_dir: str | None) -> Path:
    """The snapshot in the hub cache, without touching the network."""
    import huggingface_hub
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        # Asking for config.json alone: a snapshot without, say, the repository's .bin twins is complete for us. Its
        # weights are proved later, by CheckpointIndex.
        folder = huggingface_hub.snapshot_download(
            name, revision=revision, cache_dir=cache_dir, local_files_only=True, allow_patterns=["config.json"]
        )
    except LocalEntryNotFoundError as error:
        raise CheckpointError(
            f"{name} (revision {revision or 'main'}) is not in {cache_dir or 'the hub cache'}: download it once with "
            "local_files_only=False and a network, or give the folder that holds it"
        ) from error
    return Path(folder)


def _download(
    name: str, revision: str | None, cache_dir: str | None, token: str | bool | None, code: bool, weights: bool
) -> Path:
    """Fetch what is not cached yet (the hub client shows its progress bars); without a network, use the cache."""
    import huggingface_hub
    from huggingface_hub.errors import HfHubHTTPError, RevisionNotFoundError

    # The hub client has changed its HTTP library twice; the bases of its own error are that library's and OSError.
    failures: tuple[type[Exception], ...] = (OSError, *HfHubHTTPError.__bases__)
    try:
        # Not list_repo_files: that one repeats a failed connection for half a minute before the cache gets its turn.
        info = huggingface_hub.HfApi(token=token).model_info(name, revision=revision, timeout=ANSWER_TIMEOUT_S)
    except RevisionNotFoundError as error:
        raise CheckpointError(f"{name} has no revision {revision!r}: see its branches and tags on the hub") from error
    except failures as error:
        return _cached_instead(name, revision, cache_dir, error)
    wanted = wanted_files([file.rfilename for file in info.siblings or ()], trust_remote_code=code, weights=weights)
    if "config.json" not in wanted:
        raise CheckpointError(f"{name} has no config.json: it is not a transformers checkpoint")
    try:
        folder = huggingface_hub.snapshot_download(
            name,
            revision=revision,
            cache_dir=cache_dir,
            token=token,
            allow_patterns=[glob.escape(file) for file in wanted],
        )
    except failures as error:
        raise CheckpointError(f"the download of {name} stopped ({error}): run again, it goes on from there") from error
    return Path(folder)


def _cached_instead(name: str, revision: str | None, cache_dir: str | None, reason: Exception) -> Path:
    """The cached snapshot, saying why the hub was not asked; else an error that gives the hub's answer."""
    try:
        folder = _cached(name, revision, cache_dir)
    except CheckpointError:
        raise CheckpointError(
            f"{name} is no folder here, is not cached, and the hub did not give it ({reason}): check the name and the "
            "network, and pass hf_token if the repository is private or gated"
        ) from reason
    log.warning("%s: the hub cannot be asked (%s); using the cached copy %s", name, reason, folder)
    return folder
