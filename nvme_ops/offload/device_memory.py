"""Bounded memory for tensors that come and go, on the CPU or on an accelerator."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import Any, Protocol

import torch

from nvme_ops.memory.arena import Arena
from nvme_ops.memory.pool import Held, Pool

_HUGE = 2 << 20  # bytes in which a pool counts what is large


class Memory(Protocol):
    """Gives memory on a device, a bounded amount of it."""

    peak: int

    @property
    def nbytes(self) -> int:
        """Bytes in all."""

    @property
    def bytes_in_use(self) -> int:
        """Bytes that are handed out."""

    def allocate(self, nbytes: int) -> torch.Tensor | None:
        """Returns ``nbytes`` bytes; None while there are none."""


def memory_on(device: torch.device, nbytes: int) -> Memory:
    """Returns memory of so many bytes, in whole pages."""
    if device.type == "cpu":
        return Arena(Pool(-(-nbytes // _HUGE) * _HUGE), nbytes)
    return DeviceMemory(nbytes, device)


class DeviceMemory:
    """Memory of an accelerator, by torch's own allocator, which keeps it for what is queued on the current stream."""

    def __init__(self, nbytes: int, device: torch.device) -> None:
        self.nbytes, self._device = nbytes, device
        self._in_use = self.peak = 0
        self._lock = threading.RLock()
        self._held: Held[int] = Held()  # bytes of each tensor

    @property
    def bytes_in_use(self) -> int:
        """Bytes that are handed out."""
        with self._lock:
            self._held.collect(self._give_back, self._recount)
            return self._in_use

    def allocate(self, nbytes: int) -> torch.Tensor | None:
        """Returns ``nbytes`` bytes; None while there are none within the bound."""
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


def current_stream(device: torch.device) -> torch.Stream:
    """Returns the stream to which this thread gives what an accelerator is to do."""
    accelerator: Any = getattr(torch, "accelerator", None) or torch.get_device_module(device)  # since torch 2.6
    stream: torch.Stream = accelerator.current_stream(device)
    return stream
