"""Reads a DCP checkpoint straight into the tensors to be loaded: ``NvmeStorageReader``."""

from __future__ import annotations

import dataclasses
import functools
import logging
import math
import operator
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.futures import Future

from nvme_ops.base.errors import ChecksumError, FormatError
from nvme_ops.base.text import never_raising
from nvme_ops.checkpoint import strided
from nvme_ops.checkpoint.dcp import folder
from nvme_ops.checkpoint.dcp.folder import ATTRIBUTE, Reading
from nvme_ops.checkpoint.framed import grouped
from nvme_ops.checkpoint.strided import StridedTensor
from nvme_ops.filesystem.publication import open_to_read
from nvme_ops.formats import torch_pickle
from nvme_ops.formats.torch_pickle import DenseTensor, contiguous_stride, is_contiguous
from nvme_ops.formats.torch_zip import CHECKSUM, PICKLE, Archive, open_archive
from nvme_ops.io.arguments import require_switches
from nvme_ops.io.file import handle_of, shared_handle
from nvme_ops.io.future import InFlight, IoFuture
from nvme_ops.io.handle import aio_handle
from nvme_ops.io.tensors import checksum_of, checksums_of, collector_paused, is_plain, joined_checksum
from nvme_ops.memory.pieces import checksums_in_files
from nvme_ops.memory.ring import Place, Ring

_log = logging.getLogger("nvme_ops.dcp")

_SMALL = 256 << 10  # bytes of another writer's item below which DCP's own reader is as fast
_GROUP = 256 << 20  # bytes of items requested from the planner at once; two groups are in flight


class NvmeStorageReader(filesystem.FileSystemReader):
    """Reads, for ``torch.distributed.checkpoint.load``, what ``NvmeStorageWriter`` or ``FileSystemWriter`` wrote.

    Data go straight into the tensors where the wanted part is contiguous in the file, as when it is re-sharded along
    the first dimension; otherwise through 16 MiB of buffers. Besides the tensors at most 64 MiB of memory are used. A
    save with ``NvmeStorageWriter`` keeps files that are being read. As with DCP's own reader, load only what somebody
    you trust has saved: a checkpoint contains pickles.
    """

    def __init__(self, path: str | os.PathLike[str], *, verify: bool = False, handle: aio_handle | None = None) -> None:
        """Makes a reader. DCP raises what goes wrong as its ``CheckpointException``, on all ranks.

        Args:
            path: the folder.
            verify: compare the checksum of every item that is loaded, wholly or in part. An item that is not loaded
                whole into a tensor on the CPU is read once more for this. A ``ChecksumError`` (an OSError) names the
                tensors that are damaged; a checkpoint without checksums raises ValueError.
            handle: the handle whose settings the transfers use; one shared by the whole process when None.
        """
        require_switches(verify=verify)
        super().__init__(path)
        self._verify = verify
        self._handle = None if handle is None else handle_of(handle)
        self._reading: Reading | None = None  # protects the files until their data are read
        self._alone = False  # each rank reads what it saved alone, by metadata of its own
        self._tensors: dict[str, tuple[torch.dtype, dict[tuple[int, ...], tuple[int, ...]]]] = {}

    @never_raising
    def __repr__(self) -> str:
        """Returns for example ``NvmeStorageReader('checkpoint', verify=False)``."""
        return f"{type(self).__name__}({os.fspath(self.path)!r}, verify={self._verify})"

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_handle": None, "_reading": None}

    def _end_reading(self) -> None:
        if self._reading is not None:
            self._reading.close()
            self._reading = None

    @collector_paused
    def read_metadata(self, *_: Any, **kwargs: Any) -> Metadata:
        """Reads the metadata. Raises FormatError and ChecksumError for a damaged file."""
        self._end_reading()
        self._alone = (rank := kwargs.get("rank")) is not None
        path = folder.metadata_of(self.path, rank)
        try:
            self._reading = Reading(path)
        except FileNotFoundError:
            raise
        except (OSError, FormatError) as error:
            _log.warning("%s", error)  # torch before 2.13 drops it, and reports that there is no metadata
            raise
        metadata = self._reading.metadata
        metadata.storage_meta = getattr(metadata, "storage_meta", None) or StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata

    @collector_paused
    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Keeps the metadata needed for reading."""
        super().set_up_storage_reader(metadata, is_coordinator, *args, **kwargs)
        self._tensors = {
            name: (entry.properties.dtype, {tuple(chunk.offsets): tuple(chunk.sizes) for chunk in entry.chunks})
            for name, entry in metadata.state_dict_metadata.items()
            if isinstance(entry, TensorStorageMetadata)
        }

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Records which checkpoint this rank has found, if all read the same one."""
        identity = None if self._reading is None or self._alone else self._reading.identity
        return dataclasses.replace(super().prepare_local_plan(plan), storage_data=identity)

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Raises FormatError if ranks found different checkpoints because a save replaced one."""
        if len({plan.storage_data for plan in plans}) > 1:
            raise FormatError(f"{self.path}: a save replaced the checkpoint while ranks opened it: load it again")
        return super().prepare_global_plan(plans)

    @collector_paused
    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Reads this rank's part: plain tensors first, the rest as DCP's own reader does."""
        try:
            return self._read_data(plan, planner)
        finally:
            self._end_reading()

    def _read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        if self._verify:
            self._require_checksums(plan.items)
        size_of = functools.cache(os.path.getsize)
        wanted = [self._wanted(item, size_of) for item in plan.items]
        loading = Loading(handle_of(self._handle), planner, self._verify, os.fspath(self.path))
        others = [one for one, stored in wanted if stored is None]
        loading.verify_in_files(others)
        loading.read([(one, stored) for one, stored in wanted if stored is not None])
        return super().read_data(dataclasses.replace(plan, items=[one.item for one in others]), planner)

    def _require_checksums(self, items: Sequence[ReadItem]) -> None:
        if not all(CHECKSUM in getattr(self.storage_data[item.storage_index], ATTRIBUTE, {}) for item in items):
            raise ValueError(
                f"{self.path} has no checksums to verify: it was saved by another writer, or with checksums=False"
            )

    def _wanted(self, item: ReadItem, size_of: Callable[[str], int]) -> tuple[PlannedItem, TensorRecord | None]:
        """Returns an item of a plan, and the tensor in it unless DCP's own reader is to read that.

        Raises FileNotFoundError or FormatError for a missing or short file, and FormatError for what cannot be.
        """
        info, index = self.storage_data[item.storage_index], item.storage_index
        path = os.path.join(self.path, info.relative_path)
        if not 0 <= info.offset <= info.offset + info.length <= size_of(path):
            raise FormatError(
                f"{path}: {index.fqn!r}: {info.length} bytes from byte {info.offset} on, by the metadata, and the file "
                f"has {size_of(path)} bytes: it was truncated or replaced"
            )
        stored = None
        if item.type != LoadItemType.BYTE_IO:
            dtype, shapes = self._tensors[index.fqn]
            stored = tensor_in(path, index.fqn, info, dtype, shapes.get(tuple(index.offset or ())), _SMALL)
        if stored is not None:
            offsets, lengths = item.storage_offsets, item.lengths
            inside = len(stored.shape) == len(offsets) == len(lengths)
            for size, offset, length in zip(stored.shape, offsets, lengths, strict=False):
                inside = inside and min(offset, length) >= 0 and offset + length <= size
            if not inside:
                what = f"{tuple(lengths)} from {tuple(offsets)} on is not part of {stored.shape}"
                raise FormatError(f"{path}: {index.fqn!r}: {what}")
        place = Place(path, info.offset, info.length)
        return PlannedItem(item, place, getattr(info, ATTRIBUTE, {}).get(CHECKSUM)), stored


@dataclass(frozen=True)
class PlannedItem:
    """An item of a plan, its place in a file, and its checksum if that is known."""

    item: ReadItem
    place: Place
    checksum: int | None

    @property
    def name(self) -> str:
        """The name in the state dict."""
        return str(self.item.storage_index.fqn)


#: An item read whole to compare its checksum, and its bytes before, in and after the target.
_WholeItem: TypeAlias = tuple[PlannedItem, torch.Tensor, torch.Tensor, torch.Tensor]


class Loading:
    """One ``load`` of one rank."""

    def __init__(self, handle: aio_handle, planner: LoadPlanner, verify: bool, folder: str) -> None:
        self._handle, self._planner, self._verify, self._folder = handle, planner, verify, folder
        self._ring = Ring()
        self._verified: set[Place] = set()
        self._damaged: dict[str, None] = {}  # names, each once, in order

    def verify_in_files(self, wanted: Iterable[PlannedItem]) -> None:
        """Reads items to compare their checksums, each item once; ``read`` then raises for damaged ones."""
        items = {one.place: one for one in wanted if self._verify and one.place not in self._verified}
        self._verified.update(items)
        checksums = checksums_in_files(self._handle, list(items), [CHECKSUM] * len(items), ring=self._ring)
        wrong = (one for one, value in zip(items.values(), checksums, strict=True) if value != one.checksum)
        self._damaged |= {one.name: None for one in wrong}

    def read(self, wanted: Sequence[tuple[PlannedItem, TensorRecord]]) -> None:
        """Fills the planner's tensors. Raises ChecksumError with the names of all damaged ones."""
        wanted = sorted(wanted, key=lambda pair: (pair[0].place.file, pair[1].start))  # neighbours are read as one run
        with InFlight() as in_flight:
            for group in grouped(wanted, lambda pair: pair[1].nbytes, _GROUP):
                in_flight.add(*self._start(group))
        if self._damaged:
            raise ChecksumError(self._folder, list(self._damaged))

    def _start(self, group: Sequence[tuple[PlannedItem, TensorRecord]]) -> tuple[IoFuture, Callable[[], None]]:
        """Starts reads straight into targets, and copies the rest. Returns a future and what to call when it ends."""
        targets: list[tuple[PlannedItem, torch.Tensor]] = []
        whole: list[_WholeItem] = []
        reads: list[tuple[Any, ...]] = []  # tensor, path and offset
        in_parts: list[PlannedItem] = []  # of which not all bytes are in memory afterwards
        others: list[StridedTensor] = []
        for one, stored in group:
            target = self._planner.resolve_tensor(one.item).detach()
            path, begin, length = str(one.place.file), one.place.start, one.place.nbytes
            if tuple(target.shape) != tuple(one.item.lengths):
                raise ValueError(
                    f"{path}: {one.name!r}: {tuple(one.item.lengths)} is the shape to be read, and that of the "
                    f"tensor for it is {tuple(target.shape)}"
                )
            targets.append((one, target))
            start, stride = stored.part(one.item.storage_offsets)
            if not is_contiguous(target.shape, stride) or target.dtype != stored.dtype or not is_plain(target):
                others.append(StridedTensor(path, start, stored.dtype, stride, target))
                in_parts.append(one)
                continue
            reads.append((target, path, start))
            if self._verify and target.device.type == "cpu" and target.nbytes == stored.nbytes:
                around = torch.empty(length - stored.nbytes, dtype=torch.uint8, device="cpu")
                head, tail = around[: start - begin], around[start - begin :]
                reads.extend([(head, path, begin), (tail, path, start + stored.nbytes)])
                whole.append((one, head, target, tail))
            else:
                in_parts.append(one)
        with InFlight() as in_flight:  # if this fails, it waits for the reads
            into, paths, starts = ([read[column] for read in reads] for column in range(3))
            in_flight.add(future := self._handle.submit_preadv(into, paths, starts))
            self.verify_in_files(in_parts)
            strided.fill(self._handle, others, self._ring)
            in_flight.hand_over()
        return future, functools.partial(self._finish, targets, whole)

    def _finish(self, targets: Sequence[tuple[PlannedItem, torch.Tensor]], whole: Sequence[_WholeItem]) -> None:
        payloads = checksums_of([target for _, _, target, _ in whole], CHECKSUM)
        for (one, head, target, tail), payload in zip(whole, payloads, strict=True):
            crc = joined_checksum(checksum_of(head, CHECKSUM), payload, target.nbytes, CHECKSUM)
            if checksum_of(tail, CHECKSUM, crc) != one.checksum:
                self._damaged[one.name] = None
        for one, target in targets:
            self._planner.commit_tensor(one.item, target)


# The bytes of tensors in the files of a checkpoint, written by us or by DCP's own writer


_MAX_DESCRIPTION = 1 << 20  # bytes; torch's have less than 200


@dataclass(frozen=True)
class TensorRecord:
    """A contiguous tensor that begins ``start`` bytes into the file."""

    start: int
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of data."""
        return math.prod(self.shape) * self.dtype.itemsize

    def part(self, offsets: Sequence[int]) -> tuple[int, tuple[int, ...]]:
        """Returns where in the file a part begins that has these offsets in the tensor, and the part's strides."""
        stride = contiguous_stride(self.shape)
        return self.start + sum(map(operator.mul, offsets, stride)) * self.dtype.itemsize, stride


def tensor_in(
    path: str, name: str, info: Any, dtype: torch.dtype, shape: tuple[int, ...] | None, least: int = 0
) -> TensorRecord | None:
    """Returns the tensor in an item, which ``info`` places: this one if a note says where it begins, else as it is.

    Returns None for one that is stored otherwise than as its bytes, or that has no note and less than ``least`` bytes.

    Raises:
        FormatError: it does not lie in its item, or is damaged.
    """
    place = getattr(info, ATTRIBUTE, {}).get("data")
    if place is not None and shape is not None:
        record: TensorRecord | None = TensorRecord(info.offset + place, dtype, shape)
    elif getattr(info, "transform_descriptors", None) or info.length < least:
        return None
    else:
        record = find(path, info.offset, info.length)
    if record and not info.offset <= record.start <= record.start + record.nbytes <= info.offset + info.length:
        raise FormatError(f"{path}: {name!r}: {record.nbytes} bytes of data do not fit an item of {info.length} bytes")
    return record


def find(path: str, offset: int, length: int) -> TensorRecord | None:
    """Finds the tensor that ``torch.save`` wrote to this part of the file; returns None if it is not a plain one.

    Raises:
        FormatError: the part of the file is damaged.
    """
    fd = open_to_read(path)
    try:
        return _find(open_archive(fd, path, shared_handle(), offset, offset + length))
    except (OSError, MemoryError, FormatError):
        raise
    except Exception as error:  # a damaged archive can raise anything
        raise FormatError(f"{path}: no tensor of torch.save at byte {offset}, or a damaged one: {error}") from error
    finally:
        os.close(fd)


def _find(archive: Archive) -> TensorRecord | None:
    if any(record.method for record in archive.records.values()):
        return None
    description, order = archive.records[PICKLE], archive.records.get("byteorder")
    if description.size > _MAX_DESCRIPTION:
        return None
    if order is not None and (order.size > 10 or archive.content("byteorder").decode() != sys.byteorder):
        return None
    root, _ = torch_pickle.read(archive.pickled(), archive.path)
    tensor = torch_pickle.tensor(root, "", archive.path)
    if not isinstance(tensor, DenseTensor) or not tensor.contiguous:
        return None
    if tensor.requires_grad or tensor.metadata or tensor.parameter:
        return None
    name, (begin, end) = tensor.storage.record, tensor.extent
    archive.locate([name])
    if end > archive.records[name].size:
        return None
    return TensorRecord(archive.starts[name] + begin, tensor.dtype, tensor.shape)
