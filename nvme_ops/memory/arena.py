"""``Arena``: one memory, of which parts are handed out that come back with the last tensor over them."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterable
from typing import Any

import torch

from nvme_ops.memory.holes import Holes
from nvme_ops.memory.pool import Held, Pool
from nvme_ops.settings import PAGE


class Arena:
    """Parts of one lease, in whole pages, for many tensors of all sizes that come and go.

    A part has memory that was used before, so that nothing is asked of the system while data are on their way. Any
    thread may call any method, and tensors may be freed anywhere.

    Args:
        pool: has the memory, all of which is leased until the arena and all tensors over it are gone.
        nbytes: of it; in whole pages.
    """

    def __init__(self, pool: Pool, nbytes: int) -> None:
        self._memory = pool.lease(nbytes // PAGE * PAGE).tensor
        self._lock = threading.RLock()
        self._holes = Holes()
        self._holes.add(0, self._memory.nbytes)
        self._held: Held[tuple[int, int]] = Held()  # start and size of each part
        self._in_use = self.peak = 0  #: the most bytes that were handed out at once

    @property
    def nbytes(self) -> int:
        """Bytes of all of it."""
        return self._memory.nbytes

    @property
    def bytes_in_use(self) -> int:
        """Bytes that are handed out."""
        with self._lock:
            self._held.collect(self._give_back, self._recount)
            return self._in_use

    @property
    def largest(self) -> int:
        """Bytes of the largest part that there is now."""
        with self._lock:
            self._held.collect(self._give_back, self._recount)
            return self._holes.largest

    def allocate(self, nbytes: int) -> torch.Tensor | None:
        """Returns memory of ``nbytes`` bytes that begins on a page, ``torch.uint8``; None where there is none now."""
        if nbytes < 1:
            raise ValueError(f"nbytes must be at least 1, not {nbytes}")
        size = -(-nbytes // PAGE) * PAGE
        with self._lock:
            self._held.collect(self._give_back, self._recount)
            found = self._holes.find(size)
            if found is None:
                return None
            start = found[0]
            owner: Any = (ctypes.c_ubyte * nbytes).from_address(self._memory.data_ptr() + start)
            owner.keeps = self._memory  # goes with the last tensor over this part
            try:
                if not self._holes.take(*found, size):
                    return self.allocate(nbytes)
                self._in_use += size
                self._held.add(owner, (start, size))
            except BaseException:
                self._held.interrupted = True
                raise
            self.peak = max(self.peak, self._in_use)
        return torch.frombuffer(owner, dtype=torch.uint8)

    def _give_back(self, part: tuple[int, int]) -> None:
        self._in_use -= part[1]
        self._holes.merge(*part)

    def _recount(self, parts: Iterable[tuple[int, int]]) -> None:
        """Finds again what is free: all that is not one of the parts."""
        self._holes.clear()
        free = self._in_use = 0
        for start, size in sorted(parts):
            if start > free:
                self._holes.add(free, start - free)
            free = start + size
            self._in_use += size
        if free < self._memory.nbytes:
            self._holes.add(free, self._memory.nbytes - free)
