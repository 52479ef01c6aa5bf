"""One timed pass over a scratch file with given settings: what the search calls again and again."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence

import torch

from nvme_ops.bench.files import make_cold, sync
from nvme_ops.bench.page_cache import cached_share, handles_read_it
from nvme_ops.bench.settings import Settings
from nvme_ops.handle import aio_handle
from nvme_ops.text import MIB

DIRECTIONS = ("write", "read")
LEAST = 32 * MIB  # of a pass: less would mostly measure how it begins and ends
# How many short ones a budget should hold, and how many full ones: some 22 rounds of the final in a third of it.
_SHORT_PASSES, _FULL_PASSES = 450, 150


class Passes:
    """Writes and reads ``tensor``, or the first part of it, to and from the start of ``file``.

    ``calibrate`` comes first: it fills the file and chooses the sizes of short and full passes.

    Args:
        file: path or descriptor of an existing file.
        tensor: bytes, on the CPU or on a GPU; a full pass moves no more than all of them.
        make_handle: makes a handle with given settings. That is cheap, so every pass has one of its own.
        directions: of DIRECTIONS.
        loops: times that a pass is done; the rate is that of all of them.
        before_read: sees to it that a read comes from the device; by default drops the file from the page cache.
    """

    def __init__(
        self,
        file: str | int,
        tensor: torch.Tensor,
        make_handle: Callable[[Settings], aio_handle],
        directions: Sequence[str] = DIRECTIONS,
        loops: int = 1,
        before_read: Callable[[], None] | None = None,
    ) -> None:
        self._file, self._tensor, self._make_handle = file, tensor, make_handle
        self._directions, self._loops = directions, loops
        self._before_read = before_read or (lambda: make_cold(_path_of(file)))
        self._buffered = not _direct(_path_of(file))
        self.written = 0  # bytes so far
        self.from_page_cache: float | None = None  # of what the last measurement read, the share that lay there
        self._read = self._cached = 0.0  # bytes of all, as far as it is known
        self.short = self.full = min(tensor.numel(), LEAST)

    def calibrate(self, seconds: float) -> None:
        """Fills the file and chooses sizes for a budget of so many seconds, from the rates of the default settings."""
        handle = self._make_handle(Settings())
        self._fill(handle)
        rates = self.measure(Settings(), False)
        bytes_per_second = 1 / sum(1 / rate for rate in rates.values()) / self._loops
        self.short = self._size(bytes_per_second * seconds / _SHORT_PASSES)
        self.full = self._size(bytes_per_second * seconds / _FULL_PASSES)
        self._fill(handle)

    def measure(self, settings: Settings, full: bool) -> dict[str, float]:
        """Bytes per second by direction."""
        handle = self._make_handle(settings)
        memory = self._tensor[: self.full if full else self.short]
        # untimed, so that every lane has its thread and its ring
        handle.sync_pread(memory[: settings.intra_op_parallelism * MIB], self._file, 0)
        seconds = dict.fromkeys(self._directions, 0.0)
        read, cached = self._read, self._cached
        for _ in range(self._loops):
            for direction in self._directions:
                seconds[direction] += self._pass(handle, direction, memory)
        self.from_page_cache = (self._cached - cached) / (self._read - read) if self._read > read else None
        return {name: memory.numel() * self._loops / taken for name, taken in seconds.items()}

    @property
    def all_from_page_cache(self) -> float | None:
        """Of all that was read, the share that lay in the page cache; None where nobody tells, or reads go past it."""
        return self._cached / self._read if self._read else None

    def _fill(self, handle: aio_handle) -> None:
        handle.sync_pwrite(self._tensor[: self.full], self._file, 0)
        sync(_path_of(self._file))
        self.written += self.full

    def _pass(self, handle: aio_handle, direction: str, memory: torch.Tensor) -> float:
        if direction == "read":
            self._before_read()
            self._look_at_page_cache(memory.numel())
            start = time.perf_counter()
            handle.sync_pread(memory, self._file, 0)
        else:
            start = time.perf_counter()
            handle.sync_pwrite(memory, self._file, 0)
            self.written += memory.numel()
            if self._buffered:  # else the device has it
                sync(_path_of(self._file))
        return time.perf_counter() - start

    def _look_at_page_cache(self, size: int) -> None:
        share = cached_share(_path_of(self._file), size) if handles_read_it() else None
        if share is not None:
            self._read += size
            self._cached += share * size

    def _size(self, wanted: float) -> int:
        return min(self._tensor.numel(), max(LEAST, int(wanted) // MIB * MIB))


def _path_of(file: str | int) -> str:
    return f"/proc/self/fd/{file}" if isinstance(file, int) else file


def _direct(path: str) -> bool:
    """Whether the file system takes direct I/O; where not, what is written lies in the page cache."""
    try:
        os.close(os.open(path, os.O_RDWR | os.O_DIRECT))
    except OSError:
        return False
    return True
