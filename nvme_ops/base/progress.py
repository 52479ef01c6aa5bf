"""A progress bar on standard error, drawn by tqdm where it is installed; else, and in a log, a line now and then."""

from __future__ import annotations

import contextlib
import itertools
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

_LINE_INTERVAL = 30.0  # seconds
_STEPS = "{l_bar}{bar}| {n}/{total} {elapsed}"

Step = Callable[[str], None]  # ends the previous step and names the next one


class _Progress:
    """A bar of tqdm's; without a terminal or without tqdm a line every 30 seconds, so none for short work."""

    def __init__(self, **options: Any) -> None:
        self._bar: Any = None
        self._shown = time.monotonic()
        if sys.stderr.isatty():
            with contextlib.suppress(ImportError):
                from tqdm import tqdm  # type: ignore[import-untyped,import-not-found,unused-ignore]

                self._bar = tqdm(leave=False, **options)

    def advance(self, count: int, line: str, words: str = "") -> None:
        """Adds ``count`` to what is done. A bar shows it with ``words`` beside it, without one ``line`` is written."""
        if self._bar is not None:
            if words:
                self._bar.set_description_str(words)
            self._bar.update(count)
        elif time.monotonic() - self._shown >= _LINE_INTERVAL:
            self._shown = time.monotonic()
            sys.stderr.write(f"{line}\n")
            sys.stderr.flush()

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()


@contextlib.contextmanager
def progress_bar(total: int) -> Iterator[Step]:
    """Shows a bar of ``total`` steps; yields a function that starts the next step and names it."""
    numbers = itertools.count(1)
    with contextlib.closing(_Progress(total=total, dynamic_ncols=True, bar_format=_STEPS)) as progress:

        def step(words: str) -> None:
            number = next(numbers)
            progress.advance(min(1, number - 1), f"{number} of {total}: {words}", words)

        yield step


@contextlib.contextmanager
def byte_bar(total: int, words: str) -> Iterator[Callable[[int], None]]:
    """Shows a bar of ``total`` bytes; yields a function that adds to the bytes done."""
    bytes_ = {"unit": "B", "unit_scale": True, "unit_divisor": 1024}
    with contextlib.closing(_Progress(total=total, desc=words, **bytes_)) as progress:
        done = 0

        def advance(count: int) -> None:
            nonlocal done
            done += count
            progress.advance(count, f"{words}: {100 * done // max(1, total)} %")

        yield advance
