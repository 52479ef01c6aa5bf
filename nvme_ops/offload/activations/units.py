"""Saved bytes of storages, where they are, and how many there are."""

from __future__ import annotations

import weakref
from collections import deque
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from nvme_ops.future import IoFuture
from nvme_ops.offload.activations.saved_tensors import StoragePart, made_of, memory_of
from nvme_ops.offload.residency import Entry, Stats, tensors_over
from nvme_ops.storage.striped import Piece
from nvme_ops.text import size_words


@dataclass
class ActivationStats(Stats):
    """What was saved and moved since the start."""

    bytes_saved: int = 0  #: of large tensors, those that share a storage counted once
    bytes_cancelled: int = 0  #: that were to be written, but the backward pass came first
    bytes_recomputed: int = 0  #: that ``policy="auto"`` neither kept nor wrote


class Ticket:
    """Held by whatever may still ask for a unit; the unit is forgotten with it."""

    def __init__(self, unit: Unit) -> None:
        self.unit = unit

    def __del__(self) -> None:
        """Frees the memory at once. Takes no lock: a tensor may be freed anywhere."""
        self.unit.memory = self.unit.values = None
        self.unit.seen.clear()


class TicketRef(weakref.ref[Ticket]):
    """A reference that is appended to ``gone`` when its ticket is freed, in one call that Ctrl-C cannot interrupt."""

    __slots__ = ("unit",)
    unit: Unit

    def __new__(cls, ticket: Ticket, gone: deque[TicketRef]) -> TicketRef:  # noqa: D102
        made = super().__new__(cls, ticket, gone.append)
        made.unit = ticket.unit
        return made


@dataclass(eq=False)
class OnStorage:
    """Where a unit is on storage, and the transfers that may use that."""

    pieces: list[Piece]
    transfers: list[IoFuture] = field(default_factory=list)
    checksum: int | None = None


class Unit(Entry):
    """Bytes of one storage, in memory or on storage, for all saved tensors that are made of them."""

    def __init__(self, number: int, tensor: torch.Tensor, place: StoragePart) -> None:
        super().__init__(place.nbytes)
        storage = tensor.untyped_storage()
        self.number, self.place = number, place
        self.device = tensor.device
        self.shape, self.dtype = tuple(tensor.shape), tensor.dtype  # of the first tensor, for messages
        self.origin = StorageWeakRef(storage)  #: so that no other storage gets its place
        self.version = tensor._version
        self.memory = memory = memory_of(tensor, place)
        self.original = True  #: the memory is that of the storage that was saved, or the copy of a part
        self.handed_out = memory._version  #: its version, unless a backward that was given it has changed it
        self.seen: list[tuple[torch.Tensor, int]] = []  #: saved tensors, while they are in memory, and their versions
        self.modified = False  #: before it was written
        self.stored: OnStorage | None = None  #: on storage, or on its way there
        self.trouble: BaseException | None = None  #: why writing it failed
        self.ticket: TicketRef | None = None
        self._owner = weakref.ref(tensor if tensor._base is None else tensor._base)

    def has_bytes_of(self, tensor: torch.Tensor) -> bool:
        """Returns whether these are still the bytes of a tensor in its place.

        In memory they are. On storage they belong to the tensors that share a version counter with the first, as views
        of one tensor do: versions of others, such as ``tensor.data``, say nothing.
        """
        if self.version != tensor._version or self.is_modified():
            return False
        is_storage = self.memory is not None and self.original and self.place.part is None
        return is_storage or self._owner() is (tensor if tensor._base is None else tensor._base)

    def is_resized(self) -> bool:
        """Returns whether its storage was shrunk, as FSDP does, and is not restored yet."""
        return self.memory is not None and self.memory.untyped_storage().nbytes() < self.nbytes

    def is_shared(self) -> bool:
        """Returns whether others use its memory, too."""
        memory = self.memory
        if memory is None or not self.original:
            return False
        ours = 1 + len(self.seen) + len(made_of(memory))
        return tensors_over(memory) - _MORE > ours

    def is_modified(self) -> bool:
        """Returns whether anything was written to it since it was saved."""
        for tensor, version in self.seen:
            self.modified |= tensor._version != version
        return self.modified

    def describe(self) -> str:
        """Returns words for messages."""
        return f"a tensor of {size_words(self.nbytes)}, {str(self.dtype).removeprefix('torch.')} of shape {self.shape}"


class Tally:
    """Bytes of several groups."""

    nbytes = 0


class Group(dict[Unit, None]):
    """Units in the order in which they came, and their bytes, which are added to ``total`` as well."""

    nbytes = 0

    def __init__(self, total: Tally) -> None:
        super().__init__()
        self._total = total

    def __setitem__(self, unit: Unit, _: None) -> None:
        """Adds a unit as the last one, unless it is here."""
        if unit not in self:
            super().__setitem__(unit, None)
            self.nbytes += unit.nbytes
            self._total.nbytes += unit.nbytes

    def pop(self, unit: Unit, default: Any = None) -> Any:
        """Removes a unit, if it is here."""
        if unit in self:
            del self[unit]
            self.nbytes -= unit.nbytes
            self._total.nbytes -= unit.nbytes
        return default


_MORE = tensors_over(torch.empty(1, device="cpu")) - 1  # counted beside a tensor itself
