"""The states of an optimizer as torch's ``state_dict`` has them, to and from storage."""

from __future__ import annotations

import contextlib
import mmap
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch

from nvme_ops.future import IoFuture
from nvme_ops.handle import aio_handle
from nvme_ops.offload.optimizer.chunks import MASTER, Chunk, Region, Slice, Version, flat, local, outline, sharded
from nvme_ops.offload.optimizer.states import States
from nvme_ops.settings import PAGE


def own(value: Any) -> Any:
    """Returns a copy of a scalar state, which the optimizer may change in place."""
    return value.clone() if isinstance(value, torch.Tensor) else value


def exported(states: States, handle: aio_handle) -> dict[torch.Tensor, dict[str, Any]]:
    """Returns the states of each parameter, written to a file without a name and mapped."""
    size, places = 0, dict[tuple[torch.Tensor, str], tuple[int, Region]]()
    found: dict[torch.Tensor, dict[str, Any]] = {}
    for chunk in states.chunks:
        for each, scalars in states.now[chunk].scalars.items():
            if each.parameter in found:
                continue
            there = [region for region in chunk.regions if scalars.get(region.name, region) is not None]
            kept = {name: own(value) for name, value in scalars.items() if name not in chunk.names}
            if not (there or kept):
                continue
            found[each.parameter] = kept
            for region in there:
                places[each.parameter, region.name] = size, region
                size += -(-outline(each.parameter).numel() * region.dtype.itemsize // PAGE) * PAGE
    if not size:
        return found
    fd = states.nameless(size)
    try:

        def write(chunk: Chunk, buffer: torch.Tensor) -> IoFuture | None:
            views, tensors, offsets = chunk.views(buffer), [], []
            for each in states.now[chunk].scalars:
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


def load_states(
    states: States,
    saved_of: Callable[[torch.Tensor], dict[str, Any] | None],
    groups: Sequence[Mapping[str, Any]],
    needed: Callable[[Chunk], Collection[str]],
) -> dict[Chunk, Version]:
    """Writes the states of all parameters beside those of now, and returns what to commit.

    Args:
        states: has the chunks.
        saved_of: returns the states of one parameter, or None.
        groups: of parameters, with their options.
        needed: returns the names of states without which the optimizer cannot update a chunk.

    Raises ValueError before anything is written.
    """
    for chunk in states.chunks:
        for each in chunk.slices:
            _require(saved_of(each.parameter) or {}, chunk, each, needed(chunk))
    versions: dict[Chunk, Version] = {}
    with contextlib.closing(states.fill(lambda *_: None, versions)) as updates:
        for chunk, buffer in updates:
            for each in chunk.slices:
                saved = saved_of(each.parameter)
                if saved is not None:
                    chunk.scalars[each] = _load(saved, chunk, each, buffer, groups[chunk.group])
    return versions


def _require(saved: dict[str, Any], chunk: Chunk, each: Slice, needed: Collection[str]) -> None:
    """Raises ValueError unless ``saved`` is empty or has the states of the parameter."""
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


def _load(
    saved: dict[str, Any], chunk: Chunk, each: Slice, buffer: torch.Tensor, options: Mapping[str, Any]
) -> dict[str, Any]:
    """Fills the states of a slice in the buffer, and returns its scalar ones."""
    whole = outline(each.parameter)
    scalars = {
        name: _as_loaded(name, value, chunk, options)
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


def _as_loaded(name: str, value: Any, chunk: Chunk, options: Mapping[str, Any]) -> Any:
    """Returns a scalar state as torch's ``load_state_dict`` has it: in the parameter's dtype, but for its steps."""
    if not isinstance(value, torch.Tensor):
        return value
    if name == "step":
        if options.get("capturable") or options.get("fused"):
            return value.to(dtype=torch.float32, device=chunk.device, copy=True)
        return own(value)
    dtype = torch.float32 if chunk.has_master else chunk.dtype
    return value.to(dtype=dtype if dtype.is_floating_point else value.dtype, device=chunk.device, copy=True)
