"""Where the bytes of a tensor, and of its parts, lie in files, and how several are read by one call."""

from __future__ import annotations

import functools
import math
import os
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from nvme_ops.base.errors import ChangedFileError, FormatError
from nvme_ops.base.native import native
from nvme_ops.base.settings import PAGE
from nvme_ops.filesystem.publication import FileState
from nvme_ops.io.engine import Priority
from nvme_ops.io.future import IoFuture
from nvme_ops.io.handle import aio_handle
from nvme_ops.storage.page_cache import PageCache

if TYPE_CHECKING:
    from nvme_ops.ops.async_io import OpenFile

_MAX_EXTENTS = 16384  # of one tensor: reading more takes longer than reading all of it and copying a part


class WeightFile:
    """An open file of weights, whose reads can check that it has not changed.

    Args:
        fd: the file's descriptor, which ``close`` closes.
        path: names the file in errors.
        handle: reads it.
        checked: whether ``require_unchanged`` compares the file with what it was when opened.
    """

    def __init__(self, fd: int, path: str, handle: aio_handle, checked: bool = True) -> None:
        self._fd, self.path, self.handle = fd, path, handle
        self.cache: PageCache | None = None  #: may choose another handle
        self.file: OpenFile = native().OpenFile(fd)
        self._seen = FileState(os.fstat(fd), fd) if checked else None
        self.note_size()

    def note_size(self) -> None:
        """Updates ``size``, in bytes."""
        self.size = os.fstat(self._fd).st_size

    @property
    def identity(self) -> tuple[int, ...] | None:
        """What its bytes are recognised by, in other processes, too; None if nobody checks whether it has changed."""
        return None if self._seen is None else self._seen.identity

    def reader(self, extents: Sequence[FileExtent]) -> aio_handle:
        """Returns the handle that reads extents of this file."""
        if self.cache is None:
            return self.handle
        return self.cache.reader(self.handle, [(self.path, extent.start, extent.nbytes) for extent in extents])

    def require_unchanged(self) -> None:
        """Raises FormatError if the file was written or truncated since it was opened; ChangedFileError if perhaps."""
        status = os.fstat(self._fd)
        if self._seen is not None and not self._seen.holds(status, self._fd):
            kind = FormatError if self._seen.is_written(status) else ChangedFileError
            raise kind(f"{self.path} was changed while its weights were in use")

    def close(self) -> None:
        """Waits for transfers of the file and closes it. Further calls do nothing."""
        self.file.close()
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def __del__(self) -> None:
        if getattr(self, "_fd", -1) >= 0:  # Ctrl-C interrupted the call that was to close it
            self.close()


class FileExtent(NamedTuple):
    """A range of a file: ``nbytes`` bytes that begin at byte ``start``."""

    file: WeightFile
    start: int
    nbytes: int


class Source:
    """The bytes of a contiguous tensor, as extents in their order.

    Weights are read, kept and predicted by their ``Source``: the same part of a source is always the same object.

    Args:
        extents: hold exactly the bytes of the tensor.
        dtype: the stored one.
        shape: of the tensor.
    """

    def __init__(self, extents: Sequence[FileExtent], dtype: torch.dtype, shape: Sequence[int]) -> None:
        self.extents, self.dtype, self.shape = _joined(extents), dtype, tuple(shape)
        self.nbytes = math.prod(self.shape) * dtype.itemsize
        #: Bytes read in front of the tensor, and read in all: whole pages of one file, where these need no copy.
        self.skipped, self.span = 0, self.nbytes
        if len(self.extents) == 1 and self.nbytes >= PAGE and self.extents[0].start % PAGE % dtype.itemsize == 0:
            self.skipped = self.extents[0].start % PAGE
            self.span = -(-(self.skipped + self.nbytes) // PAGE) * PAGE
        self.room = max(1, -(-self.span // PAGE)) * PAGE  #: bytes of memory that it takes, in whole pages
        self.holder: tuple[Source, int] | None = None  #: what this is a part of, and at which of its bytes it begins
        self.copies: dict[Any, Any] = {}  #: weak references to copies in memory that were pickled
        self._parts: dict[tuple[int, int], Source] = {}
        self._viewed: dict[tuple[tuple[int, ...], torch.dtype], Source] = {}

    def placed(self) -> Iterator[tuple[FileExtent, int]]:
        """Yields each extent with the byte of the tensor at which it begins."""
        return zip(self.extents, accumulate((extent.nbytes for extent in self.extents), initial=0), strict=False)

    def rows(self, begin: int, end: int) -> Source:
        """Returns the part from index ``begin`` to ``end`` of the first dimension."""
        if (begin, end) == (0, self.shape[0]):
            return self
        row = self.nbytes // self.shape[0]
        if self.holder is not None and row:
            holder, at = self.holder
            if (holder.shape[1:], holder.dtype) == (self.shape[1:], self.dtype):  # a part of a part
                return holder.rows(at // row + begin, at // row + end)
        if (begin, end) not in self._parts:
            extents = self.range(begin * row, (end - begin) * row)
            self._parts[begin, end] = part = Source(extents, self.dtype, (end - begin, *self.shape[1:]))
            part.holder = self, begin * row
        return self._parts[begin, end]

    def view(self, shape: tuple[int, ...], dtype: torch.dtype | None = None) -> Source:
        """Returns the same bytes as a tensor of another shape or dtype."""
        key = shape, dtype or self.dtype
        if key == (self.shape, self.dtype):
            return self
        if key not in self._viewed:
            self._viewed[key] = Source(self.extents, key[1], shape)
            self._viewed[key].holder = self, 0
        return self._viewed[key]

    def holders(self) -> Iterator[tuple[Source, int]]:
        """Yields this source and those that it is a part of, each with the byte at which this one begins in it."""
        pair: tuple[Source, int] | None = (self, 0)
        while pair is not None:
            yield pair
            holder, begin = pair
            pair = None if holder.holder is None else (holder.holder[0], begin + holder.holder[1])

    def range(self, begin: int, nbytes: int) -> list[FileExtent]:
        """Returns the extents of ``nbytes`` bytes that begin at byte ``begin`` of the tensor."""
        if not begin and nbytes == self.nbytes:
            return [extent for extent in self.extents if extent.nbytes]
        extents = []
        place = max(0, bisect_right(self._begins, begin) - 1)
        while nbytes and place < len(self.extents):
            file, start, length = self.extents[place]
            skipped = begin - self._begins[place]
            if (taken := min(length - skipped, nbytes)) > 0:
                extents.append(FileExtent(file, start + skipped, taken))
                begin, nbytes = begin + taken, nbytes - taken
            place += 1
        return extents

    @functools.cached_property
    def _begins(self) -> list[int]:
        """The byte of the tensor at which each extent begins; a model has many tensors of many extents."""
        return list(accumulate((extent.nbytes for extent in self.extents[:-1]), initial=0))


def concatenated(sources: Sequence[Source], dim: int) -> Source | None:
    """Returns the source of ``torch.cat``'s result, or None for too many extents or several dtypes."""
    first = sources[0]
    dim %= len(first.shape)
    outer = math.prod(first.shape[:dim])
    if outer * len(sources) > _MAX_EXTENTS or any(source.dtype != first.dtype for source in sources):
        return None
    extents: list[FileExtent] = []
    for index in range(outer):
        for source in sources:
            block = source.nbytes // outer
            extents += source.range(index * block, block)
    shape = (*first.shape[:dim], sum(source.shape[dim] for source in sources), *first.shape[dim + 1 :])
    return Source(extents, first.dtype, shape)


def narrowed(source: Source, dim: int, begin: int, end: int) -> Source | None:
    """Returns the part from index ``begin`` to ``end`` of a dimension, or None for too many extents."""
    if dim == 0:
        return source.rows(begin, end)
    outer = math.prod(source.shape[:dim])
    if outer > _MAX_EXTENTS:
        return None
    block = source.nbytes // outer
    row = block // source.shape[dim]
    extents: list[FileExtent] = []
    for index in range(outer):
        extents += source.range(index * block + begin * row, (end - begin) * row)
    return Source(extents, source.dtype, (*source.shape[:dim], end - begin, *source.shape[dim + 1 :]))


def _joined(extents: Sequence[FileExtent]) -> tuple[FileExtent, ...]:
    """Joins extents that follow each other in one file."""
    if len(extents) < 2:
        return tuple(extents)
    joined: list[FileExtent] = []
    for extent in extents:
        if joined and joined[-1].file is extent.file and joined[-1].start + joined[-1].nbytes == extent.start:
            joined[-1] = FileExtent(extent.file, joined[-1].start, joined[-1].nbytes + extent.nbytes)
        else:
            joined.append(extent)
    return tuple(joined)


def submit_reads(
    pieces: Iterable[tuple[FileExtent, torch.Tensor]], priority: Priority = Priority.DEMAND
) -> list[IoFuture]:
    """Starts to read extents into tensors, by one call per file. Raises FormatError if a file was changed."""
    by_file: dict[WeightFile, tuple[list[torch.Tensor], list[FileExtent]]] = {}
    for extent, tensor in pieces:
        targets, extents = by_file.setdefault(extent.file, ([], []))
        targets.append(tensor)
        extents.append(extent)
    for file in by_file:
        file.require_unchanged()
    return [
        file.reader(extents).submit_preadv(targets, file.file, [part.start for part in extents], priority=priority)
        for file, (targets, extents) in by_file.items()
    ]
