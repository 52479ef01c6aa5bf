"""``Stream``: the position in a file, and the buffers between the program and the file."""

from __future__ import annotations

import atexit
import contextlib
import functools
import io
import os
import threading
import traceback
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar, cast

from nvme_ops.base import lifetime
from nvme_ops.io.blocks import ReadAhead, WriteBehind
from nvme_ops.io.handle import aio_handle

if TYPE_CHECKING:
    from nvme_ops.ops.async_io import OpenFile

Method = TypeVar("Method", bound=Callable[..., Any])


def _in_turn(method: Method) -> Method:
    """Lets one thread at a time call the method. The lock works in C, so no signal comes between it and its block."""

    @functools.wraps(method)
    def call(stream: Stream, *arguments: Any) -> Any:
        if stream._turn._is_owned():  # type: ignore[attr-defined]  # the thread would wait for itself
            raise RuntimeError("a file was used by a signal handler or finalizer while a call on it was in progress")
        with stream._turn:
            stream._follow()
            return method(stream, *arguments)

    return cast(Method, call)


class Stream(lifetime.Tracked):
    """Reads and writes at a position. Threads take turns; a forked child has none of its parent's buffered data.

    Args:
        handle: moves the blocks.
        fd: a descriptor of the file, which must stay open as long as the stream.
        file: the same file, open for the handle.
        mode: the mode of the file. Methods that it does not allow must not be called.
    """

    def __init__(self, handle: aio_handle, fd: int, file: OpenFile, mode: str) -> None:
        self._handle, self._fd, self._file, self._mode = handle, fd, file, mode
        self._position = self._size() if mode == "a" else 0
        self._left_at: int | None = None  # where ``give_way`` left the descriptor's own position, if it was called
        self._after_fork()
        lifetime.track(self)

    def _after_fork(self) -> None:
        """Starts without buffers and with a new lock, as a forked child must."""
        self._turn = threading.RLock()
        self._behind: WriteBehind | None = None
        self._ahead: ReadAhead | None = None

    @_in_turn
    def write(self, data: memoryview) -> None:
        """Writes at the position, or at the end of the file in mode ``"a"``, and moves the position."""
        if self._ahead is not None:
            self._ahead.drop()
        if self._behind is None:
            _flush_at_exit(self)
            self._behind = WriteBehind(self._handle, self._fd, self._file, self._mode == "a")
        if self._mode == "a":
            self._position = self._size() if self._behind.empty else self._behind.stop
        self._behind.write(data, self._position)
        self._position += len(data)

    @_in_turn
    def read_into(self, data: memoryview) -> int:
        """Fills ``data`` from the position on, as far as the file goes; returns the number of bytes."""
        return self._read_into(data)

    def _read_into(self, data: memoryview) -> int:
        count = self._reader().read_into(data, self._position)
        self._position += count
        return count

    @_in_turn
    def read(self, count: int) -> bytes:
        """Returns ``count`` bytes from the position on, or fewer at the end of the file."""
        data = self._reader().read(count, self._position)
        if data is not None:
            self._position += len(data)
            return data
        count = max(0, min(count, self._size() - self._position))
        content = bytearray(count)
        with memoryview(content) as view:
            done = self._read_into(view)
        return bytes(content) if done == count else bytes(content[:done])

    @_in_turn
    def peek(self, count: int) -> bytes:
        """Returns some of the bytes that will be read next, without moving the position."""
        return self._reader().peek(count, self._position)

    @_in_turn
    def seek(self, offset: int, whence: int) -> int:
        """Moves the position and returns it. Flushes first, unless the position stays the same."""
        if whence == io.SEEK_END:
            self._flush()
        bases = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._size()}
        if whence not in bases:
            raise ValueError(f"whence must be 0, 1 or 2, not {whence}")
        target = bases[whence] + offset
        if target < 0:
            raise ValueError(f"the position must not be negative: {target}")
        if target != self._position:
            self._flush()
            self._position = target
        return target

    @_in_turn
    def tell(self) -> int:
        """Returns the position."""
        return self._position

    @_in_turn
    def flush(self) -> None:
        """Waits until everything written is in the file. Raises the error of a write that failed."""
        self._flush()

    @_in_turn
    def give_way(self) -> None:
        """Flushes, drops what was read ahead, and moves the descriptor's position here, for users of the descriptor."""
        self._flush()
        if self._ahead is not None:
            self._ahead.drop()
        with contextlib.suppress(OSError):  # a device that has no position
            self._left_at = os.lseek(self._fd, self._position, os.SEEK_SET)

    @_in_turn
    def close(self) -> None:
        """Writes what is buffered and frees all memory. Raises the error of a write that failed, unless raised before.

        If interrupted, it leaves ``open`` true, and the next call continues.
        """
        try:
            if self._behind is not None:
                self._behind.close()
        finally:
            if self._behind is None or self._behind.empty:
                if self._ahead is not None:
                    self._ahead.close()
                self._behind = self._ahead = None
                _written.discard(self)

    @property
    def open(self) -> bool:
        """Whether anything is still in memory or in flight."""
        return self._behind is not None or self._ahead is not None

    def _follow(self) -> None:
        """Continues where a user of the descriptor has moved its position since ``give_way``."""
        if self._left_at is None or not (self._behind is None or self._behind.empty):
            return
        here = os.lseek(self._fd, 0, os.SEEK_CUR)
        if here != self._left_at:
            self._position = self._left_at = here
            if self._ahead is not None:
                self._ahead.drop()

    def _reader(self) -> ReadAhead:
        self._flush()
        if self._ahead is None:
            self._ahead = ReadAhead(self._handle, self._fd, self._file)
        return self._ahead

    def _flush(self) -> None:
        if self._behind is not None:
            empty = self._behind.empty
            self._behind.flush()
            if self._mode == "a" and not empty:
                self._position = self._behind.stop

    def _size(self) -> int:
        return os.fstat(self._fd).st_size


_written: weakref.WeakSet[Stream] = weakref.WeakSet()


def _flush_at_exit(stream: Stream) -> None:
    if not _written:  # registered last, so that it runs before the threads that move the data are ended
        atexit.unregister(_flush_all)
        atexit.register(_flush_all)
    _written.add(stream)


def _flush_all() -> None:
    """Flushes, at exit, files that are still open."""
    for stream in list(_written):
        try:
            stream.flush()
        except Exception:
            lifetime.tell(f"a file that was still open at exit could not be written:\n{traceback.format_exc()}")


lifetime.at_exit(_flush_all)  # in a process of multiprocessing
