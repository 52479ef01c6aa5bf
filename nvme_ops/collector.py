"""Pauses Python's collector of cyclic garbage."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def paused() -> Iterator[None]:
    """Pauses the collector while the block makes thousands of objects that are not garbage, which it would scan often.

    Also works as a decorator. Garbage of other threads is not collected meanwhile either.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
