"""``Holes``: the free parts of a range of bytes, for whoever hands them out."""

from __future__ import annotations

import bisect
from collections.abc import Iterator

_Ranges = tuple[tuple[int, int], ...]  # start and size of each


class Holes:
    """Free ranges, of which the smallest that is large enough is found. Ranges that touch become one.

    Ctrl-C may come at any point: a change is noted as a whole before it is made, and the next call completes one that
    was interrupted.
    """

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Removes all holes."""
        self._change: tuple[_Ranges, _Ranges] | None = None  # holes to remove and holes to add
        self._starts: dict[int, int] = {}  # where each begins, and its size
        self._ends: dict[int, int] = {}  # where each ends, and its start
        self._by_size: dict[int, dict[int, None]] = {}
        self._sizes: list[int] = []  # the keys of _by_size, in order

    def find(self, nbytes: int) -> tuple[int, int] | None:
        """Returns start and size of the smallest hole that has ``nbytes`` bytes; None if there is none."""
        self._settle()
        index = bisect.bisect_left(self._sizes, nbytes)
        if index == len(self._sizes):
            return None
        size = self._sizes[index]
        return next(iter(self._by_size[size])), size

    def take(self, start: int, size: int, nbytes: int) -> None:
        """Takes the first ``nbytes`` bytes of a hole that ``find`` has found."""
        self._make(((start, size),), ((start + nbytes, size - nbytes),) if size > nbytes else ())

    def merge(self, start: int, nbytes: int) -> None:
        """Adds a range that became free, and joins it with its neighbours."""
        self._settle()
        gone = []
        before = self._ends.get(start)
        if before is not None:
            gone.append((before, start - before))
            start, nbytes = before, nbytes + start - before
        after = self._starts.get(start + nbytes)
        if after is not None:
            gone.append((start + nbytes, after))
            nbytes += after
        self._make(tuple(gone), ((start, nbytes),))

    def ending_at(self, end: int) -> int | None:
        """Returns the start of the hole that ends there, if there is one."""
        self._settle()
        return self._ends.get(end)

    @property
    def largest(self) -> int:
        """Bytes of the largest hole."""
        self._settle()
        return self._sizes[-1] if self._sizes else 0

    def __iter__(self) -> Iterator[tuple[int, int]]:
        """Yields start and size of each hole."""
        self._settle()
        return iter(list(self._starts.items()))

    def add(self, start: int, size: int) -> None:
        """Adds a hole that touches no other."""
        self._make((), ((start, size),))

    def remove(self, start: int, size: int) -> None:
        """Removes a hole."""
        self._make(((start, size),), ())

    def _make(self, gone: _Ranges, new: _Ranges) -> None:
        self._settle()
        self._change = gone, new
        for start, size in gone:
            del self._starts[start], self._ends[start + size], self._by_size[size][start]
            if not self._by_size[size]:
                del self._by_size[size], self._sizes[bisect.bisect_left(self._sizes, size)]
        for start, size in new:
            self._starts[start] = size
            self._ends[start + size] = start
            if size not in self._by_size:
                bisect.insort(self._sizes, size)
                self._by_size[size] = {}
            self._by_size[size][start] = None
        self._change = None

    def _settle(self) -> None:
        """Completes a change that was interrupted."""
        if self._change is None:
            return
        gone, new = self._change
        starts = dict(self._starts)
        for start, _ in gone:
            starts.pop(start, None)
        starts.update(new)
        by_size: dict[int, dict[int, None]] = {}
        for start, size in starts.items():
            by_size.setdefault(size, {})[start] = None
        self._starts, self._ends = starts, {start + size: start for start, size in starts.items()}
        self._by_size, self._sizes = by_size, sorted(by_size)
        self._change = None
