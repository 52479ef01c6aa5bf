"""Saves and loads one safetensors file."""

from __future__ import annotations

import contextlib
import json
import os
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from json.encoder import encode_basestring
from typing import Any, NamedTuple

import torch

from nvme_ops.base.errors import ChecksumError, SharedMemoryError
from nvme_ops.base.native import native
from nvme_ops.base.settings import PAGE
from nvme_ops.checkpoint import new_tensors
from nvme_ops.checkpoint.new_tensors import Wanted
from nvme_ops.checkpoint.request import Plan, Request, SaveOptions, Targets
from nvme_ops.filesystem.publication import OpenFiles, opened, replacing
from nvme_ops.formats import integrity
from nvme_ops.formats import safetensors_format as layout
from nvme_ops.formats.contents import Contents, Item
from nvme_ops.formats.safetensors_format import MAX_HEADER, NAMES, Header, TensorEntry
from nvme_ops.io.engine import Priority
from nvme_ops.io.handle import aio_handle
from nvme_ops.io.tensors import Kind, collector_paused
from nvme_ops.lazy.offloaded import OffloadedTensor
from nvme_ops.memory import pieces
from nvme_ops.memory.pieces import BorrowedTensors


@dataclass
class SafetensorsPlan(Plan):
    """Describes one file: its header without the checksums, and its tensors in the order of their data."""

    header: layout.Header
    tensors: list[torch.Tensor]
    options: SaveOptions
    seal: str | None = None  # the checksum of the header, once that is written

    def write(self, path: str, handle: aio_handle, borrowed: BorrowedTensors | None = None) -> None:
        """Implements ``Plan``."""
        places = list(zip([entry.start for entry in self.header.entries.values()], self.tensors, strict=True))
        with replacing(path, self.options.durable, self.options.recycle) as file:
            kind = pieces.CHECKSUM if self.options.checksums else None
            checksums = pieces.write(handle, file.fd, places, kind, borrowed)
            text, self.seal = integrity.sealed(self.header.text, checksums) if checksums else (self.header.text, None)
            head = struct.pack("<Q", len(text)) + text
            written = torch.frombuffer(bytearray(head), dtype=torch.uint8)
            handle.submit_pwrite(written, file.fd, 0, priority=Priority.WRITEBACK).result()
            if self.options.recycle:
                os.ftruncate(file.fd, max([len(head), *(entry.end for entry in self.header.entries.values())]))


@collector_paused
def plan(obj: Any, options: SaveOptions, save: str | None = None) -> SafetensorsPlan:
    """Plans a file. Raises TypeError and ValueError for what the format cannot store.

    ``save``: the id of the save, if the file is one of several shards.
    """
    tensors = require_tensors(obj)
    about = {"format": "pt", **(options.metadata or {})}  # transformers refuses files without it
    if save is not None:
        about[integrity.SAVE] = save
    if options.checksums and tensors:
        about[integrity.KEY] = integrity.placeholder(len(tensors))
    header = build(tensors, about)
    ordered = map(tensors.__getitem__, header.entries)
    plain = [tensor.detach() if tensor.requires_grad else tensor for tensor in ordered]
    return SafetensorsPlan(header, plain, options)


def load(path: str, into: Mapping[str, Any] | torch.nn.Module | None, request: Request) -> dict[str, torch.Tensor]:
    """Loads the tensors by name, in the file's order."""
    return read(path, None if into is None else Targets(into), request)


def read(path: str, targets: Targets | None, request: Request) -> dict[str, torch.Tensor]:
    """Loads one file of a checkpoint that may have several. Returns the tensors by name, in the file's order."""
    device = _one_device(request.map_location)
    with opened(path) as fd, contextlib.ExitStack() as stack:
        text, size = layout.read_text(fd, path)
        ahead = None
        if targets is None and request.keys is None and not request.mmap and device.type == "cpu":
            ahead = new_tensors.ahead(request.handle, fd, 8 + len(text), size)
            if ahead is not None:
                stack.push(ahead.end)
        header = layout.decode(text, size, path)
        entries, wanted = _wanted(header, path, targets, request)
        expected = _expected(header, path) if request.verify else {}
        if targets is not None:
            described = {name: kind for name, (_, _, kind) in zip(entries, wanted, strict=True)}
            tensors = targets.take(path, described, request)
            places = [(entries[name].start, tensor) for name, tensor in tensors.items()]
            pieces.read_into(request.handle, fd, places)
        elif device.type == "meta":
            made = [torch.empty(shape, dtype=dtype, device=device) for _, _, (dtype, shape) in wanted]
            tensors = dict(zip(entries, made, strict=True))
        else:
            values = new_tensors.read(request.handle, fd, wanted, device, request.mmap, ahead)
            tensors = dict(zip(entries, values, strict=True))
    if request.verify and device.type != "meta":
        integrity.check(path, expected, tensors)
    return tensors


def kinds(path: str, request: Request) -> dict[str, Kind]:
    """Returns the dtypes and shapes of the tensors that ``read`` would return."""
    with opened(path) as fd:
        header = layout.read(fd, path)
    entries, wanted = _wanted(header, path, None, request)
    return {name: kind for name, (_, _, kind) in zip(entries, wanted, strict=True)}


@collector_paused
def _wanted(
    header: Header, path: str, targets: Targets | None, request: Request
) -> tuple[dict[str, TensorEntry], list[Wanted]]:
    """Returns the requested entries, where their data lie, and their dtypes and shapes in torch."""
    if request.part is not None:
        request.part.require(path, header.metadata, request.verify)
    entries = {name: header.entries[name] for name in request.chosen(header.entries, path, targets)}
    names = {(dtype, shape): name for name, (dtype, shape, _, _) in entries.items()}  # few, even for many tensors
    kinds = {kind: entries[name].in_torch(path, name) for kind, name in names.items()}
    return entries, [(start, end, kinds[dtype, shape]) for dtype, shape, start, end in entries.values()]


def _one_device(map_location: Any) -> torch.device:
    """Returns the device. Raises TypeError for a mapping or function, as the format records no devices."""
    if map_location is None:
        return torch.device("cpu")
    if isinstance(map_location, str | torch.device):
        return torch.device(map_location)
    raise TypeError(f"map_location of safetensors files must be a device, not {type(map_location).__name__}")


def _expected(header: layout.Header, path: str) -> dict[str, int]:
    checksums = integrity.recorded(header, path)
    if checksums is None and header.entries:
        raise ValueError(f"{path} has no checksums to verify: it was saved by another program, or with checksums=False")
    if integrity.differs(header.text, header.metadata):
        raise ChecksumError(path, [integrity.HEADER])
    return checksums or {}


def contents(path: str, files: OpenFiles, part: integrity.ShardEntry | None = None) -> Contents:
    """Lists what the file contains, with the checksums. ``part``: what the index of a sharded checkpoint says of it."""
    with files.opened(path) as fd:
        header = layout.read(fd, path)
    expected = integrity.recorded(header, path) or {}
    items = []
    for name, entry in header.entries.items():
        checksum = (pieces.CHECKSUM, expected[name]) if name in expected else None
        items.append(Item(name, entry.dtype, entry.shape, path, entry.start, entry.end, checksum))
    metadata = {key: text for key, text in header.metadata.items() if key not in integrity.OURS}
    wrong = {integrity.HEADER} if integrity.differs(header.text, header.metadata) else set()
    if part is not None and (item := part.wrong(path, header.metadata)):
        wrong.add(item)
    return Contents("safetensors", items, metadata, sorted(wrong))


_PLAIN = (torch.Tensor, torch.nn.Parameter)


def build(tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str]) -> Header:
    """Builds a header. Larger dtypes come first, so that all tensors are aligned, the first one to a page.

    Raises:
        ValueError: a dtype or shape that the format cannot express, or a header larger than 100 MB.
    """
    kinds: dict[tuple[torch.dtype, torch.Size], _Kind] = {}
    described = []
    for name, tensor in tensors.items():
        key = tensor.dtype, tensor.shape
        if key not in kinds:
            kinds[key] = _kind(name, *key)
        described.append((-tensor.dtype.itemsize, name, kinds[key]))
    described.sort()  # names are unique, so kinds are never compared
    lines = []
    if metadata:
        lines.append('"__metadata__":' + json.dumps(metadata, separators=(",", ":"), ensure_ascii=False))
    places, position = [], 0
    for _, name, kind in described:
        end = position + kind.size
        lines.append(f"{encode_basestring(name)}:{kind.text}[{position},{end}]}}")
        places.append((name, kind, position, end))
        position = end
    text = ("{" + ",".join(lines) + "}").encode()
    padded = -(-(8 + len(text)) // PAGE) * PAGE - 8
    if padded > MAX_HEADER:
        raise ValueError(f"the header would be {padded} bytes long, and readers accept {MAX_HEADER}: too many tensors")
    start = 8 + padded
    entries = {
        name: TensorEntry(kind.dtype, kind.shape, start + first, start + last) for name, kind, first, last in places
    }
    return Header(entries, dict(metadata), text.ljust(padded))


def header_bytes(name: str, tensor: torch.Tensor) -> int:
    """Returns about how many bytes of a header describe a tensor, its checksum included; never fewer than half."""
    return len(encode_basestring(name).encode(errors="replace")) + 80 + 12 * tensor.dim()


class _Kind(NamedTuple):
    """A dtype and shape in the format's terms, shared by all tensors that have them."""

    dtype: str
    shape: tuple[int, ...]
    size: int  # in bytes
    text: str  # of the entry in the header, up to the offsets


def _kind(name: str, dtype: torch.dtype, shape: torch.Size) -> _Kind:
    if dtype not in NAMES:
        raise ValueError(f"tensor {name!r}: safetensors has no dtype for {dtype}")
    counted = tuple(shape)
    if NAMES[dtype] == "F4":  # two values in each element of torch's dtype
        if not shape:
            raise ValueError(f"tensor {name!r}: the two values of an element need a dimension to lie along")
        counted = (*shape[:-1], shape[-1] * 2)
    dimensions = ",".join(map(str, counted))
    text = f'{{"dtype":"{NAMES[dtype]}","shape":[{dimensions}],"data_offsets":'
    return _Kind(NAMES[dtype], counted, shape.numel() * dtype.itemsize, text)


def require_tensors(obj: Any) -> Mapping[str, torch.Tensor]:
    """Returns ``obj`` if it is a flat dictionary of dense tensors that share no memory.

    Raises:
        TypeError: it is not a dictionary of tensors by name.
        ValueError: it has an invalid name, a sparse or distributed tensor, or tensors that share memory; named.
    """
    if not isinstance(obj, Mapping):
        raise TypeError(f"safetensors holds a dict of tensors by name, not {type(obj).__name__}: save it as .pt")
    for name, tensor in obj.items():
        if not isinstance(name, str):
            raise TypeError(f"names must be str, not {type(name).__name__}: {name!r}")
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"{name!r} is a {type(tensor).__name__}, not a tensor: save it as .pt")
        if name == "__metadata__":
            raise ValueError("'__metadata__' is a name that the format reserves for itself")
        try:
            name.encode()
        except UnicodeEncodeError as error:
            raise ValueError(f"the name {name!r} is not valid Unicode: {error}") from None
        if tensor.layout != torch.strided or tensor.is_meta or tensor.is_nested:
            raise ValueError(f"tensor {name!r} has no dense memory: {tensor.layout}, device {tensor.device}")
        if type(tensor) not in _PLAIN and not isinstance(tensor, OffloadedTensor) and not _has_memory(tensor):
            raise ValueError(
                f"tensor {name!r} is a {type(tensor).__name__}, which has no memory of its own: save what it holds "
                "(a DTensor's full_tensor()), or shards of it with nvme_ops.dcp"
            )
    _require_own_memory(obj)
    return obj


def _has_memory(tensor: torch.Tensor) -> bool:
    try:
        tensor.untyped_storage().data_ptr()
    except RuntimeError:  # a subclass that wraps other tensors
        return False
    return True


def _require_own_memory(tensors: Mapping[str, torch.Tensor]) -> None:
    """Raises SharedMemoryError for tensors that share memory, as safetensors does: they would be stored twice."""
    in_memory = [name for name, tensor in tensors.items() if not isinstance(tensor, OffloadedTensor)]
    shared = native().overlapping([tensors[name] for name in in_memory])
    pair = None if shared is None else [in_memory[index] for index in shared]
    places: dict[Any, str] = {}
    for name, tensor in tensors.items():
        if isinstance(tensor, OffloadedTensor) and (first := places.setdefault(tensor.stored_at, name)) is not name:
            pair = pair or [first, name]
    if pair is not None:
        before, name = pair
        raise SharedMemoryError(
            f"tensors {before!r} and {name!r} share memory, which a safetensors file would hold twice: save one of "
            "them, or a clone, or save as .pt"
        )
