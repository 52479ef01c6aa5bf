"""``Ring``: the package's pipeline. While storage fills or empties one buffer, the program uses another.

ring = Ring()
for piece in ring.read(handle, places): checksum(piece)     # while the next ones are read
for piece in ring.write(handle, file, pieces): ...          # copies that are being written
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar

import torch

from nvme_ops.base.settings import ALIGNMENT, LARGE, PAGE, PIECE, RING_DEPTH
from nvme_ops.io.engine import Priority
from nvme_ops.io.future import IoFuture
from nvme_ops.io.handle import aio_handle
from nvme_ops.io.tensors import copy_bytes, empty
from nvme_ops.memory.pool import can_pin

if TYPE_CHECKING:
    from nvme_ops.io.arguments import FileName


_Item = TypeVar("_Item")
_READS = 2  # in flight of ``update``: they share the rate of storage, so more would delay the one that is needed first


class Lender(Protocol):
    """Supplies buffers, as a ``Pool`` does."""

    @property
    def largest(self) -> int:
        """Bytes of the largest one."""

    def lease(self, nbytes: int, timeout: float | None = None) -> Any:
        """Returns what has one as its ``tensor``, and waits for memory at most so many seconds."""


class Place(NamedTuple):
    """``nbytes`` of a file from byte ``start`` on."""

    file: FileName
    start: int
    nbytes: int


class Ring:
    """A ring of buffers for data that cannot move directly between storage and its destination.

    Only one thread may use a ring, for one ``read`` or ``write`` at a time. The memory is allocated at first use and
    freed with the ring.

    Args:
        pool: supplies the memory; the ring makes do with fewer than ``depth`` buffers when no more are free at once.
            Allocated outside any pool when None.
        buffer: bytes of one buffer, at most ``pool.largest``. One page of it is reserved so that data keep their offset
            within a page. By default 8 MiB; without a pool, 8 MiB and that page, unless it is page-locked: torch keeps
            that memory for the next ring, in powers of two.
        depth: the number of buffers.
        pinned: without a pool, whether the memory is page-locked, for copies to and from an accelerator.
        priority: of the transfers.
        patience: seconds to wait for the pool's first buffer; without limit when None.

    Raises:
        MemoryError: the buffers would be smaller than two pages.
    """

    def __init__(
        self,
        pool: Lender | None = None,
        *,
        buffer: int | None = None,
        depth: int = RING_DEPTH,
        pinned: bool = False,
        priority: Priority = Priority.DEMAND,
        patience: float | None = None,
    ) -> None:
        self._pool, self._most, self._depth, self._priority, self._patience = pool, depth, depth, priority, patience
        self._pinned = pinned and can_pin()
        self._size = buffer or (PIECE + PAGE if pool is None and not self._pinned else PIECE)
        if pool is not None:
            self._size = min(self._size, pool.largest)
        if self._size < 2 * PAGE:
            raise MemoryError(f"a ring needs buffers of {2 * PAGE} bytes, and the pool has at most {self._size}")
        self._leases: list[Any] = []
        self._buffers: list[torch.Tensor] = []
        self._uses: dict[int, IoFuture] = {}  # by buffer: its transfer
        self._next = 0

    @property
    def piece(self) -> int:
        """Bytes that fit into one buffer at any offset within a page."""
        return self._size - PAGE

    def take(self) -> torch.Tensor:
        """Returns the next buffer, once its transfer has ended. It is valid until ``depth`` more were taken."""
        self._prepare()
        number = self._next % self._depth
        if number == len(self._buffers):
            self._buffers.append(self._new_buffer())
        self._next = number + 1
        if (earlier := self._uses.get(number)) is not None:
            earlier.result()
            del self._uses[number]
        return self._buffers[number]

    def put_under(self, transfer: IoFuture) -> None:
        """Keeps the buffer taken last from being reused until ``transfer`` has ended."""
        self._uses[self._next - 1] = transfer

    def drain(self) -> None:
        """Waits for every transfer, then raises the first failure."""
        failure: BaseException | None = None
        while self._uses:
            number = next(iter(self._uses))
            error = self._uses[number].exception()  # if interrupted, it is still recorded
            failure = failure or error
            del self._uses[number]
        if failure is not None:
            raise failure

    def _end(self, error: BaseException) -> None:
        """Waits for every transfer; after Ctrl-C, a ring that has memory of its own leaves it to them instead."""
        if self._pool is not None or isinstance(error, Exception):
            with suppress(Exception):
                self.drain()
            return
        for transfer in self._uses.values():
            transfer.request_cancel()
        self._uses, self._buffers = {}, []

    def _submit(
        self, move: Callable[[_Item, torch.Tensor], IoFuture | None], item: _Item, buffer: torch.Tensor
    ) -> IoFuture | None:
        """Calls ``move``. After Ctrl-C the ring is without the buffer: a transfer that nobody knows of may use it."""
        try:
            return move(item, buffer)
        except BaseException as error:
            if not isinstance(error, Exception):
                self._leases = [lease for lease in self._leases if lease.tensor is not buffer]
                self._buffers = [other for other in self._buffers if other is not buffer]
            raise

    def _new_buffer(self) -> torch.Tensor:
        if self._pinned:
            return torch.empty(self._size, dtype=torch.uint8, device="cpu", pin_memory=True)
        return empty(self._size, dtype=torch.uint8)

    def release(self) -> None:
        """Gives the buffers back to the pool, once no transfer uses them. The next use takes others."""
        self._uses, self._leases, self._buffers, self._depth = {}, [], [], self._most

    def _prepare(self) -> None:
        """Waits for one buffer of the pool, then takes as many more as are free."""
        if self._pool is None or len(self._buffers) == self._depth:
            return
        if not self._leases:
            self._leases.append(self._pool.lease(self._size, self._patience))
        with suppress(TimeoutError, MemoryError):
            while len(self._leases) < self._depth:
                self._leases.append(self._pool.lease(self._size, timeout=0))
        self._buffers = [lease.tensor for lease in self._leases]
        self._depth = len(self._buffers)

    def read(self, handle: aio_handle, places: Iterable[Place]) -> Generator[torch.Tensor, None, None]:
        """Yields the bytes of each place, in order, aligned for any dtype; each tensor is valid until the next one.

        Places that fit into one buffer are read together; one that is larger than a buffer comes in parts.

        Raises what the handle's ``submit_preadv`` and its futures raise.
        """
        waiting: deque[list[torch.Tensor]] = deque()
        self._next = 0
        try:
            for batch in self._batches(places):
                buffer = self.take()
                parts = [buffer[at : at + place.nbytes] for at, place in batch]
                files, starts = [place.file for _, place in batch], [place.start for _, place in batch]
                self.put_under(handle.submit_preadv(parts, files, starts, priority=self._priority))
                waiting.append(parts)
                if len(waiting) >= self._depth:
                    yield from self._read(waiting)
            while waiting:
                yield from self._read(waiting)
        except BaseException as error:
            self._end(error)
            raise

    def _read(self, waiting: deque[list[torch.Tensor]]) -> Iterator[torch.Tensor]:
        oldest = (self._next - len(waiting)) % self._depth
        self._uses[oldest].result()
        del self._uses[oldest]
        yield from waiting.popleft()

    def _batches(self, places: Iterable[Place]) -> Iterator[list[tuple[int, Place]]]:
        """Groups places that fit into one buffer; adds their offsets in it, aligned for any dtype and direct I/O."""
        batch: list[tuple[int, Place]] = []
        used = 0
        for place in self._parts(places):
            at = -(-used // ALIGNMENT) * ALIGNMENT
            aligned = place.nbytes >= LARGE and place.start % ALIGNMENT == 0
            if aligned:
                at += (place.start - at) % PAGE
            if batch and at + place.nbytes > self._size:
                yield batch
                batch, at = [], place.start % PAGE if aligned else 0
            batch.append((at, place))
            used = at + place.nbytes
        if batch:
            yield batch

    def _parts(self, places: Iterable[Place]) -> Iterator[Place]:
        for place in places:
            for start in range(place.start, place.start + place.nbytes, self.piece):
                yield Place(place.file, start, min(self.piece, place.start + place.nbytes - start))

    def write(
        self, handle: aio_handle, file: FileName, pieces: Iterable[tuple[int, torch.Tensor]]
    ) -> Iterator[torch.Tensor]:
        """Copies each tensor, writes the copy at its offset, and yields it as bytes, valid until the next one.

        Tensors may be on any device and of any layout, and have at most ``piece`` bytes. Those that are adjacent in the
        file are written together. Exhaust the iterator: only then is everything written.

        Raises what the handle's ``submit_pwrite`` and its futures raise.
        """
        buffer: torch.Tensor | None = None
        begin = end = offset = 0  # in the buffer, and where in the file it begins
        try:
            for start, tensor in pieces:
                follows = start == offset + end - begin and end % tensor.element_size() == 0
                if buffer is None or not follows or end + tensor.nbytes > self._size:
                    if buffer is not None:
                        self._flush(handle, file, buffer[begin:end], offset)
                    buffer, offset = self.take(), start
                    # page offsets equal to the file's: direct I/O then needs no staging copy
                    begin = end = 0 if start % tensor.element_size() else start % PAGE
                held = buffer[end : end + tensor.nbytes]
                copy_bytes(held, tensor)
                end += tensor.nbytes
                yield held
            if buffer is not None:
                self._flush(handle, file, buffer[begin:end], offset)
            self.drain()
        except BaseException as error:
            self._end(error)
            raise

    def _flush(self, handle: aio_handle, file: FileName, full: torch.Tensor, offset: int) -> None:
        if full.numel():
            self.put_under(handle.submit_pwrite(full, file, offset, priority=self._priority))

    def update(
        self,
        items: Iterable[_Item],
        read: Callable[[_Item, torch.Tensor], IoFuture | None],
        write: Callable[[_Item, torch.Tensor], IoFuture | None],
        ended: Callable[[_Item, torch.Tensor, BaseException | None], None],
        in_memory: Callable[[_Item], bool] = lambda _: False,
    ) -> Generator[tuple[_Item, torch.Tensor], None, None]:
        """Yields each item with a buffer that ``read`` has filled, and writes it when the next one is requested.

        The reads of the next two items and the writes of the previous ones are in flight meanwhile, so that both
        directions of storage are at work from the first item to the last. Close the generator, or exhaust it: only then
        has everything ended.

        Args:
            items: of any kind.
            read: starts to fill a buffer with an item's bytes; returns None if there is nothing to read.
            write: starts to write the buffer; returns None if there is nothing to write.
            ended: called for each item that was yielded, when its write has ended, in order, or was not started, with
                its failure or None. The buffer is not reused before. If it is interrupted it is called again.
            in_memory: whether there is nothing to read: the item gets a buffer only when it is yielded, and others are
                read ahead in its place.

        Raises the failures of reads and writes.
        """
        source = iter(items)
        reading: deque[tuple[_Item, torch.Tensor | None, IoFuture | None]] = deque()
        in_flight: deque[IoFuture] = deque()  # reads
        writing: deque[tuple[_Item, torch.Tensor, IoFuture | None]] = deque()

        def end(place: int = 0) -> None:
            item, buffer, transfer = writing[place]
            failure = transfer.exception() if transfer else None
            ended(item, buffer, failure)
            del writing[place]  # if interrupted before, it is still in the queue
            free.append(buffer)
            if failure is not None:
                raise failure

        def read_ahead() -> None:
            while self._depth - len(free) - len(writing) <= ahead:
                while in_flight and in_flight[0].done():
                    in_flight.popleft()
                if len(in_flight) == _READS or (item := next(source, None)) is None:
                    return
                if in_memory(item) and self._depth > 2:  # with two, both could be read before its turn
                    reading.append((item, None, None))
                    continue
                while not free:
                    end()
                buffer = free.popleft()
                transfer = self._submit(read, item, buffer)
                reading.append((item, buffer, transfer))
                if transfer:
                    in_flight.append(transfer)

        def use_oldest() -> Iterator[tuple[_Item, torch.Tensor]]:
            item, buffer, transfer = reading[0]
            if buffer is None:
                while not free:
                    end()
                buffer = free.popleft()
                transfer = self._submit(read, item, buffer)
                reading[0] = item, buffer, transfer
            if transfer:
                transfer.result()
            read_ahead()
            reading.popleft()
            try:
                yield item, buffer
                writing.append((item, buffer, self._submit(write, item, buffer)))
            except BaseException as error:
                if not writing or writing[-1][1] is not buffer:
                    ended(item, buffer, error)
                raise
            if writing[-1][2] is None:
                end(-1)

        self._prepare()
        if self._pool is None:
            self._buffers += [self._new_buffer() for _ in range(len(self._buffers), self._depth)]
        free = deque(self._buffers)  # the others are being read or written
        ahead = self._depth // 2  # as many that are read while an item is used, and about as many that are written
        try:
            while True:
                read_ahead()
                if reading:
                    yield from use_oldest()
                elif writing:
                    end()
                else:
                    break
        finally:
            for _, _, transfer in reading:
                if transfer:
                    transfer.exception()
            while writing:
                oldest = writing[0]
                try:
                    end()
                except Exception:
                    if writing and writing[0] is oldest:  # ``ended`` has failed
                        writing.popleft()
