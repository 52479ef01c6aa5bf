"""``Held``: what was handed out, and comes back when an object is freed, whatever is interrupted meanwhile."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, Generic, TypeVar

from nvme_ops._native import native

T = TypeVar("T")


class Held(Generic[T]):
    """Things that go with objects. Its methods are called with a lock held; the objects may be freed anywhere.

    Ctrl-C may come at any line. Nothing is lost by it: that an object was freed is noted by functions written in C,
    which no signal handler interrupts, and what was interrupted is counted anew by the next ``collect``.
    """

    def __init__(self) -> None:
        self._all: dict[int, tuple[T, tuple[Any, Any]]] = {}  # by the id of the weak reference that tells
        self._freed: deque[object] = deque()
        self.interrupted = False  #: set by whoever was interrupted between a thing and its being held

    def add(self, owner: object, thing: T) -> object:
        """Holds a thing until ``owner`` is freed. Returns what ``end`` and ``pass_on`` take."""
        waking = weakref.ref(owner, native().note_ending)  # the older one, so it is called after the other
        gone = weakref.ref(owner, self._freed.append)
        self._all[id(gone)] = thing, (gone, waking)
        return gone

    def end(self, held: object) -> None:
        """Has a thing given back by the next ``collect``, though its object may live on. Needs no lock."""
        self._freed.append(held)
        native().note_ending()

    def pass_on(self, held: object, owner: object) -> None:
        """Holds the same thing until another object is freed."""
        try:
            self.add(owner, self._all[id(held)][0])
            del self._all[id(held)]
        except BaseException:
            self.interrupted = True
            raise

    def collect(self, give_back: Callable[[T], None], recount: Callable[[Iterable[T]], None]) -> None:
        """Takes back what was freed since the last call.

        Args:
            give_back: is called with each thing.
            recount: is called with all that are still held, after a call was interrupted.
        """
        try:
            while self.interrupted:
                held = list(self._all.values())
                recount([thing for thing, _ in held])
                self.interrupted = held != list(self._all.values())  # a signal handler may have been here
            while self._freed:
                gone = self._freed[0]  # which stays there until that is done
                found = self._all.pop(id(gone), None)
                if found is not None:
                    give_back(found[0])
                if self._freed and self._freed[0] is gone:  # a signal handler may have been here
                    self._freed.popleft()
        except BaseException:
            self.interrupted = True
            raise
