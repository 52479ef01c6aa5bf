"""Finds a tensor's bytes in a checkpoint's file, whoever wrote it."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from nvme_ops.errors import FormatError
from nvme_ops.file import shared_handle
from nvme_ops.formats import torch_pickle
from nvme_ops.formats.torch_pickle import Described
from nvme_ops.formats.torch_zip import PICKLE, Archive, open_archive
from nvme_ops.settings import PAGE, PIECE
from nvme_ops.storage.publication import open_to_read

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
    fd = open_to_read(path)
    try:
        return _find(open_archive(fd, path, shared_handle(), offset, offset + length))
    except (OSError, MemoryError, FormatError):
        raise
    except Exception as error:  # a damaged archive can raise anything
        raise FormatError(f"{path}: no tensor of torch.save at byte {offset}, or a damaged one: {error}") from error
    finally:
        os.close(fd)


def _find(archive: Archive) -> Stored | None:
    if any(record.method for record in archive.records.values()):
        return None
    description, order = archive.records[PICKLE], archive.records.get("byteorder")
    if description.size > _MOST_DESCRIPTION:
        return None
    if order is not None and (order.size > 10 or archive.content("byteorder").decode() != sys.byteorder):
        return None
    root, _ = torch_pickle.read(archive.content(PICKLE), archive.path)
    tensor = torch_pickle.tensor(root, "", archive.path)
    if not isinstance(tensor, Described) or not tensor.contiguous:
        return None
    if tensor.parameter or tensor.requires_grad or tensor.metadata:
        return None
    name, (begin, end) = tensor.storage.record, tensor.extent
    archive.locate([name])
    if end > archive.records[name].size:
        return None
    return Stored(archive.starts[name] + begin, tensor.dtype, tensor.shape)


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
