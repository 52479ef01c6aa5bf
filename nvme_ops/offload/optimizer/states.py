"""``States``: chunks of parameters whose states are on storage, in two places each.

A chunk is a run of elements of parameters; the states of these elements lie together on storage. ``current`` says which
of the two places is valid while the program runs, and a record says so for the next program. Places named by either are
not written to, nor are those of the record that a power failure would leave: before any place is written to, the last
step has become durable, on a thread that starts when the step ends. So whatever fails or is interrupted, a step, a load
or the program, leaves the old states or the new ones.

Memory that the ring of buffers does not need holds the states of some chunks, always the same ones. A step makes new
states of such a chunk in other memory, a copy, and then exchanges the two. States for the next program are written all
the same: then a step changes them in place, and after a failure the old ones are read from storage.
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
from nvme_ops.base.lifetime import Usable
from nvme_ops.filesystem.files import sync_above
from nvme_ops.io.engine import Priority
from nvme_ops.io.future import IoFuture
from nvme_ops.io.handle import aio_handle
from nvme_ops.memory.pool import Pool, charge_of
from nvme_ops.memory.ring import Ring
from nvme_ops.memory.tier import Share
from nvme_ops.memory.torch_memory import large_tensors_pooled
from nvme_ops.offload.memory import Buffers, HostBuffers, Memory
from nvme_ops.offload.optimizer.chunks import IN_MEMORY, NOTHING, Chunk, Division, Version, key_of
from nvme_ops.offload.optimizer.records import Flush, Records, scalars_to_json
from nvme_ops.offload.residency.account import Account, rate_of_folders
from nvme_ops.offload.residency.placement import IN_FLIGHT, room_beside_buffers, worth_keeping
from nvme_ops.offload.residency.policy import Policy, Stats
from nvme_ops.storage.session import Session
from nvme_ops.storage.store import TensorStore

_BUFFER = IN_FLIGHT  # bytes of a buffer, unless the budget has no room for _BUFFERS of these
_BUFFERS = 4
_SLOTS = 2  # places of a chunk's states


def buffers_of(given: int | Memory, least: int = 0) -> tuple[int, int, int]:
    """Returns the bytes of a budget for states that stay, as far as they are known yet, for buffers, and for each.

    Buffers have ``least`` bytes, or more, if there is room for two: one moves while the other is used.
    """
    charge = charge_of(least) if least else 0
    wanted = max(_BUFFER, charge)
    room = room_beside_buffers(given, wanted) if isinstance(given, int) else 0
    if isinstance(given, int):
        budget = given - room
    else:
        budget = given.nbytes // _BUFFERS if given.host is None else given.host_buffers.budget
    each = min(wanted, budget // _BUFFERS)
    return room, budget, charge if each < least and 2 * charge <= budget else each


_Move = Callable[[Chunk, torch.Tensor], IoFuture | None]  # starts to read or write a chunk's buffer


@dataclass(repr=False)
class OptimizerStats(Stats):
    """Counts what an optimizer has done since it was made. ``bytes_stored`` includes both places of each state."""

    steps: int = 0  #: completed
    seconds: float = 0.0  #: in ``step``; during ``seconds_waited`` of these it computed nothing
    computes_on: str = ""  #: the devices that update: those of the parameters

    @property
    def bytes_written_per_step(self) -> float:
        """Bytes written per step, on average: times the steps per day, to be compared with a drive's rating."""
        return self.bytes_written / max(1, self.steps)


def staying(chunks: Iterable[Chunk], room: int) -> set[Chunk]:
    """Returns the chunks whose states stay in so many bytes, beside the new states of one of them."""
    sizes = [(chunk, 1.0, charge_of(chunk.nbytes)) for chunk in chunks if chunk.nbytes]
    return worth_keeping(sizes, room - max((nbytes for *_, nbytes in sizes), default=0))


class States(Usable):
    """Reads, writes and commits chunks.

    Args:
        folders: those of the session.
        name: that of the session.
        reuse: leave the states to the next session of this name.
        given: bytes of memory for buffers and states, or memory that is shared: of the CPU's at most a quarter, for
            buffers, during passes; of that below an accelerator also states, while others leave room.
        pinned: whether the memory is page-locked, for copies from and to an accelerator.
        checksums: keep a checksum of each chunk, and compare it when the chunk is read.
        handle: moves the bytes.
        least: bytes that a buffer must have.
    """

    _closed_error = "the NvmeOptimizer is closed"
    _forked_error = "these states belong to the parent process: a forked child must make its own optimizer"

    def __init__(
        self,
        folders: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
        name: str,
        *,
        reuse: bool,
        given: int | Memory,
        pinned: bool,
        checksums: bool,
        handle: aio_handle | None,
        least: int = 0,
    ) -> None:
        self.division = Division()  #: of the parameters into chunks
        self.current: dict[Chunk, Version] = {}  #: the valid version of each chunk
        self.changed: dict[Chunk, torch.Tensor] = {}  #: buffers of chunks whose parameters may be new
        self.attempt = 0  #: counts attempts at steps: chunks whose version has this number are done
        self.last_commit = -1  #: the attempt committed last
        self.stats = OptimizerStats()
        self.when_done: Callable[[Chunk], None] | None = None  #: called when a chunk is done, perhaps twice
        self._durable: Mapping[int, int | None] = {}  # by a chunk's number: the slot that the durable record names
        self._flush: Flush | None = None  # of the last step
        self._made: Any = None  # ``Division.made`` of what was committed last
        self._failed: dict[int, Version] = {}  # by a chunk's number: current ones whose flush failed
        super().__init__()
        self._in_pass = False  # a pass over chunks is under way, or was interrupted
        self._has_third_places = False  # some chunks have a third place
        self._held: dict[Version, torch.Tensor] = {}  # the states of a version that stay in memory
        self._spare: torch.Tensor | None = None  # memory of such states that others have replaced
        #: Bytes of buffers; the most of one, which has a chunk with its backup.
        self._room, self.budget, self.buffer = buffers_of(given, least)
        self._host: Share | None = None  # for what stays, unless it is in the memory of the buffers
        self._is_shared = isinstance(given, Memory)
        if isinstance(given, int):
            self._pool: Pool | Buffers = Pool(given, pinned=pinned)
        elif pinned and given.host is not None:
            self._pool, self._host = given.host_buffers, given.host.share()
            given.host_buffers.users.add(self)
        else:
            self._pool = Buffers(given, "an optimizer", self.buffer)
        self.buffer = min(self.buffer, self._pool.largest)
        depth = max(_BUFFERS, self.budget // max(_BUFFER, self.buffer))
        patience = None if self._host is None else Policy.patience
        self._ring = Ring(self._pool, buffer=self.buffer, depth=depth, patience=patience)
        self._other_transfers: deque[IoFuture] = deque(maxlen=2 * depth)  # those that the store does not know of
        with contextlib.ExitStack() as undo:
            if isinstance(self._pool, Buffers):
                undo.callback(self._pool.close)
            self.session = undo.enter_context(Session(folders, name=name, reuse=reuse))
            self.account = Account(rate_of_folders(self.session.folders))
            self._records = Records(self.session) if reuse else None
            if self._records is not None:
                undo.callback(self._records.close)
            self._store = undo.enter_context(
                TensorStore(self.session, checksums=checksums, handle=handle, journal=False)
            )
            if self._records is not None:
                self.session.sync()  # makes the names of the store's files durable
                for place in self.session.folders:
                    sync_above(place)
                self._adopt(self._records)
            self._undo = undo.pop_all()

    def extend(self, division: Division) -> None:
        """Takes over a division that begins with the present chunks; the others have no states."""
        self.current |= dict.fromkeys(division.chunks[len(self.division.chunks) :], NOTHING)
        self.division = division

    def is_between_steps(self) -> bool:
        """Returns whether all chunks have the states of the same step: no step has failed after some were done."""
        return all(version.attempt <= self.last_commit for version in self.current.values())

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
        if self._host is not None:
            self._room = max(self._room, self._host.bytes_in_use + self._host.largest)
        if self._room:
            stay = staying(self.division.chunks, self._room)
            for chunk in self.division.chunks:
                chunk.stays = chunk in stay
        with large_tensors_pooled(keep=0 if self._is_shared else self.buffer):
            yield from self._pass(chunks, self._begin, self._write, self._ended, self._is_held)

    def old_and_new(self, chunk: Chunk, buffer: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the bytes that have a chunk's states, and those for its new ones, which may be the same."""
        version = self.current[chunk]
        buffer = buffer[: chunk.nbytes]
        old = self._held.get(version, buffer)
        if chunk.stays:
            if old is not buffer and self.is_kept:
                chunk.memory = self._held.pop(version)
            else:
                chunk.memory = self._memory(chunk.nbytes)
        return old, buffer if chunk.memory is None else chunk.memory

    def _memory(self, nbytes: int) -> torch.Tensor | None:
        """Returns memory for states that stay, or None if there is none now: they are then written instead."""
        memory, self._spare = self._spare, None
        if memory is None or memory.nbytes != nbytes:
            if self._host is not None:
                return self._host.allocate(nbytes)
            memory = None
            with contextlib.suppress(TimeoutError, MemoryError):
                memory = self._pool.lease(nbytes, timeout=0).tensor
        return memory

    def _is_held(self, chunk: Chunk) -> bool:
        return self.current[chunk] in self._held

    def copy_out(self, chunks: Iterable[Chunk], write: _Move) -> None:
        """Passes the states of each chunk that has any to ``write``."""
        stored = (chunk for chunk in chunks if self.current[chunk].slot is not None)
        self._pass_all(stored, self._read, self._tracked(write), lambda *_: None)

    def fill(
        self, versions: dict[Chunk, Version], read: _Move | None = None
    ) -> Generator[tuple[Chunk, torch.Tensor], None, None]:
        """Yields each chunk with a buffer for new states, which ``read`` or the caller's loop fills.

        A chunk whose ``scalars`` the loop sets is written beside the current states, and its new version put in
        ``versions``. They become valid, all or none, when these are given to ``commit``.

        Args:
            versions: by the chunks to be filled, which may be others than the present ones: what is to be valid of
                those that are not written.
            read: starts to fill a buffer; None: with the current states.
        """
        tracked = self._read if read is None else self._tracked(read)

        def begin(chunk: Chunk, buffer: torch.Tensor) -> IoFuture | None:
            chunk.reset()
            return tracked(chunk, buffer)

        def write(chunk: Chunk, buffer: torch.Tensor) -> IoFuture | None:
            if not chunk.scalars:
                return None
            self.settle()
            chunk.pending = Version(self._free_slot(chunk), chunk.scalars)
            return self._put(chunk, chunk.pending, buffer)

        def ended(chunk: Chunk, _: torch.Tensor, failure: BaseException | None) -> None:
            if failure is None and chunk.pending is not None:
                versions[chunk] = chunk.pending

        return self._pass(list(versions), begin, write, ended)

    def _pass(
        self,
        chunks: Iterable[Chunk],
        read: _Move,
        write: _Move,
        ended: Callable[[Chunk, torch.Tensor, BaseException | None], None],
        in_memory: Callable[[Chunk], bool] = lambda _: False,
    ) -> Generator[tuple[Chunk, torch.Tensor], None, None]:
        self._recover()
        # after a failure or a load there are others
        self._held = {now: self._held[now] for now in self.current.values() if now in self._held}
        self._in_pass = True
        try:
            yield from self._ring.update(chunks, read, write, ended, in_memory)
            self._in_pass = False
            self._other_transfers.clear()
        finally:
            if self._is_shared:
                self._ring.release()
            if isinstance(self._pool, Buffers):
                self._pool.end()

    def _pass_all(self, *given: Any) -> None:
        with contextlib.closing(self._pass(*given)) as passing:
            for _ in passing:
                pass

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

    def _begin(self, chunk: Chunk, buffer: torch.Tensor) -> IoFuture | None:
        """Does as ``_read``, but leaves what is held where it is."""
        if not self._is_held(chunk):
            return self._read(chunk, buffer)
        chunk.reset()
        return None

    def _read(self, chunk: Chunk, buffer: torch.Tensor) -> IoFuture | None:
        chunk.reset()
        slot, held = self.current[chunk].slot, self._held.get(self.current[chunk])
        if held is not None:
            buffer[: chunk.nbytes].copy_(held)
        if held is not None or slot is None or not chunk.nbytes:
            return None
        self.stats.bytes_read += chunk.nbytes  # no more urgent than writes, which would wait for all reads otherwise
        return self._store.get(key_of(chunk.number, slot), buffer[: chunk.nbytes], priority=Priority.WRITEBACK)

    def _write(self, chunk: Chunk, buffer: torch.Tensor) -> IoFuture | None:
        if not chunk.updated:
            return None
        self.settle()
        slot, scalars = self._free_slot(chunk), {**self.current[chunk].scalars, **chunk.scalars}
        if chunk.memory is not None and not self.is_kept:
            slot = IN_MEMORY
            self._has_third_places |= self.current[chunk].slot not in (None, slot)  # the place it leaves
        chunk.pending = Version(slot, scalars, self.attempt)
        if chunk.memory is not None:
            self._held[chunk.pending] = buffer = chunk.memory
        return self._put(chunk, chunk.pending, buffer)

    def _put(self, chunk: Chunk, version: Version, buffer: torch.Tensor) -> IoFuture | None:
        if version.slot in (None, IN_MEMORY) or not chunk.nbytes:
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
        chunks = self.division.chunks
        return self.current[chunks[number]].slot if number < len(chunks) else None

    def _ended(self, chunk: Chunk, buffer: torch.Tensor, failure: BaseException | None) -> None:
        """Makes the new states current, or after a failure restores the parameters. May be called again."""
        if failure is not None:
            if chunk in self.changed:
                self._restore(chunk, buffer)
        elif chunk.pending is not None:
            before, self.current[chunk] = self.current[chunk], chunk.pending  # from here on it is done
            self.changed.pop(chunk, None)
            if before is not chunk.pending and before in self._held:
                self._spare = self._held.pop(before)
            if self.when_done is not None:
                self.when_done(chunk)
        chunk.memory = None

    def _restore(self, chunk: Chunk, buffer: torch.Tensor) -> None:
        """Gives the parameters the values back that belong to the current states, unless these are the new ones."""
        if self.current[chunk] is not chunk.pending:
            backup = chunk.backup(buffer)
            with contextlib.closing(chunk.borrowed(chunk.updated)) as parts:
                for part in (part for slices in parts for part in slices):
                    part.values().copy_(backup[part.place])
        self.changed.pop(chunk, None)

    def share(self, chunk: Chunk, target: int, place: int) -> bool:
        """Makes an open file share the blocks of a chunk's states; see ``TensorStore.share``."""
        slot = self.current[chunk].slot
        return slot not in (None, IN_MEMORY) and self._store.share(key_of(chunk.number, slot), target, place)

    def record(self, steps: int, versions: Mapping[Chunk, Version], division: Division) -> dict[str, Any]:
        """Returns what another program needs to know of some versions, beside their bytes, in JSON."""
        chunks = [
            [version.slot, [scalars_to_json(version.scalars.get(part)) for part in chunk.slices]]
            for chunk, version in versions.items()
        ]
        return {"steps": steps, "buffer": self.buffer, "made": division.made, "chunks": chunks}

    def commit(
        self, steps: int, versions: dict[Chunk, Version] | None = None, division: Division | None = None
    ) -> None:
        """Ends a step, or makes ``versions`` the current states, and records them as those after ``steps``.

        If they are of other chunks than the present ones, ``division`` has these.

        The next program finds them even if this process is killed; after a power failure it does once a thread, which
        starts here, has made them durable.
        """
        self._recover()
        self.settle()
        now, attempt = (self.current, self.attempt) if versions is None else (versions, self.attempt + 1)
        if division is None:
            division = self.division
        else:
            self._has_third_places = True  # the places of chunks that are gone
        flush = None
        if self._records is not None:
            if versions is None:
                self.rewrite()
            content = self.record(steps, now, division)
            stored = [key_of(chunk.number, version.slot) for chunk, version in now.items() if version.slot is not None]
            content["places"] = self._store.described(key for key in stored if key in self._store)
            self._records.write(content)
            flush = self._flush_of(self._records, now, steps)
        (
            self.division, self.current, self.stats.steps, self.attempt, self.last_commit, self._made, self._flush,
        ) = division, now, steps, attempt, self.attempt, division.made, flush  # fmt: skip
        if flush is None:
            self._free_third_places()
        else:
            self._drop_failed()
            flush.start()

    def recommit(self) -> None:
        """Commits what there is again if groups were added after the last step."""
        if self._made not in (None, self.division.made) and self.is_between_steps():
            self.commit(self.stats.steps)

    def _flush_of(self, records: Records, now: Mapping[Chunk, Version], steps: int) -> Flush:
        """Returns the work that makes versions durable, first their places and then the record."""
        store = self._store

        def work() -> None:
            try:
                store.sync()
                records.harden()
            except BaseException:
                with contextlib.suppress(OSError):
                    records.settle()  # the next program does not know of this failure
                raise

        slots = {chunk.number: version.slot for chunk, version in now.items()}
        return Flush(f"step {steps} of NvmeOptimizer", work, slots)

    def settle(self) -> None:
        """Waits until the last step is durable; only then may places be written to that are not the current ones.

        Raises OSError if it cannot be made so; the next commit writes its states again.
        """
        if self._records is None:
            return
        self._require_ours()
        if (flush := self._flush) is not None:
            flush.wait()
            if flush.failure is None:
                self._flush, self._durable = None, flush.slots
                self._free_third_places()
            else:
                durable, now = self._durable, self.current.items()
                self._failed = {chunk.number: new for chunk, new in now if new.slot != durable.get(chunk.number)}
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

        self._pass_all(chunks, self._read, write, ended)

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
        slots = {
            chunk: (new.slot, self._durable.get(chunk.number), self._free_slot(chunk))
            for chunk, new in now
            if new.slot != IN_MEMORY
        }
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

    def resume(self, division: Division) -> None:
        """Continues with the states of ``committed``, which are divided so. Raises FormatError."""
        if self._records is None:
            raise ValueError("states that are not kept cannot be resumed")
        newest, durable = self._records.newest, self._records.durable
        now = {}
        try:
            for chunk, (slot, described) in zip(division.chunks, newest.content["chunks"], strict=True):
                scalars = chunk.scalars_in(described)
                if slot is not None and chunk.nbytes and key_of(chunk.number, slot) not in self._store:
                    raise ValueError(f"chunk {chunk.number} has no place")
                now[chunk] = Version(slot, scalars)
            slots = [slot for slot, _ in durable.content.get("chunks", ())]
        except (ValueError, TypeError, AttributeError, RuntimeError) as error:
            raise FormatError(f"{newest.path}: the record of an optimizer's step is damaged: {error}") from error
        steps, self._made = newest.content["steps"], newest.content["made"]
        self.division, self.current, self.stats.steps, self._has_third_places = division, now, steps, True
        self._durable = dict(enumerate(slots))
        if newest is durable:
            self._free_third_places()
        else:  # the earlier program ended before the step was durable
            self._flush = self._flush_of(self._records, now, steps)
            self._flush.start()

    def measure(self) -> OptimizerStats:
        """Returns the statistics, with the space and memory in use."""
        peak = self._pool.peak + (0 if self._host is None else self._host.peak)
        self.stats.bytes_stored, self.stats.peak_bytes = self._store.bytes_in_use, peak
        self.stats.computes_on = " ".join(sorted({str(chunk.device) for chunk in self.division.chunks}))
        self.stats.bytes_in_host = sum(memory.nbytes for memory in list(self._held.values()))
        return self.stats

    def _make_durable(self) -> None:
        """Makes the last step durable. Raises OSError."""
        self.settle()
        if self._failed:
            if not self.is_between_steps():
                raise OSError(
                    errno.EIO,
                    f"step {self.stats.steps} of NvmeOptimizer is not durable: a flush has failed, and the next "
                    "step, which was to write its states anew, was not completed",
                    self.session.folders[0],
                )
            self.commit(self.stats.steps)
            self.settle()

    def close(self) -> None:
        """Removes the files, or leaves kept ones to the next session, after making the last step durable.

        Raises OSError if that fails; the next session then finds the step before. Further calls do nothing.
        """
        failure: Exception | None = None
        if not self.session.closed and self._is_ours():
            try:
                self._make_durable()
            except Exception as error:
                failure = error
        self._closed, self._held, self._spare = True, {}, None
        if isinstance(self._pool, HostBuffers):
            self._pool.users.discard(self)
        self._undo.close()
        if failure is not None:
            raise failure
