"""Models by their names on the Hugging Face Hub: found in its cache, or downloaded, as transformers does."""

from __future__ import annotations

import os
import re
from typing import Any

#: What transformers' ``from_pretrained`` takes to find a model.
OPTIONS = ("revision", "token", "cache_dir", "local_files_only", "force_download", "proxies")

_NAME = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")


def is_name(path: Any) -> bool:
    """Returns whether it is no file or folder, and may be a name: ``"org/name"``."""
    return isinstance(path, str) and not os.path.exists(path) and _NAME.fullmatch(path) is not None


def local_folder(name: str, subfolder: str = "", **options: Any) -> str:
    """Returns the folder of the cache that has configuration and safetensors files of a model, all of one commit.

    Args:
        name: of the model: ``"org/name"``.
        subfolder: of the model's files.
        options: some of ``OPTIONS``.

    Raises:
        OSError: transformers' own: no such model or revision, no access, or no connection and not in the cache.
        FileNotFoundError: it has no safetensors files.
    """
    from transformers.utils import cached_file
    from transformers.utils.hub import extract_commit_hash, get_checkpoint_shard_files

    options["subfolder"] = subfolder

    def find(file: str, **how: Any) -> str | None:
        found: str | None = cached_file(name, file, **how, **options)
        return found

    optional = {"_raise_exceptions_for_missing_entries": False}
    config = find("config.json")
    options["revision"] = extract_commit_hash(config, None) or options.get("revision")
    weights = find("model.safetensors", **optional)
    if weights is None:
        weights = find("model.safetensors.index.json", **optional)
        if weights is None:
            raise FileNotFoundError(
                f"{name} has no safetensors files: download it with 'hf download {name}', then nvme-checkpoint convert"
            )
        shards: Any = get_checkpoint_shard_files
        shards(name, weights, **options)
    find("generation_config.json", **optional)
    return os.path.dirname(weights)
