"""``Segments``: the keys and values of one layer in files."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from nvme_ops.base.text import size_words
from nvme_ops.io.engine import Priority
from nvme_ops.io.future import IoFuture
from nvme_ops.storage.slab import NO_ROOM, Extent
from nvme_ops.storage.striped import Piece, StripedSlabs

_AHEAD = 8 << 20  # bytes of keys for which an extent has room beyond what is written, at most

#: The bytes of keys and of values in memory, ``[rows, bytes]`` each, and the token at which the rows begin.
Memory = tuple[Sequence[torch.Tensor], int]


@dataclass
class _Segment:
    """Room in the files for consecutive tokens."""

    first: int
    capacity: int  # tokens
    used: int  # tokens that are written
    pieces: tuple[list[Piece], list[Piece]]  # for the keys and for the values

    @property
    def stop(self) -> int:
        return self.first + self.used


class Segments:
    """Writes tokens in their order, in few and large extents, and reads any range of them.

    Args:
        slabs: where the tokens go.
        number: the layer's, for messages.
        rows: for the keys and for the values, the number of rows and the bytes of one token in each.
    """

    def __init__(self, slabs: StripedSlabs, number: int, rows: Sequence[tuple[int, int]]) -> None:
        self._slabs, self._number, self._rows = slabs, number, rows
        self._sizes = [count * size for count, size in rows]  # bytes of one token in all rows
        self._segments: list[_Segment] = []
        self.writes: list[IoFuture] = []  #: those that may be under way

    @property
    def nbytes(self) -> int:
        """Bytes of the tokens in the files."""
        return sum(segment.used for segment in self._segments) * sum(self._sizes)

    def read(self, begin: int, end: int, memory: Memory, transfers: list[IoFuture], priority: Priority) -> int:
        """Starts reads, which it adds to ``transfers``; returns their bytes. Raises OSError."""
        tokens = 0
        for segment in self._segments:
            low, high = max(segment.first, begin), min(segment.stop, end)
            if low < high:
                self._move(segment, low, high, memory, transfers, priority)
                tokens += high - low
        return tokens * sum(self._sizes)

    def write(self, begin: int, end: int, memory: Memory) -> int:
        """Starts to write tokens after those in the files; returns their bytes.

        Raises OSError if the disk is full, and then writes nothing. Earlier writes must have ended.
        """
        self.writes.clear()
        parts: list[tuple[_Segment, int, int]] = []
        at = begin
        if self._segments:
            last = self._segments[-1]
            if last.stop == begin and last.used < last.capacity:
                at = min(end, last.first + last.capacity)
                parts.append((last, begin, at))
        if at < end:
            made = self._allocate(at, end - at)
            self._segments.append(made)
            parts.append((made, at, end))
        try:
            for segment, low, high in parts:
                self._move(segment, low, high, memory, self.writes, Priority.WRITEBACK)
                segment.used = high - segment.first
        except BaseException:
            self.cut(begin)
            raise
        return (end - begin) * sum(self._sizes)

    def cut(self, tokens: int) -> None:
        """Forgets tokens from ``tokens`` on; their space is used again."""
        for transfer in self.writes:
            transfer.exception()
        while self._segments and self._segments[-1].first >= tokens:
            self._free(self._segments.pop())
        if self._segments:
            last = self._segments[-1]
            last.used = min(last.used, tokens - last.first)

    def drop(self, tokens: int) -> None:
        """Forgets tokens before ``tokens`` in whole segments, unless writes are under way."""
        while self._segments and self._segments[0].first + self._segments[0].capacity <= tokens:
            if not all(transfer.done() for transfer in self.writes):
                return
            self._free(self._segments.pop(0))

    def has_failed(self) -> bool:
        """Returns whether one of the latest writes has failed. They must have ended."""
        return any(write.exception() is not None for write in self.writes)

    def _allocate(self, first: int, tokens: int) -> _Segment:
        """Allocates room for ``tokens`` tokens, and for later ones if there is more room."""
        ahead = min(first // 2, _AHEAD // max(1, self._sizes[0])) // tokens * tokens
        if ahead > tokens:
            with contextlib.suppress(OSError):
                return self._made(first, ahead)
        try:
            return self._made(first, tokens)
        except OSError as error:
            if error.errno not in NO_ROOM:
                raise
            raise OSError(
                error.errno,
                f"{os.strerror(error.errno)}: {size_words(tokens * sum(self._sizes))} of keys and values of layer "
                f"{self._number} do not fit beside the {size_words(self._slabs.bytes_in_use)} that this NvmeCache "
                "has in its files",
                error.filename,
            ) from error

    def _made(self, first: int, capacity: int) -> _Segment:
        pieces: tuple[list[Piece], list[Piece]] = ([], [])
        try:
            for mine, size in zip(pieces, self._sizes, strict=True):
                mine += self._slabs.allocate(capacity * size)
        except BaseException:
            for mine in pieces:
                self._slabs.free(mine)
            raise
        return _Segment(first, capacity, 0, pieces)

    def _free(self, segment: _Segment) -> None:
        for pieces in segment.pieces:
            self._slabs.free(pieces)

    def _move(
        self, segment: _Segment, begin: int, end: int, memory: Memory, transfers: list[IoFuture], priority: Priority
    ) -> None:
        halves, base = memory
        moves: list[tuple[Piece, torch.Tensor]] = []
        for pieces, half, (count, size) in zip(segment.pieces, halves, self._rows, strict=True):
            for row in range(count):
                start = (row * segment.capacity + begin - segment.first) * size
                target = half[row, (begin - base) * size : (end - base) * size]
                for piece in _within(pieces, start, start + target.nbytes):
                    moves.append((piece, target[piece.begin : piece.begin + piece.nbytes]))
        self._slabs.move_all(moves, transfers, priority is Priority.WRITEBACK, priority)


def _within(pieces: Sequence[Piece], begin: int, end: int) -> Iterator[Piece]:
    """Yields the pieces with the bytes from ``begin`` to ``end``, as those of a tensor that has only these bytes."""
    for folder, first, nbytes, extent in pieces:
        low, high = max(begin, first), min(end, first + nbytes)
        if low < high:
            yield Piece(folder, low - begin, high - low, Extent(extent.start + low - first, high - low))
