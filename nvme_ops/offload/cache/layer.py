"""``PagedLayer``: the keys and values of one layer, in memory, below it, or in both."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch

from nvme_ops.base.settings import PAGE
from nvme_ops.io.engine import Priority
from nvme_ops.io.future import IoFuture
from nvme_ops.offload.cache.segments import Memory, Segments
from nvme_ops.offload.residency.entry import Entry, tensors_over
from nvme_ops.storage.joined import joined

_CHUNK = 1 << 20  # bytes that are reordered at once


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


class PagedLayer(Entry):
    """Keys and values of a layer, laid out as attention reads them fastest: the tokens of a head together, and room.

    A page is a number of tokens, such that in each row they fill pages of memory and of a file. Full pages are written
    at most once, the first time that their memory is needed for something else; the tokens of the last, incomplete
    page have a place of their own in memory, the tail, while the others are away. A reordered batch is not written
    again: its order is applied to what is read.

    Args:
        number: the layer's, for messages.
        window: the most tokens that attention sees, the current one included; None: all.
    """

    batch = 0  #: rows; 0 until the shape of the keys and values is known
    device: torch.device  #: where they are used
    files: Segments

    def __init__(self, number: int, window: int | None = None) -> None:
        super().__init__(0)
        self.number, self._window = number, window
        self.recording = False  #: keep tokens that have left the window, for a later ``crop``
        self.clear()

    def clear(self) -> None:
        """Forgets everything, including its shape. It must not be in memory."""
        if self.batch:
            self.files.cut(0)
        self.batch = self.tail_bytes = self.tokens = 0
        self.tail: torch.Tensor | None = None
        self._first = 0  # earlier tokens are not needed any more
        self._written = 0  # tokens before this one are in the files, or on their way; a multiple of a page
        self._safe = 0  # tokens before this one are in the files
        self._reordered: list[_Reordered] = []
        self._base = self._capacity = 0  # the first token in memory, and how many there is room for
        self._read_end = 0  # tokens before this one came from the files
        self._has_arrived = True

    # Its shape

    def shape(self, batch: int, kinds: Sequence[tuple[int, int, torch.dtype]], page_bytes: int) -> None:
        """Sets how many rows there are, and the heads, width and dtype of the keys and of the values.

        A page has at most ``page_bytes``, as far as its alignment allows.
        """
        self.batch = batch
        self._halves = [_Half(*kind, batch * kind[0]) for kind in kinds]
        self._token_bytes = sum(half.nbytes for half in self._halves)
        aligned = math.lcm(*(PAGE // math.gcd(half.row_bytes, PAGE) for half in self._halves))
        self.page = aligned * max(1, page_bytes // (aligned * self._token_bytes))  #: tokens
        self.tail_bytes = self.page * self._token_bytes

    @property
    def kinds(self) -> list[tuple[int, int, torch.dtype]]:
        """Heads, width and dtype of the keys and of the values."""
        return [(half.heads, half.width, half.dtype) for half in self._halves]

    @property
    def rows(self) -> list[tuple[int, int]]:
        """For the keys and for the values, the number of rows and the bytes of one token in each."""
        return [(half.rows, half.row_bytes) for half in self._halves]

    @property
    def bytes_cached(self) -> int:
        """Bytes of the keys and values of the needed tokens."""
        return (self.tokens - self._first) * self._token_bytes if self.batch else 0

    @property
    def bytes_stored(self) -> int:
        """Bytes of keys and values that are in the files."""
        return self.files.nbytes if self.batch else 0

    def memory_needed(self, more: int) -> int:
        """Returns the bytes of memory that all needed and ``more`` tokens take."""
        return max(1, self._page_ceil(self.tokens + more - self._page_floor(self._first)) * self._token_bytes)

    def has_room(self, more: int) -> bool:
        """Returns whether its memory has room for ``more`` tokens."""
        return self.tokens + more - self._base <= self._capacity

    def require_like(self, *given: torch.Tensor) -> None:
        """Raises ValueError unless keys and values have the shape of the tokens before."""
        for half, states in zip(self._halves, given, strict=True):
            if (self.batch, half.heads, half.width) != (states.shape[0], states.shape[1], states.shape[3]):
                raise ValueError(
                    f"layer {self.number} has keys or values of a batch of {self.batch}, {half.heads} heads of "
                    f"{half.width}, and was given {tuple(states.shape)}"
                )

    # In memory

    def append(self, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Adds tokens, for which there is room; returns the keys and values that attention sees."""
        before, after = self.tokens, self.tokens + keys.shape[2]
        for which, states in enumerate((keys, values)):
            self._typed(which)[:, :, before - self._base : after - self._base].copy_(states.detach())
        self.changed = True  # first: with full pages that no file has it must not leave memory
        self.tokens = after
        seen = 0 if self._window is None else max(0, before - self._window + 1)
        visible = self._from(0, seen), self._from(1, seen)
        if not self.recording:
            self._leave_window()
        self._note_changes()
        return visible

    def half(self, half: int) -> torch.Tensor:
        """Returns the keys (0) or the values (1) that are kept, ``[batch, heads, tokens, width]``, in its memory."""
        return self._from(half, self._first)

    def pages(self) -> list[torch.Tensor]:
        """Returns the keys and the values in its memory from the beginning of the first needed page on."""
        return [self._from(half, self._page_floor(self._first)) for half in (0, 1)]

    def move_to(self, memory: torch.Tensor, pages: Sequence[torch.Tensor]) -> None:
        """Copies its ``pages`` to other memory, which has more room."""
        self._place(memory)
        for which, source in enumerate(pages):
            self._typed(which)[:, :, : source.shape[2]].copy_(source)
        self._written = max(self._written, self._base)  # earlier tokens are not needed

    # From and to the files

    def load(self, memory: torch.Tensor, priority: Priority) -> tuple[IoFuture | None, int]:
        """Starts to read all needed tokens into memory; returns the transfer, if any, and its bytes. Raises OSError."""
        reads: list[IoFuture] = []
        self._place(memory)
        self._read_end, self._has_arrived = min(self._written, self.tokens), False
        try:
            self.queued = self.files.copy(self._base, self._read_end, self._in_memory())
            nbytes = self.files.read(self._base, self._read_end, self._in_memory(), reads, priority)
            self._copy_rest(from_tail=True)
        except BaseException:
            self.files.await_copies()  # Ctrl-C may have come before this has them
            self.memory = self.values = None
            raise
        if reads:
            return reads[0] if len(reads) == 1 else joined(reads), nbytes
        if self.queued is None:
            self.arrive()
        return None, 0

    def arrive(self) -> None:
        """Completes what was read, and copied, for which an accelerator waits from then on."""
        if self._has_arrived or self.memory is None:
            return
        if self.queued is not None:
            self.queued.before(self.memory.device)
        self._has_arrived = True
        for first, last, rows in self._reordered:
            self._reorder_tokens(max(first, self._base), min(last, self._read_end), rows)
        self._cut(self._page_floor(self.tokens))
        self._note_changes()

    def store(self) -> tuple[IoFuture, int]:
        """Starts to write full pages that are not in the files; returns the transfer and its bytes.

        Raises OSError if the disk is full.
        """
        if self.files.has_failed():  # they are in memory still
            self.files.cut(self._safe)
            self._written = min(self._written, self._safe)
        self._safe = self._written
        begin, end = self._unwritten()
        nbytes = self.files.write(begin, end, self._in_memory(), self._there())
        self._written = end
        self._note_changes()
        return joined(list(self.files.writes)), nbytes

    def leave_memory(self) -> None:
        """Keeps in the tail what is not in the files, where all full pages are."""
        self._safe = self._written = max(self._written, self._page_floor(self._first))
        self._copy_rest(from_tail=False)

    def _copy_rest(self, from_tail: bool) -> None:
        count = self.tokens - self._written
        for half in (0, 1) if count > 0 and self.tail is not None else ():
            ours = self._typed(half)[:, :, self._written - self._base : self.tokens - self._base]
            tail = self._typed(half, self.tail, self.page)[:, :, :count]
            target, source = (ours, tail) if from_tail else (tail, ours)
            target.copy_(source)

    def _unwritten(self) -> tuple[int, int]:
        return max(self._written, self._page_floor(self._first)), self._page_floor(self.tokens)

    def _note_changes(self) -> None:
        begin, end = self._unwritten()
        self.changed = self.memory is not None and begin < end

    # Changes, while no transfer is under way

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
        self.tokens = tokens
        if self.memory is not None:
            self._cut(self._page_floor(tokens))
        self._leave_window()
        self._note_changes()

    def reorder(self, rows: torch.Tensor) -> None:
        """Makes row ``rows[i]`` of the batch its row i; ``rows``, of the batch's size, is on the CPU."""
        reordered: list[_Reordered] = []
        at = 0
        for first, last, before in [*self._reordered, _Reordered(self._written, self._written, rows)]:
            parts = [_Reordered(at, first, rows), _Reordered(first, last, before[rows])]
            for part in parts:
                if part.first == part.last:
                    continue
                if reordered and reordered[-1].last == part.first and torch.equal(reordered[-1].rows, part.rows):
                    reordered[-1] = _Reordered(reordered[-1].first, part.last, part.rows)
                else:
                    reordered.append(part)
            at = last
        self._reordered = reordered
        if self.memory is not None:
            self._reorder_tokens(self._base, self.tokens, rows)
        elif self.tail is not None:
            self._reorder_memory(self.tail, self.page, 0, self.tokens - self._written, rows)

    def select(
        self, rows: torch.Tensor, old: Sequence[torch.Tensor], memory: torch.Tensor, tail: torch.Tensor, files: Segments
    ) -> None:
        """Goes on with these rows of ``old``, its halves, in other memory and files, of the ``shape`` set before."""
        self.files.cut(0)
        self.files, self._reordered, self.tail = files, [], tail
        self._place(memory)
        self._written = self._safe = self._base
        for half, source in enumerate(old):
            target, indices = self.half(half), rows.to(memory.device)
            for begin in range(0, source.shape[2], step := self._chunk(half)):
                part = source[:, :, begin : begin + step].index_select(0, indices)
                target[:, :, begin : begin + step].copy_(part)
        self._note_changes()

    # Below

    def _page_floor(self, tokens: int) -> int:
        return tokens // self.page * self.page

    def _page_ceil(self, tokens: int) -> int:
        return -(-tokens // self.page) * self.page

    def _place(self, memory: torch.Tensor) -> None:
        self.memory = self.values = memory
        self._base, self._capacity = self._page_floor(self._first), memory.nbytes // self._token_bytes
        self.own_tensors = tensors_over(memory)

    def _there(self) -> torch.Tensor:
        if self.memory is None:
            raise RuntimeError(f"layer {self.number} is not in memory")
        return self.memory

    def _in_memory(self) -> Memory:
        memory = self._there()
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
            memory, capacity = self._there(), self._capacity
        heads, width, dtype, _ = self._halves[half]
        return self._part(half, memory, capacity).view(dtype).view(self.batch, heads, capacity, width)

    def _from(self, half: int, first: int) -> torch.Tensor:
        """Returns keys or values from token ``first`` on."""
        return self._typed(half)[:, :, first - self._base : self.tokens - self._base]

    def _chunk(self, half: int) -> int:
        """Returns how many tokens are reordered at once."""
        return max(1, _CHUNK // max(1, self._halves[half].nbytes))

    def _reorder_tokens(self, first: int, last: int, rows: torch.Tensor) -> None:
        """Reorders the batch of tokens ``first`` to ``last`` in memory."""
        self._reorder_memory(self._there(), self._capacity, first - self._base, last - self._base, rows)

    def _reorder_memory(self, memory: torch.Tensor, capacity: int, begin: int, end: int, rows: torch.Tensor) -> None:
        indices = rows.to(memory.device)
        for half in (0, 1):
            tokens = self._typed(half, memory, capacity)
            for at in range(begin, end, step := self._chunk(half)):
                part = tokens[:, :, at : min(end, at + step)]
                part.copy_(part.index_select(0, indices))

    def _leave_window(self) -> None:
        if self._window is None:
            return
        self._first = max(self._first, self.tokens - self._window + 1)
        gone = self._page_floor(self._first)
        self._reordered = [part for part in self._reordered if part.last > gone]
        self.files.drop(gone)

    def _cut(self, tokens: int) -> None:
        """Forgets the part of the files from token ``tokens`` on, which is in memory."""
        if tokens < self._written:
            self._written, self._safe = tokens, min(self._safe, tokens)
            self._reordered = [
                _Reordered(first, min(last, tokens), rows) for first, last, rows in self._reordered if first < tokens
            ]
            self.files.cut(tokens)
