"""``Window``: the weights that are in memory now, those that are on their way, and those that stay."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from nvme_ops._native import native
from nvme_ops.engine import Priority
from nvme_ops.future import IoFuture
from nvme_ops.offload.device_memory import memory_on
from nvme_ops.offload.order import Order, what_stays
from nvme_ops.offload.weights.source import FileExtent, Source, WeightFile
from nvme_ops.settings import ALIGNMENT, PAGE
from nvme_ops.tensors import empty
from nvme_ops.text import size_words

#: An embedding of which a larger share than one of so many rows is used is read as a whole.
MANY_ROWS = 4
_PATIENCE = 60.0  # seconds after which memory that other threads hold is given up


@dataclass
class WindowStats:
    """What a window has read since it was made."""

    bytes_read: int = 0  #: from the files
    bytes_on_demand: int = 0  #: of these, what was not foreseen
    uses: int = 0  #: of weights
    seconds_waited: float = 0.0  #: by computation, for weights that were on their way
    bytes_kept: int = 0  #: of weights that stay in memory
    peak_bytes: int = 0  #: the most memory that weights had at once
    quantization_error: float = 0.0  #: of weights quantized here: root of the mean square, relative to theirs


class _Held:
    """A weight in memory, or on its way there."""

    __slots__ = ("ahead", "memory", "tensor", "transfers")

    def __init__(self, memory: torch.Tensor, tensor: torch.Tensor, transfers: list[IoFuture], ahead: bool) -> None:
        self.memory, self.tensor, self.ahead = memory, tensor, ahead
        self.transfers = transfers  # none of which is left once it has arrived


class Window:
    """Reads weights ahead of their use, into a bounded amount of memory, and keeps those that are worth it.

    Any thread may call any method. A weight that somebody still has a tensor of keeps its memory until that is gone.

    Args:
        budget: bytes of memory for weights, at least ``least_budget`` of them.
        device: where they are used.
        foreseen: weights in the order in which they are likely used.
        others: weights that may be used beside these.
    """

    def __init__(
        self, budget: int, device: torch.device, foreseen: Sequence[Source], others: Sequence[Source] = ()
    ) -> None:
        sizes = [source.room for source in (*foreseen, *others)]
        self._device, self._process = device, os.getpid()
        self._lock = threading.RLock()
        nbytes = max(PAGE, min(budget // PAGE * PAGE, sum(sizes)))
        self._memory = memory_on(device, nbytes)
        self._order = Order(foreseen)
        self._held: dict[Source, _Held] = {}
        self._keep: set[Source] = set()
        self._complete = False  # all that is used is in memory
        self._stats = WindowStats()
        self._closed = False

    @property
    def nbytes(self) -> int:
        """Bytes of memory in all."""
        return self._memory.nbytes

    def fetch(self, source: Source) -> torch.Tensor:
        """Returns the weight as it is stored, and reads ahead what is likely used next. It must not be changed.

        Raises:
            OSError, EOFError: it cannot be read.
            FormatError: its file was changed.
            MemoryError: tensors that the program holds over other weights leave no memory for it.
            ValueError: the window was closed.
        """
        while (tensor := self._arrived(source, self._take(source))) is None:
            pass
        return tensor

    def _take(self, source: Source) -> _Held:
        """Returns the weight, in memory or on its way there; waits for memory where there is none."""
        deadline = 0.0
        while True:
            seen = native().endings()
            with self._lock:
                self._require_open()
                held = self._held.get(source) or self._begin(source, Priority.DEMAND) or self._begin_evicting(source)
                if held is not None:
                    self._note_use(source)
                    return held
            deadline = deadline or time.monotonic() + _PATIENCE
            if source.span > self._memory.nbytes:
                raise MemoryError(
                    f"a weight of {size_words(source.nbytes)} is used as a whole, and the memory_budget leaves "
                    f"{size_words(self._memory.nbytes)} for such"
                )
            if time.monotonic() > deadline:
                raise MemoryError(
                    f"no memory for a weight of {size_words(source.nbytes)}: other weights that are in use have "
                    f"{size_words(self._memory.bytes_in_use)} of {size_words(self._memory.nbytes)}"
                )
            native().wait_for_ending(seen, 1.0)

    def rows(self, source: Source, indices: Sequence[int]) -> torch.Tensor | None:
        """Returns some rows of a matrix in new memory; None where it is better read as a whole."""
        if len(indices) * MANY_ROWS > source.shape[0]:
            return None
        while (held := self._found(source)) is not None:  # which is no use of the whole: it would be read ahead again
            if (tensor := self._arrived(source, held)) is not None:
                return tensor[list(indices)]
        row = source.nbytes // source.shape[0]
        memory = torch.empty((len(indices), *source.shape[1:]), dtype=source.dtype, device=self._device)
        targets, extents = [], []
        for place, index in enumerate(indices):
            parts = source.range(index * row, row)
            if len(parts) != 1:
                return None
            extents += parts
            targets.append(memory[place])
        for transfer in _submit(zip(extents, targets, strict=True)):
            transfer.result()
        with self._lock:
            self._stats.bytes_read += row * len(indices)
            self._stats.bytes_on_demand += row * len(indices)
        return memory

    def stats(self) -> WindowStats:
        """What was read up to now."""
        with self._lock:
            kept = sum(source.nbytes for source in self._keep if source in self._held)
            return WindowStats(**{**vars(self._stats), "bytes_kept": kept, "peak_bytes": self._memory.peak})

    def note_error(self, error: float) -> None:
        """Has ``stats`` tell what quantizing did to the weights."""
        self._stats.quantization_error = error

    def close(self) -> None:
        """Waits for what is on its way; memory goes back with the last tensor over it. Once or more."""
        with self._lock:
            self._closed = True
            held, self._held = list(self._held.values()), {}
        if self._process == os.getpid():
            for each in held:
                for transfer in each.transfers:
                    transfer.exception()

    # Below

    def _require_open(self) -> None:
        if self._closed:
            raise ValueError("the weights of this model were closed")
        if self._process != os.getpid():
            raise RuntimeError("these weights are streamed by the parent process: load the model in this one")

    def _note_use(self, source: Source) -> None:
        self._stats.uses += 1
        self._order.use(source)
        if self._order.round_is_over():
            self._choose()
        if not self._complete:
            self._read_ahead()

    def _choose(self) -> None:
        """Decides anew what stays in memory."""
        self._order.forget_threads()
        weights = [(source, uses, source.room) for source, uses in self._order.by_uses() if uses > 0]
        self._order.forget_some()
        total = sum(nbytes for _, _, nbytes in weights)
        if total <= self._memory.nbytes:
            self._keep = {source for source, _, _ in weights}
            self._complete = all(source in self._held for source in self._keep)
            return
        self._complete = False
        self._keep = what_stays(weights, self._memory.nbytes)

    def _read_ahead(self) -> None:
        """Holds what is kept, what is in use and what comes next, as far as there is memory; lets go of the rest."""
        wanted: list[Source] = []
        always = self._keep | self._order.current()
        room = self._memory.nbytes - sum(source.room for source in always)
        for source in self._order.ahead():
            if source not in always:
                room -= source.room
                if room < 0:
                    break
            wanted.append(source)
        used = always | set(wanted)
        for source in [each for each in self._held if each not in used]:
            self._release(source)
        for source in wanted:
            if source not in self._held and self._begin(source, Priority.PREFETCH) is None:
                break

    def _release(self, source: Source) -> None:
        held = self._held.pop(source)  # what is on its way keeps its memory until it has arrived
        if held.ahead:  # and nobody else will ask how it ended; a thread that waits for it reads it again
            for transfer in held.transfers:
                transfer.request_cancel()

    def _begin_evicting(self, source: Source) -> _Held | None:
        """Makes room: by what is read ahead, from the end, and then by what is kept."""
        current = self._order.current()
        candidates = [each for each in self._held if each not in current]
        ahead = {each: number for number, each in enumerate(self._order.ahead())}
        candidates.sort(key=lambda each: (each in self._keep, -ahead.get(each, len(ahead))))
        for each in [*candidates, *current]:
            if each in self._held:
                self._release(each)
                self._complete = False
                if (held := self._begin(source, Priority.DEMAND)) is not None:
                    return held
        return None

    def _begin(self, source: Source, priority: Priority) -> _Held | None:
        """Starts to read it; None where there is no memory now."""
        skipped, nbytes = source.skipped, source.span
        memory = self._memory.allocate(max(nbytes, 1))
        if memory is None:
            return None
        if skipped or nbytes > source.nbytes:  # whole pages, which need no copy
            file, start, _ = source.extents[0]
            end = min(file.size, start - skipped + nbytes)
            pieces = [(FileExtent(file, start - skipped, end - start + skipped), memory[: end - start + skipped])]
        else:
            starts = _starts(source.extents)
            pieces = [(each, memory[at : at + each.nbytes]) for each, at in zip(source.extents, starts, strict=True)]
        transfers = _submit(pieces, priority)
        self._stats.bytes_read += sum(extent.nbytes for extent, _ in pieces)
        if priority is Priority.DEMAND:
            self._stats.bytes_on_demand += source.nbytes
        values = memory[skipped : skipped + source.nbytes].view(source.dtype).view(source.shape)
        held = _Held(memory, values, transfers, priority is Priority.PREFETCH)
        self._held[source] = held
        return held

    def _found(self, source: Source) -> _Held | None:
        with self._lock:
            self._require_open()
            return self._held.get(source)

    def _arrived(self, source: Source, held: _Held) -> torch.Tensor | None:
        """Waits for a weight; None where reading it ahead failed, which is retried on demand."""
        if not held.transfers:
            return held.tensor
        begin = time.perf_counter()
        try:
            for transfer in list(held.transfers):
                transfer.result()
        except BaseException as error:
            with self._lock:
                if self._held.get(source) is held:
                    del self._held[source]
            again = held.ahead and isinstance(error, Exception)
            del held  # the traceback would keep its memory
            if again:
                return None
            raise
        held.transfers.clear()
        with self._lock:
            self._stats.seconds_waited += time.perf_counter() - begin
        return held.tensor


def least_budget(sources: Sequence[Source]) -> int:
    """Returns the bytes that weights need at least: what one operation takes at once, a matrix and a bias."""
    spans = [(source.room, len(source.shape)) for source in sources]
    largest = max((size for size, _ in spans), default=0)
    return largest + max((size for size, dimensions in spans if dimensions < 2), default=0)


def read_now(sources: Sequence[Source]) -> list[torch.Tensor]:
    """Reads weights into one new memory, which is freed with the last of them."""
    starts: list[int] = []
    size = 0
    for source in sources:
        starts.append(size)
        size += -(-source.nbytes // ALIGNMENT) * ALIGNMENT
    memory = empty(size, dtype=torch.uint8)
    pieces = [
        (extent, memory[at + skipped : at + skipped + extent.nbytes])
        for source, at in zip(sources, starts, strict=True)
        for extent, skipped in zip(source.extents, _starts(source.extents), strict=True)
    ]
    for transfer in _submit(pieces):
        transfer.result()
    return [
        memory[at : at + source.nbytes].view(source.dtype).view(source.shape)
        for source, at in zip(sources, starts, strict=True)
    ]


def _submit(pieces: Iterable[tuple[FileExtent, torch.Tensor]], priority: Priority = Priority.DEMAND) -> list[IoFuture]:
    """Starts to read extents into tensors, all of a file in one call. FormatError when a file was changed."""
    by_file: dict[WeightFile, tuple[list[torch.Tensor], list[int]]] = {}
    for extent, tensor in pieces:
        targets, offsets = by_file.setdefault(extent.file, ([], []))
        targets.append(tensor)
        offsets.append(extent.start)
    for file in by_file:
        file.require_unchanged()
    return [
        file.handle.submit_preadv(targets, file.file, offsets, priority=priority)
        for file, (targets, offsets) in by_file.items()
    ]


def _starts(extents: Iterable[FileExtent]) -> list[int]:
    starts, at = [], 0
    for extent in extents:
        starts.append(at)
        at += extent.nbytes
    return starts
