"""The files of a model as the backing of entries."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from nvme_ops.io.engine import Priority
from nvme_ops.io.future import IoFuture
from nvme_ops.offload.residency.entry import Entry, tensors_over
from nvme_ops.storage.joined import joined
from nvme_ops.storage.source import FileExtent, submit_reads


class FileEntry(Entry):
    """Bytes of a model's files.

    Args:
        reads: the extents that fill its memory, each with the byte of the memory at which it begins.
        nbytes: the memory that it takes.
    """

    def __init__(self, reads: Sequence[tuple[FileExtent, int]], nbytes: int) -> None:
        super().__init__(nbytes)
        self.reads = reads

    def over(self, memory: torch.Tensor) -> torch.Tensor:
        """Returns the tensor in its memory."""
        return memory.detach()


class ModelFiles:
    """Weights in the files of a model; they do not change."""

    def read(
        self, entry: FileEntry, memory: torch.Tensor, priority: Priority
    ) -> tuple[torch.Tensor, IoFuture | None, int]:
        """Starts to fill an entry's memory; see ``Backing``. Raises FormatError if a file was changed."""
        values = entry.over(memory)
        entry.own_tensors = tensors_over(values)  # before those of the transfer, which go with it
        transfers = submit_reads([(extent, memory[at : at + extent.nbytes]) for extent, at in entry.reads], priority)
        transfer = transfers[0] if len(transfers) == 1 else joined(transfers)
        return values, transfer, sum(extent.nbytes for extent, _ in entry.reads)

    def write(self, entry: FileEntry) -> tuple[IoFuture, int]:
        """Is never called."""
        raise NotImplementedError
