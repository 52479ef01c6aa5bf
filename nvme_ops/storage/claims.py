"""``Claims``: who is at what, so that no lock is held while something is waited for."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Hashable, Iterator


class Claims:
    """Things that one thread at a time is at, until ``close``, which waits for those who are at something.

    What the calling thread itself seems to be at is not waited for: Ctrl-C came before it could give that back.

    Args:
        lock: is held for moments only, also by who uses this.
    """

    def __init__(self, lock: threading.RLock) -> None:
        self._lock, self._changed = lock, threading.Condition(lock)
        self._claimed: dict[Hashable, int] = {}  # by whom
        self._waiting = 0
        self._closed = False

    def take(self, thing: Hashable) -> None:
        """Waits until nobody else is at it. Raises ValueError once closed."""
        me = threading.get_ident()
        with self._lock:
            while self._claimed.get(thing, me) != me and not self._closed:
                self._wait()
            if self._closed:
                raise ValueError("the store is closed")
            self._claimed[thing] = me

    def give_back(self, thing: Hashable) -> None:
        """Lets the next thread take it."""
        with self._lock:
            self._claimed.pop(thing, None)
            if self._waiting:
                self._changed.notify_all()

    def _wait(self) -> None:
        self._waiting += 1
        try:
            self._changed.wait()
        finally:
            self._waiting -= 1

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
        with self._lock:
            if self._closed:
                return False
            self._closed = True
            self._changed.notify_all()
            me = threading.get_ident()
            try:
                while any(who != me for who in self._claimed.values()):
                    self._wait()
            except BaseException:  # Ctrl-C
                self._closed = False
                raise
            return True
