"""A progress bar on standard error: tqdm's if it is installed, else one line that is overwritten.

If standard error is not a terminal, a line every few seconds.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_NOW_AND_THEN = 30.0  # seconds between lines

Step = Callable[[str], None]  # ends the previous step and names the next one


@contextmanager
def progress_bar(total: int) -> Iterator[Step]:
    """Shows a bar of ``total`` steps; yields a function that starts the next step and names it."""
    if not sys.stderr.isatty():
        yield from _lines_now_and_then(total)
        return
    try:
        from tqdm import tqdm  # type: ignore[import-untyped,import-not-found,unused-ignore]
    except ImportError:
        yield from _plain_line(total)
        return
    with tqdm(total=total, leave=False, dynamic_ncols=True, bar_format="{l_bar}{bar}| {n}/{total} {elapsed}") as bar:
        begun = False

        def step(words: str) -> None:
            nonlocal begun
            if begun:
                bar.update()
            begun = True
            bar.set_description_str(words)

        yield step


def _lines_now_and_then(total: int) -> Iterator[Step]:
    number, shown = 0, time.monotonic()

    def step(words: str) -> None:
        nonlocal number, shown
        number += 1
        if time.monotonic() - shown >= _NOW_AND_THEN:
            shown = time.monotonic()
            sys.stderr.write(f"{number} of {total}: {words}\n")
            sys.stderr.flush()

    yield step


def _percentages_now_and_then(total: int, words: str) -> Iterator[Callable[[int], None]]:
    done, shown = 0, time.monotonic()

    def advance(count: int) -> None:
        nonlocal done, shown
        done += count
        if time.monotonic() - shown >= _NOW_AND_THEN:
            shown = time.monotonic()
            sys.stderr.write(f"{words}: {100 * done // max(1, total)} %\n")
            sys.stderr.flush()

    yield advance


def _plain_line(total: int) -> Iterator[Step]:
    number = 0

    def step(words: str) -> None:
        nonlocal number
        number += 1
        sys.stderr.write(f"\r\033[K{number} of {total}: {words}")
        sys.stderr.flush()

    try:
        yield step
    finally:
        sys.stderr.write("\r\033[K")


@contextmanager
def byte_bar(total: int, words: str) -> Iterator[Callable[[int], None]]:
    """Shows a bar of ``total`` bytes; yields a function that adds to the bytes done."""
    if not sys.stderr.isatty():
        yield from _percentages_now_and_then(total, words)
        return
    try:
        from tqdm import tqdm  # type: ignore[import-untyped,import-not-found,unused-ignore]
    except ImportError:
        yield from _plain_bytes(total, words)
        return
    with tqdm(total=total, desc=words, leave=False, unit="B", unit_scale=True, unit_divisor=1024) as bar:

        def advance(count: int) -> None:
            bar.update(count)

        yield advance


def _plain_bytes(total: int, words: str) -> Iterator[Callable[[int], None]]:
    done, shown = 0, -1

    def advance(count: int) -> None:
        nonlocal done, shown
        done += count
        if (percent := 100 * done // max(1, total)) != shown:
            shown = percent
            sys.stderr.write(f"\r\033[K{words}: {percent} %")
            sys.stderr.flush()

    try:
        yield advance
    finally:
        sys.stderr.write("\r\033[K")
