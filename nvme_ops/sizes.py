"""Sizes as people write them; units are powers of 1024."""

from __future__ import annotations

import math
import re

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
_UNITS = {"": 1, "K": KIB, "M": MIB, "G": GIB, "T": 1 << 40}


def parse_size(text: str) -> int:
    """Bytes: ``64M``, ``1G``, ``1.5GiB``, ``4096``; units are powers of 1024. Raises ValueError."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(?:i?B)?", text.strip(), re.IGNORECASE)
    size = float(found[1]) * _UNITS[found[2].upper()] if found else 0
    if not 1 <= size < math.inf:
        raise ValueError(f"{text!r} is not a size; examples: 512M, 1G, 1.5G")
    return int(size)


def size_of(size: int | str) -> int:
    """Bytes as Hugging Face's libraries count them: ``GB`` is 1000**3, ``GiB`` 1024**3. Raises ValueError."""
    if isinstance(size, str):
        found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT])(i?)B", size.strip(), re.IGNORECASE)
        if found is None:
            raise ValueError(f"{size!r} is not a size; examples: 500MB, 5GB, 2GiB")
        size = int(float(found[1]) * (1024 if found[3] else 1000) ** ("KMGT".index(found[2].upper()) + 1))
    if size < 1:
        raise ValueError(f"a size must be at least 1 byte, not {size}")
    return size


def size_words(size: int) -> str:
    """For a reader: ``512 B``, ``1 GiB``."""
    value = float(size)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if float(f"{value:.4g}") < 1024:
            return f"{value:.4g} {unit}"
        value /= 1024
    return f"{value:.4g} TiB"
