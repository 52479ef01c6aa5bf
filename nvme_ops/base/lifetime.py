"""Closing, forking and the end of the program, for everything that has to do with any of them.

``docs/architecture.md`` has the rules. There is one hook for forks and one way to be called at the end.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterable
from multiprocessing import util
from typing import TYPE_CHECKING, Any, ClassVar

from nvme_ops.base.native import native

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


def in_this_process() -> Callable[[], bool]:
    """Returns a function that tells this process from a child that is forked later."""
    process = os.getpid()
    return lambda: process == os.getpid()


class Owned:
    """Base of what belongs to the process that made it."""

    _forked_error: ClassVar[str]  #: formatted with ``self``

    def __init__(self) -> None:
        self._process = os.getpid()

    def _is_ours(self) -> bool:
        return self._process == os.getpid()

    def _require_ours(self) -> None:
        """Raises RuntimeError in a forked child."""
        if self._process != os.getpid():
            raise RuntimeError(self._forked_error.format(self=self))


class Usable(Owned):
    """Base of what can be used until it is closed, and only in the process that made it."""

    _closed = False
    _closed_error: ClassVar[str]  #: formatted with ``self``

    @property
    def closed(self) -> bool:
        """Whether ``close`` was called."""
        return self._closed

    def is_usable(self) -> bool:
        """Returns whether ``require_open`` raises nothing."""
        return not self._closed and self._is_ours()

    def require_open(self) -> None:
        """Raises ValueError after ``close``, and RuntimeError in a forked child."""
        if self._closed:
            raise ValueError(self._closed_error.format(self=self))
        self._require_ours()


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
    _call_all([*(tracked._after_fork for tracked in list(_tracked)), *_in_child])


os.register_at_fork(before=lambda: _call_all(_before), after_in_parent=_count, after_in_child=_forked)


# Waits that end

_POLL = 0.2  # seconds to wait for a transfer to end before looking again


class Patience:
    """Waits for memory that others hold, for a bounded time.

    Args:
        seconds: the bound, counted from the first wait.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds, self._deadline, self._over = seconds, 0.0, False

    def wait(self, seen: int, is_under_way: bool) -> bool:
        """Waits until a transfer ends, unless one has ended since ``native().endings()`` returned ``seen``.

        It may return earlier. Returns False once the time is up, but not while a write ``is_under_way``.
        """
        now = time.monotonic()
        self._deadline = self._deadline or now + self._seconds
        if is_under_way or (self._seconds and now <= self._deadline):
            native().wait_for_ending(seen, _POLL)
        elif self._over:
            return False
        else:
            self._over = True  # after one more try
        if native().endings() == seen:
            gc.collect()  # a reference cycle with a traceback may hold memory
        return True


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
    _call_all([tracked._at_exit for tracked in list(_tracked)])


at_exit(_end_all)


def tell(words: str) -> None:
    """Writes to stderr while the program ends: a warning could be hidden, or made an error, by a filter."""
    with contextlib.suppress(OSError, ValueError, AttributeError):  # stderr is closed or missing
        sys.stderr.write(f"nvme_ops: {words}\n")
        sys.stderr.flush()
