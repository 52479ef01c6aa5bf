"""``Order`` and ``worth_keeping``: what is used next, and what is worth its memory. Nothing is read here."""

from __future__ import annotations

import itertools
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nvme_ops.offload.order import Order, what_stays, worth_keeping
from nvme_ops.text import MIB


def uses(order: Order[str], names: str) -> list[bool]:
    return [order.use(name) for name in names]


def ahead(order: Order[str], count: int = 99) -> str:
    return "".join(itertools.islice(order.ahead(), count))


def test_the_foreseen_order_holds_until_it_is_seen_to_be_wrong() -> None:
    order = Order("abcd")
    assert ahead(order) == "abcd"
    assert uses(order, "ab") == [True, True]
    assert ahead(order) == "cda"
    assert all(uses(order, "cdab"))
    uses(order, "dcba")
    assert all(uses(order, "dcba")[1:])
    assert all(uses(order, "dcba"))


@pytest.mark.parametrize(
    ("seen", "right", "then"),
    [
        ("abcdabcd", "abcd", "abc"),  # a loop
        ("eabeeabe", "eabe", "ab"),  # a weight in two places is followed by what follows it there
        ("eabeeabeea", "", "be"),
        ("ABCxyzxyzxyz", "xyzxyz", "xy"),  # one loop after another, as an encoder before a decoder
        ("ABCxyzxyzxyzA", "", "BCxyz"),  # and the first one is not forgotten
        ("axcabcabca", "", "bc"),  # a branch is believed to go where it went last
        ("axcabcabcaxca", "", "x"),
        ("aabbccaabbcc", "aabbcc", "ab"),  # the same weight again changes nothing
    ],
)
def test_what_followed_before_is_foreseen(seen: str, right: str, then: str) -> None:
    order = Order[str]()
    uses(order, seen)
    assert all(uses(order, right))
    assert ahead(order).startswith(then)


def test_each_thread_has_its_own_place() -> None:
    order = Order("abcd")
    uses(order, "ab")
    seen: list[str] = []

    def other() -> None:
        order.use("a")
        seen.append(ahead(order))

    thread = threading.Thread(target=other)
    thread.start()
    thread.join()
    assert seen == ["bcd"]
    assert ahead(order) == "cda"
    assert order.current() == {"a", "b"}
    order.forget_ended_threads()
    assert order.current() == {"b"}


def test_a_round_is_over_after_as_many_uses_as_there_are_weights() -> None:
    order = Order("abc")
    assert [order.use(name) and order.round_is_over() for name in "abcabc"] == [False, False, True] * 2


def test_what_is_used_more_often_or_is_small_is_kept_first() -> None:
    weights = [("rare", 0.5, 100), ("often", 4.0, 100), ("usual", 1.0, 100)]
    for capacity, kept in ((99, ""), (100, "often"), (250, "often usual"), (300, "often usual rare")):
        assert worth_keeping(weights, capacity) == set(kept.split())
    weights = [("large", 1.0, 8 * MIB), ("small", 1.0, 4096), ("other", 1.0, 8 * MIB)]
    assert worth_keeping(weights, MIB) == {"small"}


@given(st.integers(2, 20))
def test_equal_weights_are_kept_all_along_the_order(capacity: int) -> None:
    found = worth_keeping([(number, 1.0, MIB) for number in range(20)], capacity * MIB)
    assert len(found) == capacity
    gaps = [later - earlier for earlier, later in itertools.pairwise(sorted(found))]
    assert max(gaps) - min(gaps) <= 1


@given(
    st.lists(st.tuples(st.floats(0.1, 8), st.integers(1, 4 * MIB)), min_size=1, max_size=30), st.integers(0, 1 << 27)
)
def test_no_more_is_kept_than_there_is_room_for_and_all_that_fits(sizes: list[tuple[float, int]], room: int) -> None:
    weights = [(number, uses, nbytes) for number, (uses, nbytes) in enumerate(sizes)]
    for found in (worth_keeping(weights, room), what_stays(weights, room)):
        taken = sum(nbytes for number, _, nbytes in weights if number in found)
        assert taken <= room
        assert len(found) == len(weights) or sum(nbytes for _, _, nbytes in weights) > room


def test_what_does_not_stay_passes_through_twice_its_size() -> None:
    weights = [(number, 1.0, MIB) for number in range(100)]
    assert len(what_stays(weights, 80 * MIB)) == 80 - 2 - 10  # an eighth is read ahead
    assert len(what_stays(weights, 96 * MIB)) == 96 - 2 - 12
    assert what_stays(weights, 2 * MIB) == set()
    large = [("large", 1.0, 30 * MIB), *((number, 1.0, MIB) for number in range(50))]
    kept = what_stays(large, 64 * MIB)
    assert "large" in kept, "as that leaves more for the others"
    assert len(kept) - 1 == 64 - 30 - 2 - 8
    long_ago = [("table", 0.01, 30 * MIB), *((number, 2.0, MIB) for number in range(50))]
    kept = what_stays(long_ago, 40 * MIB)
    assert "table" not in kept
    assert len(kept) == 40 - 2 - 5
