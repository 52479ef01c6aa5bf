"""``Residency``: entries whose bytes are on storage, and in bounded memory while they are used or soon will be.

Streamed weights, swapped parameters and saved activations differ in who owns the memory, what frees it and what is
written back. Each of them is a policy, a class derived from ``Residency``. The rest is the same for all: an entry is
fetched on demand or ahead of its use, others leave memory to make room for it, a failed prefetch is retried on demand,
and a wait for memory ends with an error after a while.
"""

from __future__ import annotations

import contextlib
import gc
import os
import time
import traceback
from collections.abc import Collection, Iterable, Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, TypeVar

import torch

from nvme_ops.base.locks import forkable_lock
from nvme_ops.base.native import native
from nvme_ops.base.text import Counts
from nvme_ops.io.engine import Priority
from nvme_ops.io.future import IoFuture
from nvme_ops.offload.device_memory import Memory, current_stream

_POLL = 0.2  # seconds to wait for a transfer to end before looking again


@dataclass(repr=False)
class Stats(Counts):
    """Counts what was moved since the start. ``print`` shows a table of what is not 0."""

    bytes_read: int = 0
    bytes_on_demand: int = 0  #: the part of ``bytes_read`` that was not read ahead
    bytes_written: int = 0
    bytes_stored: int = 0  #: on storage now
    seconds_waited: float = 0.0  #: in which computation waited for reads, writes or memory
    peak_bytes: int = 0  #: the most memory in use at once


class Arrival:
    """Marks the end of the work queued on a device's current stream, for other streams to wait for.

    Args:
        device: an accelerator.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = current_stream(device)
        self._event = self._stream.record_event()

    def before(self, stream: torch.Stream) -> None:
        """Makes ``stream`` wait for this point before it starts further work."""
        if stream != self._stream:
            stream.wait_event(self._event)


class Entry:
    """A tensor, and where its bytes are.

    It is absent while ``memory`` is None, arriving while ``arriving`` fills the memory, leaving while ``writing``
    copies it to storage, and dirty while ``changed``.

    Args:
        nbytes: the memory that it takes.
    """

    memory: torch.Tensor | None = None  #: its bytes, complete once ``arriving`` has ended
    values: torch.Tensor | None = None  #: the tensor over ``memory``
    own_tensors = 0  #: over this memory, held by the residency itself
    arriving: IoFuture | None = None
    writing: IoFuture | None = None
    changed = False  #: the values in memory are not those on storage
    demanded = False  #: somebody waits for it: this is no prefetch
    arrival: Arrival | None = None  #: the end of a device's work on the values, which their users wait for

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes

    def is_used(self) -> bool:
        """Returns whether others hold tensors over its memory: to compute with, to wait for, or perhaps to write to."""
        for transfer in (self.arriving, self.writing):
            if transfer is not None:
                transfer.done()  # one that has ended releases its tensors when it is asked
        return self.values is not None and tensors_over(self.values) > self.own_tensors


E = TypeVar("E", bound=Entry)


class Usable:
    """Base of what can be used until it is closed, and only in the process that made it."""

    _closed_error: ClassVar[str]
    _forked_error: ClassVar[str]

    def __init__(self) -> None:
        self._process, self._closed = os.getpid(), False

    @property
    def closed(self) -> bool:
        """Whether ``close`` was called."""
        return self._closed

    def is_usable(self) -> bool:
        """Returns whether ``require_open`` raises nothing."""
        return not self._closed and self._process == os.getpid()

    def require_open(self) -> None:
        """Raises ValueError after ``close``, and RuntimeError in a forked child."""
        if self._closed:
            raise ValueError(self._closed_error)
        if self._process != os.getpid():
            raise RuntimeError(self._forked_error)


class Patience:
    """Waits for memory that others hold, for a bounded time.

    Args:
        seconds: the bound, counted from the first wait.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds, self._deadline = seconds, 0.0

    def wait(self, seen: int) -> bool:
        """Waits until a transfer ends, unless one has ended since ``native().endings()`` returned ``seen``.

        It may return earlier. Returns False once the time is up.
        """
        now = time.monotonic()
        self._deadline = self._deadline or now + self._seconds
        if now > self._deadline:
            return False
        native().wait_for_ending(seen, _POLL)
        if native().endings() == seen:
            gc.collect()  # a reference cycle with a traceback may hold memory
        return True


class Residency(Usable, Generic[E]):
    """Fetches entries into a bounded amount of memory. Any thread may call any method.

    A policy says where memory comes from (``_allocate``), how an entry is read (``_read``), what to read after a use
    (``_note_use``), which entries may leave memory and in which order (``_victims``), and how one leaves (``_evict``).

    Args:
        stats: counts what is moved.
    """

    patience: ClassVar[float] = 30.0  #: seconds to wait for memory that others hold

    def __init__(self, stats: Stats) -> None:
        super().__init__()
        self._lock = forkable_lock()
        self._stats = stats
        self._in_memory: MutableMapping[E, None] = {}  # in the order of arrival

    # What a policy defines

    _memory: Memory

    def _allocate(self, entry: E) -> torch.Tensor | None:
        """Returns memory for an entry, or None while there is none."""
        return self._memory.allocate(max(1, entry.nbytes))

    def _read(self, entry: E, memory: torch.Tensor, priority: Priority) -> tuple[torch.Tensor, IoFuture | None, int]:
        """Starts to fill the memory of an entry; returns the tensor over it, the transfer if any, and the bytes read.

        Sets ``entry.own_tensors``.
        """
        raise NotImplementedError

    def _prepare(self, entry: E) -> None:
        """Prepares to fetch an entry. Called without the lock."""

    def _note_use(self, use: Any) -> None:
        """Records a use, and reads ahead."""

    def _complete_arrival(self, entry: E) -> None:
        """Completes an entry whose bytes have arrived. Called with the lock."""

    def _changes(self, entry: E, values: torch.Tensor) -> bool:
        """Records that ``values`` are about to change; returns False if the entry has got other memory meanwhile."""
        raise NotImplementedError

    def _victims(self, after: int) -> Iterable[E]:
        """Returns entries that may leave memory, best first: those not used within the next ``after`` + 1 uses."""
        raise NotImplementedError

    def _evict(self, entry: E) -> bool:
        """Takes an entry out of memory; returns False if it cannot leave now."""
        raise NotImplementedError

    def _out_of_memory(self, entry: E) -> MemoryError:
        """Returns the error to raise when no memory has become free for an entry."""
        raise NotImplementedError

    # What is the same for all

    def _fetch(self, entry: E, use: Any, *, change: bool = False) -> torch.Tensor:
        """Returns a tensor over the values of an entry once they have arrived, and reads ahead what follows ``use``."""
        return self._fetch_all({entry: use}, change=change)[0]

    def _fetch_all(self, uses: Mapping[E, Any], *, change: bool = False) -> list[torch.Tensor]:
        """Returns the same for entries that are used at once, each with its use."""
        patience = Patience(self.patience)
        while True:
            for entry in uses:
                self._prepare(entry)
            seen = native().endings()
            with self._lock:
                self.require_open()
                begun = [entry for entry in uses if entry.values is None]
                values: list[torch.Tensor] = []
                if not begun or self._begin_all(begun, uses):
                    values = [entry.values.detach() for entry in uses if entry.values is not None]
                    arriving = [entry.arriving for entry in uses]
                    for use in uses.values():
                        self._note_use(use)
            try:
                if not values:
                    self._wait_for_memory(max(uses, key=_size), patience, seen)
                elif all(
                    transfer is None or self._await_arrival(entry, transfer, entry in begun)
                    for entry, transfer in zip(uses, arriving, strict=True)
                ) and (not change or all(map(self._changes, uses, values))):
                    for entry in uses:
                        if (arrival := entry.arrival) is not None:
                            arrival.before(current_stream(values[0].device))
                    return values
            except BaseException:
                values.clear()  # the traceback would keep them alive
                raise

    def _begin_all(self, missing: Iterable[E], together: Collection[E]) -> bool:
        """Starts to fetch what is ``missing`` of entries that are used ``together``; returns False if it does not fit.

        Between those that are in memory, others may not fit in one piece. Then all leave, to arrive side by side.
        """
        for entry in sorted(missing, key=_size, reverse=True):
            if not self._begin(entry, Priority.DEMAND, spared=together):
                if len(together) > 1:
                    for each in together:
                        self._evict(each)
                return False
        return True

    def _memory_beside(self, entry: E, after: int) -> torch.Tensor:
        """Waits for memory that is not to hold an entry's stored values; see ``_victims`` for ``after``."""
        patience = Patience(self.patience)
        while True:
            seen = native().endings()
            with self._lock:
                self.require_open()
                memory = self._memory_for(entry, after)
            if memory is not None:
                return memory
            self._wait_for_memory(entry, patience, seen)

    def _wait_for_memory(self, entry: E, patience: Patience, seen: int) -> None:
        begin = time.perf_counter()
        if not patience.wait(seen):
            raise self._out_of_memory(entry)
        self._stats.seconds_waited += time.perf_counter() - begin

    def _begin(self, entry: E, priority: Priority, after: int = -1, spared: Collection[E] = ()) -> bool:
        """Starts to fetch an entry; returns False if there is no memory for it now, unless those ``spared`` leave."""
        # inference tensors could not be changed outside of that mode
        with torch.inference_mode(False) if torch.is_inference_mode_enabled() else contextlib.nullcontext():
            memory = self._memory_for(entry, after, spared)
            if memory is None:
                return False
            try:
                values, entry.arriving, nbytes = self._read(entry, memory, priority)
            except BaseException as error:
                del memory
                free_frames(error)
                raise
        entry.demanded = priority is Priority.DEMAND
        self._stats.bytes_read += nbytes
        self._stats.bytes_on_demand += nbytes * entry.demanded
        self._in_memory[entry] = None  # first, or Ctrl-C could leave values that nobody releases
        entry.values, entry.memory = values, memory
        return True

    def _memory_for(self, entry: E, after: int, spared: Collection[E] = ()) -> torch.Tensor | None:
        """Evicts entries until there is memory in one piece; returns None if there is none now."""
        memory = self._allocate(entry)
        if memory is not None:
            return memory
        native().wait_for_ending(native().endings(), 0)  # releases the memory of transfers that have ended
        for each in self._victims(after):
            if each not in spared and self._evict(each):
                memory = self._allocate(entry)
                if memory is not None:
                    return memory
        return None

    def _await_arrival(self, entry: E, arriving: IoFuture, begun: bool) -> bool:
        """Waits for an entry to arrive. Raises why it failed if it was ``begun`` for this wait.

        Returns False if one begun earlier has failed: it is to be read again, for storage may be well by now.
        """
        begin = time.perf_counter()
        failure = arriving.exception()
        if failure is not None:
            with self._lock:
                if entry.arriving is arriving:
                    self._discard(entry)
            del arriving
            free_frames(failure)
            try:
                if begun:
                    raise failure
                return False
            finally:
                del failure  # whose traceback has this frame
        with self._lock:
            if entry.arriving is arriving:
                entry.arriving = None
                self._complete_arrival(entry)
            self._stats.seconds_waited += time.perf_counter() - begin
        return True

    def _discard(self, entry: E) -> None:
        """Drops an entry's memory and its changes. Transfers under way and tensors over the memory keep it alive."""
        if entry.arriving is not None and not (entry.demanded and entry.is_used()):
            entry.arriving.request_cancel()  # nobody needs it; a thread that waits for this prefetch reads again
        entry.memory = entry.values = entry.arriving = entry.arrival = None
        entry.changed = False
        self._in_memory.pop(entry, None)

    def close(self) -> None:
        """Waits for transfers under way; memory is freed with the last tensor over it. Further calls do nothing."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        if self._process == os.getpid():
            for each in list(self._in_memory):
                for transfer in (each.arriving, each.writing):
                    if transfer is not None:
                        transfer.exception()
                self._discard(each)


def _size(entry: Entry) -> int:
    return entry.nbytes


def tensors_over(tensor: torch.Tensor) -> int:
    """Returns how many tensors and other holders share the storage of this tensor, itself included."""
    return int(torch._C._storage_Use_Count(tensor.untyped_storage()._cdata))


def free_frames(error: BaseException) -> None:
    """Clears the frames of a traceback, which would keep tensors alive as long as the exception."""
    traceback.clear_frames(error.__traceback__)
