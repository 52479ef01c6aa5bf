"""Measures settings alternately, round after round, and compares them by the ratio of their rates within each round.

Rates measured minutes apart are never compared: single passes vary by 20 % on shared machines.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from nvme_ops.settings import Settings

#: Bytes per second of one pass, by direction: "read", "write".
Rates: TypeAlias = Mapping[str, float]

#: By how much the rates must differ, whatever the noise, before the default is left.
LEAST_GAIN = 0.02
#: Rounds until a median says anything.
LEAST_ROUNDS = 3
_UNKNOWN = 0.1  # standard deviation of a round's ratio, as long as no setting was measured twice
_SPREAD_OF_MEDIAN = 1.2533  # of n normal values: sqrt(pi / 2) of that of their mean
_DIFFERENCE = 0.9539  # median of |a - b| for two normal values of spread 1: sqrt(2) * 0.6745


@dataclass(frozen=True)
class Duel:
    """A challenger against a baseline: above 1 it was faster."""

    challenger: Settings
    ratios: Sequence[float]  # one for each round
    noise: float  # standard deviation of ``ratio``

    @property
    def ratio(self) -> float:
        """The median of the rounds."""
        return statistics.median(self.ratios)

    @property
    def won(self) -> bool:
        """True when the challenger was faster by more than two standard deviations of the noise."""
        return len(self.ratios) >= LEAST_ROUNDS and self.ratio > 1 + max(LEAST_GAIN, 2 * self.noise)

    @property
    def clear(self) -> bool:
        """True when more rounds would hardly change the result."""
        return abs(self.ratio - 1) > max(LEAST_GAIN, 4 * self.noise)

    @property
    def noise_of_a_pass(self) -> float:
        """Standard deviation of the logarithm of a single pass's rate."""
        return self.noise / _SPREAD_OF_MEDIAN * math.sqrt(len(self.ratios) / 2)


class Rounds:
    """The rates of all rounds so far. Any two settings that were measured in the same rounds can be compared."""

    def __init__(self) -> None:
        self._rates: list[dict[Settings, float]] = []

    def __len__(self) -> int:
        return len(self._rates)

    def measure(self, contestants: Sequence[Settings], measure: Callable[[Settings], Rates | None]) -> bool:
        """Measures each contestant once, starting with another one each round; returns False if a pass is None."""
        first = len(self) % len(contestants)
        rates: dict[Settings, float] = {}
        for settings in [*contestants[first:], *contestants[:first]]:
            taken = measure(settings)
            if taken is None:
                return False
            rates[settings] = geometric_mean(taken.values())
        self._rates.append(rates)
        return True

    def duels(self, baseline: Settings) -> dict[Settings, Duel]:
        """Compares every other setting with ``baseline``, over the rounds that had both.

        The noise is estimated over all of these duels together, from how much each ratio differs from the previous one,
        so that slow changes of the machine do not count.
        """
        ratios: dict[Settings, list[float]] = {}
        for rates in self._rates:
            for settings, rate in rates.items() if baseline in rates else ():
                ratios.setdefault(settings, []).append(rate / rates[baseline])
        ratios.pop(baseline, None)
        differences = [abs(math.log(one / two)) for each in ratios.values() for one, two in itertools.pairwise(each)]
        scatter = statistics.median(differences) / _DIFFERENCE if differences else _UNKNOWN
        return {
            settings: Duel(settings, tuple(each), _SPREAD_OF_MEDIAN * scatter / math.sqrt(len(each)))
            for settings, each in ratios.items()
        }


def geometric_mean(values: Iterable[float]) -> float:
    """Returns the geometric mean of positive numbers, at least one."""
    return math.exp(statistics.fmean(math.log(value) for value in values))
