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


#: Heads, width and dtype of keys or values.
Kind = tuple[int, int, torch.dtype]


class PageLayout:
    """How keys, values and what belongs to them lie in memory: part by part, in each the tokens of a head together.

    Args:
        batch: rows.
        kinds: of the parts.
    """

    def __init__(self, batch: int, kinds: Sequence[Kind]) -> None:
        self.batch, self.kinds = batch, list(kinds)
        #: For each part, the number of rows, and the bytes of one token in each.
        self.rows = [(batch * heads, width * dtype.itemsize) for heads, width, dtype in kinds]
        self._sizes = [count * size for count, size in self.rows]
        self.token_bytes = sum(self._sizes)  #: of one token in all parts

    @property
    def aligned(self) -> int:
        """The fewest tokens that fill pages of memory and of a file in each row."""
        return math.lcm(*(PAGE // math.gcd(size, PAGE) for _, size in self.rows))

    def bytes_in(self, memory: torch.Tensor, capacity: int) -> list[torch.Tensor]:
        """Returns the bytes of each part, ``[rows, bytes]``, in memory that has room for ``capacity`` tokens."""
        return [
            part.view(count, capacity * size)
            for part, (count, size) in zip(self._parts_of(memory, capacity), self.rows, strict=True)
        ]

    def parts_in(self, memory: torch.Tensor, capacity: int) -> list[torch.Tensor]:
        """Returns each part, ``[batch, heads, capacity, width]``."""
        return [
            part.view(dtype).view(self.batch, heads, capacity, width)
            for part, (heads, width, dtype) in zip(self._parts_of(memory, capacity), self.kinds, strict=True)
        ]

    def _parts_of(self, memory: torch.Tensor, capacity: int) -> Sequence[torch.Tensor]:
        return torch.split(memory[: capacity * self.token_bytes], [capacity * size for size in self._sizes])

    def reorder(self, memory: torch.Tensor, capacity: int, begin: int, end: int, rows: torch.Tensor) -> None:
        """Makes row ``rows[i]`` of the batch its row i, of some of the tokens in memory."""
        indices = rows.to(memory.device)
        for part in self.parts_in(memory, capacity):
            for some in part[:, :, begin : max(begin, end)].split(_tokens_at_once(part), dim=2):
                some.copy_(some.index_select(0, indices))


def _tokens_at_once(tokens: torch.Tensor) -> int:
    """Returns how many tokens of ``[batch, heads, tokens, width]`` are reordered at once."""
    return max(1, _CHUNK // max(1, tokens[:, :, :1].nbytes))


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
    layout: PageLayout  #: of keys and values as attention sees them
    stored: PageLayout  #: of what is in its memory and in the files
    page: int  #: tokens
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

    def shape(self, batch: int, kinds: Sequence[Kind], page_bytes: int) -> None:
        """Sets how many rows there are, and the kinds of the keys and of the values.

        A page has at most ``page_bytes``, as far as its alignment allows.
        """
        self.batch, self.layout = batch, PageLayout(batch, kinds)
        self.stored, aligned = self.layout, self.layout.aligned
        self.page = aligned * max(1, page_bytes // (aligned * self.stored.token_bytes))
        self.tail_bytes = self.page * self.stored.token_bytes

    @property
    def bytes_cached(self) -> int:
        """Bytes of the keys and values of the needed tokens."""
        return (self.tokens - self._first) * self.stored.token_bytes if self.batch else 0

    @property
    def bytes_stored(self) -> int:
        """Bytes of keys and values that are in the files."""
        return self.files.nbytes if self.batch else 0

    def memory_needed(self, more: int) -> int:
        """Returns the bytes of memory that all needed and ``more`` tokens take."""
        return max(1, self._page_ceil(self.tokens + more - self._page_floor(self._first)) * self.stored.token_bytes)

    def has_room(self, more: int) -> bool:
        """Returns whether its memory has room for ``more`` tokens."""
        return self.tokens + more - self._base <= self._capacity

    def require_like(self, *given: torch.Tensor) -> None:
        """Raises ValueError unless keys and values have the shape of the tokens before."""
        for (heads, width, _), states in zip(self.layout.kinds, given, strict=True):
            if (self.batch, heads, width) != (states.shape[0], states.shape[1], states.shape[3]):
                raise ValueError(
                    f"layer {self.number} has keys or values of a batch of {self.batch}, {heads} heads of "
                    f"{width}, and was given {tuple(states.shape)}"
                )

    # In memory

    def expanded_bytes(self, nbytes: int) -> int:
        """Returns the bytes of memory that ``expand`` fills if its own has ``nbytes``; 0: attention sees its own."""
        del nbytes
        return 0

    def expand(self, memory: torch.Tensor) -> None:
        """Fills other memory with keys and values as attention sees them."""
        raise NotImplementedError

    def append(
        self, keys: torch.Tensor, values: torch.Tensor, memory: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Adds tokens, for which there is room; returns the keys and values that attention sees, in ``memory``."""
        before, after = self.tokens, self.tokens + keys.shape[2]
        parts = self.layout.parts_in(memory, self._capacity)
        for part, states in zip(parts, (keys, values), strict=True):
            part[:, :, before - self._base : after - self._base].copy_(states.detach())
        self.changed = True  # first: with full pages that no file has it must not leave memory
        self._keep(before, after, parts)
        self.tokens = after
        seen = self._first_seen(before) - self._base
        visible_keys, visible_values = (part[:, :, seen : after - self._base] for part in parts)
        if not self.recording:
            self._leave_window()
        self._note_changes()
        return visible_keys, visible_values

    def half(self, half: int, memory: torch.Tensor) -> torch.Tensor:
        """Returns the keys (0) or the values (1) that are kept, ``[batch, heads, tokens, width]``, in ``memory``."""
        part = self.layout.parts_in(memory, self._capacity)[half]
        return part[:, :, self._first - self._base : self.tokens - self._base]

    def content(self) -> list[torch.Tensor]:
        """Returns all that it has of the needed tokens, ``[batch, heads, tokens, width]``."""
        return [self.half(half, self._there()) for half in (0, 1)]

    def pages(self) -> list[torch.Tensor]:
        """Returns what is in its memory, part by part, from the beginning of the first needed page on."""
        first = self._page_floor(self._first) - self._base
        return [part[:, :, first : self._stop - self._base] for part in self._parts()]

    def move_to(self, memory: torch.Tensor, pages: Sequence[torch.Tensor]) -> None:
        """Copies its ``pages`` to other memory, which has more room."""
        parts = self.stored.parts_in(memory, memory.nbytes // self.stored.token_bytes)
        for target, source in zip(parts, pages, strict=True):  # first: Ctrl-C must not leave other memory without them
            target[:, :, : source.shape[2]].copy_(source)
        self._place(memory)
        self._written = max(self._written, self._base)  # earlier tokens are not needed

    # From and to the files

    def load(self, memory: torch.Tensor, priority: Priority) -> tuple[IoFuture | None, int]:
        """Starts to read all needed tokens into memory; returns the transfer, if any, and its bytes. Raises OSError."""
        reads: list[IoFuture] = []
        try:
            self._place(memory)
            self._read_end, self._has_arrived = min(self._written, self._stop), False
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
        if (count := self.tokens - self._written) <= 0 or self.tail is None:
            return
        for part, tail in zip(self._parts(), self.layout.parts_in(self.tail, self.page), strict=True):
            ours = part[:, :, self._written - self._base : self.tokens - self._base]
            target, source = (ours, tail[:, :, :count]) if from_tail else (tail[:, :, :count], ours)
            target.copy_(source)

    def _unwritten(self) -> tuple[int, int]:
        return max(self._written, self._page_floor(self._first)), self._page_floor(self._stop)

    def _note_changes(self) -> None:
        begin, end = self._unwritten()
        self.changed = self.memory is not None and begin < end

    # Changes, while no transfer is under way

    def crop(self, tokens: int) -> None:
        """Forgets all but the first ``tokens`` tokens. Reads and writes nothing.

        Raises RuntimeError if tokens that would be in the window again have been forgotten.
        """
        if self._page_floor(self._first_seen(tokens)) < self._page_floor(self._first):
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
            self._reorder_tokens(self._base, self._stop, rows)
        self._reorder_tail(rows)

    def select(
        self, rows: torch.Tensor, old: Sequence[torch.Tensor], memory: torch.Tensor, tail: torch.Tensor, files: Segments
    ) -> None:
        """Goes on with these rows of ``old``, its content, in other memory and files, of the ``shape`` set before."""
        self.files.cut(0)
        self.files, self._reordered, self.tail = files, [], tail
        self._place(memory)
        self._written = self._safe = self._base
        indices = rows.to(memory.device)
        for target, source in zip(self.content(), old, strict=True):
            parts = (tokens.split(_tokens_at_once(source), dim=2) for tokens in (target, source))
            for to, some in zip(*parts, strict=True):
                to.copy_(some.index_select(0, indices))
        self._note_changes()

    # Below

    def _page_floor(self, tokens: int) -> int:
        return tokens // self.page * self.page

    def _page_ceil(self, tokens: int) -> int:
        return -(-tokens // self.page) * self.page

    def _place(self, memory: torch.Tensor) -> None:
        base, own = self._page_floor(self._first), tensors_over(memory)
        capacity = memory.nbytes // self.stored.token_bytes
        self.memory = self.values = memory  # all or none of these: nothing is called from here on
        self._base, self._capacity, self.own_tensors = base, capacity, own

    def _there(self) -> torch.Tensor:
        if self.memory is None:
            raise RuntimeError(f"layer {self.number} is not in memory")
        return self.memory

    @property
    def _stop(self) -> int:
        """The first token that has no place in its memory."""
        return self.tokens

    def _keep(self, before: int, after: int, parts: Sequence[torch.Tensor]) -> None:
        """Keeps tokens ``before`` to ``after``, which are added, if ``parts`` are not in its own memory."""

    def _first_seen(self, tokens: int) -> int:
        """Returns the first token that attention sees after ``tokens`` tokens."""
        return 0 if self._window is None else max(0, tokens - self._window + 1)

    def _in_memory(self) -> Memory:
        return self.stored.bytes_in(self._there(), self._capacity), self._base

    def _parts(self) -> list[torch.Tensor]:
        return self.stored.parts_in(self._there(), self._capacity)

    def _reorder_tokens(self, first: int, last: int, rows: torch.Tensor) -> None:
        """Reorders the batch of tokens ``first`` to ``last`` in memory."""
        self.stored.reorder(self._there(), self._capacity, first - self._base, last - self._base, rows)

    def _reorder_tail(self, rows: torch.Tensor) -> None:
        """Reorders the batch of the tokens that only the tail has."""
        if self.memory is None and self.tail is not None:
            self.layout.reorder(self.tail, self.page, 0, self.tokens - self._written, rows)

    def _leave_window(self) -> None:
        if self._window is None:
            return
        self._first = max(self._first, self._first_seen(self.tokens))
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
