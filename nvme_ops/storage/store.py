"""``TensorStore``: stores tensors by key on the devices of a session, asynchronously."""

from __future__ import annotations

import contextlib
import itertools
import threading
import weakref
from collections.abc import Hashable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch

from nvme_ops.base.errors import FormatError
from nvme_ops.base.lifetime import Closing, Owned
from nvme_ops.base.text import counted, never_raising, size_words
from nvme_ops.io.arguments import require_switches
from nvme_ops.io.engine import Priority
from nvme_ops.io.file import handle_of
from nvme_ops.io.future import IoFuture
from nvme_ops.io.handle import aio_handle
from nvme_ops.io.tensors import copy, dense_bytes, dense_strides, empty, is_dense, is_plain
from nvme_ops.memory.pool import Pool
from nvme_ops.storage.joined import JoinedOperation, as_operation
from nvme_ops.storage.journal import Journal, UnsyncedChanges, Value, entry_of, value_in
from nvme_ops.storage.session import Session
from nvme_ops.storage.striped import StripedSlabs

if TYPE_CHECKING:
    from nvme_ops.ops.async_io import Operation


class StoreFuture(IoFuture):
    """What ``put`` and ``get`` return: its result is the bytes moved, ``tensor`` the one that is stored or filled."""

    __slots__ = ("tensor",)

    def __init__(self, operation: Operation, tensor: torch.Tensor) -> None:
        super().__init__(operation)
        self.tensor = tensor


def require_dense(tensor: Any) -> None:
    """Raises TypeError unless ``tensor`` is a strided, unquantized tensor with memory."""
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"a dense torch.Tensor is needed, not {type(tensor).__name__}")
    if tensor.layout != torch.strided or tensor.is_meta or tensor.is_quantized:
        raise TypeError(f"a dense torch.Tensor is needed, not one of {tensor.layout}, {tensor.dtype}, {tensor.device}")


def to_store(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a contiguous tensor of the bytes to store: the tensor itself, or its memory if it is dense, or a copy.

    Raises TypeError as ``require_dense``.
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


_RECHECK = 0.1  # seconds until a claim that ended without notifying anyone is noticed


class Claim:
    """A thread's claim to something, for a ``with`` block.

    It ends with the block. If Ctrl-C interrupts just before the block or at its very end, it ends once it is freed.
    """

    def __init__(self, claims: Claims, thing: Hashable, before: weakref.ref[Claim] | None) -> None:
        self._claims, self._thing, self._before = claims, thing, before
        self.thread = threading.get_ident()

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        """Ends it; an earlier one of the same thread is in force again."""
        claims, before = self._claims, self._before
        with claims._lock:
            if before is not None and before() is not None:
                claims._claimed[self._thing] = before
                return
            claims._claimed.pop(self._thing, None)
            claims._changed.notify_all()


class Claims:
    """Lets one thread at a time claim a thing, until ``close``, which waits until no claims are left.

    A thread's own claims do not make it wait: they are those of the code that a signal handler interrupts, or were left
    by Ctrl-C.

    Args:
        lock: held only briefly, also by users of this class.
    """

    def __init__(self, lock: threading.RLock) -> None:
        self._lock, self._changed = lock, threading.Condition(lock)
        self._claimed: dict[Hashable, weakref.ref[Claim]] = {}  # weak, so that a claim ends with its thread's frames
        self._closed = False

    def take(self, thing: Hashable) -> Claim:
        """Claims a thing once no other thread claims it. Raises ValueError after ``close``."""
        with self._lock:
            while (before := self._claimed.get(thing)) and self._is_anothers(before) and not self._closed:
                self._changed.wait(_RECHECK)
            if self._closed:
                raise ValueError("the store is closed")
            claim = Claim(self, thing, before)
            self._claimed[thing] = weakref.ref(claim)
            return claim

    @property
    def closed(self) -> bool:
        """True after ``close``."""
        return self._closed

    def close(self) -> bool:
        """Refuses new claims, and waits until other threads have none left. Returns False from the second call on."""
        with self._lock:
            if self._closed:
                return False
            self._closed = True
            self._changed.notify_all()
            try:
                while any(map(self._is_anothers, self._claimed.values())):
                    self._changed.wait(_RECHECK)
            except BaseException:  # Ctrl-C
                self._closed = False
                raise
            return True

    def _is_anothers(self, claimed: weakref.ref[Claim]) -> bool:
        claim = claimed()
        return claim is not None and claim.thread != threading.get_ident()


_SLAB, _INDEX = "slab", "index"
_MEASURE, _SYNC, _TRIM = object(), object(), object()  # activities that a thread can claim
_MANY, _MUCH = 256, 16 << 20  # writes in flight, and their bytes, from which on a call checks which have ended


class TensorStore(Closing, Owned):
    """Stores tensors by key, in one preallocated file for each folder of a session.

    Large tensors are divided among the folders by their devices' rates. Tensors may have any dtype, shape and dense
    layout, on any device; ``get`` restores their strides. All methods are thread-safe. ``get`` finds a tensor as soon
    as ``put`` has returned, and waits for a ``put`` of its key that is in flight.

    Args:
        session: provides the folders. If it is kept (``reuse=True``), the next session has all that was put and waited
            for, even if this process is killed; after a restart of the machine, all as of the last ``sync`` or
            ``close``.
        pool: provides the memory of tensors that ``get`` returns without ``out``; without one there is no bound.
        checksums: keep a CRC-32C of each tensor and compare it when the tensor is read.
        handle: moves the bytes; with several folders, each further one gets a copy of it.
        weights: the rates of the folders' devices, in any unit; measured at the first ``put`` when None.
        name: distinguishes the stores of one session.
        journal: in a kept session, record where each tensor is. Without it nothing is found again except what ``adopt``
            is given, and tensors are overwritten in place as in other sessions.

    Raises:
        ValueError: wrong weights, a closed session, or one that has an open store of this name.
        FormatError: what a kept session contains is damaged; the message names the file.
    """

    _forked_error = "this store belongs to the parent process: a forked child must make its own"

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
        if not isinstance(session, Session):
            raise TypeError(f"session must be a Session, not {type(session).__name__}: Session(folder, name=...)")
        if pool is not None and not isinstance(pool, Pool):
            raise TypeError(f"pool must be a Pool, not {type(pool).__name__}: Pool('64M')")
        require_switches(checksums=checksums, journal=journal)
        self._session, self._pool, self._checksums, self._name = session, pool, checksums, name
        super().__init__()
        self._lock = threading.RLock()
        self._claims = Claims(self._lock)  # to keys and activities
        self._values: dict[str, Value] = {}
        self._writing: dict[str, JoinedOperation] = {}
        self._bytes_written = 0  # by those in flight
        self._failed: list[JoinedOperation] = []  # for ``wait`` to raise
        self._retired: list[Value] = []  # replaced or dropped; their extents are freed once nobody reads them
        self._journal: Journal | None = None
        self._named = False  # whether the names of the files are durable
        self._has_put = False
        with contextlib.ExitStack() as undo:
            session.lend(name, self)
            undo.callback(session.take_back, name, self)
            self._slabs = StripedSlabs(session, _SLAB + name, handle_of(handle), weights)
            undo.callback(self._slabs.close)
            if session.reuse and journal:
                self._journal = Journal(session, _INDEX + name)
                undo.callback(self._journal.close)
                self._values = self._journal.load()
                try:
                    self._slabs.reserve(piece for value in self._values.values() for piece in value.pieces)
                except (ValueError, TypeError) as error:
                    raise FormatError(f"{self._journal.path}: the index names impossible extents: {error}") from error
            self._unsynced = UnsyncedChanges(kept=self._journal is not None)
            self._unsynced.durable = dict(self._values)
            if self._journal and not self._journal.is_covered:  # it is ahead of what a power failure would leave
                self._slabs.sync()
                self._journal.sync(self._journal.mark(self._journal.place(), self._values, self._values))
            self._undo = undo.pop_all()

    # Public methods

    def put(
        self, key: str, tensor: torch.Tensor, *, atomic: bool = False, priority: Priority = Priority.WRITEBACK
    ) -> StoreFuture:
        """Starts to store ``tensor``, which must not change until the future is done.

        Args:
            key: a name.
            tensor: dense, on any device. One that is not plain in memory is copied first.
            atomic: keep the key's old value until the new one is complete, whatever happens. Otherwise a value of the
                same size is overwritten in place, and lost if that fails. In a kept session nothing is overwritten.
            priority: of the writes.

        Raises:
            OSError: ENOSPC: the disk is full; nothing was written and the key keeps its old value.
            TypeError: ``tensor`` is not a dense tensor, or ``key`` is not a str.
            ValueError: the store is closed.
        """
        if not isinstance(key, str):
            raise TypeError(f"a key must be a str, not {type(key).__name__}")
        require_switches(atomic=atomic)
        source = to_store(tensor)
        if not self._slabs.is_measured:
            with self._claims.take(_MEASURE):  # without the lock; other threads that put wait for it
                self._slabs.measure()
        with self._claim(key):
            self._reclaim()
            with self._lock:
                old = self._values.get(key)
                if old and not atomic and not self._journal and old.nbytes == source.nbytes and not old.busy():
                    in_place, pieces = True, old.pieces
                else:
                    in_place, pieces = False, self._slabs.allocate(source.nbytes)
                value = Value(tensor.dtype, tuple(tensor.shape), dense_strides(tensor), pieces)
            transfers: list[IoFuture] = []
            operation = JoinedOperation(transfers, self._finish_put, key, value, old, in_place)
            try:
                self._slabs.write(value, source, transfers, priority, self._checksums)
            except BaseException:  # some transfers may be in flight
                operation.retrieved = True
                operation.trouble = RuntimeError("put() failed")  # the exception itself would keep its callers' frames
                raise
            finally:
                with self._lock:
                    self._writing[key] = operation
                    self._bytes_written += value.nbytes
                if operation.trouble is not None:
                    operation.add_callback(lambda: None)  # ends it with the transfers in flight, so that it is freed
            return StoreFuture(as_operation(operation), tensor)

    def _finish_put(
        self, failure: BaseException | None, key: str, value: Value, old: Value | None, in_place: bool
    ) -> None:
        """Records the outcome of a ``put``. If interrupted at any point, it can be called again."""
        with self._lock:
            error: Exception | None = None
            if failure is None:
                try:
                    self._record(key, value, None if in_place else old)
                except Exception as trouble:
                    error = trouble
            if failure is not None or error is not None:
                if in_place and self._values.get(key) is old:  # overwritten, at least in part
                    del self._values[key]
                self._release(value)
                mine = [self._writing[key]] if key in self._writing else []
                self._failed = [write for write in [*self._failed, *mine] if not write.retrieved]
            if self._writing.pop(key, None) is not None:
                self._bytes_written -= value.nbytes
        if error is not None:
            raise error

    def _record(self, key: str, value: Value, old: Value | None) -> None:
        """Gives the key this value and retires ``old``."""
        if self._journal:
            self._journal.record(key, value)
        self._values[key] = value
        self._has_put = True
        self._unsynced.put(key)
        if old is not None:
            self._retire(key, old)
        if self._journal and self._journal.is_long(self._values):
            self._journal.compact(self._values, self._unsynced.durable)

    def get(self, key: str, out: torch.Tensor | None = None, *, priority: Priority = Priority.DEMAND) -> StoreFuture:
        """Starts to read the tensor of ``key`` into ``out``, or into a new one: the future's ``tensor``.

        Args:
            key: a name.
            out: a tensor of the same dtype and shape, on any device. When None, one in host memory is made; if there is
                a pool, from its memory, for which this call then waits while the pool's budget is spent.
            priority: of the reads.

        Raises:
            KeyError: nothing is stored under this key.
            ValueError: ``out`` has another dtype or shape, or elements that share memory; or the store is closed.
            TypeError: ``out`` is not a dense tensor.
            MemoryError: the tensor is larger than the pool's budget.
            ChecksumError: from the future: the bytes are not those that were put.
        """
        dense = False
        if out is not None:
            require_dense(out)
            dense = is_dense(out)
            if not dense and any(
                step == 0 and length > 1 for step, length in zip(out.stride(), out.shape, strict=True)
            ):
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
                if out is not None and dense and tuple(out.stride()) == value.stride:
                    source = out if out.is_contiguous() else dense_bytes(out)
                    return self._read(key, value, source, out, out, priority)
                if memory is not None and memory.numel() == value.nbytes:
                    made = memory.view(value.dtype).as_strided(value.shape, value.stride)
                    return self._read(key, value, memory, made, made if out is None else out, priority)
                wanted = value.nbytes
            memory = None  # released before more is taken
            if self._pool is not None and wanted:
                memory = self._pool.lease(wanted).tensor  # may wait; the key is not claimed meanwhile
            else:
                memory = empty(wanted, dtype=torch.uint8)

    def _read(
        self, key: str, value: Value, source: torch.Tensor, made: torch.Tensor, out: torch.Tensor, priority: Priority
    ) -> StoreFuture:
        """Starts to read into ``source``, the memory of ``made``, from which it is copied to ``out`` if they differ."""
        transfers: list[IoFuture] = []
        try:
            self._slabs.move(value.pieces, source, transfers, write=False, priority=priority)
        finally:
            with self._lock:  # whatever happens, the extents are not reused before the reads have ended
                value.busy()
                value.readers += transfers

        if out is made and value.checksum is None and len(transfers) == 1:  # nothing to do at the end
            return StoreFuture(transfers[0]._operation, out)

        def finish(failure: BaseException | None) -> None:
            self._slabs.compare(failure, value, source, [key])
            if failure is None and out is not made:
                copy(out.detach(), made)

        return StoreFuture(as_operation(JoinedOperation(transfers, finish)), out)

    def share(self, key: str, target: int, place: int) -> bool:
        """Makes an open file, ``target``, share the bytes of ``key`` from byte ``place`` on, by reference.

        The file system copies a block only when one of the two files is written to.

        Returns:
            False if the file system cannot, or the bytes do not fill its blocks. Some may then be in the file.

        Raises:
            KeyError: nothing is stored under this key.
            OSError: ENOSPC, EIO.
        """
        with self._claim(key):
            with self._lock:
                value = self._values[key]
            return self._slabs.share(value.pieces, target, place)

    def drop(self, key: str) -> None:
        """Removes the tensor; its space is reused once its reads have ended. Raises KeyError."""
        with self._claim(key), self._lock:
            value = self._values[key]
            if self._journal:
                self._journal.record(key, None)
            del self._values[key]
            self._unsynced.put(key)
            self._retire(key, value)
        self._reclaim()

    def __contains__(self, key: object) -> bool:
        self._require_ours()
        with self._lock:
            return key in self._values or key in self._writing

    def __len__(self) -> int:
        return len(self.keys())

    def __iter__(self) -> Iterator[str]:
        return iter(self.keys())

    def keys(self) -> list[str]:
        """Returns the keys that were put and not dropped, also those whose first value is still being written."""
        self._require_ours()
        with self._lock:
            return list({**self._values, **self._writing})

    def described(self, keys: Iterable[str]) -> list[dict[str, Any]]:
        """Returns where the tensors of these keys are, as JSON objects for ``adopt``. Raises KeyError."""
        with self._lock:
            return [entry_of(key, self._values[key]) for key in keys]

    def adopt(self, entries: Iterable[dict[str, Any]]) -> None:
        """Takes over the tensors that an earlier store ``described``, and no others.

        Raises ValueError, LookupError, TypeError, AttributeError or OverflowError for impossible entries.
        """
        values = {key: value for key, value in map(value_in, entries) if value is not None}
        self._slabs.reserve(piece for value in values.values() for piece in value.pieces)
        self._values = values

    def wait(self) -> None:
        """Waits for everything in flight. Raises the first failure of a ``put`` that was not retrieved."""
        self._require_ours()
        with self._lock:
            writers = list(self._writing.values())
            readers = [reader for value in [*self._values.values(), *self._retired] for reader in value.readers]
        for writer in writers:
            writer.wait(None)
        for reader in readers:
            reader.exception()
        with self._lock:
            failed, self._failed = self._failed, []
        failures: list[BaseException] = []
        for write in failed:
            write.wait(None)  # another thread may still be ending it
            if not write.retrieved and (failure := write.exception()) is not None:
                failures.append(failure)
        if failures:
            raise failures[0]

    def sync(self) -> None:
        """Calls ``wait``, then makes everything durable; in a kept session, also the record of where it is.

        Raises:
            OSError: a device failed. What was put since the last sync may then be lost, although it can be read now:
                every further call raises until it has been put again or dropped.
        """
        self.wait()
        with self._claims.take(_SYNC):
            with self._lock:
                changed = bool(self._unsynced.changed)
                self._unsynced.begin(self._values)
                place = self._journal.place() if self._journal else None
            try:
                self._slabs.sync()
                if self._journal and place and changed and not self._unsynced.doubtful:
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
        """Returns the space of dropped tensors to the file systems."""
        self._require_ours()
        self._reclaim()
        with self._claims.take(_TRIM):
            self._slabs.trim()

    @property
    def bytes_in_use(self) -> int:
        """Bytes of the slabs that are allocated to tensors."""
        self._require_ours()
        self._reclaim()
        return self._slabs.bytes_in_use

    def close(self) -> None:
        """Waits for what is in flight and closes the files; the session removes them. Further calls do nothing."""
        if not self._is_ours() or not self._claims.close():
            return
        with self._undo:
            try:
                self.wait()
            finally:
                if self._journal and not self._writing:
                    if self._unsynced.changed:
                        self._slabs.sync()
                    with self._lock:
                        known = self._unsynced.durable if self._unsynced.doubtful else self._values
                        self._journal.compact(self._values, known)
                # What its user keeps takes no more space than it needs. One that put nothing may have been refused.
                if self._session.reuse and not self._journal and self._has_put:
                    with contextlib.suppress(OSError):
                        self._reclaim()
                        self._slabs.trim()

    @never_raising
    def __repr__(self) -> str:
        """Returns for example ``<TensorStore 'optimizer': 12 tensors, 64 MiB on storage>``."""
        name = self._session.name + f".{self._name}" * bool(self._name)
        used = f"{counted(len(self._values), 'tensor')}, {size_words(self._slabs.bytes_in_use)} on storage"
        return f"<TensorStore {name!r}: {'closed' if self._claims.closed else used}>"

    # Internals

    def _claim(self, key: str) -> Claim:
        """Claims the key once no other thread does and no ``put`` of it is in flight; does not raise its failure."""
        self._require_ours()
        if len(self._writing) >= _MANY or self._bytes_written >= _MUCH:
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
        """Ends the oldest writes that are complete, whether or not their futures are used."""
        with self._lock:
            oldest = list(itertools.islice(self._writing.values(), _MANY))
        for operation in oldest:
            if not operation.done():
                break

    def _reclaim(self) -> None:
        """Frees the extents of values that were replaced or dropped and are no longer being read."""
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
