"""Writes tensors to, and reads them from, offsets in an open file, with bounded memory and checksums on the way."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence

import torch

from nvme_ops.base.reentrant_event import ReentrantEvent
from nvme_ops.base.settings import PIECE
from nvme_ops.io.engine import Priority
from nvme_ops.io.future import InFlight
from nvme_ops.io.handle import aio_handle
from nvme_ops.io.tensors import checksum_of, checksums_of, copy_bytes, cut, empty, is_plain, is_plain_on_host
from nvme_ops.memory.ring import Place, Ring

CHECKSUM = "crc32c"


def checksums_anywhere(tensors: Sequence[torch.Tensor], kind: str = CHECKSUM) -> list[int]:
    """Returns the checksums of tensors on any device and of any layout.

    Tensors that are not contiguous in host memory are copied there piece by piece.
    """
    plain = [index for index, tensor in enumerate(tensors) if is_plain_on_host(tensor)]
    sums = dict(zip(plain, checksums_of([tensors[index] for index in plain], kind), strict=True))
    return [sums[index] if index in sums else _checksum_by_pieces(tensor, kind) for index, tensor in enumerate(tensors)]


def _checksum_by_pieces(tensor: torch.Tensor, kind: str) -> int:
    buffer = empty(PIECE, dtype=torch.uint8)
    value = 0
    for piece in cut(tensor, PIECE):
        held = buffer[: piece.nbytes]
        copy_bytes(held, piece)
        value = checksum_of(held, kind, value)
    return value


def checksums_in_files(
    handle: aio_handle,
    places: Sequence[Place],
    kinds: Sequence[str],
    on_progress: Callable[[int], object] = lambda _: None,
    ring: Ring | None = None,
) -> list[int]:
    """Returns the checksums of ranges of files, read through a ring. ``on_progress`` gets the bytes read."""
    ring, values = ring or Ring(), [0] * len(places)
    owners = [number for number, place in enumerate(places) for _ in range(0, place.nbytes, ring.piece)]
    for number, piece in zip(owners, ring.read(handle, places), strict=True):
        values[number] = checksum_of(piece, kinds[number], values[number])
        on_progress(piece.nbytes)
    return values


class BorrowedTensors:
    """Tensors that another thread is waiting to change: they are read before all others, and then released."""

    def __init__(self, tensors: Iterable[torch.Tensor] = ()) -> None:
        self._ids = Counter(map(id, tensors))
        self._safe = ReentrantEvent()
        self.release(())

    def holds(self, tensor: torch.Tensor) -> bool:
        """Returns whether ``tensor`` is borrowed and not yet released."""
        return self._ids[id(tensor)] > 0

    def release(self, tensors: Iterable[torch.Tensor] | None = None) -> None:
        """Releases these tensors, which have been read; all when None."""
        self._ids = Counter() if tensors is None else self._ids - Counter(map(id, tensors))
        if not self._ids:
            self._safe.set()

    def wait(self, timeout: float | None = None) -> bool:
        """Waits until every borrowed tensor has been released; returns False after ``timeout`` seconds."""
        return self._safe.wait(timeout)


def write(
    handle: aio_handle,
    fd: int,
    places: Sequence[tuple[int, torch.Tensor]],
    kind: str | None = CHECKSUM,
    borrowed: BorrowedTensors | None = None,
) -> list[int]:
    """Writes each tensor at its offset; returns the checksums of their bytes, in order.

    Contiguous CPU tensors are written from where they are; all others pass through at most 16 MiB of buffers. The
    handle's staging memory, whose size does not depend on theirs, comes on top. The writes have
    ``Priority.WRITEBACK``: demand reads overtake them.

    Args:
        handle: moves the bytes.
        fd: a file open for writing.
        places: offset and tensor. Those that are adjacent in the file are moved together.
        kind: the checksum, ``"crc32c"`` or ``"crc32"``; none when None.
        borrowed: tensors that are read first.
    """
    first = [index for index, (_, tensor) in enumerate(places) if borrowed is not None and borrowed.holds(tensor)]
    checksums: dict[int, int] = {}
    for chosen in filter(None, (first, sorted(set(range(len(places))) - set(first)))):
        checksums |= _write(places, chosen, handle, fd, kind)
        if borrowed is not None:
            borrowed.release(places[index][1] for index in chosen)
    return [checksums.get(index, 0) for index in range(len(places))] if kind else []


def _write(
    places: Sequence[tuple[int, torch.Tensor]], chosen: Sequence[int], handle: aio_handle, fd: int, kind: str | None
) -> dict[int, int]:
    """Writes the ``chosen`` tensors; returns the checksum of each by its index."""
    direct = [index for index in chosen if is_plain_on_host(places[index][1])]
    others = sorted(set(chosen) - set(direct))
    checksums: dict[int, int] = {}
    with InFlight(abandon=True) as in_flight:  # when interrupted: the file is then removed
        sources, starts = [places[index][1] for index in direct], [places[index][0] for index in direct]
        if direct:
            in_flight.add(handle.submit_pwritev(sources, fd, starts, priority=Priority.WRITEBACK))
        if others:
            ring = Ring(pinned=any(places[index][1].is_cuda for index in others), priority=Priority.WRITEBACK)
            parts = [(index, start, part) for index in others for start, part in _parts(*places[index], ring.piece)]
            copies = ring.write(handle, fd, ((start, part) for _, start, part in parts))
            for (index, _, _), held in zip(parts, copies, strict=True):
                if kind:
                    checksums[index] = checksum_of(held, kind, checksums.get(index, 0))
        if kind:  # while the writes are in flight
            checksums |= zip(direct, checksums_of(sources, kind), strict=True)
    return checksums


def _parts(start: int, tensor: torch.Tensor, size: int) -> Iterator[tuple[int, torch.Tensor]]:
    """Yields the pieces of a tensor with their offsets in the file."""
    for part in cut(tensor, size):
        yield start, part
        start += part.nbytes


def read_into(handle: aio_handle, fd: int, targets: Sequence[tuple[int, torch.Tensor]]) -> None:
    """Fills existing tensors, on any device and of any layout, from their offsets in the file."""
    direct = [(start, tensor) for start, tensor in targets if tensor.nbytes and is_plain(tensor)]
    with InFlight() as in_flight:
        if direct:
            sources, starts = [tensor for _, tensor in direct], [start for start, _ in direct]
            in_flight.add(handle.submit_preadv(sources, fd, starts))
        ring = Ring()
        others = [(start, tensor) for start, tensor in targets if tensor.nbytes and not is_plain(tensor)]
        parts = [part for start, tensor in others for part in _parts(start, tensor, ring.piece)]
        held = ring.read(handle, (Place(fd, start, part.nbytes) for start, part in parts))
        for (_, part), memory in zip(parts, held, strict=True):
            part.copy_(memory.view(part.dtype).view(part.shape))
