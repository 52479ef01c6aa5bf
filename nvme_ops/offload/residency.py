"""``Residency``: entries whose bytes are on storage, and in bounded memory while they are used or soon will be.

What is streamed, swapped, saved for the backward pass or cached differs in who owns the memory, what frees it and what
is written back. These are the policies, one class each, on what is the same for all: an entry is fetched on demand or
ahead of its use, others leave to make room for it, a read ahead that fails is retried on demand, and whoever waits for
memory gives up after a while.
"""

from __future__ import annotations

import gc
import os
import threading
import time
import traceback
from collections.abc import Iterable, MutableMapping
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, TypeVar

import torch

from nvme_ops._native import native
from nvme_ops.engine import Priority
from nvme_ops.future import IoFuture
from nvme_ops.offload.device_memory import Memory, current_stream

_LONG = 0.2  # seconds without an ending of any transfer


@dataclass
class Stats:
    """What was moved since the start."""

    bytes_read: int = 0
    bytes_on_demand: int = 0  #: of these, what was not read ahead
    bytes_written: int = 0
    bytes_stored: int = 0  #: the space in use now
    seconds_waited: float = 0.0  #: by computation, for reads, writes and memory
    peak_bytes: int = 0  #: the most memory that was taken at once


class Arrival:
    """The end of what the current stream of a device was given to do until now, for those who use other streams.

    Args:
        device: an accelerator.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = current_stream(device)
        self._event = self._stream.record_event()

    def before(self, stream: torch.Stream) -> None:
        """Has what ``stream`` is given from now on begin after it."""
        if stream != self._stream:
            stream.wait_event(self._event)


class Entry:
    """One tensor, and where its bytes are.

    It is absent without ``memory``, arriving while ``arriving`` fills that, leaving while ``writing`` copies it to
    storage, and dirty while ``changed``.

    Args:
        nbytes: of memory that it takes.
    """

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self.memory: torch.Tensor | None = None  #: its bytes, there or on their way
        self.values: torch.Tensor | None = None  #: the tensor over them
        self.own = 0  #: tensors over this memory that are ours
        self.arriving: IoFuture | None = None
        self.writing: IoFuture | None = None
        self.changed = False  #: the values in memory are not those on storage
        self.demanded = False  #: somebody waits for it: it is not read ahead
        self.arrival: Arrival | None = None  #: of what a device does to the values before others compute with them

    def is_used(self) -> bool:
        """Whether others have tensors over its memory: they compute with it, wait for it, or may write to it."""
        for transfer in (self.arriving, self.writing):
            if transfer is not None:
                transfer.done()  # one that has ended gives its tensors back when it is asked
        return self.values is not None and tensors_over(self.values) > self.own


E = TypeVar("E", bound=Entry)


class Open:
    """What is usable until it is closed, and only in the process that made it."""

    _closed_error: ClassVar[str]
    _forked_error: ClassVar[str]

    def __init__(self) -> None:
        self._process, self._closed = os.getpid(), False

    @property
    def closed(self) -> bool:
        """Whether ``close`` was called."""
        return self._closed

    def require_open(self) -> None:
        """Raises ValueError after ``close``, and RuntimeError in a forked child."""
        if self._closed:
            raise ValueError(self._closed_error)
        if self._process != os.getpid():
            raise RuntimeError(self._forked_error)


class Patience:
    """Waits for memory that others hold.

    Args:
        seconds: after which it is given up.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds, self._deadline = seconds, 0.0

    def wait(self, seen: int) -> bool:
        """Waits until a transfer has ended that had not when ``native().endings()`` was ``seen``.

        Returns False once the time is up.
        """
        now = time.monotonic()
        self._deadline = self._deadline or now + self._seconds
        if now > self._deadline:
            return False
        native().wait_for_ending(seen, _LONG)
        if native().endings() == seen:
            gc.collect()  # a traceback may keep memory, in a cycle
        return True


class Residency(Open, Generic[E]):
    """Fetches entries into a bounded amount of memory. Any thread may call any method.

    A policy says whose memory it is (``_allocate``), how an entry is read (``_read``), what follows a use
    (``_note_use``), which entries may leave and in which order (``_victims``), and what has to be done before one does
    (``_evict``).

    Args:
        stats: counts what is moved.
    """

    patience: ClassVar[float] = 30.0  #: seconds after which memory that others hold is given up

    def __init__(self, stats: Stats) -> None:
        super().__init__()
        self._lock = threading.RLock()
        self._stats = stats
        self._in_memory: MutableMapping[E, None] = {}  # in the order in which they came

    # What a policy says

    _memory: Memory

    def _allocate(self, entry: E) -> torch.Tensor | None:
        """Returns memory for an entry; None while there is none."""
        return self._memory.allocate(max(1, entry.nbytes))

    def _read(self, entry: E, memory: torch.Tensor, priority: Priority) -> tuple[torch.Tensor, IoFuture | None]:
        """Starts to fill the memory of an entry; returns the tensor over it, and no transfer where it has no bytes.

        Sets ``entry.own`` and counts the bytes.
        """
        raise NotImplementedError

    def _prepare(self, entry: E) -> None:
        """Is called without the lock before an entry is fetched."""

    def _note_use(self, use: Any) -> None:
        """Takes note of a use, and reads ahead."""

    def _has_arrived(self, entry: E) -> None:
        """Is called with the lock when the bytes of an entry are there."""

    def _changes(self, entry: E, values: torch.Tensor) -> bool:
        """Notes that whoever has ``values`` changes them; returns False if these are no longer those of the entry."""
        raise NotImplementedError

    def _victims(self, after: int) -> Iterable[E]:
        """Yields entries that may leave memory, the first one first: what is used later than use ``after`` from now."""
        raise NotImplementedError

    def _evict(self, entry: E) -> bool:
        """Takes an entry out of memory; returns whether that could be done."""
        raise NotImplementedError

    def _too_little(self, entry: E) -> MemoryError:
        """Returns what is raised when no memory has become free for an entry."""
        raise NotImplementedError

    # What is the same for all

    def _fetch(self, entry: E, use: Any, *, change: bool = False) -> torch.Tensor:
        """Returns a tensor over the values of an entry once they are there, and reads ahead what follows ``use``."""
        patience = Patience(self.patience)
        while True:
            self._prepare(entry)
            seen = native().endings()
            with self._lock:
                self.require_open()
                if entry.values is None and not self._begin(entry, Priority.DEMAND):
                    values = None
                else:
                    values = None if entry.values is None else entry.values.detach()
                    arriving, demanded = entry.arriving, entry.demanded
                    self._note_use(use)
            try:
                if values is None:
                    self._wait_for_memory(entry, patience, seen)
                elif (arriving is None or self._arrived(entry, arriving, demanded)) and (
                    not change or self._changes(entry, values)
                ):
                    if (arrival := entry.arrival) is not None:
                        arrival.before(current_stream(values.device))
                    return values
            except BaseException:
                values = None  # the traceback would keep them alive
                raise

    def _memory_beside(self, entry: E, after: int) -> torch.Tensor:
        """Waits for memory for what is made of an entry and is none itself; see ``_victims`` for what leaves for it."""
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
            raise self._too_little(entry)
        self._stats.seconds_waited += time.perf_counter() - begin

    def _begin(self, entry: E, priority: Priority, after: int = -1) -> bool:
        """Starts to fetch an entry; returns False while there is no memory for it."""
        with torch.inference_mode(False):  # what is read there may be changed elsewhere
            memory = self._memory_for(entry, after)
            if memory is None:
                return False
            try:
                values, entry.arriving = self._read(entry, memory, priority)
            except BaseException as error:
                del memory
                free_frames(error)
                raise
        entry.demanded = priority is Priority.DEMAND
        self._in_memory[entry] = None  # first, or Ctrl-C leaves values that nobody releases
        entry.values, entry.memory = values, memory
        return True

    def _memory_for(self, entry: E, after: int) -> torch.Tensor | None:
        """Has entries leave until there is memory in one piece; returns None where there is none now."""
        memory = self._allocate(entry)
        if memory is not None:
            return memory
        native().wait_for_ending(native().endings(), 0)  # releases the memory of transfers that have ended
        for each in self._victims(after):
            if self._evict(each):
                memory = self._allocate(entry)
                if memory is not None:
                    return memory
        return None

    def _count_read(self, nbytes: int, priority: Priority) -> None:
        self._stats.bytes_read += nbytes
        self._stats.bytes_on_demand += nbytes * (priority is Priority.DEMAND)

    def _arrived(self, entry: E, arriving: IoFuture, demanded: bool) -> bool:
        """Waits for an entry. Returns False where a read ahead has failed: it is retried on demand."""
        begin = time.perf_counter()
        try:
            arriving.result()
        except Exception as error:
            with self._lock:
                if entry.arriving is arriving:
                    self._discard(entry)
            del arriving
            free_frames(error)
            if not demanded:
                return False
            raise
        with self._lock:
            if entry.arriving is arriving:
                entry.arriving = None
                self._has_arrived(entry)
            self._stats.seconds_waited += time.perf_counter() - begin
        return True

    def _discard(self, entry: E) -> None:
        """Takes an entry out of memory, whatever was changed. Transfers under way and tensors over it keep that."""
        if entry.arriving is not None and not (entry.demanded and entry.is_used()):
            entry.arriving.request_cancel()  # nobody will ask how it ended; who waits for a read ahead reads it again
        entry.memory = entry.values = entry.arriving = entry.arrival = None
        entry.changed = False
        self._in_memory.pop(entry, None)

    def close(self) -> None:
        """Waits for what is on its way; memory goes back with the last tensor over it. Further calls do nothing."""
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


def tensors_over(tensor: torch.Tensor) -> int:
    """Returns how many tensors, of any kind, share the memory of this one, and holders of its storage."""
    return int(torch._C._storage_Use_Count(tensor.untyped_storage()._cdata))


def free_frames(error: BaseException) -> None:
    """Releases tensors that the frames in a traceback would keep alive as long as the exception."""
    traceback.clear_frames(error.__traceback__)
