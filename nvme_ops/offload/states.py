"""``States``: the values of chunks on storage, each in two places, and the step that is being taken.

Which place counts is said by ``now`` while the program runs, and for the next program by the committed record. What
either names is not written. So a step or a load that ends badly anywhere leaves the states of before, or the new ones.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections import deque
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from nvme_ops.engine import Priority
from nvme_ops.errors import FormatError
from nvme_ops.future import IoFuture
from nvme_ops.handle import aio_handle
from nvme_ops.memory.pieces import checksums_anywhere
from nvme_ops.memory.pool import Pool
from nvme_ops.memory.ring import Ring
from nvme_ops.offload.chunks import Chunk, Version
from nvme_ops.storage.session import Session
from nvme_ops.storage.store import TensorStore
from nvme_ops.text import MIB, parse_json

_BUFFER = 32 * MIB  # bytes of a buffer, unless the budget has fewer than _BUFFERS of these
_BUFFERS = 4
_COMMIT = "commit"  # the key of what tells which values are the last step's
_FRAME = "nvme_ops commit 1"  # begins the line before it, which ends with its CRC-32C
_SLOTS = 2  # places of a chunk's values
_NOTHING = Version()


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
        self.groups = 0  #: of parameters, that are in chunks
        self.now: dict[Chunk, Version] = {}  #: what counts
        self.changed: dict[Chunk, torch.Tensor] = {}  #: whose parameters may not fit ``now``; the buffer has a backup
        self.attempt = 0  #: at a step: chunks with a version of this number are done
        self.ended: int | None = None  #: the attempt that was committed last
        self.stats = OptimizerStats()
        self.when_done: Callable[[Chunk], None] = lambda _: None  #: is called when a chunk is done, perhaps twice
        self._named: dict[Chunk, int | None] = {}  # the slots that the committed record names
        self._doubtful = False  # whether it may name others: a commit was interrupted
        self._unsettled = False  # a pass is under way, or was interrupted
        self._spare = False  # there are values in third places
        self._pool = Pool(budget, pinned=pinned)
        #: Bytes of a buffer.
        self.buffer = min(_BUFFER, budget // _BUFFERS, self._pool.largest)
        depth = max(_BUFFERS, budget // _BUFFER)
        self._ring = Ring(self._pool, buffer=self.buffer, depth=depth)
        self._transfers: deque[IoFuture] = deque(maxlen=2 * depth)  # those of the ring that may be under way
        with contextlib.ExitStack() as undo:
            self._session = undo.enter_context(Session(folders, name=name, keep=keep))
            self._store = undo.enter_context(TensorStore(self._session, checksum=checksum, handle=handle))
            self._undo = undo.pop_all()

    def add(self, chunks: Iterable[Chunk], groups: int) -> None:
        """Takes chunks that nothing is stored of; those of so many groups are then here."""
        new = list(chunks)
        for number, chunk in enumerate(new, len(self.chunks)):
            chunk.number = number
        self.chunks, self.groups = [*self.chunks, *new], groups

    def version(self, chunk: Chunk) -> Version:
        """Returns what the chunk's states are now."""
        return self.now.get(chunk, _NOTHING)

    def begin(self) -> None:
        """Begins a step, of which no chunk is done."""
        self.attempt += 1

    def is_done(self, chunk: Chunk) -> bool:
        """Whether the step at hand has updated the chunk."""
        return self.version(chunk).attempt == self.attempt

    def update(self, chunks: Iterable[Chunk]) -> Generator[tuple[Chunk, torch.Tensor], None, None]:
        """Yields each chunk with its states, to be changed; close it, or exhaust it.

        A chunk of which ``updated`` is not empty is written and then done. One whose states could not be written has
        the values of its parameters put back.
        """
        return self._pass(chunks, self._read, self._write, self._ended)

    def look(
        self, chunks: Iterable[Chunk], write: Callable[[Chunk, torch.Tensor], IoFuture | None]
    ) -> Generator[tuple[Chunk, torch.Tensor], None, None]:
        """Yields each chunk that has states with these, and hands them to ``write``."""
        stored = (chunk for chunk in chunks if self.version(chunk).slot is not None)
        return self._pass(stored, self._read, write, lambda *_: None)

    def fill(
        self, read: Callable[[Chunk, torch.Tensor], IoFuture | None], versions: dict[Chunk, Version]
    ) -> Generator[tuple[Chunk, torch.Tensor], None, None]:
        """Yields each chunk with a buffer, and adds to ``versions`` what is then written beside its states of now.

        What ``read`` brings, and the loop puts into the buffer, are states of the slices in ``chunk.scalars``. They
        count once they are given to ``commit``, all or none.
        """

        def begin(chunk: Chunk, buffer: torch.Tensor) -> IoFuture | None:
            chunk.begin()
            return read(chunk, buffer)

        def write(chunk: Chunk, buffer: torch.Tensor) -> IoFuture | None:
            if not chunk.scalars:
                return None
            chunk.pending = Version(self._free_slot(chunk), chunk.scalars)
            return self._put(chunk, chunk.pending, buffer)

        def ended(chunk: Chunk, _: torch.Tensor, failure: BaseException | None) -> None:
            if failure is None:
                versions[chunk] = chunk.pending or _NOTHING

        return self._pass(self.chunks, begin, write, ended)

    def _pass(
        self,
        chunks: Iterable[Chunk],
        read: Callable[[Chunk, torch.Tensor], IoFuture | None],
        write: Callable[[Chunk, torch.Tensor], IoFuture | None],
        ended: Callable[[Chunk, torch.Tensor, BaseException | None], None],
    ) -> Generator[tuple[Chunk, torch.Tensor], None, None]:
        def noted(
            move: Callable[[Chunk, torch.Tensor], IoFuture | None],
        ) -> Callable[[Chunk, torch.Tensor], IoFuture | None]:
            def moved(chunk: Chunk, buffer: torch.Tensor) -> IoFuture | None:
                transfer = move(chunk, buffer)
                if transfer is not None:
                    self._transfers.append(transfer)
                return transfer

            return moved

        self._recover()
        self._unsettled = True
        yield from self._ring.update(chunks, noted(read), noted(write), ended)
        self._unsettled = False
        self._transfers.clear()

    def _recover(self) -> None:
        """Completes what was interrupted: nothing may use the memory and the files that the next pass will use."""
        if self._unsettled:
            for transfer in list(self._transfers):
                transfer.exception()
            with contextlib.suppress(Exception):
                self._store.wait()
            for chunk, buffer in list(self.changed.items()):
                self._restore(chunk, buffer)
            self._unsettled = False
        if self._doubtful:
            record = self.committed()
            slots = [] if record is None else [slot for slot, _ in record["chunks"]]
            self._named = dict(zip(self.chunks, slots, strict=False))
            self._doubtful = False

    def _read(self, chunk: Chunk, buffer: torch.Tensor) -> IoFuture | None:
        chunk.begin()
        slot = self.version(chunk).slot
        if slot is None or not chunk.nbytes:
            return None
        self.stats.bytes_read += chunk.nbytes
        return self._store.get(chunk.key(slot), buffer[: chunk.nbytes], priority=Priority.PREFETCH)

    def _write(self, chunk: Chunk, buffer: torch.Tensor) -> IoFuture | None:
        if not chunk.updated:
            return None
        scalars = {**self.version(chunk).scalars, **chunk.scalars}
        chunk.pending = Version(self._free_slot(chunk), scalars, self.attempt)
        return self._put(chunk, chunk.pending, buffer)

    def _put(self, chunk: Chunk, version: Version, buffer: torch.Tensor) -> IoFuture | None:
        if version.slot is None or not chunk.nbytes:
            return None
        self._spare |= version.slot >= _SLOTS
        self.stats.bytes_written += chunk.nbytes
        return self._store.put(chunk.key(version.slot), buffer[: chunk.nbytes])

    def _free_slot(self, chunk: Chunk) -> int:
        """Returns where nothing is that is needed: neither the states of now nor those of the committed record.

        These are the same, and two places do, except after a step that failed: the third is for its next attempt.
        """
        needed = (self.version(chunk).slot, self._named.get(chunk))
        return next(slot for slot in range(_SLOTS + 1) if slot not in needed)

    def _ended(self, chunk: Chunk, buffer: torch.Tensor, failure: BaseException | None) -> None:
        """Takes the new states for the chunk's, or gives the parameters their old values. May be called again."""
        if failure is not None:
            if chunk in self.changed:
                self._restore(chunk, buffer)
        elif chunk.pending is not None:
            self.now[chunk] = chunk.pending  # from here on it is done
            self.changed.pop(chunk, None)
            self.when_done(chunk)

    def _restore(self, chunk: Chunk, buffer: torch.Tensor) -> None:
        """Gives the parameters the values that belong to the states, unless they have these."""
        if self.now.get(chunk) is not chunk.pending or chunk.pending is None:
            backup = chunk.backup(buffer)
            with contextlib.closing(chunk.borrowed(chunk.updated)) as parts:
                for each in (each for slices in parts for each in slices):
                    each.values().copy_(backup[each.place])
        self.changed.pop(chunk, None)

    def share(self, chunk: Chunk, target: int, place: int) -> bool:
        """Has the states of a chunk in an open file by reference; see ``TensorStore.share``."""
        slot = self.version(chunk).slot
        return slot is not None and self._store.share(chunk.key(slot), target, place)

    def described(self, about: dict[str, Any], versions: Mapping[Chunk, Version] | None = None) -> dict[str, Any]:
        """Returns ``about`` with what is kept of chunks beside their values; of these versions, or those of now."""
        found = []
        for chunk in self.chunks:
            version = (self.now if versions is None else versions).get(chunk, _NOTHING)
            found.append([version.slot, [_written(version.scalars.get(each)) for each in chunk.slices]])
        return {**about, "chunks": found}

    def commit(self, about: dict[str, Any], versions: dict[Chunk, Version] | None = None) -> None:
        """Ends a step, or takes these versions for the states.

        They are those to go on with, with ``about``, also after a crash of this process.
        """
        self._recover()
        now, attempt = (self.now, self.attempt) if versions is None else (versions, self.attempt + 1)
        named: dict[Chunk, int | None] = {}
        if self._session.keep:
            content = _framed(self.described(about, now))
            self._doubtful = True  # until it is known to be written, either record may be the one that counts
            self._store.put(_COMMIT, content, keep="previous").result()
            named = {chunk: version.slot for chunk, version in now.items()}
        self.now, self._named, self.stats.steps, self.attempt, self.ended, self._doubtful = (
            now, named, about["steps"], attempt, self.attempt, False
        )  # fmt: skip
        self._free_spare()

    def _free_spare(self) -> None:
        """Drops the values in third places, and those that third places stand for."""
        if not self._spare:
            return
        slots = {chunk: (self.version(chunk).slot, self._free_slot(chunk)) for chunk in self.chunks}
        wanted = {chunk.key(slot) for chunk, both in slots.items() for slot in both if slot is not None}
        with contextlib.suppress(OSError):
            for key in self._store.keys():  # noqa: SIM118  # it is no mapping
                if key != _COMMIT and key not in wanted:
                    self._store.drop(key)
            self._spare = any(slot == _SLOTS for slot, _ in slots.values())

    def committed(self) -> dict[str, Any] | None:
        """Returns ``about`` of the last step that was committed here, perhaps by an earlier program, or None.

        Raises FormatError for a record that is damaged.
        """
        if _COMMIT not in self._store:
            return None
        future = self._store.get(_COMMIT)
        future.result()
        return _unframed(future.tensor, self._session.folders[0])

    def resume(self, record: dict[str, Any]) -> None:
        """Continues with the values of this record, whose chunks are those of now."""
        now = {}
        for chunk, (slot, written) in zip(self.chunks, record["chunks"], strict=True):
            scalars = {
                each: found
                for each, one in zip(chunk.slices, written, strict=True)
                if (found := read_back(one, chunk.device)) is not None
            }
            now[chunk] = Version(slot, scalars)
        self.now, self.stats.steps, self._spare = now, record["steps"], True
        self._named = {chunk: version.slot for chunk, version in now.items()}
        self._free_spare()

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


def _framed(record: dict[str, Any]) -> torch.Tensor:
    """Returns the bytes of a record, with a checksum."""
    text = torch.frombuffer(bytearray(json.dumps(record).encode()), dtype=torch.uint8)
    line = bytearray(f"{_FRAME} {checksums_anywhere([text])[0]:08x}\n".encode())
    return torch.cat([torch.frombuffer(line, dtype=torch.uint8), text])


def _unframed(content: torch.Tensor, folder: str) -> dict[str, Any]:
    """Undoes ``_framed``; also reads a record without a checksum, as versions before 1 of it had none."""
    line, end, text = bytes(content.numpy()).partition(b"\n")
    try:
        if not end:
            text = line
        elif line.decode() != f"{_FRAME} {checksums_anywhere([content[len(line) + 1 :]])[0]:08x}":
            raise ValueError(f"its checksum does not match, or it is none of {_FRAME!r}")
        found: dict[str, Any] = parse_json(text)
    except ValueError as error:
        raise FormatError(f"{folder}: the record of the last step of an optimizer is damaged: {error}") from error
    return found


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
