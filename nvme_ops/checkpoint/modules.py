"""Finds the tensors of a module that are saved or filled, and those with several names (tied weights)."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from nvme_ops.lazy.offloaded import OffloadedTensor, offloaded_in


def tied(tensors: Mapping[str, Any]) -> dict[str, list[str]]:
    """Returns, for each name of a tensor with several names, all of its names, sorted."""
    groups: dict[tuple[Any, ...], list[str]] = {}
    for name, tensor in tensors.items():
        if isinstance(tensor, torch.Tensor) and is_strided(tensor) and tensor.numel():
            key = (tensor.device, _place(tensor), tensor.dtype, tensor.shape, tensor.stride())
            groups.setdefault(key, []).append(name)
    return {name: sorted(names) for names in groups.values() if len(names) > 1 for name in names}


def is_strided(tensor: torch.Tensor) -> bool:
    """Returns whether a tensor has one shape and its strides: a nested one has neither, whatever its layout says."""
    return tensor.layout == torch.strided and not tensor.is_nested


def with_ties(tensors: Mapping[str, Any], metadata: Mapping[str, str]) -> tuple[dict[str, Any], dict[str, str]]:
    """Reverses ``without_ties``: returns the tensors under all their names, and the rest of the metadata."""
    names = {name: first for name, first in metadata.items() if name not in tensors and first in tensors}
    names.pop("format", None)  # which every file has
    rest = {name: text for name, text in metadata.items() if name not in names}
    return {**tensors, **{name: tensors[first] for name, first in names.items()}}, rest


def without_ties(state: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """Returns the state with tied tensors only under their first name, and a map of the other names to that one.

    safetensors' ``save_model`` chooses the same names and writes the same map into the metadata.
    """
    left_out = {name: names[0] for name, names in tied(state).items() if name != names[0]}
    return {name: value for name, value in state.items() if name not in left_out}, left_out


def covered(tensors: Mapping[str, Any], names: Iterable[str]) -> set[str]:
    """Returns these names and all other names of the same tensors."""
    given = set(names)
    return given | {name for name, group in tied(tensors).items() if not given.isdisjoint(group)}


def state_to_fill(module: torch.nn.Module) -> dict[str, Any]:
    """Returns the state dict, to be filled. Raises ValueError if filling it would not change the module."""
    for name, tensor in itertools.chain(module.named_parameters(), module.named_buffers()):
        require_writable(name, tensor)
    return dict(module.state_dict())


def require_writable(name: str, tensor: torch.Tensor) -> None:
    """Raises ValueError for a tensor on storage that cannot be changed."""
    offloaded = offloaded_in(tensor)
    if offloaded is not None and not offloaded.writable:
        raise ValueError(
            f"tensor {name!r} cannot be filled: its values are streamed from storage; load into the model before it is "
            "streamed, or create another one from the other file"
        )


def _place(tensor: torch.Tensor) -> Any:
    """Returns a key that is the same for tensors whose values lie in the same place, and for no others."""
    if isinstance(tensor, OffloadedTensor):
        return tensor.place
    if is_traceable_wrapper_subclass(tensor):
        names, context = tensor.__tensor_flatten__()
        inner = [value for name in names if isinstance(value := getattr(tensor, name), torch.Tensor)]
        return type(tensor), repr(context), *((_place(part), part.dtype, part.shape, part.stride()) for part in inner)
    try:
        return tensor.data_ptr() or (tensor.untyped_storage()._cdata, tensor.storage_offset())
    except RuntimeError:  # a subclass that has no storage
        return id(tensor)
