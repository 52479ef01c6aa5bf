"""Finds the safetensors files of a model of transformers: in a folder, or on the Hugging Face Hub."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Sequence
from typing import Any

from nvme_ops.base.errors import named, naming
from nvme_ops.formats.sharded_index import read_index

Path = str | os.PathLike[str]

#: Keywords by which transformers' ``from_pretrained`` finds a model on the Hub.
HUB_OPTIONS = ("revision", "token", "cache_dir", "local_files_only", "force_download", "proxies")
_FILES = ("model.safetensors", "model.safetensors.index.json")  # in the order in which transformers looks for them
_ADAPTER = "adapter_config.json"
_PART = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf")  # as llama.cpp splits files
_NAME = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")


def weight_files(
    path: Path | Sequence[Path],
    subfolder: str = "",
    variant: str | None = None,
    gguf_file: str | None = None,
    **options: Any,
) -> list[str]:
    """Returns the safetensors files of a model, or its GGUF files, downloaded if need be.

    Raises:
        OSError: there are none.
        ValueError: the folder has an adapter of peft.
    """
    if not isinstance(path, str | os.PathLike):
        return [os.path.abspath(named(entry)) for entry in path]
    if gguf_file is None and named(path).endswith(".gguf") and os.path.isfile(path):
        path, gguf_file = os.path.split(named(path))
    if gguf_file is not None:
        return [_found(path, name, subfolder, **options) for name in _parts(gguf_file)]
    if is_hub_name(path):
        folder = _local_folder(str(path), subfolder, variant, **options)
    else:
        folder = os.path.abspath(os.path.join(named(path), subfolder))
    if not os.path.isdir(folder):
        os.stat(folder)  # raises if it does not exist
        return [folder]
    if os.path.isfile(os.path.join(folder, _ADAPTER)):
        raise ValueError(
            f"{folder} has an adapter ({_ADAPTER}): give the files of the model below it, and load the adapter onto "
            "the streamed model, by peft.PeftModel.from_pretrained(model, folder)"
        )
    names = _names(folder, variant)
    for name in names:
        candidate = os.path.join(folder, name)
        if os.path.isfile(candidate):
            if not name.endswith(".json"):
                return [candidate]
            index = read_index(candidate)
            return sorted(index.shards(index.places))
    raise FileNotFoundError(
        f"{folder} has no {' or '.join(names)}; nvme-checkpoint convert {folder} {folder} makes them of .bin files"
    )


def _parts(name: str) -> list[str]:
    """Returns the names of all files of a model, given that of one."""
    parts = _PART.fullmatch(name)
    if parts is None:
        return [name]
    stem, _, count = parts.groups()
    return [f"{stem}-{number:05}-of-{count}.gguf" for number in range(1, int(count) + 1)]


def _found(path: Path, name: str, subfolder: str, **options: Any) -> str:
    """Returns where a file of a model is."""
    if is_hub_name(path):
        from transformers.utils import cached_file

        return str(cached_file(str(path), name, subfolder=subfolder, **options))
    return os.path.abspath(os.path.join(named(path), subfolder, name))


def is_hub_name(path: Any) -> bool:
    """Returns whether a path is no file or folder, but may be a name on the Hub: ``"org/name"``."""
    return isinstance(path, str) and not os.path.exists(path) and _NAME.fullmatch(path) is not None


def _names(folder: str, variant: str | None) -> list[str]:
    """Returns the names that a model's file or index may have: the one that its configuration says, if it does."""
    config = os.path.join(folder, "config.json")
    if os.path.isfile(config):
        with naming("read", config), open(config, encoding="utf-8") as stream:
            try:
                given = json.load(stream).get("transformers_weights")
            except (ValueError, AttributeError):  # transformers says what is wrong
                given = None
        if given is not None:
            if not isinstance(given, str) or os.path.isabs(given) or ".." in given.split("/"):
                raise ValueError(f"{config}: transformers_weights, {given!r}, is not in the folder")
            return [given]
    if variant is None:
        return list(_FILES)
    return [f"{stem}.{variant}.{end}" for stem, end in (name.rsplit(".", 1) for name in _FILES)]


def _local_folder(name: str, subfolder: str = "", variant: str | None = None, **options: Any) -> str:
    """Returns the cache folder with configuration and safetensors files of a model on the Hub, all of one commit.

    Args:
        name: ``"org/name"``.
        subfolder: where the model's files are in its repository.
        variant: of the files.
        options: some of ``HUB_OPTIONS``, and ``tqdm_class``.

    Raises:
        OSError: from transformers: no such model or revision, no access, or no connection and not in the cache.
        FileNotFoundError: the model has no safetensors files.
    """
    from transformers.utils import cached_file
    from transformers.utils.hub import extract_commit_hash, get_checkpoint_shard_files

    options["subfolder"] = subfolder

    def find(file: str, **more: Any) -> str | None:
        cached: str | None = cached_file(name, file, **more, **options)
        return cached

    optional = {"_raise_exceptions_for_missing_entries": False}
    config = find("config.json")
    options["revision"] = extract_commit_hash(config, None) or options.get("revision")
    find(_ADAPTER, **optional, _raise_exceptions_for_connection_errors=False)
    for file in _names(os.path.dirname(config or ""), variant):
        weights = find(file, **optional)
        if weights is not None:
            if file.endswith(".json"):
                shards: Any = get_checkpoint_shard_files
                shards(name, weights, **options)
            return os.path.dirname(weights)
    raise FileNotFoundError(
        f"{name} has no safetensors files: download it with 'hf download {name}', then nvme-checkpoint convert"
    )
