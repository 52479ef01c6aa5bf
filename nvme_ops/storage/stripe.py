"""Divides tensors among several folders, so that all their devices are busy for the same time."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Sequence
from typing import NamedTuple

import torch

from nvme_ops.handle import aio_handle
from nvme_ops.memory.ring import InFlight
from nvme_ops.settings import PAGE, STRIPE
from nvme_ops.storage.slab import NO_ROOM, Slab
from nvme_ops.tensors import empty

_SECONDS = 0.2  # spent on measuring one device
_MOST = 64 << 20  # bytes of it


class Part(NamedTuple):
    """``nbytes`` of a tensor from byte ``begin`` on, in the folder with this index."""

    folder: int
    begin: int
    nbytes: int


class Striping:
    """Divides tensors by the ``weights`` of the folders, which are their devices' rates, in any unit.

    A tensor of less than two stripes of 4 MiB goes to one folder as a whole: the one with the least load so far.

    Raises ValueError for weights that are not positive, finite numbers.
    """

    def __init__(self, weights: Sequence[float]) -> None:
        if not len(weights) or not all(0 < weight < math.inf for weight in weights):
            raise ValueError(f"weights must be positive numbers, one for each folder: {list(weights)}")
        total = sum(weights)
        self.weights = [weight / total for weight in weights]
        self._given = [0.0] * len(weights)  # load of each folder: its bytes over its weight

    def parts(self, nbytes: int) -> list[Part]:
        """Returns where the bytes of one tensor go, in order."""
        if len(self.weights) == 1:
            return [Part(0, 0, nbytes)]
        if nbytes < 2 * STRIPE:
            folder = min(range(len(self.weights)), key=lambda index: self._given[index] + nbytes / self.weights[index])
            self._give(folder, nbytes)
            return [Part(folder, 0, nbytes)]
        found, begin, share = [], 0, 0.0
        for folder, weight in enumerate(self.weights):
            share += weight
            end = nbytes if folder == len(self.weights) - 1 else min(nbytes, round(nbytes * share / PAGE) * PAGE)
            if end > begin:
                found.append(Part(folder, begin, end - begin))
                self._give(folder, end - begin)
                begin = end
        return found

    def _give(self, folder: int, nbytes: int) -> None:
        self._given[folder] += nbytes / self.weights[folder]
        least = min(self._given)
        self._given = [given - least for given in self._given]


def measured(handles: Sequence[aio_handle], slabs: Sequence[Slab], fds: Sequence[int]) -> list[float]:
    """Measures bytes per second of each device, by alternating writes and reads for a fraction of a second.

    Returns equal rates if a disk has no room for the measurement.
    """
    block = empty(STRIPE, dtype=torch.uint8)
    block.zero_()
    try:
        return [_rate(handle, slab, fd, block) for handle, slab, fd in zip(handles, slabs, fds, strict=True)]
    except OSError as error:
        if error.errno not in NO_ROOM:
            raise
        return [1.0] * len(slabs)


def _rate(handle: aio_handle, slab: Slab, fd: int, block: torch.Tensor) -> float:
    extent = slab.allocate(_MOST)
    try:
        moved, begin = 0, time.perf_counter()
        with InFlight(0) as in_flight:  # waits even when interrupted: the extent is freed afterwards
            for place in range(extent.start, extent.end, STRIPE):
                in_flight.add(handle.submit_pwrite(block, fd, place))
                in_flight.add(handle.submit_pread(block, fd, place))
                moved += 2 * STRIPE
                if time.perf_counter() - begin > _SECONDS:
                    break
        return moved / (time.perf_counter() - begin)
    finally:
        slab.free(extent)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
