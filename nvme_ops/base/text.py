"""Text from and to people: sizes, rates, columns. Units of what is formatted are powers of 1024."""

from __future__ import annotations

import functools
import itertools
import json
import operator
import re
import shutil
import textwrap
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any, TypeVar

# Control characters, halves of surrogate pairs, and characters that change the direction of text.
_ACTED_ON_IN_LINES = re.compile("[\\x00-\\x08\\x0b-\\x1f\\x7f-\\x9f\\u2028-\\u202e\\u2066-\\u2069\\ud800-\\udfff]")
_ACTED_ON = re.compile(_ACTED_ON_IN_LINES.pattern[:-1] + "\\t\\n]")

WORDS: Any = {"break_long_words": False, "break_on_hyphens": False}  # paths and flags stay whole

#: The beginning of a name that no local file has: ``s3://``, ``hf://``, ``https://``.
URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")

_T = TypeVar("_T")

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30


def parse_json(content: bytes | str) -> Any:
    """Parses JSON that others may have written. Raises ValueError, also if it is nested too deeply."""
    try:
        return json.loads(content)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error


def printable(text: object, *, lines: bool = False) -> str:
    """Escapes characters that a terminal acts on or that cannot be encoded: names of files may contain anything.

    With ``lines``, line breaks and tabs stay.
    """
    return (_ACTED_ON_IN_LINES if lines else _ACTED_ON).sub(lambda match: repr(match[0])[1:-1], str(text))


def parse_size(text: str, *, zero: bool = False) -> int:
    """Parses a size in bytes: ``2G`` and ``2GiB`` are 2 * 1024**3, ``2GB`` is 2 * 1000**3, ``4096`` is 4096.

    ``zero`` allows a size of 0. Raises ValueError for anything that is not a size.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(?:([KMGT])(i?B)?|B)?", text.strip(), re.IGNORECASE)
    size = Fraction(-1)
    if match:
        unit = 1000 if (match[3] or "").upper() == "B" else 1024
        size = Fraction(match[1]) * unit ** " KMGT".index((match[2] or " ").upper())
    if not (1 <= size < 1 << 63 or (zero and size == 0)):
        raise ValueError(f"{text!r} is not a size; examples: 512M, 2GiB (powers of 1024), 5GB (of 1000)")
    return int(size)


def bytes_of(name: str, value: object, least: int = 1) -> int:
    """Returns an argument that is bytes, or a size such as ``"4G"``.

    Raises TypeError or ValueError, which call it ``name``, if it is no size of at least ``least``.
    """
    if isinstance(value, str):
        try:
            value = parse_size(value, zero=True)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from None
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise TypeError(f"{name} must be bytes or a size such as '4G', not {type(value).__name__}")
    nbytes = operator.index(value)
    if nbytes < least:
        raise ValueError(f"{name} must be at least {counted(least, 'byte')}, not {nbytes}")
    return nbytes


def size_words(size: float) -> str:
    """Formats a size: ``512 B``, ``1 GiB``."""
    value = float(size)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if float(f"{value:.4g}") < 1024:
            return f"{value:.4g} {unit}"
        value /= 1024
    return f"{value:.4g} TiB"


def counted(number: int, thing: str) -> str:
    """Formats a count: ``1 tensor``, ``2 tensors``."""
    return f"{number} {thing}{'s' * (number != 1)}"


def least_words(size: int) -> str:
    """Formats a size, rounded up: the least that suffices."""
    words = size_words(size)
    if parse_size(words, zero=True) >= size:
        return words
    unit = words.split()[1]
    thousandths = -(-size * 1000 // 1024 ** ("B", "KiB", "MiB", "GiB", "TiB").index(unit))
    return f"{thousandths / 1000:.10g} {unit}"


def rate_words(rate: float) -> str:
    """Formats bytes per second, in powers of 1000: ``2.71 GB/s``, ``42 MB/s``."""
    return f"{rate / 1e9:.3g} GB/s" if rate >= 1e8 else f"{rate / 1e6:.3g} MB/s"


def seconds_words(seconds: float) -> str:
    """Formats a duration: ``1.25 s``, ``30.0 ms``."""
    return f"{rounded(seconds, 3)} s" if seconds >= 1 else f"{rounded(1000 * seconds, 3)} ms"


def share_words(share: float) -> str:
    """Formats a fraction in percent; a fraction above 0 is never shown as 0 %."""
    return "< 1 %" if 0 < share < 0.01 else f"{100 * share:.0f} %"


def rounded(value: float, digits: int) -> str:
    """Formats with at most ``digits`` significant digits, never with an exponent: 2.713, 41.2, 1234."""
    whole = len(str(int(abs(value))))
    return f"{value:.{max(0, digits - whole)}f}"


def terminal_width() -> int:
    """Returns the columns of the terminal, or of the variable COLUMNS; 80 where there is neither."""
    return max(40, shutil.get_terminal_size((80, 24)).columns)


def columns_text(lines: Sequence[Sequence[str]]) -> str:
    """Aligns cells in columns, each as wide as its widest cell. They are made ``printable``.

    Columns that do not fit in a line form a further block below, beside the first column again. A name in the first
    column that leaves no room for the others has a line of its own; other cells are wrapped.
    """
    width = terminal_width()
    lines = [[printable(cell) for cell in line] for line in lines]
    first, *others = (max(map(len, column)) for column in zip(*lines, strict=True))
    label = min(first, max(width // 3, width - sum(2 + other for other in others)))
    others = [min(other, width - label - 2) for other in others]
    blocks: list[list[int]] = [[]]
    for number in range(len(others)):
        if blocks[-1] and label + sum(2 + others[other] for other in [*blocks[-1], number]) > width:
            blocks.append([])
        blocks[-1].append(number)
    return "\n\n".join(_block(lines, label, [(number + 1, others[number]) for number in block]) for block in blocks)


def _block(lines: Sequence[Sequence[str]], label: int, columns: Sequence[tuple[int, int]]) -> str:
    shown = []
    for line in lines:
        name, cells = line[0], [textwrap.wrap(line[number], max(1, width)) or [""] for number, width in columns]
        if columns and columns[0][0] > 1 and not any(line[number] for number, _ in columns):
            continue  # nothing to show in a block below the first
        if len(name) > label:
            shown.append(name)
            name = ""
        for number, parts in enumerate(itertools.zip_longest(*cells, fillvalue="")):
            row = [("" if number else name).ljust(label)]
            row += [part.ljust(width) for part, (_, width) in zip(parts, columns, strict=True)]
            shown.append("  ".join(row).rstrip())
        if not columns and name:
            shown.append(name)
    return "\n".join(shown)


def fitted(text: str) -> str:
    """Wraps the lines that are too long for the terminal, and indents their continuations."""
    width = terminal_width()
    return "\n".join(
        line
        if len(line) <= width
        else textwrap.fill(line, width, subsequent_indent=" " * (len(line) - len(line.lstrip()) + 2), **WORDS)
        for line in text.split("\n")
    )


def never_raising(words: Callable[[_T], str]) -> Callable[[_T], str]:
    """Decorates a ``__repr__``, so that an object whose ``__init__`` has raised has one as well.

    A ``__repr__`` takes no lock and does no I/O: a debugger or a signal handler may call it anywhere.
    """

    @functools.wraps(words)
    def shown(self: _T) -> str:
        try:
            return words(self)
        except AttributeError:
            return f"<{type(self).__name__}, incomplete>"

    return shown


class Counts:
    """Base of dataclasses of counts: ``print`` shows a table of those that are not 0, in words.

    A name has its unit in it: ``bytes``, ``seconds`` or ``share``.
    """

    def __str__(self) -> str:
        derived = [name for kind in type(self).__mro__ for name, value in vars(kind).items() if type(value) is property]
        values = {name: getattr(self, name) for name in (*vars(self), *derived)}
        lines = [(name, _count_words(name, value)) for name, value in values.items() if value]
        return columns_text(lines) if lines else "nothing yet"

    def __repr__(self) -> str:
        """Returns for example ``SwapStats(bytes_read=4096)``."""
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in vars(self).items() if value)})"


def _count_words(name: str, value: float | str) -> str:
    if isinstance(value, str):
        return value
    for unit, words in (("bytes", size_words), ("seconds", seconds_words), ("share", share_words)):
        if unit in name.split("_"):
            return words(value)
    return str(value) if isinstance(value, int) else f"{value:.3g}"
