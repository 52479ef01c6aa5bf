"""``Resident``: what is known of one tensor that lives on storage and changes."""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Any, Literal

import torch

from nvme_ops.future import IoFuture
from nvme_ops.memory.carve import dense_strides

Phase = Literal["forward", "backward", "step"]


@dataclass
class SwapStats:
    """What was moved since the tensors went to storage."""

    bytes_read: int = 0
    bytes_on_demand: int = 0  #: of these, what was not foreseen
    bytes_written: int = 0
    bytes_stored: int = 0  #: the space that the tensors take
    seconds_waited: float = 0.0  #: by computation, for reads and for memory
    peak_bytes: int = 0  #: the most memory that they had at once


class Resident:
    """A tensor on storage, with its values in memory at times.

    Args:
        key: its name in the store.
        like: has its shape, strides, dtype and device; may be on the meta device.
        device: where its values come to; that of ``like`` when None.
    """

    def __init__(self, key: str, like: torch.Tensor, device: torch.device | None = None) -> None:
        self.key, self.shape, self.dtype = key, tuple(like.shape), like.dtype
        self.place = key  #: in the order of uses, which one that replaces another takes over
        self.stride = dense_strides(like)
        self.nbytes = like.numel() * like.itemsize
        self.device = device or like.device
        self.values: torch.Tensor | None = None  #: in memory, or on their way there
        self.memory: torch.Tensor | None = None  #: its bytes
        self.own = 0  #: tensors over this memory that are ours
        self.arriving: IoFuture | None = None
        self.writing: IoFuture | None = None
        self.rewritten = False  #: that has failed, and was begun again
        self.stored = False  #: there are values, on storage or on their way there
        self.changed = False  #: the values in memory are not those on storage
        self.copies: list[weakref.ref[Any]] = []  #: tensors that are to have the values of now, and have not yet
        self.changes = 0  #: counts those who were given the values to change them
        self.pickled: dict[Any, Any] = {}  #: copies in memory by ``changes``; references that do not keep them
        self.demanded = False
        self.scale: torch.Tensor | None = None  #: what the values are multiplied with when they arrive
        self.assigned: tuple[weakref.ref[torch.Tensor], int] | None = None  #: whose values it took, in which version
        self.is_part = False  #: of the memory of a tensor that was assigned

    def is_used(self) -> bool:
        """Whether others have tensors over the memory of the values: they compute with it, or may write to it."""
        for transfer in (self.arriving, self.writing):
            if transfer is not None:
                transfer.done()  # one that has ended gives its tensors back when it is asked
        return self.values is not None and tensors_over(self.values) > self.own

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


def tensors_over(tensor: torch.Tensor) -> int:
    """Returns how many tensors, of any kind, share the memory of this one; and those who hold that as a storage."""
    return int(torch._C._storage_Use_Count(tensor.untyped_storage()._cdata))
