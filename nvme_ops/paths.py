"""Recognises and checks names of files."""

from __future__ import annotations

import os
import re
from typing import Any

#: The beginning of a name that no local file has: ``s3://``, ``hf://``, ``https://``.
URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")


def name_of(path: Any, call: str) -> str:
    """Returns the name of a file. Raises TypeError for anything else; the message shows ``call``, the right usage."""
    if not isinstance(path, str | os.PathLike) or not isinstance(name := os.fspath(path), str):
        raise TypeError(f"the path must be a str or an os.PathLike, not {type(path).__name__}: {call}")
    return name
