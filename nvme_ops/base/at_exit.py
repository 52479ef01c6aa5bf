"""Calls functions when the process ends, also in a child of multiprocessing, which ignores ``atexit``."""

from __future__ import annotations

import atexit
import contextlib
import sys
from collections.abc import Callable
from multiprocessing import util


def call(function: Callable[[], object]) -> None:
    """Registers a module's ``function`` to be called when this process or a child of it ends. It may run twice."""
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
