"""Saves in the container format of ``torch.save``, writing the tensors' bytes straight from their memory."""

from __future__ import annotations

import io
import itertools
import json
import os
import pickle
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from nvme_ops import collector
from nvme_ops._native import native
from nvme_ops.checkpoint import torch_emit
from nvme_ops.checkpoint.plan import require_strings
from nvme_ops.checksums import checksums_of
from nvme_ops.engine import Priority
from nvme_ops.formats import zip_parts
from nvme_ops.future import IoFuture
from nvme_ops.handle import aio_handle
from nvme_ops.memory import pieces
from nvme_ops.memory.carve import dense_bytes, is_plain_on_host
from nvme_ops.memory.pieces import Borrowed
from nvme_ops.memory.ring import InFlight, Ring
from nvme_ops.offloaded import OffloadedTensor
from nvme_ops.settings import PIECE
from nvme_ops.storage.publication import replacing

#: The folder in the archive; torch names it after the file.
FOLDER = "archive/"
#: The record that keeps the strings of ``metadata=``; torch does not look at it.
METADATA = ".nvme_ops/metadata.json"
CHECKSUM = "crc32"  # zip's

_VERSION = b"3\n"  # of torch's format
_PROTOCOL = 2  # pickle protocol: the only one that weights_only reads
_PAGE, _ALIGNMENT, _LARGE = 4096, 64, 64 << 10

_STORAGES = (torch.storage.TypedStorage, torch.UntypedStorage)

# Records up to this size are gathered with their headers; a larger one is written while its checksum is computed.
_GROUP = PIECE
_MOST_GROUPS = 16  # in flight, straight from the tensors' memory


@dataclass(slots=True)
class ZipRecord:
    """One record: its ``data``, contiguous bytes on any device, at ``start``, after a header at ``header``."""

    name: bytes
    data: torch.Tensor
    size: int  # of its data, in bytes
    header: int = 0
    start: int = 0
    crc: int = 0


class _Pickler(pickle.Pickler):
    """Pickles without the storages, as ``torch.save`` does: their numbers stand for them."""

    def __init__(self, stream: io.BytesIO) -> None:
        super().__init__(stream, protocol=_PROTOCOL)
        self.storages: dict[int, tuple[str, torch.UntypedStorage]] = {}
        self.dtypes: dict[tuple[torch.device, int], torch.dtype] = {}

    def persistent_id(self, each: Any) -> tuple[Any, ...] | None:
        """Returns the persistent id of a storage; None for anything else."""
        if not isinstance(each, _STORAGES):
            return None
        if isinstance(each, torch.storage.TypedStorage):
            storage, dtype, count = each._untyped_storage, each.dtype, each._size()
            kind = getattr(torch, each._pickle_storage_type())
        else:
            storage, dtype, count, kind = each, torch.uint8, each.nbytes(), torch.UntypedStorage
        if storage.device.type == "meta":
            raise TypeError("a storage on the meta device has no bytes to save")
        if storage.data_ptr():
            found = self.dtypes.setdefault((storage.device, storage.data_ptr()), dtype)
            if found != dtype:
                raise RuntimeError(f"views of the same memory as {found} and as {dtype} cannot be saved together")
        key, _ = self.storages.setdefault(storage._cdata, (str(len(self.storages)), storage))
        return "storage", kind, key, torch.serialization.location_tag(storage), count


@collector.paused()
def pickled(obj: Any) -> tuple[bytes, list[torch.Tensor]]:
    """Returns the pickle of ``torch.save``, and the bytes of the storages: records ``data/0``, ``data/1``, ...

    Raises:
        RuntimeError: views of one storage with different dtypes, as torch does.
        pickle.PicklingError, TypeError, AttributeError: an object that cannot be pickled.
    """
    try:
        content, owners, sizes = torch_emit.emit(obj)
        return content, _all_bytes(owners, sizes)
    except (torch_emit.NotPlainError, RecursionError):
        stream = io.BytesIO()
        pickler = _Pickler(stream)
        pickler.dump(obj)
        return stream.getvalue(), [bytes_of(storage) for _, storage in pickler.storages.values()]


def _all_bytes(owners: Sequence[torch.Tensor], sizes: Sequence[int]) -> list[torch.Tensor]:
    """Returns byte tensors over the storages, of these sizes, of these tensors."""
    stored = {index: dense_bytes(each) for index, each in enumerate(owners) if isinstance(each, OffloadedTensor)}
    if stored:
        others = [index for index in range(len(owners)) if index not in stored]
        found = iter(_all_bytes([owners[index] for index in others], [sizes[index] for index in others]))
        return [stored[index] if index in stored else next(found) for index in range(len(owners))]
    empty = {device: torch.empty(0, dtype=torch.uint8, device=device) for device in {each.device for each in owners}}
    made = [empty[each.device].data for each in owners]
    native().set_storages(made, owners, [0] * len(made), [(size,) for size in sizes], [(1,)] * len(made))
    return made


def bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    """Returns a byte tensor over the storage."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


@dataclass
class TorchPlan:
    """One file: the pickle, and the bytes of its storages."""

    content: bytes
    tensors: list[torch.Tensor]
    metadata: Mapping[str, str]
    checksums: bool
    recycle: bool = False

    def target(self, path: str) -> str:
        """Implements ``Plan``."""
        return path

    def write(
        self,
        path: str,
        *,
        durable: bool,
        handle: aio_handle,
        borrowed: Borrowed | None = None,
    ) -> None:
        """Implements ``Plan``."""
        with collector.paused(), replacing(path, durable, self.recycle) as file:
            records, end = self._records()
            lent = {id(tensor) for tensor in self.tensors if borrowed is not None and borrowed.owes(tensor)}
            first = [record for record in records if id(record.data) in lent]
            if borrowed is not None:
                _write(handle, file.fd, first, self.checksums)
                borrowed.release(record.data for record in first)
            others = [record for record in records if id(record.data) not in lent]
            _write(handle, file.fd, others, self.checksums)
            tail = torch.frombuffer(_tail(records, end), dtype=torch.uint8)
            handle.submit_pwrite(tail, file.fd, end, priority=Priority.WRITEBACK).result()
            if self.recycle:
                os.ftruncate(file.fd, end + tail.nbytes)

    def _records(self) -> tuple[list[ZipRecord], int]:
        """Lays out all records; returns them and the offset of the directory.

        Small ones come first, in one run with their headers, then the large ones, each on a page. The records from
        which torch would compute offsets, ``.format_version`` and ``.storage_alignment``, are left out: torch then
        looks offsets up in the directory.
        """
        records = [_record("data.pkl", self.content), _record("byteorder", sys.byteorder.encode())]
        if self.metadata:
            records.append(_record(METADATA, json.dumps(dict(self.metadata), ensure_ascii=False).encode()))
        records.append(_record("version", _VERSION))
        data = [ZipRecord(f"{FOLDER}data/{key}".encode(), each, each.nbytes) for key, each in enumerate(self.tensors)]
        records += sorted(data, key=lambda record: record.size >= _LARGE)
        return records, _lay_out(records)


def plan(obj: Any, *, checksums: bool, metadata: Mapping[str, str] | None, recycle: bool = False) -> TorchPlan:
    """Plans a file. Raises what ``pickled`` raises. Without ``checksums`` the CRC-32s are zero, as torch writes."""
    require_strings(metadata or {})
    content, tensors = pickled(obj)
    return TorchPlan(content, tensors, metadata or {}, checksums, recycle)


def _write(handle: aio_handle, fd: int, records: Sequence[ZipRecord], checksums: bool) -> None:
    """Writes these records and waits for that. Fills in their checksums."""
    large = [record for record in records if record.size > _GROUP]
    ring = Ring(buffer=_GROUP, pinned=any(record.data.is_cuda for record in records))
    with InFlight(_MOST_GROUPS, abandon=True) as in_flight:
        for group in _groups(records):
            in_flight.add(_write_group(handle, fd, group, ring, checksums))
        places = [(record.start, record.data) for record in large]
        found = pieces.write(handle, fd, places, CHECKSUM if checksums else None)
        for record, value in zip(large, found, strict=checksums):
            record.crc = value
        if large:
            headers, starts = list(map(_local, large)), [record.header for record in large]
            in_flight.add(handle.submit_pwritev(headers, fd, starts, priority=Priority.WRITEBACK))


def _record(name: str, content: bytes) -> ZipRecord:
    return ZipRecord((FOLDER + name).encode(), torch.frombuffer(bytearray(content), dtype=torch.uint8), len(content))


def _lay_out(records: Sequence[ZipRecord]) -> int:
    """Assigns offsets to the records; returns the offset of the directory."""
    position = 0
    for record in records:
        record.header = position
        alignment = _PAGE if record.size >= _LARGE else _ALIGNMENT
        record.start = -(-(position + _least_header(record)) // alignment) * alignment
        position = record.start + record.size
    return position


def _least_header(record: ZipRecord) -> int:
    return zip_parts.least_local(record.name, record.size)


def _local(record: ZipRecord) -> bytes:
    """Returns a record's header, up to the data."""
    padding = record.start - record.header - _least_header(record)
    return zip_parts.local(record.name, record.size, record.crc, zip_parts.UTF8, padding)


def _groups(records: Sequence[ZipRecord]) -> Iterator[list[ZipRecord]]:
    """Yields records up to ``_GROUP`` bytes, in runs without gaps of at most as many bytes, each on one device."""
    group: list[ZipRecord] = []
    size = 0
    for record in records:
        if record.size > _GROUP:
            continue
        follows = bool(group) and group[-1].start + group[-1].size == record.header
        same = bool(group) and group[0].data.device == record.data.device
        if group and not (follows and same and size + record.size <= _GROUP):
            yield group
            group, size = [], 0
        group.append(record)
        size += record.size
    if group:
        yield group


def _write_group(handle: aio_handle, fd: int, group: Sequence[ZipRecord], ring: Ring, checksums: bool) -> IoFuture:
    on_host = all(is_plain_on_host(record.data) for record in group)
    data = [record.data for record in group] if on_host else _copies(group, ring.take())
    if checksums:
        for record, value in zip(group, checksums_of(data, CHECKSUM), strict=True):
            record.crc = value
    pairs = zip(map(_local, group), data, strict=True)
    parts: list[bytes | torch.Tensor] = list(itertools.chain.from_iterable(pairs))
    offsets = list(itertools.chain.from_iterable((record.header, record.start) for record in group))
    future = handle.submit_pwritev(parts, fd, offsets, priority=Priority.WRITEBACK)
    if not on_host:
        ring.put_under(future)
    return future


def _copies(group: Sequence[ZipRecord], buffer: torch.Tensor) -> list[torch.Tensor]:
    """Returns the records' bytes in host memory."""
    sizes = [record.size for record in group]
    copies = list(buffer[: sum(sizes)].split(sizes))
    for copy, record in zip(copies, group, strict=True):
        copy.copy_(record.data)
    return copies


def _tail(records: Sequence[ZipRecord], position: int) -> bytearray:
    """Returns what follows the last record: the directory and its end."""
    entries = (
        zip_parts.central(record.name, record.size, record.crc, record.header, zip_parts.UTF8) for record in records
    )
    directory = b"".join(entries)
    return bytearray(directory + zip_parts.end(len(records), len(directory), position))
