"""Bounded memory for short-lived tensors, on the CPU or on an accelerator."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from nvme_ops.base.locks import forkable_lock
from nvme_ops.memory.arena import Arena
from nvme_ops.memory.pool import Held, Pool

_HUGE = 2 << 20  # bytes: a pool counts large allocations in such units


class DeviceMemory:
    """Memory of an accelerator from torch's allocator, which reuses it in the order of the current stream."""

    def __init__(self, nbytes: int, device: torch.device) -> None:
        self.nbytes, self._device = nbytes, device
        self._in_use = self.peak = 0
        self._lock = forkable_lock()
        self._held: Held[int] = Held()  # the bytes of each tensor

    @property
    def bytes_in_use(self) -> int:
        """Bytes handed out now."""
        with self._lock:
            self._held.collect(self._give_back, self._recount)
            return self._in_use

    def allocate(self, nbytes: int) -> torch.Tensor | None:
        """Returns a uint8 tensor of ``nbytes``, or None while that would exceed the bound."""
        with self._lock:
            self._held.collect(self._give_back, self._recount)
            if self._in_use + nbytes > self.nbytes:
                return None
            tensor = torch.empty(nbytes, dtype=torch.uint8, device=self._device)
            try:
                self._in_use += nbytes
                self._held.add(tensor, nbytes)
            except BaseException:
                self._held.interrupted = True
                raise
            self.peak = max(self.peak, self._in_use)
        return tensor

    def _give_back(self, nbytes: int) -> None:
        self._in_use -= nbytes

    def _recount(self, sizes: Iterable[int]) -> None:
        self._in_use = sum(sizes)


Memory = Arena | DeviceMemory


def memory_on(device: torch.device, nbytes: int) -> Memory:
    """Returns memory of ``nbytes`` bytes on a device."""
    if device.type == "cpu":
        return Arena(Pool(-(-nbytes // _HUGE) * _HUGE), nbytes)
    return DeviceMemory(nbytes, device)


def current_stream(device: torch.device) -> torch.Stream:
    """Returns the stream on which this thread queues work for an accelerator."""
    accelerator: Any = getattr(torch, "accelerator", None) or torch.get_device_module(device)  # since torch 2.6
    stream: torch.Stream = accelerator.current_stream(device)
    return stream
