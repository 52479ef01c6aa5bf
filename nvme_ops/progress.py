"""A progress bar on standard error, drawn by tqdm where it is installed; else, and in a log, a line now and then."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

_NOW_AND_THEN = 30.0  # seconds between lines

Step = Callable[[str], None]  # ends the previous step and names the next one


class _Remarks:
    """What stands in for a bar: nothing is shown of what is short."""

    def __init__(self) -> None:
        self._shown = time.monotonic()

    def show(self, words: str) -> None:
        if time.monotonic() - self._shown >= _NOW_AND_THEN:
            self._shown = time.monotonic()
            sys.stderr.write(f"{words}\n")
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
    lines, number = _Remarks(), 0

    def step(words: str) -> None:
        nonlocal number
        number += 1
        if bar is None:
            lines.show(f"{number} of {total}: {words}")
            return
        bar.update(number - 1 - bar.n)
        bar.set_description_str(words)

    try:
        yield step
    finally:
        if bar is not None:
            bar.close()


@contextmanager
def byte_bar(total: int, words: str) -> Iterator[Callable[[int], None]]:
    """Shows a bar of ``total`` bytes; yields a function that adds to the bytes done."""
    bar = _bar(total=total, desc=words, unit="B", unit_scale=True, unit_divisor=1024)
    lines, done = _Remarks(), 0

    def advance(count: int) -> None:
        nonlocal done
        done += count
        if bar is None:
            lines.show(f"{words}: {100 * done // max(1, total)} %")
        else:
            bar.update(count)

    try:
        yield advance
    finally:
        if bar is not None:
            bar.close()
