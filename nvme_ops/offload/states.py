"""``States``: the values of chunks on storage, each in two places, and the step that is being taken."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from nvme_ops.engine import Priority
from nvme_ops.future import IoFuture
from nvme_ops.handle import aio_handle
from nvme_ops.memory.pool import Pool
from nvme_ops.memory.ring import Ring
from nvme_ops.offload.chunks import Chunk
from nvme_ops.storage.session import Session
from nvme_ops.storage.store import TensorStore
from nvme_ops.text import MIB

_BUFFER = 32 * MIB  # bytes of a buffer, unless the budget has fewer than _BUFFERS of these
_BUFFERS = 4
_COMMIT = "commit"  # the key of what tells which values are the last step's


@dataclass
class OptimizerStats:
    """What an optimizer has done since it was made."""

    steps: int = 0  #: completed
    bytes_read: int = 0
    bytes_written: int = 0
    bytes_stored: int = 0  #: the space that the states take, both places of each
    seconds: float = 0.0  #: in ``step``
    peak_bytes: int = 0  #: the most memory that was taken for states at once

    @property
    def bytes_written_per_step(self) -> float:
        """Bytes written by each step, on average: times the steps of a day, to be compared with a drive's rating."""
        return self.bytes_written / max(1, self.steps)


class States:
    """Reads, writes and commits chunks.

    Args:
        folders: of the session.
        name: of the session.
        keep: leave the values to the next session of this name.
        budget: bytes of memory for buffers.
        pinned: whether an accelerator copies from them.
        checksum: keep a checksum of each chunk.
        handle: moves the bytes.
    """

    def __init__(
        self,
        folders: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
        name: str,
        *,
        keep: bool,
        budget: int,
        pinned: bool,
        checksum: bool,
        handle: aio_handle | None,
    ) -> None:
        self.chunks: list[Chunk] = []
        self.done: set[Chunk] = set()  #: those that the step at hand has updated
        self.stats = OptimizerStats()
        self.when_done: Callable[[Chunk], None] = lambda _: None  #: is called when a chunk is in ``done``
        self._pool = Pool(budget, pinned=pinned)
        #: Bytes of a buffer.
        self.buffer = min(_BUFFER, budget // _BUFFERS, self._pool.largest)
        self._ring = Ring(self._pool, buffer=self.buffer, depth=max(_BUFFERS, budget // _BUFFER))
        with contextlib.ExitStack() as undo:
            self._session = undo.enter_context(Session(folders, name=name, keep=keep))
            self._store = undo.enter_context(TensorStore(self._session, checksum=checksum, handle=handle))
            self._undo = undo.pop_all()

    def add(self, chunks: Iterable[Chunk]) -> None:
        """Takes chunks that nothing is stored of."""
        for chunk in chunks:
            chunk.number = len(self.chunks)
            self.chunks.append(chunk)

    def update(self, chunks: Iterable[Chunk]) -> Generator[tuple[Chunk, torch.Tensor], None, None]:
        """Yields each chunk with its states, to be changed; close it, or exhaust it. Adds to ``done`` what is stored.

        A chunk whose states could not be written has the values of its parameters put back.
        """
        return self._ring.update(chunks, self._read, self._write, self._ended)

    def look(
        self, chunks: Iterable[Chunk], write: Callable[[Chunk, torch.Tensor], IoFuture | None]
    ) -> Generator[tuple[Chunk, torch.Tensor], None, None]:
        """Yields each chunk that has states with these, and hands them to ``write``."""
        stored = (chunk for chunk in chunks if chunk.slot is not None)
        return self._ring.update(stored, self._read, write, lambda *_: None)

    def _read(self, chunk: Chunk, buffer: torch.Tensor) -> IoFuture | None:
        if chunk.slot is None or not chunk.nbytes:
            return None
        self.stats.bytes_read += chunk.nbytes
        return self._store.get(chunk.key(chunk.slot), buffer[: chunk.nbytes], priority=Priority.PREFETCH)

    def _write(self, chunk: Chunk, buffer: torch.Tensor) -> IoFuture | None:
        if not chunk.nbytes or not chunk.updated:
            return None
        self.stats.bytes_written += chunk.nbytes
        return self._store.put(chunk.key(chunk.other_slot), buffer[: chunk.nbytes])

    def _ended(self, chunk: Chunk, buffer: torch.Tensor, failure: BaseException | None) -> None:
        """Takes the new states for the chunk's, or gives the parameters their old values."""
        backup, updated = chunk.backup(buffer), chunk.updated
        chunk.updated = []
        if failure is not None:
            with contextlib.closing(chunk.borrowed(updated)) as parts:
                for each in (each for slices in parts for each in slices):
                    each.values().copy_(backup[each.place])
        else:
            for each in updated:
                each.scalars, each.pending = each.pending, None
            if updated:
                chunk.slot = chunk.other_slot
            self.done.add(chunk)
            self.when_done(chunk)

    def fill(
        self, read: Callable[[Chunk, torch.Tensor], IoFuture | None]
    ) -> Generator[tuple[Chunk, torch.Tensor], None, None]:
        """Yields each chunk with states that ``read`` brings from elsewhere, to be its own; as ``update``."""
        return self._ring.update(self.chunks, read, self._write, self._ended)

    def share(self, chunk: Chunk, target: int, place: int) -> bool:
        """Has the states of a chunk in an open file by reference; see ``TensorStore.share``."""
        return chunk.slot is not None and self._store.share(chunk.key(chunk.slot), target, place)

    def described(self, about: dict[str, Any]) -> dict[str, Any]:
        """Returns ``about`` with what is kept of chunks beside their values."""
        chunks = [[chunk.slot, [_written(each.scalars) for each in chunk.slices]] for chunk in self.chunks]
        return {**about, "chunks": chunks}

    def commit(self, about: dict[str, Any]) -> None:
        """Ends a step: its values are those to go on with, with ``about``, also after a crash of this process."""
        if self._session.keep:
            record = self.described(about)
            content = torch.frombuffer(bytearray(json.dumps(record).encode()), dtype=torch.uint8)
            self._store.put(_COMMIT, content, keep="previous").result()
        self.done.clear()

    def committed(self) -> dict[str, Any] | None:
        """Returns ``about`` of the last step that an earlier program has committed here, or None."""
        if _COMMIT not in self._store:
            return None
        future = self._store.get(_COMMIT)
        future.result()
        found: dict[str, Any] = json.loads(bytes(future.tensor.numpy()))
        return found

    def resume(self, record: dict[str, Any]) -> None:
        """Continues with the values of this record, whose chunks are those of now."""
        for chunk, (slot, scalars) in zip(self.chunks, record["chunks"], strict=True):
            chunk.slot = slot
            for each, written in zip(chunk.slices, scalars, strict=True):
                each.scalars = read_back(written, chunk.device)

    def nameless(self, nbytes: int) -> int:
        """Returns the descriptor of a new file without a name in the first folder, with its blocks allocated."""
        fd = self._session.open(0, "state_dict")
        try:
            os.unlink(self._session.path(0, "state_dict"))
            os.posix_fallocate(fd, 0, nbytes)
        except OSError:
            os.close(fd)
            raise
        return fd

    @property
    def closed(self) -> bool:
        """Whether ``close`` was called."""
        return self._session.closed

    def measure(self) -> OptimizerStats:
        """Returns what was moved and is taken now."""
        self.stats.bytes_stored, self.stats.peak_bytes = self._store.bytes_in_use, self._pool.peak
        return self.stats

    def close(self) -> None:
        """Removes the files, or leaves kept ones to the next session. Further calls do nothing."""
        self._undo.close()


def _written(scalars: dict[str, Any] | None) -> dict[str, Any] | None:
    """Returns scalar states as JSON has them: a tensor as its dtype, value and whether it is in host memory."""
    if scalars is None:
        return None
    return {
        name: [str(value.dtype).removeprefix("torch."), value.item(), value.device.type == "cpu"]
        if isinstance(value, torch.Tensor)
        else value
        for name, value in scalars.items()
    }


def read_back(written: dict[str, Any] | None, device: torch.device) -> dict[str, Any] | None:
    """Undoes ``_written``."""
    if written is None:
        return None
    found = dict(written)
    for name, value in found.items():
        if isinstance(value, list):
            dtype, number, on_host = value
            found[name] = torch.tensor(number, dtype=getattr(torch, dtype), device="cpu" if on_host else device)
    return found
