"""Writes the items of a plan into a file: one after the other, in torch's format, straight from their memory."""

from __future__ import annotations

import io
import math
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from typing import TypeVar

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.planner import SavePlanner, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult

from nvme_ops.checksums import checksums_of, joined
from nvme_ops.dcp import frame
from nvme_ops.engine import Priority
from nvme_ops.future import IoFuture
from nvme_ops.handle import aio_handle
from nvme_ops.memory import pieces
from nvme_ops.memory.carve import is_plain_on_host
from nvme_ops.memory.ring import InFlight

#: What DCP's metadata say more of an item: a dict that has where the tensor's bytes begin and the item's CRC-32, where
#: these are. DCP's own reader does not look at it.
ATTRIBUTE = "nvme_ops"
#: The checksum that a zip archive has of its members serves for the item too.
CHECKSUM = "crc32"

_T = TypeVar("_T")
_SMALL = 1 << 20  # bytes of a tensor below which it is gathered with its neighbours
# Bytes of items requested from the planner at once. Of small ones, two groups are in flight.
_SMALL_GROUP, _LARGE_GROUP, _MOST_ITEMS = 8 << 20, 256 << 20, 4096


@dataclass(slots=True)
class _Item:
    """What is written for one item of the plan: ``head``, payload and tail, without gaps."""

    item: WriteItem
    offset: int
    payload: torch.Tensor
    head: bytes = b""
    tail_length: int = 0
    start: int = field(init=False)
    length: int = field(init=False)

    def __post_init__(self) -> None:
        self.start = self.offset + len(self.head)
        self.length = len(self.head) + self.payload.nbytes + self.tail_length


def grouped(items: Iterable[_T], nbytes: Callable[[_T], int], most: int) -> Iterator[list[_T]]:
    """Yields groups of items, each ended by the item that reaches ``most`` bytes, or by its number of items."""
    group: list[_T] = []
    size = 0
    for item in items:
        group.append(item)
        size += nbytes(item)
        if size >= most or len(group) == _MOST_ITEMS:
            yield group
            group, size = [], 0
    if group:
        yield group


class RankFile:
    """One rank's file, written sequentially, once."""

    def __init__(self, handle: aio_handle, fd: int, name: str, planner: SavePlanner, checksums: bool) -> None:
        self._handle, self._fd, self._name, self._planner, self._checksums = handle, fd, name, planner, checksums
        self._end = 0
        self._results: list[WriteResult] = []

    def write(self, items: Sequence[WriteItem]) -> list[WriteResult]:
        """Waits until all items are written, to the device or the page cache."""
        small: list[WriteItem] = []
        large: list[WriteItem] = []
        for item in items:
            (small if _nominal_size(item) < _SMALL else large).append(item)
        with InFlight(abandon=True) as in_flight:
            for group in self._groups(small, _SMALL_GROUP):
                in_flight.add(self._write_gathered(group))
        for group in self._groups(large, _LARGE_GROUP):
            self._write_in_place(group)
        return self._results

    def _groups(self, items: Sequence[WriteItem], most: int) -> Iterator[list[_Item]]:
        """Places the items; yields groups, each ended by the item that reaches ``most`` bytes."""
        return grouped(map(self._place, items), lambda one: one.length, most)

    def _write_gathered(self, group: Sequence[_Item]) -> IoFuture:
        """Starts to write items as one run, which needs their checksums first."""
        for one in group:
            one.payload = _on_host(one.payload)
        checksums = checksums_of([one.payload for one in group], CHECKSUM)
        parts: list[tuple[int, bytes | torch.Tensor]] = [(one.start, one.payload) for one in group]
        parts += self._around(group, checksums)
        parts.sort(key=itemgetter(0))
        return self._submit(parts)

    def _write_in_place(self, group: Sequence[_Item]) -> None:
        """Computes checksums while the payloads are being written; writes heads and tails last."""
        payloads = [(one.start, one.payload) for one in group]
        checksums = pieces.write(self._handle, self._fd, payloads, CHECKSUM)
        self._submit(list(self._around(group, checksums))).result()

    def _submit(self, parts: Sequence[tuple[int, bytes | torch.Tensor]]) -> IoFuture:
        sources, starts = [part for _, part in parts], [start for start, _ in parts]
        return self._handle.submit_pwritev(sources, self._fd, starts, priority=Priority.WRITEBACK)

    def _place(self, item: WriteItem) -> _Item:
        """Places an item at the end of the file."""
        data = self._planner.resolve_data(item)
        if isinstance(data, torch.Tensor):
            tensor = data.detach()
            if tensor.layout is not torch.strided:
                raise ValueError(
                    f"{item.index.fqn!r} is a tensor of the layout {tensor.layout}, to which DCP loads nothing: "
                    "save its to_dense(), or its parts"
                )
            if type(tensor) is torch.Tensor and not tensor.is_quantized:
                shape = tuple(tensor.shape)
                head = frame.head(tensor.dtype, shape, self._end)
                tail_length = frame.tail_length(tensor.dtype, shape, len(head))
                placed = _Item(item, self._end, tensor, head, tail_length)
                self._end += placed.length
                return placed
            data = io.BytesIO()
            torch.save(tensor.cpu().clone(), data)
        content = data.getbuffer()
        payload = torch.frombuffer(content, dtype=torch.uint8) if len(content) else torch.empty(0, dtype=torch.uint8)
        placed = _Item(item, self._end, payload)
        self._end += placed.length
        return placed

    def _around(self, placed: Sequence[_Item], checksums: Sequence[int]) -> Iterator[tuple[int, bytes]]:
        """Returns heads and tails with their offsets, adjacent ones joined; records the result of each item."""
        offset, glued = 0, b""
        for one, checksum in zip(placed, checksums, strict=True):
            offset, glued = (offset, glued + one.head) if glued else (one.offset, one.head)
            if glued and one.payload.nbytes:
                yield offset, glued
                glued = b""
            tail = self._tail(one, checksum)
            offset, glued = (offset, glued + tail) if glued else (one.offset + one.length - len(tail), tail)
        if glued:
            yield offset, glued

    def _tail(self, one: _Item, checksum: int) -> bytes:
        tensor, known, tail = one.payload, {}, b""
        if one.head:
            tail = frame.tail(tensor.dtype, tuple(tensor.shape), len(one.head), checksum)
            if _is_as_planned(one.item, tensor):
                known["data"] = len(one.head)
        if self._checksums:
            known[CHECKSUM] = zlib.crc32(tail, joined(zlib.crc32(one.head), checksum, tensor.nbytes, CHECKSUM))
        info = _StorageInfo(self._name, one.offset, one.length)
        setattr(info, ATTRIBUTE, known)
        self._results.append(WriteResult(index=one.item.index, size_in_bytes=one.length, storage_data=info))
        return tail


def _nominal_size(item: WriteItem) -> int:
    """Returns the bytes of a tensor; other items count as small."""
    if item.type == WriteItemType.BYTE_IO or item.tensor_data is None:
        return 0
    return math.prod(item.tensor_data.chunk.sizes) * item.tensor_data.properties.dtype.itemsize


def _on_host(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the tensor's values in row-major order in host memory."""
    if is_plain_on_host(tensor):
        return tensor
    return torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor)


def _is_as_planned(item: WriteItem, tensor: torch.Tensor) -> bool:
    """Returns whether the checkpoint's metadata have the tensor's shape and dtype."""
    planned = item.tensor_data
    return (
        planned is not None
        and tuple(planned.chunk.sizes) == tuple(tensor.shape)
        and planned.properties.dtype == tensor.dtype
    )
