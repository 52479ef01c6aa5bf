"""``Slab``: one preallocated file, of which parts are handed out and taken back."""

from __future__ import annotations

import bisect
import contextlib
import ctypes
import errno
import os
import threading
from collections.abc import Iterable
from typing import NamedTuple

from nvme_ops.settings import PAGE, SLAB_STEP
from nvme_ops.text import size_words

#: What the kernel says where a file cannot grow: the disk, the user's share of it or the limit of a file.
NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)

_KEEP_SIZE, _PUNCH_HOLE = 1, 2  # fallocate(2)
_libc = ctypes.CDLL(None, use_errno=True)


class Extent(NamedTuple):
    """``nbytes`` of a file from byte ``start`` on, both whole pages."""

    start: int
    nbytes: int

    @property
    def end(self) -> int:
        """The first byte behind it."""
        return self.start + self.nbytes


class Slab:
    """A file of extents. The smallest hole that is large enough is taken; holes that touch become one.

    The file grows by ``step``, and what is handed out has its blocks: a full disk shows here, before anything is
    written. Any thread may call any method.

    Args:
        fd: of the file, open to be written, which stays the caller's and is the slab's alone. What it has already is
            one hole.
        path: what errors call it.
        step: bytes by which the file grows at least, where there is room for so much.
    """

    def __init__(self, fd: int, path: str, step: int = SLAB_STEP) -> None:
        self._fd, self._path, self._step = fd, path, max(PAGE, -(-step // PAGE) * PAGE)
        self._lock = threading.RLock()
        self._size, self._in_use = os.fstat(fd).st_size // PAGE * PAGE, 0
        self._used: dict[int, int] = {}  # what is handed out: where each begins, and its size
        self._starts: dict[int, int] = {}  # holes, the same
        self._ends: dict[int, int] = {}  # and where it ends
        self._by_size: dict[int, dict[int, None]] = {}
        self._sizes: list[int] = []  # the keys of _by_size, in order
        self._punched = self._size > 0  # some holes may have no blocks
        if self._size:
            self._add_hole(0, self._size)

    @property
    def size(self) -> int:
        """Bytes of the file."""
        return self._size

    @property
    def bytes_in_use(self) -> int:
        """Bytes that are handed out."""
        return self._in_use

    def allocate(self, nbytes: int) -> Extent:
        """An extent of at least ``nbytes`` bytes, which has its blocks.

        Raises:
            OSError: ENOSPC: the disk is full; nothing has changed. Or what else the kernel says of the file.
            ValueError: less than one byte.
        """
        if nbytes < 1:
            raise ValueError(f"nbytes must be at least 1, not {nbytes}")
        nbytes = -(-nbytes // PAGE) * PAGE
        with self._lock:
            index = bisect.bisect_left(self._sizes, nbytes)
            if index == len(self._sizes):
                self._grow(nbytes)
                index = bisect.bisect_left(self._sizes, nbytes)
            size = self._sizes[index]
            start = next(iter(self._by_size[size]))
            if self._punched:
                self._fill_hole(start, nbytes)
            self._remove_hole(start, size)
            if size > nbytes:
                self._add_hole(start + nbytes, size - nbytes)
            self._in_use += nbytes
            self._used[start] = nbytes
            return Extent(start, nbytes)

    def free(self, extent: Extent) -> None:
        """Takes an extent back, which nothing reads or writes any more.

        Raises ValueError for one that is not handed out as a whole.
        """
        with self._lock:
            if self._used.get(extent.start) != extent.nbytes:
                raise ValueError(f"{extent} of {self._path} is not in use")
            del self._used[extent.start]
            self._in_use -= extent.nbytes
            self._merge_hole(*extent)

    def reserve(self, extents: Iterable[Extent]) -> None:
        """Hands out certain extents of a file that is there already, of which nothing else is handed out.

        Raises ValueError where some lie beyond its end, overlap or are not whole pages; then none is handed out.
        """
        ordered = sorted(extents)
        with self._lock:
            if self._used:
                raise ValueError(f"extents of {self._path} are in use")
            end = 0
            for extent in ordered:
                if extent.start % PAGE or extent.nbytes % PAGE or extent.nbytes <= 0:
                    raise ValueError(f"{extent} is not of whole pages")
                if not end <= extent.start <= extent.end <= self._size:
                    raise ValueError(f"{extent} lies on another one or beyond the {self._size} bytes of the file")
                end = extent.end
            for holes in (self._starts, self._ends, self._by_size, self._sizes):
                holes.clear()
            end = 0
            for extent in [*ordered, Extent(self._size, 0)]:
                if extent.start > end:
                    self._add_hole(end, extent.start - end)
                end = extent.end
            self._used = dict(ordered)
            self._in_use = sum(self._used.values())

    def trim(self) -> None:
        """Gives the blocks of all holes back to the file system, and cuts the file where it ends with one."""
        with self._lock:
            last = self._ends.get(self._size)
            if last is not None:
                os.ftruncate(self._fd, last)
                self._remove_hole(last, self._size - last)
                self._size = last
            for start, size in self._starts.items():
                self._punched = True
                self._fallocate(_PUNCH_HOLE | _KEEP_SIZE, start, size)

    def _grow(self, nbytes: int) -> None:
        tail = self._ends.get(self._size, self._size)
        missing = nbytes - (self._size - tail)
        for step in (max(missing, self._step), missing):
            try:
                # blocks of the hole at the end too: when they are not to be had the file must not have grown
                begin = tail if self._punched else self._size
                self._fill(begin, self._size + step - begin)
                break
            except OSError as error:
                os.ftruncate(self._fd, self._size)  # what there was of it
                self._punch(tail, self._size - tail)
                if error.errno not in NO_ROOM or step == missing:
                    raise
        start, self._size = self._size, self._size + step
        self._merge_hole(start, step)

    def _fill_hole(self, start: int, nbytes: int) -> None:
        try:
            self._fill(start, nbytes)
        except OSError:
            self._punch(start, nbytes)  # the blocks that there were of it
            raise

    def _punch(self, start: int, nbytes: int) -> None:
        """Where some of its blocks may be missing."""
        if self._punched and nbytes:
            with contextlib.suppress(OSError):
                self._fallocate(_PUNCH_HOLE | _KEEP_SIZE, start, nbytes)

    def _fill(self, start: int, nbytes: int) -> None:
        """Gives the range blocks, where it has none."""
        try:
            os.posix_fallocate(self._fd, start, nbytes)
        except OSError as error:
            raise OSError(error.errno, f"{error.strerror}: making room for {size_words(nbytes)}", self._path) from None

    def _fallocate(self, mode: int, start: int, nbytes: int) -> None:
        if _libc.fallocate64(self._fd, mode, ctypes.c_int64(start), ctypes.c_int64(nbytes)) != 0:
            number = ctypes.get_errno()
            if number not in (errno.EOPNOTSUPP, errno.ENOSYS):  # these only cost space
                raise OSError(number, os.strerror(number), self._path)

    def _merge_hole(self, start: int, nbytes: int) -> None:
        before = self._ends.get(start)
        if before is not None:
            self._remove_hole(before, start - before)
            start, nbytes = before, nbytes + start - before
        after = self._starts.get(start + nbytes)
        if after is not None:
            self._remove_hole(start + nbytes, after)
            nbytes += after
        self._add_hole(start, nbytes)

    def _add_hole(self, start: int, size: int) -> None:
        self._starts[start] = size
        self._ends[start + size] = start
        if size not in self._by_size:
            bisect.insort(self._sizes, size)
            self._by_size[size] = {}
        self._by_size[size][start] = None

    def _remove_hole(self, start: int, size: int) -> None:
        del self._starts[start], self._ends[start + size], self._by_size[size][start]
        if not self._by_size[size]:
            del self._by_size[size], self._sizes[bisect.bisect_left(self._sizes, size)]

    def __repr__(self) -> str:
        """For example ``<Slab '/mnt/nvme/...': 4096 of 268435456 bytes in use>``."""
        return f"<Slab {self._path!r}: {self._in_use} of {self._size} bytes in use>"
