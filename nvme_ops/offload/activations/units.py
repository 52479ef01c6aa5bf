"""Saved bytes of storages, where they are, and how many there are."""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from nvme_ops.base.text import size_words
from nvme_ops.io.future import IoFuture
from nvme_ops.offload.activations.saved_tensors import StoragePart, copy_of, made_of
from nvme_ops.offload.residency.entry import Entry, tensors_over
from nvme_ops.offload.residency.homes import Home
from nvme_ops.offload.residency.policy import Stats
from nvme_ops.storage.striped import Piece


@dataclass(repr=False)
class ActivationStats(Stats):
    """What was saved and moved since the start."""

    bytes_saved: int = 0  #: of large tensors, those that share a storage counted once
    bytes_cancelled: int = 0  #: that were to be written, but the backward pass came first
    bytes_recomputed: int = 0  #: that ``policy="auto"`` neither kept nor wrote


@dataclass(eq=False)
class Ticket:
    """Held by whatever may still ask for a unit; the unit is forgotten with it."""

    unit: Unit

    def __del__(self) -> None:
        """Frees the memory at once. Takes no lock: a tensor may be freed anywhere."""
        self.unit.memory = self.unit.values = None
        self.unit.seen.clear()


class TicketRef(weakref.ref[Ticket]):
    """Refers to a ticket; its callback is one call in C, such as of ``deque.append``: Ctrl-C cannot interrupt it."""

    unit: Unit | None = None


@dataclass(eq=False)
class Stored:
    """Where a unit is on storage, or in host memory, and the transfers that may use that."""

    pieces: list[Piece]
    transfers: list[IoFuture] = field(default_factory=list)
    checksum: int | None = None
    home: Home | None = None

    def is_idle(self) -> bool:
        """Returns whether nothing moves there or from there."""
        return all(map(IoFuture.done, self.transfers)) and (self.home is None or self.home.is_idle())


class Unit(Entry):
    """Bytes of one storage, in memory or on storage, for all saved tensors that are made of them."""

    original = True  #: the memory is that of the storage that was saved, or the copy of a part
    modified = False  #: before it was written
    stored: Stored | None = None  #: on storage, or on its way there
    trouble: BaseException | None = None  #: why writing it failed
    ticket: TicketRef | None = None

    def __init__(self, number: int, tensor: torch.Tensor, place: StoragePart) -> None:
        storage = tensor.untyped_storage()
        self.number, self.place, self.nbytes = number, place, place.nbytes
        self.device = tensor.device
        self.shape, self.dtype = tuple(tensor.shape), tensor.dtype  # of the first tensor, for messages
        self.origin = StorageWeakRef(storage)  #: so that no other storage gets its place
        self.version = tensor._version
        self.memory = torch.empty(0, dtype=torch.uint8, device=tensor.device)
        self.memory.set_(storage if place.part is None else copy_of(tensor), 0, (place.nbytes,), (1,))
        self.values = self.memory
        #: the version of its memory, unless a backward that was given it has changed it
        self.handed_out = self.memory._version
        self.seen: list[tuple[torch.Tensor, int]] = []  #: saved tensors, while they are in memory, and their versions
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


_MORE = tensors_over(torch.empty(1, device="cpu")) - 1  # counted beside a tensor itself
