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
from collections.abc import Callable
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


# Forks

_locks: weakref.WeakSet[Any] = weakref.WeakSet()


def forkable_lock() -> threading.RLock:  # a type only to checkers before Python 3.13
    """Returns a reentrant lock that no thread holds in a forked child: that of its parent does not exist there."""
    lock = threading.RLock()
    _locks.add(lock)
    return lock


def _forked() -> None:
    for lock in list(_locks):
        lock._at_fork_reinit()  # as the modules of Python do with their own


os.register_at_fork(after_in_child=_forked)


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


def tell(words: str) -> None:
    """Writes to stderr while the program ends: a warning could be hidden, or made an error, by a filter."""
    with contextlib.suppress(OSError, ValueError, AttributeError):  # stderr is closed or missing
        sys.stderr.write(f"nvme_ops: {words}\n")
        sys.stderr.flush()
