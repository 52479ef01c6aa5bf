"""Allocates extents in one preallocated file; other files may share their blocks where the file system can do that."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import struct
import threading
from collections.abc import Iterable
from typing import NamedTuple

from nvme_ops.base.errors import naming
from nvme_ops.base.settings import PAGE, SLAB_STEP
from nvme_ops.base.text import size_words
from nvme_ops.filesystem.files import allocate, fallocate
from nvme_ops.memory.holes import Holes

#: Errors for a file that cannot grow: the disk is full, the quota is used up, the file size limit is reached.
NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)

_KEEP_SIZE, _PUNCH_HOLE = 1, 2  # fallocate(2)


class Extent(NamedTuple):
    """``nbytes`` of a file from byte ``start`` on; both are multiples of a page."""

    start: int
    nbytes: int

    @property
    def end(self) -> int:
        """The first byte after the extent."""
        return self.start + self.nbytes


class Slab:
    """Extents of one file, allocated best fit; neighbouring holes are merged.

    The file grows by ``step``, and an allocated extent always has its blocks: a full disk shows here, before anything
    is written. All methods are thread-safe.

    Args:
        fd: a file open for writing, used by the slab alone and closed by the caller. Its present content is free space.
        path: the name in error messages.
        step: the least bytes by which the file grows, if the disk has that much room.
    """

    def __init__(self, fd: int, path: str, step: int = SLAB_STEP) -> None:
        self._fd, self._path, self._step = fd, path, max(PAGE, -(-step // PAGE) * PAGE)
        self._lock = threading.RLock()
        self.size = os.fstat(fd).st_size // PAGE * PAGE  #: bytes of the file
        self.bytes_in_use = 0  #: bytes allocated
        self._used: dict[int, int] = {}  # allocated extents: start -> bytes
        self._holes = Holes()
        self._punched = self.size > 0  # some holes may have no blocks
        if self.size:
            self._holes.add(0, self.size)

    def allocate(self, nbytes: int) -> Extent:
        """Returns an extent of at least ``nbytes`` bytes, whose blocks are allocated.

        Raises:
            OSError: the file cannot grow, for example ENOSPC; nothing has changed.
            ValueError: ``nbytes`` is less than 1.
        """
        if nbytes < 1:
            raise ValueError(f"nbytes must be at least 1, not {nbytes}")
        nbytes = -(-nbytes // PAGE) * PAGE
        with self._lock:
            taken = False
            while not taken:
                start, size = self._holes.find(nbytes) or self._grow(nbytes)
                if self._punched:
                    try:
                        self._fill(start, nbytes)
                    except OSError:
                        self._punch(start, nbytes)  # undoes a partial allocation
                        raise
                taken = self._holes.take(start, size, nbytes)
            self.bytes_in_use += nbytes
            self._used[start] = nbytes
            return Extent(start, nbytes)

    def free(self, extent: Extent) -> None:
        """Frees an extent, which no transfer may be using.

        Raises ValueError unless it is exactly an extent in use.
        """
        with self._lock:
            if self._used.get(extent.start) != extent.nbytes:
                raise ValueError(f"{extent} of {self._path} is not in use")
            del self._used[extent.start]
            self.bytes_in_use -= extent.nbytes
            self._holes.merge(*extent)

    def reserve(self, extents: Iterable[Extent]) -> None:
        """Marks these extents of an existing file as allocated, and all others as free.

        Raises ValueError, without any change, if extents are in use already, or one of these lies beyond the end,
        overlaps another or is not whole pages.
        """
        ordered = sorted(extents)
        with self._lock:
            if self._used:
                raise ValueError(f"extents of {self._path} are in use")
            end, holes = 0, []
            for extent in ordered:
                if extent.start % PAGE or extent.nbytes % PAGE or extent.nbytes <= 0:
                    raise ValueError(f"{extent} is not whole pages")
                if not end <= extent.start <= extent.end <= self.size:
                    raise ValueError(f"{extent} overlaps another one or lies beyond the {self.size} bytes of the file")
                holes.append((end, extent.start - end))
                end = extent.end
            self._holes.clear()
            for start, nbytes in [*holes, (end, self.size - end)]:
                if nbytes:
                    self._holes.add(start, nbytes)
            self._used = dict(ordered)
            self.bytes_in_use = sum(self._used.values())

    def trim(self) -> None:
        """Returns the blocks of all holes to the file system, and truncates the file if it ends with one."""
        with self._lock:
            last = self._holes.ending_at(self.size)
            if last is not None:
                with naming("ftruncate", self._path):
                    os.ftruncate(self._fd, last)
                self._holes.remove(last, self.size - last)
                self.size = last
            for start, size in self._holes:
                self._punched = True
                try:
                    with naming("fallocate", self._path):
                        fallocate(self._fd, _PUNCH_HOLE | _KEEP_SIZE, start, size)
                except OSError as error:
                    if error.errno not in _CANNOT:  # else only costs space
                        raise

    def _grow(self, nbytes: int) -> tuple[int, int]:
        """Makes room for ``nbytes`` bytes at the end; returns start and size of the hole there."""
        tail = self._holes.ending_at(self.size)
        tail = self.size if tail is None else tail
        missing = nbytes - (self.size - tail)
        for step in (max(missing, self._step), missing):
            try:
                # includes the hole at the end: if its blocks cannot be allocated, the file must not grow
                begin = tail if self._punched else self.size
                self._fill(begin, self.size + step - begin)
                break
            except OSError as error:
                with contextlib.suppress(OSError):
                    os.ftruncate(self._fd, self.size)  # undoes a partial growth
                self._punch(tail, self.size - tail)
                if error.errno not in NO_ROOM or step == missing:
                    raise
        start, self.size = self.size, self.size + step
        self._holes.merge(start, step)
        return tail, self.size - tail

    def _punch(self, start: int, nbytes: int) -> None:
        """Frees the blocks of a hole, if holes may lack blocks anyway."""
        if self._punched and nbytes:
            with contextlib.suppress(OSError):
                fallocate(self._fd, _PUNCH_HOLE | _KEEP_SIZE, start, nbytes)

    def _fill(self, start: int, nbytes: int) -> None:
        """Allocates the blocks of a range."""
        try:
            allocate(self._fd, start, nbytes)
        except OSError as error:
            raise OSError(error.errno, f"{error.strerror}: making room for {size_words(nbytes)}", self._path) from None

    def __repr__(self) -> str:
        """Returns for example ``<Slab '/mnt/nvme/...': 4096 of 268435456 bytes in use>``."""
        return f"<Slab {self._path!r}: {self.bytes_in_use} of {self.size} bytes in use>"


_FICLONERANGE = 0x4020940D  # linux/fs.h: _IOW(0x94, 13, struct file_clone_range)
_CANNOT = {errno.EOPNOTSUPP, errno.ENOTTY, errno.EXDEV, errno.EINVAL, errno.ENOSYS, errno.EPERM}


def share(source: int, start: int, nbytes: int, target: int, place: int) -> bool:
    """Makes ``target``, from ``place`` on, share ``nbytes`` of ``source`` from byte ``start`` on, without a copy.

    Returns False if that is impossible: on most file systems, between two of them, or for parts of blocks.

    Raises:
        OSError: any other failure, such as ENOSPC or EIO.
    """
    try:
        fcntl.ioctl(target, _FICLONERANGE, struct.pack("qQQQ", source, start, nbytes, place))
    except OSError as error:
        if error.errno in _CANNOT:
            return False
        raise
    return True
