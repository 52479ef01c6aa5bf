"""Locks that are free in a forked child, whichever thread of its parent held them."""

from __future__ import annotations

import os
import threading
import weakref
from typing import Any

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
