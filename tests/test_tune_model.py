"""What the model believes of settings that were measured, and of their neighbours."""

from __future__ import annotations

import random

import pytest

from nvme_ops.bench.settings import Settings
from nvme_ops.text import MIB
from nvme_ops.tune.model import Model
from nvme_ops.tune.search import Axis, combinations

CANDIDATES = combinations([Axis("block_size", [MIB, 2 * MIB, 4 * MIB, 8 * MIB]), Axis("queue_depth", [16, 32, 64])])
SMALL, MIDDLE, LARGE = (Settings(block_size=size * MIB, queue_depth=32) for size in (1, 2, 8))


def model(*passes: tuple[Settings, float]) -> Model:
    made = Model(CANDIDATES)
    for settings, rate in passes:
        made.add(settings, rate)
    return made


def test_the_ratio_of_two_that_were_measured_often_is_that_of_their_rates() -> None:
    ratio, noise = model(*[(SMALL, 1e9), (LARGE, 1.5e9)] * 10).fit().ratio(LARGE, SMALL)
    assert ratio == pytest.approx(1.5, rel=0.03)
    assert noise < 0.03


def test_a_ratio_and_its_inverse_agree() -> None:
    belief = model((SMALL, 1e9), (LARGE, 1.5e9)).fit()
    assert belief.ratio(SMALL, LARGE)[0] == pytest.approx(1 / belief.ratio(LARGE, SMALL)[0])
    assert belief.ratio(SMALL, SMALL) == (1.0, 0.0)


def test_neighbours_are_believed_to_be_alike() -> None:
    belief = model(*[(SMALL, 1e9), (LARGE, 2e9)] * 5).fit()
    near, far = belief.ratio(MIDDLE, SMALL), belief.ratio(LARGE, SMALL)
    assert 1 < near[0] < far[0]
    assert near[1] > far[1]  # it was not measured itself


def test_the_noise_is_found_in_the_passes() -> None:
    chance = random.Random(0)
    found = {}
    for noise in (0.01, 0.1):
        passes = [(chance.choice(CANDIDATES), 1e9 * (1 + chance.gauss(0, noise))) for _ in range(150)]
        found[noise] = model(*passes).fit().noise
    assert found[0.01] <= 0.02
    assert 0.05 <= found[0.1] <= 0.2


def test_a_single_outlier_changes_little() -> None:
    passes = [(SMALL, 1e9), (LARGE, 1.2e9)] * 10
    without = model(*passes).fit().ratio(LARGE, SMALL)[0]
    beside = model(*passes, (LARGE, 0.3e9)).fit().ratio(LARGE, SMALL)[0]
    assert beside == pytest.approx(without, rel=0.05)


def test_slow_changes_of_the_machine_are_not_taken_for_differences() -> None:
    """All is twice as slow in the second half; which settings are measured when must not matter."""
    passes = [(SMALL, 1e9), (LARGE, 1.2e9)] * 8 + [(LARGE, 0.9e9), (SMALL, 0.75e9)] * 8
    assert model(*passes).fit().ratio(LARGE, SMALL)[0] == pytest.approx(1.2, rel=0.05)


def test_what_is_promising_is_fast_or_unknown() -> None:
    belief = model(*[(Settings(block_size=MIB, queue_depth=depth), 0.5e9) for depth in (16, 32, 64)] * 8,
                   *[(LARGE, 1e9)] * 8).fit()  # fmt: skip
    curious, cautious = belief.promising(4, 2.0), belief.promising(1, 0.0)
    assert cautious == [belief.best]
    assert len(set(curious)) > 1
    assert all(settings.block_size > MIB for settings in curious)


def test_a_choice_counts_on_what_the_ones_before_it_will_tell() -> None:
    assert len(set(model((SMALL, 1e9)).fit().promising(6, 2.0))) >= 5


def test_within_names_those_that_lose_little() -> None:
    belief = model(*[(SMALL, 1e9), (LARGE, 1.5e9)] * 10).fit()
    assert belief.best in belief.within(0.01, belief.best)
    assert SMALL not in belief.within(0.1, belief.best)
    assert len(belief.within(0.9, belief.best)) == len(CANDIDATES)


def test_much_may_be_gained_at_first_and_little_in_the_end() -> None:
    begin = model((SMALL, 1e9)).fit().possible_gain()
    end = model(*[(settings, 1e9) for settings in CANDIDATES] * 20).fit().possible_gain()
    assert begin > 1.2
    assert end < 1.02
