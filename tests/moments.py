"""Moments at which Python may run a signal handler, numbered: something happens at one of them, always at the same."""

from __future__ import annotations

import random
import sys
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import nvme_ops

OURS = str(Path(nvme_ops.__file__).parent)
# Functions after which Python or torch itself has lost something: a descriptor that has no name yet, or any more; the
# gradients that no_grad was to switch on again; where it was in a with statement.
LOSE = ("open", "dup", "close", "_set_grad_enabled", "__exit__")


def ctrl_c() -> None:
    raise KeyboardInterrupt


class Interrupt:
    """Raises KeyboardInterrupt at the ``number``-th moment of this thread at which Python looks for signals.

    These are the beginning of each function and the end of each call of a function written in C, in files of ours.

    Args:
        number: of the moment; none when it is -1, and all are counted.
        act: what happens instead.
        within: a part of the names of the files of ours.
    """

    def __init__(self, number: int = -1, act: Callable[[], object] = ctrl_c, within: str = OURS) -> None:
        self.number, self.act, self.within, self.count, self.where = number, act, within, 0, ""

    def _see(self, frame: FrameType, event: str, function: Any) -> None:
        if event not in ("call", "c_return") or self.within not in frame.f_code.co_filename:
            return
        if getattr(function, "__name__", "") in ("setprofile", *LOSE):
            return
        self.count += 1
        if self.count == self.number:
            self.where = f"{frame.f_code.co_filename[len(OURS) :]}:{frame.f_lineno} {event} {function or ''}"
            self.act()

    def __enter__(self) -> Interrupt:
        sys.setprofile(self._see)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)


def numbers(name: str, count: int, points: int) -> Iterator[int]:
    """Yields the first and the last moment, and others, always the same."""
    chance = random.Random(zlib.crc32(name.encode()))
    yield from sorted({1, count, *(chance.randint(1, count) for _ in range(points - 2))})
