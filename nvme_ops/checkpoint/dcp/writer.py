"""Writes DCP's files straight from the tensors, never over those of an old checkpoint: ``NvmeStorageWriter``."""

from __future__ import annotations

import dataclasses
import errno
import functools
import io
import math
import os
import zlib
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any

import torch
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from nvme_ops.base.errors import named
from nvme_ops.base.settings import ALIGNMENT, LARGE, PAGE
from nvme_ops.base.text import never_raising
from nvme_ops.checkpoint import framed
from nvme_ops.checkpoint.dcp import folder
from nvme_ops.checkpoint.dcp.folder import ATTRIBUTE
from nvme_ops.checkpoint.framed import FramedTensor
from nvme_ops.checkpoint.torch_save import Pickler, Reference
from nvme_ops.filesystem.files import make_folder
from nvme_ops.filesystem.publication import replacing
from nvme_ops.formats.torch_pickle import contiguous_stride
from nvme_ops.formats.torch_zip import (
    AROUND,
    CENTRAL_CHECKSUM,
    CHECKSUM,
    FOLDER,
    LOCAL_CHECKSUM,
    PICKLE,
    ZipRecord,
    directory,
    lay_out,
)
from nvme_ops.io.arguments import require_switches
from nvme_ops.io.file import handle_of
from nvme_ops.io.handle import aio_handle
from nvme_ops.io.tensors import checksums_of, collector_paused, joined_checksum


class NvmeStorageWriter(filesystem.FileSystemWriter):
    """Writes for ``torch.distributed.checkpoint.save`` and ``async_save``: the same files, at the speed of the device.

    Every rank writes one file, straight from its tensors; besides them at most 64 MiB of memory are used. The files of
    an older checkpoint in the folder are removed only after the new one is complete and ``.metadata`` was replaced;
    those that an ``NvmeStorageReader`` is reading are left to a later save. So a crash at any point leaves the old
    checkpoint or the new one. Programs and threads that save to one folder wait for each other; on a file system
    without locks only one may save at a time.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        durable: bool = True,
        checksums: bool = True,
        overwrite: bool = True,
        cache_staged_state_dict: bool = False,
        handle: aio_handle | None = None,
    ) -> None:
        """Makes a writer; the folder is created by the first save.

        Args:
            path: the folder.
            durable: return only when all is on the device. Otherwise a power failure may destroy the checkpoint.
            checksums: store a CRC-32 of every item, for ``NvmeStorageReader(path, verify=True)``.
            overwrite: whether a checkpoint in the folder may be replaced.
            cache_staged_state_dict: reuse the memory of ``async_save``'s copies for the next save.
            handle: the handle whose settings the transfers use; one shared by the whole process when None, and in a
                process that saves on behalf of this one.
        """
        require_switches(
            durable=durable, checksums=checksums, overwrite=overwrite, cache_staged_state_dict=cache_staged_state_dict
        )
        super().__init__(named(path), sync_files=durable, cache_staged_state_dict=cache_staged_state_dict)
        self.overwrite = overwrite
        self._checksums = checksums
        self._handle = None if handle is None else handle_of(handle)
        self._saving: folder.Saving | None = None  # on the coordinator, from the global plan to the end

    @never_raising
    def __repr__(self) -> str:
        """Returns for example ``NvmeStorageWriter('checkpoint', durable=True, checksums=True, overwrite=True)``."""
        options = f"durable={self.sync_files}, checksums={self._checksums}, overwrite={self.overwrite}"
        return f"{type(self).__name__}({os.fspath(self.path)!r}, {options})"

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_handle": None, "_saving": None}

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Creates the folder. Raises FileExistsError if it has a checkpoint that must not be replaced."""
        make_folder(os.fspath(self.path), self.sync_files)
        self._require_replaceable()
        rank = self._independent_rank()
        if rank is None:
            return plan
        return dataclasses.replace(plan, storage_data=filesystem._StoragePrefix(f"__{rank}_"))

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Waits, on the coordinator, for other saves to the folder before any rank writes."""
        self._saving = self._begin()
        try:
            self._require_replaceable()
            if self._independent_rank() is not None:  # its prefix is in the plan already
                return plans
            return super().prepare_global_plan(plans)
        except BaseException:
            self._end()
            raise

    def _require_replaceable(self) -> None:
        present = folder.metadata_of(self.path, None if self._independent_rank() is None else 0)
        if not self.overwrite and os.path.exists(present):
            what = "the folder has a checkpoint, and overwrite is False"
            raise FileExistsError(errno.EEXIST, what, os.fspath(self.path))

    @collector_paused
    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Writes this rank's file."""
        results: list[WriteResult] = []
        if plan.items:
            # chosen here, not in the plan, since planners reuse their plans
            name = folder.new_name(os.fspath(self.path), plan.storage_data.prefix)
            try:
                with replacing(os.path.join(self.path, name), self.sync_files) as file:
                    written = RankFile(name, planner, self._checksums)
                    small = [item for item in plan.items if _nominal_size(item) < framed.SMALL]
                    large = [item for item in plan.items if _nominal_size(item) >= framed.SMALL]
                    handle = handle_of(self._handle)
                    framed.write(handle, file.fd, map(written.placed, small), map(written.placed, large))
                    results = written.results
            except BaseException:
                self._end()  # nobody calls finish for a save that failed
                raise
        future: Future[list[WriteResult]] = Future()
        future.set_result(results)
        return future

    @collector_paused
    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Publishes what all ranks wrote as the checkpoint, then removes the old one."""
        if hasattr(filesystem, "CURRENT_DCP_VERSION"):
            metadata.version = filesystem.CURRENT_DCP_VERSION
        metadata.storage_data = {result.index: result.storage_data for ranks in results for result in ranks}
        metadata.storage_meta = self.storage_meta()
        rank = self._independent_rank()
        try:
            self._saving = self._saving or self._begin()
            self._saving.complete(metadata, "" if rank is None else f"__{rank}_")
        finally:
            self._end()

    def _begin(self) -> folder.Saving:
        return folder.Saving(folder.metadata_of(self.path, self._independent_rank()), self.sync_files)

    def _end(self) -> None:
        if self._saving is not None:
            self._saving.close()
            self._saving = None

    def _independent_rank(self) -> int | None:
        """Returns the rank if ranks save independently (``use_collectives=False`` in newer torch), else None."""
        return None if getattr(self, "use_collectives", True) else getattr(self, "rank", None)


class RankFile:
    """Lays out one rank's file, its items one after the other; ``results`` has DCP's for each that was written."""

    def __init__(self, name: str, planner: SavePlanner, checksums: bool) -> None:
        self._name, self._planner, self._checksums = name, planner, checksums
        self._end = 0
        self.results: list[WriteResult] = []

    def placed(self, item: WriteItem) -> FramedTensor:
        """Places an item at the end of the file: its payload, and around that of a plain tensor a frame."""
        data = self._planner.resolve_data(item)
        if isinstance(data, torch.Tensor):
            tensor = data.detach()
            if tensor.layout is not torch.strided:
                raise ValueError(
                    f"{item.index.fqn!r} is a tensor of the layout {tensor.layout}, which DCP cannot load: save its "
                    "to_dense(), or its parts"
                )
            if type(tensor) is torch.Tensor and not tensor.is_quantized:
                return self._framed(item, tensor, frame(tensor.dtype, tuple(tensor.shape), self._end))
            data = io.BytesIO()
            torch.save(tensor.cpu().clone(), data)
        content = data.getbuffer()
        empty = torch.empty(0, dtype=torch.uint8, device="cpu")
        payload = torch.frombuffer(content, dtype=torch.uint8) if len(content) else empty
        return self._framed(item, payload)

    def _framed(self, item: WriteItem, payload: torch.Tensor, given: Frame | None = None) -> FramedTensor:
        head_length, tail_length = (given.head_length, given.tail_length) if given else (0, 0)
        nbytes, offset = payload.nbytes, self._end
        start, length = offset + head_length, head_length + nbytes + tail_length
        self._end += length
        planned = item.tensor_data
        is_as_planned = (  # the checkpoint's metadata record this shape and dtype
            given is not None
            and planned is not None
            and (planned.chunk.sizes, planned.properties.dtype) == (payload.shape, payload.dtype)
        )

        def around(crc: int) -> Iterator[tuple[int, bytes]]:
            head, tail = given.around(crc) if given else (b"", b"")
            known = {"data": head_length} if is_as_planned else {}
            if self._checksums:
                known[CHECKSUM] = zlib.crc32(tail, joined_checksum(zlib.crc32(head), crc, nbytes, CHECKSUM))
            info = _StorageInfo(self._name, offset, length)
            setattr(info, ATTRIBUTE, known)
            self.results.append(WriteResult(index=item.index, size_in_bytes=length, storage_data=info))
            if given is not None:
                yield offset, head
                yield start + nbytes, tail

        return FramedTensor(start, payload, around)


def _nominal_size(item: WriteItem) -> int:
    """Returns the bytes of a tensor; 0 for other items, which count as small."""
    if item.type == WriteItemType.BYTE_IO or item.tensor_data is None:
        return 0
    return math.prod(item.tensor_data.chunk.sizes) * item.tensor_data.properties.dtype.itemsize


# What ``torch.save`` puts around the bytes of one tensor: a zip archive with a pickle and the bytes


class Frame:
    """Holds the bytes before and after those of a contiguous tensor in an archive ``offset`` bytes into a page."""

    def __init__(self, dtype: torch.dtype, shape: tuple[int, ...], offset: int) -> None:
        texts = {PICKLE: _description(dtype, shape), **AROUND}
        crcs = checksums_of(list(texts.values()), CHECKSUM)
        records = [
            ZipRecord(FOLDER + name.encode(), len(text), text, crc)
            for (name, text), crc in zip(texts.items(), crcs, strict=True)
        ]
        data = ZipRecord(FOLDER + b"data/0", math.prod(shape) * dtype.itemsize)
        end = lay_out([*records, data], offset)
        head = b"".join([part for record in records for part in (record.local(), record.data)]) + data.local()
        tail = directory([*records, data], end)
        self.head_length, self.tail_length = len(head), len(tail)
        place = data.header + LOCAL_CHECKSUM
        self._head = head[:place], head[place + 4 :]
        place = len(directory(records, 0)) - len(directory([], 0)) + CENTRAL_CHECKSUM
        self._tail = tail[:place], tail[place + 4 :]

    def around(self, checksum: int) -> tuple[bytes, bytes]:
        """Returns the bytes before and after data that have this CRC-32."""
        written = checksum.to_bytes(4, "little")
        return written.join(self._head), written.join(self._tail)


def frame(dtype: torch.dtype, shape: tuple[int, ...], offset: int) -> Frame:
    """Returns the frame of a tensor whose archive begins ``offset`` bytes into the file."""
    large = math.prod(shape) * dtype.itemsize >= LARGE
    return _frame(dtype, shape, offset % (PAGE if large else ALIGNMENT))


_frame = functools.lru_cache(maxsize=4096)(Frame)  # a model has many tensors of few shapes


class _Reduction:
    def __init__(self, function: Any, arguments: tuple[Any, ...]) -> None:
        self._reduced = function, arguments

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        return self._reduced


@functools.lru_cache(maxsize=4096)
def _description(dtype: torch.dtype, shape: tuple[int, ...]) -> bytes:
    """Returns the pickle of a contiguous tensor without its data, as torch pickles this dtype."""
    function, arguments = torch.empty(0, dtype=dtype, device="cpu").__reduce_ex__(2)
    elements = math.prod(shape)
    if isinstance(arguments[0], torch.UntypedStorage):
        kind, count = torch.UntypedStorage, elements * dtype.itemsize
    else:
        kind, count = getattr(torch, arguments[0]._pickle_storage_type()), elements
    storage = Reference("storage", kind, "0", "cpu", count)
    rest = arguments[6:]  # which some dtypes have
    stream = io.BytesIO()
    Pickler(stream, everywhere=True).dump(
        _Reduction(function, (storage, 0, shape, contiguous_stride(shape), False, OrderedDict(), *rest))
    )
    return stream.getvalue()
