"""The states of an optimizer as torch's ``state_dict`` has them, to and from storage."""

from __future__ import annotations

import contextlib
import mmap
import os
from collections.abc import Callable
from typing import Any

import torch

from nvme_ops.future import IoFuture
from nvme_ops.handle import aio_handle
from nvme_ops.offload.chunks import MASTER, Chunk, Region, Slice, flat, local, outline, sharded
from nvme_ops.offload.states import States
from nvme_ops.settings import PAGE


def own(value: Any) -> Any:
    """Returns a copy of a scalar state, which the optimizer may change in place."""
    return value.clone() if isinstance(value, torch.Tensor) else value


def exported(states: States, handle: aio_handle) -> dict[torch.Tensor, dict[str, Any]]:
    """Returns the states of each parameter, written to a file without a name and mapped."""
    size, places = 0, dict[tuple[torch.Tensor, str], tuple[int, Region]]()
    found: dict[torch.Tensor, dict[str, Any]] = {}
    for chunk in states.chunks:
        for each in chunk.slices:
            if each.scalars is None or each.parameter in found or not (each.scalars or chunk.regions):
                continue
            found[each.parameter] = {name: own(value) for name, value in each.scalars.items()}
            for region in chunk.regions:
                places[each.parameter, region.name] = size, region
                size += -(-outline(each.parameter).numel() * region.dtype.itemsize // PAGE) * PAGE
    if not size:
        return found
    fd = states.nameless(size)
    try:

        def write(chunk: Chunk, buffer: torch.Tensor) -> IoFuture | None:
            views, tensors, offsets = chunk.views(buffer), [], []
            for each in chunk.slices:
                for name, view in views.items():
                    if each.scalars is not None:
                        tensors.append(view[each.place])
                        offsets.append(places[each.parameter, name][0] + each.begin * view.itemsize)
            return handle.submit_pwritev(tensors, fd, offsets) if tensors else None

        with contextlib.closing(states.look(states.chunks, write)) as chunks:
            for _ in chunks:
                pass
        memory = mmap.mmap(fd, size, access=mmap.ACCESS_COPY)
    finally:
        os.close(fd)
    for (parameter, name), (place, region) in places.items():
        values = outline(parameter)
        elements = torch.frombuffer(memory, dtype=region.dtype, count=values.numel(), offset=place)
        found[parameter][name] = sharded(elements.as_strided(values.shape, values.stride()), parameter)
    return found


def load_states(states: States, saved_of: Callable[[torch.Tensor], dict[str, Any] | None]) -> None:
    """Replaces the states of all parameters, without a commit. ``saved_of`` returns those of one, or None.

    Raises ValueError before anything is changed.
    """
    for chunk in states.chunks:
        for each in chunk.slices:
            _require(saved_of(each.parameter) or {}, chunk, each)
    with contextlib.closing(states.update(map(_emptied, states.chunks))) as updates:
        for chunk, buffer in updates:
            with contextlib.closing(chunk.borrowed()) as parts:
                for each in (each for slices in parts for each in slices):
                    _load(saved_of(each.parameter), chunk, each, buffer)


def _emptied(chunk: Chunk) -> Chunk:
    """Returns the chunk, of which nothing is to be read."""
    chunk.slot = None
    return chunk


def _require(saved: dict[str, Any], chunk: Chunk, each: Slice) -> None:
    """Raises ValueError unless ``saved`` is empty or has the states of the parameter."""
    for name, _ in chunk.regions if saved else ():
        shape = tuple(each.parameter.shape)
        if name not in saved and name != MASTER:
            raise ValueError(f"the state dict has no {name!r} of a parameter of shape {shape}")
        if name in saved and local(saved[name]).shape != outline(each.parameter).shape:
            raise ValueError(f"{name!r} of shape {tuple(saved[name].shape)} is for a parameter of shape {shape}")


def _load(saved: dict[str, Any] | None, chunk: Chunk, each: Slice, buffer: torch.Tensor) -> None:
    """Fills the states of a slice in the buffer; they become its own when they are written."""
    if saved is None:
        each.scalars = None
        return
    whole = outline(each.parameter)
    values = each.values()
    chunk.backup(buffer)[each.place].copy_(values)
    chunk.updated.append(each)
    names = {region.name for region in chunk.regions}
    each.pending = {name: own(value) for name, value in saved.items() if name not in names}
    for name, view in chunk.views(buffer).items():
        state = local(saved[name]) if name in saved else None
        if state is None:
            view[each.place].copy_(values)
            continue
        if state.stride() != whole.stride():
            state = torch.empty_like(whole, dtype=state.dtype).copy_(state)
        view[each.place].copy_(flat(state)[each.begin : each.end])
