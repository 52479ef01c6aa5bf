"""Which format a path is saved in or was saved in."""

from __future__ import annotations

import importlib
import os
from types import ModuleType

from nvme_ops.checkpoint import FORMATS


def format_of(path: str, format: str | None) -> ModuleType:
    """The module for ``path``, by ``format`` or by what its name ends with; a folder is sharded.

    Raises:
        ValueError: an unknown format or suffix.
    """
    if format is not None:
        if format not in FORMATS:
            raise ValueError(f"format must be one of {', '.join(map(repr, FORMATS))}, not {format!r}")
        return importlib.import_module(FORMATS[format][0])
    for name, (module, suffixes) in FORMATS.items():
        if path.endswith(suffixes) or (name == "sharded" and os.path.isdir(path)):
            return importlib.import_module(module)
    known = ", ".join(suffix for _, suffixes in FORMATS.values() for suffix in suffixes)
    raise ValueError(f"{path}: the name does not end with any of {known}; give format=")
