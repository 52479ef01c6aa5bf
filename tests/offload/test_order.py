"""``Order`` and ``worth_keeping``: what is used next, and what is worth its memory. Nothing is read here."""

from __future__ import annotations

import itertools
import threading

import pytest

from nvme_ops.offload.order import Order, what_stays, worth_keeping


def uses(order: Order[str], names: str) -> list[bool]:
    return [order.use(name) for name in names]


def ahead(order: Order[str], count: int = 99) -> str:
    return "".join(itertools.islice(order.ahead(), count))


def test_the_foreseen_order_holds_before_the_first_use() -> None:
    order = Order("abcd")
    assert ahead(order) == "abcd"
    assert uses(order, "ab") == [True, True]
    assert ahead(order) == "cda"
    assert all(uses(order, "cdab"))


def test_a_loop_is_learned_in_one_round() -> None:
    order = Order[str]()
    assert uses(order, "abcd") == [False] * 4
    assert uses(order, "abcd") == [False, True, True, True]
    assert all(uses(order, "abcdabcd"))
    assert ahead(order) == "abc"


def test_what_was_foreseen_wrongly_is_corrected() -> None:
    order = Order("abcd")
    uses(order, "dcba")
    assert all(uses(order, "dcba")[1:])
    assert all(uses(order, "dcba"))


def test_a_weight_in_two_places_is_followed_by_what_follows_it_there() -> None:
    order = Order[str]()  # e is an embedding that is the last layer too
    for _ in range(2):
        uses(order, "eabe")
    assert ahead(order, 2) == "ab"
    order.use("e")
    order.use("a")
    assert ahead(order, 2) == "be"
    assert all(uses(order, "be"))


def test_one_loop_after_another_as_an_encoder_before_a_decoder() -> None:
    order = Order[str]()
    uses(order, "ABCxyzxyzxyz")
    assert all(uses(order, "xyzxyz"))
    assert ahead(order) == "xy"
    order.use("A")
    assert ahead(order).startswith("BCxyz"), "the first loop is not forgotten"


def test_a_branch_is_believed_to_go_where_it_went_last() -> None:
    order = Order[str]()
    uses(order, "axcabcabc")
    order.use("a")
    assert ahead(order) == "bc"
    uses(order, "xca")
    assert ahead(order).startswith("x")


def test_the_same_weight_again_changes_nothing() -> None:
    order = Order[str]()
    uses(order, "aabbccaabbcc")
    assert all(uses(order, "aabbcc"))
    assert ahead(order) == "ab"


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
    order.forget_threads()
    assert order.current() == {"b"}


def test_a_round_is_over_after_as_many_uses_as_there_are_weights() -> None:
    order = Order("abc")
    assert [order.use(name) and order.round_is_over() for name in "abcabc"] == [False, False, True] * 2


def test_what_is_used_more_often_is_kept_first() -> None:
    weights = [("rare", 0.5, 100), ("often", 4.0, 100), ("usual", 1.0, 100)]
    assert worth_keeping(weights, 99) == set()
    assert worth_keeping(weights, 100) == {"often"}
    assert worth_keeping(weights, 250) == {"often", "usual"}
    assert worth_keeping(weights, 300) == {"often", "usual", "rare"}


def test_small_weights_are_kept_before_large_ones() -> None:
    mib = 1 << 20
    weights = [("large", 1.0, 8 * mib), ("small", 1.0, 4096), ("other", 1.0, 8 * mib)]
    assert worth_keeping(weights, mib) == {"small"}


@pytest.mark.parametrize(("capacity", "kept"), [(5, 5), (10, 10), (19, 19)])
def test_equal_weights_are_kept_all_along_the_order(capacity: int, kept: int) -> None:
    mib = 1 << 20
    weights = [(number, 1.0, mib) for number in range(20)]
    found = worth_keeping(weights, capacity * mib)
    assert len(found) == kept
    gaps = [later - earlier for earlier, later in itertools.pairwise(sorted(found))]
    assert max(gaps) - min(gaps) <= 1


def test_no_more_is_kept_than_there_is_room_for() -> None:
    mib = 1 << 20
    weights = [(number, 1.0, (1 + number % 3) * mib) for number in range(30)]
    for capacity in range(0, 70 * mib, 3 * mib):
        found = worth_keeping(weights, capacity)
        assert sum(nbytes for number, _, nbytes in weights if number in found) <= capacity


def test_everything_stays_that_fits() -> None:
    assert what_stays([("a", 1.0, 60), ("b", 1.0, 40)], 100) == {"a", "b"}


def test_what_does_not_stay_passes_through_twice_its_size() -> None:
    mib = 1 << 20
    weights = [(number, 1.0, mib) for number in range(100)]
    assert len(what_stays(weights, 80 * mib)) == 80 - 2 - 10  # an eighth is read ahead
    assert len(what_stays(weights, 96 * mib)) == 96 - 2 - 12
    assert what_stays(weights, 2 * mib) == set()


def test_a_large_weight_stays_if_that_leaves_more_for_the_others() -> None:
    mib = 1 << 20
    weights = [("large", 1.0, 30 * mib), *((number, 1.0, mib) for number in range(50))]
    kept = what_stays(weights, 64 * mib)
    assert "large" in kept
    assert len(kept) - 1 == 64 - 30 - 2 - 8


def test_what_was_used_long_ago_takes_no_room() -> None:
    mib = 1 << 20
    weights = [("table", 0.01, 30 * mib), *((number, 2.0, mib) for number in range(50))]
    kept = what_stays(weights, 40 * mib)
    assert "table" not in kept
    assert len(kept) == 40 - 2 - 5
