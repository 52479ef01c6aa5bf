"""``Activations``: what autograd saves for the backward pass, on storage except for what is needed first."""

from __future__ import annotations

import bisect
import contextlib
import errno
import itertools
import os
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypeGuard

import torch

from nvme_ops.base.errors import ChecksumError
from nvme_ops.base.native import native
from nvme_ops.base.text import never_raising, size_words
from nvme_ops.io.engine import Priority
from nvme_ops.io.file import handle_of
from nvme_ops.io.future import IoFuture
from nvme_ops.io.handle import aio_handle
from nvme_ops.memory.pieces import checksums_anywhere
from nvme_ops.memory.tier import PooledTier, Share, Tier
from nvme_ops.offload.activations.recompute import Pass
from nvme_ops.offload.activations.saved_tensors import StoragePart, is_changed, modified, whole_of
from nvme_ops.offload.activations.units import ActivationStats, Stored, Ticket, TicketRef, Unit
from nvme_ops.offload.memory import Memory
from nvme_ops.offload.residency.account import Account, rate_of_folders
from nvme_ops.offload.residency.homes import Home, Homes
from nvme_ops.offload.residency.placement import kept_of_saved
from nvme_ops.offload.residency.policy import Policy
from nvme_ops.offload.residency.residency import Residency
from nvme_ops.storage.joined import JoinedOperation, as_operation, joined
from nvme_ops.storage.session import Session
from nvme_ops.storage.slab import NO_ROOM
from nvme_ops.storage.striped import StripedSlabs

_YOUNG = 2  # units that a thread saved last and that an operation may still write to
_AT_WORK = 3  # times the largest unit: what a layer computes with meanwhile, and its gradients; the least in memory
_NOT_READ = "saved for the backward pass, could not be read"


class _Saved:
    """What was saved: in host memory what there is room for, if it is an accelerator's, and the rest in the files."""

    def __init__(self, files: StripedSlabs, checksums: bool, homes: Homes) -> None:
        self._files, self._checksums, self.homes = files, checksums, homes
        self._part, self._due = 1.0, 0.0  # of the bytes that are written, for host memory; and those it lacks now
        self.leaving: list[Stored] = []  #: is to be freed once no transfer uses it any more

    def foresee(self, nbytes: int) -> None:
        """Learns how many bytes a pass will write.

        If host memory has no room for all, it gets its part of them evenly: storage is then at work all the time, in
        forward and in backward, and not only while the tensors of one end are saved.
        """
        room = self.homes.share.largest + sum(stored.home.memory.nbytes for stored in self.leaving if stored.home)
        self._part, self._due = min(1.0, room / max(1, nbytes)), 0.0

    def collect(self) -> None:
        """Frees what no transfer uses any more."""
        for stored in self.leaving.copy():
            if stored.is_idle():
                pieces, stored.pieces, stored.home = stored.pieces, [], None  # first: they must not be freed twice
                self._files.free(pieces)
                self.leaving.remove(stored)

    def _home(self, entry: Unit) -> Home | None:
        """Returns room in host memory, for which it waits if that is about to be free; None if it is storage's turn."""
        if entry.device.type == "cpu":
            return None
        self._due += self._part * entry.nbytes
        if self._due < entry.nbytes / 2:
            return None
        self._due -= entry.nbytes
        while (home := self.homes.take(_size_class(entry.nbytes))) is None:
            if (leaving := next((stored.home for stored in self.leaving if stored.home), None)) is None:
                return None
            leaving.free()
            self.collect()
        return home

    def leave(self, unit: Unit) -> None:
        """Frees what a unit has on storage, once no transfer uses it any more."""
        if unit.stored is not None:
            self.leaving.append(unit.stored)
            unit.stored = None

    def read(self, entry: Unit, memory: torch.Tensor, priority: Priority) -> tuple[torch.Tensor, IoFuture | None, int]:
        """Starts to fill a unit's memory; see ``Backing``."""
        if entry.stored is None:
            raise OSError(errno.EIO, f"{entry.describe()}, saved for the backward pass, is lost")
        stored, before = entry.stored, len(entry.stored.transfers)
        if stored.home is not None:
            self.homes.copy_from(stored.home, entry, memory, keep=True)
            entry.handed_out = memory._version
            return memory, None, 0
        try:
            self._files.move(stored.pieces, memory, stored.transfers, False, priority)
        except BaseException:
            for transfer in stored.transfers[before:]:
                transfer.request_cancel()  # nobody will ask how it ended
            raise
        transfers = stored.transfers[before:]
        if stored.checksum is None:
            return memory, transfers[0] if len(transfers) == 1 else joined(transfers), entry.nbytes
        compared = JoinedOperation(transfers, self._files.compare, stored, memory, [])
        return memory, IoFuture(as_operation(compared)), entry.nbytes

    def write(self, entry: Unit) -> tuple[IoFuture, int]:
        """Starts to write a unit; see ``Backing``."""
        if entry.stored is not None:
            self.leave(entry)  # where it could not be written
        memory: Any = entry.memory
        transfers: list[IoFuture] = []
        if (home := self._home(entry)) is not None:
            entry.stored = Stored([], home=home)
            return self.homes.copy_to(home, memory), 0
        try:
            stored = entry.stored = Stored(self._files.allocate(entry.nbytes), transfers)
            self._files.move(stored.pieces, memory, transfers, True, Priority.WRITEBACK)
            if self._checksums:
                stored.checksum = checksums_anywhere([memory])[0]
        except BaseException:
            for transfer in transfers:
                transfer.request_cancel()  # nobody will ask how it ended
            self.leave(entry)
            raise
        return transfers[0] if len(transfers) == 1 else joined(transfers), entry.nbytes


class Activations(Policy[Unit]):
    """Units that are used again in reverse order: the last ones stay in memory, the others wait on storage.

    The budget holds what was saved last. What no longer fits is written, the oldest first, while the program goes on;
    once it is known how much a pass saves, what will have to be written is written immediately. ``get`` takes a unit
    from memory if it is still there, and then reads ahead what was saved before it. Any thread may call any method.

    While there are units on the CPU, torch takes memory for tensors of 512 KiB or more from the pool: once freed, it
    can be reused. torch's usual allocator keeps much of it, in pieces between smaller tensors.

    Args:
        folders: of the session.
        given: bytes of memory where the tensors are, or memory that is shared.
        budget_name: of the argument that says so.
        host: host memory beside that of an accelerator.
        checksums: keep a checksum of each unit.
        handle: moves the bytes.
    """

    _closed_error = "what keeps these tensors on storage was closed"
    drops_used = True  # autograd and the program use them, and keep their memory as long
    _forked_error = "save_on_nvme is the parent process's: make one in this process"
    name = "saved tensors"
    counts: ActivationStats

    def __init__(
        self,
        folders: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
        *,
        given: int | Memory,
        budget_name: str = "device_budget",
        host: Share | None = None,
        checksums: bool,
        handle: aio_handle | None,
    ) -> None:
        self._native = native()
        self._memory = given if isinstance(given, Memory) else None
        self._budget_name = budget_name if self._memory is None else "share of a Memory"
        self._has_joined, self._wanted, self._least = False, 0, 0
        self._borrowed: list[object] = []  # of memory that is shared: steps of it, for what is in memory
        self._units: dict[int, Unit] = {}
        self._by_place: dict[StoragePart, Unit] = {}
        self._away: list[int] = []  # numbers of units that are not in memory, in order, and of some others
        # In memory as they were saved: ``to_write``, and those that are being written; ``present`` were read back.
        self._writing: dict[Unit, None] = {}
        self._bytes = self._held_bytes = self._writing_bytes = 0  # in memory, and how many of them are of these two
        self._young: dict[int, deque[int]] = {}  # the units that each thread has saved last, see ``_writable``
        self._gone: deque[TicketRef] = deque()  # tickets that were freed; ``_collect`` drops their units
        self._saved = self._largest = 0
        self._this_pass = self._last_pass = 0  # bytes saved
        self._began = self._asked = 0.0  # when the first one of this pass was saved, and when one was last asked for
        self._before = ActivationStats()  # when this pass began
        self._ended: Pass | None = None
        self._pooling: object | None = None  # while this lives, torch takes memory for large tensors from the pool
        with contextlib.ExitStack() as undo:
            session = undo.enter_context(Session(folders, name="activations"))
            self._files = StripedSlabs(session, "activations", handle_of(handle), None)
            session.lend("", self._files)
            self._account = Account(rate_of_folders(session.folders))
            # autograd's memory, and torch's; memory that is shared is one of the device of the first saved tensor
            share = Tier(given if isinstance(given, int) else 0, torch.device("cpu")).share()
            self._residency = Residency() if self._memory is None else self._memory.residency
            self._stored = _Saved(self._files, checksums, Homes(host or PooledTier(0).share()))
            super().__init__(self._residency.lock, share, self._stored, ActivationStats())
            if not self._files.is_measured:
                self._files.measure()
            self._undo = undo.pop_all()
        #: Whether this thread has the lock: what saves a tensor now is a signal handler, which must not come in again.
        self.is_busy: Callable[[], bool] = self.lock._is_owned
        self._residency.join(self)
        self._set_limits()

    def put(self, tensor: torch.Tensor, place: StoragePart) -> Ticket:
        """Saves bytes of a tensor's storage, and waits while too many are in memory.

        Raises:
            OSError: the budget is spent, and its oldest unit cannot be written: ENOSPC.
            ValueError: it was closed.
            RuntimeError: in a forked child.
        """
        with self.lock:
            self._collect()
            ticket = None
            for part in (place,) if place.part is None else (place, whole_of(tensor)):
                known = self._by_place.get(part)  # which has these bytes already
                if known is not None and known.has_bytes_of(tensor):
                    ticket = known.ticket() if known.ticket is not None else None
                    break
            if ticket is None:
                ticket = self._add(tensor, place)
            unit = ticket.unit
            if unit.memory is not None and unit.original and unit.place.part is None:
                unit.seen.append((tensor.detach(), tensor._version))
        begin = time.perf_counter()
        while True:
            with self.lock:
                oldest = self._write_some(unit)
            if oldest is None:
                break
            try:
                self._residency.wait_until_written(self, oldest)
            except OSError as error:
                with self.lock:
                    self._hold(oldest, error)
            with self.lock:
                self._collect()
        self.counts.seconds_waited += time.perf_counter() - begin
        return ticket

    def get(self, ticket: Ticket) -> torch.Tensor:
        """Returns the bytes, and starts to read what was saved before them.

        Raises:
            OSError: they cannot be read.
            RuntimeError: they were modified after they had been saved; or not in memory, in a forked child.
            ValueError: it was closed.
        """
        unit = ticket.unit
        memory: Any = None
        while True:
            try:
                with self.lock:
                    if unit.memory is not None and unit.original:
                        memory = self._as_saved(unit, unit.memory)
                        queued, version = unit.queued, unit.handed_out
                        break
                    self._collect()
                    if unit.modified:
                        raise modified(unit.dtype, unit.shape)
                    if begun := unit.memory is None:
                        self._shrink(self._most - unit.nbytes, used=True)
                        try:
                            self._residency.begin(self, unit, Priority.DEMAND)
                        except torch.cuda.OutOfMemoryError:
                            self._shrink(0, used=False)
                            self._residency.begin(self, unit, Priority.DEMAND)
                        self._bytes += unit.nbytes
                    unit.demanded = True
                    memory, arrival = unit.memory, unit.arrival
                    queued, version = unit.queued, unit.handed_out
                    if self._away:
                        self._read_ahead(unit)
                if arrival is None:
                    break
                if self._residency.await_arrival(self, unit, arrival, begun):
                    with self.lock:
                        if unit.memory is memory:  # else another thread has evicted it as it arrived
                            version = unit.handed_out
                            break
            except Exception as error:
                memory = None
                raise _named(error, unit, _NOT_READ) from None
        self._asked = time.perf_counter()
        tensor: torch.Tensor = memory
        if queued is not None:
            queued.before(tensor.device)
        if tensor._version != version or (vars(tensor) and is_changed(tensor, version)):
            raise modified(unit.dtype, unit.shape)
        return tensor

    def find(self, places: Sequence[StoragePart], version: int) -> Ticket | None:
        """Returns the ticket of a unit of one of these places and this version, put before and unchanged since."""
        with self.lock:
            for place in places:
                unit = self._by_place.get(place)
                if unit is not None and unit.version == version and unit.ticket is not None and not unit.is_modified():
                    return unit.ticket()
            return None

    def take_pass(self) -> Pass | None:
        """Returns what is known about the last pass, after it is over, and only once."""
        with self.lock:
            self._collect()
            ended, self._ended = self._ended, None
            return ended

    @never_raising
    def __repr__(self) -> str:
        """Returns for example ``64 MiB saved, 48 MiB written, at most 16 MiB in memory``."""
        if self._closed:
            return "closed"
        moved = f"{size_words(self.counts.bytes_saved)} saved, {size_words(self.counts.bytes_written)} written"
        return f"{moved}, at most {size_words(self.share.nbytes)} in memory"

    def explain(self, stats: ActivationStats) -> str:
        """Returns what ``Account.explain`` does."""
        return self._account.explain(stats, self._stored.homes.device)

    def stats(self) -> ActivationStats:
        """Returns what was saved and moved so far."""
        with self.lock:
            if not self._closed and self._process == os.getpid():
                self._collect()
                self.counts.bytes_stored = self._files.bytes_in_use
            stats = replace(self.counts, bytes_in_memory=self._bytes)
            homes = self._stored.homes
            stats.note_host(homes.share, homes.counts, *homes.streams())
            return stats

    def close(self) -> None:
        """Waits for transfers and removes the files. What is not in memory is lost. Further calls do nothing."""
        with self.lock:
            if self._closed:
                return
            self._closed = True
            self._pooling = None
            transfers, homes = list[IoFuture](), list[Home]()
            if self._process == os.getpid():
                for unit in list(self._writing):
                    self._cancel(unit)
                stored = [*self._stored.leaving, *(unit.stored for unit in self._units.values() if unit.stored)]
                transfers = [transfer for one in stored for transfer in one.transfers]
                homes = [one.home for one in stored if one.home]
        for transfer in transfers:
            transfer.exception()
        for home in homes:
            home.free()
        self._stored.leaving.clear()
        for unit in list(self._units.values()):
            unit.stored = None
        self._undo.close()
        self._native.trim_pool(0)
        self._borrowed.clear()
        if self._memory is not None and self._has_joined and self._is_ours():
            self._memory.leave(self)

    def __del__(self) -> None:
        """Removes the files once the last graph is gone; at Python's end the session has removed them."""
        if sys is not None and not sys.is_finalizing() and hasattr(self, "_undo"):
            self.close()

    # Below, with the lock

    def _add(self, tensor: torch.Tensor, place: StoragePart) -> Ticket:
        unit = Unit(self._saved, tensor, place)
        ticket = Ticket(unit)
        ref = TicketRef(ticket, self._gone.append)
        ref.unit = unit
        unit.ticket = ref
        self._saved += 1
        self._units[unit.number] = unit
        self._by_place[place] = unit
        unit.changed = True
        self.to_write[unit] = None
        self._bytes += unit.nbytes
        self._held_bytes += unit.nbytes
        self._young.setdefault(threading.get_ident(), deque(maxlen=_YOUNG)).append(unit.number)
        if self._pooling is None:
            self._pooling = self._native.pool_large_tensors()
        if self._memory is not None:
            self._take_part(self._memory, unit)
        if not self._this_pass:
            self._began, self._before = time.perf_counter(), ActivationStats(**vars(self.counts))
            self._stored.foresee(self._last_pass - self._kept)
        self._this_pass += unit.nbytes
        if unit.nbytes > self._largest or self._this_pass > self.share.nbytes == self._kept:
            self._largest = max(self._largest, unit.nbytes)
            self._set_limits()
        self.counts.bytes_saved += unit.nbytes
        self.counts.peak_bytes = max(self.counts.peak_bytes, self._bytes)
        return ticket

    def _collect(self) -> None:
        """Drops units whose tickets were freed, settles writes that have ended, and frees memory that is not needed.

        Raises as ``require_open`` does.
        """
        if self._closed or self._process != os.getpid():  # asked for each saved tensor: a call only to raise
            self.require_open()
        while self._gone:
            if (freed := self._gone[0].unit) is not None:
                self._drop(freed)
            self._gone.popleft()  # not before: Ctrl-C may come in between
        while (unit := next(iter(self._writing), None)) and (unit.leaving is None or unit.leaving.done()):
            try:
                if not self._residency.evict(self, unit):
                    break
            except OSError as error:
                self._hold(unit, error)
        self._stored.collect()
        if not self._units:
            self._away.clear()
            self._bytes = self._held_bytes = self._writing_bytes = 0  # Ctrl-C may have left others
            if self._this_pass:
                self._end_pass()
        budget = self.share.nbytes
        if (memory := self._memory) is not None:
            # others get what they have lent beyond what units take, and one step
            del self._borrowed[1 + -(-self._bytes // memory.step) if self._units else 0 :]
            if not self._units and self._wanted:
                self._wanted = 0
                memory.balance()
            budget = len(self._borrowed) * memory.step  # the rest is others' again
        # kept for reuse: what the budget has room for, or else what the layer at work needs
        self._native.trim_pool(max(_AT_WORK * self._largest, budget - self._bytes))

    def _set_limits(self) -> None:
        """Decides how much may be in memory, and how much of that need not be on its way."""
        budget, saved = self.share.nbytes, max(self._last_pass, self._this_pass)
        self._most, self._kept = max(budget, _AT_WORK * self._largest), kept_of_saved(saved, budget, self._largest)

    def _take_part(self, memory: Memory, unit: Unit) -> None:
        """Has memory that is shared lend what units take, and others give way once it is known how much is saved."""
        if not self._has_joined:
            self.share = memory.share(unit.device)
            self.share.at_end = True
            memory.join(self)
            self._has_joined = True
        at_work = _AT_WORK * unit.nbytes
        if at_work > self._least and memory.has_room(self, at_work):
            self._least = at_work
        wanted = max(self._least, self._last_pass, self._this_pass + unit.nbytes)
        if wanted > self._wanted:
            self._wanted = wanted
            memory.balance()
        self._borrow(memory, self._bytes)

    def _borrow(self, memory: Memory, nbytes: int) -> None:
        while nbytes > len(self._borrowed) * memory.step:
            if (part := self._residency.borrow(self, memory.step)) is None:
                return  # the budget is spent
            self._borrowed.append(part)

    def give_back(self) -> None:
        """Returns the memory of what the program has dropped, and starts to write what has no room any more."""
        if self.is_usable() and self._memory is not None:
            self._collect()
            self._borrowed.clear()  # and taken again at the end, where others may have left since
            self._borrow(self._memory, self._bytes)
            if self._bytes > self.share.nbytes and (oldest := next(iter(self.to_write), None)) is not None:
                self._write_some(oldest)

    def least(self) -> int:
        """Returns the bytes that the layer at work needs, during a pass, if others leave them."""
        return self._least if self._wanted else 0

    def wanted(self) -> int:
        """Returns the bytes that this pass is expected to save."""
        return self._wanted

    def resize(self, nbytes: int) -> None:
        """Sets how much memory it has."""
        super().resize(nbytes)
        self._set_limits()

    def victims(self, after: int) -> Sequence[Unit]:
        """Returns none: what leaves memory for others was written before."""
        del after
        return ()

    def _end_pass(self) -> None:
        before, now = self._before, self.counts
        self._ended = Pass(
            seconds=self._asked - self._began,
            waited=now.seconds_waited - before.seconds_waited,
            moved=now.bytes_written + now.bytes_read - before.bytes_written - before.bytes_read,
            saved=self._this_pass,
            budget=self.share.nbytes,
        )
        self._last_pass, self._this_pass = self._this_pass, 0
        self._set_limits()
        self._young.clear()
        self._pooling = None

    def _drop(self, unit: Unit) -> None:
        """Forgets a unit that nobody can ask for any more."""
        if unit.number not in self._units:
            return
        if unit.arrival is not None:
            unit.arrival.request_cancel()  # nobody waits for it, nor will ask how it ended
        unit.memory = unit.values = unit.arrival = unit.ticket = None  # and no cycle is left
        unit.seen.clear()
        if self._by_place.get(unit.place) is unit:
            del self._by_place[unit.place]
        if unit in self._writing or unit.leaving is not None:
            self._cancel(unit)
        if unit in self.to_write:
            del self.to_write[unit]
            self._held_bytes -= unit.nbytes
            self._bytes -= unit.nbytes
        elif unit in self.present:
            del self.present[unit]
            self._bytes -= unit.nbytes
        if unit.stored is not None:
            self._stored.leaving.append(unit.stored)
            unit.stored = None
        del self._units[unit.number]  # last: until then this can be repeated

    def _cancel(self, unit: Unit) -> None:
        """Cancels the write of a unit, which is then held."""
        self._hold(unit)  # first, as the write is not complete: Ctrl-C may come at any point
        if unit.leaving is not None:
            unit.leaving.request_cancel()
            if unit.stored is not None and unit.stored.home is None:
                self.counts.bytes_cancelled += unit.nbytes
                self.counts.bytes_written -= unit.nbytes
            self._stored.leave(unit)
            unit.leaving = None

    def _hold(self, unit: Unit, failure: OSError | None = None) -> None:
        """Has a unit held that was to be written; the ``failure`` is raised when the budget needs its memory."""
        unit.changed = True
        unit.trouble = None if failure is None else _without_frames(failure)
        if unit in self._writing:
            self.to_write[unit] = None
            del self._writing[unit]
            self._held_bytes += unit.nbytes
            self._writing_bytes -= unit.nbytes

    def discard(self, entry: Unit) -> None:
        """Frees the memory of a unit that is on storage."""
        entry.is_modified()
        entry.original = False
        if entry in self._writing:
            if entry.stored is not None:
                entry.stored.transfers.clear()
            del self._writing[entry]
            self._writing_bytes -= entry.nbytes
            self._bytes -= entry.nbytes
        elif entry in self.present:
            self._bytes -= entry.nbytes
        super().discard(entry)
        entry.seen.clear()
        if entry.stored is not None:  # what has failed has its traceback, and that the graph
            entry.stored.transfers[:] = itertools.filterfalse(IoFuture.done, entry.stored.transfers)
        place = bisect.bisect_left(self._away, entry.number)
        if self._away[place : place + 1] != [entry.number]:
            self._away.insert(place, entry.number)

    def _write(self, unit: Unit) -> None:
        """Starts to write a unit; if that fails, it is held with the error."""
        self._writing[unit] = None  # first: if Ctrl-C comes, ``_collect`` begins the write again
        self.to_write.pop(unit, None)
        self._held_bytes -= unit.nbytes
        self._writing_bytes += unit.nbytes
        try:
            self._residency.write_back(self, unit)
        except OSError as error:
            self._hold(unit, error)

    def _write_some(self, unit: Unit) -> Unit | None:
        """Writes what the budget has no room for, and what it will have no room for in this pass.

        Autograd saves an operation's arguments before it runs, and ``rrelu`` fills one of them only then: what each
        thread has saved last is not written yet. Returns a unit whose write is to be waited for, while too much is in
        flight beside ``unit``.
        """
        if self.present and self._bytes > self._kept:
            self._shrink(self._kept, used=False)
        young = set(itertools.chain.from_iterable(self._young.values()))
        for entry in list(self.to_write):
            over = self._bytes - self._writing_bytes > self._kept
            surplus = self._last_pass - self._kept - (self._this_pass - self._held_bytes)
            if not over and (surplus <= 0 or self._writing_bytes > self._most // 2):
                break
            if entry.number in young:
                continue
            if entry.memory is None or entry.memory.untyped_storage().nbytes() < entry.nbytes:
                del self.to_write[entry]  # its ticket was freed just now, or it was resized and needs no room
                self._held_bytes -= entry.nbytes
                self._bytes -= entry.nbytes
                continue
            if entry.trouble is None:
                self._write(entry)
            if entry.trouble is not None and over:
                self._write_or_raise(entry)
            elif entry.trouble is not None:  # raised when the budget needs its memory
                break
        much = self._bytes - unit.nbytes > self._most
        oldest = next(iter(self._writing), None) if much else None
        return None if oldest is unit else oldest

    def _write_or_raise(self, unit: Unit) -> None:
        """Tries once more to write a unit if there was no room, and raises why it fails."""
        if _is_full(unit.trouble) and self._stored.leaving:
            for transfer in itertools.chain.from_iterable(stored.transfers for stored in self._stored.leaving):
                transfer.exception()  # then its space is free
            self._collect()
            self._write(unit)
        failure, unit.trouble = unit.trouble, None
        if _is_full(failure):
            raise OSError(
                failure.errno,
                f"{os.strerror(failure.errno or errno.ENOSPC)}: {unit.describe()}, is to be saved for the backward "
                f"pass; there is no room for its {size_words(unit.nbytes)}, and {size_words(self._held_bytes)} in "
                f"memory spend the {self._budget_name} of {size_words(self.share.nbytes)}",
                failure.filename,
            ) from None
        if failure is not None:
            raise _named(failure, unit, "to be saved for the backward pass, could not be written")

    def _as_saved(self, unit: Unit, memory: torch.Tensor) -> torch.Tensor:
        """Returns the memory of a unit that was not written, and reads others ahead."""
        if unit.is_modified():
            raise modified(unit.dtype, unit.shape)
        if memory.untyped_storage().nbytes() < unit.nbytes:
            raise RuntimeError(
                f"{unit.describe()}, saved for the backward pass, has no memory: its storage was resized to "
                f"{memory.untyped_storage().nbytes()} bytes after that, and has not got them back"
            )
        if self._process == os.getpid() and not self._closed:
            if unit.leaving is not None:
                self._cancel(unit)
            self._collect()
            if self._away:
                self._read_ahead(unit)
        return memory

    def allocate(self, entry: Unit) -> torch.Tensor:
        """Returns memory of torch's."""
        self.counts.peak_bytes = max(self.counts.peak_bytes, self._bytes + entry.nbytes)
        if self._memory is not None:
            self._borrow(self._memory, self._bytes + entry.nbytes)
        return torch.empty(entry.nbytes, dtype=torch.uint8, device=entry.device)  # from the pool, see ``_add``

    def note_arrival(self, entry: Unit) -> None:
        """Notes the version of memory that is complete."""
        if entry.memory is not None:
            entry.handed_out = entry.memory._version  # which counts copies to an accelerator

    def _shrink(self, most: int, used: bool) -> bool:
        """Releases units that are on storage as well until ``most`` bytes are in memory; returns whether they are.

        ``used``: only those that this backward pass has used.
        """
        for unit in list(self.present):
            if self._bytes <= most:
                break
            if unit.demanded and unit.arrival is None if used else not unit.is_arriving():
                self.discard(unit)
        return self._bytes <= most

    def _read_ahead(self, unit: Unit) -> None:
        number = unit.number
        while (place := bisect.bisect_left(self._away, number)) > 0:
            number = self._away[place - 1]
            other = self._units.get(number)
            if other is not None and other.memory is None:
                # units that leave for it join the list
                if self._bytes + other.nbytes > self._most and not self._shrink(self._most - other.nbytes, used=True):
                    return
                try:
                    self._residency.begin(self, other, Priority.PREFETCH)
                    self._bytes += other.nbytes
                except (OSError, torch.cuda.OutOfMemoryError):  # it is raised on demand
                    return
            del self._away[bisect.bisect_left(self._away, number)]


def _size_class(nbytes: int) -> int:
    """Returns a size for page-locked memory, up to an eighth larger: what differs little reuses the same memory."""
    step = 1 << max(0, nbytes.bit_length() - 4)
    return max(1, -(-nbytes // step) * step)


def _is_full(failure: BaseException | None) -> TypeGuard[OSError]:
    return isinstance(failure, OSError) and failure.errno in NO_ROOM


def _without_frames(failure: OSError) -> OSError:
    """Returns the error; it and those that led to it lose their frames, which would keep tensors alive."""
    error: BaseException | None = failure
    while error is not None:
        error.__traceback__ = None
        error = error.__context__
    return failure


def _named(failure: BaseException, unit: Unit, what: str) -> BaseException:
    """Returns the failure, naming the tensor if it is about storage. It keeps no tensor alive."""
    traceback.clear_frames(failure.__traceback__)
    words = f"{unit.describe()}, {what}"
    if isinstance(failure, ChecksumError):
        return ChecksumError(failure.filename, [words])
    if isinstance(failure, OSError) and failure.errno is not None:
        return OSError(failure.errno, f"{words}: {failure.strerror}", failure.filename)
    return OSError(errno.EIO, f"{words}: {failure}") if isinstance(failure, EOFError) else failure
