"""Functions that are called when the process ends, even one of multiprocessing, which does not call atexit's."""

from __future__ import annotations

import atexit
from collections.abc import Callable
from multiprocessing import util


def call(function: Callable[[], object]) -> None:
    """Calls a module's ``function`` when this process ends, and when a child of it does. It may be called twice."""
    atexit.register(function)
    _in_this_process(function)
    util.register_after_fork(function, _in_this_process)  # a child of multiprocessing has forgotten the others


def _in_this_process(function: Callable[[], object]) -> None:
    util.Finalize(None, function, exitpriority=0)
