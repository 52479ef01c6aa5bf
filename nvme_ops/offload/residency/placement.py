"""Decides what stays in memory: for a run, and in the same way for a plan of it. Moves nothing."""

from __future__ import annotations

from collections.abc import Container, Sequence
from itertools import accumulate
from typing import Any, TypeVar

from nvme_ops.base.settings import PAGE

Weight = TypeVar("Weight")  # anything hashable that identifies a weight

STAYED = 1.25  #: times the uses of others that a weight counts which has stayed until now
IN_FLIGHT = 32 << 20  #: bytes on their way that keep a device busy
_RARE = 64  # weights used this many times less often than the most used one are not kept
_BUFFERS = 8  # of a ring that storage is never short of
_LATENCY = 256 << 10  # bytes that a device could read in the time that one more request costs
_SMALL = 1 << 20  # bytes up to which a weight can stay in memory from the start
_GOLDEN = 0.6180339887498949


def placement(weights: Sequence[tuple[Weight, float, int]], memory: int) -> set[Weight]:
    """Returns the weights to keep in a memory through which the others have to pass, too.

    How fast storage and computing are decides nothing while there is one memory: no step is longer for what stays.

    Args:
        weights: each with its uses, of which only the proportions count, and its bytes, in the order of use.
        memory: bytes for all of them.
    """
    if sum(nbytes for _, _, nbytes in weights) <= memory:
        return {weight for weight, _, _ in weights}
    most_used = max(uses for _, uses, _ in weights)
    weights = [weight for weight in weights if weight[1] * _RARE >= most_used]
    # The others pass through memory of twice the largest of them, so keeping the largest weights may leave more memory
    # for the rest. Each size is tried as the largest that is not kept.
    choices: list[tuple[float, set[Weight]]] = []
    for limit in sorted({nbytes for _, _, nbytes in weights}, reverse=True):
        large = [weight for weight in weights if weight[2] > limit]
        capacity = memory - 2 * limit - min(IN_FLIGHT, memory // 8) - sum(nbytes for _, _, nbytes in large)
        if capacity >= 0:
            small = [weight for weight in weights if weight[2] <= limit]
            kept = {weight for weight, _, _ in large} | worth_keeping(small, capacity)
            choices.append((sum(uses * nbytes for weight, uses, nbytes in weights if weight in kept), kept))
    return max(choices, key=lambda choice: choice[0], default=(0, set[Weight]()))[1]


def placements(
    weights: Sequence[tuple[Weight, float, int]], memory: int, host: int, in_host: Container[Any] = ()
) -> tuple[set[Weight], set[Weight]]:
    """Returns the weights to keep in the memory that computes, see ``placement``, and those to keep in host memory.

    All others come from storage, by way of the same bus as those in host memory: so the fewer the better, however fast
    each is.

    Args:
        weights: as above.
        memory: bytes where it computes.
        host: bytes of host memory beside that.
        in_host: those that are there now, and rather stay.
    """
    kept = placement(weights, memory)
    below = [
        (weight, uses * (STAYED if weight in in_host else 1.0), nbytes)
        for weight, uses, nbytes in weights
        if weight not in kept
    ]
    return kept, worth_keeping(below, host) if host else set()


def worth_keeping(weights: Sequence[tuple[Weight, float, int]], capacity: int) -> set[Weight]:
    """Returns the weights that save the most reading if ``capacity`` bytes of them stay in memory.

    Among weights that save equally much per byte, those kept are spread evenly over the order of use, so that others
    can be read while these are in use.

    Args:
        weights: each with its number of uses and its bytes, in the order of use.
        capacity: bytes.
    """
    classes: dict[float, list[tuple[Weight, int]]] = {}
    fewest = min((uses for _, uses, _ in weights), default=1.0)
    for weight, uses, nbytes in weights:
        classes.setdefault(_value_per_byte(uses / fewest, nbytes), []).append((weight, nbytes))
    kept: set[Weight] = set()
    for value in sorted(classes, reverse=True):
        members = classes[value]
        total = sum(nbytes for _, nbytes in members)
        if total <= capacity:
            kept.update(weight for weight, _ in members)
            capacity -= total
            continue
        share, due = capacity / total, 0.0
        for weight, nbytes in members:
            due += share * nbytes
            if due >= nbytes / 2 and nbytes <= capacity:
                kept.add(weight)
                capacity -= nbytes
                due -= nbytes
    return kept


def _value_per_byte(uses: float, nbytes: int) -> float:
    """Returns the bytes of reading saved per byte kept, rounded so that weights of similar size form one class."""
    value = uses * (1 + _LATENCY / nbytes) if nbytes < _LATENCY else uses
    return round(value, 1 if value < 10 else 0)


def kept_as_they_grow(sizes: Sequence[int], memory: int) -> set[int]:
    """Returns the places of those to keep of some that grow: a part of those kept in more memory, evenly spread."""
    kept = set()
    for place in sorted(range(len(sizes)), key=rank, reverse=True):
        if sizes[place] <= memory:
            memory -= sizes[place]
            kept.add(place)
    return kept


def rank(place: int) -> float:
    """Returns the rank of a place such that those above any rank are spread evenly, however many there are."""
    return place * _GOLDEN % 1


def share_of_experts(least: int, certain: int, experts: Sequence[int], memory: int) -> int:
    """Returns the bytes, in whole pages, of a memory for experts alone; 0 if it is too small to divide.

    Args:
        least: bytes that others have at least.
        certain: bytes of weights that every token uses as a whole: they come first, as far as all of them can stay.
        experts: bytes of each, in whole pages.
        memory: bytes for experts and other weights.
    """
    most, largest = min(memory - least, sum(experts)), max(experts, default=1)
    share = max(largest, min(most, max(2 * largest, IN_FLIGHT, memory - certain)))
    return share // PAGE * PAGE if most >= largest else 0


def room_beside_buffers(budget: int, buffer: int = IN_FLIGHT) -> int:
    """Returns the bytes of a budget for what is to stay; the others suffice for buffers through which the rest passes.

    Args:
        budget: bytes in all.
        buffer: bytes of one buffer.
    """
    return max(0, budget - _BUFFERS * buffer)


def kept_of_saved(saved: int, budget: int, largest: int) -> int:
    """Returns how many bytes of a budget need not be on their way, of ``saved`` ones, the ``largest`` at once."""
    return budget if saved <= budget else budget - max(2 * largest, min(IN_FLIGHT, budget // 4))


def kept_from_the_start(sizes: Sequence[int], memory: int) -> list[int]:
    """Returns the places of the smallest weights that fit into a memory together, the smallest first."""
    ordered = sorted(range(len(sizes)), key=sizes.__getitem__)
    totals = zip(ordered, accumulate(map(sizes.__getitem__, ordered)), strict=True)
    return [place for place, total in totals if sizes[place] <= _SMALL and total <= memory]
