"""``Claims``: who is at what, so that no lock is held while something is waited for."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Hashable, Iterator


class Claims:
    """Things that one thread at a time is at, until ``close``, which waits for those who are at something.

    Args:
        lock: is held for moments only, also by who uses this.
    """

    def __init__(self, lock: threading.RLock) -> None:
        self._changed = threading.Condition(lock)
        self._claimed: set[Hashable] = set()
        self._closed = False

    def take(self, thing: Hashable) -> None:
        """Waits until nobody else is at it. Raises ValueError once closed."""
        with self._changed:
            while thing in self._claimed and not self._closed:
                self._changed.wait()
            if self._closed:
                raise ValueError("the store is closed")
            self._claimed.add(thing)

    def give_back(self, thing: Hashable) -> None:
        """Lets the next one."""
        with self._changed:
            self._claimed.discard(thing)
            self._changed.notify_all()

    @contextlib.contextmanager
    def at(self, thing: Hashable) -> Iterator[None]:
        """Takes it for the block."""
        self.take(thing)
        try:
            yield
        finally:
            self.give_back(thing)

    def close(self) -> bool:
        """Nobody takes anything any more, and nobody is at anything when it returns. False from the second time on."""
        with self._changed:
            if self._closed:
                return False
            self._closed = True
            self._changed.notify_all()
            try:
                while self._claimed:
                    self._changed.wait()
            except BaseException:  # Ctrl-C
                self._closed = False
                raise
            return True
