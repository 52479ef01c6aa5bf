"""Several transfers as one, with something to be done when all have ended; checksums of what is written, then read."""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol, cast

import torch

from nvme_ops.engine import Priority
from nvme_ops.errors import ChecksumError
from nvme_ops.future import IoFuture
from nvme_ops.memory.pieces import checksums_anywhere

if TYPE_CHECKING:
    from nvme_ops.ops.async_io import Operation
    from nvme_ops.storage.striped import Piece, StripedSlabs


Finish = Callable[..., object]


class JoinedOperation:
    """Stands where a future has its native operation.

    A failure that nobody asks for is reported through ``sys.unraisablehook``, as a native operation's is.

    Args:
        transfers: that it consists of, perhaps none.
        finish: is called once, by the thread that first learns that all have ended, with the first failure or None. The
            operation fails with what it raises. When Ctrl-C interrupts it, it is called again by the next who asks.
        arguments: for ``finish``, behind the failure.
    """

    def __init__(self, transfers: list[IoFuture], finish: Finish, *arguments: object) -> None:
        self._transfers = transfers
        self._finish: Finish | None = finish
        self._arguments = arguments
        self.trouble: BaseException | None = None  # what went wrong before all transfers were submitted
        self._lock = threading.RLock()
        self._process = os.getpid()
        self._ended = False
        self._ender: int | None = None  # the thread that is at the end of it
        self._failure: BaseException | None = None
        self._bytes = 0
        self.asked = False  # whether somebody knows how it has ended

    def done(self) -> bool:
        """Whether all have ended. A forked child learns no more than what its parent knew when it was forked."""
        if self._ended or self._process != os.getpid():
            return self._ended
        for transfer in self._transfers.copy():  # another thread may clear them at any moment: then all have ended
            if not transfer.done():
                return False
        self._end()
        return self._ended

    def wait(self, seconds: float | None) -> bool:
        """Waits for all; False when ``seconds`` passed first. Raises RuntimeError in a forked child."""
        if seconds is not None and math.isnan(seconds):
            raise ValueError("timeout must be a number of seconds, not nan")
        deadline = None if seconds is None else time.monotonic() + seconds
        while not self._ended:
            if self._process != os.getpid():
                raise RuntimeError("this transfer is the parent's: a forked child cannot wait for it")
            for transfer in self._transfers.copy():
                left = None if deadline is None else max(0.0, deadline - time.monotonic())
                try:
                    transfer.exception(left)
                except TimeoutError:
                    return False
            self._end()
            if self._ender == threading.get_ident():  # asked by what is called at the end: it cannot wait for itself
                return False
        return True

    def request_cancel(self) -> None:
        """Asks for nothing more of them to be begun."""
        self.asked = True  # whoever asks for it knows of it
        for transfer in self._transfers.copy():
            transfer.request_cancel()

    def exception(self) -> BaseException | None:
        """Once done: the first failure, with all in its attribute ``failures`` where there are several."""
        self.asked = True
        return self._failure

    def bytes(self) -> int:
        """Once done: bytes moved in all."""
        return self._bytes

    def add_callback(self, callable: Callable[[], object]) -> None:
        """Calls it once when all have ended, on the thread kept for callbacks; at once where they have already."""
        transfers = self._transfers.copy()
        left = len(transfers) or 1
        lock = threading.Lock()

        def one_ended(_: Any = None) -> None:
            nonlocal left
            with lock:
                left -= 1
                last = left == 0
            if last:
                self._end()
                callable()

        for transfer in transfers:
            transfer.add_done_callback(one_ended)
        if not transfers:
            one_ended()

    def _end(self) -> None:
        with self._lock:
            if self._ended or self._ender is not None or self._finish is None:
                return
            try:
                self._ender = threading.get_ident()
                failure, moved = self._outcome()
                try:
                    self._finish(failure, *self._arguments)
                except Exception as error:
                    failure = failure or error
                self._failure, self._bytes = failure, moved
                self._ended = True
                self._finish, self._arguments = None, ()  # and the memory that they hold
                self._transfers.clear()  # the same
            finally:
                self._ender = None

    def _outcome(self) -> tuple[BaseException | None, int]:
        """The first failure, or None, and the bytes moved."""
        failures: list[BaseException] = []
        moved = 0
        for transfer in self._transfers:
            if (failure := transfer.exception()) is not None:
                failures.append(failure)
            else:
                moved += transfer.result()
        if len(failures) > 1:
            failures[0].failures = failures  # type: ignore[attr-defined]  # as of aio_handle.wait
        return failures[0] if failures else self.trouble, moved

    def __del__(self) -> None:
        """Tells of a failure that nobody has asked for."""
        failure = getattr(self, "_failure", None)  # it may never have been made
        if failure is not None and not self.asked and self._process == os.getpid():
            raise failure  # which Python hands to the hook


def as_operation(joined: JoinedOperation) -> Operation:
    """For ``IoFuture``, which looks at no more than what is above."""
    return cast("Operation", joined)


def joined(transfers: list[IoFuture]) -> IoFuture:
    """Returns one future for several transfers, which has ended when all have, with the first failure."""
    if len(transfers) == 1:
        return transfers[0]
    return IoFuture(as_operation(JoinedOperation(list(transfers), lambda _: None)))


class StoredBytes(Protocol):
    """Where bytes are on storage, and their CRC-32C if that is kept."""

    pieces: list[Piece]
    checksum: int | None


def write(
    slabs: StripedSlabs,
    stored: StoredBytes,
    memory: torch.Tensor,
    transfers: list[IoFuture],
    priority: Priority,
    *,
    checksum: bool,
) -> None:
    """Starts to write a contiguous tensor, and computes its ``checksum`` while that is on its way."""
    slabs.move(stored.pieces, memory, transfers, write=True, priority=priority)
    if checksum:
        stored.checksum = checksums_anywhere([memory])[0]


def compare(
    failure: BaseException | None, slabs: StripedSlabs, stored: StoredBytes, memory: torch.Tensor, names: list[str]
) -> None:
    """Ends a read: raises ChecksumError, with these names, for other bytes than those that were written."""
    if failure is None and stored.checksum is not None and checksums_anywhere([memory])[0] != stored.checksum:
        raise ChecksumError(slabs.paths[stored.pieces[0].folder] if stored.pieces else "", names)
