"""Queues the saves of one path in this process, so that they run one at a time, in the order of the calls."""

from __future__ import annotations

import os
import threading
from collections import deque

changed = threading.Condition()
_turns: dict[str, deque[Turn]] = {}  # by path: saves in progress and waiting


class Turn:
    """A place in the queue for ``path``, from construction until ``end``."""

    def __init__(self, path: str) -> None:
        self._path = path
        self.thread = threading.get_ident()  # the thread that makes this save
        with changed:
            self._queue = _turns.setdefault(path, deque())
            self._queue.append(self)
            _turns[path] = self._queue  # the save of a signal handler may have removed it since the line before last

    def interrupts_another(self) -> bool:
        """Returns whether this thread is already saving to the path: then this is a signal handler.

        Waiting would be a deadlock.
        """
        with changed:
            before = list(self._queue)[: self._queue.index(self)]
        return any(turn.thread == threading.get_ident() for turn in before)

    def wait(self) -> None:
        """Waits until all earlier saves have ended. An exception, as from Ctrl-C, gives up the place."""
        with changed:
            try:
                while self._queue[0] is not self:
                    changed.wait()
            except BaseException:
                self.end()
                raise

    def end(self) -> None:
        """Lets the next save begin. Further calls do nothing."""
        with changed:
            if self in self._queue:
                self._queue.remove(self)
            if not self._queue and _turns.get(self._path) is self._queue:
                del _turns[self._path]
            changed.notify_all()


def _forget_parents() -> None:
    """Forgets, in a forked child, the saves of the parent's threads."""
    global changed
    changed = threading.Condition()
    _turns.clear()


os.register_at_fork(after_in_child=_forget_parents)
