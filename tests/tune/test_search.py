"""The search on made-up devices with a made-up clock: what it finds, what it keeps, and when it ends."""

from __future__ import annotations

import math
import random
import statistics
from dataclasses import replace

import pytest

from nvme_ops.base.settings import Settings
from nvme_ops.base.text import KIB, MIB
from nvme_ops.measure.search import DEFAULT, MIN_GAIN, Axis, Duel, Rounds, Search, axes, combinations

BUDGET = 16.0
PEAK = 2e9


class MadeUpDevice:
    """Rates that depend on settings, disturbed as those of a shared machine; a clock that passes advance."""

    def __init__(self, kind: str, seed: int, noise: float = 0.05) -> None:
        self.kind, self.noise = kind, noise
        self.now, self.passes = 0.0, 0
        self._chance, made = random.Random(seed), random.Random(f"{kind} {seed}")
        self._drift = 0.0
        self.block = made.choice([256 * KIB, MIB, 4 * MIB, 8 * MIB])  # where it is fastest
        self.needs = made.choice([2, 8, 32]) * MIB  # in flight

    def rate(self, settings: Settings) -> float:
        """Bytes per second without noise."""
        flight = settings.block_size * settings.queue_depth * settings.intra_op_parallelism
        away = math.log2(settings.block_size / self.block)
        if self.kind == "flat":
            return PEAK
        if self.kind == "deep":  # the more requests in flight, the faster, in small blocks
            return PEAK * settings.queue_depth / (settings.queue_depth + 40) * (1 - 0.01 * abs(away))
        if self.kind == "large":
            return PEAK * settings.block_size / (settings.block_size + 2 * MIB)
        if self.kind == "threads":  # one lane keeps a processor busy, and does not keep the device busy
            return PEAK * min(1.0, 0.3 * settings.intra_op_parallelism) * (1 - 0.02 * settings.overlap_events)
        shape = (0.75 if settings.block_size > self.block else 1.0) * min(1.0, flight / self.needs)  # sharp limits
        return PEAK * shape * (0.8 if settings.queue_depth > 32 else 1.0)

    def size(self, full: bool) -> float:
        """Bytes of a pass, as ``Passes.calibrate`` chooses them."""
        return self.rate(DEFAULT) / 2 * BUDGET / (80 if full else 200)

    def measure(self, settings: Settings, full: bool) -> dict[str, float]:
        self.passes += 1
        rates = {}
        for direction in ("write", "read"):
            self._drift = 0.97 * self._drift + self._chance.gauss(0, self.noise / 4)
            rate = self.rate(settings) * math.exp(self._chance.gauss(self._drift, self.noise))
            if self._chance.random() < self.noise:  # somebody else's turn
                rate *= self._chance.uniform(0.6, 0.95)
            rates[direction] = rate
            self.now += self.size(full) / rate
        return rates

    def spent(self) -> float:
        return self.now / BUDGET

    def search(self, tried: list[Axis] | None = None) -> Search:
        return Search(self.measure, tried or axes(4), self.spent)


def share_of_best(device: MadeUpDevice) -> float:
    found = device.search().find().best
    return device.rate(found) / max(map(device.rate, combinations(axes(4))))


@pytest.mark.parametrize("kind", ["deep", "large", "threads", "cliffs"])
@pytest.mark.parametrize(("noise", "least"), [(0.005, 0.96), (0.1, 0.8)])
def test_the_winner_is_close_to_the_best(kind: str, noise: float, least: float) -> None:
    shares = [share_of_best(MadeUpDevice(kind, seed, noise)) for seed in range(4)]
    assert min(shares) > least, shares


def test_a_flat_device_keeps_the_default_and_its_differences_are_noise() -> None:
    found = [MadeUpDevice("flat", seed, noise).search().find() for seed in range(4) for noise in (0.02, 0.1)]
    assert sum(each.best == DEFAULT for each in found) >= 7
    outcome = MadeUpDevice("flat", 0).search().find()
    assert outcome.final is None or abs(outcome.final.ratio - 1) < 4 * outcome.final.noise + 0.02
    assert all(abs(duel.ratio - 1) < 5 * duel.noise for duel in outcome.races.values())


@pytest.mark.parametrize("peak", [5e7, 2e10])
def test_nothing_starts_once_the_time_is_over(peak: float) -> None:
    device = MadeUpDevice("cliffs", 1)
    begins = []

    def measure(settings: Settings, full: bool) -> dict[str, float]:
        begins.append(device.now)
        rates = device.measure(settings, full)
        device.now += (PEAK / peak - 1) * (device.now - begins[-1])  # slower or faster than the sizes suggest
        return rates

    outcome = Search(measure, axes(4), device.spent).find()
    assert max(begins) < BUDGET
    assert sum(outcome.passes.values()) == len(begins)


def test_a_final_that_is_cut_short_is_told() -> None:
    device = MadeUpDevice("cliffs", 1)

    def spent() -> float:
        return 0.69 if device.passes < 40 else 0.71 if device.passes < 43 else 1.0

    outcome = Search(device.measure, axes(4), spent).find()
    assert (device.passes, outcome.final, outcome.complete) == (43, None, False)


def test_only_the_values_of_the_axes_are_tried() -> None:
    tried = [Axis("block_size", [2 * MIB, 8 * MIB]), Axis("queue_depth", [16, 24])]
    outcome = MadeUpDevice("cliffs", 0).search(tried=tried).find()
    assert {*outcome.passes, outcome.best} <= set(combinations(tried))
    assert outcome.baseline == replace(DEFAULT, block_size=2 * MIB, queue_depth=24)
    outcome = MadeUpDevice("cliffs", 0).search(tried=[Axis("queue_depth", [16])]).find()
    assert (outcome.best, outcome.complete, outcome.final) == (replace(DEFAULT, queue_depth=16), True, None)


def test_of_equal_settings_the_simplest_wins() -> None:
    """Everything but the default's block size is equally much faster."""
    device = MadeUpDevice("flat", 0, noise=0.02)
    device.rate = lambda settings: PEAK * (0.7 if settings.block_size == MIB else 1)  # type: ignore[method-assign]
    best = device.search().find().best
    assert best.block_size != MIB
    assert best.intra_op_parallelism + best.single_submit + best.overlap_events <= 2


def test_an_interrupted_search_tells_what_it_knows() -> None:
    device = MadeUpDevice("cliffs", 5, noise=0.01)

    def measure(settings: Settings, full: bool) -> dict[str, float]:
        if device.passes == 30:
            raise KeyboardInterrupt
        return device.measure(settings, full)

    search = Search(measure, axes(4), lambda: device.now / 400)
    with pytest.raises(KeyboardInterrupt):
        search.find()
    outcome = search.outcome()
    assert sum(outcome.passes.values()) == 30
    assert outcome.final is None
    assert device.rate(outcome.best) > device.rate(DEFAULT)


OTHER, THIRD = replace(DEFAULT, queue_depth=32), replace(DEFAULT, intra_op_parallelism=2)


def raced(*rounds: dict[Settings, float]) -> Rounds:
    made = Rounds()
    for rates in rounds:
        assert made.measure(list(rates), lambda settings, rates=rates: {"read": rates[settings]})  # type: ignore[misc]
    return made


def duel(*ratios: float) -> Duel:
    return raced(*({DEFAULT: 1e9, OTHER: 1e9 * ratio} for ratio in ratios)).duels(DEFAULT)[OTHER]


def test_the_noise_is_what_the_median_scatters_when_all_is_repeated() -> None:
    chance = random.Random(0)
    repeated = [duel(*(math.exp(chance.gauss(0, 0.05)) for _ in range(25))) for _ in range(200)]
    scattered = statistics.stdev(one.ratio for one in repeated)
    assert statistics.median(one.noise for one in repeated) == pytest.approx(scattered, rel=0.2)
    assert statistics.median(one.noise_of_a_pass for one in repeated) == pytest.approx(0.05 / math.sqrt(2), rel=0.2)
    assert duel(*(1 + 0.01 * number for number in range(20))).noise < 0.005, "slow changes of the machine are none"
    assert duel(1.1, 5.0, 1.2).ratio == pytest.approx(1.2)


@pytest.mark.parametrize(
    ("ratios", "won", "clear"),
    [
        ([1.2, 1.21, 1.19, 1.2, 1.2], True, True),
        ([0.8, 0.81, 0.79, 0.8, 0.8], False, True),
        ([1.2, 1.2], False, True),  # two rounds say nothing
        ([1.3], False, False),  # as single passes differ
        ([1 + MIN_GAIN / 2, 1 + MIN_GAIN / 2, 1.0, 1.0], False, False),  # below what is worth a change
        ([1.3, 0.8, 1.2, 0.9, 1.1], False, False),
    ],
)
def test_a_challenger_wins_by_more_than_the_noise(ratios: list[float], won: bool, clear: bool) -> None:
    assert (duel(*ratios).won, duel(*ratios).clear) == (won, clear)


def test_any_two_settings_of_the_same_whole_rounds_are_compared_over_these() -> None:
    rounds = raced({DEFAULT: 1.0, OTHER: 2.0}, {DEFAULT: 1.0, OTHER: 2.0, THIRD: 8.0}, {DEFAULT: 1.0, THIRD: 5.0})
    assert rounds.duels(OTHER)[DEFAULT].ratios == pytest.approx([0.5, 0.5])
    assert rounds.duels(OTHER)[THIRD].ratios == pytest.approx([4.0])
    assert rounds.duels(DEFAULT)[THIRD].ratios == pytest.approx([8.0, 5.0])
    assert not rounds.measure([DEFAULT, OTHER], lambda settings: {"read": 9.0} if settings == OTHER else None)
    assert len(rounds) == 3
    both = Rounds()
    assert both.measure([DEFAULT, OTHER], lambda settings: {"read": 1.0 + (settings == OTHER), "write": 1.0})
    assert both.duels(DEFAULT)[OTHER].ratios == pytest.approx([math.sqrt(2)]), "the mean over the directions"
