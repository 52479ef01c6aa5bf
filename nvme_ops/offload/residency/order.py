"""``Order``: learns in which order entries are used."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from typing import Generic, TypeVar

Weight = TypeVar("Weight")  # anything hashable that identifies a weight

_DECAY = 0.5  # factor by which past uses count less after each round


class Order(Generic[Weight]):
    """Predicts uses: the weight that followed the last two weights before is expected to follow them again.

    This learns loops, branches and weights that are used in several places, and corrects itself. Until weights are
    used, ``foreseen`` is the prediction. Each thread has an order of its own, over the same weights. Only one thread at
    a time may call a method.

    Args:
        foreseen: weights in the order in which they are likely to be used, again and again.
        together: all threads share one order.
    """

    def __init__(self, foreseen: Iterable[Weight] = (), together: bool = False) -> None:
        weights = list(foreseen)
        self._together = together
        following = zip([None, *weights], [*weights, *weights[:1]], strict=False)
        self._after_one: dict[Weight | None, Weight] = dict(following)
        self._after_two: dict[tuple[Weight | None, Weight | None], Weight] = {}
        self._last: dict[int, tuple[Weight | None, Weight | None]] = {}  # by thread: its last two uses
        self._uses: dict[Weight, float] = dict.fromkeys(weights, 0.0)  # in the order of first use
        self._uses_in_round = 0

    def use(self, weight: Weight) -> bool:
        """Records a use by the calling thread; returns whether it was predicted."""
        thread = self._thread()
        before, last = self._last.get(thread, (None, None))
        if last == weight:  # again by the same module
            return True
        predicted = self._next(before, last)
        self._after_two[before, last] = weight
        self._after_one[last] = weight
        self._last[thread] = last, weight
        self._uses[weight] = self._uses.get(weight, 0.0) + 1
        self._uses_in_round += 1
        return predicted == weight

    def current(self) -> set[Weight]:
        """Returns the weight that each thread has used last."""
        return {last for _, last in self._last.values() if last is not None}

    def ahead(self) -> Iterator[Weight]:
        """Yields the weights that the calling thread, or all together, will use next, the next one first, each once."""
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

    def end_round(self) -> list[tuple[Weight, float]]:
        """Ends a round, which has as many uses as there are weights; returns an empty list while it goes on.

        Returns each weight and how often it is used, in the order of first use. Past uses count less from then on, and
        the positions of threads that have ended are forgotten.
        """
        if self._uses_in_round < len(self._uses):
            return []
        self._uses_in_round = 0
        alive = {thread.ident for thread in threading.enumerate()}
        self._last = {thread: last for thread, last in self._last.items() if thread in alive}
        weights = list(self._uses.items())
        self._uses = {weight: uses * _DECAY for weight, uses in weights}
        return weights

    def _thread(self) -> int:
        return 0 if self._together else threading.get_ident()

    def _next(self, before: Weight | None, last: Weight | None) -> Weight | None:
        return self._after_two.get((before, last)) or self._after_one.get(last)
