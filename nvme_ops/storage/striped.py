"""Divides the bytes of tensors among the folders of a session, so that all devices are busy equally long."""

from __future__ import annotations

import contextlib
import math
import os
import time
from collections.abc import Iterable, Sequence
from copy import copy
from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch

from nvme_ops.base.errors import ChecksumError
from nvme_ops.base.lifetime import Tracked, track
from nvme_ops.base.native import native
from nvme_ops.base.settings import PAGE, STRIPE
from nvme_ops.filesystem.files import sync
from nvme_ops.io.engine import Op, Priority, engine_of
from nvme_ops.io.future import InFlight, IoFuture
from nvme_ops.io.handle import aio_handle
from nvme_ops.io.tensors import dense_bytes, empty
from nvme_ops.memory.pieces import checksums_anywhere
from nvme_ops.storage.session import Session
from nvme_ops.storage.slab import NO_ROOM, Extent, Slab, share

if TYPE_CHECKING:
    from nvme_ops.ops.async_io import OpenFile, Operation


_SECONDS = 0.2  # for which one device is measured
_MAX = 64 << 20  # bytes of the file used for that


class Part(NamedTuple):
    """``nbytes`` of a tensor from byte ``begin`` on, in the folder with this index."""

    folder: int
    begin: int
    nbytes: int


class Striping:
    """Divides tensors by the ``weights`` of the folders, which are their devices' rates, in any unit.

    A tensor of less than two stripes of 4 MiB goes to one folder as a whole: the one with the least load so far.

    Raises ValueError for weights that are not positive, finite numbers.
    """

    def __init__(self, weights: Sequence[float]) -> None:
        if not len(weights) or not all(0 < weight < math.inf for weight in weights):
            raise ValueError(f"weights must be positive numbers, one for each folder: {list(weights)}")
        total = sum(weights)
        self.weights = [weight / total for weight in weights]
        self._loads = [0.0] * len(weights)  # of each folder: bytes given to it over its weight

    def parts(self, nbytes: int) -> list[Part]:
        """Returns where the bytes of one tensor go, in order."""
        if nbytes < 2 * STRIPE:
            folder = min(range(len(self.weights)), key=lambda index: self._loads[index] + nbytes / self.weights[index])
            self._add_load(folder, nbytes)
            return [Part(folder, 0, nbytes)]
        parts, begin, share = [], 0, 0.0
        for folder, weight in enumerate(self.weights):
            share += weight
            end = nbytes if folder == len(self.weights) - 1 else min(nbytes, round(nbytes * share / PAGE) * PAGE)
            if end > begin:
                parts.append(Part(folder, begin, end - begin))
                self._add_load(folder, end - begin)
                begin = end
        return parts

    def _add_load(self, folder: int, nbytes: int) -> None:
        self._loads[folder] += nbytes / self.weights[folder]
        least = min(self._loads)
        self._loads = [load - least for load in self._loads]


def measured(handles: Sequence[aio_handle], slabs: Sequence[Slab], fds: Sequence[int]) -> list[float]:
    """Measures each device's bytes per second by alternating writes and reads for a fraction of a second.

    Returns equal rates if a disk has no room for the measurement.
    """
    block = empty(STRIPE, dtype=torch.uint8)
    block.zero_()
    try:
        return [_rate(handle, slab, fd, block) for handle, slab, fd in zip(handles, slabs, fds, strict=True)]
    except OSError as error:
        if error.errno not in NO_ROOM:
            raise
        return [1.0] * len(slabs)


def _rate(handle: aio_handle, slab: Slab, fd: int, block: torch.Tensor) -> float:
    extent = slab.allocate(_MAX)
    try:
        moved, begin = 0, time.perf_counter()
        with InFlight(0) as in_flight:  # waits even when interrupted, since the extent is freed afterwards
            for place in range(extent.start, extent.end, STRIPE):
                in_flight.add(handle.submit_pwrite(block, fd, place))
                in_flight.add(handle.submit_pread(block, fd, place))
                moved += 2 * STRIPE
                if time.perf_counter() - begin > _SECONDS:
                    break
        return moved / (time.perf_counter() - begin)
    finally:
        slab.free(extent)


def _add_missing(transfers: list[IoFuture], begun: set[Operation]) -> None:
    """Adds transfers that have begun, and that Ctrl-C has kept from being added."""
    known = {id(transfer._operation) for transfer in transfers}
    transfers += [IoFuture(operation) for operation in begun if id(operation) not in known]


class Piece(NamedTuple):
    """``nbytes`` of a tensor from byte ``begin`` on, and the extent with them in the slab of this folder."""

    folder: int
    begin: int
    nbytes: int
    extent: Extent


class StoredBytes(Protocol):
    """Bytes on storage, with their CRC-32C if that is kept."""

    pieces: list[Piece]
    checksum: int | None


class StripedSlabs(Tracked):
    """Allocates extents for tensors in several files, and moves their bytes.

    Args:
        session: provides the folders.
        name: the name of the slab's file in each folder.
        handle: used for the first folder; each other folder gets a copy of it.
        weights: the rates of the folders' devices, in any unit; when None, call ``measure`` before ``allocate``.
    """

    def __init__(self, session: Session, name: str, handle: aio_handle, weights: Sequence[float] | None) -> None:
        count = len(session.folders)
        if weights is not None and len(weights) != count:
            raise ValueError(f"{len(weights)} weights for {count} folders")
        given = [1.0] if weights is None and count == 1 else weights
        self._striping = Striping(given) if given is not None else None
        self.handles = [handle, *(copy(handle) for _ in range(count - 1))]
        self._engines = [engine_of(handle) for handle in self.handles]
        self.paths = [session.path(number, name) for number in range(count)]
        self._fds: list[int] = []
        self._files: list[OpenFile] = []
        track(self)  # descriptors in a forked child would keep the space of removed files
        try:
            for number in range(count):
                self._fds.append(session.open(number, name))
                self._files.append(native().OpenFile(self._fds[-1], True))  # True: extents are whole pages
            self._slabs = [Slab(fd, path) for fd, path in zip(self._fds, self.paths, strict=True)]
        except BaseException:
            self.close()
            raise

    @property
    def is_measured(self) -> bool:
        """True when the rates of the devices are known."""
        return self._striping is not None

    def measure(self) -> None:
        """Measures the devices unless their rates are known: a fraction of a second each. Not thread-safe."""
        self._striping = self._striping or Striping(measured(self.handles, self._slabs, self._fds))

    def allocate(self, nbytes: int) -> list[Piece]:
        """Allocates extents for a tensor. Raises OSError, having allocated none. Not thread-safe."""
        pieces: list[Piece] = []
        try:
            single = [Part(0, 0, nbytes)] if len(self._slabs) == 1 else None  # asked for each tensor that is saved
            for folder, begin, size in (single or self._striping.parts(nbytes)) if self._striping and nbytes else ():
                pieces.append(Piece(folder, begin, size, self._slabs[folder].allocate(size)))
        except BaseException:
            self.free(pieces)
            raise
        return pieces

    def free(self, pieces: Iterable[Piece]) -> None:
        """Frees the extents of ``allocate`` or ``reserve``."""
        for piece in pieces:
            self._slabs[piece.folder].free(piece.extent)

    def reserve(self, pieces: Iterable[Piece]) -> None:
        """Marks extents of existing files as allocated. Raises ValueError as ``Slab.reserve`` does."""
        extents: list[list[Extent]] = [[] for _ in self._slabs]
        for piece in pieces:
            if not 0 <= piece.folder < len(extents):
                raise ValueError(f"folder {piece.folder} of {len(extents)}")
            extents[piece.folder].append(piece.extent)
        for slab, those in zip(self._slabs, extents, strict=True):
            slab.reserve(those)

    def move(
        self, pieces: Sequence[Piece], memory: torch.Tensor, transfers: list[IoFuture], write: bool, priority: Priority
    ) -> None:
        """Submits the transfers of a contiguous tensor's bytes one by one, adding each to ``transfers``."""
        whole, op = memory if len(pieces) < 2 else dense_bytes(memory), Op.WRITE if write else Op.READ
        begun: set[Operation] = set()  # the native code adds each before it begins
        try:
            for folder, begin, nbytes, extent in pieces:
                submit, file = self._engines[folder].submit, self._files[folder]
                part = whole if len(pieces) < 2 else whole[begin : begin + nbytes]
                transfers.append(IoFuture(submit(op, part, file, extent.start, False, True, priority, begun)))
        except BaseException:
            _add_missing(transfers, begun)
            raise

    def write(
        self, stored: StoredBytes, memory: torch.Tensor, transfers: list[IoFuture], priority: Priority, checksum: bool
    ) -> None:
        """Starts to write a contiguous tensor, and computes its ``checksum`` meanwhile."""
        self.move(stored.pieces, memory, transfers, write=True, priority=priority)
        if checksum:
            stored.checksum = checksums_anywhere([memory])[0]

    def compare(
        self, failure: BaseException | None, stored: StoredBytes, memory: torch.Tensor, names: list[str]
    ) -> None:
        """Raises ChecksumError with these names if a read succeeded and ``memory`` differs from what was written."""
        if failure is None and stored.checksum is not None and checksums_anywhere([memory])[0] != stored.checksum:
            raise ChecksumError(self.paths[stored.pieces[0].folder] if stored.pieces else "", names)

    def move_all(
        self, moves: Iterable[tuple[Piece, torch.Tensor]], transfers: list[IoFuture], write: bool, priority: Priority
    ) -> None:
        """Submits transfers between pieces and contiguous tensors, all of a folder in one call."""
        by_folder: dict[int, tuple[list[torch.Tensor], list[int]]] = {}
        for (folder, _, _, extent), tensor in moves:
            tensors, starts = by_folder.setdefault(folder, ([], []))
            tensors.append(tensor)
            starts.append(extent.start)
        op = Op.WRITE if write else Op.READ
        begun: set[Operation] = set()
        try:
            for folder, (tensors, starts) in by_folder.items():
                submit = self._engines[folder].submit_many
                transfers.append(IoFuture(submit(op, tensors, self._files[folder], starts, priority, begun)))
        except BaseException:
            _add_missing(transfers, begun)
            raise

    def share(self, pieces: Iterable[Piece], target: int, place: int) -> bool:
        """Makes an open file share a tensor's bytes from byte ``place`` on; returns False if that is impossible."""
        return all(
            share(self._fds[folder], extent.start, nbytes, target, place + begin)
            for folder, begin, nbytes, extent in pieces
        )

    @property
    def bytes_in_use(self) -> int:
        """Bytes allocated."""
        return sum(slab.bytes_in_use for slab in self._slabs)

    def sync(self) -> None:
        """Makes all completed writes durable. Raises OSError."""
        for fd, path in zip(self._fds, self.paths, strict=True):
            sync(fd, path)

    def trim(self) -> None:
        """Returns the space of free extents to the file systems."""
        for slab in self._slabs:
            slab.trim()

    def close(self) -> None:
        """Waits for the transfers in flight and closes the files. Further calls do nothing."""
        for file in self._files:
            file.close()
        self._after_fork()

    def _after_fork(self) -> None:
        """Closes only the descriptors: in a forked child the transfers are its parent's."""
        fds, self._fds = self._fds, []
        for fd in fds:
            with contextlib.suppress(OSError):
                os.close(fd)
