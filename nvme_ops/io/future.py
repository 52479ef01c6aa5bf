"""``IoFuture``: the result of one submitted transfer, to wait for in a thread, in a callback or in asyncio.

``InFlight`` bounds how many are in flight.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import deque
from collections.abc import Callable, Generator
from typing import TYPE_CHECKING, Any, Protocol

from nvme_ops.base.text import never_raising, size_words
from nvme_ops.io.arguments import require_callables

if TYPE_CHECKING:
    from concurrent.futures import Future

    from nvme_ops.ops.async_io import Operation

    _Future = Future[int]  # to type checkers: so that concurrent.futures takes it
else:
    _Future = object

_making_waiter_state = threading.Lock()


class _WaiterState:
    """The state that ``concurrent.futures.wait`` and ``as_completed`` keep in a future."""

    def __init__(self) -> None:
        self.condition = threading.Condition()
        self.state = "RUNNING"
        self.waiters: list[Any] = []

    def end(self, future: IoFuture) -> None:
        """Marks the future as finished and notifies its waiters."""
        with self.condition:
            if self.state == "FINISHED":
                return
            self.state = "FINISHED"
            failed = future.exception() is not None
            for waiter in self.waiters:
                (waiter.add_exception if failed else waiter.add_result)(future)


class IoFuture(_Future):
    """The result of ``submit_pread``, ``submit_pwrite`` and their relatives.

    It can be awaited in asyncio, and ``concurrent.futures.wait`` and ``as_completed`` accept it. A transfer cannot be
    cancelled at once, since the device may use the memory: ``cancel()`` returns False, and cancelling a task that
    awaits one does not stop the transfer. ``request_cancel`` makes it end early.

    The tensors of the transfer are kept alive until it ends, whether or not the future is. Do not use them until
    then. A failure that is never retrieved is reported through ``sys.unraisablehook``.
    """

    __slots__ = ("__weakref__", "_exception", "_operation", "_waiter_state")

    def __init__(self, operation: Operation) -> None:
        self._operation = operation
        self._exception: BaseException | None = None
        self._waiter_state: _WaiterState | None = None

    def done(self) -> bool:
        """Returns whether the transfer has ended, successfully or not."""
        return self._operation.done()

    def running(self) -> bool:
        """Returns whether the transfer has not ended yet."""
        return not self.done()

    def cancel(self) -> bool:
        """Returns False: a transfer cannot be cancelled."""
        return False

    def request_cancel(self) -> None:
        """Asks that no further part of the transfer be started.

        It still ends in the usual way, as soon as nothing of it is in flight: with OSError (ECANCELED) if part of it
        was never started. Wait for its end before using the memory.
        """
        self._operation.request_cancel()

    def cancelled(self) -> bool:
        """Returns False."""
        return False

    def result(self, timeout: float | None = None) -> int:
        """Waits for the transfer and returns the bytes moved.

        Args:
            timeout: the most seconds to wait; without limit when None.

        Raises:
            TimeoutError: the transfer has not ended after ``timeout`` seconds; it goes on.
            OSError: the kernel reported an error; ``errno`` and ``filename`` say which and where.
            EOFError: the file ended before the tensor was full.
        """
        exception = self.exception(timeout)
        if exception is not None:
            raise exception
        return self._operation.bytes()

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Waits for the transfer and returns its exception, or None. Raises TimeoutError as ``result`` does."""
        if not self._operation.wait(timeout):
            raise TimeoutError(f"the transfer has not ended after {timeout} s")
        if self._exception is None:
            self._exception = self._operation.exception()
        return self._exception

    def add_done_callback(self, function: Callable[[IoFuture], object]) -> None:
        """Calls ``function(self)`` when the transfer has ended, on a thread reserved for callbacks."""
        require_callables(function=function)
        self._operation.add_callback(lambda: function(self))

    def __await__(self) -> Generator[object, None, int]:
        """Waits in asyncio: ``await handle.submit_pread(tensor, path)`` returns the bytes moved."""
        loop = asyncio.get_running_loop()
        arrived: asyncio.Future[None] = loop.create_future()

        def settle() -> None:
            if not arrived.done():
                arrived.set_result(None)

        def wake(_: IoFuture) -> None:
            with contextlib.suppress(RuntimeError):  # the loop was closed: nobody is waiting any more
                loop.call_soon_threadsafe(settle)

        if not self.done():
            self.add_done_callback(wake)
            yield from arrived
        return self.result()

    if not TYPE_CHECKING:  # the attributes that concurrent.futures uses
        _condition = property(lambda self: self._for_waiters().condition)
        _state = property(lambda self: self._for_waiters().state)
        _waiters = property(lambda self: self._for_waiters().waiters)

    def _for_waiters(self) -> _WaiterState:
        with _making_waiter_state:
            if self._waiter_state is not None:
                return self._waiter_state
            self._waiter_state = state = _WaiterState()
        self.add_done_callback(state.end)
        if self.done():
            state.end(self)
        return state

    def _has_ended(self) -> bool:
        """Returns whether the transfer has ended; of several that are joined, without doing what is done at the end."""
        ended: bool = getattr(self._operation, "has_ended", self._operation.done)()
        return ended

    @never_raising
    def __repr__(self) -> str:
        """Returns for example ``<IoFuture: done, 4 KiB moved>``."""
        state = "done" if self._has_ended() else "pending"
        if self._exception is not None:
            state = f"failed, {type(self._exception).__name__}"
        elif state == "done" and (moved := self._operation.bytes()):
            state = f"done, {size_words(moved)} moved"
        return f"<{type(self).__name__}: {state}>"


class _Transfer(Protocol):
    def exception(self, timeout: float | None = ...) -> BaseException | None: ...

    def request_cancel(self) -> None: ...


class InFlight:
    """Transfers in flight, waited for in the order in which they were added, at most ``limit`` after each ``add``.

    As a context manager it waits for all of them, also when the block raises: no transfer may still use memory that the
    block releases.

    Args:
        limit: the most transfers in flight.
        abandon: when a signal handler's exception ends the block, as Ctrl-C does, cancel the transfers and do not wait
            for them: the device may not respond for a long time. Each keeps its memory until it ends, so this is for
            memory that nobody else fills or reuses, and for files that nobody will read.
    """

    def __init__(self, limit: int = 1, *, abandon: bool = False) -> None:
        self._limit, self._abandon = limit, abandon
        self._transfers: deque[tuple[_Transfer, Callable[[], object]]] = deque()

    def add(self, transfer: _Transfer, then: Callable[[], object] = lambda: None) -> None:
        """Adds a transfer and waits for the oldest beyond ``limit``. ``then`` is called once it has succeeded."""
        self._transfers.append((transfer, then))
        while len(self._transfers) > self._limit:
            self.end_oldest()

    def end_oldest(self) -> bool:
        """Waits for the oldest transfer and raises its failure. Returns False when there is none."""
        if not self._transfers:
            return False
        transfer, then = self._transfers[0]
        failure = transfer.exception()  # if interrupted, it is still in the queue
        self._transfers.popleft()
        if failure is not None:
            raise failure
        then()
        return True

    def drain(self) -> None:
        """Waits for all transfers, then raises the first failure."""
        try:
            while self.end_oldest():
                pass
        except BaseException as error:
            self.end(type(error))
            raise

    def end(self, kind: type[BaseException] | None) -> None:
        """Ends a block that raised ``kind``: waits for all transfers and ignores failures, or abandons them."""
        if not self._abandon or kind is None or issubclass(kind, Exception):
            self.settle()
            return
        for transfer, _ in self._transfers:
            transfer.request_cancel()
        self._transfers.clear()

    def settle(self) -> None:
        """Waits for all transfers and ignores failures."""
        while self._transfers:
            self._transfers[0][0].exception()
            self._transfers.popleft()

    def hand_over(self) -> None:
        """Forgets the transfers in flight: somebody else waits for them now."""
        self._transfers.clear()

    def __enter__(self) -> InFlight:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.drain()
        else:
            self.end(kind)
