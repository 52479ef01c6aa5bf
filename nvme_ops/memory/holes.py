"""``Holes``: what is free of a range of bytes, for whoever hands out parts of it."""

from __future__ import annotations

import bisect
from collections.abc import Iterator


class Holes:
    """Free stretches, of which the smallest that is large enough is found. Stretches that touch become one."""

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Forgets all of them."""
        self._starts: dict[int, int] = {}  # where each begins, and its size
        self._ends: dict[int, int] = {}  # and where it ends
        self._by_size: dict[int, dict[int, None]] = {}
        self._sizes: list[int] = []  # the keys of _by_size, in order

    def find(self, nbytes: int) -> tuple[int, int] | None:
        """Returns start and size of the smallest that has ``nbytes`` bytes; None where there is none."""
        index = bisect.bisect_left(self._sizes, nbytes)
        if index == len(self._sizes):
            return None
        size = self._sizes[index]
        return next(iter(self._by_size[size])), size

    def take(self, start: int, size: int, nbytes: int) -> None:
        """Takes the first ``nbytes`` bytes of a hole that ``find`` has found."""
        self.remove(start, size)
        if size > nbytes:
            self.add(start + nbytes, size - nbytes)

    def merge(self, start: int, nbytes: int) -> None:
        """Adds what became free, and joins it with its neighbours."""
        before = self._ends.get(start)
        if before is not None:
            self.remove(before, start - before)
            start, nbytes = before, nbytes + start - before
        after = self._starts.get(start + nbytes)
        if after is not None:
            self.remove(start + nbytes, after)
            nbytes += after
        self.add(start, nbytes)

    def ending_at(self, end: int) -> int | None:
        """Returns the start of the hole that ends there, if there is one."""
        return self._ends.get(end)

    @property
    def largest(self) -> int:
        """Bytes of the largest one."""
        return self._sizes[-1] if self._sizes else 0

    def __iter__(self) -> Iterator[tuple[int, int]]:
        """Start and size of each."""
        return iter(list(self._starts.items()))

    def add(self, start: int, size: int) -> None:
        """Adds one that touches no other."""
        self._starts[start] = size
        self._ends[start + size] = start
        if size not in self._by_size:
            bisect.insort(self._sizes, size)
            self._by_size[size] = {}
        self._by_size[size][start] = None

    def remove(self, start: int, size: int) -> None:
        """Removes one."""
        del self._starts[start], self._ends[start + size], self._by_size[size][start]
        if not self._by_size[size]:
            del self._by_size[size], self._sizes[bisect.bisect_left(self._sizes, size)]
