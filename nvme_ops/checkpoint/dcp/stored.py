"""Finds a tensor's bytes in a checkpoint's file, whoever wrote it."""

from __future__ import annotations

import io
import math
import struct
import sys
import zipfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from nvme_ops.errors import FormatError
from nvme_ops.formats import torch_pickle
from nvme_ops.formats.torch_pickle import Described
from nvme_ops.settings import PAGE, PIECE
from nvme_ops.storage.publication import open_to_read

_LOCAL = struct.Struct("<26x2H")  # of a zip member's head, the lengths of the name and the extra field behind it
_MOST_DESCRIPTION = 1 << 20  # bytes; torch's have less than 200


@dataclass(frozen=True)
class Stored:
    """A contiguous tensor, ``start`` bytes into the file."""

    start: int
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of data."""
        return math.prod(self.shape) * self.dtype.itemsize


def find(path: str, offset: int, length: int) -> Stored | None:
    """Finds the tensor that ``torch.save`` wrote to this part of the file; None if it is not a plain one.

    Raises:
        FormatError: it is damaged.
    """
    with open(open_to_read(path), "rb") as file:
        part = _FilePart(file, offset, length)
        try:
            archive = zipfile.ZipFile(part)
            return _find(part, archive, offset, f"{path}: byte {offset}")
        except (OSError, MemoryError, FormatError):
            raise
        except Exception as error:  # a damaged archive can raise anything
            raise FormatError(f"{path}: no tensor of torch.save at byte {offset}, or a damaged one: {error}") from error


def _find(part: _FilePart, archive: zipfile.ZipFile, offset: int, label: str) -> Stored | None:
    members = {info.filename.partition("/")[2]: info for info in archive.infolist()}
    description = members["data.pkl"]
    if description.file_size > _MOST_DESCRIPTION:
        return None
    order = members.get("byteorder")
    if order is not None and (order.file_size > 10 or archive.read(order) != sys.byteorder.encode()):
        return None
    root, _ = torch_pickle.read(archive.read(description), label)
    tensor = torch_pickle.tensor(root, "", label)
    if not isinstance(tensor, Described) or not tensor.contiguous:
        return None
    if tensor.parameter or tensor.requires_grad or tensor.metadata:
        return None
    data = members[tensor.storage.record]
    begin = tensor.offset * tensor.dtype.itemsize
    stored = Stored(0, tensor.dtype, tensor.shape)
    if data.compress_type != zipfile.ZIP_STORED or begin + stored.nbytes > data.file_size:
        return None
    part.seek(data.header_offset)
    name, extra = _LOCAL.unpack(part.read(_LOCAL.size))
    start = data.header_offset + _LOCAL.size + name + extra + begin
    if start + stored.nbytes > part.length:
        raise zipfile.BadZipFile("the data reach beyond the archive")
    return Stored(offset + start, tensor.dtype, tensor.shape)


class _FilePart(io.RawIOBase):
    """A part of a file, as a file object of its own."""

    def __init__(self, file: io.BufferedReader, offset: int, length: int) -> None:
        super().__init__()
        self._file, self._offset, self.length, self._position = file, offset, length, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self.length}[whence]
        self._position = max(0, base + offset)
        return self._position

    def readinto(self, buffer: Any, /) -> int:
        self._file.seek(self._offset + self._position)
        wanted = max(0, min(len(buffer), self.length - self._position))
        count = self._file.readinto(memoryview(buffer)[:wanted])
        self._position += count
        return count


#: What is copied at once where a tensor cannot be read in place: what a buffer of a ring takes. Bytes.
SPAN = PIECE - PAGE
_ROW = 64 << 10  # rows from this size on: only the wanted part is read


@dataclass(frozen=True)
class Span:
    """A stretch of the file that contains ``part``, and the part of the target that it fills."""

    start: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    part: tuple[slice, ...]
    target: torch.Tensor

    @property
    def nbytes(self) -> int:
        """Bytes of the stretch."""
        return math.prod(self.shape) * self.dtype.itemsize


def spans(stored: Stored, offsets: Sequence[int], lengths: Sequence[int], target: torch.Tensor) -> Iterator[Span]:
    """Cuts the wanted part of a tensor into spans of at most ``SPAN`` bytes."""
    size, (length, *_), (offset, *_) = stored.dtype.itemsize, (*lengths, 1), (*offsets, 0)
    inner = stored.shape[1:]
    row = math.prod(inner) * size
    rest = tuple(slice(start, start + count) for start, count in zip(offsets[1:], lengths[1:], strict=True))
    partial = tuple(lengths[1:]) != inner
    if inner and (row > SPAN or (partial and row > _ROW)):
        for index in range(length):
            below = Stored(stored.start + (offset + index) * row, stored.dtype, inner)
            yield from spans(below, offsets[1:], lengths[1:], target[index])
        return
    if not stored.shape:
        yield Span(stored.start, stored.dtype, (), (), target)
        return
    count = max(1, SPAN // max(1, row))
    for first in range(0, length, count):
        rows = min(count, length - first)
        start = stored.start + (offset + first) * row
        yield Span(start, stored.dtype, (rows, *inner), (slice(None), *rest), target[first : first + rows])


def in_one_piece(stored: Stored, offsets: Sequence[int], lengths: Sequence[int]) -> int | None:
    """Returns where the wanted part begins, if it is contiguous in the file."""
    start, block, whole = stored.start, stored.dtype.itemsize, True
    for size, offset, length in zip(reversed(stored.shape), reversed(offsets), reversed(lengths), strict=True):
        if not whole and length != 1:
            return None
        start += offset * block
        whole = whole and length == size
        block *= size
    return start
