"""``Residents``: tensors that live on storage and change; those in memory are the ones that are used next."""

from __future__ import annotations

import contextlib
import itertools
import os
import weakref
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Literal

import torch

from nvme_ops.engine import Priority
from nvme_ops.future import IoFuture
from nvme_ops.handle import aio_handle
from nvme_ops.memory.carve import dense_strides
from nvme_ops.offload.device_memory import memory_on
from nvme_ops.offload.order import Order
from nvme_ops.offload.residency import Arrival, Entry, Residency, Stats, free_frames, tensors_over
from nvme_ops.settings import PAGE
from nvme_ops.storage.session import Session
from nvme_ops.storage.store import TensorStore
from nvme_ops.text import size_words

_CHANGING = 2  # tensors that may be changed in turns: a chunk of an optimizer can span two parameters
_AHEAD = 64 << 20  # bytes that are read ahead, unless a quarter of the budget is more
_NEVER = 1 << 60  # the place of a tensor with no predicted use
_numbers = itertools.count()

Phase = Literal["forward", "backward", "step"]


class SwapStats(Stats):
    """What was moved since the tensors went to storage."""


class Resident(Entry):
    """A tensor on storage, with its values in memory at times.

    Args:
        key: its name in the store.
        like: has its shape, strides, dtype and device; may be on the meta device.
        device: where its values come to; that of ``like`` when None.
    """

    def __init__(self, key: str, like: torch.Tensor, device: torch.device | None = None) -> None:
        super().__init__(like.numel() * like.itemsize)
        self.key, self.shape, self.dtype = key, tuple(like.shape), like.dtype
        self.place = key  #: in the order of uses, which one that replaces another takes over
        self.stride = dense_strides(like)
        self.device = device or like.device
        self.rewritten = False  #: the last write failed and was started again
        self.stored = False  #: there are values, on storage or on their way there
        self.copies: list[weakref.ref[Any]] = []  #: tensors that are to have the values of now, and have not yet
        self.changes = 0  #: counts those who were given the values to change them
        self.pickled: dict[Any, Any] = {}  #: copies in memory by ``changes``; references that do not keep them
        self.scale: torch.Tensor | None = None  #: what the values are multiplied with when they arrive
        self.norm: torch.Tensor | None = None  #: of the values, where it is known
        self.assigned: tuple[weakref.ref[torch.Tensor], int] | None = None  #: whose values it took, in which version
        self.is_part = False  #: of the memory of a tensor that was assigned

    def require_apart(self, change: bool) -> None:
        """Raises RuntimeError where a tensor that shares memory with this one in torch would now differ from it."""
        if self.assigned is None:
            return
        tensor, version = self.assigned[0](), self.assigned[1]
        if tensor is None:
            self.assigned = None
        elif change or tensor._version != version:
            which = "this parameter, to which it was assigned," if change else "the tensor that was assigned to .data"
            raise RuntimeError(
                f"{which} is changed, and both share memory only where parameters are in memory: assign a clone(), or "
                "delete the other one before"
            )


Use = tuple[str, Phase]  # of the resident at a place


class Residents(Residency[Resident]):
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

    _closed_error = "what holds these tensors on storage was closed"
    _forked_error = "these tensors are swapped by the parent process: swap them in this one"

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
        super().__init__(SwapStats())
        self._memory = memory_on(device, max(PAGE, budget // PAGE * PAGE))
        self.budget, self.device = budget, device
        self._order: Order[Use] = Order(together=True)
        self._all: weakref.WeakValueDictionary[str, Resident] = weakref.WeakValueDictionary()
        self._at: dict[str, weakref.ref[Resident]] = {}  # by place in the order
        self._nbytes = 0  # of all, in whole pages
        # In memory, and changed, in this order. A tensor that is neither is in neither.
        self._in_memory = weakref.WeakKeyDictionary()
        self._to_write: weakref.WeakKeyDictionary[Resident, None] = weakref.WeakKeyDictionary()
        self._gone: deque[tuple[str, int]] = deque()  # keys of tensors that nobody has any more, and their bytes
        with contextlib.ExitStack() as undo:
            self._session = undo.enter_context(Session(folders, name=name))
            self._store = undo.enter_context(TensorStore(self._session, checksums=checksums, handle=handle))
            self._undo = undo.pop_all()

    def foresee(self, uses: Iterable[Use]) -> None:
        """Gives the order that is likely, again and again, before the first one is seen."""
        self._order = Order(uses, together=True)

    def require_room(self, resident: Resident) -> None:
        """Raises MemoryError if the budget is smaller than a tensor."""
        if _paged(resident.nbytes) > self._memory.nbytes:
            raise MemoryError(
                f"a tensor of {size_words(resident.nbytes)}, of shape {resident.shape}, does not fit a memory_budget "
                f"of {size_words(self.budget)}"
            )

    def add(self, resident: Resident, values: torch.Tensor | None = None) -> None:
        """Takes a tensor: starts to write its values, which must not change until that has ended, or has zeros.

        Raises:
            MemoryError: the budget is smaller than it.
            OSError: ENOSPC: the disk is full.
        """
        self.require_open()
        self.require_room(resident)
        self._free_gone()
        nbytes = _paged(resident.nbytes)
        with self._lock:
            self._all[resident.key] = resident
            self._at[resident.place] = weakref.ref(resident)
            self._nbytes += nbytes
        weakref.finalize(resident, self._gone.append, (resident.key, nbytes)).atexit = False
        if values is not None:
            with self._lock:
                resident.writing = self._store.put(resident.key, values)
                resident.stored = True
                self._stats.bytes_written += resident.nbytes

    def put(self, place: str, values: torch.Tensor) -> Resident:
        """Returns a new tensor at a place in the order, as ``add`` takes it.

        What was there leaves storage when nobody has it any more.
        """
        resident = Resident(f"{place}.{next(_numbers)}", values, self.device)
        resident.place = place
        if values.stride() != resident.stride:
            dense = torch.empty_strided(resident.shape, resident.stride, dtype=values.dtype, device=values.device)
            values = dense.copy_(values)
        self.add(resident, values)
        return resident

    def _free_gone(self) -> None:
        """Frees the space of tensors that nobody has any more."""
        with self._lock:
            while self._gone:
                key, nbytes = self._gone[0]
                with contextlib.suppress(KeyError):  # its write has failed
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
        resident.require_apart(change)
        return self._fetch(resident, (resident.place, phase), change=change)

    def scale(self, resident: Resident, by: torch.Tensor) -> bool:
        """Has values that are on storage multiplied when they arrive. Returns False where those in memory are newer."""
        with self._lock:
            if resident.is_used() or resident.changed or resident.scale is not None or not resident.stored:
                return False
            self._discard(resident)
            resident.scale, resident.norm = by, None
            return True

    def clear(self, resident: Resident) -> None:
        """Drops the values: they are zeros until others are given, and nothing is read."""
        with self._lock:
            self._discard(resident)
            resident.writing = resident.scale = resident.norm = None
            resident.stored = False

    def settle(self) -> None:
        """Writes all changes and waits for it. Raises OSError; the values then stay in memory."""
        with self._lock:
            found = [*self._all.values(), *self._in_memory]
        for each in found:
            self.require_written(each)  # which may have begun before the last change
            with self._lock:
                self._write_back(each)
        for each in found:
            self.require_written(each)

    def stats(self) -> SwapStats:
        """What was moved so far."""
        with self._lock:
            moved = vars(self._stats)
            return SwapStats(**{**moved, "bytes_stored": self._store.bytes_in_use, "peak_bytes": self._memory.peak})

    def close(self) -> None:
        """Waits for transfers and removes the files. Further calls do nothing."""
        super().close()
        with contextlib.suppress(OSError):  # the write's result is no longer needed
            self._undo.close()

    # The policy

    def _prepare(self, entry: Resident) -> None:
        if entry.values is None:
            self.require_written(entry)

    def _note_use(self, use: Use) -> None:
        self._order.use(use)
        self._read_ahead()

    def _has_arrived(self, entry: Resident) -> None:
        if entry.scale is not None and entry.values is not None:
            entry.values.mul_(entry.scale)
            self._note_computed(entry)

    def _changes(self, entry: Resident, values: torch.Tensor) -> bool:
        with self._lock:
            there = entry.values
            if there is None or there.untyped_storage()._cdata != values.untyped_storage()._cdata:
                return False  # another thread has released it, since its read failed there
            entry.changed, entry.norm = True, None
            entry.changes += 1
            self._to_write.pop(entry, None)
            self._to_write[entry] = None
            return True

    def _read(
        self, entry: Resident, memory: torch.Tensor, priority: Priority
    ) -> tuple[torch.Tensor, IoFuture | None, int]:
        values = memory.view(entry.dtype).as_strided(entry.shape, entry.stride).detach()
        entry.own = tensors_over(values)
        if not entry.stored:
            values.zero_()
            entry.changed = True
            self._note_computed(entry)
            return values, None, 0
        return values, self._store.get(entry.key, values, priority=priority), entry.nbytes

    def _note_computed(self, entry: Resident) -> None:
        if self.device.type != "cpu":
            entry.arrival = Arrival(self.device)

    def _read_ahead(self) -> None:
        if len(self._in_memory) == len(self._all):
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

    def _victims(self, after: int) -> Iterable[Resident]:
        """Yields what is used last, as far as that is known, the last first."""
        next_use: dict[str, int] = {}
        for number, (at, _) in enumerate(self._order.ahead()):
            next_use.setdefault(at, number)

        def when(each: Resident) -> int:
            return next_use.get(each.place, _NEVER) if self._at[each.place]() is each else _NEVER

        return sorted((each for each in self._in_memory if when(each) > after), key=when, reverse=True)

    def _evict(self, entry: Resident) -> bool:
        if entry.is_used():
            return False
        if entry.arriving is None:
            self._write_back(entry)
            if entry.writing is not None and not (entry.writing.done() and self._has_written(entry)):
                return False
            if entry.changed or entry.is_used():  # since what has just ended began
                return False
        self._discard(entry)
        return True

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
            free_frames(error)
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
            if resident.writing is not writing:  # another thread has handled it
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

    def _discard(self, entry: Resident) -> None:
        super()._discard(entry)
        self._to_write.pop(entry, None)

    def _out_of_memory(self, entry: Resident) -> MemoryError:
        taken, nbytes = size_words(self._memory.bytes_in_use), size_words(self._memory.nbytes)
        return MemoryError(
            f"no memory in one piece for a tensor of {size_words(entry.nbytes)}, of shape {entry.shape}: "
            f"others in use have {taken} of {nbytes}"
        )


def _paged(nbytes: int) -> int:
    return -(-nbytes // PAGE) * PAGE
