"""``Activations``: what autograd saves for the backward pass, on storage except for what is needed first."""

from __future__ import annotations

import bisect
import contextlib
import errno
import os
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence

import torch

from nvme_ops._native import native
from nvme_ops.engine import Priority
from nvme_ops.future import IoFuture
from nvme_ops.handle import aio_handle
from nvme_ops.offload.activations.failures import NOT_READ, named, without_frames
from nvme_ops.offload.activations.recompute import Pass
from nvme_ops.offload.activations.saved_tensors import StoragePart, is_changed, modified, whole_of
from nvme_ops.offload.activations.units import ActivationStats, Group, Ticket, TicketRef, Unit
from nvme_ops.storage.session import Session
from nvme_ops.storage.slab import NO_ROOM
from nvme_ops.storage.store import TensorStore
from nvme_ops.text import size_words

_IN_FLIGHT = 32 << 20  # bytes beyond the budget: on their way to storage in forward, and back in backward
_YOUNG = 2  # units that a thread saved last and that an operation may still write to
_AT_WORK = 3  # times the largest unit: what a layer computes with meanwhile, and its gradients


class Activations:
    """Units that are used again in reverse order: the last ones stay in memory, the others wait on storage.

    The budget holds what was saved last. What no longer fits is written, the oldest first, while the program goes on;
    once it is known how much a pass saves, what will have to be written is written immediately. ``get`` takes a unit
    from memory if it is still there, and then reads ahead what was saved before it. Any thread may call any method.

    While there are units on the CPU, torch takes memory for tensors of 512 KiB or more from the pool: once freed, it
    can be reused. torch's usual allocator keeps much of it, in pieces between smaller tensors.

    Args:
        folders: of the session.
        budget: bytes of memory.
        checksums: keep a checksum of each unit.
        handle: moves the bytes.
    """

    def __init__(
        self,
        folders: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
        *,
        budget: int,
        checksums: bool,
        handle: aio_handle | None,
    ) -> None:
        self._budget, self._process = budget, os.getpid()
        self._lock = threading.RLock()
        self._units: dict[int, Unit] = {}
        self._by_place: dict[StoragePart, Unit] = {}
        self._away: list[int] = []  # numbers of units that are not in memory, in order, and of some others
        self._held, self._writing, self._restored = Group(), Group(), Group()  # those in memory
        self._young: dict[int, deque[int]] = {}  # the units that each thread has saved last, see ``_writable``
        self._gone: deque[TicketRef] = deque()  # of units to be forgotten; appended to by whatever frees the tickets
        self._leaving: list[tuple[IoFuture, str]] = []  # writes that were cancelled, and have not ended yet
        self._saved = self._keys = self._largest = 0
        self._this_pass = self._last_pass = 0  # bytes saved
        self._began = self._asked = 0.0  # when the first one of this pass was saved, and when one was last asked for
        self._before = ActivationStats()  # when this pass began
        self._ended: Pass | None = None
        self._pooling = False  # torch takes memory for large tensors from the pool
        self._stats = ActivationStats()
        self._closed = False
        with contextlib.ExitStack() as undo:
            session = undo.enter_context(Session(folders, name="activations"))
            self._store = undo.enter_context(TensorStore(session, checksums=checksums, handle=handle))
            self._undo = undo.pop_all()

    def put(self, tensor: torch.Tensor, place: StoragePart) -> Ticket:
        """Saves bytes of a tensor's storage, and waits while too many are in memory.

        Raises:
            OSError: the budget is spent, and its oldest unit cannot be written: ENOSPC.
            ValueError: it was closed.
            RuntimeError: in a forked child.
        """
        with self._lock:
            self._require_open()
            self._collect()
            ticket = None
            for each in (place, whole_of(tensor)):
                known = self._by_place.get(each)
                if ticket is None and known and known.ticket and known.has_bytes_of(tensor):
                    ticket = known.ticket()
            ticket = ticket or self._add(tensor, place)
            unit = ticket.unit
            if unit.memory is not None and unit.original and unit.place.part is None:
                unit.seen.append((tensor.detach(), tensor._version))
        self._make_room(unit)
        return ticket

    def get(self, ticket: Ticket) -> torch.Tensor:
        """Returns the bytes, and starts to read what was saved before them.

        Raises:
            OSError: they cannot be read.
            RuntimeError: they were modified after they had been saved; or not in memory, in a forked child.
            ValueError: it was closed.
        """
        memory, failure, demanded = self._arrived(ticket.unit)
        if failure is not None and not demanded:  # a read ahead that failed is repeated on demand
            memory, failure, _ = self._arrived(ticket.unit)
        if failure is None:
            if is_changed(memory, ticket.unit.handed_out):
                raise modified(ticket.unit.dtype, ticket.unit.shape)
            return memory
        del memory
        raise named(failure, ticket.unit, NOT_READ)

    def _arrived(self, unit: Unit) -> tuple[torch.Tensor, BaseException | None, bool]:
        """Waits for a unit. Returns its memory, its read's failure, and whether that was started on demand."""
        with self._lock:
            memory, arriving, demanded = self._begin(unit)
            self._asked = time.perf_counter()
        if arriving is None:
            return memory, None, demanded
        begin = time.perf_counter()
        try:
            failure = arriving.exception()
        finally:
            self._stats.seconds_waited += time.perf_counter() - begin
        with self._lock:
            self._asked = time.perf_counter()
            if unit.arriving is arriving:
                unit.arriving, unit.handed_out = None, memory._version  # which counts copies to an accelerator
                if failure is not None:
                    self._release(unit)
        return memory, failure, demanded

    def find(self, places: Sequence[StoragePart], version: int) -> Ticket | None:
        """Returns the ticket of a unit of one of these places and this version, put before and unchanged since."""
        with self._lock:
            for place in places:
                unit = self._by_place.get(place)
                if unit is not None and unit.version == version and unit.ticket is not None and not unit.is_modified():
                    return unit.ticket()
            return None

    def take_pass(self) -> Pass | None:
        """Returns what is known about the last pass, after it is over, and only once."""
        with self._lock:
            self._collect()
            ended, self._ended = self._ended, None
            return ended

    def stats(self) -> ActivationStats:
        """Returns what was saved and moved so far."""
        with self._lock:
            if not self._closed and self._process == os.getpid():
                self._collect()
                self._stats.bytes_stored = self._store.bytes_in_use
            return ActivationStats(**vars(self._stats))

    def close(self) -> None:
        """Waits for transfers and removes the files. What is not in memory is lost. Further calls do nothing."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._end_pooling()
            if self._process == os.getpid():
                for unit in self._writing.units():
                    self._cancel(unit)
        with contextlib.suppress(OSError):  # of a write that nobody needs any more
            self._undo.close()
        native().trim_pool(_IN_FLIGHT)

    def __del__(self) -> None:
        """Removes the files once the last graph is gone."""
        if hasattr(self, "_undo"):
            self.close()

    # Below, with the lock

    def _require_open(self) -> None:
        if self._closed:
            raise ValueError("what keeps these tensors on storage was closed")
        if self._process != os.getpid():
            raise RuntimeError("save_on_nvme is the parent process's: make one in this process")

    @property
    def _in_memory(self) -> int:
        return self._held.nbytes + self._writing.nbytes + self._restored.nbytes

    def _add(self, tensor: torch.Tensor, place: StoragePart) -> Ticket:
        unit = Unit(self._saved, tensor, place)
        ticket = Ticket(unit)
        unit.ticket = TicketRef(ticket, self._gone)
        self._saved += 1
        self._largest = max(self._largest, unit.nbytes)
        self._units[unit.number] = unit
        self._by_place[place] = unit
        self._held.add(unit)
        self._young.setdefault(threading.get_ident(), deque(maxlen=_YOUNG)).append(unit.number)
        if not self._pooling:
            self._pooling = native().allocate_from_pool(True)
        if not self._this_pass:
            self._began, self._before = time.perf_counter(), ActivationStats(**vars(self._stats))
        self._this_pass += unit.nbytes
        self._stats.bytes_saved += unit.nbytes
        self._stats.peak_bytes = max(self._stats.peak_bytes, self._in_memory)
        return ticket

    def _collect(self) -> None:
        """Takes note of units that are gone and of writes that have ended."""
        while self._gone:
            self._forget(self._gone[0].unit)
            self._gone.popleft()  # not before: Ctrl-C may come in between
        for unit in self._writing.units():
            if unit.writing is None or not unit.writing.done():
                break
            self._end_write(unit)
        for write, key in self._leaving.copy():
            if write.done():
                self._leaving.remove((write, key))
                if key in self._store:  # it was complete before it could be cancelled
                    self._store.drop(key)
        if not self._units:
            self._away.clear()
            if self._this_pass:
                self._end_pass()

    def _end_pass(self) -> None:
        before, now = self._before, self._stats
        self._ended = Pass(
            seconds=self._asked - self._began,
            waited=now.seconds_waited - before.seconds_waited,
            moved=now.bytes_written + now.bytes_read - before.bytes_written - before.bytes_read,
            saved=self._this_pass,
            budget=self._budget,
        )
        self._last_pass, self._this_pass = self._this_pass, 0
        self._young.clear()
        self._end_pooling()

    def _end_pooling(self) -> None:
        if self._pooling:
            native().allocate_from_pool(False)
            self._pooling = False

    def _forget(self, unit: Unit) -> None:
        if unit.number not in self._units:
            return
        _abandon(unit)
        unit.memory = unit.arriving = unit.ticket = None  # and no cycle is left
        unit.seen.clear()
        if self._by_place.get(unit.place) is unit:
            del self._by_place[unit.place]
        if unit.writing is not None:
            self._cancel(unit)
        for group in (self._held, self._restored):
            group.discard(unit)
        if unit.key is not None:
            if unit.key in self._store:
                self._store.drop(unit.key)
            unit.key = None
        del self._units[unit.number]  # last: until then this can be repeated

    def _cancel(self, unit: Unit) -> None:
        """Cancels the write of a unit, which is then held."""
        write, key, unit.writing, unit.key = unit.writing, unit.key, None, None
        self._writing.discard(unit)
        self._held.add(unit)
        if write is not None and key is not None:
            write.request_cancel()
            self._leaving.append((write, key))
            self._stats.bytes_cancelled += unit.nbytes

    def _end_write(self, unit: Unit) -> None:
        failure = unit.writing.exception() if unit.writing is not None else None
        unit.writing = None
        self._writing.discard(unit)
        if failure is not None:
            unit.key, unit.trouble = None, failure
            self._held.add(unit)  # it is raised when its memory is needed
            return
        self._stats.bytes_written += unit.nbytes
        self._release(unit)

    def _release(self, unit: Unit) -> None:
        """Frees the memory of a unit that is on storage."""
        unit.is_modified()
        _abandon(unit)
        unit.memory = unit.arriving = None
        unit.seen.clear()
        unit.original = False
        self._restored.discard(unit)
        place = bisect.bisect_left(self._away, unit.number)
        if self._away[place : place + 1] != [unit.number]:
            self._away.insert(place, unit.number)

    def _write(self, unit: Unit) -> None:
        memory = unit.memory
        if memory is None or unit.is_resized():  # its ticket was freed just now, or it needs no room
            self._held.discard(unit)
            return
        key = f"{unit.number}.{self._keys}"
        self._keys += 1
        unit.writing = self._store.put(key, memory)
        unit.key = key
        self._held.discard(unit)
        self._writing.add(unit)

    def _make_room(self, unit: Unit) -> None:
        """Writes what the budget has no room for, and waits while too much is in flight. Takes the lock itself."""
        begin = time.perf_counter()
        while True:
            with self._lock:
                self._collect()
                self._write_some()
                self._trim()
                oldest = self._writing.first()
                much = self._in_memory - unit.nbytes > self._budget + _IN_FLIGHT
                write = oldest.writing if much and oldest is not None and oldest is not unit else None
            if write is None:
                break
            write.exception()
        self._stats.seconds_waited += time.perf_counter() - begin

    def _write_some(self) -> None:
        """Writes what the budget has no room for, and what it will have no room for in this pass."""
        for unit in self._restored.units():
            if self._in_memory <= self._budget:
                break
            if unit.arriving is None or unit.arriving.done():
                self._release(unit)
        while self._held.nbytes + self._restored.nbytes > self._budget:
            oldest = next(self._writable(), None)
            if oldest is None:
                return
            self._write_or_raise(oldest)
        written = self._this_pass - self._held.nbytes
        surplus = self._last_pass - self._budget - written
        for unit in list(self._writable()) if surplus > 0 else []:
            if self._writing.nbytes > max(_IN_FLIGHT, self._budget // 2) or surplus <= 0 or unit.trouble is not None:
                break
            surplus -= unit.nbytes
            with contextlib.suppress(OSError):  # it is raised when its memory is needed
                self._write(unit)

    def _writable(self) -> Iterator[Unit]:
        """Yields what may be written, the oldest first.

        Autograd saves an operation's arguments before it runs, and ``rrelu`` fills one of them only then.
        """
        young = {number for numbers in self._young.values() for number in numbers}
        return (unit for unit in self._held.units() if unit.number not in young)

    def _write_or_raise(self, unit: Unit) -> None:
        failure, unit.trouble = unit.trouble, None
        if failure is None:
            failure = self._failure_of_write(unit)
        if failure is None:
            return
        if not isinstance(failure, OSError) or failure.errno not in NO_ROOM:
            raise named(failure, unit, "to be saved for the backward pass, could not be written")
        if not self._leaving:
            raise self._no_room(unit, failure) from None
        for write, _ in self._leaving:  # whose space is free once they have ended
            write.exception()
        self._collect()

    def _failure_of_write(self, unit: Unit) -> OSError | None:
        """Starts writing a unit, and returns the error if that fails.

        It is not raised: whoever keeps it would keep the frames that it passes, and the graphs in them.
        """
        try:
            self._write(unit)
        except OSError as error:
            return without_frames(error)
        return None

    def _no_room(self, unit: Unit, error: OSError) -> OSError:
        return OSError(
            error.errno,
            f"{os.strerror(error.errno or errno.ENOSPC)}: {unit.describe()}, is to be saved for the backward pass; "
            f"there is no room for its {size_words(unit.nbytes)}, and {size_words(self._held.nbytes)} in memory spend "
            f"the memory_budget of {size_words(self._budget)}",
            error.filename,
        )

    def _begin(self, unit: Unit) -> tuple[torch.Tensor, IoFuture | None, bool]:
        """Returns a unit's memory, the read that fills it, and whether that began on demand; reads others ahead."""
        if unit.memory is not None and unit.original:
            if unit.is_modified():
                raise modified(unit.dtype, unit.shape)
            if unit.is_resized():
                raise RuntimeError(
                    f"{unit.describe()}, saved for the backward pass, has no memory: its storage was resized to "
                    f"{unit.memory.untyped_storage().nbytes()} bytes after that, and has not got them back"
                )
            if self._process == os.getpid() and not self._closed:
                if unit.writing is not None:
                    self._cancel(unit)
                self._collect()
                self._read_ahead(unit)
                self._trim()
            return unit.memory, None, False
        self._require_open()
        if unit.modified:
            raise modified(unit.dtype, unit.shape)
        self._collect()
        demanded = unit.memory is None
        try:
            memory = self._fetch(unit, Priority.DEMAND) if unit.memory is None else unit.memory
        except OSError as error:
            raise named(error, unit, NOT_READ) from None
        unit.ahead = False
        self._read_ahead(unit)
        self._trim()
        return memory, unit.arriving, demanded

    def _fetch(self, unit: Unit, priority: Priority) -> torch.Tensor:
        """Starts reading a unit."""
        if unit.key is None:
            raise OSError(errno.EIO, f"{unit.describe()}, saved for the backward pass, is lost")
        self._give_up(unit.nbytes)
        memory = torch.empty(unit.nbytes, dtype=torch.uint8, device=unit.device)  # from the pool, see ``_add``
        unit.arriving = self._store.get(unit.key, memory, priority=priority)
        unit.memory, unit.ahead = memory, priority is not Priority.DEMAND
        self._restored.add(unit)
        self._stats.bytes_read += unit.nbytes
        self._stats.bytes_on_demand += unit.nbytes * (priority is Priority.DEMAND)
        self._stats.peak_bytes = max(self._stats.peak_bytes, self._in_memory)
        return memory

    def _trim(self) -> None:
        """Frees memory that is kept for reuse, except what the budget and the layer at work need."""
        at_work = _AT_WORK * self._largest
        native().trim_pool(_IN_FLIGHT + max(at_work, self._budget - self._in_memory))

    def _give_up(self, nbytes: int) -> None:
        """Releases units used in this backward pass that are on storage, if memory is short."""
        for unit in self._restored.units():
            if self._in_memory + nbytes <= self._budget + _IN_FLIGHT:
                return
            if not unit.ahead and unit.arriving is None:
                self._release(unit)

    def _read_ahead(self, unit: Unit) -> None:
        place = bisect.bisect_left(self._away, unit.number)
        while place > 0:
            place -= 1
            other = self._units.get(self._away[place])
            if other is None or other.memory is not None:
                del self._away[place]
                continue
            self._give_up(other.nbytes)
            if self._in_memory + other.nbytes > self._budget + _IN_FLIGHT:
                return
            try:
                self._fetch(other, Priority.PREFETCH)
            except OSError:  # it is raised on demand
                return


def _abandon(unit: Unit) -> None:
    """Ends the read of a unit that nobody waits for; nobody will ask whether it failed either."""
    if unit.arriving is not None:
        unit.arriving.request_cancel()
