"""What is saved of a module, and which of its tensors have several names (tied weights)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch


def tied(tensors: Mapping[str, Any]) -> dict[str, list[str]]:
    """Returns, for each name of a tensor with several names, all of its names, sorted."""
    groups: dict[tuple[Any, ...], list[str]] = {}
    for name, tensor in tensors.items():
        if isinstance(tensor, torch.Tensor) and tensor.layout == torch.strided and _bytes(tensor):
            key = (tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
            groups.setdefault(key, []).append(name)
    return {name: sorted(names) for names in groups.values() if len(names) > 1 for name in names}


def state_of(module: torch.nn.Module) -> tuple[dict[str, Any], dict[str, str]]:
    """Returns the state dict with each tied tensor under its first name, and the other names with that one.

    Chosen as in safetensors' ``save_model``, which writes them into the metadata in the same way.
    """
    state: dict[str, Any] = dict(module.state_dict())
    left_out = {name: names[0] for name, names in tied(state).items() if name != names[0]}
    return {name: value for name, value in state.items() if name not in left_out}, left_out


def covered(tensors: Mapping[str, Any], names: Iterable[str]) -> set[str]:
    """Returns these names and all other names of the same tensors."""
    there = set(names)
    return there | {name for name, group in tied(tensors).items() if not there.isdisjoint(group)}


def _bytes(tensor: torch.Tensor) -> int:
    try:
        return tensor.untyped_storage().nbytes() and tensor.numel()
    except RuntimeError:  # a subclass that wraps other tensors
        return 0
