"""Weights in the machine's free memory: the page cache takes what is read through it."""

from __future__ import annotations

import functools
import time
from collections.abc import Sequence
from typing import Any

from nvme_ops.base.limits import free_memory
from nvme_ops.io.handle import aio_handle

_PERIOD = 1.0  # seconds between looks at the free memory
_RENEWAL = 60.0  # seconds after which weights are read through the page cache again
_LARGE = 1 << 20  # bytes from which an extent is read through the page cache once


class PageCache:
    """Fills the page cache with weights that are read again and again, while free memory holds them all.

    A handle with ``cache="auto"`` reads from there what it has, and the rest directly. So each weight is read through
    the page cache once a minute at most, and what the kernel has given to others since then comes from the device as if
    nothing had been cached.

    Args:
        nbytes: bytes of the weights.
    """

    def __init__(self, nbytes: int) -> None:
        self._nbytes = nbytes
        self._filled: set[tuple[str, int, int]] = set()
        self._has_room, self._next, self._renewal = False, 0.0, 0.0

    def reader(self, handle: aio_handle, extents: Sequence[tuple[str, int, int]]) -> aio_handle:
        """Returns the handle that reads extents: this one, or one like it that fills the page cache.

        Args:
            handle: the one of the weights.
            extents: the path of the file, where each begins in it, and its bytes.
        """
        now = time.monotonic()
        if now >= self._next:
            self._has_room, self._next = free_memory() >= self._nbytes, now + _PERIOD
        if not self._has_room:
            return handle
        if now >= self._renewal:
            self._filled, self._renewal = set(), now + _RENEWAL
        missing = [extent for extent in extents if extent not in self._filled]
        self._filled.update(extent for extent in missing if extent[2] >= _LARGE)
        return _filling(handle) if missing else handle


def _filling(handle: aio_handle) -> aio_handle:
    """Returns a handle like this one that reads through the page cache, or this one if it has another cache mode."""
    if type(handle) is not aio_handle or handle._learner is not None or handle._settings["cache"] != "auto":
        return handle
    return _buffered(**{**handle._settings, "cache": "buffered"})


@functools.cache
def _buffered(**settings: Any) -> aio_handle:
    return aio_handle(**settings)
