"""A progress bar on standard error: tqdm's if it is installed, else one line that is overwritten.

If standard error is not a terminal, a line every few seconds.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

_NOW_AND_THEN = 30.0  # seconds between lines

Step = Callable[[str], None]  # ends the previous step and names the next one


class _Line:
    """What stands in for a bar: on a terminal one line that is overwritten, elsewhere one every few seconds."""

    def __init__(self) -> None:
        self._overwrites, self._shown, self._words = sys.stderr.isatty(), time.monotonic(), ""

    def show(self, words: str) -> None:
        if self._overwrites:
            if words != self._words:
                self._write(f"\r\033[K{words}")
            self._words = words
        elif time.monotonic() - self._shown >= _NOW_AND_THEN:
            self._shown = time.monotonic()
            self._write(f"{words}\n")

    def end(self) -> None:
        if self._overwrites:
            self._write("\r\033[K")

    def _write(self, text: str) -> None:
        sys.stderr.write(text)
        sys.stderr.flush()


def _bar(**options: Any) -> Any:
    """Returns a bar of tqdm's; None without a terminal or without tqdm."""
    if not sys.stderr.isatty():
        return None
    try:
        from tqdm import tqdm  # type: ignore[import-untyped,import-not-found,unused-ignore]
    except ImportError:
        return None
    return tqdm(leave=False, **options)


@contextmanager
def progress_bar(total: int) -> Iterator[Step]:
    """Shows a bar of ``total`` steps; yields a function that starts the next step and names it."""
    bar = _bar(total=total, dynamic_ncols=True, bar_format="{l_bar}{bar}| {n}/{total} {elapsed}")
    line, number = _Line(), 0

    def step(words: str) -> None:
        nonlocal number
        number += 1
        if bar is None:
            line.show(f"{number} of {total}: {words}")
            return
        bar.update(number - 1 - bar.n)
        bar.set_description_str(words)

    try:
        yield step
    finally:
        (line.end if bar is None else bar.close)()


@contextmanager
def byte_bar(total: int, words: str) -> Iterator[Callable[[int], None]]:
    """Shows a bar of ``total`` bytes; yields a function that adds to the bytes done."""
    bar = _bar(total=total, desc=words, unit="B", unit_scale=True, unit_divisor=1024)
    line, done = _Line(), 0

    def advance(count: int) -> None:
        nonlocal done
        done += count
        if bar is None:
            line.show(f"{words}: {100 * done // max(1, total)} %")
        else:
            bar.update(count)

    try:
        yield advance
    finally:
        (line.end if bar is None else bar.close)()
