"""What is saved of a module, and which of its tensors are one under several names (tied weights)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch


def tied(tensors: Mapping[str, Any]) -> dict[str, list[str]]:
    """The names of tensors that are the same memory, sorted, by each of them; of those only that have company."""
    groups: dict[tuple[Any, ...], list[str]] = {}
    for name, tensor in tensors.items():
        if isinstance(tensor, torch.Tensor) and tensor.layout == torch.strided and _bytes(tensor):
            key = (tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
            groups.setdefault(key, []).append(name)
    return {name: sorted(names) for names in groups.values() if len(names) > 1 for name in names}


def state_of(module: torch.nn.Module) -> tuple[dict[str, Any], dict[str, str]]:
    """Its state dict with one of the tied tensors each, the first by name, and those left out with the one that stays.

    As safetensors' ``save_model`` chooses them, and as it writes them into the metadata.
    """
    state: dict[str, Any] = dict(module.state_dict())
    left_out = {name: names[0] for name, names in tied(state).items() if name != names[0]}
    return {name: value for name, value in state.items() if name not in left_out}, left_out


def covered(tensors: Mapping[str, Any], names: Iterable[str]) -> set[str]:
    """These names, and those of tensors that are filled with them."""
    there = set(names)
    return there | {name for name, group in tied(tensors).items() if not there.isdisjoint(group)}


def _bytes(tensor: torch.Tensor) -> int:
    try:
        return tensor.untyped_storage().nbytes() and tensor.numel()
    except RuntimeError:  # of a subclass that wraps others
        return 0
