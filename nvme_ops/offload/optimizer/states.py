"""``States``: chunks of parameters whose states are on storage, in two places each.

A chunk is a run of elements of parameters; the states of these elements lie together on storage. ``current`` says which
of the two places is valid while the program runs, and a record says so for the next program. Places named by either are
not written to, nor are those of the record that a power failure would leave: before any place is written to, the last
step has become durable, on a thread that starts when the step ends. So whatever fails or is interrupted, a step, a load
or the program, leaves the old states or the new ones.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections import deque
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from nvme_ops.base.errors import FormatError, note
from nvme_ops.base.lifetime import Owned
from nvme_ops.base.text import MIB
from nvme_ops.filesystem.files import sync_above
from nvme_ops.io.engine import Priority
from nvme_ops.io.future import IoFuture
from nvme_ops.io.handle import aio_handle
from nvme_ops.memory.pool import Pool
from nvme_ops.memory.ring import Ring
from nvme_ops.offload.optimizer.chunks import NOTHING, Chunk, Slice, Version, key_of
from nvme_ops.offload.optimizer.records import Flush, Records, scalars_to_json
from nvme_ops.offload.residency.policy import Stats
from nvme_ops.storage.session import Session, unnamed_file
from nvme_ops.storage.store import TensorStore

_BUFFER = 32 * MIB  # bytes of a buffer, unless the budget has no room for _BUFFERS of these
_BUFFERS = 4
_SLOTS = 2  # places of a chunk's states

_Move = Callable[[Chunk, torch.Tensor], IoFuture | None]  # starts to read or write a chunk's buffer


@dataclass(repr=False)
class OptimizerStats(Stats):
    """Counts what an optimizer has done since it was made. ``bytes_stored`` includes both places of each state."""

    steps: int = 0  #: completed
    seconds: float = 0.0  #: in ``step``; during ``seconds_waited`` of these it computed nothing

    @property
    def bytes_written_per_step(self) -> float:
        """Bytes written per step, on average: times the steps per day, to be compared with a drive's rating."""
        return self.bytes_written / max(1, self.steps)


class States(Owned):
    """Reads, writes and commits chunks.

    Args:
        folders: those of the session.
        name: that of the session.
        reuse: leave the states to the next session of this name.
        budget: bytes of memory for buffers.
        pinned: whether buffers are page-locked, for copies from and to an accelerator.
        checksums: keep a checksum of each chunk, and compare it when the chunk is read.
        handle: moves the bytes.
    """

    _forked_error = "these states belong to the parent process: a forked child must make its own optimizer"

    def __init__(
        self,
        folders: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
        name: str,
        *,
        reuse: bool,
        budget: int,
        pinned: bool,
        checksums: bool,
        handle: aio_handle | None,
    ) -> None:
        self.chunks: list[Chunk] = []
        #: Identifies, by group, the parameters that were divided into chunks, and their layouts.
        self.arrangement: list[list[Any]] = []
        self.current: dict[Chunk, Version] = {}  #: the valid version of each chunk
        self.changed: dict[Chunk, torch.Tensor] = {}  #: buffers of chunks whose parameters may be new
        self.attempt = 0  #: counts attempts at steps: chunks whose version has this number are done
        self.last_commit: int | None = None  #: the attempt committed last
        self.stats = OptimizerStats()
        self.when_done: Callable[[Chunk], None] | None = None  #: called when a chunk is done, perhaps twice
        self.closed = False  #: whether ``close`` was called
        self._durable: dict[int, int | None] = {}  # by a chunk's number: the slot that the durable record names
        self._flush: tuple[Flush, dict[int, int | None]] | None = None  # of the last step, and its slots
        self._about: dict[str, Any] = {}  # as given to ``commit`` with ``current``
        self._failed: dict[int, Version] = {}  # by a chunk's number: current ones whose flush failed
        self._parts: tuple[list[Chunk], dict[torch.Tensor, list[tuple[Chunk, Slice]]]] = ([], {})
        super().__init__()
        self._in_pass = False  # a pass over chunks is under way, or was interrupted
        self._has_third_places = False  # some chunks have a third place
        self._pool = Pool(budget, pinned=pinned)
        #: Bytes of a buffer.
        self.buffer = min(_BUFFER, budget // _BUFFERS, self._pool.largest)
        depth = max(_BUFFERS, budget // _BUFFER)
        self._ring = Ring(self._pool, buffer=self.buffer, depth=depth)
        self._other_transfers: deque[IoFuture] = deque(maxlen=2 * depth)  # those that the store does not know of
        with contextlib.ExitStack() as undo:
            self._session = undo.enter_context(Session(folders, name=name, reuse=reuse))
            self._records = Records(self._session) if reuse else None
            if self._records is not None:
                undo.callback(self._records.close)
            self._store = undo.enter_context(
                TensorStore(self._session, checksums=checksums, handle=handle, journal=False)
            )
            if self._records is not None:
                self._session.sync()  # makes the names of the store's files durable
                for place in self._session.folders:
                    sync_above(place)
                self._adopt(self._records)
            self._undo = undo.pop_all()

    def add(self, chunks: Iterable[Chunk], arrangement: list[list[Any]]) -> None:
        """Adds chunks without states, which follow the others in number, of groups that follow in ``arrangement``."""
        new = list(chunks)
        self.current |= dict.fromkeys(new, NOTHING)
        self.chunks, self.arrangement = [*self.chunks, *new], arrangement

    def parts(self) -> dict[torch.Tensor, list[tuple[Chunk, Slice]]]:
        """Returns the slices of each parameter that has elements, with their chunks."""
        chunks, found = self._parts
        if chunks is not self.chunks:
            found = {}
            for chunk in self.chunks:
                for each in chunk.slices:
                    found.setdefault(each.parameter, []).append((chunk, each))
            self._parts = (self.chunks, found)
        return found

    def with_states(self) -> set[torch.Tensor]:
        """Returns the parameters that have states."""
        return {each.parameter for version in self.current.values() for each in version.scalars}

    def is_between_steps(self) -> bool:
        """Returns whether all chunks have the states of the same step: no step has failed after some were done."""
        last = -1 if self.last_commit is None else self.last_commit
        return all(version.attempt <= last for version in self.current.values())

    @property
    def is_kept(self) -> bool:
        """Whether the states are left to the next session."""
        return self._records is not None

    def is_done(self, chunk: Chunk) -> bool:
        """Returns whether the current attempt has updated a chunk."""
        return self.current[chunk].attempt == self.attempt

    def update(self, chunks: Iterable[Chunk]) -> Generator[tuple[Chunk, torch.Tensor], None, None]:
        """Yields each chunk and a buffer with its states, to be changed. Close or exhaust the generator.

        A chunk whose ``updated`` is not empty is written, and then done. If its states cannot be written, its
        parameters get their old values back.
        """
        return self._pass(chunks, self._read, self._write, self._ended)

    def copy_out(self, chunks: Iterable[Chunk], write: _Move) -> None:
        """Passes the states of each chunk that has any to ``write``."""
        stored = (chunk for chunk in chunks if self.current[chunk].slot is not None)
        with contextlib.closing(self._pass(stored, self._read, self._tracked(write), lambda *_: None)) as passing:
            for _ in passing:
                pass

    def fill(
        self, read: _Move | None, versions: dict[Chunk, Version], chunks: Sequence[Chunk] | None = None
    ) -> Generator[tuple[Chunk, torch.Tensor], None, None]:
        """Yields each chunk with a buffer for new states, which ``read`` or the caller's loop fills.

        The loop sets ``chunk.scalars``. A chunk that gets any is written beside the current states. The new ones are
        added to ``versions``, and become valid, all or none, when these are given to ``commit``.

        Args:
            read: starts to fill a buffer; None: with the current states, and ``chunk.scalars`` are the current ones. A
                chunk for which the loop leaves these alone is not written.
            versions: of these chunks, once the generator has ended.
            chunks: those to be filled, all of ``self.chunks`` when None. They may be others, which replace these then.
        """
        tracked = self._read if read is None else self._tracked(read)

        def begin(chunk: Chunk, buffer: torch.Tensor) -> IoFuture | None:
            chunk.reset()
            transfer = tracked(chunk, buffer)
            if read is None:
                chunk.scalars, chunk.pending = self.current[chunk].scalars, self.current[chunk]
            return transfer

        def write(chunk: Chunk, buffer: torch.Tensor) -> IoFuture | None:
            if chunk.pending is not None and chunk.scalars is chunk.pending.scalars:
                return None
            chunk.pending = None
            if not chunk.scalars:
                return None
            self.settle()
            chunk.pending = Version(self._free_slot(chunk), chunk.scalars)
            return self._put(chunk, chunk.pending, buffer)

        def ended(chunk: Chunk, _: torch.Tensor, failure: BaseException | None) -> None:
            if failure is None:
                versions[chunk] = chunk.pending or NOTHING

        chunks = self.chunks if chunks is None else chunks
        versions.update(dict.fromkeys(chunks, NOTHING))
        return self._pass(chunks, begin, write, ended)

    def _pass(
        self,
        chunks: Iterable[Chunk],
        read: _Move,
        write: _Move,
        ended: Callable[[Chunk, torch.Tensor, BaseException | None], None],
    ) -> Generator[tuple[Chunk, torch.Tensor], None, None]:
        self._recover()
        self._in_pass = True
        yield from self._ring.update(chunks, read, write, ended)
        self._in_pass = False
        self._other_transfers.clear()

    def _tracked(self, move: _Move) -> _Move:
        """Returns ``move``, for files that are not the store's, with its transfers made known to ``_recover``."""

        def tracked(chunk: Chunk, buffer: torch.Tensor) -> IoFuture | None:
            transfer = move(chunk, buffer)
            if transfer is not None:
                self._other_transfers.append(transfer)
            return transfer

        return tracked

    def _recover(self) -> None:
        """Ends transfers of an interrupted pass, as the next one uses the same memory, and restores parameters."""
        if self._in_pass:
            for transfer in list(self._other_transfers):
                transfer.exception()
            with contextlib.suppress(Exception):
                self._store.wait()
            for chunk, buffer in list(self.changed.items()):
                self._restore(chunk, buffer)
            self._in_pass = False

    def _read(self, chunk: Chunk, buffer: torch.Tensor) -> IoFuture | None:
        chunk.reset()
        slot = self.current[chunk].slot
        if slot is None or not chunk.nbytes:
            return None
        self.stats.bytes_read += chunk.nbytes
        return self._store.get(key_of(chunk.number, slot), buffer[: chunk.nbytes], priority=Priority.PREFETCH)

    def _write(self, chunk: Chunk, buffer: torch.Tensor) -> IoFuture | None:
        if not chunk.updated:
            return None
        self.settle()
        scalars = {**self.current[chunk].scalars, **chunk.scalars}
        chunk.pending = Version(self._free_slot(chunk), scalars, self.attempt)
        return self._put(chunk, chunk.pending, buffer)

    def _put(self, chunk: Chunk, version: Version, buffer: torch.Tensor) -> IoFuture | None:
        if version.slot is None or not chunk.nbytes:
            return None
        self._has_third_places |= version.slot >= _SLOTS
        self.stats.bytes_written += chunk.nbytes
        return self._store.put(key_of(chunk.number, version.slot), buffer[: chunk.nbytes])

    def _free_slot(self, chunk: Chunk) -> int:
        """Returns a place that neither the current states nor those of the durable record are in.

        These are the same, and two places suffice, except after a failed step: the third is for its next attempt.
        """
        free = set(range(_SLOTS + 1)) - {self._slot(chunk.number), self._durable.get(chunk.number)}
        return min(free)

    def _slot(self, number: int) -> int | None:
        """Returns the slot with the current states of the chunk of a number; a chunk may be about to replace it."""
        return self.current[self.chunks[number]].slot if number < len(self.chunks) else None

    def _ended(self, chunk: Chunk, buffer: torch.Tensor, failure: BaseException | None) -> None:
        """Makes the new states current, or after a failure restores the parameters. May be called again."""
        if failure is not None:
            if chunk in self.changed:
                self._restore(chunk, buffer)
        elif chunk.pending is not None:
            self.current[chunk] = chunk.pending  # from here on it is done
            self.changed.pop(chunk, None)
            if self.when_done is not None:
                self.when_done(chunk)

    def _restore(self, chunk: Chunk, buffer: torch.Tensor) -> None:
        """Gives the parameters the values back that belong to the current states, unless these are the new ones."""
        if self.current[chunk] is not chunk.pending:
            backup = chunk.backup(buffer)
            with contextlib.closing(chunk.borrowed(chunk.updated)) as parts:
                for each in (each for slices in parts for each in slices):
                    each.values().copy_(backup[each.place])
        self.changed.pop(chunk, None)

    def share(self, chunk: Chunk, target: int, place: int) -> bool:
        """Makes an open file share the blocks of a chunk's states; see ``TensorStore.share``."""
        slot = self.current[chunk].slot
        return slot is not None and self._store.share(key_of(chunk.number, slot), target, place)

    def described(self, about: dict[str, Any], versions: Mapping[Chunk, Version] | None = None) -> dict[str, Any]:
        """Returns ``about`` with slot and scalar states of each chunk, of ``versions`` or the current ones."""
        found = []
        for chunk, version in (self.current if versions is None else versions).items():
            found.append([version.slot, [scalars_to_json(version.scalars.get(each)) for each in chunk.slices]])
        return {**about, "chunks": found}

    def commit(
        self,
        about: dict[str, Any],
        versions: dict[Chunk, Version] | None = None,
        arrangement: list[list[Any]] | None = None,
    ) -> None:
        """Ends a step, or makes ``versions`` the current states, and records them with ``about``.

        Their chunks replace the current ones; if these are others, ``arrangement`` is theirs.

        The next program finds them even if this process is killed; after a power failure it does once a thread, which
        starts here, has made them durable.
        """
        self._recover()
        self.settle()
        now, attempt = (self.current, self.attempt) if versions is None else (versions, self.attempt + 1)
        if arrangement is None:
            chunks, arrangement = self.chunks, self.arrangement
        else:
            chunks, self._has_third_places = list(now), True  # the places of chunks that are gone
        flush = None
        if self._records is not None:
            if versions is None:
                self.rewrite()
            content = self.described(about, now)
            stored = [key_of(chunk.number, version.slot) for chunk, version in now.items() if version.slot is not None]
            content["places"] = self._store.described(key for key in stored if key in self._store)
            self._records.write(content)
            flush = self._flush_of(self._records, now, about)
        (
            self.chunks, self.arrangement, self.current, self.stats.steps, self.attempt, self.last_commit, self._about,
            self._flush,
        ) = chunks, arrangement, now, about["steps"], attempt, self.attempt, about, flush  # fmt: skip
        if flush is None:
            self._free_third_places()
        else:
            self._drop_failed()
            flush[0].start()

    def recommit(self, made: Any) -> None:
        """Commits what there is again if groups were added, after the last step, to what this was ``made`` for."""
        if self._about and self._about["made"] != made and self.is_between_steps():
            self.commit({**self._about, "made": made})

    def _flush_of(
        self, records: Records, now: Mapping[Chunk, Version], about: Mapping[str, Any]
    ) -> tuple[Flush, dict[int, int | None]]:
        """Returns the work that makes versions durable, first their places and then the record, and their slots."""
        store = self._store

        def work() -> None:
            try:
                store.sync()
                records.harden()
            except BaseException:
                with contextlib.suppress(OSError):
                    records.settle()  # the next program does not know of this failure
                raise

        flush = Flush(f"step {about['steps']} of NvmeOptimizer", work)
        return flush, {chunk.number: version.slot for chunk, version in now.items()}

    def settle(self) -> None:
        """Waits until the last step is durable; only then may places be written to that are not the current ones.

        Raises OSError if it cannot be made so; the next commit writes its states again.
        """
        if self._records is None:
            return
        self._require_ours()
        if self._flush is not None:
            flush, named = self._flush
            flush.wait()
            if flush.failure is None:
                self._flush, self._durable = None, named
                self._free_third_places()
            else:
                durable, now = self._durable, self.current.items()
                self._failed = {chunk.number: each for chunk, each in now if each.slot != durable.get(chunk.number)}
                self._flush = None
                note(
                    flush.failure,
                    f"{flush.what} is not durable; the next step(), save_states() or close() writes its states anew",
                )
                raise flush.failure
        self._records.settle()

    def rewrite(self) -> None:
        """Copies current states whose flush has failed to other places, whose blocks another file may then share."""
        self.settle()
        chunks = [chunk for chunk, version in self.current.items() if self._failed.get(chunk.number) is version]
        if not chunks:
            return

        def write(chunk: Chunk, buffer: torch.Tensor) -> IoFuture | None:
            chunk.pending = replace(self.current[chunk], slot=self._free_slot(chunk))
            return self._put(chunk, chunk.pending, buffer)

        def ended(chunk: Chunk, _: torch.Tensor, failure: BaseException | None) -> None:
            if failure is None and chunk.pending is not None:
                self.current[chunk] = chunk.pending

        with contextlib.closing(self._pass(chunks, self._read, write, ended)) as passing:
            for _ in passing:
                pass

    def _drop_failed(self) -> None:
        """Drops places whose flush has failed: as long as the store has them, it refuses each further sync."""
        for number, version in self._failed.items():
            if version.slot is not None and version.slot != self._slot(number):
                with contextlib.suppress(KeyError):
                    self._store.drop(key_of(number, version.slot))
        self._failed = {}

    def _free_third_places(self) -> None:
        """Drops places that neither hold needed states nor are for the next step."""
        if not self._has_third_places:
            return
        now = self.current.items()
        slots = {chunk: (each.slot, self._durable.get(chunk.number), self._free_slot(chunk)) for chunk, each in now}
        wanted = {key_of(chunk.number, slot) for chunk, those in slots.items() for slot in those if slot is not None}
        with contextlib.suppress(OSError):
            for key in self._store.keys():  # noqa: SIM118  # the store is no mapping
                if key not in wanted:
                    self._store.drop(key)
            self._has_third_places = any(slot == _SLOTS for slot, *_ in slots.values())

    def _adopt(self, records: Records) -> None:
        """Takes over the places that an earlier program has left. Raises FormatError."""
        both = [record for record in (records.durable, records.newest) if record.content]
        try:
            places = {entry["key"]: entry for record in both for entry in record.content["places"]}
            self._store.adopt(places.values())
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            path = records.newest.path
            raise FormatError(f"{path}: the record of an optimizer's step names impossible places: {error}") from error

    def committed(self) -> dict[str, Any] | None:
        """Returns the record of the last step of an earlier program, or None."""
        return None if self._records is None else self._records.newest.content or None

    def resume(self) -> None:
        """Continues with the states of ``committed``, for the chunks added before. Raises FormatError."""
        if self._records is None:
            raise ValueError("states that are not kept cannot be resumed")
        newest, durable = self._records.newest, self._records.durable
        now = {}
        try:
            for chunk, (slot, described) in zip(self.chunks, newest.content["chunks"], strict=True):
                scalars = chunk.scalars_in(described)
                if slot is not None and chunk.nbytes and key_of(chunk.number, slot) not in self._store:
                    raise ValueError(f"chunk {chunk.number} has no place")
                now[chunk] = Version(slot, scalars)
            slots = [slot for slot, _ in durable.content.get("chunks", ())]
        except (ValueError, TypeError, AttributeError, RuntimeError) as error:
            raise FormatError(f"{newest.path}: the record of an optimizer's step is damaged: {error}") from error
        self._about = {name: newest.content[name] for name in ("steps", "buffer", "made")}
        self.current, self.stats.steps, self._has_third_places = now, self._about["steps"], True
        self._durable = dict(enumerate(slots))
        if newest is durable:
            self._free_third_places()
        else:  # the earlier program ended before the step was durable
            self._flush = self._flush_of(self._records, now, self._about)
            self._flush[0].start()

    def unnamed_file(self, nbytes: int) -> int:
        """Returns the descriptor of a new file of ``nbytes`` without a name, in the first folder. Raises OSError."""
        return unnamed_file(self._session, nbytes)

    def measure(self) -> OptimizerStats:
        """Returns the statistics, with the space and memory in use."""
        self.stats.bytes_stored, self.stats.peak_bytes = self._store.bytes_in_use, self._pool.peak
        return self.stats

    def _make_durable(self) -> None:
        """Makes the last step durable. Raises OSError."""
        self.settle()
        if self._failed:
            if not self.is_between_steps():
                raise OSError(
                    errno.EIO,
                    f"step {self._about['steps']} of NvmeOptimizer is not durable: a flush has failed, and the next "
                    "step, which was to write its states anew, was not completed",
                    self._session.folders[0],
                )
            self.commit(self._about)
            self.settle()

    def close(self) -> None:
        """Removes the files, or leaves kept ones to the next session, after making the last step durable.

        Raises OSError if that fails; the next session then finds the step before. Further calls do nothing.
        """
        failure: Exception | None = None
        if not self._session.closed and self._is_ours():
            try:
                self._make_durable()
            except Exception as error:
                failure = error
        self.closed = True
        self._undo.close()
        if failure is not None:
            raise failure
