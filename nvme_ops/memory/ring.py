"""``Ring``: the one pipeline of this package. While storage fills or empties one buffer, the program uses another.

    ring = Ring()
    for piece in ring.read(handle, places): checksum(piece)     # the next ones are being read meanwhile
    for piece in ring.write(handle, file, pieces): ...          # copies, on their way to the file

``InFlight`` is the part of it that needs no buffers: a bounded number of transfers under way.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch

from nvme_ops.engine import Priority
from nvme_ops.future import IoFuture
from nvme_ops.handle import aio_handle
from nvme_ops.memory import carve
from nvme_ops.memory.pool import Lease, Pool, can_pin
from nvme_ops.settings import ALIGNMENT, LARGE, PAGE, PIECE, RING_DEPTH
from nvme_ops.tensors import empty

if TYPE_CHECKING:
    from nvme_ops.handle import FileName


class Place(NamedTuple):
    """``nbytes`` from byte ``start`` of a file on."""

    file: FileName
    start: int
    nbytes: int


class _Ending(Protocol):
    def exception(self, timeout: float | None = ...) -> BaseException | None: ...


class InFlight:
    """Transfers under way, ended in the order in which they were added, of which ``add`` leaves at most ``limit``.

    As a context manager it waits for all of them, whatever happens: nobody may still move to or from memory that the
    block leaves behind.
    """

    def __init__(self, limit: int = 1) -> None:
        self._limit = limit
        self._transfers: deque[tuple[_Ending, Callable[[], object]]] = deque()

    def add(self, transfer: _Ending, then: Callable[[], object] = lambda: None) -> None:
        """Adds one, and ends the oldest where there are too many. ``then`` is called when it has ended well."""
        self._transfers.append((transfer, then))
        while len(self._transfers) > self._limit:
            self.end_oldest()

    def end_oldest(self) -> bool:
        """Waits for the oldest, and raises what went wrong with it. False when there is none."""
        if not self._transfers:
            return False
        transfer, then = self._transfers[0]
        failure = transfer.exception()  # interrupted, it is still one of them
        self._transfers.popleft()
        if failure is not None:
            raise failure
        then()
        return True

    def drain(self) -> None:
        """Ends all. When several failed the first failure is raised, after all have ended."""
        try:
            while self.end_oldest():
                pass
        finally:
            self.settle()

    def settle(self) -> None:
        """Waits for all, whatever became of them."""
        while self._transfers:
            self._transfers[0][0].exception()
            self._transfers.popleft()

    def hand_over(self) -> None:
        """What is under way is somebody else's to wait for."""
        self._transfers.clear()

    def __enter__(self) -> InFlight:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None:
            self.drain()
        else:
            self.settle()


class Ring:
    """Buffers through which data pass that cannot go straight to where they belong.

    One thread uses a ring at a time, for one thing at a time. Its memory is taken at first use and given back with it.

    Args:
        pool: has the memory; where less than ``depth`` buffers are to be had at once, those there are do the work. The
            memory of no pool when None.
        buffer: bytes of one buffer, a page of which is to place data as they lie in the file's pages; what the pool can
            give where that is less. By default 8 MiB, without a pool beside that page.
        depth: buffers.
        pinned: without a pool, whether the memory is page-locked, for copies to and from an accelerator.
        priority: of its transfers.

    Raises:
        MemoryError: the pool's budget is below two pages.
    """

    def __init__(
        self,
        pool: Pool | None = None,
        *,
        buffer: int | None = None,
        depth: int = RING_DEPTH,
        pinned: bool = False,
        priority: Priority = Priority.DEMAND,
    ) -> None:
        self._pool, self._depth, self._priority = pool, depth, priority
        self._size = buffer or (PIECE + PAGE if pool is None else PIECE)
        if pool is not None:
            self._size = min(self._size, pool.largest)
        if self._size < 2 * PAGE:
            raise MemoryError(f"a ring needs buffers of {2 * PAGE} bytes, and the pool has at most {self._size}")
        self._pinned = pinned and can_pin()
        self._leases: list[Lease] = []
        self._buffers: list[torch.Tensor] = []
        self._uses: dict[int, IoFuture] = {}  # by buffer: the transfer that it is under
        self._next = 0

    @property
    def piece(self) -> int:
        """Bytes that one buffer takes wherever they begin in a page."""
        return self._size - PAGE

    def take(self) -> torch.Tensor:
        """A buffer under no transfer. Valid until as many were taken as there are."""
        if self._pool is not None and not self._buffers:
            self._lease_all(self._pool)
        number = self._next % self._depth
        if number == len(self._buffers):
            self._buffers.append(self._new_buffer())
        self._next = number + 1
        if (earlier := self._uses.get(number)) is not None:
            earlier.result()
            del self._uses[number]
        return self._buffers[number]

    def put_under(self, transfer: IoFuture) -> None:
        """The buffer taken last is not taken again before ``transfer`` has ended."""
        self._uses[self._next - 1] = transfer

    def drain(self) -> None:
        """Waits for every transfer; raises what went wrong with the first that failed, after all have ended."""
        failure: BaseException | None = None
        while self._uses:
            number = next(iter(self._uses))
            found = self._uses[number].exception()  # interrupted, it is still waited for
            failure = failure or found
            del self._uses[number]
        if failure is not None:
            raise failure

    def settle(self) -> None:
        """Waits for every transfer, whatever becomes of it."""
        with suppress(Exception):
            self.drain()

    def _new_buffer(self) -> torch.Tensor:
        if self._pinned:
            return torch.empty(self._size, dtype=torch.uint8, pin_memory=True)
        return empty(self._size, dtype=torch.uint8)

    def _lease_all(self, pool: Pool) -> None:
        """Waits for one buffer, and takes more if they are there."""
        self._leases.append(pool.lease(self._size))
        with suppress(TimeoutError, MemoryError):
            while len(self._leases) < self._depth:
                self._leases.append(pool.lease(self._size, timeout=0))
        self._buffers = [lease.tensor for lease in self._leases]
        self._depth = len(self._buffers)

    def read(self, handle: aio_handle, places: Iterable[Place]) -> Generator[torch.Tensor, None, None]:
        """The bytes of each place, in order, each valid until the next is asked for, aligned for a view of any dtype.

        Places are read together as far as a buffer has room for them; one that is larger than a buffer comes in parts.

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
        finally:
            self.settle()

    def _read(self, waiting: deque[list[torch.Tensor]]) -> Iterator[torch.Tensor]:
        oldest = (self._next - len(waiting)) % self._depth
        self._uses[oldest].result()
        del self._uses[oldest]
        yield from waiting.popleft()

    def _batches(self, places: Iterable[Place]) -> Iterator[list[tuple[int, Place]]]:
        """As many places as a buffer holds, and where in it: aligned for any dtype, pages of large ones on pages."""
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
        """Copies each tensor and writes the copy from its offset on; yields the copy, as bytes, valid until the next.

        Tensors on any device, strided as they like, of at most ``piece`` bytes. Those that follow each other in the
        file are written together. All is written when the iterator is exhausted, which it has to be.

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
                    # pages of the file on pages of the buffer, which then goes without another copy
                    begin = end = 0 if start % tensor.element_size() else start % PAGE
                held = buffer[end : end + tensor.nbytes]
                carve.copy_bytes(held, tensor)
                end += tensor.nbytes
                yield held
            if buffer is not None:
                self._flush(handle, file, buffer[begin:end], offset)
            self.drain()
        finally:
            self.settle()

    def _flush(self, handle: aio_handle, file: FileName, full: torch.Tensor, offset: int) -> None:
        if full.numel():
            self.put_under(handle.submit_pwrite(full, file, offset, priority=self._priority))
