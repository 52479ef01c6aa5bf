"""``NvmeStorageReader``: reads a checkpoint straight into the tensors to be loaded."""

from __future__ import annotations

import dataclasses
import logging
import os
from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.futures import Future

from nvme_ops import collector
from nvme_ops.dcp import folder
from nvme_ops.dcp.items import ATTRIBUTE, CHECKSUM
from nvme_ops.dcp.loading import Loading, Wanted
from nvme_ops.dcp.readers import Reading
from nvme_ops.dcp.stored import Stored, find
from nvme_ops.errors import FormatError
from nvme_ops.file import shared_handle
from nvme_ops.handle import aio_handle

_log = logging.getLogger(__name__)

_SMALL = 256 << 10  # bytes of another writer's item below which DCP's own reader is as fast


class NvmeStorageReader(filesystem.FileSystemReader):
    """For ``torch.distributed.checkpoint.load``: reads what ``NvmeStorageWriter`` or ``FileSystemWriter`` wrote.

    Data go straight into the tensors where the wanted part is contiguous in the file, as when it is re-sharded along
    the first dimension; otherwise through 16 MiB of buffers. At most 64 MiB of memory are used beside the
    tensors. A save with ``NvmeStorageWriter`` keeps files that are being read. As with DCP's own reader, load only
    what somebody you trust has saved: a checkpoint holds pickles.
    """

    def __init__(self, path: str | os.PathLike[str], *, verify: bool = False, handle: aio_handle | None = None) -> None:
        """Makes a reader. DCP raises what goes wrong as its ``CheckpointException``, on all ranks.

        Args:
            path: the folder.
            verify: compare the checksum of every item of which something is loaded. One that is not loaded whole into
                a tensor on the CPU is read once more for it. A ``ChecksumError`` (an OSError) names the tensors that
                are not what was saved; where the checkpoint has no checksums it is a ValueError.
            handle: whose settings the transfers use; one for the whole process when None.
        """
        super().__init__(path)
        self._verify = verify
        self._handle = handle
        self._reading: Reading | None = None  # keeps the files, from the metadata to the end of the data
        self._paths: dict[str, str] = {}
        self._tensors: dict[str, tuple[torch.dtype, dict[tuple[int, ...], tuple[int, ...]]]] = {}

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_handle": None, "_reading": None}

    def _end_reading(self) -> None:
        if self._reading is not None:
            self._reading.end()
            self._reading = None

    @collector.paused()
    def read_metadata(self, *_: Any, **kwargs: Any) -> Metadata:
        """Reads the metadata. Raises FormatError and ChecksumError for a damaged file."""
        self._end_reading()
        rank = kwargs.get("rank")
        path = os.path.join(self.path, folder.METADATA if rank is None else f"__{rank}{folder.METADATA}")
        try:
            self._reading = Reading(path)
        except FileNotFoundError:
            raise
        except (OSError, FormatError) as error:
            _log.warning("%s", error)  # torch before 2.13 drops it, and raises that there are no metadata
            raise
        metadata = self._reading.metadata
        if not isinstance(metadata, Metadata):
            raise FormatError(f"{path}: something else than the metadata of a checkpoint")
        metadata.storage_meta = getattr(metadata, "storage_meta", None) or StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata

    @collector.paused()
    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Keeps the metadata needed for reading."""
        super().set_up_storage_reader(metadata, is_coordinator, *args, **kwargs)
        self._tensors = {
            name: (entry.properties.dtype, {tuple(chunk.offsets): tuple(chunk.sizes) for chunk in entry.chunks})
            for name, entry in metadata.state_dict_metadata.items()
            if isinstance(entry, TensorStorageMetadata)
        }

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Records which checkpoint this rank has found."""
        found = None if self._reading is None else self._reading.identity
        return dataclasses.replace(super().prepare_local_plan(plan), storage_data=found)

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Raises FormatError if ranks found different checkpoints, as a save replaced one."""
        if len({plan.storage_data for plan in plans}) > 1:
            raise FormatError(f"{self.path}: a save has replaced the checkpoint while ranks opened it: load it again")
        return super().prepare_global_plan(plans)

    @collector.paused()
    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Reads this rank's part: plain tensors first, the rest as DCP's own reader does."""
        try:
            return self._read_data(plan, planner)
        finally:
            self._end_reading()

    def _read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        self._require_whole_files(plan.items)
        if self._verify:
            self._require_checksums(plan.items)
        wanted = [self._wanted(item) for item in plan.items]
        loading = Loading(self._handle or shared_handle(), planner, self._verify, os.fspath(self.path))
        others = [one for one in wanted if one.stored is None]
        loading.verify_in_files(others)
        loading.read([one for one in wanted if one.stored is not None])
        return super().read_data(dataclasses.replace(plan, items=[one.item for one in others]), planner)

    def _require_whole_files(self, items: Sequence[ReadItem]) -> None:
        """Raises FileNotFoundError or FormatError for missing or short files, before reading."""
        sizes: dict[str, int] = {}
        for item in items:
            info = self.storage_data[item.storage_index]
            name = info.relative_path
            if name not in sizes:
                sizes[name] = os.stat(os.path.join(self.path, name)).st_size
            if info.offset < 0 or info.length < 0 or info.offset + info.length > sizes[name]:
                raise FormatError(
                    f"{os.path.join(self.path, name)}: {item.storage_index.fqn!r}: {info.length} bytes from byte "
                    f"{info.offset} on, by the metadata, and the file has {sizes[name]} bytes: it was truncated or "
                    "replaced"
                )

    def _require_checksums(self, items: Sequence[ReadItem]) -> None:
        if not all(CHECKSUM in getattr(self.storage_data[item.storage_index], ATTRIBUTE, {}) for item in items):
            raise ValueError(
                f"{self.path} has no checksums to verify: it was saved by another writer, or with checksums=False"
            )

    def _wanted(self, item: ReadItem) -> Wanted:
        info = self.storage_data[item.storage_index]
        known = getattr(info, ATTRIBUTE, {})
        path = self._paths.get(info.relative_path)
        if path is None:
            path = self._paths[info.relative_path] = os.path.join(self.path, info.relative_path)
        stored = None
        if item.type == LoadItemType.BYTE_IO or getattr(info, "transform_descriptors", None):
            pass
        elif "data" in known:
            dtype, shapes = self._tensors[item.storage_index.fqn]
            stored = Stored(info.offset + known["data"], dtype, shapes[tuple(item.storage_index.offset or ())])
        elif info.length >= _SMALL:
            stored = find(path, info.offset, info.length)
        wanted = Wanted(item, path, info.offset, info.length, known.get(CHECKSUM), stored)
        if stored is not None:
            _require_inside(wanted, stored)
        return wanted


def _require_inside(wanted: Wanted, stored: Stored) -> None:
    """Raises FormatError if metadata contradict each other."""
    name = f"{wanted.path}: {wanted.name!r}"
    if not wanted.offset <= stored.start <= stored.start + stored.nbytes <= wanted.offset + wanted.length:
        raise FormatError(f"{name}: {stored.nbytes} bytes of data do not fit an item of {wanted.length} bytes")
    offsets, lengths = wanted.item.storage_offsets, wanted.item.lengths
    inside = len(stored.shape) == len(offsets) == len(lengths)
    for size, offset, length in zip(stored.shape, offsets, lengths, strict=False):
        inside = inside and min(offset, length) >= 0 and offset + length <= size
    if not inside:
        raise FormatError(f"{name}: {tuple(lengths)} from {tuple(offsets)} on is no part of {stored.shape}")
