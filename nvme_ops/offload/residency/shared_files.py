"""``SharedFiles``: the files of a model as the backing of entries in memory that processes share."""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable, Sequence

import torch

from nvme_ops.io.engine import Priority
from nvme_ops.io.future import IoFuture
from nvme_ops.memory.pool import can_pin
from nvme_ops.memory.shared_memory import Key, SharedMemory, SharedTier, key_of, shared_memory
from nvme_ops.memory.tier import Share
from nvme_ops.offload.residency.entry import tensors_over
from nvme_ops.offload.residency.files import FileEntry, ModelFiles
from nvme_ops.storage.joined import JoinedOperation, as_operation
from nvme_ops.storage.source import WeightFile, submit_reads

_PERIOD = 0.001  # seconds between looks whether another process has filled a piece
_PATIENCE = 5.0  # seconds until it is no longer waited for: it may be stopped


def shared_files(files: Sequence[WeightFile], budget: Callable[[int], int]) -> SharedFiles | None:
    """Returns the backing of entries in shared memory; None where there is none to be had.

    ``NVME_OPS_SHARE_HOST=0`` says that there is not to be any. Files that may be written to are not shared.

    Args:
        files: all that entries are read from.
        budget: returns the most bytes to keep, of which so many as it is given are there already, which takes no more.
    """
    identities = [file.identity for file in files]
    can_register = torch.cuda.is_available() or not can_pin()
    if os.environ.get("NVME_OPS_SHARE_HOST") == "0" or not files or None in identities or not can_register:
        return None
    memory = shared_memory(identities, 2 * sum(file.size for file in files))  # parts may be entries beside the whole
    return None if memory is None else SharedFiles(files, SharedTier(budget(memory.bytes_complete()), memory))


class SharedFiles(ModelFiles):
    """Weights in the files of a model, each of which one process reads for all.

    Args:
        files: all that entries are read from.
        tier: has the entries' memory.
    """

    def __init__(self, files: Sequence[WeightFile], tier: SharedTier) -> None:
        self.tier, self._places = tier, {file: place for place, file in enumerate(files)}

    def allocate(self, entry: FileEntry, share: Share) -> torch.Tensor | None:
        """Returns memory for an entry, in which it may be already."""
        return self.tier.allocate_for(self._key(entry), max(1, entry.nbytes), share)

    def has(self, entry: FileEntry) -> bool:
        """Returns whether some process has an entry in memory."""
        piece = self.tier.memory.piece_of(self._key(entry))
        return piece is not None and self.tier.memory.is_complete(piece)

    def filling(self, entry: FileEntry, memory: torch.Tensor, transfer: IoFuture) -> JoinedOperation | None:
        """Returns what tells others of an entry at the end of a transfer, which is to begin now; None if they have it.

        It has failed until its ``trouble`` is set to None.
        """
        piece, pieces = self.tier.piece_of(memory), self.tier.memory
        if piece is None or pieces.is_complete(piece) or not pieces.begin_to_fill(piece, anyhow=True):
            return None
        operation = JoinedOperation([transfer], _end_to_fill, pieces, piece, _files_of(entry))
        operation.trouble = RuntimeError("the transfer was not begun")
        return operation

    def _key(self, entry: FileEntry) -> Key:
        reads = [(self._places[extent.file], extent.start, extent.nbytes, at) for extent, at in entry.reads]
        return key_of(entry.nbytes, reads)

    def read(
        self, entry: FileEntry, memory: torch.Tensor, priority: Priority
    ) -> tuple[torch.Tensor, IoFuture | None, int]:
        """Starts to fill an entry's memory, or to wait for the process that does; see ``ModelFiles``."""
        piece = self.tier.piece_of(memory)
        if piece is None:  # the accelerator's
            return super().read(entry, memory, priority)
        values = entry.over(memory)
        entry.own_tensors = tensors_over(values)
        if self.tier.memory.is_complete(piece):
            return values, None, 0
        parts = [(extent, memory[at : at + extent.nbytes]) for extent, at in entry.reads]
        begin = functools.partial(submit_reads, parts, priority)
        filling = _Filling(self.tier.memory, piece, begin, _files_of(entry))
        is_ours = filling.advance()
        nbytes = sum(extent.nbytes for extent, _ in entry.reads)
        return values, IoFuture(as_operation(filling)), nbytes if is_ours else 0


class _Filling(JoinedOperation):
    """Waits until a piece is complete, and fills it unless another process does.

    Args:
        memory: has the piece.
        piece: is kept.
        begin: starts to read.
        files: that are read.
    """

    def __init__(
        self, memory: SharedMemory, piece: int, begin: Callable[[], list[IoFuture]], files: set[WeightFile]
    ) -> None:
        super().__init__([], lambda _: None)
        self._memory, self._piece, self._files = memory, piece, files
        self._begin: Callable[[], list[IoFuture]] | None = begin  # None once it was called, or need not be
        self._deadline = time.monotonic() + _PATIENCE

    def advance(self) -> bool:
        """Begins to read if it is this one's turn; returns whether there is nothing left but to wait for that."""
        with self._lock:
            if self._begin is None or not self._is_ours():
                return True
            if self._memory.is_complete(self._piece):
                self._begin = None
                return True
            if not self._memory.begin_to_fill(self._piece, anyhow=time.monotonic() > self._deadline):
                return False
            begin, self._begin = self._begin, None
            self._finish, self._arguments = _end_to_fill, (self._memory, self._piece, self._files)
            try:
                self._transfers += begin()
            except Exception as error:
                self.trouble = error.with_traceback(None)
        super().add_callback(lambda: None)  # others wait for its end, even if nobody does here
        return True

    def done(self) -> bool:
        """Returns whether it has ended."""
        return self.advance() and super().done()

    def has_ended(self) -> bool:
        """Returns whether it has ended; begins nothing."""
        return self._ended or (self._begin is None and super().has_ended())

    def wait(self, seconds: float | None) -> bool:
        """Waits for the end; returns False if ``seconds`` passed first."""
        deadline = None if seconds is None else time.monotonic() + seconds
        while not self.advance():
            if deadline is not None and time.monotonic() >= deadline:
                return False
            time.sleep(_PERIOD)
        return super().wait(None if deadline is None else max(0.0, deadline - time.monotonic()))

    def add_callback(self, callable: Callable[[], object]) -> None:
        """Calls ``callable`` at the end; this waits until it can begin."""
        while not self.advance():
            time.sleep(_PERIOD)
        super().add_callback(callable)


def _files_of(entry: FileEntry) -> set[WeightFile]:
    return {extent.file for extent, _ in entry.reads}


def _end_to_fill(failure: BaseException | None, memory: SharedMemory, piece: int, files: set[WeightFile]) -> None:
    is_complete = False
    try:
        if failure is None:
            for file in files:
                file.require_unchanged()
            is_complete = True
    finally:
        memory.end_to_fill(piece, is_complete)
