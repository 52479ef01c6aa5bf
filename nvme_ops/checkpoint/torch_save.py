"""Saves in the container format of ``torch.save``, writing the tensors' bytes straight from their memory."""

from __future__ import annotations

import io
import json
import os
import pickle
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from nvme_ops.base.settings import LARGE
from nvme_ops.checkpoint import framed
from nvme_ops.checkpoint.request import Plan, SaveOptions
from nvme_ops.filesystem.publication import replacing
from nvme_ops.formats.torch_pickle import dtype_of_storage
from nvme_ops.formats.torch_zip import AROUND, FOLDER, PICKLE, ZipRecord, directory, lay_out
from nvme_ops.io.engine import Priority
from nvme_ops.io.handle import aio_handle
from nvme_ops.io.tensors import collector_paused, dense_bytes, is_dense
from nvme_ops.lazy.offloaded import OffloadedTensor
from nvme_ops.memory.pieces import BorrowedTensors

#: The record with the strings of ``metadata=``; torch ignores it.
METADATA = ".nvme_ops/metadata.json"

_PROTOCOL = 2  # pickle protocol: the only one that weights_only reads

# The classes that stand for storages in pickles, by dtype; torch pickles tensors of other dtypes differently.
_STORAGES = {
    dtype_of_storage(name): getattr(torch, name)
    for name in (
        "BFloat16Storage", "BoolStorage", "ByteStorage", "CharStorage", "ComplexDoubleStorage", "ComplexFloatStorage",
        "DoubleStorage", "FloatStorage", "HalfStorage", "IntStorage", "LongStorage", "ShortStorage",
    )
}  # fmt: skip
_NAMES = hasattr(torch.Tensor, "has_names")  # named dimensions, in older versions of torch

_PLAIN = (torch.Tensor, torch.nn.Parameter)

# Takes any object and returns None, in C, without a Python call: no object has a persistent id.
_NO_ID = deque[Any](maxlen=0).append


class Reference(NamedTuple):
    """Stands for a storage in the pickle."""

    tag: str  # "storage"
    kind: Any
    key: str
    location: str
    elements: int


class UnexpectedStorageError(Exception):
    """A storage was met where no persistent id is asked for: by itself, or in something other than a plain tensor."""


class Pickler(pickle.Pickler):
    """Pickles as ``torch.save`` does, with keys in place of the storages.

    Plain tensors bypass torch's ``__reduce_ex__``, which would take most of the time. The pickler in C asks for the
    persistent id of every object; here that calls Python only between a plain tensor and its storage, which follows
    it. Storages elsewhere raise ``UnexpectedStorageError``, unless Python is called for every object (``everywhere``).
    """

    persistent_id: Callable[[Any], Any]  # an attribute, not a method: C looks it up in the object, and it changes

    def __init__(self, stream: io.BytesIO, everywhere: bool = False) -> None:
        super().__init__(stream, protocol=_PROTOCOL)
        self.storages: dict[str, torch.Tensor] = {}  # by key: the bytes
        self._empty: dict[torch.device, torch.Tensor] = {}
        self._keys: dict[Any, str] = {}  # by the address of the storage, or the place on storage
        self._dtypes: dict[tuple[torch.device, int], torch.dtype] = {}
        self._locations: dict[torch.device, str] = {}
        self._everywhere = everywhere
        self.persistent_id = self._id_of if everywhere else _NO_ID

    def dump(self, obj: Any) -> None:
        """Pickles the object."""
        try:
            super().dump(obj)
        finally:
            self.persistent_id = _NO_ID  # a bound method would keep this object alive, and with it the tensors

    def _id_of(self, value: Any) -> tuple[Any, ...] | None:
        """Returns the persistent id of a storage; None for anything else."""
        kind = type(value)
        if kind is Reference:
            if not self._everywhere:
                self.persistent_id = _NO_ID
            return tuple(value)
        if kind is torch.UntypedStorage:
            return tuple(self._refer(value, torch.uint8, kind, value.nbytes()))
        if kind is torch.storage.TypedStorage:
            named = getattr(torch, value._pickle_storage_type())
            return tuple(self._refer(value._untyped_storage, value.dtype, named, value._size()))
        return None

    def _refer(self, storage: torch.UntypedStorage, dtype: torch.dtype, kind: Any, elements: int) -> Reference:
        device, place = storage.device, storage._cdata
        if device.type == "meta":
            raise TypeError("a storage on the meta device has no bytes to save")
        if address := storage.data_ptr():
            known = self._dtypes.setdefault((device, address), dtype)
            if known != dtype:
                raise RuntimeError(f"views of the same memory as {known} and as {dtype} cannot be saved together")
        key = self._keys.setdefault(place, str(len(self._keys)))
        if key not in self.storages:
            if device not in self._empty:
                self._empty[device] = torch.empty(0, dtype=torch.uint8, device=device)
            self.storages[key] = self._empty[device].data.set_(storage)
        location = self._locations.get(device)
        if location is None:
            location = self._locations[device] = torch.serialization.location_tag(storage)
        return Reference("storage", kind, key, location, elements)

    def reducer_override(self, obj: Any) -> Any:
        """Returns how a plain tensor or parameter is rebuilt; leaves everything else to torch and pickle."""
        if isinstance(obj, torch.UntypedStorage | torch.storage.TypedStorage | Reference):
            raise UnexpectedStorageError
        offloaded = isinstance(obj, OffloadedTensor)
        if (type(obj) not in _PLAIN and not offloaded) or not _is_plain(obj, offloaded):
            return NotImplemented
        hooks: OrderedDict[Any, Any] = OrderedDict()
        if type(obj) is torch.nn.Parameter or (offloaded and isinstance(obj, torch.nn.Parameter)):
            return torch._utils._rebuild_parameter, (obj.data, obj.requires_grad, hooks)
        kind, size, stride = _STORAGES[obj.dtype], tuple(obj.shape), obj.stride()
        if offloaded:
            key = self._keys.setdefault((obj.place, size, stride), str(len(self._keys)))
            self.storages.setdefault(key, dense_bytes(obj))
            reference, offset = Reference("storage", kind, key, str(obj.device), obj.numel()), 0
        else:
            storage, offset = obj.untyped_storage(), int(obj.storage_offset())
            reference = self._refer(storage, obj.dtype, kind, storage.nbytes() // obj.element_size())
        self.persistent_id = self._id_of
        return torch._utils._rebuild_tensor_v2, (reference, offset, size, stride, obj.requires_grad, hooks)


def _is_plain(value: Any, offloaded: bool) -> bool:
    """Returns whether a tensor consists of dtype, shape, strides, bytes and ``requires_grad`` alone."""
    if value.dtype not in _STORAGES or value.layout != torch.strided or value.device.type not in ("cpu", "cuda"):
        return False
    if value.is_nested or value.is_conj() or value.is_neg() or value._backward_hooks or (_NAMES and value.has_names()):
        return False
    return is_dense(value) if offloaded else not value.__dict__


@collector_paused
def pickled(obj: Any) -> tuple[bytes, list[torch.Tensor]]:
    """Returns the pickle of ``torch.save``, and byte tensors over the storages: records ``data/0``, ``data/1``, ...

    Raises:
        RuntimeError: views of one storage with different dtypes, as in torch.
        pickle.PicklingError, TypeError, AttributeError: an object that cannot be pickled.
    """
    try:
        return _pickled(obj, everywhere=False)
    except UnexpectedStorageError:
        return _pickled(obj, everywhere=True)


def _pickled(obj: Any, everywhere: bool) -> tuple[bytes, list[torch.Tensor]]:
    stream = io.BytesIO()
    pickler = Pickler(stream, everywhere)
    pickler.dump(obj)
    return stream.getvalue(), list(pickler.storages.values())


@dataclass
class TorchPlan(Plan):
    """Describes one file: the pickle, and the bytes of its storages."""

    content: bytes
    tensors: list[torch.Tensor]
    options: SaveOptions

    @collector_paused
    def write(self, path: str, handle: aio_handle, borrowed: BorrowedTensors | None = None) -> None:
        """Implements ``Plan``."""
        with replacing(path, self.options.durable, self.options.recycle) as file:
            records, end = self.records()
            others = records
            if borrowed is not None:
                lent = [record for record in records if borrowed.holds(record.data)]
                others = [record for record in records if not borrowed.holds(record.data)]
                write(handle, file.fd, lent, self.options.checksums)
                borrowed.release(record.data for record in lent)
            write(handle, file.fd, others, self.options.checksums)
            tail = torch.frombuffer(bytearray(directory(records, end)), dtype=torch.uint8)
            handle.submit_pwrite(tail, file.fd, end, priority=Priority.WRITEBACK).result()
            if self.options.recycle:
                os.ftruncate(file.fd, end + tail.nbytes)

    def records(self) -> tuple[list[ZipRecord], int]:
        """Lays out all records; returns them and the offset of the zip directory.

        Small ones come first, in one run with their headers, then the large ones, each on a page. The records from
        which torch would compute offsets, ``.format_version`` and ``.storage_alignment``, are left out, so that torch
        looks offsets up in the directory.
        """
        texts = {PICKLE: self.content, **AROUND}
        if self.options.metadata:
            texts[METADATA] = json.dumps(dict(self.options.metadata), ensure_ascii=False).encode()
        data = {name: torch.frombuffer(bytearray(text), dtype=torch.uint8) for name, text in texts.items()}
        data |= {f"data/{key}": tensor for key, tensor in enumerate(self.tensors)}
        records = [ZipRecord(FOLDER + name.encode(), tensor.nbytes, tensor) for name, tensor in data.items()]
        small = [record for record in records if record.size < LARGE]
        records = small + [record for record in records if record.size >= LARGE]
        return records, lay_out(records)


def plan(obj: Any, options: SaveOptions) -> TorchPlan:
    """Plans a file. Raises what ``pickled`` raises. Without ``checksums`` the CRC-32s are zero."""
    return TorchPlan(*pickled(obj), options)


def write(handle: aio_handle, fd: int, records: Sequence[ZipRecord], checksums: bool) -> None:
    """Writes these records with their headers, and waits. Fills in their checksums."""
    small = [record for record in records if record.size < framed.SMALL]
    large = [record for record in records if record.size >= framed.SMALL]
    framed.write(handle, fd, small, large, checksums)
