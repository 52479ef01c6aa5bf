"""Chooses what is worth keeping in memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

Weight = TypeVar("Weight")  # anything hashable that identifies a weight

_AHEAD = 32 << 20  # bytes left for reading ahead, beside the weight in use: enough to keep a device busy
_RARE = 64  # weights used this many times less often than the most used one are not kept
_LATENCY = 256 << 10  # bytes that a device could read in the time that one more request costs


def what_stays(weights: Sequence[tuple[Weight, float, int]], memory: int) -> set[Weight]:
    """Returns the weights to keep in a memory through which the others have to pass, too.

    Args:
        weights: each with its number of uses and its bytes, in the order of use.
        memory: bytes for all of them.
    """
    if sum(nbytes for _, _, nbytes in weights) <= memory:
        return {weight for weight, _, _ in weights}
    most_used = max(uses for _, uses, _ in weights)
    weights = [weight for weight in weights if weight[1] * _RARE >= most_used]
    # The others pass through memory of twice the largest of them, so keeping the largest weights may leave more memory
    # for the rest. Each size is tried as the largest that is not kept.
    found: list[tuple[float, set[Weight]]] = []
    for limit in sorted({nbytes for _, _, nbytes in weights}, reverse=True):
        large = [weight for weight in weights if weight[2] > limit]
        capacity = memory - 2 * limit - min(_AHEAD, memory // 8) - sum(nbytes for _, _, nbytes in large)
        if capacity >= 0:
            small = [weight for weight in weights if weight[2] <= limit]
            kept = {weight for weight, _, _ in large} | worth_keeping(small, capacity)
            found.append((sum(uses * nbytes for weight, uses, nbytes in weights if weight in kept), kept))
    return max(found, key=lambda each: each[0], default=(0, set[Weight]()))[1]


def worth_keeping(weights: Sequence[tuple[Weight, float, int]], capacity: int) -> set[Weight]:
    """Returns the weights that save the most reading if ``capacity`` bytes of them stay in memory.

    Among weights that save equally much per byte, those kept are spread evenly over the order of use, so that others
    can be read while these are in use.

    Args:
        weights: each with its number of uses and its bytes, in the order of use.
        capacity: bytes.
    """
    classes: dict[float, list[tuple[Weight, int]]] = {}
    for weight, uses, nbytes in weights:
        classes.setdefault(_value_per_byte(uses, nbytes), []).append((weight, nbytes))
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
