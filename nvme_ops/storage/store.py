"""``TensorStore``: tensors by key, on the devices of a session, in flight as the program likes."""

from __future__ import annotations

import contextlib
import itertools
import os
import threading
import weakref
from collections.abc import Hashable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch

from nvme_ops.engine import Priority
from nvme_ops.file import shared_handle
from nvme_ops.future import IoFuture
from nvme_ops.handle import aio_handle
from nvme_ops.memory.carve import copy, dense_bytes, dense_strides, is_dense, is_plain
from nvme_ops.memory.pool import Pool
from nvme_ops.storage.joined import JoinedOperation, as_operation, compare, write
from nvme_ops.storage.journal import Journal, Unsynced, Value, entry_of, value_in
from nvme_ops.storage.session import Session
from nvme_ops.storage.striped import StripedSlabs
from nvme_ops.tensors import empty

if TYPE_CHECKING:
    from nvme_ops.ops.async_io import Operation


class StoreFuture(IoFuture):
    """The result of ``put`` and ``get``: bytes moved. ``tensor`` is what was, or will be, filled or stored."""

    __slots__ = ("tensor",)

    def __init__(self, operation: Operation, tensor: torch.Tensor) -> None:
        super().__init__(operation)
        self.tensor = tensor


def require_dense(tensor: Any) -> None:
    """Raises TypeError for what is no tensor with memory of its own kind."""
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"a dense torch.Tensor is needed, not {type(tensor).__name__}")
    if tensor.layout != torch.strided or tensor.is_meta or tensor.is_quantized:
        raise TypeError(f"a dense torch.Tensor is needed, not one of {tensor.layout}, {tensor.dtype}, {tensor.device}")


def to_store(tensor: torch.Tensor) -> torch.Tensor:
    """Return a contiguous tensor of the bytes to store: the tensor itself or its memory where it is dense, else a copy.

    Raises TypeError as above.
    """
    require_dense(tensor)
    if is_plain(tensor):
        return tensor
    tensor = tensor.detach()
    if not is_dense(tensor):
        made = torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
        copy(made, tensor.resolve_conj())
        tensor = made
    return dense_bytes(tensor)


_LOST = 0.1  # seconds until a claim that ended without a word is noticed


class Claim:
    """What a thread has claimed, for a ``with`` block.

    It ends with the block; where Ctrl-C comes before the block or at its very end, with the frames that it ends.
    """

    def __init__(self, claims: Claims, thing: Hashable, before: weakref.ref[Claim] | None) -> None:
        self._claims, self._thing, self._before = claims, thing, before
        self.thread = threading.get_ident()

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        self._claims._end(self._thing, self._before)


class Claims:
    """Things that one thread at a time claims, until ``close``, which waits for those that are claimed.

    What the calling thread itself still claims is not waited for: it does so in a signal handler, or after Ctrl-C.

    Args:
        lock: held only briefly, also by users of this class.
    """

    def __init__(self, lock: threading.RLock) -> None:
        self._lock, self._changed = lock, threading.Condition(lock)
        self._claimed: dict[Hashable, weakref.ref[Claim]] = {}  # a claim lives as long as whoever made it has it
        self._closed = False

    def take(self, thing: Hashable) -> Claim:
        """Claims a thing once no other thread does. Raises ValueError once closed."""
        with self._lock:
            while self._is_anothers(self._claimed.get(thing)) and not self._closed:
                self._changed.wait(_LOST)
            if self._closed:
                raise ValueError("the store is closed")
            claim = Claim(self, thing, self._claimed.get(thing))
            self._claimed[thing] = weakref.ref(claim)
            return claim

    def close(self) -> bool:
        """Refuses new claims, and waits until none is left. Returns False from the second call on."""
        with self._lock:
            if self._closed:
                return False
            self._closed = True
            self._changed.notify_all()
            try:
                while any(map(self._is_anothers, self._claimed.values())):
                    self._changed.wait(_LOST)
            except BaseException:  # Ctrl-C
                self._closed = False
                raise
            return True

    def _end(self, thing: Hashable, before: weakref.ref[Claim] | None) -> None:
        """The next thread may take it, unless this one had claimed it before."""
        with self._lock:
            if before is not None and before() is not None:
                self._claimed[thing] = before
                return
            self._claimed.pop(thing, None)
            self._changed.notify_all()

    def _is_anothers(self, claimed: weakref.ref[Claim] | None) -> bool:
        claim = None if claimed is None else claimed()
        return claim is not None and claim.thread != threading.get_ident()


_SLAB, _INDEX = "slab", "index"
_MEASURE, _SYNC, _TRIM = object(), object(), object()  # what a thread is busy with
_MANY, _MUCH = 256, 16 << 20  # writes under way, and their bytes, from which on a call looks which have ended


class TensorStore:
    """Tensors by key, in one preallocated file for each folder of a session.

    Large tensors are divided among the folders by their devices' rates. Any dtype, shape and dense layout, on any
    device: what comes back has the strides of what was stored. Any thread may call any method. What was put is found by
    ``get`` as soon as ``put`` has returned; ``get`` waits for a ``put`` of its key that is under way.

    Args:
        session: has the folders. Where it is kept, what was put and waited for is there in the next session, also when
            this process is killed; once the machine was started again, what was at the last ``sync`` or ``close``.
        pool: has the memory of what ``get`` returns without ``out``; without one there is no bound.
        checksums: keep a CRC-32C of each tensor and compare it when it comes back.
        handle: moves the bytes; with several folders there is one more like it for each.
        weights: the rates of the folders' devices, in any unit; measured at the first ``put`` when None.
        name: tells apart the stores of one session.
        journal: in a session that is kept, note where each tensor is. Without that nothing is found again but what
            ``adopt`` is told, and a tensor is overwritten in its place as in any session.

    Raises:
        ValueError: wrong weights, a closed session, or one that has an open store of this name.
        FormatError: what a session has kept was damaged; the message names the file.
    """

    def __init__(
        self,
        session: Session,
        pool: Pool | None = None,
        *,
        checksums: bool = False,
        handle: aio_handle | None = None,
        weights: Sequence[float] | None = None,
        name: str = "",
        journal: bool = True,
    ) -> None:
        self._session, self._pool, self._checksums, self._name = session, pool, checksums, name
        self._process = os.getpid()
        self._lock = threading.RLock()
        self._claims = Claims(self._lock)  # of keys, and of what else a thread is busy with
        self._values: dict[str, Value] = {}
        self._writing: dict[str, JoinedOperation] = {}
        self._bytes_written = 0  # by these
        self._failed: list[JoinedOperation] = []  # for ``wait`` to raise
        self._retired: list[Value] = []
        self._journal: Journal | None = None
        self._named = False  # the names of the files are durable
        with contextlib.ExitStack() as undo:
            session.lend(name, self)
            undo.callback(session.take_back, name, self)
            self._slabs = StripedSlabs(session, _SLAB + name, handle or shared_handle(), weights)
            undo.callback(self._slabs.close)
            if session.reuse and journal:
                self._journal = Journal(session, _INDEX + name)
                undo.callback(self._journal.close)
                self._values = self._journal.load()
                try:
                    self._slabs.reserve(piece for value in self._values.values() for piece in value.pieces)
                except (ValueError, TypeError) as error:
                    raise self._journal.damaged(error) from error
            self._unsynced = Unsynced(kept=self._journal is not None)
            self._unsynced.durable = dict(self._values)
            if self._journal and self._journal.is_ahead:  # of what a power failure would bring back
                self._slabs.sync()
                self._journal.sync(self._journal.mark(self._journal.place(), self._values, self._values))
            self._undo = undo.pop_all()

    # What users call

    def put(
        self,
        key: str,
        tensor: torch.Tensor,
        *,
        atomic: bool = False,
        priority: Priority = Priority.WRITEBACK,
    ) -> StoreFuture:
        """Starts to store ``tensor``, which must not change until the future is done.

        Args:
            key: a name.
            tensor: dense, on any device. One that is not plain in memory is copied first.
            atomic: the value that the key has stays until the new one is complete, whatever happens.
                Otherwise a value of the same size is overwritten in its place, and lost when that fails. In a session
                that is kept nothing is overwritten.
            priority: of the writes.

        Raises:
            OSError: ENOSPC: the disk is full; nothing was written and the value that the key had is still there.
            TypeError: not a dense tensor, or a key that is no str.
            ValueError: the store is closed.
        """
        if not isinstance(key, str):
            raise TypeError(f"a key must be a str, not {type(key).__name__}")
        source = to_store(tensor)
        self._measure()
        with self._claim(key):
            self._reclaim()
            with self._lock:
                old = self._values.get(key)
                overwritten = not atomic and self._journal is None and old is not None
                if old is not None and overwritten and old.nbytes == source.nbytes and not old.busy():
                    in_place, pieces = True, old.pieces
                else:
                    in_place, pieces = False, self._slabs.allocate(source.nbytes)
                value = Value(tensor.dtype, tuple(tensor.shape), dense_strides(tensor), pieces)
            transfers: list[IoFuture] = []
            operation = JoinedOperation(transfers, self._finish_put, key, value, old, in_place)
            try:
                write(self._slabs, value, source, transfers, priority, checksum=self._checksums)
            except BaseException:  # some of it may be on its way
                operation.asked = True
                operation.trouble = RuntimeError("the put has raised")  # what it raised would keep its callers' frames
                raise
            finally:
                with self._lock:
                    self._writing[key] = operation
                    self._bytes_written += value.nbytes
                if operation.trouble is not None:
                    operation.add_callback(lambda: None)  # it ends with what is on its way, and keeps nothing then
            return StoreFuture(as_operation(operation), tensor)

    def _finish_put(
        self, failure: BaseException | None, key: str, value: Value, old: Value | None, in_place: bool
    ) -> None:
        """Takes note of what became of it. Interrupted at any point, it can be called again."""
        with self._lock:
            error: Exception | None = None
            if failure is None:
                try:
                    self._record(key, value, None if in_place else old)
                except Exception as trouble:
                    error = trouble
            if failure is not None or error is not None:
                if in_place and self._values.get(key) is old:  # overwritten in part
                    del self._values[key]
                self._release(value)
                mine = [self._writing[key]] if key in self._writing else []
                self._failed = [each for each in [*self._failed, *mine] if not each.asked]
            if self._writing.pop(key, None) is not None:
                self._bytes_written -= value.nbytes
        if error is not None:
            raise error

    def _record(self, key: str, value: Value, old: Value | None) -> None:
        """The key has this value from now on; ``old`` can go."""
        if self._journal:
            self._journal.record(key, value)
        self._values[key] = value
        self._unsynced.put(key)
        if old is not None:
            self._retire(key, old)
        if self._journal and self._journal.is_long(self._values):
            self._journal.compact(self._values, self._unsynced.durable)

    def get(self, key: str, out: torch.Tensor | None = None, *, priority: Priority = Priority.DEMAND) -> StoreFuture:
        """Starts to read the tensor of ``key`` into ``out``, or into a new one: the future's ``tensor``.

        Args:
            key: a name.
            out: of the same dtype and shape, on any device. In host memory when None, of the pool's where there is one:
                then this call waits while its budget is spent.
            priority: of the reads.

        Raises:
            KeyError: nothing was put under it.
            ValueError: ``out`` has another dtype or shape, or elements that share memory; or the store is closed.
            TypeError: ``out`` is not a dense tensor.
            MemoryError: more than the pool's budget.
            ChecksumError: from the future: the bytes are not those that were put.
        """
        if out is not None:
            require_dense(out)
            if any(stride == 0 and length > 1 for stride, length in zip(out.stride(), out.shape, strict=True)):
                raise ValueError("elements of out share memory, so they cannot differ")
        memory: torch.Tensor | None = None
        while True:
            with self._claim(key):
                with self._lock:
                    value = self._values.get(key)
                if value is None:
                    raise KeyError(key)
                if out is not None and (out.dtype != value.dtype or tuple(out.shape) != value.shape):
                    raise ValueError(
                        f"{key!r} is {value.dtype} of shape {value.shape}, and out is {out.dtype} of shape "
                        f"{tuple(out.shape)}"
                    )
                fits = out is not None and is_dense(out) and tuple(out.stride()) == value.stride
                if fits or (memory is not None and memory.numel() == value.nbytes):
                    return self._read(key, value, out, fits, memory, priority)
                wanted = value.nbytes
            memory = None  # goes back first
            if self._pool is not None and wanted:
                memory = self._pool.lease(wanted).tensor  # for which others may wait at this key meanwhile
            else:
                memory = empty(wanted, dtype=torch.uint8)

    def _read(
        self,
        key: str,
        value: Value,
        out: torch.Tensor | None,
        fits: bool,
        memory: torch.Tensor | None,
        priority: Priority,
    ) -> StoreFuture:
        """Into ``out`` where it ``fits`` the value's layout, else into ``memory`` and perhaps from there."""
        if out is not None and fits:
            target, source = out, out if out.is_contiguous() else dense_bytes(out)
        elif memory is not None and value.nbytes:
            target, source = memory.view(value.dtype).as_strided(value.shape, value.stride), memory
        else:
            target = torch.empty_strided(value.shape, value.stride, dtype=value.dtype, device="cpu")
            source = dense_bytes(target)
        transfers: list[IoFuture] = []
        try:
            self._slabs.move(value.pieces, source, transfers, write=False, priority=priority)
        finally:
            with self._lock:  # whatever happens, their extents are not used again before they have ended
                value.busy()
                value.readers += transfers

        if out is None or fits:
            out = None
            if value.checksum is None and len(transfers) == 1:  # nothing is left to be done at the end
                return StoreFuture(transfers[0]._operation, target)
        operation = JoinedOperation(transfers, self._finish_get, key, value, source, target, out)
        return StoreFuture(as_operation(operation), target if out is None else out)

    def _finish_get(
        self,
        failure: BaseException | None,
        key: str,
        value: Value,
        source: torch.Tensor,
        target: torch.Tensor,
        out: torch.Tensor | None,
    ) -> None:
        """Compares the checksum of what has arrived, and copies it to ``out``."""
        compare(failure, self._slabs, value, source, [key])
        if failure is None and out is not None:
            copy(out.detach(), target)

    def share(self, key: str, target: int, place: int) -> bool:
        """Has the bytes of ``key`` in an open file from byte ``place`` on, by reference.

        The file system copies a block only when either is written to.

        Returns:
            False where the file system cannot, or the bytes do not fill its blocks. Some may then be in the file.

        Raises:
            KeyError: nothing was put under it.
            OSError: ENOSPC, EIO.
        """
        with self._claim(key):
            with self._lock:
                value = self._values[key]
            return self._slabs.share(value.pieces, target, place)

    def drop(self, key: str) -> None:
        """Forgets the tensor; its space is used again when its reads have ended. Raises KeyError."""
        with self._claim(key), self._lock:
            value = self._values[key]
            if self._journal:
                self._journal.record(key, None)
            del self._values[key]
            self._unsynced.put(key)
            self._retire(key, value)
        self._reclaim()

    def __contains__(self, key: object) -> bool:
        self._require_own()
        with self._lock:
            return key in self._values or key in self._writing

    def __len__(self) -> int:
        return len(self.keys())

    def __iter__(self) -> Iterator[str]:
        return iter(self.keys())

    def keys(self) -> list[str]:
        """What was put and not dropped, those whose first value is under way included."""
        self._require_own()
        with self._lock:
            return list({**self._values, **self._writing})

    def described(self, keys: Iterable[str]) -> list[dict[str, Any]]:
        """Returns where the tensors of these keys are, as JSON has it. Raises KeyError."""
        with self._lock:
            return [entry_of(key, self._values[key]) for key in keys]

    def adopt(self, entries: Iterable[dict[str, Any]]) -> None:
        """Has what an earlier store has ``described``, and nothing else. Raises as ``value_in`` and ``reserve`` do."""
        values = {key: value for key, value in map(value_in, entries) if value is not None}
        self._slabs.reserve(piece for value in values.values() for piece in value.pieces)
        self._values = values

    def wait(self) -> None:
        """Waits for all that is under way. Raises the first failure of a ``put`` that nobody has asked for."""
        self._require_own()
        with self._lock:
            writers = list(self._writing.values())
            readers = [reader for value in [*self._values.values(), *self._retired] for reader in value.readers]
        for writer in writers:
            writer.wait(None)
        for reader in readers:
            reader.exception()
        with self._lock:
            failed, self._failed = self._failed, []
        found: list[BaseException] = []
        for each in failed:
            each.wait(None)  # another thread may be at its end
            if not each.asked and (failure := each.exception()) is not None:
                found.append(failure)
        if found:
            raise found[0]

    def sync(self) -> None:
        """``wait``, then makes all of it durable, and in a session that is kept what finding it again takes.

        Raises:
            OSError: a device failed. What was put since the last sync may then be lost, though it can be read now:
                each further call raises until it was put again, or dropped.
        """
        self.wait()
        with self._claims.take(_SYNC):
            with self._lock:
                self._unsynced.begin(self._values)
                place = self._journal.place() if self._journal else None
            try:
                self._slabs.sync()
                if self._journal and place and self._unsynced.certain:
                    with self._lock:
                        self._unsynced.flushed()
                        journal = self._journal.mark(place, self._values, self._unsynced.durable)
                    self._journal.sync(journal)
                    if not self._named:
                        self._session.sync()
                        self._named = True
            except BaseException:
                with self._lock:
                    self._unsynced.failed()
                raise
            with self._lock:
                self._retired += self._unsynced.ended(self._slabs.paths[0])

    def trim(self) -> None:
        """Gives the space of what was dropped back to the file systems."""
        self._require_own()
        self._reclaim()
        with self._claims.take(_TRIM):
            self._slabs.trim()

    @property
    def bytes_in_use(self) -> int:
        """Bytes of the slabs that hold tensors."""
        self._require_own()
        self._reclaim()
        return self._slabs.bytes_in_use

    def close(self) -> None:
        """Waits for what is under way and closes the files, which are the session's to remove. Once or more."""
        if self._process != os.getpid() or not self._claims.close():
            return
        try:
            self.wait()
        finally:
            try:
                if self._journal and not self._writing:
                    if self._unsynced.changed:
                        self._slabs.sync()
                    with self._lock:
                        known = self._values if self._unsynced.certain else self._unsynced.durable
                        self._journal.compact(self._values, known)
            finally:
                self._undo.close()

    def leave_to_parent(self) -> None:
        """In a forked child: closes what would keep the space of removed files."""
        if hasattr(self, "_slabs"):  # else it was being made
            self._slabs.close_descriptors()
        if self._journal:
            self._journal.close()

    def __enter__(self) -> TensorStore:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # Below

    def _require_own(self) -> None:
        if self._process != os.getpid():
            raise RuntimeError("this store is the parent's: a forked child makes one of its own")

    def _claim(self, key: str) -> Claim:
        """Waits until nobody else is at the key and nothing of it is being written; its failure is its future's."""
        self._require_own()
        self._collect()
        while True:
            with self._lock:
                claim = self._claims.take(key)
                operation = self._writing.get(key)
                if operation is None:
                    return claim
                with claim:
                    pass
            operation.wait(None)

    def _collect(self) -> None:
        """Takes note of writes that have ended, the oldest first, whether or not their futures were asked."""
        if len(self._writing) < _MANY and self._bytes_written < _MUCH:
            return
        with self._lock:
            oldest = list(itertools.islice(self._writing.values(), _MANY))
        for operation in oldest:
            if not operation.done():
                break

    def _measure(self) -> None:
        """The first who comes measures the devices; the others wait for that, and nobody has a lock meanwhile."""
        if not self._slabs.is_measured:
            with self._claims.take(_MEASURE):
                self._slabs.measure()

    def _reclaim(self) -> None:
        """Frees the extents of what was replaced or dropped, and is not being read any more."""
        if not self._retired:
            return
        with self._lock:
            busy = []
            for value in self._retired:
                busy.append(value) if value.busy() else self._release(value)
            self._retired = busy

    def _retire(self, key: str, value: Value) -> None:
        if not value.retired:
            value.retired = True
            if not self._unsynced.holds(key, value):
                self._retired.append(value)

    def _release(self, value: Value) -> None:
        if not value.released:
            value.released = True
            self._slabs.free(value.pieces)
