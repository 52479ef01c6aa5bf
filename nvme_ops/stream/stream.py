"""``Stream``: the position in a file, and what is between the program and the file."""

from __future__ import annotations

import atexit
import contextlib
import io
import os
import sys
import threading
import traceback
import weakref

from nvme_ops.handle import aio_handle
from nvme_ops.stream.read_ahead import ReadAhead
from nvme_ops.stream.write_behind import WriteBehind


class Stream:
    """Reads and writes at a position. Threads take turns; a forked child has none of what its parent has written.

    Args:
        handle: moves the blocks.
        fd: of the file, which stays open as long as the stream.
        mode: ``r``, ``w``, ``r+`` or ``a``. What it does not allow must not be called.
    """

    def __init__(self, handle: aio_handle, fd: int, mode: str) -> None:
        self._handle, self._fd, self._mode = handle, fd, mode
        self._position = self._size() if mode == "a" else 0
        self._start_anew()

    def _start_anew(self) -> None:
        self._process = os.getpid()
        self._turn = _Turn()
        self._behind: WriteBehind | None = None
        self._ahead: ReadAhead | None = None

    def write(self, data: memoryview) -> None:
        """At the position, or at the end of a file to append to; moves it."""
        with self._alone():
            if self._ahead is not None:
                self._ahead.drop()
            if self._behind is None:
                self._behind = WriteBehind(self._handle, self._fd, self._mode == "a")
                _at_exit(self)
            if self._mode == "a":
                self._position = self._size() if self._behind.empty else self._behind.stop
            self._behind.write(data, self._position)
            self._position += len(data)

    def read_into(self, data: memoryview) -> int:
        """Fills ``data`` from the position on, unless the file ends before; returns how much."""
        with self._alone():
            return self._read_into(data)

    def _read_into(self, data: memoryview) -> int:
        count = self._reader().read_into(data, self._position)
        self._position += count
        return count

    def read(self, count: int) -> bytes:
        """``count`` bytes, or what there is, from the position on."""
        with self._alone():
            found = self._reader().read(count, self._position)
            if found is not None:
                self._position += len(found)
                return found
            count = max(0, min(count, self._size() - self._position))
            content = bytearray(count)
            with memoryview(content) as view:
                done = self._read_into(view)
            return bytes(content) if done == count else bytes(content[:done])

    def peek(self, count: int) -> bytes:
        """Some of the bytes that will be read next."""
        with self._alone():
            return self._reader().peek(count, self._position)

    def seek(self, offset: int, whence: int) -> int:
        """Moves the position; what was written is in the file then, unless the position stays."""
        with self._alone():
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

    def tell(self) -> int:
        """The position."""
        with self._alone():
            return self._position

    def flush(self) -> None:
        """Returns when what was written is in the file. Raises what went wrong."""
        with self._alone():
            self._flush()

    def give_way(self) -> None:
        """``flush``; what was read ahead is read again."""
        with self._alone():
            self._flush()
            if self._ahead is not None:
                self._ahead.drop()
            with contextlib.suppress(OSError):  # a device that has no position
                os.lseek(self._fd, self._position, os.SEEK_SET)  # for who goes on by the descriptor, as torch may

    def close(self) -> None:
        """Writes what there is and gives all memory back. Raises what went wrong, if nobody was told."""
        with self._alone():
            behind, self._behind = self._behind, None
            ahead, self._ahead = self._ahead, None
            _written.discard(self)
            try:
                if behind is not None:
                    behind.close()
            finally:
                if ahead is not None:
                    ahead.close()

    def _alone(self) -> _Turn:
        if self._process != os.getpid():
            self._start_anew()
        return self._turn

    def _reader(self) -> ReadAhead:
        self._flush()
        if self._ahead is None:
            self._ahead = ReadAhead(self._handle, self._fd)
        return self._ahead

    def _flush(self) -> None:
        if self._behind is not None:
            empty = self._behind.empty
            self._behind.flush()
            if self._mode == "a" and not empty:
                self._position = self._behind.stop

    def _size(self) -> int:
        return os.fstat(self._fd).st_size


class _Turn:
    """A lock that knows when its owner asks for it again: then the program would wait for itself."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._owner: int | None = None

    def __enter__(self) -> None:
        if not self._lock.acquire(blocking=False):
            if self._owner == threading.get_ident():
                raise RuntimeError("a file was used by a signal handler or finalizer while it was at work")
            self._lock.acquire()
        self._owner = threading.get_ident()

    def __exit__(self, *_: object) -> None:
        self._owner = None
        self._lock.release()


_written: weakref.WeakSet[Stream] = weakref.WeakSet()


def _at_exit(stream: Stream) -> None:
    if not _written:  # registered last, it runs before what ends the threads that move the data
        atexit.unregister(_flush_all)
        atexit.register(_flush_all)
    _written.add(stream)


def _flush_all() -> None:
    """At exit: files that are still open."""
    for stream in list(_written):
        try:
            stream.flush()
        except Exception:
            sys.stderr.write("nvme_ops: a file that was still open at exit could not be written:\n")
            traceback.print_exc()
