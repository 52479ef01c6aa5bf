"""The saves of one path in this process, one at a time, in the order in which they were asked for."""

from __future__ import annotations

import os
import threading
from collections import deque

changed = threading.Condition()
_turns: dict[str, deque[Turn]] = {}  # by path, those who save and wait


class Turn:
    """A place in the queue for ``path``, from here on until ``end``."""

    def __init__(self, path: str) -> None:
        self._path = path
        self.thread = threading.get_ident()  # that would have to save before this one can
        with changed:
            self._queue = _turns.setdefault(path, deque())
            self._queue.append(self)
            _turns[path] = self._queue  # a signal handler's save may have come and gone since the line before the last

    def interrupts_another(self) -> bool:
        """Whether this thread is in a save of the path that comes before: then it is in a signal handler.

        To wait here would be to wait for ever.
        """
        with changed:
            before = list(self._queue)[: self._queue.index(self)]
        return any(turn.thread == threading.get_ident() for turn in before)

    def wait(self) -> None:
        """Waits until all that were asked for before have ended. An exception, as of Ctrl-C, gives the place away."""
        with changed:
            try:
                while self._queue[0] is not self:
                    changed.wait()
            except BaseException:
                self.end()
                raise

    def end(self) -> None:
        """The next one may begin."""
        with changed:
            if self in self._queue:
                self._queue.remove(self)
            if not self._queue and _turns.get(self._path) is self._queue:
                del _turns[self._path]
            changed.notify_all()


def _forget_parents() -> None:
    """Forgets, in a forked child, what the threads of the parent do."""
    global changed
    changed = threading.Condition()
    _turns.clear()


os.register_at_fork(after_in_child=_forget_parents)
