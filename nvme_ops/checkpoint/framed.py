"""Writes tensors to one file, each between bytes that contain its checksum."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from operator import attrgetter, itemgetter
from typing import NamedTuple, TypeVar

import torch

from nvme_ops.formats.torch_zip import CHECKSUM, ZipRecord
from nvme_ops.io.engine import Priority
from nvme_ops.io.future import InFlight
from nvme_ops.io.handle import aio_handle
from nvme_ops.io.tensors import checksums_of, copy, is_plain
from nvme_ops.memory import pieces

#: Bytes below which a tensor is written together with its neighbours.
SMALL = 1 << 20
# Bytes of a group of tensors, its number of tensors, and the number of groups in flight. Small tensors may be copied.
_SMALL_GROUP, _LARGE_GROUP, _MAX_ITEMS, _MAX_GROUPS = 8 << 20, 256 << 20, 4096, 3

_T = TypeVar("_T")


class FramedTensor(NamedTuple):
    """A tensor, where its bytes begin in the file, and what yields, for their CRC-32, (offset, bytes) around them."""

    start: int
    data: torch.Tensor
    around: Callable[[int], Iterable[tuple[int, bytes]]]


def grouped(items: Iterable[_T], nbytes: Callable[[_T], int], most: int) -> Iterator[list[_T]]:
    """Yields groups of items. A group ends with the item that brings it to ``most`` bytes or ``_MAX_ITEMS`` items."""
    group: list[_T] = []
    size = 0
    for item in items:
        group.append(item)
        size += nbytes(item)
        if size >= most or len(group) == _MAX_ITEMS:
            yield group
            group, size = [], 0
    if group:
        yield group


def write(
    handle: aio_handle,
    fd: int,
    small: Iterable[FramedTensor | ZipRecord],
    large: Iterable[FramedTensor | ZipRecord],
    checksums: bool = True,
) -> None:
    """Writes tensors on any device and of any strides, and waits. Without ``checksums`` their CRC-32s count as 0.

    Checksums of small tensors are computed first, since the bytes around them are written in the same call; those of
    large tensors are computed while they are written.
    """

    def submit(parts: Iterable[tuple[int, bytes | torch.Tensor]]) -> None:
        ordered = sorted(parts, key=itemgetter(0))  # so that neighbours are written together
        sources, starts = [part for _, part in ordered], [start for start, _ in ordered]
        in_flight.add(handle.submit_pwritev(sources, fd, starts, priority=Priority.WRITEBACK))

    with InFlight(_MAX_GROUPS, abandon=True) as in_flight:
        for group in grouped(small, _nbytes, _SMALL_GROUP):
            tensors = [one.data for one in group]
            data = [value if value.device.type == "cpu" and is_plain(value) else _copied(value) for value in tensors]
            crcs = checksums_of(data, CHECKSUM) if checksums else [0] * len(group)
            parts = [(one.start, tensor) for one, tensor in zip(group, data, strict=True)]
            submit(parts + [part for one, crc in zip(group, crcs, strict=True) for part in one.around(crc)])
        for group in grouped(large, _nbytes, _LARGE_GROUP):
            places = [(one.start, one.data) for one in group]
            crcs = pieces.write(handle, fd, places, CHECKSUM if checksums else None) or [0] * len(group)
            submit([part for one, crc in zip(group, crcs, strict=True) for part in one.around(crc)])


_nbytes: Callable[[FramedTensor | ZipRecord], int] = attrgetter("data.nbytes")


def _copied(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the tensor's values in row-major order in host memory."""
    held = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")  # whatever the default device is
    copy(held, tensor)
    return held
