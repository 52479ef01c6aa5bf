"""Plans a save: everything is decided before anything is written."""

from __future__ import annotations

import importlib
import os
from collections.abc import Mapping
from types import ModuleType
from typing import Any, Protocol

import torch

from nvme_ops.checkpoint import FORMATS
from nvme_ops.checkpoint.modules import without_ties
from nvme_ops.handle import aio_handle
from nvme_ops.memory.pieces import Borrowed
from nvme_ops.paths import URL
from nvme_ops.text import parse_size


class Plan(Protocol):
    """An object laid out in a format: everything except the bytes of its tensors.

    ``tensors`` are read when the plan is written; to change them before that, replace them here by copies.
    """

    tensors: list[torch.Tensor]

    def target(self, path: str) -> str:
        """Returns the file that is replaced when the plan is written to ``path``."""

    def write(self, path: str, *, durable: bool, handle: aio_handle, borrowed: Borrowed | None = None) -> None:
        """Writes everything, atomically. ``borrowed``: tensors to be read first."""


def plan_for(
    path: str,
    obj: Any,
    format: str | None,
    checksums: bool,
    metadata: Mapping[str, str] | None,
    max_shard_size: int | str | None,
    durable: bool,
    recycle: bool,
) -> Plan:
    """Returns the plan for saving ``obj`` (for a module, its state dict) in the format of ``path``.

    Raises what ``nvme_ops.save`` raises before it writes.
    """
    module = format_of(path, format)
    if isinstance(obj, torch.nn.Module):
        obj, left_out = without_ties(obj.state_dict())
        metadata = {**left_out, **(metadata or {})}
    options: dict[str, Any] = {}
    sharded = module.__name__ == FORMATS["sharded"][0]
    if recycle:
        if sharded:
            raise ValueError(f"{path}: recycle=True works for one file, not for checkpoints in several")
        if not durable:
            raise ValueError(f"{path}: recycle=True with durable=False could leave old and new bytes in one file")
        options["recycle"] = True
    if max_shard_size is not None:
        if not sharded:
            raise ValueError(f"{path}: max_shard_size is for checkpoints in several files: name a folder or an index")
        limit = parse_size(max_shard_size) if isinstance(max_shard_size, str) else max_shard_size
        if limit < 1:
            raise ValueError(f"max_shard_size must be at least 1 byte, not {limit}")
        options["max_shard_size"] = limit
    made: Plan = module.plan(obj, checksums=checksums, metadata=metadata, **options)
    return made


def require_strings(metadata: Mapping[str, str]) -> None:
    """Raises TypeError unless all keys and values are strings."""
    for key, value in metadata.items():
        if not isinstance(key, str) or not isinstance(value, str):
            raise TypeError(f"metadata must map strings to strings, not {key!r} to {value!r}")


def format_of(path: str, format: str | None) -> ModuleType:
    """Returns the module that handles ``path``, chosen by ``format`` or else by the suffix of the name.

    A folder is sharded, and so is a name without a suffix: a folder to be created.

    Raises:
        ValueError: an unknown format or suffix, or a URL.
    """
    if URL.match(path):
        raise ValueError(
            f"{path}: only local files can be saved and loaded: copy it to or from one (aws s3 cp, gsutil cp, hf "
            "download), or mount it"
        )
    if format is not None:
        name = "torch" if format == "pt" else format
        if name not in FORMATS:
            raise ValueError(f"format must be one of {', '.join(map(repr, FORMATS))}, not {format!r}")
        return importlib.import_module(FORMATS[name][0])
    for name, (module, suffixes) in FORMATS.items():
        if path.endswith(suffixes) or (name == "sharded" and _is_folder(path)):
            return importlib.import_module(module)
    known = ", ".join(suffix for _, suffixes in FORMATS.values() for suffix in suffixes)
    raise ValueError(f"{path}: the name does not end with any of {known}; give format=")


def _is_folder(path: str) -> bool:
    if os.path.isdir(path) or path.endswith(os.sep):
        return True
    return not os.path.splitext(path)[1] and not os.path.exists(path)
