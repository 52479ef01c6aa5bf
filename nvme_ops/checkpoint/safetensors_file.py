"""Saves and loads one safetensors file."""

from __future__ import annotations

import contextlib
import os
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from nvme_ops import collector
from nvme_ops.checkpoint import new_tensors
from nvme_ops.checkpoint.new_tensors import Wanted
from nvme_ops.checkpoint.plan import require_strings
from nvme_ops.checkpoint.request import Request
from nvme_ops.checkpoint.safetensors_build import build, require_tensors
from nvme_ops.checkpoint.targets import Targets
from nvme_ops.engine import Priority
from nvme_ops.errors import ChecksumError
from nvme_ops.formats import integrity
from nvme_ops.formats import safetensors_format as layout
from nvme_ops.formats.contents import Contents, Item
from nvme_ops.handle import aio_handle
from nvme_ops.memory import pieces
from nvme_ops.memory.carve import Kind
from nvme_ops.memory.pieces import Borrowed
from nvme_ops.storage.publication import opened, replacing


@dataclass
class SafetensorsPlan:
    """One file: its header without the checksums, and its tensors in the order of their data."""

    header: layout.Header
    tensors: list[torch.Tensor]
    checksums: bool
    recycle: bool = False
    seal: str | None = None  # the checksum of the header, once it is written

    def target(self, path: str) -> str:
        """Implements ``Plan``."""
        return path

    def write(self, path: str, *, durable: bool, handle: aio_handle, borrowed: Borrowed | None = None) -> None:
        """Implements ``Plan``."""
        places = list(zip((entry.start for entry in self.header.entries.values()), self.tensors, strict=True))
        with replacing(path, durable, self.recycle) as file:
            found = pieces.write(handle, file.fd, places, pieces.CHECKSUM if self.checksums else None, borrowed)
            text = integrity.sealed(self.header.text, found) if found else self.header.text
            self.seal = integrity.seal(text) if found else None
            head = struct.pack("<Q", len(text)) + text
            written = torch.frombuffer(bytearray(head), dtype=torch.uint8)
            handle.submit_pwrite(written, file.fd, 0, priority=Priority.WRITEBACK).result()
            if self.recycle:
                os.ftruncate(file.fd, max([len(head), *(entry.end for entry in self.header.entries.values())]))


@collector.paused()
def plan(
    obj: Any,
    *,
    checksums: bool,
    metadata: Mapping[str, str] | None,
    save: str | None = None,
    recycle: bool = False,
) -> SafetensorsPlan:
    """Plans a file. Raises TypeError and ValueError for what the format cannot hold. ``save``: the id of its save."""
    tensors = require_tensors(obj)
    words = {"format": "pt", **(metadata or {})}  # transformers refuses files without it
    require_strings(words)
    for key in integrity.OURS:  # those of a file that this metadata was loaded from
        words.pop(key, None)
    if save is not None:
        words[integrity.SAVE] = save
    if checksums and tensors:
        words[integrity.KEY] = integrity.placeholder(len(tensors))
    header = build(tensors, words)
    return SafetensorsPlan(header, [_without_grad(tensors[name]) for name in header.entries], checksums, recycle)


def _without_grad(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach() if tensor.requires_grad else tensor


def load(path: str, into: Mapping[str, Any] | torch.nn.Module | None, request: Request) -> dict[str, torch.Tensor]:
    """Loads the tensors by name, in the file's order."""
    return read(path, None if into is None else Targets(into), request)


def read(path: str, targets: Targets | None, request: Request) -> dict[str, torch.Tensor]:
    """Loads one file of a checkpoint that may have several."""
    device = _one_device(request.map_location)
    with opened(path) as fd, contextlib.ExitStack() as stack:
        text, size = layout.read_text(fd, path)
        ahead = None
        if targets is None and request.keys is None and not request.mmap and device.type == "cpu":
            ahead = new_tensors.ahead(request.handle, fd, 8 + len(text), size)
            if ahead is not None:
                stack.push(ahead.end)
        header = layout.decode(text, size, path)
        if request.part is not None:
            request.part.require(path, header.metadata, request.verify)
        entries = {name: header.entries[name] for name in request.chosen(header.entries, path, targets)}
        expected = _expected(header, path) if request.verify else {}
        wanted = _wanted(entries, path)
        if targets is not None:
            described = {name: kind for name, (_, _, kind) in zip(entries, wanted, strict=True)}
            tensors = targets.take(path, described, request)
            places = [(entries[name].start, tensor) for name, tensor in tensors.items()]
            pieces.read_into(request.handle, fd, places)
        elif device.type == "meta":
            tensors = {
                name: torch.empty(shape, dtype=dtype, device=device)
                for name, (_, _, (dtype, shape)) in zip(entries, wanted, strict=True)
            }
        else:
            found = new_tensors.read(request.handle, fd, wanted, device, request.mmap, ahead)
            tensors = dict(zip(entries, found, strict=True))
    if request.verify and device.type != "meta":
        integrity.check(path, expected, tensors)
    return tensors


def kinds(path: str, request: Request) -> dict[str, Kind]:
    """Returns the dtypes and shapes that ``read`` will find, as far as they are known without reading data."""
    with opened(path) as fd:
        header = layout.read(fd, path)
    if request.part is not None:
        request.part.require(path, header.metadata, request.verify)
    entries = {name: header.entries[name] for name in request.chosen(header.entries, path)}
    return {name: kind for name, (_, _, kind) in zip(entries, _wanted(entries, path), strict=True)}


@collector.paused()
def _wanted(entries: Mapping[str, layout.TensorEntry], path: str) -> list[Wanted]:
    """Returns the dtypes and shapes of the entries in torch."""
    names = {(dtype, shape): name for name, (dtype, shape, _, _) in entries.items()}  # few, even for many tensors
    kinds = {kind: entries[name].in_torch(path, name) for kind, name in names.items()}
    return [(start, end, kinds[dtype, shape]) for dtype, shape, start, end in entries.values()]


def _one_device(map_location: Any) -> torch.device:
    """Returns the device. Raises TypeError for a mapping of devices, as the format knows none."""
    if map_location is None:
        return torch.device("cpu")
    if isinstance(map_location, str | torch.device):
        return torch.device(map_location)
    raise TypeError(f"map_location of safetensors files must be a device, not {type(map_location).__name__}")


def _expected(header: layout.Header, path: str) -> dict[str, int]:
    found = integrity.recorded(header, path)
    if found is None and header.entries:
        raise ValueError(f"{path} has no checksums to verify: it was saved by another program, or with checksums=False")
    if integrity.differs(header.text, header.metadata):
        raise ChecksumError(path, [integrity.HEADER])
    return found or {}


def contents(path: str, part: integrity.ShardEntry | None = None) -> Contents:
    """Returns what the file holds, with its checksums. ``part``: what an index says about it."""
    with opened(path) as fd:
        header = layout.read(fd, path)
    expected = integrity.recorded(header, path) or {}
    items = [
        Item(
            name, entry.dtype, entry.shape, path, entry.start, entry.end,
            (pieces.CHECKSUM, expected[name]) if name in expected else None,
        )
        for name, entry in header.entries.items()
    ]  # fmt: skip
    metadata = {key: text for key, text in header.metadata.items() if key not in integrity.OURS}
    wrong = {integrity.HEADER} if integrity.differs(header.text, header.metadata) else set()
    if part is not None and (found := part.wrong(path, header.metadata)):
        wrong.add(found)
    return Contents("safetensors", items, metadata, sorted(wrong))
