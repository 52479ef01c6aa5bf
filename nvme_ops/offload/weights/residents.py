"""``Residents``: tensors that live on storage and change; those in memory are the ones that are used next."""

from __future__ import annotations

import contextlib
import gc
import itertools
import os
import threading
import time
import traceback
import weakref
from collections import deque
from collections.abc import Iterable, Iterator, Sequence

import torch

from nvme_ops._native import native
from nvme_ops.engine import Priority
from nvme_ops.future import IoFuture
from nvme_ops.handle import aio_handle
from nvme_ops.offload.device_memory import Memory, memory_on
from nvme_ops.offload.order import Order
from nvme_ops.offload.weights.resident import Phase, Resident, SwapStats, Use, tensors_over
from nvme_ops.settings import PAGE
from nvme_ops.storage.session import Session
from nvme_ops.storage.store import TensorStore
from nvme_ops.text import size_words

_PATIENCE = 30.0  # seconds after which memory that others hold is given up
_LONG = 0.2  # seconds without an ending of any transfer
_CHANGING = 2  # tensors that may be changed in turns: a chunk of an optimizer can span two parameters
_AHEAD = 64 << 20  # bytes that are read ahead, unless a quarter of the budget is more
_NEVER = 1 << 60  # the place of what no use is foreseen of
_numbers = itertools.count()


class Residents:
    """Fetches tensors into a bounded amount of memory, reads ahead what is used next, and writes back what was changed.

    Memory is made free by releasing what is used last, as far as the order of uses is known: it is that of the last
    time. Values that somebody still has keep their memory until they are gone. Any thread may call any
    method.

    Args:
        folders: of the session.
        name: of the session.
        budget: bytes of memory.
        device: where the tensors are used.
        checksums: keep a checksum of each tensor.
        handle: moves the bytes.
    """

    def __init__(
        self,
        folders: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
        name: str,
        *,
        budget: int,
        device: torch.device,
        checksums: bool,
        handle: aio_handle | None,
    ) -> None:
        self.budget, self.device, self._process = budget, device, os.getpid()
        self._lock = threading.RLock()
        self._memory: Memory = memory_on(device, max(PAGE, budget // PAGE * PAGE))
        self._order: Order[Use] = Order(together=True)
        self._all: weakref.WeakValueDictionary[str, Resident] = weakref.WeakValueDictionary()
        self._at: dict[str, weakref.ref[Resident]] = {}  # by place in the order
        self._nbytes = 0  # of all, in whole pages
        # In memory, in the order in which they came; and changed, in this order. Who has none any more needs neither.
        self._resident: weakref.WeakKeyDictionary[Resident, None] = weakref.WeakKeyDictionary()
        self._to_write: weakref.WeakKeyDictionary[Resident, None] = weakref.WeakKeyDictionary()
        self._stats = SwapStats()
        self._gone: deque[tuple[str, int]] = deque()  # keys of tensors that nobody has any more, and their bytes
        self._closed = False
        with contextlib.ExitStack() as undo:
            self._session = undo.enter_context(Session(folders, name=name))
            self._store = undo.enter_context(TensorStore(self._session, checksums=checksums, handle=handle))
            self._undo = undo.pop_all()

    def foresee(self, uses: Iterable[Use]) -> None:
        """Gives the order that is likely, again and again, before the first one is seen."""
        self._order = Order(uses, together=True)

    def add(self, resident: Resident, values: torch.Tensor | None = None) -> None:
        """Takes a tensor: writes its values, or leaves them undefined.

        Raises:
            MemoryError: the budget is smaller than it.
            OSError: ENOSPC: the disk is full.
        """
        if -(-resident.nbytes // PAGE) * PAGE > self._memory.nbytes:
            raise MemoryError(
                f"a tensor of {size_words(resident.nbytes)}, of shape {resident.shape}, does not fit a memory_budget "
                f"of {size_words(self.budget)}"
            )
        nbytes = -(-resident.nbytes // PAGE) * PAGE
        with self._lock:
            self._all[resident.key] = resident
            self._at[resident.place] = weakref.ref(resident)
            self._nbytes += nbytes
        weakref.finalize(resident, self._gone.append, (resident.key, nbytes)).atexit = False
        if values is not None:
            self.replace(resident, values)

    def replace(self, resident: Resident, values: torch.Tensor) -> None:
        """Starts to write new values of a tensor, from where they are; they must not change until that has ended."""
        with self._lock:
            self._require_open()
            self._forget(resident)
            resident.changes += 1
            resident.writing = self._store.put(resident.key, values)
            resident.stored = True
            self._stats.bytes_written += resident.nbytes

    def succeed(self, old: Resident, values: torch.Tensor) -> Resident:
        """Returns another tensor at the place of an old one, with these values, on storage when this returns.

        The old one leaves storage when nobody has it any more. Raises what ``add`` does.
        """
        resident = Resident(f"{old.place}.{next(_numbers)}", values, self.device)
        resident.place = old.place
        self.add(resident, values)
        self.require_written(resident)
        self._free_gone()
        return resident

    def _free_gone(self) -> None:
        """Frees the space of tensors that nobody has any more."""
        with self._lock:
            while self._gone:
                key, nbytes = self._gone[0]
                if key in self._store:
                    self._store.drop(key)
                self._gone.popleft()
                self._nbytes -= nbytes

    @contextlib.contextmanager
    def used(self, resident: Resident, phase: Phase, *, change: bool = False) -> Iterator[torch.Tensor]:
        """Lets the block compute with the values, see ``acquire``. What it does ``change`` is written afterwards."""
        values = self.acquire(resident, phase, change=change)
        try:
            yield values
        finally:
            del values
            if change:
                with self._lock:
                    self._write_some()

    def acquire(self, resident: Resident, phase: Phase, *, change: bool = False) -> torch.Tensor:
        """Returns the values, which stay in memory as long as somebody has them, and reads ahead what comes next.

        Raises:
            OSError: they cannot be read, or others cannot be written to make room.
            MemoryError: all memory is in use.
            ValueError: it was closed.
            RuntimeError: see ``Resident.require_apart``.
        """
        deadline = 0.0
        while True:
            resident.require_apart(change)
            if resident.values is None:
                self.require_written(resident)
            seen = native().endings()
            values = self._take(resident, phase, change)
            if values is not None:
                return values
            begin = time.perf_counter()
            deadline = deadline or begin + _PATIENCE
            if begin > deadline:
                raise self._too_little(resident)
            native().wait_for_ending(seen, _LONG)
            if native().endings() == seen:
                gc.collect()  # a traceback may keep memory, in a cycle
            self._stats.seconds_waited += time.perf_counter() - begin

    def scale(self, resident: Resident, by: torch.Tensor) -> bool:
        """Has values that are on storage multiplied when they arrive. Returns False where those in memory are newer."""
        with self._lock:
            if resident.is_used() or resident.changed or resident.scale is not None or not resident.stored:
                return False
            self._forget(resident)
            resident.scale = by
            return True

    def clear(self, resident: Resident) -> None:
        """Lets go of the values: they are undefined until others are given, and nothing is read."""
        with self._lock:
            self._forget(resident)
            resident.writing = resident.scale = None
            resident.stored = False

    def settle(self) -> None:
        """Writes all changes and waits for it. Raises OSError; the values then stay in memory."""
        with self._lock:
            found = [*self._all.values(), *self._resident]
        for each in found:
            self.require_written(each)  # which may have begun before the last change
            with self._lock:
                self._write_back(each)
        for each in found:
            self.require_written(each)

    def stats(self) -> SwapStats:
        """What was moved up to now."""
        with self._lock:
            self._stats.bytes_stored = self._store.bytes_in_use
            self._stats.peak_bytes = self._memory.peak
            return SwapStats(**vars(self._stats))

    @property
    def closed(self) -> bool:
        """Whether ``close`` was called."""
        return self._closed

    def close(self) -> None:
        """Waits for transfers and removes the files. Once or more."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        if self._process == os.getpid():
            for each in list(self._resident):
                for transfer in (each.arriving, each.writing):
                    if transfer is not None:
                        transfer.exception()
                self._forget(each)
        with contextlib.suppress(OSError):  # of a write that nobody needs any more
            self._undo.close()

    # Below

    def _require_open(self) -> None:
        if self._closed:
            raise ValueError("what holds these tensors on storage was closed")
        if self._process != os.getpid():
            raise RuntimeError("these tensors are swapped by the parent process: swap them in this one")

    def _take(self, resident: Resident, phase: Phase, change: bool) -> torch.Tensor | None:
        """Returns the values once they have arrived; None while there is no memory for them."""
        with self._lock:
            self._require_open()
            if resident.values is None and not self._begin(resident, Priority.DEMAND, None):
                return None
            there, arriving = resident.values, resident.arriving
            values = None if there is None else there.detach()
            self._order.use((resident.place, phase))
            self._read_ahead()
        try:
            if arriving is not None:
                self._await(resident, arriving)
            with self._lock:
                if resident.values is not there:  # another thread has released it, since its read failed there
                    return None
                if change:
                    resident.changed = True
                    resident.changes += 1
                    self._to_write.pop(resident, None)
                    self._to_write[resident] = None
            return values
        except BaseException:
            there = values = None  # which the traceback would keep
            raise

    def _await(self, resident: Resident, arriving: IoFuture) -> None:
        """Waits until the values are in memory. Raises OSError; they are then fetched again by the next use."""
        begin = time.perf_counter()
        try:
            try:
                arriving.result()
            except OSError:
                if resident.demanded:
                    raise
                arriving = self._again(resident, arriving)  # perhaps it does not fail now that it is needed
                arriving.result()
        except BaseException as error:
            with self._lock:
                if resident.arriving is arriving:
                    self._forget(resident)
            del arriving
            _free_frames(error)
            raise
        with self._lock:
            if resident.arriving is arriving:
                resident.arriving = None
                if resident.scale is not None and resident.values is not None:
                    resident.values.mul_(resident.scale)
            self._stats.seconds_waited += time.perf_counter() - begin

    def _again(self, resident: Resident, failed: IoFuture) -> IoFuture:
        with self._lock:
            if resident.arriving is failed:
                resident.demanded = True
                resident.arriving = self._store.get(resident.key, resident.values)
            return resident.arriving or failed

    def _begin(self, resident: Resident, priority: Priority, place: int | None) -> bool:
        """Starts to fetch it, into memory of what is used after ``place`` from now."""
        with torch.inference_mode(False):  # what is read there may be changed elsewhere
            memory = self._memory.allocate(max(1, resident.nbytes))
            if memory is None:
                memory = self._make_room(resident.nbytes, place)
            if memory is None:
                return False
            values = memory.view(resident.dtype).as_strided(resident.shape, resident.stride).detach()
        resident.own = tensors_over(values)
        resident.demanded = priority is Priority.DEMAND
        if resident.stored:
            try:
                resident.arriving = self._store.get(resident.key, values, priority=priority)
            except BaseException as error:
                del memory, values
                _free_frames(error)
                raise
            self._stats.bytes_read += resident.nbytes
            self._stats.bytes_on_demand += resident.nbytes * resident.demanded
        else:
            resident.changed = True  # has no values yet
        self._resident[resident] = None  # first, or Ctrl-C leaves values that nobody lets go of
        resident.values, resident.memory = values, memory
        return True

    def _read_ahead(self) -> None:
        if len(self._resident) == len(self._all):
            return
        room = max(_AHEAD, self._memory.nbytes // 4)
        for number, (place, _) in enumerate(self._order.ahead()):
            resident = self._at[place]()
            if resident is None:
                continue
            room -= resident.nbytes
            if room < 0:
                return
            if resident.values is not None or not resident.stored:
                continue
            if resident.writing is not None and not resident.writing.done():
                continue
            try:
                self.require_written(resident)
                if not self._begin(resident, Priority.PREFETCH, number):
                    return
            except OSError:  # it is tried again on demand
                return

    def _make_room(self, nbytes: int, place: int | None) -> torch.Tensor | None:
        """Lets go of what is used last, and after ``place``, until there is memory; None where there is none now."""
        next_use: dict[str, int] = {}
        for number, (at, _) in enumerate(self._order.ahead()):
            next_use.setdefault(at, number)
        after = -1 if place is None else place

        def when(each: Resident) -> int:
            return next_use.get(each.place, _NEVER) if self._at[each.place]() is each else _NEVER

        native().wait_for_ending(native().endings(), 0)  # releases the memory of transfers that have ended
        free = [each for each in list(self._resident) if when(each) > after]
        for each in sorted(free, key=when, reverse=True):
            if each.is_used():
                continue
            if each.arriving is None:
                self._write_back(each)
                if each.writing is not None and not (each.writing.done() and self._has_written(each)):
                    continue
                if each.changed or each.is_used():  # since what has just ended began
                    continue
            self._forget(each)
            memory = self._memory.allocate(max(1, nbytes))
            if memory is not None:
                return memory
        return None

    def _write_some(self) -> None:
        """Starts to write what others were changed after, so that its memory is free in time."""
        if self._nbytes <= self._memory.nbytes:
            return
        for each in list(self._to_write)[:-_CHANGING]:
            self._to_write.pop(each, None)
            with contextlib.suppress(OSError):  # it is tried again when memory is needed, and raised then
                self._write_back(each)

    def _write_back(self, resident: Resident) -> None:
        """Starts to write what was changed. What others may be changing just now is written once more later."""
        if not resident.changed or resident.values is None:
            return
        if resident.writing is not None and not resident.writing.done():
            return  # it is tried again
        try:
            resident.changed = resident.is_used()
            self._to_write.pop(resident, None)
            resident.writing = self._store.put(resident.key, resident.values)
            resident.stored, resident.scale = True, None  # the values in memory are scaled
        except BaseException as error:
            resident.changed = True
            _free_frames(error)
            raise
        self._stats.bytes_written += resident.nbytes

    def require_written(self, resident: Resident) -> None:
        """Waits until what is being written of it is on storage. What failed is written once more from memory.

        Raises OSError. Values in memory then stay there; others are lost, which each use of them raises again.
        """
        while resident.writing is not None and not self._has_written(resident):
            pass

    def _has_written(self, resident: Resident) -> bool:
        """Waits for the write. Returns False if it failed, perhaps long ago, and was begun again.

        Raises what ``require_written`` does.
        """
        writing = resident.writing
        failure = None if writing is None else writing.exception()
        with self._lock:
            if resident.writing is not writing:  # another thread has seen to it
                return False
            there = resident.values is not None
            if failure is None or there:
                resident.changed = resident.changed or failure is not None
                resident.writing = None
            resident.rewritten = again = failure is not None and there and not resident.rewritten
            if again:
                self._write_back(resident)
        if failure is not None and not again:
            raise failure
        return not again

    def _forget(self, resident: Resident) -> None:
        """Lets go of the values in memory. What is on its way keeps its memory until it has arrived."""
        if resident.arriving is not None and not resident.is_used():  # nobody waits for it, nor will ask how it ended
            resident.arriving.request_cancel()
        resident.values = resident.memory = resident.arriving = None
        resident.changed = False
        self._to_write.pop(resident, None)
        self._resident.pop(resident, None)

    def _too_little(self, resident: Resident) -> MemoryError:
        taken, nbytes = size_words(self._memory.bytes_in_use), size_words(self._memory.nbytes)
        return MemoryError(
            f"no memory in one piece for a tensor of {size_words(resident.nbytes)}, of shape {resident.shape}: "
            f"others in use have {taken} of {nbytes}"
        )


def _free_frames(error: BaseException) -> None:
    """Lets go of tensors that whoever keeps the exception would keep, by its traceback."""
    traceback.clear_frames(error.__traceback__)
