"""``Resident``: what is known of one tensor that lives on storage and changes."""

from __future__ import annotations

import weakref
from typing import Any, Literal

import torch

from nvme_ops.memory.carve import dense_strides
from nvme_ops.offload.residency import Entry, Stats

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
