"""Formats and parses sizes, rates, shares and columns of text. Units of sizes are powers of 1024."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from typing import Any

# Control characters, halves of surrogate pairs, and what changes the direction of what follows.
_ACTED_ON_IN_LINES = re.compile("[\\x00-\\x08\\x0b-\\x1f\\x7f-\\x9f\\u2028-\\u202e\\u2066-\\u2069\\ud800-\\udfff]")
_ACTED_ON = re.compile(_ACTED_ON_IN_LINES.pattern[:-1] + "\\t\\n]")

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
_UNITS = {"": 1, "K": KIB, "M": MIB, "G": GIB, "T": 1 << 40}


def parse_json(content: bytes | str) -> Any:
    """Parses JSON that others may have written. Raises ValueError, also for what is nested too deeply."""
    try:
        return json.loads(content)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error


def printable(text: object, *, lines: bool = False) -> str:
    """Returns a text in which what a terminal acts on is escaped, and what no encoding has: names may have anything.

    ``lines``: it may have line breaks and tabs.
    """
    return (_ACTED_ON_IN_LINES if lines else _ACTED_ON).sub(lambda found: repr(found[0])[1:-1], str(text))


def parse_size(text: str, *, zero: bool = False) -> int:
    """Parses a size in bytes: ``64M``, ``1G``, ``1.5GiB``, ``4096``; units are powers of 1024.

    ``zero``: a size of 0 is one too. Raises ValueError for what is no size.
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(?:i?B)?", text.strip(), re.IGNORECASE)
    size = float(found[1]) * _UNITS[found[2].upper()] if found else -1
    if not (1 <= size < math.inf or (zero and size == 0)):
        raise ValueError(f"{text!r} is not a size; examples: 512M, 1G, 1.5G")
    return int(size)


def size_of(size: int | str) -> int:
    """Parses a size as Hugging Face's libraries do: ``GB`` is 1000**3, ``GiB`` 1024**3. Raises ValueError."""
    if isinstance(size, str):
        found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT])(i?)B", size.strip(), re.IGNORECASE)
        if found is None:
            raise ValueError(f"{size!r} is not a size; examples: 500MB, 5GB, 2GiB")
        size = int(float(found[1]) * (1024 if found[3] else 1000) ** ("KMGT".index(found[2].upper()) + 1))
    if size < 1:
        raise ValueError(f"a size must be at least 1 byte, not {size}")
    return size


def size_words(size: int) -> str:
    """Formats a size: ``512 B``, ``1 GiB``."""
    value = float(size)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if float(f"{value:.4g}") < 1024:
            return f"{value:.4g} {unit}"
        value /= 1024
    return f"{value:.4g} TiB"


def rate_words(rate: float) -> str:
    """Formats bytes per second, in powers of 1000: ``2.71 GB/s``, ``42 MB/s``."""
    return f"{rate / 1e9:.3g} GB/s" if rate >= 1e8 else f"{rate / 1e6:.3g} MB/s"


def share_words(share: float) -> str:
    """Formats a fraction in percent; a fraction above 0 is never shown as 0 %."""
    return "< 1 %" if 0 < share < 0.01 else f"{100 * share:.0f} %"


def rounded(value: float, digits: int) -> str:
    """Formats with at most ``digits`` significant digits, never with an exponent: 2.713, 41.2, 1234."""
    whole = len(str(int(abs(value))))
    return f"{value:.{max(0, digits - whole)}f}"


def columns_text(lines: Sequence[Sequence[str]]) -> str:
    """Aligns cells in columns, each as wide as its widest cell. They are made ``printable``."""
    lines = [[printable(cell) for cell in line] for line in lines]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines
    )
