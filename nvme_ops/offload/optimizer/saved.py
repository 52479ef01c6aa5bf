"""The states of an optimizer in other forms: torch's ``state_dict``, and a single file.

The file is a safetensors file with the chunks as they are on storage, and shares their blocks if the file system can.
The tensor ``chunk.N`` has the bytes of a chunk, aligned to pages; the metadata's entry ``nvme_ops.optimizer`` is the
JSON that the optimizer commits with a step.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import struct
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch

from nvme_ops.base.errors import FormatError
from nvme_ops.base.settings import PAGE
from nvme_ops.base.text import parse_json
from nvme_ops.filesystem.files import allocate, sync_above, write_whole
from nvme_ops.filesystem.publication import opened, replacing
from nvme_ops.formats import safetensors_format
from nvme_ops.io.future import IoFuture
from nvme_ops.io.handle import aio_handle
from nvme_ops.offload.optimizer.chunks import (
    MASTER,
    Chunk,
    MemoryLayout,
    Region,
    Slice,
    Version,
    cloned,
    local,
    sharded,
)
from nvme_ops.offload.optimizer.records import required
from nvme_ops.offload.optimizer.states import States

_METADATA = "nvme_ops.optimizer"


def to_state_dict(states: States, handle: aio_handle) -> dict[torch.Tensor, dict[str, Any]]:
    """Returns the states of each parameter; the tensors are mapped from a file without a name."""
    size, places = 0, dict[tuple[torch.Tensor, str], tuple[int, Region]]()
    layouts: dict[torch.Tensor, MemoryLayout] = {}
    found: dict[torch.Tensor, dict[str, Any]] = {}
    for chunk in states.chunks:
        for each, scalars in states.current[chunk].scalars.items():
            if each.parameter in found:
                continue
            names = chunk.state_names(scalars)
            if not names:
                continue
            found[each.parameter] = {name: cloned(scalars[name]) for name in names if name in scalars}
            for region in (region for region in chunk.regions if region.name in names):
                if each.layout.shape.numel():
                    places[each.parameter, region.name] = size, region
                    layouts[each.parameter] = each.layout
                    size += -(-each.layout.shape.numel() * region.dtype.itemsize // PAGE) * PAGE
                else:  # nothing can be mapped
                    empty = torch.empty_strided(*each.layout, dtype=region.dtype)
                    found[each.parameter][region.name] = sharded(empty, each.parameter)
    if not size:
        return found
    fd = states.unnamed_file(size)
    try:

        def write(chunk: Chunk, buffer: torch.Tensor) -> IoFuture | None:
            views, tensors, offsets = chunk.views(buffer), [], []
            for each in states.current[chunk].scalars:
                for name, view in views.items():
                    if (each.parameter, name) in places:
                        tensors.append(view[each.place])
                        offsets.append(places[each.parameter, name][0] + each.begin * view.itemsize)
            return handle.submit_pwritev(tensors, fd, offsets) if tensors else None

        states.copy_out(states.chunks, write)
        memory = mmap.mmap(fd, size, access=mmap.ACCESS_COPY)
    finally:
        os.close(fd)
    for (parameter, name), (place, region) in places.items():
        layout = layouts[parameter]
        elements = torch.frombuffer(memory, dtype=region.dtype, count=layout.shape.numel(), offset=place)
        found[parameter][name] = sharded(elements.as_strided(*layout), parameter)
    return found


def from_state_dict(
    states: States,
    saved_of: Callable[[torch.Tensor], dict[str, Any] | None],
    groups: Sequence[Mapping[str, Any]] | None,
    needed: Callable[[Chunk], Collection[str]],
    chunks: Sequence[Chunk] | None = None,
) -> dict[Chunk, Version]:
    """Writes the states of all parameters beside the current ones, and returns the versions to commit.

    Args:
        states: has the chunks.
        saved_of: returns the saved states of a parameter, or None.
        groups: the parameter groups, whose options and dtypes states are converted to as torch's ``load_state_dict``
            does it; None: states have to be as they are kept.
        needed: returns the names of states without which the optimizer cannot update a chunk.
        chunks: those that replace the chunks of ``states``, when these are not to stay.

    Raises:
        ValueError: states do not fit the parameters or the optimizer; nothing was written.
    """
    for chunk in states.chunks if chunks is None else chunks:
        for each in chunk.slices:
            _require(saved_of(each.parameter) or {}, chunk, each, needed(chunk), strict=groups is None)
    versions: dict[Chunk, Version] = {}
    with contextlib.closing(states.fill(lambda *_: None, versions, chunks)) as updates:
        for chunk, buffer in updates:
            for each in chunk.slices:
                saved = saved_of(each.parameter)
                if saved:
                    options = None if groups is None else groups[chunk.group]
                    chunk.scalars[each] = _fill(saved, chunk, each, buffer, options)
    return versions


def change_states(
    states: States,
    changed: Mapping[torch.Tensor, Mapping[str, Any]],
    needed: Callable[[Chunk], Collection[str]],
) -> dict[Chunk, Version] | None:
    """Writes the states that a program has given some parameters, and leaves the others as they are.

    Args:
        states: has the chunks.
        changed: the states of these parameters, perhaps none or the current ones.
        needed: returns the names of states without which the optimizer cannot update a chunk.

    Returns:
        The versions to commit, or None if nothing differs.

    Raises:
        ValueError: states do not fit the parameters or the optimizer; nothing was written.
    """
    parts = states.parts()
    chunks = list(dict.fromkeys(chunk for parameter in changed for chunk, _ in parts[parameter]))
    for parameter, saved in changed.items():
        for chunk, each in parts[parameter]:
            _require(saved, chunk, each, needed(chunk), strict=True)
    versions: dict[Chunk, Version] = {}
    with contextlib.closing(states.fill(None, versions, chunks)) as updates:
        for chunk, buffer in updates:
            before = buffer[: chunk.nbytes].clone()
            scalars = dict(chunk.scalars)
            for each in chunk.slices:
                if each.parameter in changed:
                    scalars.pop(each, None)
                    if changed[each.parameter]:
                        scalars[each] = _fill(changed[each.parameter], chunk, each, buffer, None)
            if not (_same_scalars(scalars, chunk.scalars) and torch.equal(before, buffer[: chunk.nbytes])):
                chunk.scalars = scalars
    if all(version is states.current[chunk] for chunk, version in versions.items()):
        return None
    return {**states.current, **versions}


def _same_scalars(some: Mapping[Slice, dict[str, Any]], others: Mapping[Slice, dict[str, Any]]) -> bool:
    def described(scalars: Mapping[Slice, dict[str, Any]]) -> dict[Slice, Any]:
        return {each: {name: _value(value) for name, value in found.items()} for each, found in scalars.items()}

    def _value(value: Any) -> Any:
        return (value.dtype, value.device, value.item()) if isinstance(value, torch.Tensor) else value

    return described(some) == described(others)


def without_missing(saved: Mapping[str, Any]) -> dict[str, Any]:
    """Returns saved states without those that torch.distributed.checkpoint has looked for in vain: these are {}."""
    return {name: value for name, value in saved.items() if not isinstance(value, dict) or value}


def _require(
    saved: Mapping[str, Any], chunk: Chunk, each: Slice, needed: Collection[str], strict: bool = False
) -> None:
    """Raises ValueError unless ``saved`` is empty or has states that fit the parameter.

    With ``strict`` they have to be of the dtypes in which they are kept: others would be rounded.
    """
    shape = tuple(each.parameter.shape)
    if saved:
        for name in needed:
            if saved.get(name) is None:
                raise ValueError(f"there is no {name!r} of a parameter of shape {shape}")
        for name, dtype in chunk.regions if strict else ():
            value = saved.get(name)
            if isinstance(value, torch.Tensor) and value.dtype != dtype:
                raise ValueError(
                    f"the state {name!r} of a {chunk.dtype} parameter of shape {shape} is {value.dtype} and has to be "
                    f"{dtype}: convert it, or delete the parameter's entry in optimizer.state"
                )
    for name, value in saved.items():
        if not isinstance(value, torch.Tensor):
            continue
        if name in (MASTER, *chunk.names):
            if local(value).shape != each.layout.shape:
                raise ValueError(f"{name!r} of shape {tuple(value.shape)} is for a parameter of shape {shape}")
        elif value.dim():
            raise ValueError(
                f"there is {name!r} of a parameter of shape {shape}, which this NvmeOptimizer has no room for: "
                "make it with the options of the optimizer that was saved, or leave these states out"
            )


def _fill(
    saved: Mapping[str, Any], chunk: Chunk, each: Slice, buffer: torch.Tensor, options: Mapping[str, Any] | None
) -> dict[str, Any]:
    """Copies the saved states of a slice into the buffer, and returns the scalar ones."""
    scalars = {
        name: _loaded_scalar(name, value, chunk, options)
        for name, value in saved.items()
        if name not in (MASTER, *chunk.names)
    }
    for name, view in chunk.views(buffer).items():
        if saved.get(name) is None:
            if name == MASTER:
                with contextlib.closing(chunk.borrowed([each])) as parts:
                    for _ in parts:
                        view[each.place].copy_(each.values())
            else:
                scalars[name] = None
            continue
        view[each.place].copy_(each.part_of(saved[name]))
    return scalars


def _loaded_scalar(name: str, value: Any, chunk: Chunk, options: Mapping[str, Any] | None) -> Any:
    """Returns a scalar state as torch's ``load_state_dict`` does: in the parameter's dtype, except ``step``."""
    if options is None or not isinstance(value, torch.Tensor):
        return cloned(value)
    if name == "step":
        if options.get("capturable") or options.get("fused"):
            return value.to(dtype=torch.float32, device=chunk.device, copy=True)
        return cloned(value)
    dtype = torch.float32 if chunk.has_master else chunk.dtype
    return value.to(dtype=dtype if dtype.is_floating_point else value.dtype, device=chunk.device, copy=True)


def to_file(states: States, path: str, record: dict[str, Any], durable: bool, handle: aio_handle) -> bool:
    """Writes the states to ``path``, see ``NvmeOptimizer.save_states``; returns whether blocks are shared."""
    stored = [chunk for chunk in states.chunks if states.current[chunk].slot is not None and chunk.nbytes]
    header = _header(stored, record)
    places, size = {}, len(header)
    for chunk in stored:
        places[chunk], size = size, size + chunk.nbytes
    with replacing(path, durable) as file:
        os.truncate(file.fd, size)
        shared = all(states.share(chunk, file.fd, places[chunk]) for chunk in stored)
        if not shared:
            allocate(file.fd, 0, size)

            def write(chunk: Chunk, buffer: torch.Tensor) -> IoFuture:
                return handle.submit_pwrite(buffer[: chunk.nbytes], file.fd, places[chunk])

            states.copy_out(stored, write)
        write_whole(file.fd, header)
    if durable:
        sync_above(os.path.dirname(os.path.realpath(path)))
    return shared


def _header(stored: list[Chunk], record: dict[str, Any]) -> bytes:
    described: dict[str, Any] = {"__metadata__": {_METADATA: json.dumps(record)}}
    begin = 0
    for chunk in stored:
        end = begin + chunk.nbytes
        described[f"chunk.{chunk.number}"] = {"dtype": "U8", "shape": [chunk.nbytes], "data_offsets": [begin, end]}
        begin = end
    text = json.dumps(described).encode()
    text += b" " * (-(8 + len(text)) % PAGE)
    return struct.pack("<Q", len(text)) + text


def from_file(
    states: States, path: str, chunks_for: Callable[[Any], Sequence[Chunk] | None], handle: aio_handle
) -> tuple[dict[str, Any], dict[Chunk, Version]]:
    """Writes the states in ``path`` beside the current ones; returns the file's record and the versions to commit.

    Args:
        states: has the chunks.
        path: the file.
        chunks_for: returns the chunks for states that were made for the given, or None if there are none.
        handle: reads.

    Raises:
        FormatError: ``to_file`` has not written this file, or it is damaged.
        ValueError: the states are of other parameters or another optimizer, or in chunks of another size.
    """
    with opened(path) as fd:
        header = safetensors_format.read(fd, path)
        try:
            record = required(parse_json(header.metadata[_METADATA]))
        except (LookupError, ValueError) as error:
            raise FormatError(f"{path}: no states that NvmeOptimizer.save_states has written") from error
        if (chunks := chunks_for(record["made"])) is None:
            raise ValueError(
                f"{path} has the states of other parameters, of another optimizer, or of another memory_budget"
            )
        scalars = _scalars(chunks, record, path)

        def read(chunk: Chunk, buffer: torch.Tensor) -> IoFuture | None:
            name = f"chunk.{chunk.number}"
            if (entry := header.entries.get(name)) is None:
                if not (chunk.nbytes and any(scalars[chunk].values())):
                    return None
                raise FormatError(f"{path}: {name} is missing")
            if entry.end - entry.start != chunk.nbytes:
                raise FormatError(f"{path}: {name} has {entry.end - entry.start} bytes")
            return handle.submit_pread(buffer[: chunk.nbytes], fd, entry.start)

        versions: dict[Chunk, Version] = {}
        with contextlib.closing(states.fill(read, versions, chunks)) as updates:
            for chunk, _ in updates:
                chunk.scalars.update(scalars[chunk])
    return record, versions


def _scalars(chunks: Sequence[Chunk], record: dict[str, Any], path: str) -> dict[Chunk, dict[Any, Any]]:
    """Returns the scalar states in a record, by chunk and slice. Raises FormatError if it is damaged."""
    try:
        return {chunk: chunk.scalars_in(record["chunks"][chunk.number][1]) for chunk in chunks}
    except Exception as error:  # damaged content can raise anything
        raise FormatError(f"{path}: the record of the states is damaged: {error}") from error
