"""Maps parts of a stored tensor to parts of another one."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from nvme_ops.dcp.stored import Stored
from nvme_ops.settings import PAGE, PIECE

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
