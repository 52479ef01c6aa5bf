"""Functions that are called when the process ends, even one of multiprocessing, which does not call atexit's."""

from __future__ import annotations

import atexit
import contextlib
import sys
from collections.abc import Callable
from multiprocessing import util


def call(function: Callable[[], object]) -> None:
    """Calls a module's ``function`` when this process ends, and when a child of it does. It may be called twice."""
    atexit.register(function)
    _in_this_process(function)
    util.register_after_fork(function, _in_this_process)  # a child of multiprocessing has forgotten the others


def _in_this_process(function: Callable[[], object]) -> None:
    util.Finalize(None, function, exitpriority=0)


def tell(words: str) -> None:
    """Writes to stderr what the end of the program costs. Not a warning, which filters hide or make an error."""
    with contextlib.suppress(OSError, ValueError, AttributeError):  # nobody listens
        sys.stderr.write(f"nvme_ops: {words}\n")
        sys.stderr.flush()
