"""A double of torch.cuda, as far as memory is registered with it, and CUDA itself with the same methods for tests."""

from __future__ import annotations

import contextlib
import ctypes
import os
import threading
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch

REFUSED, UNKNOWN = 2, 713  # cudaErrorMemoryAllocation, cudaErrorHostMemoryNotRegistered


class FakeCuda:
    """It has two GPUs, of which a program uses the second, and copies nothing before somebody waits for it.

    An error stays its thread's last one until torch finds it; a forked child cannot call it.
    """

    def __init__(self, limit: int = 1 << 40) -> None:
        self.limit, self.process = limit, os.getpid()
        self.registered: dict[int, int] = {}
        self.calls = self.most = self.waits = 0  # registrations made, most bytes at once, waits for the GPU
        self.violations: list[str] = []
        self.refuses_to_unregister = False
        self._queued: list[Callable[[], object]] = []
        self._thread = threading.local()

    def _require(self, wrong: bool, words: str) -> None:
        if wrong:
            self.violations.append(words)

    def _returned(self, error: int) -> int:
        if error:
            self._thread.error = error
        return error

    # What torch.cuda.cudart() has

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:  # noqa: N802
        self._require(address % 4096 + nbytes % 4096 > 0, "registered in parts of pages")
        self._require(getattr(self._thread, "gpu", 0) != 1, "registered on a GPU that is not used")
        if flags != 1 or sum(self.registered.values()) + nbytes > self.limit:
            return self._returned(REFUSED)
        self.registered[address] = nbytes
        self.calls += 1
        self.most = max(self.most, sum(self.registered.values()))
        return 0

    def cudaHostUnregister(self, address: int) -> int:  # noqa: N802
        self._require(bool(self._queued), "unregistered while a copy is under way")
        self._require(getattr(self._thread, "gpu", 0) != 1, "unregistered on a GPU that is not used")
        if self.refuses_to_unregister or address not in self.registered:
            return self._returned(UNKNOWN)
        del self.registered[address]
        return 0

    def cudaGetErrorString(self, error: int) -> str:  # noqa: N802
        return f"error {error}"

    # What torch.cuda has

    @contextlib.contextmanager
    def _device(self, gpu: int) -> Iterator[None]:
        before = getattr(self._thread, "gpu", 0)
        self._thread.gpu = gpu
        yield
        self._thread.gpu = before

    def _synchronize(self, gpu: int) -> None:
        assert gpu == 1
        self.waits += 1
        while self._queued:
            self._queued.pop(0)()

    def _cudart(self) -> FakeCuda:
        if os.getpid() != self.process:
            raise RuntimeError("Cannot re-initialize CUDA in forked subprocess")
        return self

    def _has_context(self, gpu: int) -> bool:
        return self._cudart() is self and gpu == 1

    @contextlib.contextmanager
    def there(self) -> Iterator[FakeCuda]:
        """Has torch say that this is there."""
        functions: dict[str, Any] = {
            "is_available": lambda: True, "is_initialized": lambda: os.getpid() == self.process,
            "device_count": lambda: 2, "current_device": lambda: 0, "device": self._device,
            "synchronize": self._synchronize, "cudart": self._cudart,
        }  # fmt: skip
        with (
            mock.patch.multiple(torch.cuda, **functions),
            mock.patch.object(torch._C, "_cuda_hasPrimaryContext", self._has_context, create=True),
        ):
            yield self

    # What tests do

    def has(self, tensor: torch.Tensor) -> bool:
        """Returns whether all of a tensor's memory was registered at once."""
        start, end = tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes
        return any(address <= start and end <= address + nbytes for address, nbytes in self.registered.items())

    def launch(self) -> None:
        """Launches a kernel, as torch does: it takes this thread's last error for that of the launch."""
        error, self._thread.error = getattr(self._thread, "error", 0), 0
        if error:
            raise RuntimeError(f"CUDA error {error}")

    def copy(self, tensor: torch.Tensor) -> Any:
        """Queues a copy of a tensor, which holds nothing; returns what it will be copied to."""
        address, there = tensor.data_ptr(), torch.zeros_like(tensor)
        self._queued.append(lambda: ctypes.memmove(there.data_ptr(), address, there.nbytes))
        return there

    def finish(self) -> None:
        self._synchronize(1)


class RealCuda:
    """CUDA, for the same tests."""

    violations = ()

    @contextlib.contextmanager
    def there(self) -> Iterator[RealCuda]:
        torch.ones(1, device="cuda")
        yield self

    def has(self, tensor: torch.Tensor) -> bool:
        return bool(tensor.is_pinned())

    def launch(self) -> None:
        torch.ones(3, device="cuda").add_(1)

    def copy(self, tensor: torch.Tensor) -> torch.Tensor:
        there = torch.zeros_like(tensor, device="cuda")
        torch.cuda._sleep(200_000_000)  # clock cycles: about a tenth of a second
        return there.copy_(tensor, non_blocking=True)

    def finish(self) -> None:
        torch.cuda.synchronize()


Cuda = FakeCuda | RealCuda
