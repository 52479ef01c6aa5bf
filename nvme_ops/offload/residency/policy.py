"""``Policy``: what one capability wants in memory, and ``Backing``: where its bytes come from and go."""

from __future__ import annotations

from collections.abc import Iterable, MutableMapping
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, Protocol, TypeVar

import torch

from nvme_ops.base.lifetime import Usable
from nvme_ops.base.text import Counts
from nvme_ops.io.engine import Priority
from nvme_ops.io.future import IoFuture
from nvme_ops.memory.tier import Share, in_pages
from nvme_ops.offload.residency.copies import CopyStream
from nvme_ops.offload.residency.entry import Entry


@dataclass(repr=False)
class Stats(Counts):
    """Counts what was moved since the start. ``print`` shows a table of what is not 0."""

    bytes_read: int = 0
    bytes_on_demand: int = 0  #: the part of ``bytes_read`` that was not read ahead
    bytes_written: int = 0
    bytes_stored: int = 0  #: on storage now
    bytes_in_host: int = 0  #: in host memory now, beside that of an accelerator
    bytes_to_host: int = 0  #: copied there from the accelerator
    bytes_from_host: int = 0  #: copied from there to the accelerator
    bytes_in_memory: int = 0  #: where it computes, now
    seconds_waited: float = 0.0  #: in which computation waited for reads, writes or memory
    seconds_waited_for_host: float = 0.0  #: in which an accelerator waited for copies from host memory
    peak_bytes: int = 0  #: the most memory in use at once

    def note_host(self, share: Share, copied: Stats, *streams: CopyStream) -> None:
        """Adds what host memory has now, what was ``copied`` there and back, and how long others waited for it."""
        self.bytes_in_host += share.bytes_in_use
        self.seconds_waited_for_host += sum(stream.seconds_waited() for stream in streams)
        self.bytes_to_host += copied.bytes_to_host
        self.bytes_from_host += copied.bytes_from_host


E = TypeVar("E", bound=Entry)
Read = tuple[torch.Tensor, IoFuture | None, int]
Stored = TypeVar("Stored", bound=Entry, contravariant=True)


class Backing(Protocol[Stored]):
    """Storage that entries are read from, and written to if they change."""

    def read(self, entry: Stored, memory: torch.Tensor, priority: Priority) -> Read:
        """Starts to fill an entry's memory; returns the tensor over it, the transfer if any, and the bytes read.

        Sets ``entry.own_tensors``.
        """

    def write(self, entry: Stored) -> tuple[IoFuture | None, int]:
        """Starts to write what storage has not of an entry's values; returns the transfer, and the bytes written."""


class Policy(Usable, Generic[E]):
    """Says what is used when, and what may leave memory. It moves nothing by itself: a ``Residency`` does.

    Its methods are called with the residency's lock, except those that say otherwise.

    Args:
        lock: of the residency that moves its entries, and that it joins when it is complete.
        share: the memory for entries.
        backing: where their bytes are; None for a policy without entries.
        stats: counts what is moved.
    """

    name = "entries"  #: in messages
    patience: float = 30.0  #: seconds to wait for memory that others hold
    gives_way: ClassVar[bool] = False  #: others that share its memory may take it, on demand
    drops_used: ClassVar[bool] = False  #: entries may leave while others use their values, which stay until then

    def __init__(self, lock: Any, share: Share, backing: Backing[E] | None, stats: Stats) -> None:
        super().__init__()
        self.lock = lock
        self.share, self.counts = share, stats
        self.backing: Any = backing
        self.present: MutableMapping[E, None] = {}  #: in the order of arrival
        self.to_write: MutableMapping[E, None] = {}  #: changed entries, in the order of their changes

    def least(self) -> int:
        """Returns the bytes of memory without which it cannot work."""
        return 0

    def wanted(self) -> int:
        """Returns the bytes of memory that it has a use for now."""
        return self.share.nbytes

    def resize(self, nbytes: int) -> None:
        """Sets how much memory it has."""
        self.share.nbytes = nbytes

    def wanted_below(self) -> int:
        """Returns the bytes of host memory, below that of an accelerator, that others have to leave to it."""
        return 0

    def resize_below(self, nbytes: int) -> None:
        """Sets how much of that memory others leave to it, as far as it gives way."""

    def has_share_for(self, entry: E) -> bool:
        """Returns whether an entry fits its share beside what is in use."""
        return self.share.bytes_in_use + in_pages(entry.nbytes) <= self.share.nbytes

    def allocate(self, entry: E) -> torch.Tensor | None:
        """Returns memory for an entry, or None while there is none."""
        return self.share.allocate(max(1, entry.nbytes))

    def require_room(self, entry: E) -> None:
        """Raises MemoryError if an entry can never be in memory. Called without the lock."""

    def bring_below(self, entry: E) -> None:
        """Waits until an entry is in the memory below, if it comes from there. Called without the lock."""

    def note_use(self, use: Any) -> None:
        """Records a use, and reads ahead."""

    def note_change(self, entry: E) -> None:
        """Records that an entry's values are about to change."""

    def note_arrival(self, entry: E) -> None:
        """Completes an entry whose bytes have arrived."""

    def note_eviction(self, entry: E) -> None:
        """Records that an entry is leaving memory for others."""

    def give_back(self) -> None:
        """Returns memory for which it has no more use; called when others lack some."""

    def await_copy(self) -> bool:
        """Waits until an entry is in the memory below; returns False if none is copied. Called without the lock."""
        return False

    def victims(self, after: int) -> Iterable[E]:
        """Returns entries that may leave memory, best first: those not used within the next ``after`` + 1 uses."""
        raise NotImplementedError

    def discard(self, entry: E) -> None:
        """Drops an entry's memory and its changes. Transfers under way and tensors over the memory keep it alive."""
        if entry.arrival is not None and not (entry.demanded and entry.is_used()):
            entry.arrival.request_cancel()  # nobody needs it; a thread that waits for this prefetch reads again
        if entry.queued is not None:
            entry.queued.release()
        entry.memory = entry.values = entry.arrival = entry.queued = None
        entry.changed = False
        self.present.pop(entry, None)
        self.to_write.pop(entry, None)

    def out_of_memory(self, entry: E) -> MemoryError:
        """Returns the error to raise when no memory has become free for an entry."""
        raise NotImplementedError

    def close(self) -> None:
        """Waits for transfers under way; memory is freed with the last tensor over it. Further calls do nothing."""
        with self.lock:
            if self._closed:
                return
            self._closed = True
        if self._is_ours():
            for entry in list(self.present):
                for arrival in (entry.arrival, entry.leaving):
                    if arrival is not None:
                        arrival.exception()
                self.discard(entry)
