"""The order of an epoch: every sample once, the same everywhere, and random enough."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nvme_ops.data.order import EpochOrder, Permutation


@given(st.integers(1, 3000), st.integers(0, 2**62))
def test_a_permutation_has_everything_once(count: int, seed: int) -> None:
    found = Permutation(count, seed)(torch.arange(count))
    assert torch.equal(found.sort().values, torch.arange(count))


def test_parts_of_it_are_those_of_the_whole() -> None:
    order = EpochOrder([100_000], True, 3, 1)
    whole = order.at(0, 100_000)
    for start, stop in ((0, 1), (99_999, 100_000), (5_000, 70_001), (7, 7)):
        assert torch.equal(order.at(start, stop), whole[start:stop])


def test_one_of_a_hundred_million_is_found_at_once() -> None:
    found = EpochOrder([100_000_000], True, 0, 0).at(99_999_000, 100_000_000)
    assert len(found.unique()) == 1000
    assert 0 <= int(found.min()) <= int(found.max()) < 100_000_000


def test_seeds_and_epochs_differ_and_repeat() -> None:
    def first(seed: int, epoch: int) -> list[int]:
        return EpochOrder([1000], True, seed, epoch).at(0, 20).tolist()

    assert first(1, 2) == first(1, 2)
    assert len({tuple(first(seed, epoch)) for seed in range(-3, 3) for epoch in range(5)}) == 30
    assert first(0, 0)[:6] == [int(number) for number in EpochOrder([1000], True, 0, 0).at(0, 6)]


def test_the_order_is_one_for_all_versions() -> None:
    """Who resumes with a later version must go on in the same order."""
    assert EpochOrder([2000], True, 7, 3).at(0, 8).tolist() == [1226, 581, 41, 1235, 38, 483, 64, 101]
    assert EpochOrder([1000], True, 7, 3).at(0, 8).tolist() == [87, 2, 851, 120, 813, 927, 403, 728]


@pytest.mark.parametrize(("counts", "shuffle"), [([4], True), ([1, 1, 1, 1], "shards")])
def test_all_orders_of_a_few_samples_are_as_likely(counts: list[int], shuffle: Any) -> None:
    """24 orders of 4 samples in 6,000 epochs; chi-squared with 23 degrees of freedom, 99.99 % below 58."""
    seen: dict[tuple[int, ...], int] = {}
    for epoch in range(6000):
        found = tuple(EpochOrder(counts, shuffle, 1, epoch).at(0, 4).tolist())
        seen[found] = seen.get(found, 0) + 1
    assert len(seen) == 24
    assert sum((count - 250) ** 2 / 250 for count in seen.values()) < 58


@pytest.mark.parametrize("shuffle", [1, 0, "files", None, [True]])
def test_what_is_no_shuffle(shuffle: Any) -> None:
    with pytest.raises(ValueError, match="shuffle must be"):
        EpochOrder([10], shuffle, 0, 0)


def test_places_and_samples_are_independent() -> None:
    """A chi-squared test of where the tenths of the samples go: 81 degrees of freedom, 99.9 % below 126."""
    count, total = 10_000, torch.zeros(10, 10)
    for seed in range(20):
        found = Permutation(count, seed)(torch.arange(count)) * 10 // count
        places = torch.arange(count) * 10 // count
        total += torch.bincount(places * 10 + found, minlength=100).view(10, 10)
    expected = count * 20 / 100
    assert float(((total - expected) ** 2 / expected).sum()) < 126
    follows = Permutation(count, 1)(torch.arange(count))
    assert int((follows[1:] - follows[:-1] == 1).sum()) < 10, "neighbours stay neighbours"


@pytest.mark.parametrize("counts", [[5], [1, 2, 3], [100, 0, 7, 0, 250], [0, 4], [3000, 2000]])
def test_shards_come_one_after_the_other(counts: list[int]) -> None:
    found = EpochOrder(counts, "shards", 1, 0).at(0, sum(counts)).tolist()
    assert sorted(found) == list(range(sum(counts)))
    bounds = torch.tensor(counts).cumsum(0)
    shards = torch.searchsorted(bounds, torch.tensor(found), right=True).tolist()
    changes = sum(one != other for one, other in itertools.pairwise(shards))
    assert changes == sum(count > 0 for count in counts) - 1
    if sum(counts) > 100:
        assert found != sorted(found)
        assert EpochOrder(counts, "shards", 2, 0).at(0, 50).tolist() != found[:50]


def test_in_order() -> None:
    assert EpochOrder([3, 4], False, 1, 1).at(2, 6).tolist() == [2, 3, 4, 5]
    with pytest.raises(ValueError, match="shuffle must be"):
        EpochOrder([3], "files", 0, 0)  # type: ignore[arg-type]
