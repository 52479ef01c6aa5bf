"""What the tests of the store share: transfers that are held back, and comparisons of whatever tensors."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch

from nvme_ops import IoFuture, aio_handle
from nvme_ops.storage import TensorStore


def same(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Bit by bit, NaN and all."""
    return (first.dtype, first.shape) == (second.dtype, second.shape) and torch.equal(
        *(
            each.detach()
            .resolve_conj()
            .resolve_neg()
            .clone(memory_format=torch.contiguous_format)
            .reshape(-1)
            .view(torch.uint8)
            for each in (first, second)
        )
    )


def got(store: TensorStore, key: str, out: torch.Tensor | None = None) -> torch.Tensor:
    future = store.get(key, out)
    assert future.result() == future.tensor.nbytes
    return future.tensor


class Slow(aio_handle):
    """Holds back reads or writes until told, by what it submits instead: a future that is not done before."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.what, self.go, self.under_way = what, threading.Event(), threading.Event()

    def _later(self, what: str, tensor: Any, arguments: Any, options: Any) -> Any:
        call = getattr(super(), f"submit_{what}")
        if what != self.what or self.go.is_set():
            return call(tensor, *arguments, **options)
        self.under_way.set()
        return IoFuture(Held(self.go, lambda: call(tensor, *arguments, **options)))  # type: ignore[arg-type]

    def submit_pread(self, tensor: Any, *arguments: Any, **options: Any) -> Any:
        return self._later("pread", tensor, arguments, options)

    def submit_pwrite(self, tensor: Any, *arguments: Any, **options: Any) -> Any:
        return self._later("pwrite", tensor, arguments, options)


class Held:
    """A native operation that begins when it may."""

    def __init__(self, go: threading.Event, begin: Callable[[], IoFuture]) -> None:
        self.future: IoFuture | None = None
        self.ended = threading.Event()
        self.callbacks: list[Callable[[], object]] = []

        def run() -> None:
            go.wait(60)
            self.future = begin()
            self.future.exception()
            self.ended.set()
            for callback in self.callbacks:
                callback()

        threading.Thread(target=run, daemon=True).start()

    def done(self) -> bool:
        return self.ended.is_set()

    def wait(self, seconds: float | None) -> bool:
        return self.ended.wait(seconds)

    def request_cancel(self) -> None:
        pass

    def exception(self) -> BaseException | None:
        assert self.future is not None
        return self.future.exception()

    def bytes(self) -> int:
        assert self.future is not None
        return self.future.result()

    def add_callback(self, callback: Callable[[], object]) -> None:
        if self.ended.is_set():
            callback()
        else:
            self.callbacks.append(callback)
