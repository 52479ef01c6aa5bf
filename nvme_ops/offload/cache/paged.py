"""The keys and values of one layer: in memory, in files, or in both."""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch

from nvme_ops.base.errors import note
from nvme_ops.base.settings import PAGE
from nvme_ops.base.text import size_words
from nvme_ops.io.engine import Priority
from nvme_ops.io.future import IoFuture
from nvme_ops.storage.slab import NO_ROOM, Extent
from nvme_ops.storage.striped import Piece, StripedSlabs

if TYPE_CHECKING:
    from nvme_ops.offload.cache.pager import Pager

_CHUNK = 1 << 20  # bytes that are reordered at once
_AHEAD = 8 << 20  # bytes of keys for which an extent has room beyond what is written, at most

#: The bytes of keys and of values in memory, ``[rows, bytes]`` each, and the token at which the rows begin.
Memory = tuple[Sequence[torch.Tensor], int]


class _Half(NamedTuple):
    """The shape of the keys, or of the values."""

    heads: int
    width: int
    dtype: torch.dtype
    rows: int  # heads in the whole batch

    @property
    def row_bytes(self) -> int:
        """Bytes of one token in one row."""
        return self.width * self.dtype.itemsize

    @property
    def nbytes(self) -> int:
        """Bytes of one token in all rows."""
        return self.rows * self.row_bytes


class _Reordered(NamedTuple):
    """Tokens whose batch has been reordered since they were written: row ``rows[i]`` in the file is row i now."""

    first: int
    last: int
    rows: torch.Tensor


class PagedLayer:
    """Keys and values of a layer, laid out as attention reads them fastest: the tokens of a head together, and room.

    A page is a number of tokens, such that in each row they fill pages of memory and of a file. Full pages are written
    at most once, the first time that their memory is needed for something else; the tokens of the last, incomplete
    page, the tail, stay in memory. A reordered batch is not written again: its order is applied to what is read.

    Args:
        pager: has the memory and the files.
        number: the layer's, for messages.
        window: the most tokens that attention sees, the current one included; None: all.
    """

    def __init__(self, pager: Pager, number: int, window: int | None = None) -> None:
        self._pager, self.number, self._window = pager, number, window
        self.recording = False  # keep tokens that have left the window, for a later ``crop``
        self.tail_bytes = 0
        self.batch = 0
        self._tail: torch.Tensor | None = None
        self._clear()

    def _clear(self) -> None:
        self.tokens = 0
        self._first = 0  # earlier tokens are not needed any more
        self._written = 0  # tokens before this one are in the files; a multiple of a page
        self._reordered: list[_Reordered] = []
        self._files: Segments | None = None
        self._memory: torch.Tensor | None = None
        self._base = self._capacity = 0  # the first token in memory, and how many there is room for
        self._arriving = False  # tokens in the files are being read, up to ``_read_end``
        self._read_end = 0
        self._reads: list[IoFuture] = []

    # State

    @property
    def started(self) -> bool:
        """Whether the shape of the keys and values is known."""
        return self.batch > 0

    @property
    def resident(self) -> bool:
        """Whether all needed tokens are in memory, or being read."""
        return self._memory is not None

    @property
    def memory_bytes(self) -> int:
        """Bytes of its memory, without the tail."""
        return 0 if self._memory is None else self._memory.nbytes

    @property
    def nbytes(self) -> int:
        """Bytes of the keys and values of the needed tokens."""
        return (self.tokens - self._first) * self._token_bytes if self.started else 0

    @property
    def bytes_stored(self) -> int:
        """Bytes of keys and values that are in the files."""
        return self._files.nbytes if self._files else 0

    def memory_needed(self, more: int) -> int:
        """Returns the bytes of memory that all needed and ``more`` tokens take."""
        return self._page_ceil(self.tokens + more - self._page_floor(self._first)) * self._token_bytes

    def start(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Takes shapes and dtypes from keys and values, ``[batch, heads, tokens, width]``. Raises as ``append``."""
        self.device = keys.device
        self._shape(keys.shape[0], [(each.shape[1], each.shape[3], each.dtype) for each in (keys, values)])
        try:
            self._tail = self._pager.lease(self.tail_bytes, self)
        except BaseException:
            self.batch = self.tail_bytes = 0
            raise
        self._files = self._new_files()

    def _new_files(self) -> Segments:
        return Segments(self._pager.slabs, self.number, [(half.rows, half.row_bytes) for half in self._halves])

    def _shape(self, batch: int, kinds: Sequence[tuple[int, int, torch.dtype]]) -> None:
        self.batch = batch
        self._halves = [_Half(*kind, batch * kind[0]) for kind in kinds]
        self._token_bytes = sum(half.nbytes for half in self._halves)
        aligned = math.lcm(*(PAGE // math.gcd(half.row_bytes, PAGE) for half in self._halves))
        self._page = aligned * max(1, self._pager.page_bytes // (aligned * self._token_bytes))
        self.tail_bytes = self._page * self._token_bytes

    # Use

    def append(self, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Adds tokens; returns the keys and values that attention sees: on the CPU views, elsewhere copies.

        Raises:
            MemoryError: they do not fit the budget.
            OSError: the disk is full, or a read or a write failed. The layer is as it was.
            ValueError: the shape is not that of the tokens before.
        """
        if not self.started:
            self.start(keys, values)
        for half, given in zip(self._halves, (keys, values), strict=True):
            if (self.batch, half.heads, half.width) != (given.shape[0], given.shape[1], given.shape[3]):
                raise ValueError(
                    f"layer {self.number} has keys or values of a batch of {self.batch}, {half.heads} heads of "
                    f"{half.width}, and was given {tuple(given.shape)}"
                )
        more = keys.shape[2]
        self._make_room(more)
        before, self.tokens = self.tokens, self.tokens + more
        seen = 0 if self._window is None else max(0, before - self._window + 1)
        for which, states in enumerate((keys, values)):
            self._typed(which)[:, :, before - self._base : self.tokens - self._base].copy_(states.detach())
        found = self._view(0, seen), self._view(1, seen)
        if not self.recording:
            self._leave_window()
        return found

    def half(self, half: int) -> torch.Tensor:
        """Returns the keys (0) or the values (1) that are kept."""
        self._make_room(0)
        return self._view(half, self._first)

    def _make_room(self, more: int) -> None:
        """Brings all needed tokens into memory, with room for ``more``. Raises as ``append`` does."""
        if self._memory is None:
            self.load(self._pager.lease(max(1, self.memory_needed(more)), self), Priority.DEMAND)
        self.arrive()
        if self.tokens + more - self._base <= self._capacity:
            return
        nbytes = self.memory_needed(more)
        try:
            memory = self._pager.lease(nbytes, self)
        except MemoryError:  # there is no room beside the old memory
            self.evict()
            self.load(self._pager.lease(nbytes, self), Priority.DEMAND)
            self.arrive()
            return
        base = self._page_floor(self._first)
        old = [self._typed(half)[:, :, base - self._base : self.tokens - self._base] for half in (0, 1)]
        self._place(memory, base)
        for half, source in enumerate(old):
            self._typed(half)[:, :, : source.shape[2]].copy_(source)
        self._written = max(self._written, base)  # earlier tokens are not needed

    def load(self, memory: torch.Tensor, priority: Priority) -> None:
        """Starts to read all needed tokens into ``memory``. Raises OSError."""
        self._place(memory, self._page_floor(self._first))
        self._arriving, self._read_end = True, min(self._written, self.tokens)
        try:
            if self._files is not None:
                count = self._files.read(self._base, self._read_end, self._in_memory(), self._reads, priority)
                self._pager.moved.bytes_read += count
                self._pager.moved.bytes_on_demand += count * (priority is Priority.DEMAND)
        except BaseException:
            self._memory, self._arriving = None, False
            raise
        if self.tokens > self._written and self._tail is not None:
            for half in (0, 1):
                count = self.tokens - self._written
                self._typed(half)[:, :, self._written - self._base : self.tokens - self._base].copy_(
                    self._typed(half, self._tail, self._page)[:, :, :count]
                )

    def arrive(self) -> None:
        """Waits for the reads of ``load``. Raises OSError or EOFError; then it can be loaded again."""
        if not self._arriving:
            return
        self._arriving = False
        try:
            self._pager.wait(self._reads)
        except BaseException:
            self._memory = None
            raise
        finally:
            self._reads = []
        for first, last, rows in self._reordered:
            self._reorder_tokens(max(first, self._base), min(last, self._read_end), rows)
        self._cut(self._page_floor(self.tokens))

    def evict(self) -> list[IoFuture]:
        """Releases its memory, writing full pages that are not in the files. Returns writes that may be under way.

        Raises OSError if the disk is full, or a read or a write failed; the layer is then as it was.
        """
        self.arrive()
        begin, end = max(self._written, self._page_floor(self._first)), self._page_floor(self.tokens)
        if begin < end and (files := self._files) is not None:
            self._pager.moved.bytes_written += files.write(begin, end, self._in_memory())
        self._written = max(self._written, begin, end)
        for half in (0, 1):
            rest = self._typed(half)[:, :, self._written - self._base : self.tokens - self._base]
            if self._tail is not None:
                self._typed(half, self._tail, self._page)[:, :, : rest.shape[2]].copy_(rest)
        self._memory = None
        return list(self._files.writes) if self._files else []

    # Changes

    def crop(self, tokens: int) -> None:
        """Forgets all but the first ``tokens`` tokens. Reads and writes nothing.

        Raises RuntimeError if tokens that would be in the window again have been forgotten.
        """
        first = 0 if self._window is None else max(0, tokens - self._window + 1)
        if self._page_floor(first) < self._page_floor(self._first):
            raise RuntimeError(
                f"layer {self.number} has forgotten the tokens before its window of {self._window}: "
                "call activate_past_recording() before what is to be undone"
            )
        self.arrive()
        self.tokens = tokens
        if self._memory is not None:
            self._cut(self._page_floor(tokens))
        self._leave_window()

    def reorder(self, rows: torch.Tensor) -> None:
        """Makes row ``rows[i]`` of the batch its row i; ``rows`` is on the CPU. Writes nothing if the size stays."""
        if not self.tokens or torch.equal(rows, torch.arange(self.batch, device="cpu")):
            return
        if len(rows) != self.batch:
            self._select(rows)
            return
        self.arrive()
        found: list[_Reordered] = []
        at = 0
        for first, last, before in [*self._reordered, _Reordered(self._written, self._written, rows)]:
            parts = [_Reordered(at, first, rows), _Reordered(first, last, before[rows])]
            for each in parts:
                if each.first == each.last:
                    continue
                if found and found[-1].last == each.first and torch.equal(found[-1].rows, each.rows):
                    found[-1] = _Reordered(found[-1].first, each.last, each.rows)
                else:
                    found.append(each)
            at = last
        self._reordered = found
        if self._memory is not None:
            self._reorder_tokens(self._base, self.tokens, rows)
        elif self._tail is not None:
            self._reorder_memory(self._tail, self._page, 0, self.tokens - self._written, rows)

    def _select(self, rows: torch.Tensor) -> None:
        """Reorders into new memory, for another size of the batch."""
        self._make_room(0)
        old = [self._typed(half)[:, :, self._first - self._base : self.tokens - self._base] for half in (0, 1)]
        before = self.batch
        kinds = [(half.heads, half.width, half.dtype) for half in self._halves]
        self._shape(len(rows), kinds)
        try:
            memory = self._pager.lease(max(1, self.memory_needed(0)), self)
            tail = self._pager.lease(self.tail_bytes, self)
        except BaseException:
            self._shape(before, kinds)
            raise
        if self._files is not None:
            self._files.cut(0)
        self._files = self._new_files()
        self._reordered = []
        self._tail = tail
        self._place(memory, self._page_floor(self._first))
        self._written = self._base
        for half, source in enumerate(old):
            target = self._typed(half)[:, :, self._first - self._base : self.tokens - self._base]
            for begin in range(0, source.shape[2], step := self._chunk(half)):
                part = source[:, :, begin : begin + step].index_select(0, rows)
                target[:, :, begin : begin + step].copy_(part)

    def reset(self) -> None:
        """Forgets everything, including its shape."""
        for transfer in self._reads:
            transfer.exception()
        if self._files is not None:
            self._files.cut(0)
        self._clear()
        self.batch = self.tail_bytes = 0
        self._tail = None

    # Below

    def _page_floor(self, tokens: int) -> int:
        return tokens // self._page * self._page

    def _page_ceil(self, tokens: int) -> int:
        return -(-tokens // self._page) * self._page

    def _place(self, memory: torch.Tensor, base: int) -> None:
        self._memory, self._base, self._capacity = memory, base, memory.nbytes // self._token_bytes

    def _in_memory(self) -> Memory:
        memory = self._present()
        halves = [
            self._part(which, memory, self._capacity).view(half.rows, self._capacity * half.row_bytes)
            for which, half in enumerate(self._halves)
        ]
        return halves, self._base

    def _part(self, half: int, memory: torch.Tensor, capacity: int) -> torch.Tensor:
        """Returns the bytes of the keys or the values in memory that has room for ``capacity`` tokens."""
        begin = half * capacity * self._halves[0].nbytes
        return memory[begin : begin + capacity * self._halves[half].nbytes]

    def _typed(self, half: int, memory: torch.Tensor | None = None, capacity: int = 0) -> torch.Tensor:
        """Returns the keys or the values in memory, ``[batch, heads, capacity, width]``."""
        if memory is None:
            memory, capacity = self._present(), self._capacity
        heads, width, dtype, _ = self._halves[half]
        return self._part(half, memory, capacity).view(dtype).view(self.batch, heads, capacity, width)

    def _present(self) -> torch.Tensor:
        if self._memory is None:
            raise RuntimeError(f"layer {self.number} is not in memory")
        return self._memory

    def _view(self, half: int, first: int) -> torch.Tensor:
        """Returns keys or values from token ``first`` on, ``[batch, heads, tokens, width]``, on their device."""
        return self._typed(half)[:, :, first - self._base : self.tokens - self._base].to(self.device)

    def _chunk(self, half: int) -> int:
        """Returns how many tokens are reordered at once."""
        return max(1, _CHUNK // max(1, self._halves[half].nbytes))

    def _reorder_tokens(self, first: int, last: int, rows: torch.Tensor) -> None:
        """Reorders the batch of tokens ``first`` to ``last`` in memory."""
        self._reorder_memory(self._present(), self._capacity, first - self._base, last - self._base, rows)

    def _reorder_memory(self, memory: torch.Tensor, capacity: int, begin: int, end: int, rows: torch.Tensor) -> None:
        for half in (0, 1):
            tokens = self._typed(half, memory, capacity)
            for at in range(begin, end, step := self._chunk(half)):
                part = tokens[:, :, at : min(end, at + step)]
                part.copy_(part.index_select(0, rows))

    def _leave_window(self) -> None:
        if self._window is None:
            return
        self._first = max(self._first, self.tokens - self._window + 1)
        gone = self._page_floor(self._first)
        self._reordered = [each for each in self._reordered if each.last > gone]
        if self._files is not None:
            self._files.drop(gone)

    def _cut(self, tokens: int) -> None:
        """Forgets the part of the files from token ``tokens`` on, which is in memory."""
        if tokens < self._written:
            self._written = tokens
            self._reordered = [
                _Reordered(first, min(last, tokens), rows) for first, last, rows in self._reordered if first < tokens
            ]
            if self._files is not None:
                self._files.cut(tokens)


# The part in files


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
        """Starts reads, which it adds to ``transfers``; returns their bytes. Raises OSError if a write has failed."""
        self.settle()
        tokens = 0
        for segment in self._segments:
            low, high = max(segment.first, begin), min(segment.stop, end)
            if low < high:
                self._move(segment, low, high, memory, transfers, priority)
                tokens += high - low
        return tokens * sum(self._sizes)

    def write(self, begin: int, end: int, memory: Memory) -> int:
        """Starts to write tokens after those in the files; returns their bytes.

        Raises OSError if the disk is full, and then writes nothing, or if an earlier write has failed.
        """
        self.settle()
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
        for segment, low, high in parts:
            self._move(segment, low, high, memory, self.writes, Priority.WRITEBACK)
            segment.used = high - segment.first
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

    def settle(self) -> None:
        """Waits for the writes. Raises OSError if one failed: its tokens are lost."""
        for transfer in self.writes:
            if (failure := transfer.exception()) is not None:
                if not hasattr(failure, "__notes__"):
                    note(failure, f"keys and values of layer {self._number} are lost: reset() the NvmeCache")
                raise failure
        self.writes.clear()

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
