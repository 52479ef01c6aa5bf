"""``States``: chunks of parameters, whose states are on storage in two places each, and the step that is being taken.

A chunk is a run of parameters' elements; what an optimizer keeps of each element lies together on storage. Which of the
two places counts is said by ``now`` while the program runs, and for the next program by a record. What either names is
not written to, nor what the record that a power failure would leave names: before a place is written to, the last step
has become durable, on a thread that began when the step ended. So whatever ends badly anywhere, a step, a load or the
program, leaves the old states or the new ones.
"""

from __future__ import annotations

import contextlib
import copy
import errno
import os
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch

from nvme_ops.durable import sync_above
from nvme_ops.engine import Priority
from nvme_ops.errors import FormatError, naming, note
from nvme_ops.future import IoFuture
from nvme_ops.handle import aio_handle
from nvme_ops.memory.carve import dense_bytes, is_dense
from nvme_ops.memory.pool import Pool
from nvme_ops.memory.ring import Ring
from nvme_ops.offload.optimizer.records import Flush, Records, read_back, written
from nvme_ops.offload.residency import Stats
from nvme_ops.offload.weights.gradients import gradient_of
from nvme_ops.offload.weights.swapped import SwappedTensor
from nvme_ops.settings import PAGE
from nvme_ops.storage.session import Session
from nvme_ops.storage.store import TensorStore
from nvme_ops.text import MIB

MASTER = "master_weights"  #: the state that has a parameter's value in float32

#: The optimizers of torch.optim that update each element by itself, so that any part of a parameter can be updated.
ELEMENTWISE = ("Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "ASGD", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD")

_MASTER_BYTES = torch.float32.itemsize
_GRAIN = 64  # elements to which parts of a chunk are aligned: 64 bytes of any dtype
_BUFFER = 32 * MIB  # bytes of a buffer, unless the budget has fewer than _BUFFERS of these
_BUFFERS = 4
_SLOTS = 2  # places of a chunk's values


class Region(NamedTuple):
    """A state with one element for each element of a parameter."""

    name: str
    dtype: torch.dtype


def regions_of(
    optimizer: Callable[..., torch.optim.Optimizer], options: Mapping[str, Any], parameter: torch.Tensor, master: bool
) -> tuple[Region, ...]:
    """Returns the elementwise states that the optimizer keeps of a parameter, found by one step of three elements.

    Args:
        optimizer: a class of ``torch.optim``.
        options: of the parameter group.
        parameter: of the group.
        master: whether the optimizer updates a copy in float32, which then comes first.
    """
    dtype = torch.float32 if master else parameter.dtype
    sample = torch.zeros(3, dtype=dtype, device=parameter.device)
    sample.grad = torch.ones_like(sample)
    inner = optimizer([{**copied(options), "params": [sample]}])
    inner.step()
    found = [Region(MASTER, torch.float32)] if master else []
    for name, value in inner.state[sample].items():
        if isinstance(value, torch.Tensor) and value.shape == sample.shape:
            found.append(Region(name, value.dtype))
    return tuple(found)


def copied(options: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a group's options without its parameters."""
    return {name: copy.copy(value) for name, value in options.items() if name != "params"}


def own(value: Any) -> Any:
    """Returns a copy of a scalar state, which the optimizer may change in place."""
    return value.clone() if isinstance(value, torch.Tensor) else value


class Loan(NamedTuple):
    """A parameter and its gradient in memory, for as long as a chunk is being updated."""

    values: torch.Tensor
    gradient: torch.Tensor | None


@dataclass(eq=False)
class Slice:
    """Elements ``begin`` to ``end`` of a parameter, in the order of its memory; they begin at ``at`` in the chunk."""

    parameter: torch.Tensor
    begin: int
    end: int
    at: int
    loan: Loan | None = None  #: the parameter and its gradient, if these are on storage themselves
    place: slice = field(init=False)  #: where the elements are in the chunk

    def __post_init__(self) -> None:
        self.place = slice(self.at, self.at + self.end - self.begin)

    def values(self) -> torch.Tensor:
        """Returns these elements of the parameter, as a view of one dimension; of the loan while there is one."""
        return flat(local(self.parameter) if self.loan is None else self.loan.values)[self.begin : self.end]

    def gradient(self) -> torch.Tensor | None:
        """Returns these elements of the gradient, or None without one. Raises RuntimeError for a sparse one."""
        found = self.parameter.grad if self.loan is None else self.loan.gradient
        if found is None:
            return None
        gradient = local(found)
        if gradient.layout != torch.strided:
            raise RuntimeError("NvmeOptimizer does not support sparse gradients")
        values = local(self.parameter) if self.loan is None else self.loan.values
        if gradient.stride() != values.stride():
            gradient = torch.empty_like(values, dtype=gradient.dtype).copy_(gradient)
        return flat(gradient)[self.begin : self.end]


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the part of a tensor that is in this process: all of it, but of a DTensor its shard."""
    tensor = tensor.detach()
    to_local: Any = getattr(tensor, "to_local", None)
    return tensor if to_local is None else to_local()


def outline(tensor: torch.Tensor) -> torch.Tensor:
    """Returns what has shape, strides and dtype of ``local(tensor)``, without fetching it from storage."""
    if isinstance(tensor, SwappedTensor):
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
    return local(tensor)


@contextlib.contextmanager
def _loan_of(parameter: torch.Tensor) -> Iterator[Loan]:
    with contextlib.ExitStack() as uses:
        gradient = values = None
        try:
            gradient = uses.enter_context(gradient_of(parameter))
            if isinstance(parameter, SwappedTensor):
                values = uses.enter_context(parameter.lent(change=gradient is not None))
                torch.autograd.graph.increment_version(parameter)
            else:
                values = local(parameter)
            yield Loan(values, gradient)
        finally:
            gradient = values = None  # or the traceback of a failure would keep their memory


def sharded(part: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Undoes ``local``: returns the tensor of which ``part`` is in this process, divided as ``like`` is."""
    if not hasattr(like, "to_local"):
        return part
    from torch.distributed.tensor import DTensor  # which takes a while to import

    each: Any = like
    return DTensor.from_local(
        part, each.device_mesh, each.placements, run_check=False, shape=each.shape, stride=each.stride()
    )


def flat(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a dense tensor's elements in the order of its memory, as a view of one dimension."""
    return tensor.view(-1) if tensor.is_contiguous() else dense_bytes(tensor).view(tensor.dtype)


@dataclass(frozen=True, eq=False)
class Version:
    """The states of a chunk after one step; ``States.now`` says which version counts."""

    slot: int | None = None  #: which of the chunk's values in the store has them; None: there are none
    #: By slice: the states that are not regions, such as ``step``, and None for a region that the slice does not have
    #: yet. Slices without any states are not in it.
    scalars: Mapping[Slice, dict[str, Any]] = field(default_factory=dict)
    attempt: int = -1  #: at a step, that made it; see ``States.attempt``


_NOTHING = Version()


@dataclass(eq=False)
class Chunk:
    """Slices of parameters of one group, dtype and device, whose states lie in one value of the store.

    In a buffer the states are followed by the backup: the elements of the parameters as they were.
    """

    group: int
    regions: tuple[Region, ...]
    dtype: torch.dtype
    device: torch.device
    slices: Sequence[Slice]
    number: int = -1  #: among all chunks
    elements: int = field(init=False)  #: those between the slices included
    nbytes: int = field(init=False)  #: of the states on storage, in whole pages
    updated: list[Slice] = field(default_factory=list)  #: whose parameters are in the backup, and may have changed
    scalars: dict[Slice, dict[str, Any]] = field(default_factory=dict)  #: those of the version to come
    pending: Version | None = None  #: what is being written

    def __post_init__(self) -> None:
        self.elements = _aligned(self.slices[-1].place.stop)
        size = sum(self.elements * region.dtype.itemsize for region in self.regions)
        self.nbytes = -(-size // PAGE) * PAGE
        self._end_of_backup = self.nbytes + self.elements * self.dtype.itemsize
        #: Of all chunks that torch's optimizer could update in one call.
        self.kind = (self.group, self.dtype, self.device)
        #: Whether a copy of the parameters in float32 is among the states.
        self.has_master = bool(self.regions) and self.regions[0].name == MASTER
        #: The states that the optimizer itself keeps of each element.
        self.names = [region.name for region in self.regions if region.name != MASTER]

    def begin(self) -> None:
        """Forgets the last pass."""
        self.updated, self.scalars, self.pending = [], {}, None

    def has_gradient(self) -> bool:
        """Whether a step changes something of it."""
        return any(each.parameter.grad is not None for each in self.slices)

    def borrowed(self, slices: Sequence[Slice] | None = None) -> Generator[list[Slice], None, None]:
        """Yields slices with parameters and gradients in memory, to be changed: all of the chunk, or those given.

        All that are in memory anyway come together, and each that is on storage by itself. Close it, or exhaust it.
        """
        lent: list[Slice] = []
        usual: list[Slice] = []
        for each in self.slices if slices is None else slices:
            on_storage = isinstance(each.parameter, SwappedTensor) or isinstance(each.parameter.grad, SwappedTensor)
            (lent if on_storage else usual).append(each)
        if usual:
            yield usual
        for each in lent:
            with _loan_of(each.parameter) as each.loan:
                try:
                    yield [each]
                finally:
                    each.loan = None

    def views(self, memory: torch.Tensor) -> dict[str, torch.Tensor]:
        """Returns the elements of each state in ``memory``, which has the chunk's bytes."""
        found, begin = {}, 0
        for name, dtype in self.regions:
            end = begin + self.elements * dtype.itemsize
            found[name] = memory[begin:end].view(dtype)
            begin = end
        return found

    def backup(self, buffer: torch.Tensor) -> torch.Tensor:
        """Returns the elements of the parameters as they were, in a buffer of the ring, behind the states."""
        return buffer[self.nbytes : self._end_of_backup].view(self.dtype)

    def gradients(self, buffer: torch.Tensor) -> torch.Tensor:
        """Returns the elements of the gradients in float32, for master weights, in a buffer behind the backup."""
        return buffer[self._end_of_backup : self._end_of_backup + self.elements * _MASTER_BYTES].view(torch.float32)

    def key(self, slot: int) -> str:
        """Returns the name of one of the chunk's values in the store."""
        return f"{self.number}/{slot}"


def divide(
    parameters: Sequence[torch.Tensor], group: int, layouts: Mapping[torch.Tensor, tuple[Region, ...]], buffer: int
) -> Iterator[Chunk]:
    """Yields the chunks of a group of parameters, each of which fits with its backup into ``buffer`` bytes.

    Their numbers are to be given by the caller. Raises ValueError for a parameter with gaps in its memory.
    """
    unfinished: dict[tuple[Any, ...], list[Slice]] = {}
    for parameter in parameters:
        values = outline(parameter)
        if not is_dense(values):
            raise ValueError(f"a parameter of shape {tuple(parameter.shape)} has gaps in its memory")
        regions = layouts[parameter]
        kind = (regions, values.dtype, parameter.device)
        each = sum(region.dtype.itemsize for region in regions) + values.dtype.itemsize
        if regions and regions[0].name == MASTER:
            each += _MASTER_BYTES
        most = (buffer - PAGE) // each // _GRAIN * _GRAIN
        begin = 0
        while begin < values.numel():
            slices = unfinished.setdefault(kind, [])
            at = _aligned(slices[-1].place.stop) if slices else 0
            if at >= most:
                yield Chunk(group, *kind, slices)
                slices, at = [], 0
                unfinished[kind] = slices
            end = min(values.numel(), begin + most - at)
            slices.append(Slice(parameter, begin, end, at))
            begin = end
    for kind, slices in unfinished.items():
        yield Chunk(group, *kind, slices)


def _aligned(elements: int) -> int:
    return -(-elements // _GRAIN) * _GRAIN


_Move = Callable[[Chunk, torch.Tensor], IoFuture | None]  # to or from a chunk's buffer


@dataclass
class OptimizerStats(Stats):
    """What an optimizer has done since it was made. ``bytes_stored`` has both places of each state."""

    steps: int = 0  #: completed
    seconds: float = 0.0  #: in ``step``; ``seconds_waited`` is the part of these in which it computed nothing

    @property
    def bytes_written_per_step(self) -> float:
        """Bytes written by each step, on average: times the steps of a day, to be compared with a drive's rating."""
        return self.bytes_written / max(1, self.steps)


class States:
    """Reads, writes and commits chunks.

    Args:
        folders: of the session.
        name: of the session.
        reuse: leave the values to the next session of this name.
        budget: bytes of memory for buffers.
        pinned: whether an accelerator copies from them.
        checksums: keep a checksum of each chunk.
        handle: moves the bytes.
    """

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
        self.groups = 0  #: how many parameter groups are divided into chunks
        self.now: dict[Chunk, Version] = {}  #: the version of each chunk that counts
        self.changed: dict[Chunk, torch.Tensor] = {}  #: whose parameters may be newer than ``now``; the backups
        self.attempt = 0  #: at a step: chunks whose version has this number are done
        self.ended: int | None = None  #: the attempt that was committed last
        self.stats = OptimizerStats()
        self.when_done: Callable[[Chunk], None] | None = None  #: is called when a chunk is done, perhaps twice
        self.closed = False  #: whether ``close`` was called
        self._named: dict[Chunk, int | None] = {}  # the slots that the durable record names
        self._flush: tuple[Flush, dict[Chunk, int | None]] | None = None  # of now, and the slots that it names
        self._about: dict[str, Any] = {}  # of ``now``
        self._doubted: dict[Chunk, Version] = {}  # those of now whose flush failed
        self._process = os.getpid()
        self._unsettled = False  # a pass is under way, or was interrupted
        self._spare = False  # there are values in third places
        self._pool = Pool(budget, pinned=pinned)
        #: Bytes of a buffer.
        self.buffer = min(_BUFFER, budget // _BUFFERS, self._pool.largest)
        depth = max(_BUFFERS, budget // _BUFFER)
        self._ring = Ring(self._pool, buffer=self.buffer, depth=depth)
        self._others: deque[IoFuture] = deque(maxlen=2 * depth)  # transfers that the store does not know of
        with contextlib.ExitStack() as undo:
            self._session = undo.enter_context(Session(folders, name=name, reuse=reuse))
            self._records = Records(self._session) if reuse else None
            if self._records is not None:
                undo.callback(self._records.close)
            self._store = undo.enter_context(
                TensorStore(self._session, checksums=checksums, handle=handle, journal=False)
            )
            if self._records is not None:
                self._session.sync()  # the names of the store's files
                for place in self._session.folders:
                    sync_above(place)
                self._find(self._records)
            self._undo = undo.pop_all()

    def add(self, chunks: Iterable[Chunk], groups: int) -> None:
        """Adds chunks without states; ``groups`` is how many parameter groups are then divided."""
        new = list(chunks)
        for number, chunk in enumerate(new, len(self.chunks)):
            chunk.number = number
        self.now |= dict.fromkeys(new, _NOTHING)
        self.chunks, self.groups = [*self.chunks, *new], groups

    def begin(self) -> None:
        """Begins a step: no chunk is done."""
        self.attempt += 1

    def is_done(self, chunk: Chunk) -> bool:
        """Whether the step at hand has updated the chunk."""
        return self.now[chunk].attempt == self.attempt

    def update(self, chunks: Iterable[Chunk]) -> Generator[tuple[Chunk, torch.Tensor], None, None]:
        """Yields each chunk with its states, to be changed; close it, or exhaust it.

        A chunk of which ``updated`` is not empty is written and then done. One whose states could not be written has
        the values of its parameters put back.
        """
        return self._pass(chunks, self._read, self._write, self._ended)

    def copy_out(self, chunks: Iterable[Chunk], write: _Move) -> None:
        """Hands the states of each chunk that has any to ``write``."""
        stored = (chunk for chunk in chunks if self.now[chunk].slot is not None)
        with contextlib.closing(self._pass(stored, self._read, self._noting(write), lambda *_: None)) as passing:
            for _ in passing:
                pass

    def fill(self, read: _Move, versions: dict[Chunk, Version]) -> Generator[tuple[Chunk, torch.Tensor], None, None]:
        """Yields each chunk with a buffer for new states, which ``read`` or the loop fills.

        The loop gives the scalar ones to ``chunk.scalars``. What it has given any is written beside the states of now,
        added to ``versions``, and counts once these are given to ``commit``: all or none.
        """
        noted = self._noting(read)

        def begin(chunk: Chunk, buffer: torch.Tensor) -> IoFuture | None:
            chunk.begin()
            return noted(chunk, buffer)

        def write(chunk: Chunk, buffer: torch.Tensor) -> IoFuture | None:
            if not chunk.scalars:
                return None
            self.settle()
            chunk.pending = Version(self._free_slot(chunk), chunk.scalars)
            return self._put(chunk, chunk.pending, buffer)

        def ended(chunk: Chunk, _: torch.Tensor, failure: BaseException | None) -> None:
            if failure is None:
                versions[chunk] = chunk.pending or _NOTHING

        return self._pass(self.chunks, begin, write, ended)

    def _pass(
        self,
        chunks: Iterable[Chunk],
        read: _Move,
        write: _Move,
        ended: Callable[[Chunk, torch.Tensor, BaseException | None], None],
    ) -> Generator[tuple[Chunk, torch.Tensor], None, None]:
        self._recover()
        self._unsettled = True
        yield from self._ring.update(chunks, read, write, ended)
        self._unsettled = False
        self._others.clear()

    def _noting(self, move: _Move) -> _Move:
        """Returns ``move``, of a file that is not the store's, such that ``_recover`` knows what it has begun."""

        def noted(chunk: Chunk, buffer: torch.Tensor) -> IoFuture | None:
            transfer = move(chunk, buffer)
            if transfer is not None:
                self._others.append(transfer)
            return transfer

        return noted

    def _recover(self) -> None:
        """Ends what an interrupted pass has left under way: the next pass uses the same memory and files."""
        if self._unsettled:
            for transfer in list(self._others):
                transfer.exception()
            with contextlib.suppress(Exception):
                self._store.wait()
            for chunk, buffer in list(self.changed.items()):
                self._restore(chunk, buffer)
            self._unsettled = False

    def _read(self, chunk: Chunk, buffer: torch.Tensor) -> IoFuture | None:
        chunk.begin()
        slot = self.now[chunk].slot
        if slot is None or not chunk.nbytes:
            return None
        self.stats.bytes_read += chunk.nbytes
        return self._store.get(chunk.key(slot), buffer[: chunk.nbytes], priority=Priority.PREFETCH)

    def _write(self, chunk: Chunk, buffer: torch.Tensor) -> IoFuture | None:
        if not chunk.updated:
            return None
        self.settle()
        scalars = {**self.now[chunk].scalars, **chunk.scalars}
        chunk.pending = Version(self._free_slot(chunk), scalars, self.attempt)
        return self._put(chunk, chunk.pending, buffer)

    def _put(self, chunk: Chunk, version: Version, buffer: torch.Tensor) -> IoFuture | None:
        if version.slot is None or not chunk.nbytes:
            return None
        self._spare |= version.slot >= _SLOTS
        self.stats.bytes_written += chunk.nbytes
        return self._store.put(chunk.key(version.slot), buffer[: chunk.nbytes])

    def _free_slot(self, chunk: Chunk) -> int:
        """Returns where nothing is that is needed: neither the states of now nor those of the durable record.

        These are the same, and two places do, except after a step that failed: the third is for its next attempt.
        """
        free = set(range(_SLOTS + 1)) - {self.now[chunk].slot, self._named.get(chunk)}
        return min(free)

    def _ended(self, chunk: Chunk, buffer: torch.Tensor, failure: BaseException | None) -> None:
        """Makes the new states those of now, or gives the parameters their old values back. May be called again."""
        if failure is not None:
            if chunk in self.changed:
                self._restore(chunk, buffer)
        elif chunk.pending is not None:
            self.now[chunk] = chunk.pending  # from here on it is done
            self.changed.pop(chunk, None)
            if self.when_done is not None:
                self.when_done(chunk)

    def _restore(self, chunk: Chunk, buffer: torch.Tensor) -> None:
        """Gives the parameters back the values that belong to the states of now, unless these are the new ones."""
        if self.now[chunk] is not chunk.pending:
            backup = chunk.backup(buffer)
            with contextlib.closing(chunk.borrowed(chunk.updated)) as parts:
                for each in (each for slices in parts for each in slices):
                    each.values().copy_(backup[each.place])
        self.changed.pop(chunk, None)

    def share(self, chunk: Chunk, target: int, place: int) -> bool:
        """Puts the states of a chunk into an open file without a copy; see ``TensorStore.share``."""
        slot = self.now[chunk].slot
        return slot is not None and self._store.share(chunk.key(slot), target, place)

    def described(self, about: dict[str, Any], versions: Mapping[Chunk, Version] | None = None) -> dict[str, Any]:
        """Returns ``about`` with the slot and the scalar states of each chunk, of these versions or those of now."""
        found = []
        for chunk in self.chunks:
            version = (self.now if versions is None else versions)[chunk]
            found.append([version.slot, [written(version.scalars.get(each)) for each in chunk.slices]])
        return {**about, "chunks": found}

    def commit(self, about: dict[str, Any], versions: dict[Chunk, Version] | None = None) -> None:
        """Ends a step, or makes these versions the states.

        A program that continues after this process was killed has them, with ``about``; so does one after a power
        failure as soon as a thread, which begins here, has made them durable.
        """
        self._recover()
        self.settle()
        now, attempt = (self.now, self.attempt) if versions is None else (versions, self.attempt + 1)
        flush = None
        if self._records is not None:
            if versions is None:
                self.renew()
            content = self.described(about, now)
            stored = [chunk.key(version.slot) for chunk, version in now.items() if version.slot is not None]
            content["places"] = self._store.described(key for key in stored if key in self._store)
            self._records.write(content)
            flush = self._flush_of(self._records, now, about)
        self.now, self.stats.steps, self.attempt, self.ended, self._about, self._flush = (
            now, about["steps"], attempt, self.attempt, about, flush
        )  # fmt: skip
        if flush is None:
            self._free_spare()
        else:
            self._forget_doubted()
            flush[0].start()

    def _flush_of(
        self, records: Records, now: Mapping[Chunk, Version], about: Mapping[str, Any]
    ) -> tuple[Flush, dict[Chunk, int | None]]:
        """Returns what makes these survive a power failure: first what the record names, then the record."""
        store = self._store

        def work() -> None:
            try:
                store.sync()
                records.harden()
            except BaseException:
                with contextlib.suppress(OSError):
                    records.settle()  # for the next program, which does not know of this
                raise

        flush = Flush(f"step {about['steps']} of NvmeOptimizer", work)
        return flush, {chunk: version.slot for chunk, version in now.items()}

    def check(self) -> None:
        """Raises OSError if the last step is known not to have become durable. Once: the next commit does it anew."""
        if self._flush is not None and self._flush[0].done:
            self.settle()

    def settle(self) -> None:
        """Waits until the last step is durable.

        Raises OSError if it is not; the next commit writes anew what is not. Then, and not before, places that are not
        those of now may be written to.
        """
        if self._records is None:
            return
        if self._process != os.getpid():
            raise RuntimeError("these states are the parent's: a forked child makes an optimizer of its own")
        if self._flush is not None:
            flush, named = self._flush
            flush.wait()
            if flush.failure is None:
                self._flush, self._named = None, named
                self._free_spare()
            else:
                self._doubted = {chunk: each for chunk, each in self.now.items() if each.slot != self._named.get(chunk)}
                self._flush = None
                note(
                    flush.failure,
                    f"{flush.what} is not durable; the next step(), save_states() or close() writes its states anew",
                )
                raise flush.failure
        self._records.settle()

    def renew(self) -> None:
        """Copies the states whose flush has failed to other places, whose blocks another file may then share."""
        self.settle()
        doubted = [chunk for chunk, version in self._doubted.items() if self.now[chunk] is version]
        if not doubted:
            return

        def write(chunk: Chunk, buffer: torch.Tensor) -> IoFuture | None:
            chunk.pending = replace(self.now[chunk], slot=self._free_slot(chunk))
            return self._put(chunk, chunk.pending, buffer)

        def ended(chunk: Chunk, _: torch.Tensor, failure: BaseException | None) -> None:
            if failure is None and chunk.pending is not None:
                self.now[chunk] = chunk.pending

        with contextlib.closing(self._pass(doubted, self._read, write, ended)) as chunks:
            for _ in chunks:
                pass

    def _forget_doubted(self) -> None:
        """Drops the values whose flush has failed: while the store has them, it rightly refuses each further sync."""
        for chunk, version in self._doubted.items():
            if version.slot is not None and version.slot != self.now[chunk].slot:
                with contextlib.suppress(KeyError):
                    self._store.drop(chunk.key(version.slot))
        self._doubted = {}

    def _free_spare(self) -> None:
        """Drops the values in third places, and those that they have replaced."""
        if not self._spare:
            return
        slots = {chunk: (self.now[chunk].slot, self._named.get(chunk), self._free_slot(chunk)) for chunk in self.chunks}
        wanted = {chunk.key(slot) for chunk, those in slots.items() for slot in those if slot is not None}
        with contextlib.suppress(OSError):
            for key in self._store.keys():  # noqa: SIM118  # it is no mapping
                if key not in wanted:
                    self._store.drop(key)
            self._spare = any(slot == _SLOTS for slot, *_ in slots.values())

    def _find(self, records: Records) -> None:
        """Takes over the values that an earlier program has left. Raises FormatError."""
        both = [record for record in (records.durable, records.newest) if record.content]
        try:
            places = {entry["key"]: entry for record in both for entry in record.content["places"]}
            self._store.adopt(places.values())
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            path = records.newest.path
            raise FormatError(f"{path}: the record of an optimizer's step names what cannot be: {error}") from error

    def committed(self) -> dict[str, Any] | None:
        """Returns ``about`` of the last step that was committed here, perhaps by an earlier program, or None."""
        return None if self._records is None else self._records.newest.content or None

    def resume(self) -> None:
        """Continues with the values of ``committed``, whose chunks are those of now. Raises FormatError."""
        if self._records is None:
            raise ValueError("states that are not kept cannot be resumed")
        newest, durable = self._records.newest, self._records.durable
        now = {}
        try:
            for chunk, (slot, described) in zip(self.chunks, newest.content["chunks"], strict=True):
                scalars = {
                    each: found
                    for each, one in zip(chunk.slices, described, strict=True)
                    if (found := read_back(one, chunk.device)) is not None
                }
                if slot is not None and chunk.nbytes and chunk.key(slot) not in self._store:
                    raise ValueError(f"no place of chunk {chunk.number}")
                now[chunk] = Version(slot, scalars)
            slots = [slot for slot, _ in durable.content.get("chunks", ())]
        except (ValueError, TypeError, AttributeError, RuntimeError) as error:
            raise FormatError(f"{newest.path}: the record of an optimizer's step is damaged: {error}") from error
        self._about = {name: newest.content[name] for name in ("steps", "buffer", "made")}
        self.now, self.stats.steps, self._spare = now, self._about["steps"], True
        self._named = dict(zip(self.chunks, slots, strict=False))
        if newest is durable:
            self._free_spare()
        else:  # the program before was killed before it had become durable
            self._flush = self._flush_of(self._records, now, self._about)
            self._flush[0].start()

    def nameless(self, nbytes: int) -> int:
        """Returns the descriptor of a new file without a name in the first folder, with its blocks allocated."""
        fd = self._session.open(0, "state_dict")
        try:
            os.unlink(self._session.path(0, "state_dict"))
            with naming(f"making room for {nbytes} bytes", self._session.path(0, "state_dict")):
                os.posix_fallocate(fd, 0, nbytes)
        except OSError:
            os.close(fd)
            raise
        return fd

    def measure(self) -> OptimizerStats:
        """Returns what was moved until now, and what is taken."""
        self.stats.bytes_stored, self.stats.peak_bytes = self._store.bytes_in_use, self._pool.peak
        return self.stats

    def _end(self) -> None:
        """Makes the last step durable. Raises OSError."""
        self.settle()
        if self._doubted:
            if any(version.attempt > (self.ended or -1) for version in self.now.values()):  # not those of one step
                raise OSError(
                    errno.EIO,
                    f"step {self._about['steps']} of NvmeOptimizer is not durable: a flush has failed, and the next "
                    "step, which was to write its states anew, was not completed",
                    self._session.folders[0],
                )
            self.commit(self._about)
            self.settle()

    def close(self) -> None:
        """Removes the files, or leaves kept ones to the next session: the last step is durable then.

        Further calls do nothing. Raises OSError if it could not be made so; the next session has the step before.
        """
        failure: Exception | None = None
        if not self._session.closed and self._process == os.getpid():
            try:
                self._end()
            except Exception as error:
                failure = error
        self.closed = True
        self._undo.close()
        if failure is not None:
            raise failure
