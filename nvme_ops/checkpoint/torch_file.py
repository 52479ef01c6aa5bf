"""Saves and loads files of ``torch.save``: a zip file with a pickle and the bytes of storages."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch.serialization import default_restore_location

from nvme_ops.base.errors import FormatError, UnsafeError
from nvme_ops.checkpoint import torch_read
from nvme_ops.checkpoint.modules import state_to_fill
from nvme_ops.checkpoint.request import Request, Targets
from nvme_ops.checkpoint.torch_load import everything, fetcher
from nvme_ops.checkpoint.torch_open import TorchFile, names_by_record, require_record, verify_others
from nvme_ops.checkpoint.torch_save import METADATA, TorchPlan, plan
from nvme_ops.filesystem.publication import OpenFiles, opened
from nvme_ops.formats import torch_legacy, torch_pickle
from nvme_ops.formats.contents import Contents, Item
from nvme_ops.formats.mistaken import refuse
from nvme_ops.formats.torch_pickle import DenseTensor, OtherTensor, Storage
from nvme_ops.formats.torch_zip import CHECKSUM, PICKLE, Archive
from nvme_ops.io.file import shared_handle
from nvme_ops.io.tensors import Kind, collector_paused, is_plain

__all__ = ["TorchPlan", "UnsafeError", "contents", "kinds", "load", "plan", "read"]


def load(path: str, into: Mapping[str, Any] | torch.nn.Module | None, request: Request) -> Any:
    """Loads the object that was saved; with ``keys`` or ``into``, tensors by name.

    A tensor's name is its path in the object: keys, indices and attributes joined by dots. ``torch.save`` overwrites
    a file in place, which changes the tensors that ``mmap`` has mapped from it.
    """
    if request.keys is None and into is None:
        with opened(path) as fd:
            file = TorchFile(fd, path, request.handle, request.mmap)
            return everything(file, request.map_location, request.verify)
    return read(path, None if into is None else Targets(flattened(into)), request)


def flattened(obj: Any) -> dict[str, torch.Tensor]:
    """Returns the tensors in nested containers and modules by their names."""
    tensors: dict[str, torch.Tensor] = {}

    def walk(name: str, value: Any) -> None:
        if isinstance(value, torch.nn.Module):
            value = state_to_fill(value)
        if isinstance(value, torch.Tensor):
            if name in tensors:
                raise ValueError(f"two tensors are called {name!r} when their places are joined by dots")
            tensors[name] = value
        elif isinstance(value, Mapping | list | tuple):
            for key, child in value.items() if isinstance(value, Mapping) else enumerate(value):
                walk(f"{name}.{key}" if name else str(key), child)

    walk("", obj)
    return tensors


def read(path: str, targets: Targets | None, request: Request) -> dict[str, torch.Tensor]:
    """Reads the requested tensors of one file of a checkpoint that may have several; returns them by name.

    If one of them is not a view of a single storage (a sparse or quantized tensor, a subclass), or the file is in an
    older format, everything is loaded first.
    """
    with opened(path) as fd:
        file = TorchFile(fd, path, request.handle, request.mmap)
        archive = file.archive()
        if archive is not None:
            if request.verify:
                verify_others(archive)
            known = _described(archive)
            names = request.chosen(known, path, targets)
            described = {name: tensor for name in names if isinstance(tensor := known[name], DenseTensor)}
            if len(described) == len(names):
                return _fill_or_make(archive, described, targets, request)
        whole = everything(file, request.map_location if targets is None else "cpu", request.verify)
        try:
            tensors = flattened(whole)
        except RecursionError as error:
            raise FormatError(f"{path}: containers are nested too deeply") from error
    names = request.chosen(tensors, path, targets)
    if targets is None:
        return {name: tensors[name] for name in names}
    taken = targets.take(path, {name: (tensors[name].dtype, tuple(tensors[name].shape)) for name in names}, request)
    for name in taken:
        if tensors[name].layout != torch.strided:
            raise ValueError(
                f"{path}: tensor {name!r} is {tensors[name].layout} in the file, and the one to fill is dense"
            )
    for name, target in taken.items():
        target.copy_(tensors[name].detach())
    return taken


def kinds(path: str, request: Request) -> dict[str, Kind]:
    """Returns the dtypes and shapes of the tensors that ``read`` would return, if known without reading data."""
    with opened(path) as fd:
        file = TorchFile(fd, path, request.handle)
        archive = file.archive()
        known = {} if archive is None else _described(archive)
    asked = known if request.keys is None else request.keys
    return {name: (tensor.dtype, tensor.shape) for name in asked if isinstance(tensor := known.get(name), DenseTensor)}


def _described(archive: Archive) -> dict[str, DenseTensor | OtherTensor]:
    root, _ = torch_pickle.read(archive.pickled(), archive.path)
    known: dict[str, DenseTensor | OtherTensor] = {}
    for name, tensor in torch_pickle.tensors(root, archive.path):
        if name in known:
            raise ValueError(f"{archive.path}: two tensors are called {name!r} when their places are joined by dots")
        known[name] = tensor
        if isinstance(tensor, DenseTensor):
            require_record(archive, tensor.storage.record, tensor.storage.size)
    return known


def _fill_or_make(
    archive: Archive, described: Mapping[str, DenseTensor], targets: Targets | None, request: Request
) -> dict[str, torch.Tensor]:
    if targets is None:
        return _make(archive, described, request.map_location)
    taken = targets.take(archive.path, {name: (entry.dtype, entry.shape) for name, entry in described.items()}, request)
    torch_read.fill(archive, described, taken)
    if request.verify:
        plain = {name: tensor for name, tensor in described.items() if tensor.contiguous and not tensor.metadata}
        held = [(tensor.storage.record, taken[name]) for name, tensor in plain.items() if is_plain(taken[name])]
        torch_read.verify(archive, held, [tensor.storage.record for tensor in described.values()])
    return taken


@collector_paused
def _make(archive: Archive, described: Mapping[str, DenseTensor], map_location: Any) -> dict[str, torch.Tensor]:
    by_record: dict[str, list[DenseTensor]] = {}
    for tensor in described.values():
        by_record.setdefault(tensor.storage.record, []).append(tensor)
    wanted = {record: (*torch_read.union(some), some[0].storage.location) for record, some in by_record.items()}
    fetch = fetcher(archive, map_location, wanted)
    storages: dict[str, torch.UntypedStorage] = {}
    for record, (_, _, location) in wanted.items():
        storage = fetch(record).untyped_storage()
        if callable(map_location):
            moved = map_location(storage, location)
            storage = default_restore_location(storage, location) if moved is None else moved
        storages[record] = storage
    return {
        name: torch_read.rebuilt(tensor, storages[tensor.storage.record], wanted[tensor.storage.record][0])
        for name, tensor in described.items()
    }


def contents(path: str, files: OpenFiles, _: object = None) -> Contents:
    """Lists the pickle, and the storages by the names of the tensors in them, with the CRC-32 of each.

    Files from before torch 1.6 have no checksums, and their pickles, which say where the storages were in memory, are
    not listed.
    """
    with files.opened(path) as fd:
        file = TorchFile(fd, path, shared_handle())
        archive = file.archive()
        if archive is None:
            return _legacy_contents(file)
        root, storages = torch_pickle.read(archive.pickled(), path)
        archive.locate([PICKLE, *(storage.record for storage in storages)])
        checked = any(record.crc for record in archive.records.values())
        items = [_item(archive, PICKLE, PICKLE, "pickle", (archive.records[PICKLE].size,), checked)]
        for storage, name, dtype, shape in _listed(root, storages, path):
            require_record(archive, storage.record, storage.size)
            items.append(_item(archive, storage.record, name, dtype, shape, checked))
        return Contents("torch", items, metadata(archive))


def _legacy_contents(file: TorchFile) -> Contents:
    if not file.is_legacy():
        raise FormatError(f"{file.path} can be loaded but not inspected: it is compressed, or not torch.save's")
    root, storages, starts = torch_legacy.read(file.fd, file.path)
    items = []
    for storage, name, dtype, shape in _listed(root, storages, file.path):
        start = starts[storage.record]
        items.append(Item(name, dtype, shape, file.path, start, start + storage.size))
    return Contents("torch before 1.6", items)


def _listed(root: Any, storages: Iterable[Storage], path: str) -> Iterator[tuple[Storage, str, str, tuple[int, ...]]]:
    """Yields each storage with its name, dtype and shape: those of a tensor that is all of it, if there is one."""
    plain = [tensor for _, tensor in torch_pickle.tensors(root, path) if isinstance(tensor, DenseTensor)]
    views = {tensor.storage.record: tensor for tensor in reversed(plain)}
    names = names_by_record(root, path)
    seen: Counter[str] = Counter()
    for storage in storages:
        shape: tuple[int, ...] = (storage.size // storage.dtype.itemsize,)
        dtype = storage.dtype
        view = views.get(storage.record)
        if view is not None and view.contiguous and view.extent == (0, storage.size):
            shape, dtype = view.shape, view.dtype
        name = " = ".join(names.get(storage.record, [storage.record]))
        seen[name] += 1
        if seen[name] > 1:  # indices and values of a sparse tensor, say
            name = f"{name} ({seen[name]})"
        yield storage, name, str(dtype).removeprefix("torch."), shape


def _item(archive: Archive, record: str, name: str, dtype: str, shape: tuple[int, ...], checked: bool) -> Item:
    start = archive.starts[record]
    checksum = (CHECKSUM, archive.records[record].crc) if checked else None
    return Item(name, dtype, shape, archive.path, start, start + archive.records[record].size, checksum)


def metadata(archive: Archive) -> dict[str, str]:
    """Returns the strings of ``metadata=``. Raises FormatError for anything else in their record."""
    if METADATA not in archive.records:
        return {}
    try:
        document = json.loads(archive.content(METADATA))
    except (ValueError, RecursionError) as error:
        refuse(archive.path, f"record {METADATA!r} is not JSON: {error}")
    if not isinstance(document, dict) or not all(isinstance(value, str) for value in document.values()):
        refuse(archive.path, f"record {METADATA!r} is not an object of strings")
    return document
