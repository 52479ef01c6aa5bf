"""``Holes``: the free parts of a range of bytes, for an allocator."""

from __future__ import annotations

import bisect
import sys
from collections.abc import Iterator

_Ranges = tuple[tuple[int, int], ...]  # start and size of each


class Holes:
    """Free ranges; ``find`` returns one that is large enough, and ``merge`` joins adjacent ones.

    Ctrl-C may come at any point: a change is noted as a whole before it is made, and the next call completes one that
    was interrupted.
    """

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Removes all holes."""
        self._change: tuple[_Ranges, _Ranges] | None = None  # holes to remove and holes to add
        self._changes = 0  # made so far
        self._starts: dict[int, int] = {}  # start -> size
        self._ends: dict[int, int] = {}  # end -> start
        self._by_size: dict[int, dict[int, None]] = {}
        self._sizes: list[int] = []  # the keys of _by_size, in order

    def find(self, nbytes: int, which: str = "smallest", before: int = sys.maxsize) -> tuple[int, int] | None:
        """Returns start and size of a hole that has ``nbytes`` bytes, or None.

        Args:
            nbytes: at least so many.
            which: the ``"smallest"`` one, the ``"first"`` or the ``"last"``.
            before: where they have to end, if it is not the smallest that is wanted.
        """
        if which != "smallest":
            self._settle()
            holes = list(self._starts.items())
            fitting = [(start, size) for start, size in holes if size >= nbytes and start + nbytes <= before]
            return (max if which == "last" else min)(fitting, default=None)
        while True:
            changes = self._changes if self._change is None else self._settle()
            index = bisect.bisect_left(self._sizes, nbytes)
            if self._changes != changes:
                continue
            for size in self._sizes[index : index + 1]:
                for start in self._by_size[size]:
                    return start, size
            return None

    def take(self, start: int, size: int, nbytes: int, at_end: bool = False) -> bool:
        """Takes the first ``nbytes`` bytes, or the last, of a hole that ``find`` has found.

        Returns False if a signal handler has changed that hole meanwhile.
        """
        changes = self._changes if self._change is None else self._settle()
        if start not in self._starts or self._starts[start] != size:
            return False
        rest = (start if at_end else start + nbytes, size - nbytes)
        return self._make(((start, size),), (rest,) if size > nbytes else (), changes)

    def merge(self, start: int, nbytes: int) -> None:
        """Adds a range that became free, and joins it with its neighbours."""
        done = False
        while not done:
            changes = self._changes if self._change is None else self._settle()
            first, end, gone = start, start + nbytes, []
            before = self._ends.get(start)
            if before is not None:
                gone.append((before, start - before))
                first = before
            after = self._starts.get(end)
            if after is not None:
                gone.append((end, after))
                end += after
            done = self._make(tuple(gone), ((first, end - first),), changes)

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
        self._make((), ((start, size),), self._settle())

    def remove(self, start: int, size: int) -> None:
        """Removes a hole."""
        self._make(((start, size),), (), self._settle())

    def _make(self, gone: _Ranges, new: _Ranges, changes: int) -> bool:
        """Makes a change, unless others were made since there were ``changes``; returns whether it was made.

        A signal handler that interrupts it completes the change in new tables, and the interrupted call goes on in the
        old ones, which are no longer used. None can run between comparing and noting: nothing is called there.
        """
        change = gone, new
        if self._changes != changes:
            return False
        starts, ends, by_size, sizes = self._starts, self._ends, self._by_size, self._sizes
        self._change, self._changes = change, changes + 1
        for start, size in gone:
            del starts[start], ends[start + size], by_size[size][start]
            if not by_size[size]:
                del by_size[size], sizes[bisect.bisect_left(sizes, size)]
        for start, size in new:
            starts[start] = size
            ends[start + size] = start
            if size not in by_size:
                bisect.insort(sizes, size)
                by_size[size] = {}
            by_size[size][start] = None
        if self._change is change:
            self._change = None
        return True

    def _settle(self) -> int:
        """Completes a change that was interrupted. Returns how many changes were made so far."""
        change = self._change
        if change is None:
            return self._changes
        gone, new = change
        starts = dict(self._starts)
        for start, _ in gone:
            starts.pop(start, None)
        starts.update(new)
        by_size: dict[int, dict[int, None]] = {}
        for start, size in starts.items():
            by_size.setdefault(size, {})[start] = None
        ends, sizes = {start + size: start for start, size in starts.items()}, sorted(by_size)
        if self._change is change:  # otherwise a signal handler has completed it
            self._starts, self._ends, self._by_size, self._sizes, self._change = starts, ends, by_size, sizes, None
        return self._changes
