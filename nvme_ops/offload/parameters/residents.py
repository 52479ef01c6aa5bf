"""``Residents``: tensors that are kept on storage and change, and are in memory shortly before and while in use."""

from __future__ import annotations

import contextlib
import itertools
import mmap
import os
import weakref
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any, Literal

import torch

from nvme_ops.base.lifetime import Closing
from nvme_ops.base.settings import PAGE
from nvme_ops.base.text import counted, never_raising, size_words
from nvme_ops.io.engine import Priority
from nvme_ops.io.file import handle_of
from nvme_ops.io.future import IoFuture
from nvme_ops.io.handle import aio_handle
from nvme_ops.io.tensors import dense_bytes, dense_strides
from nvme_ops.memory.tier import PooledTier, Share, in_pages, tier_on
from nvme_ops.offload.memory import Memory
from nvme_ops.offload.residency.account import Account, rate_of_folders
from nvme_ops.offload.residency.entry import Entry, QueuedWork, tensors_over
from nvme_ops.offload.residency.homes import Home, Homes
from nvme_ops.offload.residency.order import Order
from nvme_ops.offload.residency.placement import IN_FLIGHT
from nvme_ops.offload.residency.policy import Policy, Stats
from nvme_ops.offload.residency.residency import Residency
from nvme_ops.storage.session import Session, unnamed_file
from nvme_ops.storage.store import TensorStore

_CHANGING = 2  # tensors that may be changed alternately: a chunk of an optimizer can span two parameters
_NEVER = 1 << 60  # the next use of a tensor for which none is predicted
_numbers = itertools.count()

Phase = Literal["forward", "backward", "step"]


class SwapStats(Stats):
    """Counts what was moved since the tensors went to storage."""


class Resident(Entry):
    """A tensor on storage, whose values are in memory at times.

    Args:
        key: its name in the store.
        like: has its shape, strides, dtype and device; may be on the meta device.
        device: where its values are used; that of ``like`` when None.
        in_host: may be in host memory, beside that of an accelerator, instead of on storage.
        stays: is the last to leave memory.
    """

    home: Home | None = None  #: where it is instead of on storage

    def __init__(
        self,
        key: str,
        like: torch.Tensor,
        device: torch.device | None = None,
        in_host: bool = True,
        stays: bool = False,
    ) -> None:
        super().__init__(like.numel() * like.itemsize)
        self.in_host, self.stays = in_host, stays
        self.key, self.shape, self.dtype = key, tuple(like.shape), like.dtype
        self.place = key  #: names it in the order of uses; the tensor that replaces it takes this over
        self.stride = dense_strides(like)
        self.device = device or like.device
        self.stored = False  #: its values are on storage, or being written
        self.copies: list[weakref.ref[Any]] = []  #: copies to be made of the current values
        self.changes = 0  #: how often the values were fetched to be changed
        self.pickled: dict[Any, Any] = {}  #: weak references to copies in memory that were pickled, by ``changes``
        self.mapped: tuple[weakref.ref[torch.Tensor], int] | None = None  #: a mapped copy, and its ``changes``
        self.scale: torch.Tensor | None = None  #: a factor that the values get when they arrive
        self.norm: torch.Tensor | None = None  #: of the values, if known
        self.assigned: tuple[weakref.ref[torch.Tensor], int] | None = None  #: what ``data`` was set to, and its version
        self.is_part = False  #: whether that tensor was a part of a larger storage

    def require_unaliased(self, change: bool) -> None:
        """Raises RuntimeError if the tensor assigned to this one, in torch the same memory, would now differ."""
        if self.assigned is None:
            return
        tensor, version = self.assigned[0](), self.assigned[1]
        if tensor is None:
            self.assigned = None
        elif change or tensor._version != version:
            which = "this parameter, to which it was assigned," if change else "the tensor that was assigned to .data"
            raise RuntimeError(
                f"{which} is changed, but the two share memory only if parameters are in memory: assign a clone(), or "
                "delete the assigned tensor before"
            )

    def note_computed(self) -> None:
        """Marks the end of a device's work on the values, for users on other streams."""
        if self.device.type != "cpu":
            self.queued = QueuedWork(self.device)

    def __del__(self) -> None:
        """Waits for a copy to its memory."""
        if self.queued is not None:
            self.queued.release()

    def __repr__(self) -> str:
        """Returns its key."""
        return self.key


class _Stored:
    """Residents in host memory or in a store; those that were never put there are zeros."""

    def __init__(self, store: TensorStore, homes: Homes) -> None:
        self._store, self.homes = store, homes

    def put(self, entry: Resident, values: torch.Tensor) -> tuple[IoFuture | None, int]:
        """Starts to move the values of a resident to host memory or the store; returns the bytes that are written."""
        if entry.home is None:
            return self._store.put(entry.key, values), entry.nbytes
        return self.homes.copy_to(entry.home, dense_bytes(values)), 0

    def read(
        self, entry: Resident, memory: torch.Tensor, priority: Priority
    ) -> tuple[torch.Tensor, IoFuture | None, int]:
        values = memory.view(entry.dtype).as_strided(entry.shape, entry.stride).detach()
        entry.own_tensors = tensors_over(values)
        if not entry.stored:
            values.zero_()
            entry.changed = True
            entry.note_computed()
            return values, None, 0
        if entry.home is not None:
            copying = self.homes.copy_from(entry.home, entry, memory[: entry.nbytes])
            if entry.scale is not None:
                copying.before(entry.device)
                values.mul_(entry.scale)
                entry.note_computed()
            return values, None, 0
        return values, self._store.get(entry.key, values, priority=priority), entry.nbytes

    def write(self, entry: Resident) -> tuple[IoFuture | None, int]:
        values: Any = entry.values
        written = self.put(entry, values)
        entry.stored, entry.scale = True, None  # values in memory are scaled already
        return written


Use = tuple[str, Phase]  # of the resident at that place


class Residents(Policy[Resident]):
    """Tensors in a bounded amount of memory: what is used next is read ahead, and what was changed is written back.

    To make room, tensors leave memory whose next use is the furthest, if uses follow each other as they did before.
    Values keep their memory as long as anybody refers to them. Any thread may call any method.

    Args:
        folders: of the session.
        name: of the session.
        given: bytes of memory, or memory that is shared.
        budget_name: that of the argument that says so.
        device: where the tensors are used.
        host: host memory beside that of an accelerator: tensors are there instead of on storage.
        checksums: keep a checksum of each tensor on storage.
        handle: moves the bytes.
    """

    _closed_error = "these tensors on storage were closed"
    _forked_error = "these tensors are swapped by the parent process: swap them in this one"
    gives_way = True
    counts: SwapStats

    def __init__(
        self,
        folders: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
        name: str,
        *,
        given: int | Memory,
        budget_name: str = "memory_budget",
        device: torch.device,
        host: Share | None = None,
        checksums: bool,
        handle: aio_handle | None,
    ) -> None:
        self._memory = given if isinstance(given, Memory) else None
        self.budget = given if isinstance(given, int) else given.nbytes
        self._budget_name = budget_name
        self.device, self._handle = device, handle_of(handle)
        self.name = f"swapped {name}"
        self.borrowed: list[object] = []  #: memory that its user has besides, of memory that is shared
        self._largest = 0  # bytes of a tensor, in whole pages
        self._order: Order[Use] = Order(together=True)
        self._all: weakref.WeakValueDictionary[str, Resident] = weakref.WeakValueDictionary()
        # By place in the order; nothing may be at a place that was foreseen.
        self._at: weakref.WeakValueDictionary[str, Resident] = weakref.WeakValueDictionary()
        self._nbytes = 0  # of all, in whole pages
        self._gone: deque[tuple[str, int, Home | None]] = deque()  # keys, bytes and homes of tensors that were freed
        with contextlib.ExitStack() as undo:
            self._session = undo.enter_context(Session(folders, name=name))
            self.account = Account(rate_of_folders(self._session.folders))
            self._store = undo.enter_context(TensorStore(self._session, checksums=checksums, handle=handle))
            if self._memory is None:
                share, self._residency = tier_on(device, max(PAGE, self.budget // PAGE * PAGE)).share(), Residency()
            else:
                share, self._residency = self._memory.share(device), self._memory.residency
            self._stored = _Stored(self._store, Homes(host or PooledTier(0).share()))
            super().__init__(self._residency.lock, share, self._stored, SwapStats())
            self._undo = undo.pop_all()
        self.present = weakref.WeakKeyDictionary()  # weak, since a parameter may be dropped at any time
        self.to_write = weakref.WeakKeyDictionary()
        self._residency.join(self)
        if self._memory is not None:
            self._memory.join(self)

    def least(self) -> int:
        """Returns the bytes of two of the largest tensors: an operation may use several, or read another ahead."""
        return min(2 * self._largest, self._nbytes)

    def wanted(self) -> int:
        """Returns the bytes of all tensors."""
        return self._nbytes

    def foresee(self, uses: Iterable[Use]) -> None:
        """Sets the likely order of uses, which repeats, for as long as none was seen."""
        self._order = Order(uses, together=True)

    def require_room(self, entry: Resident) -> None:
        """Raises MemoryError if a tensor is larger than the budget, or than what is left of memory that is shared."""
        nbytes = in_pages(entry.nbytes)
        if nbytes > self.share.nbytes and not (self._memory is not None and self._memory.has_room(self, nbytes)):
            what = f"a {self._budget_name}" if self._memory is None else "what other users leave of a Memory"
            raise MemoryError(
                f"a tensor of {size_words(entry.nbytes)}, of shape {entry.shape}, does not fit {what} "
                f"of {size_words(self.budget)}"
            )

    def add(self, resident: Resident, values: torch.Tensor | None = None) -> None:
        """Adds a tensor, and starts to write its values; these must not change until that has ended.

        Without ``values`` they are zeros.

        Raises:
            MemoryError: the tensor is larger than the budget.
            OSError: ENOSPC: the disk is full.
        """
        self.require_open()
        self.require_room(resident)
        self._free_gone()
        nbytes = in_pages(resident.nbytes)
        with self.lock:
            self._all[resident.key] = resident
            self._at[resident.place] = resident
            self._nbytes += nbytes
            self._largest = max(self._largest, nbytes)
            if self._memory is not None:
                self._memory.balance()
            if resident.in_host:
                resident.home = self._stored.homes.take(resident.nbytes)
            weakref.finalize(resident, self._gone.append, (resident.key, nbytes, resident.home)).atexit = False
            if values is not None:
                resident.leaving, written = self._stored.put(resident, values)
                resident.stored = True
                self.counts.bytes_written += written

    def put(self, place: str, values: torch.Tensor) -> Resident:
        """Adds a new tensor at a place in the order, see ``add``, and returns it.

        The tensor it replaces leaves storage when nobody refers to it any more.
        """
        resident = Resident(f"{place}.{next(_numbers)}", values, self.device)
        resident.place = place
        if values.stride() != resident.stride:
            dense = torch.empty_strided(resident.shape, resident.stride, dtype=values.dtype, device=values.device)
            values = dense.copy_(values)
        self.add(resident, values)
        return resident

    def _free_gone(self) -> None:
        """Frees the space on storage of tensors that nobody refers to any more."""
        with self.lock:
            while self._gone:
                key, nbytes, home = self._gone[0]
                if home is not None:
                    home.free()
                with contextlib.suppress(KeyError):  # its write has failed, or it was in host memory
                    self._store.drop(key)
                self._gone.popleft()
                self._nbytes -= nbytes

    @contextlib.contextmanager
    def used(self, resident: Resident, phase: Phase, *, change: bool = False) -> Iterator[torch.Tensor]:
        """Yields the values, in memory as long as anybody refers to them, and reads ahead what is used next.

        If the block is to ``change`` them, they are written afterwards.

        Raises:
            OSError: the values cannot be read, or others cannot be written to make room.
            MemoryError: all memory is in use.
            ValueError: this was closed.
            RuntimeError: see ``Resident.require_unaliased``.
        """
        resident.require_unaliased(change)
        values = self._residency.fetch(self, resident, (resident.place, phase), change=change)
        try:
            yield values
        finally:
            del values
            if change:
                with self.lock:
                    self._write_early()

    def scale(self, resident: Resident, by: torch.Tensor) -> bool:
        """Has stored values multiplied when they arrive. Returns False, doing nothing, if those in memory are newer."""
        with self.lock:
            if resident.is_used() or resident.changed or resident.scale is not None or not resident.stored:
                return False
            self.discard(resident)
            resident.scale, resident.norm = by, None
            return True

    def clear(self, resident: Resident) -> None:
        """Makes the values zeros, without reading or writing."""
        with self.lock:
            self.discard(resident)
            resident.leaving = resident.scale = resident.norm = None
            resident.stored = False

    def mapped(self, values: torch.Tensor) -> torch.Tensor:
        """Returns a copy that is mapped from a file without a name, so that the kernel can take its memory back.

        Args:
            values: a dense tensor, on any device; the copy is in host memory.

        Raises:
            OSError: ENOSPC: the disk is full.
        """
        if values.nbytes < PAGE:
            return values.to("cpu", copy=True)
        fd = unnamed_file(self._session, values.nbytes)
        try:
            self._handle.submit_pwrite(dense_bytes(values), fd, 0).result()
            try:
                memory = mmap.mmap(fd, values.nbytes)
            except OSError:  # a mount that is not cached (FUSE, 9p) has no shared mappings; others count as memory
                memory = mmap.mmap(fd, values.nbytes, access=mmap.ACCESS_COPY)
        finally:
            os.close(fd)
        self.counts.bytes_written += values.nbytes
        elements = torch.frombuffer(memory, dtype=torch.uint8).view(values.dtype)
        return elements.as_strided(values.shape, values.stride())

    def settle(self) -> None:
        """Writes all changes and waits until they are stored. Raises OSError; the values then stay in memory."""
        with self.lock:
            residents = [*self._all.values(), *self.present]
        self._residency.settle(self, residents)

    def wait_until_written(self, resident: Resident) -> None:
        """Waits until a write under way has ended. Raises OSError; then values in memory stay, and others are lost."""
        self._residency.wait_until_written(self, resident)

    def stats(self) -> SwapStats:
        """Returns what was moved so far."""
        with self.lock:
            stats = replace(
                self.counts,
                bytes_stored=self._store.bytes_in_use,
                bytes_in_memory=self.share.bytes_in_use,
                peak_bytes=self.share.peak,
            )
            stats.note_host(self._stored.homes.share, self._stored.homes.counts, *self._stored.homes.streams())
            return stats

    @never_raising
    def __repr__(self) -> str:
        """Returns for example ``12 tensors of 64 MiB on storage, at most 16 MiB in memory``."""
        if self._closed:
            return "closed"
        nbytes = self._nbytes - sum(freed for _, freed, _ in self._gone.copy())
        stored = f"{counted(len(self._all), 'tensor')} of {size_words(nbytes)} on storage"
        return f"{stored}, at most {size_words(self.budget)} in memory"

    def close(self) -> None:
        """Waits for transfers and removes the files. Further calls do nothing."""
        super().close()
        homes = [resident.home for resident in self._all.values()] + [home for _, _, home in self._gone]
        for home in [home for home in homes if home is not None and self._is_ours()]:
            home.free()
        if self._memory is not None and self._process == os.getpid():
            self.borrowed.clear()
            self._memory.leave(self)
        with contextlib.suppress(OSError):  # the write's result is no longer needed
            self._undo.close()

    # The policy

    def note_use(self, use: Use) -> None:
        """Records a use, and reads ahead."""
        self._order.use(use)
        if len(self.present) == len(self._all):
            return
        room = max(2 * IN_FLIGHT, self.share.nbytes // 4)
        for number, (place, _) in enumerate(self._order.ahead()):
            resident = self._at.get(place)
            if resident is None:
                continue
            room -= resident.nbytes
            if room < 0:
                return
            if resident.values is not None or not resident.stored:
                continue
            if resident.leaving is not None and not resident.leaving.done():
                continue
            try:
                self.wait_until_written(resident)
                if not self._residency.begin(self, resident, Priority.PREFETCH, number):
                    return
            except OSError:  # it is retried on demand
                return

    def await_copy(self) -> bool:
        """Waits until one more tensor is in host memory."""
        with self.lock:
            homes = [resident.home for resident in self.present if resident.leaving is not None and resident.home]
            copying = [home.copying for home in homes if home.copying and not home.is_idle()]
        for copy in copying[:1]:
            copy.wait(None)
        return bool(copying)

    def note_arrival(self, entry: Resident) -> None:
        """Applies the scale that values got while they were on storage."""
        if entry.scale is not None and entry.values is not None:
            entry.values.mul_(entry.scale)
            entry.note_computed()

    def note_change(self, entry: Resident) -> None:
        """Forgets what was known of the values."""
        entry.norm = None
        entry.changes += 1

    def victims(self, after: int) -> Iterable[Resident]:
        """Returns entries whose next use comes after ``after`` others, the furthest first."""
        next_use: dict[str, int] = {}
        for number, (at, _) in enumerate(self._order.ahead()):
            next_use.setdefault(at, number)

        def when(resident: Resident) -> int:
            return next_use.get(resident.place, _NEVER) if self._at.get(resident.place) is resident else _NEVER

        moving = [resident for resident in self.present if not resident.stays and when(resident) > after]
        moving.sort(key=when, reverse=True)
        # what stays would be written for nothing while others leave
        if after < 0 and all(resident.leaving is None and resident.is_used() for resident in moving):
            moving += [resident for resident in self.present if resident.stays]
        return moving

    def _write_early(self) -> None:
        """Starts to write changed tensors, but for the last two, so that their memory is free in time."""
        if self._nbytes <= self.share.nbytes:
            return
        for resident in [resident for resident in list(self.to_write) if not resident.stays][:-_CHANGING]:
            self.to_write.pop(resident, None)
            with contextlib.suppress(OSError):  # it is retried, and raised, when memory is needed
                self._residency.write_back(self, resident)

    def out_of_memory(self, entry: Resident) -> MemoryError:
        """Returns an error that says what others have."""
        taken, nbytes = size_words(self.share.bytes_in_use), size_words(self.share.nbytes)
        return MemoryError(
            f"no memory in one piece for a tensor of {size_words(entry.nbytes)}, of shape {entry.shape}: "
            f"others in use have {taken} of {nbytes}"
        )


class Swapped(Closing):
    """Tensors of a program that are on storage; a context manager that closes them at the end."""

    def __init__(self, residents: Residents) -> None:
        self._residents = residents

    @never_raising
    def __repr__(self) -> str:
        """Returns for example ``<SwappedParams: 12 tensors of 64 MiB on storage, at most 16 MiB in memory>``."""
        return f"<{type(self).__name__}: {self._residents!r}>"

    def stats(self) -> SwapStats:
        """Returns what was moved so far."""
        return self._residents.stats()

    def explain(self) -> str:
        """Says what was moved and waited for since the last call or the start, and what limits.

        The first call measures the rates of storage and bus. Raises OSError if a folder has no room for 256 MiB.
        """
        return self._residents.account.explain(self.stats(), self._residents.share.device)
