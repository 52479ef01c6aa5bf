"""Names of a package whose modules are imported when the names are first used."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping
from typing import Any


def attribute(package: str, name: str, module_of: Mapping[str, str]) -> Any:
    """Returns a package's name from its module, and keeps it in the package. Raises AttributeError for other names."""
    if name not in module_of:
        raise AttributeError(f"module {package!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(module_of[name]), name)
    setattr(sys.modules[package], name, value)
    return value
