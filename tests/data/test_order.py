"""The order of an epoch: every sample once, the same everywhere, and random enough."""

from __future__ import annotations

import collections
import itertools
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nvme_ops.data.order import EpochOrder


@given(st.integers(1, 3000), st.integers(-(2**62), 2**62), st.floats(0, 1), st.floats(0, 1))
def test_everything_comes_once_and_a_part_is_that_of_the_whole(count: int, seed: int, one: float, other: float) -> None:
    order = EpochOrder([count], True, seed, 1)
    whole = order.at(0, count)
    assert torch.equal(whole.sort().values, torch.arange(count))
    start, stop = sorted((int(one * count), int(other * count)))
    assert torch.equal(order.at(start, stop), whole[start:stop])


def test_one_of_a_hundred_million_is_found_at_once() -> None:
    found = EpochOrder([100_000_000], True, 0, 0).at(99_999_000, 100_000_000)
    assert len(found.unique()) == 1000
    assert 0 <= int(found.min()) <= int(found.max()) < 100_000_000


def test_seeds_and_epochs_differ() -> None:
    found = [EpochOrder([1000], True, seed, epoch).at(0, 20) for seed in range(-3, 3) for epoch in range(5)]
    assert len({tuple(each.tolist()) for each in found}) == 30


def test_the_order_is_one_for_all_versions() -> None:
    """Who resumes with a later version must go on in the same order."""
    assert EpochOrder([2000], True, 7, 3).at(0, 8).tolist() == [1226, 581, 41, 1235, 38, 483, 64, 101]
    assert EpochOrder([1000], True, 7, 3).at(0, 8).tolist() == [87, 2, 851, 120, 813, 927, 403, 728]


@pytest.mark.parametrize(("counts", "shuffle"), [([4], True), ([1, 1, 1, 1], "shards")])
def test_all_orders_of_a_few_samples_are_as_likely(counts: list[int], shuffle: Any) -> None:
    """24 orders of 4 samples in 6,000 epochs; chi-squared with 23 degrees of freedom, 99.99 % below 58."""
    seen = collections.Counter(tuple(EpochOrder(counts, shuffle, 1, epoch).at(0, 4).tolist()) for epoch in range(6000))
    assert len(seen) == 24
    assert sum((count - 250) ** 2 / 250 for count in seen.values()) < 58


def test_places_and_samples_are_independent() -> None:
    """A chi-squared test of where the tenths of the samples go: 81 degrees of freedom, 99.9 % below 126."""
    count, total, places = 10_000, torch.zeros(10, 10), torch.arange(10_000) // 1000
    for seed in range(20):
        found = EpochOrder([count], True, seed, 0).at(0, count)
        total += torch.bincount(places * 10 + found // 1000, minlength=100).view(10, 10)
        assert int((found[1:] - found[:-1] == 1).sum()) < 10, "neighbours stay neighbours"
    expected = count * 20 / 100
    assert float(((total - expected) ** 2 / expected).sum()) < 126


@pytest.mark.parametrize("counts", [[5], [1, 2, 3], [100, 0, 7, 0, 250], [0, 4], [3000, 2000]])
def test_shards_come_one_after_the_other(counts: list[int]) -> None:
    found = EpochOrder(counts, "shards", 1, 0).at(0, sum(counts)).tolist()
    assert sorted(found) == list(range(sum(counts)))
    shards = torch.searchsorted(torch.tensor(counts).cumsum(0), torch.tensor(found), right=True).tolist()
    assert sum(one != other for one, other in itertools.pairwise(shards)) == sum(count > 0 for count in counts) - 1
    if sum(counts) > 100:
        assert found != sorted(found)
        assert EpochOrder(counts, "shards", 2, 0).at(0, 50).tolist() != found[:50]
