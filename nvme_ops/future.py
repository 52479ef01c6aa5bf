"""``IoFuture``: the result of one submitted transfer, to wait for in a thread, in a callback or in asyncio."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Generator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from nvme_ops.ops.async_io import Operation


class IoFuture:
    """The result of ``submit_pread``, ``submit_pwrite`` and their relatives.

    The tensors of the transfer stay alive until it ends, whether or not the future does. Leave them alone
    until then. A failure that nobody asks for is reported through ``sys.unraisablehook``.
    """

    __slots__ = ("__weakref__", "_exception", "_operation")

    def __init__(self, operation: Operation) -> None:
        self._operation = operation
        self._exception: BaseException | None = None

    def done(self) -> bool:
        """Whether the transfer has ended, well or not."""
        return self._operation.done()

    def result(self, timeout: float | None = None) -> int:
        """Waits for the transfer and returns the bytes moved.

        Args:
            timeout: seconds to wait at most; for ever when None.

        Raises:
            TimeoutError: the transfer goes on after ``timeout`` seconds.
            OSError: the kernel reported an error; ``errno`` and ``filename`` say which and where.
            EOFError: the file ended before the tensor was full.
        """
        exception = self.exception(timeout)
        if exception is not None:
            raise exception
        return self._operation.bytes()

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Waits for the transfer and returns what went wrong, or None. Raises TimeoutError as ``result`` does."""
        if not self._operation.wait(timeout):
            raise TimeoutError(f"the transfer has not ended after {timeout} s")
        if self._exception is None:
            self._exception = self._operation.exception()
        return self._exception

    def add_done_callback(self, function: Callable[[IoFuture], object]) -> None:
        """Calls ``function(self)`` when the transfer has ended, on a thread kept for callbacks."""
        self._operation.add_callback(lambda: function(self))

    def __await__(self) -> Generator[object, None, int]:
        """In asyncio: ``await handle.submit_pread(tensor, path)`` gives the bytes moved."""
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

    def __repr__(self) -> str:
        """For example ``<IoFuture: pending>``."""
        return f"<IoFuture: {'done' if self.done() else 'pending'}>"
