"""``nvme_ops.open``: a file object whose large transfers go past the page cache, and that moves tensors as they are."""

from __future__ import annotations

import functools
import io
import os
from typing import TYPE_CHECKING, Any, BinaryIO

from nvme_ops.future import IoFuture
from nvme_ops.handle import aio_handle

if TYPE_CHECKING:
    import torch
    from _typeshed import ReadableBuffer, WriteableBuffer

    class _RawFile(io.RawIOBase, BinaryIO):  # what torch.save and others ask for
        pass
else:
    _RawFile = io.RawIOBase

_FLAGS = {
    "r": os.O_RDONLY,
    "r+": os.O_RDWR,
    "w": os.O_WRONLY | os.O_CREAT | os.O_TRUNC,
    "a": os.O_WRONLY | os.O_CREAT,
}

# Bytes below which a read or write of the stream is left to the page cache, which gathers small ones.
_SMALL = 256 * 1024


@functools.cache
def _shared_handle() -> aio_handle:
    return aio_handle()


def open(  # noqa: A001  (used as nvme_ops.open)
    path: str | bytes | os.PathLike[str] | os.PathLike[bytes], mode: str = "r", *, handle: aio_handle | None = None
) -> File:
    """Opens ``path`` as a ``File``.

    Args:
        path: the file.
        mode: ``"r"`` to read, ``"w"`` to write a new or emptied file, ``"r+"`` to do both to what is there, ``"a"`` to
            append. A ``b`` may be added: files are always binary.
        handle: the handle whose settings the transfers use; one for the whole process when None.

    Raises:
        ValueError: an unknown mode.
        OSError: the file cannot be opened.
    """
    return File(path, mode, handle=handle)


class File(_RawFile):
    """An open file: a raw binary stream with a position, and tensor transfers at offsets beside it.

    Stream reads and writes of 256 KiB or more, and all tensor transfers, go through an ``aio_handle``. Nothing is
    buffered here, so there is nothing to flush; ``sync`` makes what was written durable.
    """

    def __init__(
        self,
        path: str | bytes | os.PathLike[str] | os.PathLike[bytes],
        mode: str = "r",
        *,
        handle: aio_handle | None = None,
    ) -> None:
        self._fd = -1
        super().__init__()
        plain = mode.replace("b", "", 1)
        if plain not in _FLAGS:
            raise ValueError(f"mode must be one of {', '.join(map(repr, _FLAGS))}, not {mode!r}")
        self._name = path
        self._mode = plain
        self._handle = handle or _shared_handle()
        self._engine = self._handle._engine
        self._position = 0
        self._pending: list[IoFuture] = []
        self._fd = os.open(path, _FLAGS[plain] | os.O_CLOEXEC, 0o666)
        if self.mode == "a":
            self._position = self._size()

    @property
    def name(self) -> Any:
        """The path as it was given."""
        return self._name

    @property
    def mode(self) -> str:
        """``r``, ``w``, ``r+`` or ``a``."""
        return self._mode

    # Tensors

    def pread(self, tensor: torch.Tensor, offset: int) -> int:
        """Fills ``tensor`` from ``offset`` bytes into the file; returns the bytes read. The position stays.

        Raises:
            EOFError: the file ends before the tensor is full.
            OSError: the kernel reported an error.
            ValueError: the tensor cannot be filled in place, or the file is closed.
        """
        self._require_readable()
        return self._engine.run(False, tensor, self._fd, offset, False)

    def pwrite(self, tensor: torch.Tensor, offset: int) -> int:
        """Stores ``tensor`` from ``offset`` bytes into the file on; returns the bytes written. The position stays."""
        self._require_writable()
        return self._engine.run(True, tensor, self._fd, offset, False)

    def pread_async(self, tensor: torch.Tensor, offset: int) -> IoFuture:
        """Like ``pread``, returning at once."""
        self._require_readable()
        return self._remember(self._handle.submit_pread(tensor, self._fd, offset))

    def pwrite_async(self, tensor: torch.Tensor, offset: int) -> IoFuture:
        """Like ``pwrite``, returning at once."""
        self._require_writable()
        return self._remember(self._handle.submit_pwrite(tensor, self._fd, offset))

    def sync(self) -> None:
        """Waits for pending transfers, then makes all that was written durable (``fsync``)."""
        self._settle()
        os.fsync(self.fileno())

    # The stream

    def readable(self) -> bool:
        """Whether the mode allows reading."""
        return self.mode in ("r", "r+")

    def writable(self) -> bool:
        """Whether the mode allows writing."""
        return self.mode != "r"

    def seekable(self) -> bool:
        """True."""
        self._require_open()
        return True

    def readinto(self, buffer: WriteableBuffer, /) -> int:
        """Reads into ``buffer`` from the position on; returns the bytes read, 0 at the end of the file."""
        self._require_readable()
        with memoryview(buffer).cast("B") as view:
            wanted = len(view)
            if wanted < _SMALL:
                count = os.preadv(self._fd, [view], self._position)
            else:
                count = max(0, min(wanted, self._size() - self._position))
                with view[:count] as part:
                    self._engine.run(False, part, self._fd, self._position, False)
        self._position += count
        return count

    def readall(self) -> bytes:
        """Everything from the position to the end of the file."""
        content = bytearray(max(0, self._size() - self._position))
        count = self.readinto(content)
        return bytes(content[:count]) if count < len(content) else bytes(content)

    def write(self, buffer: ReadableBuffer, /) -> int:
        """Writes ``buffer`` at the position, in mode ``"a"`` at the end of the file; returns the bytes written: all."""
        self._require_writable()
        if self.mode == "a":
            self._position = self._size()
        with memoryview(buffer) as whole, whole.cast("B") as view:
            if len(view) >= _SMALL:
                self._engine.run(True, view, self._fd, self._position, False)
            else:
                written = 0
                while written < len(view):
                    written += os.pwrite(self._fd, view[written:], self._position + written)
            self._position += len(view)
            return len(view)

    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        """Moves the position, counted from the start, the position or the end; returns it."""
        self._require_open()
        bases = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._size()}
        if whence not in bases:
            raise ValueError(f"whence must be 0, 1 or 2, not {whence}")
        if bases[whence] + offset < 0:
            raise ValueError(f"the position must not be negative: {bases[whence] + offset}")
        self._position = bases[whence] + offset
        return self._position

    def tell(self) -> int:
        """The position, in bytes."""
        self._require_open()
        return self._position

    def truncate(self, size: int | None = None, /) -> int:
        """Cuts or extends the file to ``size`` bytes, the position by default; returns the size."""
        self._require_writable()
        self._settle()
        size = self._position if size is None else size
        os.ftruncate(self._fd, size)
        return size

    def fileno(self) -> int:
        """The file descriptor."""
        self._require_open()
        return self._fd

    def close(self) -> None:
        """Waits for pending transfers and closes the file. Their errors stay with their futures."""
        if self.closed:
            return
        try:
            if self._fd >= 0:
                self._settle()
        finally:
            super().close()
            fd, self._fd = self._fd, -1
            if fd >= 0:
                os.close(fd)

    def __repr__(self) -> str:
        """For example ``<nvme_ops.File name='weights' mode='r'>``."""
        return f"<nvme_ops.File name={self.name!r} mode={self.mode!r}{' closed' if self.closed else ''}>"

    def _size(self) -> int:
        return os.fstat(self.fileno()).st_size

    def _remember(self, future: IoFuture) -> IoFuture:
        self._pending = [pending for pending in self._pending if not pending.done()]
        self._pending.append(future)
        return future

    def _settle(self) -> None:
        for future in self._pending:
            future._operation.wait(None)
        self._pending.clear()

    def _require_open(self) -> None:
        if self.closed:
            raise ValueError(f"the file is closed: {self.name!r}")

    def _require_readable(self) -> None:
        self._require_open()
        if not self.readable():
            raise io.UnsupportedOperation(f"not readable in mode {self.mode!r}: {self.name!r}")

    def _require_writable(self) -> None:
        self._require_open()
        if not self.writable():
            raise io.UnsupportedOperation(f"not writable in mode {self.mode!r}: {self.name!r}")
