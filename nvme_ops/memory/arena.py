"""``Arena``: hands out parts of one memory, each of which comes back with the last tensor over it."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable
from typing import Any

import torch

from nvme_ops.base.locks import forkable_lock
from nvme_ops.base.settings import PAGE
from nvme_ops.memory.holes import Holes
from nvme_ops.memory.pool import Held, Pool


class Arena:
    """Divides one lease, in whole pages, among many short-lived tensors of all sizes.

    Memory is reused, so the system need not supply any while data is on its way. Any thread may call any method, and
    tensors may be freed in any thread.

    Args:
        pool: supplies the memory, all of which is leased until the arena and all tensors over it are gone.
        nbytes: the arena's size, rounded down to whole pages.
    """

    def __init__(self, pool: Pool, nbytes: int) -> None:
        self._memory = pool.lease(nbytes // PAGE * PAGE).tensor
        self._lock = forkable_lock()
        self._holes = Holes()
        self._holes.add(0, self._memory.nbytes)
        self._held: Held[tuple[int, int]] = Held()  # start and size of each part
        self._in_use = self.peak = 0  #: the most bytes that were handed out at once

    @property
    def nbytes(self) -> int:
        """The arena's size in bytes."""
        return self._memory.nbytes

    @property
    def bytes_in_use(self) -> int:
        """Bytes that are handed out."""
        with self._lock:
            self._held.collect(self._give_back, self._recount)
            return self._in_use

    @property
    def largest(self) -> int:
        """Bytes of the largest part that can be allocated now."""
        with self._lock:
            self._held.collect(self._give_back, self._recount)
            return self._holes.largest

    def allocate(self, nbytes: int) -> torch.Tensor | None:
        """Returns a ``torch.uint8`` tensor of ``nbytes`` (at least 1) that begins on a page; None if it has no room."""
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
            owner.keeps = self._memory  # freed with the last tensor over this part
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
        """Rebuilds the holes: everything is free but these parts."""
        self._holes.clear()
        free = self._in_use = 0
        for start, size in sorted(parts):
            if start > free:
                self._holes.add(free, start - free)
            free = start + size
            self._in_use += size
        if free < self._memory.nbytes:
            self._holes.add(free, self._memory.nbytes - free)
