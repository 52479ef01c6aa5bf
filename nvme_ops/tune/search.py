"""Finds the best settings of a handle within a budget, on machines where single passes vary by 20 %.

1. Openings: the default and a few combinations of block size and lanes.
2. Passes with the settings that, after all passes so far, may still be the fastest (``model``), until the share of the
   budget is gone or nothing can be expected any more. Hopeless settings are measured once or never, close calls often.
   Passes are short: twice as many of half the size say more about noise that comes and goes.
3. Of the settings that cannot be told from the fastest the simplest is the challenger.
4. The final: a duel of default and challenger in turn, passes of full size, judged by the median of the ratios, as long
   as the time allows or until it is clear. A difference inside the noise keeps the default.

Apart from what it measures the search is deterministic.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeAlias

from nvme_ops.bench.settings import Settings
from nvme_ops.text import KIB, MIB
from nvme_ops.tune.duel import LEAST_GAIN, LEAST_ROUNDS, Contest, Duel, Rates, beyond_noise, geometric_mean
from nvme_ops.tune.model import Belief, Model

#: Measures settings once; with True in a pass of full size, else in a short one.
Measure: TypeAlias = Callable[[Settings, bool], Rates]

DEFAULT = Settings()
#: By how much the rates may fall for a simpler setting.
TIE = 0.01
#: The share of the budget for the search; the rest is for the final.
SEARCH_SHARE = 0.7
#: More combinations than this are not searched: the model's memory grows with their square.
MOST_CANDIDATES = 4096
_MOST_PASSES = 500  # of the search: the model's work grows with their square
# Standard deviations above the mean at which a setting is judged, from the begin to the end of the search: what nobody
# knows must be tried early, and close calls want repetition late.
_CURIOUS, _CAUTIOUS = 2.0, 0.5
_LEAST_DUEL, _MOST_DUEL = 5, 40  # rounds of the final


@dataclass(frozen=True)
class Axis:
    """One setting and the values to try, ascending."""

    name: str
    values: Sequence[Any]


def axes(processors: int) -> list[Axis]:
    """What is tried on so many processors. More lanes than processors only add threads."""
    return [
        Axis("block_size", [128 * KIB, 256 * KIB, 512 * KIB, MIB, 2 * MIB, 4 * MIB, 8 * MIB]),
        Axis("queue_depth", [4, 8, 16, 32, 64, 128]),
        Axis("intra_op_parallelism", [count for count in (1, 2, 4, 8, 16) if count <= max(1, processors)]),
        Axis("overlap_events", [False, True]),
        Axis("single_submit", [False, True]),
    ]


def combinations(axes: Sequence[Axis]) -> list[Settings]:
    """All settings that the axes span; what is no axis has its default."""
    names = [axis.name for axis in axes]
    return [
        replace(DEFAULT, **dict(zip(names, values, strict=True)))
        for values in itertools.product(*(axis.values for axis in axes))
    ]


@dataclass(frozen=True)
class Outcome:
    """What a search found, or has found so far."""

    best: Settings
    baseline: Settings  # the default, or what is nearest to it where that is not searched
    challenger: Settings  # the baseline itself where nothing challenges it
    final: Duel | None  # None without challenger, or before there were enough rounds
    axes: Sequence[Axis]
    rates: Mapping[Settings, Rates]  # medians
    passes: Mapping[Settings, int]  # how often each was measured
    belief: Belief | None
    complete: bool  # or the time was over before the final was


@dataclass
class _Taken:
    short: list[Rates] = field(default_factory=list)
    full: list[Rates] = field(default_factory=list)

    def median(self) -> Rates:
        taken = self.full or self.short
        return {name: statistics.median(rates[name] for rates in taken) for name in taken[0]}


class Search:
    """One search over the combinations of ``axes``.

    Args:
        measure: what it calls again and again.
        axes: settings and values to try; what is no axis has its default.
        spent: tells the share of the budget that is gone. Once it is 1 nothing begins but the first pass.
        progress: told what is done next.
    """

    def __init__(
        self,
        measure: Measure,
        axes: Sequence[Axis],
        spent: Callable[[], float],
        progress: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._measure, self._axes, self._spent, self._progress = measure, axes, spent, progress
        self._candidates = combinations(axes)
        self._baseline = self._challenger = _nearest_to_default(axes)
        self._model = Model(self._candidates)
        self._belief: Belief | None = None
        self._contest: Contest | None = None
        self._taken: dict[Settings, _Taken] = {}
        self._complete = True

    def run(self) -> Outcome:
        """Everything. What ``measure`` raises ends it; ``outcome`` then tells what is known."""
        self._measure_all([self._baseline], math.inf)  # there is always something to tell
        batch = self._openings()
        while self._measure_all(batch) and len(self._model) < _MOST_PASSES:
            self._belief = self._model.fit()
            if self._belief.possible_gain() < 1 + LEAST_GAIN / 2:
                break
            gone = max(self._spent() / SEARCH_SHARE, len(self._model) / _MOST_PASSES)
            optimism = _CURIOUS + (_CAUTIOUS - _CURIOUS) * min(1.0, gone)
            batch = self._belief.promising(max(8, len(self._model) // 10), optimism)
            batch += self._simpler(self._belief.best) if gone > 0.5 else []
        self._belief = self._model.fit()
        self._final(self._belief)
        return self.outcome()

    def outcome(self) -> Outcome:
        """As far as the search has come. Without a final the best is what the model is sure of."""
        duels = self._contest.duels() if self._contest is not None else []
        final = duels[0] if duels and len(duels[0].ratios) >= LEAST_ROUNDS else None
        challenger = self._challenger
        if final is not None:
            won = final.won
        elif self._belief is not None:
            challenger = self._simplest(self._belief)
            won = beyond_noise(*self._belief.ratio(challenger, self._baseline))
        else:
            won = False
        return Outcome(
            challenger if won else self._baseline,
            self._baseline,
            challenger,
            final,
            self._axes,
            {settings: taken.median() for settings, taken in self._taken.items()},
            {settings: len(taken.short) + len(taken.full) for settings, taken in self._taken.items()},
            self._belief,
            self._complete,
        )

    def _openings(self) -> list[Settings]:
        """At most three block sizes with at most three numbers of lanes, at a depth that suits most devices."""
        depth = min(self._values("queue_depth"), key=lambda value: abs(value - 32))
        found = [
            replace(self._baseline, block_size=block, intra_op_parallelism=lanes, queue_depth=depth)
            for block in _apart(self._values("block_size"))
            for lanes in _apart(self._values("intra_op_parallelism"))
        ]
        return [settings for settings in found if settings != self._baseline]

    def _values(self, name: str) -> Sequence[Any]:
        return next((axis.values for axis in self._axes if axis.name == name), [getattr(DEFAULT, name)])

    def _measure_all(self, batch: Iterable[Settings], limit: float = SEARCH_SHARE) -> bool:
        """Short passes; False when the time did not suffice."""
        for settings in batch:
            rates = self._pass(settings, False, limit)
            if rates is None:
                return False
            self._model.add(settings, geometric_mean(rates.values()))
        return True

    def _simplest(self, belief: Belief) -> Settings:
        """Lanes cost threads, switches CPU; then what is unusual, and what holds more memory."""

        def cost(settings: Settings) -> tuple[int, int, int, int]:
            unlike = sum(getattr(settings, axis.name) != getattr(self._baseline, axis.name) for axis in self._axes)
            switches = settings.single_submit + settings.overlap_events
            return settings.intra_op_parallelism, switches, unlike, settings.block_size * settings.queue_depth

        return min(belief.within(TIE, belief.best), key=cost)

    def _simpler(self, settings: Settings) -> list[Settings]:
        """One setting each as the baseline has it: to know what it costs."""
        changed = [replace(settings, **{axis.name: getattr(self._baseline, axis.name)}) for axis in self._axes]
        return [other for other in changed if other != settings]

    def _final(self, belief: Belief) -> None:
        """Also where the challenger is the baseline itself: its rates are wanted."""
        self._challenger = self._simplest(belief)
        alone = self._challenger == self._baseline
        self._contest = contest = Contest(self._baseline, [] if alone else [self._challenger])
        while contest.rounds < (_LEAST_DUEL if alone else _MOST_DUEL):
            if not contest.round(self._full_pass):
                return
            if contest.rounds >= _LEAST_DUEL and all(duel.clear for duel in contest.duels()):
                return

    def _full_pass(self, settings: Settings) -> Rates | None:
        return self._pass(settings, True, 1.0)

    def _pass(self, settings: Settings, full: bool, limit: float) -> Rates | None:
        if self._spent() >= limit:
            self._complete = not full
            return None
        self._progress("the best against the default" if full else "searching")
        rates = self._measure(settings, full)
        taken = self._taken.setdefault(settings, _Taken())
        (taken.full if full else taken.short).append(rates)
        return rates


def _nearest_to_default(axes: Iterable[Axis]) -> Settings:
    return replace(DEFAULT, **{axis.name: min(axis.values, key=partial(_distance, axis.name)) for axis in axes})


def _distance(name: str, value: int) -> float:
    """From the default, in doublings where there are any."""
    return abs(math.log2(1 + value) - math.log2(1 + getattr(DEFAULT, name)))


def _apart(values: Sequence[Any]) -> list[Any]:
    """At most three, from low to high."""
    last = len(values) - 1
    return [values[place] for place in sorted({round(last / 6), round(last / 2), last})]
