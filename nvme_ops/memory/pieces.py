"""Moves tensors of any kind to and from places in an open file, with bounded memory and checksums on the way."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

import torch

from nvme_ops.checksums import checksum_of, checksums_of
from nvme_ops.future import IoFuture
from nvme_ops.handle import aio_handle
from nvme_ops.tensors import empty

#: What passes through host memory of ours, one buffer being filled while others are written. Bytes.
_PIECE, _BUFFERS = 8 << 20, 2
CHECKSUM = "crc32c"


def checksums_anywhere(tensors: Sequence[torch.Tensor], kind: str = CHECKSUM) -> list[int]:
    """Of tensors on any device, however they lie: what is not plainly in host memory comes there in pieces."""
    plain = [index for index, tensor in enumerate(tensors) if _lies_plainly(tensor)]
    found = dict(zip(plain, checksums_of([tensors[index] for index in plain], kind), strict=True))
    return [found[index] if index in found else _checksum_by_pieces(each, kind) for index, each in enumerate(tensors)]


def _checksum_by_pieces(tensor: torch.Tensor, kind: str) -> int:
    buffer = empty(_PIECE, dtype=torch.uint8)
    value = 0
    for piece in _pieces(tensor):
        held = buffer[: piece.nbytes]
        copy_bytes(held, piece)
        value = checksum_of(held, kind, value)
    return value


class Borrowed:
    """Tensors that somebody waits to change: they are read before all others, and then let go."""

    def __init__(self, tensors: Iterable[torch.Tensor] = ()) -> None:
        self._ids = Counter(map(id, tensors))
        self._safe = threading.Event()
        self.let_go(())

    def owes(self, tensor: torch.Tensor) -> bool:
        """Whether it is one of them."""
        return self._ids[id(tensor)] > 0

    def let_go(self, tensors: Iterable[torch.Tensor] | None = None) -> None:
        """Of some that have been read; of all when None."""
        self._ids = Counter() if tensors is None else self._ids - Counter(map(id, tensors))
        if not self._ids:
            self._safe.set()

    def wait(self, timeout: float | None = None) -> bool:
        """Until none is left."""
        return self._safe.wait(timeout)


def write(
    handle: aio_handle,
    fd: int,
    places: Sequence[tuple[int, torch.Tensor]],
    kind: str | None = CHECKSUM,
    borrowed: Borrowed | None = None,
) -> list[int]:
    """Writes each tensor from its offset on; returns the checksums of their bytes, in order.

    What lies contiguously in CPU memory goes from there to the file; anything else goes through at most 16 MiB of
    buffers. Beside these the handle takes its staging memory, however much is written.

    Args:
        handle: moves them.
        fd: of the file, open to be written.
        places: offset and tensor. Those that follow each other in the file are moved together.
        kind: of checksum, ``"crc32c"`` or ``"crc32"``; none when None.
        borrowed: tensors that are read first.
    """
    first = [index for index, (_, tensor) in enumerate(places) if borrowed is not None and borrowed.owes(tensor)]
    found = [0] * len(places)
    for chosen in (first, sorted(set(range(len(places))) - set(first))):
        values = _write([places[index] for index in chosen], handle, fd, kind)
        for index, value in zip(chosen, values, strict=False):
            found[index] = value
        if borrowed is not None and chosen is first:
            borrowed.let_go(places[index][1] for index in first)
    return found if kind else []


def _write(places: Sequence[tuple[int, torch.Tensor]], handle: aio_handle, fd: int, kind: str | None) -> list[int]:
    direct = [index for index, (_, tensor) in enumerate(places) if _lies_plainly(tensor)]
    chosen = set(direct)
    future = None
    if direct:
        sources = [places[index][1] for index in direct]
        future = handle.submit_pwritev(sources, fd, [places[index][0] for index in direct])
    found = [0] * len(places)
    try:
        others = [index for index in range(len(places)) if index not in chosen]
        for index, value in zip(others, _write_through_buffers(handle, fd, places, others, kind), strict=True):
            found[index] = value
        if direct and kind:  # while they are on their way
            for index, value in zip(direct, checksums_of(sources, kind), strict=True):
                found[index] = value
    finally:
        if future is not None:
            future.result()
    return found


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether its memory is its values in row-major order, on whatever device: to be moved as it is."""
    return tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


def _lies_plainly(tensor: torch.Tensor) -> bool:
    return tensor.device.type == "cpu" and is_plain(tensor)


def _write_through_buffers(
    handle: aio_handle, fd: int, places: Sequence[tuple[int, torch.Tensor]], chosen: Sequence[int], kind: str | None
) -> list[int]:
    if not chosen:
        return []
    ring = _Ring(handle, fd, any(places[index][1].is_cuda for index in chosen))
    found = []
    for index in chosen:
        offset, tensor = places[index]
        value = 0
        for piece in _pieces(tensor):
            held = ring.add(offset, piece)
            offset += piece.nbytes
            if kind:
                value = checksum_of(held, kind, value)
        found.append(value)
    ring.finish()
    return found


def _pieces(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Parts of at most ``_PIECE`` bytes that follow each other in row-major order."""
    if tensor.nbytes == 0:
        return
    if tensor.nbytes <= _PIECE:
        yield tensor
        return
    row = tensor.nbytes // tensor.shape[0]
    if row > _PIECE:
        for part in tensor.unbind(0):
            yield from _pieces(part)
    else:
        yield from tensor.split(_PIECE // row)


def host_buffer(size: int, pinned: bool) -> torch.Tensor:
    """Bytes through which tensors pass; page-locked where they come from a CUDA device."""
    return torch.empty(size, dtype=torch.uint8, pin_memory=True) if pinned else empty(size, dtype=torch.uint8)


class _Ring:
    """Buffers that gather pieces which follow each other in the file, written when full."""

    def __init__(self, handle: aio_handle, fd: int, pinned: bool) -> None:
        self._handle, self._fd = handle, fd
        self._buffers = [host_buffer(_PIECE, pinned) for _ in range(_BUFFERS)]
        self._written: list[IoFuture | None] = [None] * _BUFFERS
        self._current, self._filled, self._offset = 0, 0, 0

    def add(self, offset: int, piece: torch.Tensor) -> torch.Tensor:
        """Takes a copy of ``piece``; returns it, as bytes, valid until the next call."""
        follows = offset == self._offset + self._filled and self._filled % piece.element_size() == 0
        if self._filled and (not follows or self._filled + piece.nbytes > _PIECE):
            self._flush()
        if not self._filled:
            self._offset = offset
        held = self._buffers[self._current][self._filled : self._filled + piece.nbytes]
        copy_bytes(held, piece)
        self._filled += piece.nbytes
        return held

    def finish(self) -> None:
        """Returns when all is written."""
        if self._filled:
            self._flush()
        for future in self._written:
            if future is not None:
                future.result()

    def _flush(self) -> None:
        full = self._buffers[self._current][: self._filled]
        self._written[self._current] = self._handle.submit_pwrite(full, self._fd, self._offset)
        self._current, self._filled = (self._current + 1) % _BUFFERS, 0
        if (earlier := self._written[self._current]) is not None:
            earlier.result()


def copy_bytes(target: torch.Tensor, source: torch.Tensor) -> None:
    """Fills ``target``, contiguous bytes, with the values of ``source`` in row-major order."""
    copy(target.view(source.dtype).view(source.shape), source)


def copy(target: torch.Tensor, source: torch.Tensor) -> None:
    """Fills ``target``, which is contiguous, with the values of ``source``, whose dtype and shape it has."""
    if source.element_size() == 1:  # not every such dtype can be copied
        target.view(torch.uint8).copy_(source.resolve_neg().view(torch.uint8))
    else:
        target.copy_(source)


def read_into(handle: aio_handle, fd: int, targets: Sequence[tuple[int, torch.Tensor]]) -> None:
    """Fills existing tensors from their offsets on, on whatever device and however they lie in memory."""
    direct = [(offset, tensor) for offset, tensor in targets if tensor.nbytes and is_plain(tensor)]
    future = None
    if direct:
        future = handle.submit_preadv([tensor for _, tensor in direct], fd, [offset for offset, _ in direct])
    try:
        buffer = None
        for offset, tensor in targets:
            if not tensor.nbytes or is_plain(tensor):
                continue
            if buffer is None:
                buffer = empty(_PIECE, dtype=torch.uint8)
            for piece in _pieces(tensor):
                held = buffer[: piece.nbytes]
                handle.submit_pread(held, fd, offset).result()
                offset += piece.nbytes
                piece.copy_(held.view(piece.dtype).view(piece.shape))
    finally:
        if future is not None:
            future.result()
