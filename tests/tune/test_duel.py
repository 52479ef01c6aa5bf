"""Rounds and duels: ratios round by round, their median, and what of a difference is noise."""

from __future__ import annotations

import math
import random
import statistics
from dataclasses import replace

import pytest

from nvme_ops.measure.search import LEAST_GAIN, Duel, Rounds, geometric_mean
from nvme_ops.settings import Settings

DEFAULT = Settings()
OTHER = replace(DEFAULT, queue_depth=32)
THIRD = replace(DEFAULT, intra_op_parallelism=2)


def raced(*rounds: dict[Settings, float]) -> Rounds:
    made = Rounds()
    for rates in rounds:
        assert made.measure(list(rates), lambda settings, rates=rates: {"read": rates[settings]})  # type: ignore[misc]
    return made


def duel(*ratios: float) -> Duel:
    return raced(*({DEFAULT: 1e9, OTHER: 1e9 * ratio} for ratio in ratios)).duels(DEFAULT)[OTHER]


def test_the_ratio_is_the_median_of_the_rounds() -> None:
    assert duel(1.1, 5.0, 1.2).ratio == pytest.approx(1.2)


def test_the_noise_is_what_the_median_scatters_when_all_is_repeated() -> None:
    chance = random.Random(0)
    repeated = [duel(*(math.exp(chance.gauss(0, 0.05)) for _ in range(25))) for _ in range(300)]
    scattered = statistics.stdev(one.ratio for one in repeated)
    assert statistics.median(one.noise for one in repeated) == pytest.approx(scattered, rel=0.2)
    assert statistics.median(one.noise_of_a_pass for one in repeated) == pytest.approx(0.05 / math.sqrt(2), rel=0.2)


def test_slow_changes_of_the_machine_are_no_noise() -> None:
    assert duel(*(1 + 0.01 * number for number in range(20))).noise < 0.005


@pytest.mark.parametrize(
    ("ratios", "won", "clear"),
    [
        ([1.2, 1.21, 1.19, 1.2, 1.2], True, True),
        ([0.8, 0.81, 0.79, 0.8, 0.8], False, True),
        ([1.2, 1.2], False, True),  # two rounds say nothing
        ([1.3], False, False),  # as single passes differ
        ([1 + LEAST_GAIN / 2, 1 + LEAST_GAIN / 2, 1.0, 1.0], False, False),  # below what is worth a change
        ([1.3, 0.8, 1.2, 0.9, 1.1], False, False),
    ],
)
def test_a_challenger_wins_by_more_than_the_noise(ratios: list[float], won: bool, clear: bool) -> None:
    assert (duel(*ratios).won, duel(*ratios).clear) == (won, clear)


def test_a_round_measures_all_in_turn_and_begins_with_another_each_time() -> None:
    rounds, order = Rounds(), []

    def measure(settings: Settings) -> dict[str, float]:
        order.append(settings)
        return {"read": {DEFAULT: 1.0, OTHER: 2.0, THIRD: 3.0}[settings], "write": 1.0}

    assert all(rounds.measure([DEFAULT, OTHER, THIRD], measure) for _ in range(3))
    assert order == [DEFAULT, OTHER, THIRD, OTHER, THIRD, DEFAULT, THIRD, DEFAULT, OTHER]
    duels = rounds.duels(DEFAULT)
    assert duels[OTHER].ratios == pytest.approx([math.sqrt(2)] * 3)  # the geometric mean over the directions
    assert duels[THIRD].ratios == pytest.approx([math.sqrt(3)] * 3)


def test_any_two_settings_of_the_same_rounds_are_compared_over_these() -> None:
    rounds = raced({DEFAULT: 1.0, OTHER: 2.0}, {DEFAULT: 1.0, OTHER: 2.0, THIRD: 8.0}, {DEFAULT: 1.0, THIRD: 5.0})
    assert rounds.duels(OTHER)[DEFAULT].ratios == pytest.approx([0.5, 0.5])
    assert rounds.duels(OTHER)[THIRD].ratios == pytest.approx([4.0])
    assert rounds.duels(DEFAULT)[THIRD].ratios == pytest.approx([8.0, 5.0])


def test_a_round_that_is_cut_short_does_not_count() -> None:
    rounds = raced({DEFAULT: 1.0, OTHER: 1.0})
    assert not rounds.measure([DEFAULT, OTHER], lambda settings: {"read": 9.0} if settings == OTHER else None)
    assert len(rounds) == 1
    assert rounds.duels(DEFAULT)[OTHER].ratios == pytest.approx([1.0])
    assert Rounds().duels(DEFAULT) == {}
    assert geometric_mean([0.5, 2.0]) == pytest.approx(1.0)
