"""The format of a checkpoint: which one a name means, and the module that plans and loads it."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from nvme_ops.base.text import URL
from nvme_ops.checkpoint import FORMATS
from nvme_ops.checkpoint.modules import without_ties
from nvme_ops.checkpoint.request import Format, Plan, SaveOptions
from nvme_ops.formats import integrity
from nvme_ops.formats.mistaken import refuse
from nvme_ops.io.arguments import require_switches

_SUFFIX = re.compile(r"\.[A-Za-z]\w*")  # of a file; versions and dates are parts of names


def plan_for(path: str, obj: Any, format: str | None, options: SaveOptions) -> Plan:
    """Returns the plan for saving ``obj`` (for a module, its state dict) in the format of ``path``.

    Raises what ``nvme_ops.save`` raises before it writes.
    """
    require_switches(durable=options.durable, checksums=options.checksums, recycle=options.recycle)
    name, metadata = format_name(path, format), _storable(options.metadata)
    if isinstance(obj, torch.nn.Module):
        obj, left_out = without_ties(obj.state_dict())
        metadata = {**left_out, **metadata}
    if options.recycle and name == "sharded":
        raise ValueError(f"{path}: recycle=True works for one file, not for checkpoints in several")
    if options.recycle and not options.durable:
        raise ValueError(f"{path}: recycle=True with durable=False could leave old and new bytes in one file")
    if options.max_shard_size is not None and name != "sharded":
        raise ValueError(f"{path}: max_shard_size is for checkpoints in several files: name a folder or an index")
    return _module(name).plan(obj, replace(options, metadata=metadata))


def _storable(metadata: Any) -> dict[str, str]:
    """Returns the strings without those that belong to the file that they were loaded from. Raises TypeError."""
    if metadata is not None and not isinstance(metadata, Mapping):
        raise TypeError(f"metadata must map strings to strings, not be a {type(metadata).__name__}")
    for key, value in (metadata or {}).items():
        if not isinstance(key, str) or not isinstance(value, str):
            raise TypeError(f"metadata must map strings to strings, not {key!r} to {value!r}")
    return {key: value for key, value in (metadata or {}).items() if key not in integrity.OURS}


def format_of(path: str, format: str | None) -> Format:
    """Returns the format of ``path``. Raises as ``format_name``."""
    return _module(format_name(path, format))


def format_name(path: str, format: str | None) -> str:
    """Returns the name of the format of ``path``: ``format``, or else what the suffix means.

    A folder is sharded, and so is a name without a suffix, or with none that a file has (``Qwen2.5-7B-Instruct``): a
    folder to be created.

    Raises:
        ValueError: an unknown format or suffix, or a URL. FormatError: what a file is that such a name has.
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
        return name
    for name, suffixes in FORMATS.items():
        if path.endswith(suffixes) or (name == "sharded" and _is_folder(path)):
            return name
    known = ", ".join(suffix for suffixes in FORMATS.values() for suffix in suffixes)
    reason = f"the name does not end with any of {known}; give format="
    if os.path.isfile(path):
        with contextlib.suppress(OSError), open(path, "rb") as file:
            refuse(path, reason, file.fileno())
    raise ValueError(f"{path}: {reason}")


def _module(name: str) -> Format:
    """Returns a format by its name, imported on first use."""
    if name == "sharded":
        from nvme_ops.checkpoint import sharded

        return sharded
    if name == "safetensors":
        from nvme_ops.checkpoint import safetensors_file

        return safetensors_file
    from nvme_ops.checkpoint import torch_file

    return torch_file


def _is_folder(path: str) -> bool:
    if os.path.isdir(path) or path.endswith(os.sep):
        return True
    return not _SUFFIX.fullmatch(os.path.splitext(path)[1]) and not os.path.exists(path)
