"""The faulty handle: transfers that fail, wait, take their time or bring wrong bytes, when they are told to."""

from __future__ import annotations

import contextlib
import errno
import os
import threading
import time
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import pytest
import torch

from nvme_ops import aio_handle
from nvme_ops.io.engine import Op


def eio(path: str = "the device") -> OSError:
    """Returns what the kernel says of a device that fails."""
    return OSError(errno.EIO, os.strerror(errno.EIO), path)


def flip(path: Path | int, place: int, bit: int = 0) -> None:
    fd = os.open(path, os.O_RDWR) if isinstance(path, Path) else path
    try:
        byte = os.pread(fd, 1, place)[0]
        os.pwrite(fd, bytes([byte ^ 1 << bit]), place)
    finally:
        if fd is not path:
            os.close(fd)


class Faulty(aio_handle):
    """Does to some reads or writes what it is told:

    - ``refuse``: raises ``error`` when they are submitted;
    - ``fail``: lets half of a write happen, and ends with ``error``;
    - ``hold``: begins none until ``go`` is set; ``under_way`` says that one waits;
    - ``slow``: takes ``seconds`` before it begins;
    - ``flip``: changes a bit of what was read, where that is a page or more.

    Args:
        what: ``read`` or ``write``; none at first when empty.
        do: one of the above.
        numbers: which ones, counted from 1 since the last ``will``; all when None.
        error: makes what is raised of its number.
        seconds: for ``slow``.
    """

    def __init__(
        self,
        what: str = "",
        do: str = "",
        numbers: Collection[int] | None = None,
        *,
        error: Callable[[int], BaseException] = lambda number: eio(f"device {number}"),
        seconds: float = 0.02,
    ) -> None:
        self.error, self.seconds = error, seconds
        self.go, self.under_way = threading.Event(), threading.Event()
        self._counting = threading.Lock()
        self.will(what, do, numbers)
        super().__init__()

    def _make_engine(self) -> Any:
        return _Engine(super()._make_engine(), self)

    def will(self, what: str = "", do: str = "", numbers: Collection[int] | None = None) -> None:
        """Says anew what happens, to no transfer if nothing is given. ``met`` counts those to which it has."""
        self.what, self.do, self.numbers, self.count, self.met = what, do, numbers, 0, 0

    def __copy__(self) -> Faulty:
        return self

    def meets(self, op: int) -> int:
        """Returns the number of this transfer if something happens to it, or 0."""
        with self._counting:
            if self.what != Op(op).name.lower():
                return 0
            self.count += 1
            concerned = self.numbers is None or self.count in self.numbers
            self.met += concerned
            return self.count if concerned else 0


class WrappedEngine:
    """The engine of a handle, for a class that changes some of its methods."""

    def __init__(self, engine: Any, handle: Any) -> None:
        self._engine, self._handle = engine, handle

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)


class _Engine(WrappedEngine):
    def run(self, op: int, memory: Any, *others: Any) -> Any:
        number = self._before(op)
        if number and self._handle.do == "hold":
            self._handle.under_way.set()
            self._handle.go.wait(60)
        if number and self._handle.do == "fail":
            raise self._handle.error(number)
        moved = self._engine.run(op, memory, *others)
        if number and self._handle.do == "flip":
            _flip_in([memory])
        return moved

    def submit(self, op: int, memory: Any, *others: Any) -> Any:
        begun = others[5] if len(others) > 5 else None
        if self._handle.do in ("fail", "hold") and not isinstance(begun, set | None):
            return self._engine.submit(op, memory, *others)  # the native module waits for it by itself
        return self._begin(op, [memory], lambda parts: self._engine.submit(op, parts[0], *others), begun)

    def submit_many(self, op: int, memories: Any, *others: Any) -> Any:
        begun = others[3] if len(others) > 3 else None
        return self._begin(op, memories, lambda parts: self._engine.submit_many(op, parts, *others), begun)

    def _before(self, op: int) -> int:
        number = self._handle.meets(op)
        if number and self._handle.do == "refuse":
            raise self._handle.error(number)
        if number and self._handle.do == "slow":
            time.sleep(self._handle.seconds)
        return number

    def _begin(self, op: int, memories: Any, begin: Callable[[Any], Any], begun: Any = None) -> Any:
        number, do = self._before(op), self._handle.do
        if number and do == "hold" and not self._handle.go.is_set():
            held = Held(self._handle.go, lambda: begin(memories))
            if isinstance(begun, set):
                begun.add(held)
            self._handle.under_way.set()
            return held
        if number and do == "fail":
            half = [_half(memory) for memory in memories] if op == Op.WRITE else memories
            return _Failed(begin(half), self._handle.error(number))
        operation = begin(memories)
        if number and do == "flip":
            operation.wait(None)
            if operation.exception() is None:
                _flip_in(memories)
        return operation


def _half(memory: Any) -> Any:
    return memory.reshape(-1)[: memory.numel() // 2] if isinstance(memory, torch.Tensor) else memory


def _flip_in(memories: Any) -> None:
    memory = max(memories, key=lambda tensor: tensor.numel())
    if memory.nbytes >= 4096:
        with torch.no_grad():
            memory.detach().view(-1).view(torch.uint8)[memory.nbytes // 2] ^= 1


class _Failed:
    """A native operation that has moved something, and then failed."""

    def __init__(self, operation: Any, error: BaseException) -> None:
        self._operation, self._error = operation, error

    def __getattr__(self, name: str) -> Any:
        return getattr(self._operation, name)

    def exception(self) -> BaseException:
        return self._error


class Held:
    """A native operation that begins when it may."""

    def __init__(self, go: threading.Event, begin: Callable[[], Any]) -> None:
        self._operation: Any = None
        self._error: BaseException | None = None
        self._ended, self._lock = threading.Event(), threading.Lock()
        self._callbacks: list[Callable[[], object]] = []

        def run() -> None:
            go.wait(60)
            try:
                self._operation = begin()
                self._operation.wait(None)
            except (OSError, ValueError) as error:  # nobody waits for it any more, and the file is closed
                self._error = error
            with self._lock:
                self._ended.set()
            for callback in self._callbacks:
                callback()

        threading.Thread(target=run, daemon=True).start()

    def done(self) -> bool:
        return self._ended.is_set()

    def wait(self, seconds: float | None) -> bool:
        return self._ended.wait(seconds)

    def request_cancel(self) -> None:
        pass

    def add_callback(self, callback: Callable[[], object]) -> None:
        with self._lock:
            if not self._ended.is_set():
                self._callbacks.append(callback)
                return
        callback()

    def exception(self) -> BaseException | None:
        return self._error or self._operation.exception()

    def bytes(self) -> int:
        return int(self._operation.bytes())


def interrupt_two_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Has Ctrl-C come in the next two waits for a transfer of a ``Faulty``."""
    waits, real = iter(range(2)), Held.wait

    def wait(held: Held, seconds: float | None) -> bool:
        if next(waits, None) is not None:
            raise KeyboardInterrupt
        return real(held, seconds)

    monkeypatch.setattr(Held, "wait", wait)


@contextlib.contextmanager
def failing_calls(calls: Collection[str], code: int) -> Any:
    """Has these functions of ``os`` fail; yields a list of the names of those that did."""
    met: list[str] = []
    before = {name: getattr(os, name) for name in calls}

    def fail(name: str) -> Callable[..., None]:
        def failing(*_: Any, **__: Any) -> None:
            met.append(name)
            raise OSError(code, os.strerror(code))

        failing.__name__ = name
        return failing

    try:
        for name in calls:
            setattr(os, name, fail(name))
        yield met
    finally:
        for name, function in before.items():
            setattr(os, name, function)
