"""Where the bytes of a tensor lie in files, and where those of its parts do. Nothing is read here."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from nvme_ops._native import native
from nvme_ops.errors import FormatError
from nvme_ops.handle import aio_handle
from nvme_ops.settings import PAGE
from nvme_ops.storage.publication import FileState

if TYPE_CHECKING:
    from nvme_ops.ops.async_io import OpenFile

_MOST_EXTENTS = 16384  # of one tensor: more are read slower than they are copied


class WeightFile:
    """An open file that has weights, and what shows that it is still the same.

    Args:
        fd: of the file, which is closed with it.
        path: what errors call it.
        handle: reads it.
        checked: whether reads make sure that nobody has changed it.
    """

    def __init__(self, fd: int, path: str, handle: aio_handle, checked: bool = True) -> None:
        self._fd, self.path, self.handle = fd, path, handle
        self.file: OpenFile = native().OpenFile(fd)
        self._seen = FileState(os.fstat(fd), fd) if checked else None
        self.note_size()

    def note_size(self) -> None:
        """Looks again how large it is."""
        self.size = os.fstat(self._fd).st_size

    def require_unchanged(self) -> None:
        """Raises FormatError when the file was written or cut since it was opened."""
        if self._seen is not None and not self._seen.holds(os.fstat(self._fd), self._fd):
            raise FormatError(f"{self.path} was changed while its weights were in use")

    def close(self) -> None:
        """Waits for its transfers. Further calls do nothing."""
        self.file.close()
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def __del__(self) -> None:
        if getattr(self, "_fd", -1) >= 0:  # Ctrl-C has ended the call that should have closed it
            self.close()


class FileExtent(NamedTuple):
    """``nbytes`` of a file from byte ``start`` on."""

    file: WeightFile
    start: int
    nbytes: int


class Source:
    """The bytes of a contiguous tensor: extents, one after the other.

    What is read, kept and predicted goes by ``Source``: the same part of the same one is the same object.

    Args:
        extents: together as many bytes as the tensor has.
        dtype: as it is stored.
        shape: of the tensor.
    """

    def __init__(self, extents: Sequence[FileExtent], dtype: torch.dtype, shape: Sequence[int]) -> None:
        self.extents, self.dtype, self.shape = _joined(extents), dtype, tuple(shape)
        self.nbytes = math.prod(self.shape) * dtype.itemsize
        #: Bytes in front of it that are read with it, and all that are: whole pages of one file, which need no copy.
        self.skipped, self.span = 0, self.nbytes
        if len(self.extents) == 1 and self.nbytes >= PAGE and self.extents[0].start % PAGE % dtype.itemsize == 0:
            self.skipped = self.extents[0].start % PAGE
            self.span = -(-(self.skipped + self.nbytes) // PAGE) * PAGE
        self.room = max(1, -(-self.span // PAGE)) * PAGE  #: bytes of memory that it takes: whole pages
        self.copies: dict[Any, Any] = {}  #: in memory, that were pickled; references that do not keep them
        self._parts: dict[tuple[int, int], Source] = {}
        self._viewed: dict[tuple[tuple[int, ...], torch.dtype], Source] = {}

    def rows(self, begin: int, end: int) -> Source:
        """The part from index ``begin`` to ``end`` of the first dimension."""
        if (begin, end) == (0, self.shape[0]):
            return self
        if (begin, end) not in self._parts:
            row = self.nbytes // self.shape[0]
            extents = self.range(begin * row, (end - begin) * row)
            self._parts[begin, end] = Source(extents, self.dtype, (end - begin, *self.shape[1:]))
        return self._parts[begin, end]

    def view(self, shape: tuple[int, ...], dtype: torch.dtype | None = None) -> Source:
        """The same bytes as a tensor of another shape, or of another dtype."""
        key = shape, dtype or self.dtype
        if key == (self.shape, self.dtype):
            return self
        if key not in self._viewed:
            self._viewed[key] = Source(self.extents, key[1], shape)
        return self._viewed[key]

    def range(self, begin: int, nbytes: int) -> list[FileExtent]:
        """The extents of ``nbytes`` bytes from byte ``begin`` of the tensor on."""
        found = []
        for file, start, length in self.extents:
            skipped = min(begin, length)
            taken = min(length - skipped, nbytes)
            if taken:
                found.append(FileExtent(file, start + skipped, taken))
            begin, nbytes = begin - skipped, nbytes - taken
        return found


def concatenated(sources: Sequence[Source], dim: int) -> Source | None:
    """What ``torch.cat`` makes of them; None where that is in too many extents, or of several dtypes."""
    first = sources[0]
    dim %= len(first.shape)
    outer = math.prod(first.shape[:dim])
    if outer * len(sources) > _MOST_EXTENTS or any(each.dtype != first.dtype for each in sources):
        return None
    extents: list[FileExtent] = []
    for index in range(outer):
        for each in sources:
            block = each.nbytes // outer
            extents += each.range(index * block, block)
    shape = (*first.shape[:dim], sum(each.shape[dim] for each in sources), *first.shape[dim + 1 :])
    return Source(extents, first.dtype, shape)


def narrowed(source: Source, dim: int, begin: int, end: int) -> Source | None:
    """What ``narrow`` makes of it in any dimension; None where that is in too many extents."""
    if dim == 0:
        return source.rows(begin, end)
    outer = math.prod(source.shape[:dim])
    if outer > _MOST_EXTENTS:
        return None
    block = source.nbytes // outer
    row = block // source.shape[dim]
    extents: list[FileExtent] = []
    for index in range(outer):
        extents += source.range(index * block + begin * row, (end - begin) * row)
    return Source(extents, source.dtype, (*source.shape[:dim], end - begin, *source.shape[dim + 1 :]))


def _joined(extents: Sequence[FileExtent]) -> tuple[FileExtent, ...]:
    """Neighbours in one file become one extent."""
    found: list[FileExtent] = []
    for extent in extents:
        if found and found[-1].file is extent.file and found[-1].start + found[-1].nbytes == extent.start:
            found[-1] = FileExtent(extent.file, found[-1].start, found[-1].nbytes + extent.nbytes)
        else:
            found.append(extent)
    return tuple(found)
