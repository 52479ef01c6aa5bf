"""``HostComputing``: whether the CPU computes with an expert in host memory sooner than it is copied."""

from __future__ import annotations

_MOST = 8  # tokens with which the CPU may compute: with more, an accelerator has gained back the copy
_MARGIN = 1.25  # what is done now is given up for what takes this many times less time
_PROBE = 256  # every so many experts one takes the other way, as loads and clocks change
_NEW = 0.25  # the weight of a new measurement


class HostComputing:
    """Compares seconds a byte of computing with those of copying, as they were measured."""

    def __init__(self) -> None:
        self._copying: float | None = None
        self._computing: dict[int, float] = {}  # by the number of tokens
        self._chosen: dict[int, bool] = {}
        self._asked = 0

    def is_sooner(self, tokens: int) -> bool:
        """Returns whether the CPU is to compute with an expert; what was not measured yet is tried."""
        if tokens > _MOST:
            return False
        if self._copying is None or tokens not in self._computing:
            return self._copying is not None
        self._asked += 1
        ratio, chosen = self._copying / self._computing[tokens], self._chosen.get(tokens, True)
        self._chosen[tokens] = chosen = ratio > (1 / _MARGIN if chosen else _MARGIN)
        return chosen is (self._asked % _PROBE != 0)

    def is_copy_unknown(self) -> bool:
        """Returns whether a copy is to be timed: the first one, and the one that is tried in place of computing."""
        return self._copying is None or self._asked % _PROBE == 0

    def note_copy(self, nbytes: int, seconds: float) -> None:
        """Counts a copy."""
        self._copying = _averaged(self._copying, seconds / nbytes)

    def note_computing(self, nbytes: int, tokens: int, seconds: float) -> None:
        """Counts what the CPU has computed with the weights of an expert."""
        self._computing[tokens] = _averaged(self._computing.get(tokens), seconds / nbytes)


def _averaged(before: float | None, new: float) -> float:
    return new if before is None else before + _NEW * (new - before)
