"""Closing, forking and the end of the program, for everything that has to do with any of them.

``docs/architecture.md`` has the rules. There is one hook for forks and one way to be called at the end.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import threading
import weakref
from collections.abc import Callable, Iterable
from multiprocessing import util
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from typing_extensions import Self


class Closing:
    """Calls ``close`` at the end of a ``with`` block."""

    def close(self) -> None:
        """Closes the object."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        """Returns the object, which is closed at the end of the block."""
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Tracked:
    """Base of what has something to do in a forked child, or at the end of the program; ``track`` begins it."""

    def _after_fork(self) -> None:
        """Gives up, in a forked child, what is its parent's. Threads of the parent may have held any lock."""

    def _at_exit(self) -> None:
        """Ends its work at the end of the program. It may be called twice."""


_tracked: weakref.WeakSet[Tracked] = weakref.WeakSet()


def track(tracked: Tracked) -> None:
    """Has the methods of ``tracked`` called from now on, as long as it lives."""
    _tracked.add(tracked)


def untrack(tracked: Tracked) -> None:
    """Undoes ``track``."""
    _tracked.discard(tracked)


def _call_all(functions: Iterable[Callable[[], object]]) -> None:
    """Calls all functions in order, also after one has failed; raises what the last of those raised."""
    with contextlib.ExitStack() as stack:
        for function in reversed(list(functions)):
            stack.callback(function)


# Forks

_locks: weakref.WeakSet[Any] = weakref.WeakSet()
_before: list[Callable[[], object]] = []
_in_child: list[Callable[[], object]] = []
_forks = 0


def forks() -> int:
    """Returns how often this process has forked, and was forked."""
    return _forks


def at_fork(in_child: Callable[[], object], before: Callable[[], object] | None = None) -> None:
    """Has a module's functions called in a forked child, and before a fork."""
    _in_child.append(in_child)
    _before.extend([before] if before else [])


def forkable_lock() -> threading.RLock:  # a type only to checkers before Python 3.13
    """Returns a reentrant lock that no thread holds in a forked child: that of its parent does not exist there."""
    lock = threading.RLock()
    _locks.add(lock)
    return lock


def _count() -> None:
    global _forks
    _forks += 1


def _forked() -> None:
    _count()
    for lock in list(_locks):
        if not lock._is_owned():  # by the thread that forked, in a signal handler
            lock._at_fork_reinit()  # as the modules of Python do with their own
    _call_all([*(each._after_fork for each in list(_tracked)), *_in_child])


os.register_at_fork(before=lambda: _call_all(_before), after_in_parent=_count, after_in_child=_forked)


# The end of the program


def at_exit(function: Callable[[], object]) -> None:
    """Has a module's ``function`` called when this process or a child of it ends. It may run twice.

    A child of multiprocessing ignores ``atexit``.
    """
    atexit.register(function)
    _register_here(function)
    util.register_after_fork(function, _register_here)  # multiprocessing clears its own list in a child


def _register_here(function: Callable[[], object]) -> None:
    util.Finalize(None, function, exitpriority=0)


def _end_all() -> None:
    _call_all([each._at_exit for each in list(_tracked)])


at_exit(_end_all)


def tell(words: str) -> None:
    """Writes to stderr while the program ends: a warning could be hidden, or made an error, by a filter."""
    with contextlib.suppress(OSError, ValueError, AttributeError):  # stderr is closed or missing
        sys.stderr.write(f"nvme_ops: {words}\n")
        sys.stderr.flush()
