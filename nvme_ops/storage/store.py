"""``TensorStore``: tensors by key, on the devices of a session, in flight as the program likes."""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Callable, Sequence
from copy import copy as copy_object
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import torch

from nvme_ops._native import native
from nvme_ops.engine import Priority
from nvme_ops.errors import ChecksumError
from nvme_ops.file import shared_handle
from nvme_ops.future import IoFuture
from nvme_ops.handle import aio_handle
from nvme_ops.memory.carve import copy, dense_bytes, dense_strides, is_dense, is_plain
from nvme_ops.memory.pieces import checksums_anywhere
from nvme_ops.memory.pool import Pool
from nvme_ops.storage.index import Index
from nvme_ops.storage.joined import JoinedOperation, as_operation
from nvme_ops.storage.session import Session
from nvme_ops.storage.slab import Extent, Slab
from nvme_ops.storage.stripe import Striping, measured
from nvme_ops.tensors import empty

_SLAB = "slab"
_COLLECTED = 16  # writes looked at in one call whether they have ended


class StoreFuture(IoFuture):
    """The result of ``put`` and ``get``: bytes moved. ``tensor`` is what was, or will be, filled or stored."""

    __slots__ = ("tensor",)

    def __init__(self, joined: JoinedOperation, tensor: torch.Tensor) -> None:
        super().__init__(as_operation(joined))
        self.tensor = tensor


class Piece(NamedTuple):
    """Bytes of a tensor from ``begin`` on, and the extent that has them in the slab of a folder."""

    folder: int
    begin: int
    nbytes: int
    extent: Extent


@dataclass(eq=False)
class Value:
    """What the store knows of a tensor."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    pieces: list[Piece]
    checksum: int | None = None
    readers: list[StoreFuture] = field(default_factory=list)

    @property
    def nbytes(self) -> int:
        """Of the tensor."""
        return sum(piece.nbytes for piece in self.pieces)


class TensorStore:
    """Tensors by key, in one preallocated file for each folder of a session.

    Large tensors are divided among the folders by their devices' rates. Any dtype, shape and dense layout, on any
    device: what comes back has the strides of what was stored. Any thread may call any method. What was put is found by
    ``get`` as soon as ``put`` has returned; ``get`` waits for a ``put`` of its key that is under way.

    Args:
        session: has the folders. Where it is kept, what was put and has ended is there in the next session, also when
            this process is killed; ``sync`` makes it outlive the machine's power.
        pool: has the memory of what ``get`` returns without ``out``; without one there is no bound.
        checksum: keep a CRC-32C of each tensor and compare it when it comes back.
        handle: moves the bytes; with several folders there is one more like it for each.
        weights: the rates of the folders' devices, in any unit; measured at the first ``put`` when None.
    """

    def __init__(
        self,
        session: Session,
        pool: Pool | None = None,
        *,
        checksum: bool = False,
        handle: aio_handle | None = None,
        weights: Sequence[float] | None = None,
    ) -> None:
        count = len(session.folders)
        if weights is not None and len(weights) != count:
            raise ValueError(f"{len(weights)} weights for {count} folders")
        self._session, self._pool, self._checksum = session, pool, checksum
        first = handle or shared_handle()
        self._handles = [first, *(copy_object(first) for _ in range(count - 1))]
        self._process = os.getpid()
        self._lock = threading.RLock()
        self._unclaimed = threading.Condition(self._lock)
        self._claimed: set[str] = set()  # keys that a thread is at
        self._values: dict[str, Value] = {}
        self._writing: dict[str, StoreFuture] = {}
        self._retired: list[Value] = []
        self._fds = [session.open(index, _SLAB) for index in range(count)]
        self._paths = [session.path(index, _SLAB) for index in range(count)]
        self._files = [native().OpenFile(fd) for fd in self._fds]
        self._slabs = [Slab(fd, path) for fd, path in zip(self._fds, self._paths, strict=True)]
        self._index = Index(session) if session.keep else None
        for key, value in self._index.load() if self._index else ():
            for piece in value.pieces:
                self._slabs[piece.folder].reserve(piece.extent)
            self._values[key] = value
        self._striping = Striping(weights or [1.0]) if weights or count == 1 else None

    # What users call

    def put(
        self,
        key: str,
        tensor: torch.Tensor,
        *,
        keep: Literal["previous"] | None = None,
        priority: Priority = Priority.WRITEBACK,
    ) -> StoreFuture:
        """Starts to store ``tensor``, which must not change until the future is done.

        Args:
            key: a name.
            tensor: dense, on any device. One that is not plain in memory is copied first.
            keep: ``"previous"``: the value that the key has stays until the new one is complete, whatever happens.
                Otherwise a value of the same size is overwritten in its place.
            priority: of the writes.

        Raises:
            OSError: ENOSPC: the disk is full; nothing was written and the value that the key had is still there.
            TypeError: not a dense tensor.
        """
        source = _dense(tensor)
        self._claim(key)
        try:
            with self._lock:
                old = self._values.get(key)
                in_place = old is not None and keep is None and old.nbytes == source.nbytes and not _busy(old)
                pieces = old.pieces if old is not None and in_place else self._allocate(source.nbytes)
            value = Value(tensor.dtype, tuple(tensor.shape), dense_strides(tensor), pieces)

            def finish(failure: BaseException | None) -> None:
                with self._lock:
                    self._writing.pop(key, None)
                    if failure is not None:
                        self._forget(key) if in_place else self._release(value)
                        return
                    if self._index:
                        self._index.put(key, value)
                    self._values[key] = value
                    if old is not None and not in_place:
                        self._retired.append(old)

            try:
                transfers = self._move(pieces, source, write=True, priority=priority)
            except BaseException as error:
                finish(error)
                raise
            if self._checksum:  # while it is on its way
                value.checksum = checksums_anywhere([source])[0]
            future = StoreFuture(JoinedOperation(transfers, finish), tensor)
            with self._lock:
                self._writing[key] = future
            return future
        finally:
            self._unclaim(key)

    def get(self, key: str, out: torch.Tensor | None = None, *, priority: Priority = Priority.DEMAND) -> StoreFuture:
        """Starts to read the tensor of ``key`` into ``out``, or into a new one: the future's ``tensor``.

        Args:
            key: a name.
            out: of the same dtype and shape, on any device. In host memory when None, of the pool's where there is one:
                then this call waits while its budget is spent.
            priority: of the reads.

        Raises:
            KeyError: nothing was put under it.
            ValueError: ``out`` has another dtype or shape.
            ChecksumError: from the future: the bytes are not those that were put.
        """
        memory: torch.Tensor | None = None
        while True:
            self._claim(key)
            try:
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
            finally:
                self._unclaim(key)
            memory = self._memory(wanted)  # for which others may wait at this key meanwhile

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
            target, source = out, dense_bytes(out)
        elif memory is not None and value.nbytes:
            target, source = memory.view(value.dtype).as_strided(value.shape, value.stride), memory
        else:
            target = torch.empty_strided(value.shape, value.stride, dtype=value.dtype)
            source = dense_bytes(target)
        transfers = self._move(value.pieces, source, write=False, priority=priority)

        def finish(failure: BaseException | None) -> None:
            if failure is not None:
                return
            if value.checksum is not None and checksums_anywhere([source])[0] != value.checksum:
                raise ChecksumError(self._paths[value.pieces[0].folder] if value.pieces else "", [key])
            if out is not None and not fits:
                copy(out, target) if is_plain(out) else out.copy_(target)

        future = StoreFuture(JoinedOperation(transfers, finish), target if out is None else out)
        with self._lock:
            value.readers = [reader for reader in value.readers if not reader.done()]
            value.readers.append(future)
        return future

    def drop(self, key: str) -> None:
        """Forgets the tensor; its space is used again when its reads have ended. Raises KeyError."""
        self._claim(key)
        try:
            with self._lock:
                value = self._values.pop(key)
                if self._index:
                    self._index.drop(key)
                self._retired.append(value)
        finally:
            self._unclaim(key)
        self._reclaim()

    def __contains__(self, key: object) -> bool:
        with self._lock:
            return key in self._values or key in self._writing

    def __len__(self) -> int:
        return len(self.keys())

    def keys(self) -> list[str]:
        """What was put and not dropped, those whose first value is under way included."""
        with self._lock:
            return list({**self._values, **self._writing})

    def wait(self) -> None:
        """Waits for all that is under way. Raises the first failure of a ``put`` that nobody has asked for."""
        for future in list(self._writing.values()):
            future.result()
        with self._lock:
            readers = [reader for value in [*self._values.values(), *self._retired] for reader in value.readers]
        for reader in readers:
            reader.exception()

    def sync(self) -> None:
        """``wait``, then makes all of it durable."""
        self.wait()
        for fd in self._fds:
            os.fdatasync(fd)
        if self._index:
            self._index.sync()

    def trim(self) -> None:
        """Gives the space of what was dropped back to the file systems."""
        self._reclaim()
        for slab in self._slabs:
            slab.trim()

    @property
    def bytes_in_use(self) -> int:
        """Bytes of the slabs that hold tensors."""
        self._reclaim()
        return sum(slab.bytes_in_use for slab in self._slabs)

    def close(self) -> None:
        """Waits for what is under way and closes the files, which are the session's to remove. Once or more."""
        if not self._fds or self._process != os.getpid():
            return
        try:
            self.wait()
        finally:
            fds, self._fds = self._fds, []
            for file in self._files:
                file.close()
            if self._index:
                self._index.close(self._values)
            for fd in fds:
                os.close(fd)

    def __enter__(self) -> TensorStore:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # Below

    def _claim(self, key: str) -> None:
        """Waits until nobody else is at the key and nothing of it is being written; its failure is its future's."""
        if self._process != os.getpid():
            raise RuntimeError("this store is the parent's: a forked child makes one of its own")
        self._collect()
        while True:
            with self._unclaimed:
                if not self._fds:
                    raise ValueError("the store is closed")
                while key in self._claimed:
                    self._unclaimed.wait()
                future = self._writing.get(key)
                if future is None:
                    self._claimed.add(key)
                    return
            future._operation.wait(None)

    def _unclaim(self, key: str) -> None:
        with self._unclaimed:
            self._claimed.discard(key)
            self._unclaimed.notify_all()

    def _collect(self) -> None:
        """Takes note of writes that have ended, the oldest first, whether or not their futures were asked."""
        with self._lock:
            oldest = list(itertools.islice(self._writing.values(), _COLLECTED))
        for future in oldest:
            if not future.done():
                break

    def _allocate(self, nbytes: int) -> list[Piece]:
        """Room for a tensor; all of it, or OSError and nothing."""
        self._reclaim()
        if self._striping is None:
            self._striping = Striping(measured(self._handles, self._slabs, self._fds))
        pieces: list[Piece] = []
        try:
            for folder, begin, size in self._striping.parts(nbytes) if nbytes else ():
                pieces.append(Piece(folder, begin, size, self._slabs[folder].allocate(size)))
        except BaseException:
            for piece in pieces:
                self._slabs[piece.folder].free(piece.extent)
            raise
        return pieces

    def _move(self, pieces: Sequence[Piece], memory: torch.Tensor, write: bool, priority: Priority) -> list[IoFuture]:
        transfers: list[IoFuture] = []
        try:
            for folder, begin, nbytes, extent in pieces:
                handle = self._handles[folder]
                submit: Callable[..., IoFuture] = handle.submit_pwrite if write else handle.submit_pread
                part = memory if nbytes == memory.numel() else memory[begin : begin + nbytes]
                transfers.append(submit(part, self._files[folder], extent.start, priority=priority))
        except BaseException:
            for transfer in transfers:
                transfer.exception()
            raise
        return transfers

    def _memory(self, nbytes: int) -> torch.Tensor:
        return empty(nbytes, dtype=torch.uint8) if self._pool is None or not nbytes else self._pool.lease(nbytes).tensor

    def _reclaim(self) -> None:
        """Frees the extents of what was replaced or dropped, and is not being read any more."""
        with self._lock:
            retired, self._retired = self._retired, []
            for value in retired:
                self._retired.append(value) if _busy(value) else self._release(value)

    def _release(self, value: Value) -> None:
        for piece in value.pieces:
            self._slabs[piece.folder].free(piece.extent)

    def _forget(self, key: str) -> None:
        """The value was overwritten in part."""
        value = self._values.pop(key, None)
        if value is not None:
            if self._index:
                self._index.drop(key)
            self._release(value)


def _busy(value: Value) -> bool:
    value.readers = [reader for reader in value.readers if not reader.done()]
    return bool(value.readers)


def _dense(tensor: Any) -> torch.Tensor:
    """The bytes to store: of the tensor's own memory where it is dense, else of a copy."""
    if not isinstance(tensor, torch.Tensor) or tensor.layout != torch.strided or tensor.is_meta:
        kind = f"a tensor of {tensor.layout}, {tensor.device}" if isinstance(tensor, torch.Tensor) else type(tensor)
        raise TypeError(f"a dense torch.Tensor is needed, not {kind}")
    tensor = tensor.detach()
    if not is_dense(tensor):
        made = torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
        copy(made, tensor.resolve_conj())
        tensor = made
    return dense_bytes(tensor)
