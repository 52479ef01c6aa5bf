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
    NOTHING,
    Chunk,
    Division,
    MemoryLayout,
    Slice,
    Version,
    cloned,
    is_scalar,
    local,
    sharded,
)
from nvme_ops.offload.optimizer.records import required, scalars_to_json
from nvme_ops.offload.optimizer.state_dtypes import MASTER
from nvme_ops.offload.optimizer.states import States
from nvme_ops.storage.session import unnamed_file

_METADATA = "nvme_ops.optimizer"


def to_state_dict(states: States, handle: aio_handle) -> dict[torch.Tensor, dict[str, Any]]:
    """Returns the states of each parameter; the tensors are mapped from a file without a name."""
    size, places = 0, dict[tuple[torch.Tensor, str], tuple[int, MemoryLayout, torch.dtype]]()
    entries: dict[torch.Tensor, dict[str, Any]] = {}
    for chunk in states.division.chunks:
        for part, scalars in states.current[chunk].scalars.items():
            names = chunk.state_names(scalars)
            if part.parameter in entries or not names:
                continue
            entries[part.parameter] = {name: cloned(scalars[name]) for name in names if name in scalars}
            for name, dtype, _ in chunk.regions:
                if name not in names:
                    continue
                if elements := part.layout.shape.numel():
                    places[part.parameter, name] = size, part.layout, dtype
                    size += -(-elements * dtype.itemsize // PAGE) * PAGE
                else:  # nothing can be mapped
                    empty = torch.empty_strided(*part.layout, dtype=dtype)
                    entries[part.parameter][name] = sharded(empty, part.parameter)
    if not size:
        return entries
    fd = unnamed_file(states.session, size)
    try:

        def write(chunk: Chunk, buffer: torch.Tensor) -> IoFuture | None:
            views, tensors, offsets = chunk.views(buffer), [], []
            for part in states.current[chunk].scalars:
                chunk.expand(buffer, views, part)
                for name, view in views.items():
                    if (part.parameter, name) in places:
                        tensors.append(view[part.place])
                        offsets.append(places[part.parameter, name][0] + part.begin * view.itemsize)
            return handle.submit_pwritev(tensors, fd, offsets) if tensors else None

        states.copy_out(states.division.chunks, write)
        memory = mmap.mmap(fd, size, access=mmap.ACCESS_COPY)
    finally:
        os.close(fd)
    for (parameter, name), (place, layout, dtype) in places.items():
        mapped = torch.frombuffer(memory, dtype=dtype, count=layout.shape.numel(), offset=place)
        entries[parameter][name] = sharded(mapped.as_strided(*layout), parameter)
    return entries


def write_states(
    states: States,
    wanted: Mapping[torch.Tensor, Mapping[str, Any]],
    needed: Callable[[Chunk], Collection[str]],
    *,
    groups: Sequence[Mapping[str, Any]] | None = None,
    division: Division | None = None,
    keep: bool = False,
) -> dict[Chunk, Version] | None:
    """Writes states of parameters beside the current ones.

    Args:
        states: has the chunks.
        wanted: the states of each parameter that is to have any.
        needed: returns the names of states without which the optimizer cannot update a chunk.
        groups: the parameter groups, whose options and dtypes states are converted to as torch's ``load_state_dict``
            does it; None: states have to be as they are kept.
        division: has the chunks that replace those of ``states``, when these are not to stay.
        keep: leave states of parameters that are not in ``wanted`` as they are.

    Returns:
        The versions to commit; with ``keep``, None if nothing differs from the current states.

    Raises:
        ValueError: states do not fit the parameters or the optimizer; nothing was written.
    """
    parts, chunks = states.division.parts, (division or states.division).chunks
    if keep:
        chunks = list(dict.fromkeys(chunk for parameter in wanted for chunk, _ in parts[parameter]))
    changing = {chunk: [part for part in chunk.slices if not keep or part.parameter in wanted] for chunk in chunks}
    for chunk, slices in changing.items():
        names = needed(chunk)
        for part in slices:
            _require(wanted.get(part.parameter) or {}, chunk, part, names, strict=groups is None)
    versions = {chunk: states.current[chunk] if keep else NOTHING for chunk in changing}
    with contextlib.closing(states.fill(versions, None if keep else lambda *_: None)) as updates:
        for chunk, buffer in updates:
            before, scalars = buffer[: chunk.nbytes].clone() if keep else None, dict(versions[chunk].scalars)
            for part in changing[chunk]:
                scalars.pop(part, None)
                if saved := wanted.get(part.parameter):
                    options = None if groups is None else groups[chunk.group]
                    scalars[part] = _fill(saved, chunk, part, buffer, options)
            is_same = before is not None and torch.equal(before, buffer[: chunk.nbytes])
            if not (is_same and _in_json(scalars) == _in_json(versions[chunk].scalars)):
                versions[chunk], chunk.scalars = NOTHING, scalars
    if not keep:
        return versions
    if all(version is states.current[chunk] for chunk, version in versions.items()):
        return None
    return {**states.current, **versions}


def _in_json(scalars: Mapping[Slice, dict[str, Any]]) -> dict[Slice, Any]:
    return {part: scalars_to_json(values) for part, values in scalars.items()}


def _require(saved: Mapping[str, Any], chunk: Chunk, part: Slice, needed: Collection[str], strict: bool) -> None:
    """Raises ValueError unless ``saved`` is empty or has states that fit the parameter.

    With ``strict`` they have to be of the dtypes in which they are kept: others would be rounded.
    """
    shape = tuple(part.parameter.shape)
    if saved:
        for name in needed:
            if saved.get(name) is None:
                raise ValueError(f"there is no {name!r} of a parameter of shape {shape}")
        for name, dtype, _ in chunk.regions if strict else ():
            value = saved.get(name)
            if isinstance(value, torch.Tensor) and value.dtype != dtype:
                raise ValueError(
                    f"the state {name!r} of a {chunk.dtype} parameter of shape {shape} is {value.dtype} and has to be "
                    f"{dtype}: convert it, or delete the parameter's entry in optimizer.state"
                )
    for name, value in saved.items():
        if name in (MASTER, *chunk.names) and isinstance(value, torch.Tensor):
            if local(value).shape != part.layout.shape:
                raise ValueError(f"{name!r} of shape {tuple(value.shape)} is for a parameter of shape {shape}")
        elif not is_scalar(value):
            raise ValueError(
                f"there is {name!r} of a parameter of shape {shape}, which this NvmeOptimizer has no room for: "
                "make it with the options of the optimizer that was saved, or leave these states out"
            )


def _fill(
    saved: Mapping[str, Any], chunk: Chunk, part: Slice, buffer: torch.Tensor, options: Mapping[str, Any] | None
) -> dict[str, Any]:
    """Copies the saved states of a slice into the buffer, and returns the scalar ones."""
    scalars = {
        name: _loaded_scalar(name, value, chunk, options)
        for name, value in saved.items()
        if name not in (MASTER, *chunk.names)
    }
    views = chunk.views(buffer)
    for name, view in views.items():
        if saved.get(name) is None:
            if name == MASTER:
                with contextlib.closing(chunk.borrowed([part])) as parts:
                    for _ in parts:
                        view[part.place].copy_(part.values())
            else:
                scalars[name] = None
            continue
        view[part.place].copy_(part.part_of(saved[name]))
    chunk.pack(buffer, views, part, scalars)
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


def to_file(states: States, path: str, durable: bool, handle: aio_handle) -> bool:
    """Writes the states to ``path``, see ``NvmeOptimizer.save_states``; returns whether blocks are shared."""
    stored = [chunk for chunk, version in states.current.items() if version.slot is not None and chunk.nbytes]
    record = states.record(states.stats.steps, states.current, states.division)
    described: dict[str, Any] = {"__metadata__": {_METADATA: json.dumps(record)}}
    offsets, size = {}, 0
    for chunk in stored:
        offsets[chunk], size = size, size + chunk.nbytes
        entry = {"dtype": "U8", "shape": [chunk.nbytes], "data_offsets": [offsets[chunk], size]}
        described[f"chunk.{chunk.number}"] = entry
    text = json.dumps(described).encode()
    text += b" " * (-(8 + len(text)) % PAGE)
    begin = 8 + len(text)
    with replacing(path, durable) as file:
        os.truncate(file.fd, begin + size)
        shared = all(states.share(chunk, file.fd, begin + offset) for chunk, offset in offsets.items())
        if not shared:
            allocate(file.fd, 0, begin + size)

            def write(chunk: Chunk, buffer: torch.Tensor) -> IoFuture:
                return handle.submit_pwrite(buffer[: chunk.nbytes], file.fd, begin + offsets[chunk])

            states.copy_out(stored, write)
        write_whole(file.fd, struct.pack("<Q", len(text)) + text)
    if durable:
        sync_above(os.path.dirname(os.path.realpath(path)))
    return shared


def from_file(
    states: States, path: str, division_for: Callable[[Any], Division | None], handle: aio_handle
) -> tuple[int, dict[Chunk, Version], Division]:
    """Writes the states in ``path`` beside the current ones; returns their steps, and versions and chunks to commit.

    Args:
        states: has the chunks.
        path: the file.
        division_for: returns the chunks for states that were made for the given, or None if there are none.
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
        if (division := division_for(record["made"])) is None:
            raise ValueError(f"{path} has the states of other parameters, of another optimizer, or of another budget")
        try:
            described = record["chunks"]
            scalars = {chunk: chunk.scalars_in(described[chunk.number][1]) for chunk in division.chunks}
        except Exception as error:  # damaged content can raise anything
            raise FormatError(f"{path}: the record of the states is damaged: {error}") from error

        def read(chunk: Chunk, buffer: torch.Tensor) -> IoFuture | None:
            name = f"chunk.{chunk.number}"
            if (entry := header.entries.get(name)) is None:
                if not (chunk.nbytes and any(scalars[chunk].values())):
                    return None
                raise FormatError(f"{path}: {name} is missing")
            if entry.end - entry.start != chunk.nbytes:
                raise FormatError(f"{path}: {name} has {entry.end - entry.start} bytes")
            return handle.submit_pread(buffer[: chunk.nbytes], fd, entry.start)

        versions = dict.fromkeys(division.chunks, NOTHING)
        with contextlib.closing(states.fill(versions, read)) as updates:
            for chunk, _ in updates:
                chunk.scalars.update(scalars[chunk])
    return record["steps"], versions, division
