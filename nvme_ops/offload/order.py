"""In which order a model uses its weights, as far as it is known, and which of them are worth their memory."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Sequence
from typing import Generic, TypeVar

Weight = TypeVar("Weight")  # whatever stands for one; hashable

_FORGOTTEN = 0.5  # what a use counts after each round
_AHEAD = 32 << 20  # bytes that are read ahead at least, beside the weight in use: what keeps a device busy
_RARE = 64  # weights used this many times less often than others are ignored
_LATENCY = 256 << 10  # bytes that a device reads in the time that one more request takes


class Order(Generic[Weight]):
    """Predicts the next uses by the last ones: what followed two weights the last time will follow them again.

    That learns loops, branches and weights that are used in several places, and corrects itself. Before the first use
    the order that is foreseen holds. Several threads may use the same weights, each in its own order. The methods are
    called by one thread at a time.

    Args:
        foreseen: weights in the order in which they are likely used, again and again.
        together: all threads take part in one order.
    """

    def __init__(self, foreseen: Iterable[Weight] = (), together: bool = False) -> None:
        weights = list(foreseen)
        self._together = together
        following = zip([None, *weights], [*weights, *weights[:1]], strict=False)
        self._after_one: dict[Weight | None, Weight] = dict(following)
        self._after_two: dict[tuple[Weight | None, Weight | None], Weight] = {}
        self._last: dict[int, tuple[Weight | None, Weight | None]] = {}  # by thread: the one before the last, and this
        self._uses: dict[Weight, float] = dict.fromkeys(weights, 0.0)  # in the order of the first use
        self._since = 0

    def use(self, weight: Weight) -> bool:
        """Takes note of a use by the calling thread; returns whether it was the one that was predicted."""
        thread = self._thread()
        before, last = self._last.get(thread, (None, None))
        if last == weight:  # of the same module
            return True
        predicted = self._next(before, last)
        self._after_two[before, last] = weight
        self._after_one[last] = weight
        self._last[thread] = last, weight
        self._uses[weight] = self._uses.get(weight, 0.0) + 1
        self._since += 1
        return predicted == weight

    def current(self) -> set[Weight]:
        """The weights that threads have used last."""
        return {last for _, last in self._last.values() if last is not None}

    def ahead(self) -> Iterator[Weight]:
        """What the calling thread, or all together, will use next, the next one first, each once."""
        before, last = self._last.get(self._thread(), (None, None))
        seen = {last}
        for _ in range(2 * len(self._uses)):
            following = self._next(before, last)
            if following is None:
                return
            before, last = last, following
            if following not in seen:
                seen.add(following)
                yield following

    def round_is_over(self) -> bool:
        """Whether as many uses as there are weights have passed since this last returned True."""
        if self._since < len(self._uses):
            return False
        self._since = 0
        return True

    def forget_some(self) -> None:
        """Makes what was long ago count less."""
        for weight in self._uses:
            self._uses[weight] *= _FORGOTTEN

    def forget_threads(self) -> None:
        """Forgets the places of threads that have ended."""
        alive = {thread.ident for thread in threading.enumerate()}
        self._last = {thread: last for thread, last in self._last.items() if thread in alive}

    def by_uses(self) -> list[tuple[Weight, float]]:
        """Each weight and how often it is used, in the order of the first use."""
        return list(self._uses.items())

    def _thread(self) -> int:
        return 0 if self._together else threading.get_ident()

    def _next(self, before: Weight | None, last: Weight | None) -> Weight | None:
        return self._after_two.get((before, last)) or self._after_one.get(last)


def what_stays(weights: Sequence[tuple[Weight, float, int]], memory: int) -> set[Weight]:
    """The weights that stay in memory when ``memory`` bytes are all that there is for these.

    Args:
        weights: each with its uses and its bytes, in the order of use.
        memory: bytes.
    """
    if sum(nbytes for _, _, nbytes in weights) <= memory:
        return {weight for weight, _, _ in weights}
    most_used = max(uses for _, uses, _ in weights)
    weights = [weight for weight in weights if weight[1] * _RARE >= most_used]
    # The memory through which the others pass is twice the largest of them: large ones are kept first, if that leaves
    # more for the rest.
    best: set[Weight] = set()
    most = 0.0
    for limit in sorted({nbytes for _, _, nbytes in weights}, reverse=True):
        large = [weight for weight in weights if weight[2] > limit]
        capacity = memory - 2 * limit - min(_AHEAD, memory // 8) - sum(nbytes for _, _, nbytes in large)
        if capacity < 0:
            continue
        small = [weight for weight in weights if weight[2] <= limit]
        kept = {weight for weight, _, _ in large} | worth_keeping(small, capacity)
        saved = sum(uses * nbytes for weight, uses, nbytes in weights if weight in kept)
        if saved > most:
            best, most = kept, saved
    return best


def worth_keeping(weights: Sequence[tuple[Weight, float, int]], capacity: int) -> set[Weight]:
    """Those that together save most reading, if ``capacity`` bytes of them stay in memory.

    Of those that save as much for each byte some are taken all along the order, so that there is always something to
    read while what is kept is computed with.

    Args:
        weights: each with its uses and its bytes, in the order of use.
        capacity: bytes.
    """
    classes: dict[float, list[tuple[Weight, int]]] = {}
    for weight, uses, nbytes in weights:
        classes.setdefault(_saved(uses, nbytes), []).append((weight, nbytes))
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


def _saved(uses: float, nbytes: int) -> float:
    """For each byte in memory: what is not read, rounded so that sizes that are alike are of one class."""
    value = uses * (1 + _LATENCY / nbytes) if nbytes < _LATENCY else uses
    return round(value, 1 if value < 10 else 0)
