"""Queues the saves of one path in this process, so that they run one at a time, in the order of the calls."""

from __future__ import annotations

import os
import threading
from collections import deque
from operator import attrgetter

lock = threading.RLock()  # taken directly: Ctrl-C while a Condition is entered may leave its lock taken
_changed = threading.Condition(lock)
_RECHECK = 1.0  # seconds after which a waiter checks whether an earlier save has ended without notifying it
_turns: dict[str, deque[Turn]] = {}  # by path: saves in progress and waiting


class Turn:
    """A place in the queue for ``path``, from ``begin`` until ``over`` is set.

    A signal handler may raise wherever a function is entered, also in ``end``. So the caller of ``begin`` sets ``over``
    itself, first thing in a ``finally`` clause; ``end`` then wakes those who wait.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self._queue: deque[Turn] = deque()
        self.thread = threading.get_ident()  # the thread that makes this save
        self.over = False

    def begin(self) -> bool:
        """Queues up behind all saves that have begun. Returns whether this thread makes one of them.

        In that case this is a signal handler, and waiting would be a deadlock.
        """
        with lock:
            self._queue = _turns.setdefault(self._path, deque())
            self._queue.append(self)
            _turns[self._path] = self._queue  # a signal handler's save may have removed it since the line before last
            return self._queue[0] is not self and self.thread in map(attrgetter("thread"), self._before())

    def wait(self) -> None:
        """Waits until all earlier saves have ended."""
        with lock:
            while self._queue[0] is not self and self._before():
                _changed.wait(_RECHECK)

    def end(self) -> None:
        """Leaves the queue and lets the next save begin. Further calls do nothing."""
        with lock:
            for turn in list(self._queue):
                if turn.over and turn in self._queue:  # not removed by a signal handler's save meanwhile
                    self._queue.remove(turn)
            if _turns.get(self._path) is self._queue and not self._queue:
                _turns.pop(self._path, None)
            _changed.notify_all()

    def _before(self) -> list[Turn]:
        """Returns a snapshot of the earlier saves that are not over: a signal handler's may come and go."""
        queue = list(self._queue)
        place = queue.index(self)
        return [turn for turn in queue[:place] if not turn.over] if place else []


def _forget_parents() -> None:
    """Forgets, in a forked child, the saves of the parent's threads."""
    global lock, _changed
    lock = threading.RLock()
    _changed = threading.Condition(lock)
    _turns.clear()


os.register_at_fork(after_in_child=_forget_parents)
