"""Challengers against the default, measured in turn and compared by the ratio of each round.

Rates of different minutes are never compared: single passes vary by 20 % on machines that others use too.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from nvme_ops.bench.settings import Settings

#: Bytes per second of one pass, by direction: "read", "write".
Rates: TypeAlias = Mapping[str, float]

#: By how much the rates must differ, whatever the noise, before the default is left.
LEAST_GAIN = 0.02
#: Rounds until a median says anything.
LEAST_ROUNDS = 3
_SPREAD_OF_MEDIAN = 1.2533  # of n normal values: sqrt(pi / 2) of that of their mean
_DIFFERENCE = 0.9539  # median of |a - b| for two normal values of spread 1: sqrt(2) * 0.6745


@dataclass(frozen=True)
class Duel:
    """How a challenger did against the default: above 1 it was faster."""

    challenger: Settings
    ratios: Sequence[float]  # one for each round

    @property
    def ratio(self) -> float:
        """The median of the rounds."""
        return statistics.median(self.ratios)

    @property
    def noise(self) -> float:
        """By how much the median may be off (one standard deviation).

        From how much each ratio differs from the one before, so that slow changes of the machine do not count.
        """
        differences = [abs(math.log(one / other)) for one, other in itertools.pairwise(self.ratios)]
        if not differences:
            return math.inf
        return _SPREAD_OF_MEDIAN * statistics.median(differences) / _DIFFERENCE / math.sqrt(len(self.ratios))

    @property
    def won(self) -> bool:
        """Whether the challenger was faster by more than the noise explains."""
        return len(self.ratios) >= LEAST_ROUNDS and beyond_noise(self.ratio, self.noise)

    @property
    def clear(self) -> bool:
        """Whether more rounds would hardly change that."""
        return abs(self.ratio - 1) > max(LEAST_GAIN, 4 * self.noise)


def beyond_noise(ratio: float, noise: float) -> bool:
    """Whether a ratio above 1 is more than noise, two standard deviations of it."""
    return ratio > 1 + max(LEAST_GAIN, 2 * noise)


class Contest:
    """Rounds of ``baseline`` and all ``challengers``."""

    def __init__(self, baseline: Settings, challengers: Sequence[Settings]) -> None:
        self._contestants = [baseline, *challengers]
        self._ratios: list[list[float]] = [[] for _ in challengers]
        self.rounds = 0

    def round(self, measure: Callable[[Settings], Rates | None]) -> bool:
        """One pass of each, each round beginning with another one. False, and nothing counts, when one is None."""
        first = self.rounds % len(self._contestants)
        rates: dict[Settings, float] = {}
        for settings in self._contestants[first:] + self._contestants[:first]:
            taken = measure(settings)
            if taken is None:
                return False
            rates[settings] = geometric_mean(taken.values())
        baseline, *challengers = self._contestants
        for settings, ratios in zip(challengers, self._ratios, strict=True):
            ratios.append(rates[settings] / rates[baseline])
        self.rounds += 1
        return True

    def duels(self) -> list[Duel]:
        """As far as it has come; none before the first round."""
        pairs = zip(self._contestants[1:], self._ratios, strict=True)
        return [Duel(settings, tuple(ratios)) for settings, ratios in pairs if ratios]


def geometric_mean(values: Iterable[float]) -> float:
    """Of positive numbers, at least one."""
    return math.exp(statistics.fmean(math.log(value) for value in values))
