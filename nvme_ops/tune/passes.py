"""One timed pass over a scratch file with given settings: the measurement that the search repeats."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from nvme_ops.handle import aio_handle
from nvme_ops.measuring.files import make_cold, sync
from nvme_ops.settings import Settings
from nvme_ops.text import MIB

DIRECTIONS = ("write", "read")
LEAST = 32 * MIB  # of a pass: less would mostly measure how it begins and ends
# How many short ones a budget should hold, and how many full ones. Longer ones are less noisy by as much as there are
# fewer of them; but more and shorter ones say less of large blocks, which a pass should have many of.
_SHORT_PASSES, _FULL_PASSES = 200, 80


@dataclass
class Passes:
    """Writes and reads ``tensor``, or the first part of it, to and from the start of an existing file.

    Call ``calibrate`` first: it fills the file and chooses the sizes of short and full passes.
    """

    path: str
    tensor: torch.Tensor  # bytes, on the CPU or on a GPU; a full pass moves no more than all of them
    make_handle: Callable[..., aio_handle]  # from settings; that is cheap, so every pass has one of its own
    directions: Sequence[str] = DIRECTIONS
    loops: int = 1  # times that a pass is done; the rate is that of all of them
    before_read: Callable[[int], None] | None = None  # in place of dropping the file from the page cache

    def __post_init__(self) -> None:
        self.short = self.full = min(self.tensor.numel(), LEAST)
        self._buffered = not _direct(self.path)

    def calibrate(self, seconds: float) -> None:
        """Fills the file and chooses sizes for a budget in seconds, from the rates of the default settings."""
        handle = self.make_handle()
        self._fill(handle)
        rates = self.measure(Settings(), False)
        moved = seconds / sum(1 / rate for rate in rates.values()) / self.loops
        self.short, self.full = (
            min(self.tensor.numel(), max(LEAST, int(moved / passes) // MIB * MIB))
            for passes in (_SHORT_PASSES, _FULL_PASSES)
        )
        self._fill(handle)

    def _fill(self, handle: aio_handle) -> None:
        handle.sync_pwrite(self.tensor[: self.full], self.path, 0)
        sync(self.path)

    def measure(self, settings: Settings, full: bool) -> dict[str, float]:
        """Returns bytes per second by direction."""
        handle = self.make_handle(**settings.as_json())
        memory = self.tensor[: self.full if full else self.short]
        # untimed, so that every lane has its thread and its ring
        handle.sync_pread(memory[: settings.intra_op_parallelism * MIB], self.path, 0)
        seconds = dict.fromkeys(self.directions, 0.0)
        for _ in range(self.loops):
            for direction in self.directions:
                seconds[direction] += self._pass(handle, direction, memory)
        return {name: memory.numel() * self.loops / taken for name, taken in seconds.items()}

    def _pass(self, handle: aio_handle, direction: str, memory: torch.Tensor) -> float:
        if direction == "read" and self.before_read is not None:
            self.before_read(memory.numel())
        elif direction == "read":
            make_cold(self.path)
        start = time.perf_counter()
        if direction == "read":
            handle.sync_pread(memory, self.path, 0)
        else:
            handle.sync_pwrite(memory, self.path, 0)
            if self._buffered:  # else the device has it
                sync(self.path)
        return time.perf_counter() - start


def _direct(path: str) -> bool:
    """Returns whether the file system supports direct I/O; otherwise written data stay in the page cache."""
    try:
        os.close(os.open(path, os.O_RDWR | os.O_DIRECT))
    except OSError:
        return False
    return True
