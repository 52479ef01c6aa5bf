"""Chooses the format of a path to save or load."""

from __future__ import annotations

import importlib
import os
from types import ModuleType

from nvme_ops.checkpoint import FORMATS
from nvme_ops.paths import URL

_ALSO_CALLED = {"pt": "torch"}


def format_of(path: str, format: str | None) -> ModuleType:
    """Returns the module for ``path``, by ``format`` or else by the ending of its name.

    A folder is sharded, and so is a name without an ending, which is that of a folder to be made.

    Raises:
        ValueError: an unknown format or suffix, or not a local file.
    """
    if URL.match(path):
        raise ValueError(
            f"{path}: only files that the system knows are saved and loaded: copy it to or from a local file (aws s3 "
            "cp, gsutil cp, hf download), or mount it"
        )
    if format is not None:
        name = _ALSO_CALLED.get(format, format)
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
