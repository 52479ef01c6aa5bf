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
        return importlib.import_module(FORMATS[format])
    for name, module in FORMATS.items():
        found = importlib.import_module(module)
        if path.endswith(found.SUFFIXES) or (name == "sharded" and os.path.isdir(path)):
            return found
    suffixes = ", ".join(suffix for module in FORMATS.values() for suffix in importlib.import_module(module).SUFFIXES)
    raise ValueError(f"{path}: the name does not end with any of {suffixes}; give format=")
