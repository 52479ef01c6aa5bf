"""``nvme_ops.open``: a file object whose large transfers bypass the page cache, and that reads and writes tensors."""

from __future__ import annotations

import contextlib
import errno
import functools
import io
import itertools
import os
import stat
import warnings
from typing import TYPE_CHECKING, Any, BinaryIO, Literal, TypeAlias

from nvme_ops.base.errors import naming
from nvme_ops.base.native import native
from nvme_ops.base.text import URL, never_raising
from nvme_ops.filesystem.files import Syncing, sync_folder
from nvme_ops.io.engine import Op, engine_of
from nvme_ops.io.future import IoFuture
from nvme_ops.io.handle import aio_handle
from nvme_ops.io.stream import Stream

if TYPE_CHECKING:
    import torch
    from _typeshed import ReadableBuffer, WriteableBuffer

    from nvme_ops.ops.async_io import Operation

    class _RawFile(io.RawIOBase, BinaryIO):  # the type that torch.save and others accept
        pass
else:
    _RawFile = io.RawIOBase

_FLAGS = {
    "r": os.O_RDONLY,
    "r+": os.O_RDWR,
    "w": os.O_WRONLY | os.O_CREAT | os.O_TRUNC,
    "w+": os.O_RDWR | os.O_CREAT | os.O_TRUNC,
    "x": os.O_WRONLY | os.O_CREAT | os.O_EXCL,
    "x+": os.O_RDWR | os.O_CREAT | os.O_EXCL,
    "a": os.O_WRONLY | os.O_CREAT,
}

Mode: TypeAlias = Literal[
    "r", "rb", "r+", "rb+", "r+b", "w", "wb", "w+", "wb+", "w+b", "x", "xb", "x+", "xb+", "x+b", "a", "ab"
]


@functools.cache
def shared_handle() -> aio_handle:
    """Returns the handle with default settings that the whole process shares."""
    return aio_handle()


def handle_of(handle: aio_handle | None) -> aio_handle:
    """Returns the handle that was given, or the shared one. Raises TypeError for anything else."""
    if handle is None:
        return shared_handle()
    if not isinstance(handle, aio_handle):
        raise TypeError(f"handle must be an aio_handle or a gds_handle, not {type(handle).__name__}")
    return handle


def open(  # noqa: A001  (used as nvme_ops.open)
    path: str | bytes | os.PathLike[str] | os.PathLike[bytes], mode: Mode = "r", *, handle: aio_handle | None = None
) -> File:
    """Opens ``path`` as a ``File``.

    Args:
        path: the file.
        mode: as in Python's ``open``: ``"r"`` to read, ``"w"`` to write a new or emptied file, ``"x"`` to write a file
            that must be new, ``"a"`` to append; ``"r+"``, ``"w+"`` and ``"x+"`` to read and write. A ``b`` may be
            added: files are always binary.
        handle: the handle that makes the transfers; one that the whole process shares when None.

    Raises:
        TypeError: a mode that is not a str.
        ValueError: an unknown mode, or a URL.
        OSError: the file cannot be opened, or is a pipe.
    """
    return File(path, mode, handle=handle)


class File(_RawFile):
    """An open file: a binary stream with a position, and tensor transfers at given offsets.

    All transfers go through an ``aio_handle``. Stream writes are gathered in blocks that are written in the background,
    and sequential reads are served from blocks read ahead: at most 16 MiB of memory in each direction, from first use
    until ``close``. So the file's content is up to date only after ``flush``, ``sync``, ``close``, a ``seek``
    elsewhere, a read or a tensor transfer; ``sync`` also makes it durable. An error while writing a block is raised by
    the next call, at the latest by ``close``.

    Changes that others make to the file may be seen late, as blocks were read ahead; after a ``flush`` they are seen at
    once. Threads may share a file. A forked child does not inherit data that its parent has not flushed: the parent
    writes it. Close files explicitly; one that is dropped is flushed, with a ``ResourceWarning``.
    """

    def __init__(
        self,
        path: str | bytes | os.PathLike[str] | os.PathLike[bytes],
        mode: Mode = "r",
        *,
        handle: aio_handle | None = None,
    ) -> None:
        self._fd = -1
        super().__init__()
        if not isinstance(mode, str):
            raise TypeError(f"mode must be a str, not {type(mode).__name__}")
        plain = mode.replace("b", "", 1)
        if isinstance(path, str) and (match := URL.match(path)):
            raise ValueError(f"{path}: {match[0]} is no local file: copy it to one, or mount it")
        if plain not in _FLAGS:
            raise ValueError(f"mode must be one of {', '.join(map(repr, _FLAGS))}, not {mode!r}")
        self._name = path
        self._mode = plain
        self._handle = handle_of(handle)
        self._engine = engine_of(self._handle)
        self._pending: set[Operation] = set()  # tensor transfers
        self._sync_errno: int | None = None  # of a sync that failed
        self._folder_to_sync: str | bytes = ""  # until the file's name in it is durable
        self._syncing: Syncing | None = None  # a sync that was interrupted, so that its result is unknown
        try:
            # Non-blocking until it is known not to be a pipe, since opening one waits for its other end.
            self._fd = os.open(path, _FLAGS[plain] | os.O_CLOEXEC | os.O_NONBLOCK, 0o666)
            kind = os.fstat(self._fd).st_mode
            for refused, code in ((stat.S_ISFIFO, errno.ESPIPE), (stat.S_ISDIR, errno.EISDIR)):
                if refused(kind):
                    raise OSError(code, os.strerror(code), path)
            os.set_blocking(self._fd, True)
            if _FLAGS[plain] & os.O_CREAT and stat.S_ISREG(kind):
                self._folder_to_sync = os.path.dirname(os.path.realpath(path))
            self._open_file = native().OpenFile(self._fd)
            self._stream = Stream(self._handle, self._fd, self._open_file, plain)
        except BaseException:
            fd, self._fd = self._fd, -1
            if fd >= 0:
                os.close(fd)
            raise

    @property
    def name(self) -> Any:
        """The path as given."""
        return self._name

    @property
    def mode(self) -> str:
        """The mode given to ``open``, without the ``b``."""
        return self._mode

    # Tensors

    def pread(self, tensor: torch.Tensor, offset: int) -> int:
        """Fills ``tensor`` from byte ``offset`` of the file; returns the bytes read. The position does not move.

        Raises:
            EOFError: the file ends before the tensor is full.
            OSError: the kernel reported an error.
            ValueError: the tensor cannot be filled in place, or the file is closed.
        """
        self._prepare_read()
        return self._engine.run(Op.READ, tensor, self._open_file, offset, False)

    def pwrite(self, tensor: torch.Tensor, offset: int) -> int:
        """Stores ``tensor`` at byte ``offset`` of the file; returns the bytes written. The position does not move."""
        self._prepare_write()
        return self._engine.run(Op.WRITE, tensor, self._open_file, offset, False)

    def pread_async(self, tensor: torch.Tensor, offset: int) -> IoFuture:
        """Starts what ``pread`` does and returns a future."""
        self._prepare_read()
        return self._submit(Op.READ, tensor, offset)

    def pwrite_async(self, tensor: torch.Tensor, offset: int) -> IoFuture:
        """Starts what ``pwrite`` does and returns a future."""
        self._prepare_write()
        return self._submit(Op.WRITE, tensor, offset)

    def sync(self) -> None:
        """Flushes, waits for pending transfers, then makes everything written durable (``fsync``).

        If the mode creates files, the file's name becomes durable too, provided that its folder can be read.

        Raises:
            OSError: the device failed. The kernel does not try again: what was written may be lost, although it can
                still be read now. Each further call raises until ``truncate(0)``, after which the file can be written
                anew.
        """
        self.flush()
        self._settle()
        if self._sync_errno is not None:
            what = "an earlier sync has failed, and what was written before it may be lost: write the file anew"
            raise OSError(self._sync_errno, what, self.name)
        try:
            if self._syncing is not None:  # interrupted: the kernel reports a write error to one sync alone
                self._syncing.wait()
            self._syncing = Syncing(self.fileno(), self.name)
            self._syncing.wait()
            self._syncing = None
            if self._folder_to_sync:
                with contextlib.suppress(PermissionError):  # a folder that may be written to and not read
                    sync_folder(self._folder_to_sync)
                self._folder_to_sync = ""
        except OSError as error:
            self._sync_errno = error.errno
            raise

    # The stream

    def readable(self) -> bool:
        """Returns whether the mode allows reading."""
        return self.mode == "r" or "+" in self.mode

    def writable(self) -> bool:
        """Returns whether the mode allows writing."""
        return self.mode != "r"

    def seekable(self) -> bool:
        """Returns True."""
        self._require_open()
        return True

    def readinto(self, buffer: WriteableBuffer, /) -> int:
        """Reads into ``buffer`` at the position; returns the bytes read, 0 at the end of the file."""
        self._require(self.readable(), "readable")
        with memoryview(buffer) as whole, whole.cast("B") as view:
            return self._stream.read_into(view)

    def read(self, size: int | None = -1, /) -> bytes:
        """Reads at most ``size`` bytes, fewer only at the end of the file; by default everything that follows."""
        self._require(self.readable(), "readable")
        return self._stream.read(os.fstat(self.fileno()).st_size if size is None or size < 0 else size)

    def readall(self) -> bytes:
        """Reads from the position to the end of the file."""
        return self.read()

    def peek(self, size: int = 1, /) -> bytes:
        """Returns at most ``size`` of the next bytes without moving the position; empty at the end of the file."""
        self._require(self.readable(), "readable")
        return self._stream.peek(max(1, size))

    def write(self, buffer: ReadableBuffer, /) -> int:
        """Writes all of ``buffer`` at the position, in mode ``"a"`` at the end of the file; returns its bytes."""
        self._require(self.writable(), "writable")
        try:
            whole = memoryview(buffer)
        except TypeError:
            kind = type(buffer).__name__
            raise TypeError(f"write takes bytes, not {kind}: pwrite(tensor, offset) writes a tensor") from None
        with whole, whole.cast("B") as view:
            self._stream.write(view)
            return len(view)

    def flush(self) -> None:
        """Waits until everything written is in the file, and discards what was read ahead.

        Raises:
            OSError: the error of an earlier write.
        """
        self._require_open()
        if self._fd >= 0:  # else a close was interrupted near its end
            self._stream.give_way()

    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        """Moves the position relative to the start, the position or the end; returns the new position."""
        self._require_open()
        return self._stream.seek(offset, whence)

    def tell(self) -> int:
        """Returns the position in bytes."""
        self._require_open()
        return self._stream.tell()

    def truncate(self, size: int | None = None, /) -> int:
        """Truncates or extends the file to ``size`` bytes, by default to the position; returns the size."""
        self._prepare_write()
        self._settle()
        size = self._stream.tell() if size is None else size
        with naming("truncate", self.name):
            os.ftruncate(self._fd, size)
        if not size:
            self._sync_errno = self._syncing = None
        return size

    def fileno(self) -> int:
        """Returns the file descriptor."""
        self._require_open()
        return self._fd

    def close(self) -> None:
        """Flushes, waits for pending transfers and closes the file. Errors of transfers are left to their futures.

        An exception from a signal handler, such as Ctrl-C, leaves the file open with nothing lost: close it again.
        """
        if self.closed:
            return
        try:
            if self._fd >= 0:
                self._stream.close()
        finally:
            if self._fd < 0 or not self._stream.open:
                self._settle()
                try:
                    if self._fd >= 0:
                        self._open_file.close()
                    super().close()
                finally:
                    fd, self._fd = self._fd, -1
                    if fd >= 0:
                        os.close(fd)

    def __del__(self) -> None:
        # at Python's end its modules may be gone; what was written is in the file by then
        if warnings is not None and not self.closed and getattr(self, "_fd", -1) >= 0:
            warnings.warn(f"unclosed file {self!r}", ResourceWarning, stacklevel=2, source=self)
            self.close()

    @never_raising
    def __repr__(self) -> str:
        """Returns for example ``<nvme_ops.File name='weights' mode='r'>``."""
        return f"<nvme_ops.File name={self.name!r} mode={self.mode!r}{' closed' if self.closed else ''}>"

    def _submit(self, op: Op, tensor: torch.Tensor, offset: int) -> IoFuture:
        """Submits and records a transfer.

        Each change of the set is one call in C: no signal or thread can intervene between submitting and recording.
        """
        self._pending.difference_update([operation for operation in list(self._pending) if operation.done()])
        arguments = (op,), (tensor,), (self._open_file,), (offset,), (False,)
        known, begun = itertools.tee(map(self._engine.submit, *arguments))
        self._pending.update(known)
        return IoFuture(next(begun))

    def _settle(self) -> None:
        for operation in list(self._pending):
            operation.wait(None)
            self._pending.discard(operation)

    def _require_open(self) -> None:
        if self.closed:
            raise ValueError(f"the file is closed: {self.name!r}")

    def _require(self, allowed: bool, what: str) -> None:
        self._require_open()
        if not allowed:
            raise io.UnsupportedOperation(f"not {what} in mode {self.mode!r}: {self.name!r}")

    def _prepare_read(self) -> None:
        """Prepares a read at any offset: requires a readable mode, and flushes what the stream has written."""
        self._require(self.readable(), "readable")
        self._stream.flush()

    def _prepare_write(self) -> None:
        """Prepares a write at any offset: requires a writable mode, flushes, and discards what was read ahead."""
        self._require(self.writable(), "writable")
        self._stream.give_way()
