"""``Claims``: which thread uses what, so that no lock is held while waiting."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Hashable, Iterator


class Claims:
    """Things that one thread at a time claims, until ``close``, which waits for those that are claimed.

    What the calling thread itself still claims is not waited for: Ctrl-C came before it could release that.

    Args:
        lock: held only briefly, also by users of this class.
    """

    def __init__(self, lock: threading.RLock) -> None:
        self._lock, self._changed = lock, threading.Condition(lock)
        self._claimed: dict[Hashable, int] = {}  # by whom
        self._waiting = 0
        self._closed = False

    def take(self, thing: Hashable) -> None:
        """Claims a thing once no other thread does. Raises ValueError once closed."""
        me = threading.get_ident()
        with self._lock:
            while self._claimed.get(thing, me) != me and not self._closed:
                self._wait()
            if self._closed:
                raise ValueError("the store is closed")
            self._claimed[thing] = me

    def give_back(self, thing: Hashable) -> None:
        """Releases a thing: the next thread may take it."""
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
        """Claims a thing for the block."""
        self.take(thing)
        try:
            yield
        finally:
            self.give_back(thing)

    def close(self) -> bool:
        """Refuses new claims, and waits until none is left. Returns False from the second call on."""
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
