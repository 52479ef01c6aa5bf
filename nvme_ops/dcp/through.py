"""Reads for which the data cannot go straight to where they belong: through two buffers of bounded size."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch

from nvme_ops.checkpoint.checksums import checksum_of
from nvme_ops.dcp.items import CHECKSUM
from nvme_ops.dcp.spans import SPAN, Span
from nvme_ops.future import IoFuture
from nvme_ops.handle import aio_handle
from nvme_ops.tensors import empty

_PAGE = 4096
_LARGE = 64 << 10  # bytes from which pages of the file should fall on pages of the buffer


@contextmanager
def awaited_on_failure(future: IoFuture) -> Iterator[None]:
    """Waits for the transfer before an exception leaves the block: its own failure is of no more interest."""
    try:
        yield
    except BaseException:
        future.exception()
        raise


class Through:
    """Two buffers: while one is read to, what came to the other is used."""

    def __init__(self, handle: aio_handle) -> None:
        self._handle = handle
        self._buffers: list[torch.Tensor] = []

    def copy(self, spans: Iterable[tuple[str, Span]]) -> None:
        """Reads each span from its file and copies what is wanted of it to its target."""
        earlier: tuple[IoFuture, list[tuple[torch.Tensor, Span]]] | None = None
        for number, batch in enumerate(_batches(spans)):
            buffer = self._buffer(number % 2)
            held = [(buffer[place : place + span.nbytes], path, span) for place, path, span in batch]
            parts, paths, starts = (
                [part for part, *_ in held],
                [path for _, path, _ in held],
                [s.start for *_, s in held],
            )
            started = self._handle.submit_preadv(parts, paths, starts)
            with awaited_on_failure(started):
                _use(earlier)
            earlier = started, [(part, span) for part, _, span in held]
        _use(earlier)

    def checksum(self, path: str, offset: int, length: int) -> int:
        """Of a part of a file."""
        found, earlier = 0, None
        for number, first in enumerate(range(0, length, SPAN)):
            part = self._buffer(number % 2)[: min(SPAN, length - first)]
            started = self._handle.submit_pread(part, path, offset + first), part
            with awaited_on_failure(started[0]):
                found, earlier = _joined(found, earlier), started
        return _joined(found, earlier)

    def _buffer(self, number: int) -> torch.Tensor:
        while len(self._buffers) <= number:
            self._buffers.append(empty(SPAN + _PAGE, dtype=torch.uint8))
        return self._buffers[number]


def _batches(spans: Iterable[tuple[str, Span]]) -> Iterator[list[tuple[int, str, Span]]]:
    """As many spans as a buffer holds, with their places in it."""
    batch: list[tuple[int, str, Span]] = []
    used = 0
    for path, span in spans:
        place = -(-used // 64) * 64
        if span.nbytes >= _LARGE and span.start % 64 == 0:
            place += (span.start - place) % _PAGE
        if batch and place + span.nbytes > SPAN + _PAGE:
            yield batch
            batch, place = [], span.start % _PAGE // 64 * 64
        batch.append((place, path, span))
        used = place + span.nbytes
    if batch:
        yield batch


def _use(read: tuple[IoFuture, list[tuple[torch.Tensor, Span]]] | None) -> None:
    if read is not None:
        read[0].result()
        for part, span in read[1]:
            span.target.copy_(part.view(span.dtype).view(span.shape)[span.part])


def _joined(found: int, read: tuple[IoFuture, torch.Tensor] | None) -> int:
    if read is None:
        return found
    read[0].result()
    return checksum_of(read[1], CHECKSUM, found)
