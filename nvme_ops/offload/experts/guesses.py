"""Judges guesses: which experts are worth reading before it is known that they are used."""

from __future__ import annotations

import statistics
from collections import deque

_SURE = 0.9  # share of guesses that were right: such guesses are always made
_WORTH_IT = 0.5  # below, guesses cost more reading than they save waiting
_ADDED = 0.1  # what wrong guesses that are less than sure may add to the reads that are needed
_SAVED_UP = 4.0  # reads by wrong guesses that may follow each other
_MEMORY = 0.98  # factor by which older guesses count less
_QUARTERS = 4
_PROBE = 8  # while no guess for a layer is worth it, every so many tokens it is seen whether one would be

_STEPS = 32  # timed with guesses, and without
_BETWEEN = 1024  # steps between one comparison and the next
_FIRST = 128  # steps until the first


class LayerGuesses:
    """How right guesses for one layer were. The quarters of a guess, likeliest experts first, are judged apart."""

    def __init__(self) -> None:
        self._right: dict[int, float] = {}  # shares, by quarter
        self._allowed = 0.0  # wrong guesses

    def is_due(self, now: float) -> bool:
        """Returns whether a guess is worth the time to make it. ``now`` is in tokens."""
        return max(self._right.values(), default=1) >= _WORTH_IT or now % _PROBE < 1

    def is_worth_it(self, quarter: int) -> bool:
        """Returns whether experts of a quarter are to be read."""
        right = self._right.get(quarter, 1)
        return right >= _SURE or (right >= _WORTH_IT and self._allowed >= 0)

    def judge(self, quarter: int, right: bool) -> None:
        """Counts a guess."""
        self._right[quarter] = _MEMORY * self._right.get(quarter, 1) + (1 - _MEMORY) * right

    def note_read(self, needed: bool) -> None:
        """Counts an expert that was read because it was needed, or by a wrong guess."""
        self._allowed = max(-_SAVED_UP, min(_SAVED_UP, self._allowed + (_ADDED if needed else -1)))

    @staticmethod
    def quarter(place: int, count: int) -> int:
        """Returns the quarter of the guess at ``place`` of ``count``."""
        return place * _QUARTERS // count


class Trial:
    """Compares, every so many steps, how long steps take with guesses and without, and keeps what takes less time."""

    def __init__(self) -> None:
        self._kept = True  # guesses
        self._tokens = 0
        self._restart(_FIRST)

    @property
    def guessing(self) -> bool:
        """Whether guesses are made."""
        return self._kept is (self._left > _STEPS)

    def note_step(self, tokens: int, seconds: float) -> None:
        """Counts a step like the one before it: of as many tokens."""
        if tokens != self._tokens:
            self._tokens = tokens
            self._restart(_FIRST)
        self._latest.append(seconds)
        self._left -= 1
        if self._left == _STEPS:
            self._before = statistics.median(self._latest)
        elif self._left == 0:
            if statistics.median(self._latest) < self._before:
                self._kept = not self._kept
            self._restart(_BETWEEN)

    def _restart(self, steps: int) -> None:
        self._left = steps + _STEPS
        self._latest = deque[float](maxlen=_STEPS)
        self._before = 0.0
