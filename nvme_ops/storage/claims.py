"""``Claims``: which thread uses what, so that no lock is held while waiting."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Hashable

_LOST = 0.1  # seconds until a claim that ended without a word is noticed


class Claim:
    """What a thread has claimed, for a ``with`` block.

    It ends with the block; where Ctrl-C comes before the block or at its very end, with the frames that it ends.
    """

    def __init__(self, claims: Claims, thing: Hashable, before: weakref.ref[Claim] | None) -> None:
        self._claims, self._thing, self._before = claims, thing, before
        self.thread = threading.get_ident()

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        self._claims._end(self._thing, self._before)


class Claims:
    """Things that one thread at a time claims, until ``close``, which waits for those that are claimed.

    What the calling thread itself still claims is not waited for: it does so in a signal handler, or after Ctrl-C.

    Args:
        lock: held only briefly, also by users of this class.
    """

    def __init__(self, lock: threading.RLock) -> None:
        self._lock, self._changed = lock, threading.Condition(lock)
        self._claimed: dict[Hashable, weakref.ref[Claim]] = {}  # a claim lives as long as whoever made it has it
        self._waiting = 0
        self._closed = False

    def take(self, thing: Hashable) -> Claim:
        """Claims a thing once no other thread does. Raises ValueError once closed."""
        with self._lock:
            while self._is_anothers(self._claimed.get(thing)) and not self._closed:
                self._wait()
            if self._closed:
                raise ValueError("the store is closed")
            claim = Claim(self, thing, self._claimed.get(thing))
            self._claimed[thing] = weakref.ref(claim)
            return claim

    def close(self) -> bool:
        """Refuses new claims, and waits until none is left. Returns False from the second call on."""
        with self._lock:
            if self._closed:
                return False
            self._closed = True
            self._changed.notify_all()
            try:
                while any(map(self._is_anothers, self._claimed.values())):
                    self._wait()
            except BaseException:  # Ctrl-C
                self._closed = False
                raise
            return True

    def _end(self, thing: Hashable, before: weakref.ref[Claim] | None) -> None:
        """The next thread may take it, unless this one had claimed it before."""
        with self._lock:
            if before is not None and before() is not None:
                self._claimed[thing] = before
                return
            self._claimed.pop(thing, None)
            if self._waiting:
                self._changed.notify_all()

    def _is_anothers(self, claimed: weakref.ref[Claim] | None) -> bool:
        claim = None if claimed is None else claimed()
        return claim is not None and claim.thread != threading.get_ident()

    def _wait(self) -> None:
        self._waiting += 1
        try:
            self._changed.wait(_LOST)
        finally:
            self._waiting -= 1
