"""Several transfers as one, with something to be done when they have ended."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, cast

from nvme_ops.future import IoFuture

if TYPE_CHECKING:
    from nvme_ops.ops.async_io import Operation


class JoinedOperation:
    """Stands where a future has its native operation.

    Args:
        transfers: that it consists of, perhaps none.
        finish: is called once, by who first learns that all have ended: with the first failure, or None. What it raises
            is what the whole has failed with.
    """

    def __init__(self, transfers: Sequence[IoFuture], finish: Callable[[BaseException | None], object]) -> None:
        self._transfers, self._finish = list(transfers), finish
        self._lock = threading.RLock()
        self._ended = False
        self._failure: BaseException | None = None
        self._bytes = 0

    def submitted(self) -> bool:
        """True."""
        return True

    def done(self) -> bool:
        """Whether all have ended."""
        if not self._ended and all(transfer.done() for transfer in self._transfers):
            self._end()
        return self._ended

    def wait(self, seconds: float | None) -> bool:
        """Waits for all; False when ``seconds`` passed first."""
        deadline = None if seconds is None else time.monotonic() + seconds
        for transfer in list(self._transfers):
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            try:
                transfer.exception(left)
            except TimeoutError:
                return False
        self._end()
        return True

    def exception(self) -> BaseException | None:
        """Once done: the first failure, with all in its attribute ``failures`` where there are several."""
        return self._failure

    def bytes(self) -> int:
        """Once done: bytes moved in all."""
        return self._bytes

    def add_callback(self, callable: Callable[[], object]) -> None:
        """Calls it when all have ended, on the thread kept for callbacks."""
        left = [len(self._transfers) or 1]
        lock = threading.Lock()

        def one_ended(_: Any = None) -> None:
            with lock:
                left[0] -= 1
                last = left[0] == 0
            if last:
                self._end()
                callable()

        for transfer in self._transfers:
            transfer.add_done_callback(one_ended)
        if not self._transfers:
            one_ended()

    def _end(self) -> None:
        with self._lock:
            if self._ended:
                return
            found = [transfer.exception() for transfer in self._transfers]
            failures = [failure for failure in found if failure is not None]
            if len(failures) > 1:
                failures[0].failures = failures  # type: ignore[attr-defined]  # as of aio_handle.wait
            self._failure = failures[0] if failures else None
            if self._failure is None:
                self._bytes = sum(transfer.result() for transfer in self._transfers)
            try:
                self._finish(self._failure)
            except Exception as error:
                self._failure = self._failure or error
            self._transfers.clear()  # and the memory that they hold
            self._ended = True


def as_operation(joined: JoinedOperation) -> Operation:
    """For ``IoFuture``, which looks at no more than what is above."""
    return cast("Operation", joined)
