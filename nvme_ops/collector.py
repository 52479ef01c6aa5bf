"""Python's collector of cyclic garbage, and when it is not wanted."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def paused() -> Iterator[None]:
    """While thousands of objects are made, none of them garbage: to look through them takes as long as to make them.

    As a decorator too. Other threads' garbage waits as long.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
