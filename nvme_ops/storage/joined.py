"""Joins several transfers into one operation, with an action at its end."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, cast

from nvme_ops.base.lifetime import Owned
from nvme_ops.io.future import IoFuture

if TYPE_CHECKING:
    from nvme_ops.ops.async_io import Operation


Finish = Callable[..., object]


class JoinedOperation(Owned):
    """Takes the place of a future's native operation.

    A failure that is never retrieved is reported through ``sys.unraisablehook``, like that of a native operation.

    Args:
        transfers: the transfers that it consists of, perhaps none.
        finish: called once, by the first thread that learns that all have ended, with the first failure or None. What
            it raises is the operation's failure. If Ctrl-C interrupts it, the next thread to learn calls it again.
        arguments: passed to ``finish`` after the failure.
    """

    _forked_error = "this transfer belongs to the parent process: a forked child cannot wait for it"

    def __init__(self, transfers: list[IoFuture], finish: Finish, *arguments: object) -> None:
        self._transfers = transfers
        self._finish: Finish | None = finish
        self._arguments = arguments
        self.trouble: BaseException | None = None  # what went wrong before all transfers were submitted
        self._lock = threading.RLock()
        super().__init__()
        self._ended = False
        self._ender: int | None = None  # the thread that is in ``_end``
        self._failure: BaseException | None = None
        self._bytes = 0
        self.retrieved = False  # whether a caller knows, or does not care, how it ended

    def done(self) -> bool:
        """Returns whether all have ended; in a forked child, whether its parent knew so when it forked."""
        if self._ended or not self._is_ours():
            return self._ended
        for transfer in self._transfers.copy():  # another thread clears them when all have ended
            if not transfer.done():
                return False
        self._end()
        return self._ended

    def has_ended(self) -> bool:
        """Returns whether all have ended, but unlike ``done`` takes no lock and leaves ``finish`` to others."""
        return self._ended or all(transfer._has_ended() for transfer in self._transfers.copy())

    def wait(self, seconds: float | None) -> bool:
        """Waits for all; returns False if ``seconds`` passed first. Raises RuntimeError in a forked child."""
        if seconds is not None and math.isnan(seconds):
            raise ValueError("timeout must be a number of seconds, not nan")
        deadline = None if seconds is None else time.monotonic() + seconds
        while not self._ended:
            self._require_ours()
            for transfer in self._transfers.copy():
                left = None if deadline is None else max(0.0, deadline - time.monotonic())
                try:
                    transfer.exception(left)
                except TimeoutError:
                    return False
            self._end()
            if self._ender == threading.get_ident():  # called from ``finish``, which cannot wait for itself
                return False
        return True

    def request_cancel(self) -> None:
        """Requests that nothing more of the transfers be begun."""
        self.retrieved = True  # the caller expects it to fail
        for transfer in self._transfers.copy():
            transfer.request_cancel()

    def exception(self) -> BaseException | None:
        """Returns, once done, the first failure or None; of several, its attribute ``failures`` has all."""
        self.retrieved = True
        return self._failure

    def bytes(self) -> int:
        """Returns, once done, the total of bytes moved."""
        return self._bytes

    def add_callback(self, callable: Callable[[], object]) -> None:
        """Calls ``callable`` once when all have ended, on the thread for callbacks; at once if they already have."""
        transfers = self._transfers.copy()
        left = len(transfers) or 1
        lock = threading.Lock()

        def one_ended(_: object = None) -> None:
            nonlocal left
            with lock:
                left -= 1
                last = left == 0
            if last:
                self._end()
                callable()

        for transfer in transfers:  # not one after the other: each that has ended would call the next one's
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
                    # its frames, which would keep the memory that all callers have at hand, go
                    failure = failure or error.with_traceback(None)
                self._failure, self._bytes = failure, moved
                self._ended = True
                self._finish, self._arguments = None, ()  # these hold memory
                self._transfers.clear()
            finally:
                self._ender = None

    def _outcome(self) -> tuple[BaseException | None, int]:
        """Returns the first failure, or None, and the bytes moved."""
        failures: list[BaseException] = []
        moved = 0
        for transfer in self._transfers:
            if (failure := transfer.exception()) is not None:
                failures.append(failure)
            else:
                moved += transfer.result()
        if len(failures) > 1:
            failures[0].failures = failures  # type: ignore[attr-defined]  # as aio_handle.wait does
        return failures[0] if failures else self.trouble, moved

    def __del__(self) -> None:
        """Reports a failure that was never retrieved."""
        failure = getattr(self, "_failure", None)  # __init__ may not have come to its end
        if failure is not None and not self.retrieved and self._is_ours():
            raise failure  # Python passes it to the hook


def as_operation(joined: JoinedOperation) -> Operation:
    """Casts for ``IoFuture``, which uses no more than the methods above."""
    return cast("Operation", joined)


def joined(transfers: list[IoFuture]) -> IoFuture:
    """Returns one future that is done when all of several transfers are, with the first failure."""
    return IoFuture(as_operation(JoinedOperation(list(transfers), lambda _: None)))
