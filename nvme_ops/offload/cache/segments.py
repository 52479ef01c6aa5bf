"""``Segments``: the keys and values of one layer that are in files, or in host memory beside an accelerator."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from nvme_ops.base.text import size_words
from nvme_ops.io.engine import Priority
from nvme_ops.io.future import IoFuture
from nvme_ops.offload.cache.host_segments import HostSegments, Pair, Part, TokenSegment
from nvme_ops.offload.residency.copies import Copy
from nvme_ops.storage.joined import joined
from nvme_ops.storage.slab import NO_ROOM, Extent
from nvme_ops.storage.striped import Piece, StripedSlabs

_AHEAD = 8 << 20  # bytes of keys for which an extent has room beyond what is written, at most

#: The bytes of each part, keys and values, in memory, ``[rows, bytes]``, and the token at which the rows begin.
Memory = tuple[Sequence[torch.Tensor], int]


class Segments:
    """Writes tokens in their order, in few and large extents, and reads any range of them.

    Args:
        slabs: where the tokens go.
        number: the layer's, for messages.
        rows: for each part, keys and values, the number of rows and the bytes of one token in each.
        page: what is written, and where it begins, is a multiple of so many tokens.
        host: has tokens rather than the files, as far as it has memory.
    """

    def __init__(
        self,
        slabs: StripedSlabs,
        number: int,
        rows: Sequence[tuple[int, int]],
        page: int = 1,
        host: HostSegments | None = None,
    ) -> None:
        self._slabs, self._number, self._rows, self._page, self._host = slabs, number, rows, page, host
        self._sizes = [count * size for count, size in rows]  # bytes of one token in all rows
        self.token_bytes = sum(self._sizes)  #: of all parts
        self._segments: list[TokenSegment] = []
        self.writes: list[IoFuture] = []  #: those that may be under way

    @property
    def nbytes(self) -> int:
        """Bytes of the tokens in the files."""
        return sum(segment.used for segment in self._segments if segment.memory is None) * self.token_bytes

    def first_full(self) -> TokenSegment | None:
        """Returns the first segment in host memory that nothing will be added to."""
        full = (part for part in self._segments if part.memory is not None and part.used == part.capacity)
        return next(full, None)

    def copy(self, begin: int, end: int, memory: Memory) -> Copy | None:
        """Starts to copy what is in host memory."""
        if self._host is None:
            return None
        return self._host.copy_from(
            [(segment, self._pairs(segment, low, high, memory)) for segment, low, high in self._parts(begin, end, True)]
        )

    def await_copies(self) -> None:
        """Waits for copies from host memory and to it."""
        for segment in self._segments:
            segment.await_copy()

    def read(self, begin: int, end: int, memory: Memory, transfers: list[IoFuture], priority: Priority) -> int:
        """Starts to read what is in files, which it adds to ``transfers``; returns the bytes. Raises OSError."""
        tokens = 0
        for segment, low, high in self._parts(begin, end, False):
            self._move(segment, low, high, memory, transfers, priority)
            tokens += high - low
        return tokens * self.token_bytes

    def write(self, begin: int, end: int, memory: Memory, source: torch.Tensor) -> int:
        """Starts to write tokens after those that are there, in ``memory`` of ``source``; returns the bytes for files.

        Raises OSError if the disk is full, and then writes nothing. Earlier writes must have ended.
        """
        self.writes.clear()
        at, nbytes = begin, 0
        copies: list[Part] = []
        try:
            while at < end:
                segment = self._segments[-1] if self._segments else None
                if segment is None or segment.first + segment.capacity <= at:
                    segment = self._allocate(at, end - at)
                    self._segments.append(segment)
                high = min(end, segment.first + segment.capacity)
                if segment.memory is not None:
                    copies.append((segment, self._pairs(segment, at, high, memory)))
                else:
                    self._move(segment, at, high, memory, self.writes, Priority.WRITEBACK)
                    nbytes += (high - at) * self.token_bytes
                segment.used, at = high - segment.first, high
            if self._host is not None:
                self._host.copy_to(copies, source, self.writes)
        except BaseException:
            self.cut(begin)
            raise
        return nbytes

    def store(self, segment: TokenSegment) -> tuple[IoFuture, int]:
        """Starts to write a segment that is in host memory; returns the transfer and its bytes. Raises OSError."""
        transfers: list[IoFuture] = []
        if not segment.pieces:
            segment.pieces = self._pieces(segment.capacity)
        try:
            self._move(segment, segment.first, segment.stop, self._in_host(segment), transfers, Priority.WRITEBACK)
        except BaseException:
            for transfer in transfers:
                transfer.exception()
            raise
        return joined(transfers), segment.used * self.token_bytes

    def cut(self, tokens: int) -> None:
        """Forgets tokens from ``tokens`` on; their space is used again."""
        for transfer in self.writes:
            transfer.exception()
        while self._segments and self._segments[-1].first >= tokens:
            self._free(self._segments.pop())
        if self._segments:
            last = self._segments[-1]
            if last.leaving is not None and tokens < last.stop:  # others may take the place of what is being written
                last.leaving.exception()
                last.leaving = None
            last.used = min(last.used, tokens - last.first)

    def drop(self, tokens: int) -> None:
        """Forgets tokens before ``tokens`` in whole segments, unless writes are under way."""
        while self._segments and self._segments[0].first + self._segments[0].capacity <= tokens:
            if not all(transfer.done() for transfer in self.writes) or not self._segments[0].is_idle():
                return
            self._free(self._segments.pop(0))

    def has_failed(self) -> bool:
        """Returns whether one of the latest writes has failed. They must have ended."""
        return any(write.exception() is not None for write in self.writes)

    def _parts(self, begin: int, end: int, in_host: bool) -> Iterator[tuple[TokenSegment, int, int]]:
        """Yields the segments with tokens ``begin`` to ``end`` in host memory, or in files, and which these are."""
        for segment in self._segments:
            low, high = max(segment.first, begin), min(segment.stop, end)
            if low < high and (segment.memory is not None) == in_host:
                yield segment, low, high

    def _allocate(self, first: int, tokens: int) -> TokenSegment:
        """Allocates room for at least one page of ``tokens`` tokens, and for later ones if there is more room."""
        if self._host is not None:
            nbytes = min(self._host.segment_bytes, max(tokens, first // 4) * self.token_bytes)
            power = 1 << max(0, nbytes.bit_length() - 1)  # as pools count, and in few sizes, which are used again
            segment = TokenSegment(self, first, self._page * max(1, power // (self._page * self.token_bytes)))
            if self._host.take(segment):
                return segment
        ahead = min(first // 2, _AHEAD // max(1, self._sizes[0])) // tokens * tokens
        if ahead > tokens:
            with contextlib.suppress(OSError):
                return self._made(first, ahead)
        return self._made(first, tokens)

    def _made(self, first: int, capacity: int) -> TokenSegment:
        segment = TokenSegment(self, first, capacity)
        segment.pieces = self._pieces(capacity)
        return segment

    def _pieces(self, capacity: int) -> list[list[Piece]]:
        pieces: list[list[Piece]] = [[] for _ in self._sizes]
        try:
            for mine, size in zip(pieces, self._sizes, strict=True):
                mine += self._slabs.allocate(capacity * size)
        except BaseException as error:
            for mine in pieces:
                self._slabs.free(mine)
            if not isinstance(error, OSError) or error.errno not in NO_ROOM:
                raise
            raise OSError(
                error.errno,
                f"{os.strerror(error.errno)}: {size_words(capacity * self.token_bytes)} of keys and values of layer "
                f"{self._number} do not fit beside the {size_words(self._slabs.bytes_in_use)} that this NvmeCache "
                "has in its files",
                error.filename,
            ) from error
        return pieces

    def _free(self, segment: TokenSegment) -> None:
        if segment.leaving is not None:
            segment.leaving.exception()
        if segment.memory is not None and self._host is not None:
            self._host.drop(segment)
        for pieces in segment.pieces:
            self._slabs.free(pieces)

    def _in_host(self, segment: TokenSegment) -> Memory:
        rest: Any = segment.memory
        halves: list[torch.Tensor] = []
        for count, size in self._rows:
            halves.append(rest[: (nbytes := count * size * segment.capacity)].view(count, -1))
            rest = rest[nbytes:]
        return halves, segment.first

    def _pairs(self, segment: TokenSegment, begin: int, end: int, memory: Memory) -> list[Pair]:
        """Returns tokens of a segment in host memory, row by row, each beside its place in other memory."""
        spans = [self._spans(part, begin, end) for part in (self._in_host(segment), memory)]
        return list(zip(*spans, strict=True))

    def _spans(self, memory: Memory, begin: int, end: int) -> Iterator[torch.Tensor]:
        """Yields tokens ``begin`` to ``end`` in each row, part by part."""
        halves, base = memory
        for half, (count, size) in zip(halves, self._rows, strict=True):
            for row in range(count):
                yield half[row, (begin - base) * size : (end - base) * size]

    def _move(
        self, segment: TokenSegment, begin: int, end: int, memory: Memory, transfers: list[IoFuture], priority: Priority
    ) -> None:
        moves: list[tuple[Piece, torch.Tensor]] = []
        spans = self._spans(memory, begin, end)
        for pieces, (count, size) in zip(segment.pieces, self._rows, strict=True):
            for row in range(count):
                start = (row * segment.capacity + begin - segment.first) * size
                target = next(spans)
                for piece in _within(pieces, start, start + target.nbytes):
                    moves.append((piece, target[piece.begin : piece.begin + piece.nbytes]))
        self._slabs.move_all(moves, transfers, priority is Priority.WRITEBACK, priority)


def _within(pieces: Sequence[Piece], begin: int, end: int) -> Iterator[Piece]:
    """Yields the pieces with the bytes from ``begin`` to ``end``, as those of a tensor that has only these bytes."""
    for folder, first, nbytes, extent in pieces:
        low, high = max(begin, first), min(end, first + nbytes)
        if low < high:
            yield Piece(folder, low - begin, high - low, Extent(extent.start + low - first, high - low))
