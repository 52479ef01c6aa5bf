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

from nvme_ops.errors import FormatError
from nvme_ops.formats import safetensors_format
from nvme_ops.future import IoFuture
from nvme_ops.handle import aio_handle
from nvme_ops.offload.optimizer.records import required
from nvme_ops.offload.optimizer.states import (
    MASTER,
    Chunk,
    Region,
    Slice,
    States,
    Version,
    cloned,
    flat,
    local,
    outline,
    sharded,
)
from nvme_ops.settings import PAGE
from nvme_ops.storage.files import allocate, sync_above
from nvme_ops.storage.publication import opened, replacing
from nvme_ops.text import parse_json
from nvme_ops.whole import write_whole

_METADATA = "nvme_ops.optimizer"


def to_state_dict(states: States, handle: aio_handle) -> dict[torch.Tensor, dict[str, Any]]:
    """Returns the states of each parameter; the tensors are mapped from a file without a name."""
    size, places = 0, dict[tuple[torch.Tensor, str], tuple[int, Region]]()
    found: dict[torch.Tensor, dict[str, Any]] = {}
    for chunk in states.chunks:
        for each, scalars in states.current[chunk].scalars.items():
            if each.parameter in found:
                continue
            names = chunk.state_names(scalars)
            if not names:
                continue
            found[each.parameter] = {name: cloned(scalars[name]) for name in names if name in scalars}
            values = outline(each.parameter)
            for region in (region for region in chunk.regions if region.name in names):
                if values.numel():
                    places[each.parameter, region.name] = size, region
                    size += -(-values.numel() * region.dtype.itemsize // PAGE) * PAGE
                else:  # nothing can be mapped
                    empty = torch.empty(values.shape, dtype=region.dtype)
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
        values = outline(parameter)
        elements = torch.frombuffer(memory, dtype=region.dtype, count=values.numel(), offset=place)
        found[parameter][name] = sharded(elements.as_strided(values.shape, values.stride()), parameter)
    return found


def from_state_dict(
    states: States,
    saved_of: Callable[[torch.Tensor], dict[str, Any] | None],
    groups: Sequence[Mapping[str, Any]],
    needed: Callable[[Chunk], Collection[str]],
) -> dict[Chunk, Version]:
    """Writes the states of all parameters beside the current ones, and returns the versions to commit.

    Args:
        states: has the chunks.
        saved_of: returns the saved states of a parameter, or None.
        groups: the parameter groups, with their options.
        needed: returns the names of states without which the optimizer cannot update a chunk.

    Raises:
        ValueError: states do not fit the parameters or the optimizer; nothing was written.
    """
    for chunk in states.chunks:
        for each in chunk.slices:
            _require(_found(saved_of(each.parameter)), chunk, each, needed(chunk))
    versions: dict[Chunk, Version] = {}
    with contextlib.closing(states.fill(lambda *_: None, versions)) as updates:
        for chunk, buffer in updates:
            for each in chunk.slices:
                saved = _found(saved_of(each.parameter))
                if saved:
                    chunk.scalars[each] = _fill(saved, chunk, each, buffer, groups[chunk.group])
    return versions


def _found(saved: dict[str, Any] | None) -> dict[str, Any]:
    """Returns saved states without those that torch.distributed.checkpoint has looked for in vain: these are {}."""
    return {name: value for name, value in (saved or {}).items() if not isinstance(value, dict) or value}


def _require(saved: dict[str, Any], chunk: Chunk, each: Slice, needed: Collection[str]) -> None:
    """Raises ValueError unless ``saved`` is empty or has states that fit the parameter."""
    shape = tuple(each.parameter.shape)
    if saved:
        for name in needed:
            if saved.get(name) is None:
                raise ValueError(f"the state dict has no {name!r} of a parameter of shape {shape}")
    for name, value in saved.items():
        if not isinstance(value, torch.Tensor):
            continue
        if name in (MASTER, *chunk.names):
            if local(value).shape != outline(each.parameter).shape:
                raise ValueError(f"{name!r} of shape {tuple(value.shape)} is for a parameter of shape {shape}")
        elif value.dim():
            raise ValueError(
                f"the state dict has {name!r} of a parameter of shape {shape}, which this NvmeOptimizer has no room "
                "for: make it with the options of the optimizer that was saved, or leave these states out"
            )


def _fill(
    saved: dict[str, Any], chunk: Chunk, each: Slice, buffer: torch.Tensor, options: Mapping[str, Any]
) -> dict[str, Any]:
    """Copies the saved states of a slice into the buffer, and returns the scalar ones."""
    whole = outline(each.parameter)
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
        state = local(saved[name])
        if state.stride() != whole.stride():
            state = torch.empty_like(whole, dtype=state.dtype, device=state.device).copy_(state)
        view[each.place].copy_(flat(state)[each.begin : each.end])
    return scalars


def _loaded_scalar(name: str, value: Any, chunk: Chunk, options: Mapping[str, Any]) -> Any:
    """Returns a scalar state as torch's ``load_state_dict`` does: in the parameter's dtype, except ``step``."""
    if not isinstance(value, torch.Tensor):
        return value
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


def from_file(states: States, path: str, made: Any, handle: aio_handle) -> tuple[dict[str, Any], dict[Chunk, Version]]:
    """Writes the states in ``path`` beside the current ones; returns the file's record and the versions to commit.

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
        if record["made"] != made:
            raise ValueError(
                f"{path} has the states of other parameters, of another optimizer, or of another memory_budget"
            )
        scalars = _scalars(states, record, path)

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
        with contextlib.closing(states.fill(read, versions)) as updates:
            for chunk, _ in updates:
                chunk.scalars.update(scalars[chunk])
    return record, versions


def _scalars(states: States, record: dict[str, Any], path: str) -> dict[Chunk, dict[Any, Any]]:
    """Returns the scalar states in a record, by chunk and slice. Raises FormatError if it is damaged."""
    try:
        return {chunk: chunk.scalars_in(record["chunks"][chunk.number][1]) for chunk in states.chunks}
    except Exception as error:  # damaged content can raise anything
        raise FormatError(f"{path}: the record of the states is damaged: {error}") from error
