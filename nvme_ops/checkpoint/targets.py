"""The existing tensors that ``load(into=...)`` fills: those of a state dict or a module."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from nvme_ops.checkpoint.modules import covered, require_writable, state_to_fill
from nvme_ops.checkpoint.request import Request, lacking
from nvme_ops.errors import MissingTensorError


class Targets:
    """Tensors by name to be filled. Nothing is filled before everything requested is known to fit."""

    def __init__(self, into: Mapping[str, Any] | torch.nn.Module) -> None:
        """Takes a state dict or a module. Raises ValueError for tensors on storage that cannot be changed."""
        found = state_to_fill(into) if isinstance(into, torch.nn.Module) else into
        self._tensors = {name: value for name, value in found.items() if isinstance(value, torch.Tensor)}
        for name, each in self._tensors.items():
            require_writable(name, each)

    def require(self, path: str, names: Iterable[str], request: Request) -> None:
        """Raises KeyError unless each name has a tensor and, without ``keys``, each tensor a name.

        For tied weights one of their names is enough. Does nothing if the request is not strict.
        """
        if not request.strict:
            return
        there = set(names)
        if strange := sorted(there - self._tensors.keys()):
            raise MissingTensorError(
                f"{path}: tensor {strange[0]!r} has no counterpart in into=; name those to load with keys=, or "
                "pass over what the other side lacks with strict=False"
            )
        if request.keys is None and (missing := sorted(self._tensors.keys() - covered(self._tensors, there))):
            raise lacking(path, missing, ", which into= asks for")

    def __contains__(self, name: object) -> bool:
        return name in self._tensors

    def take(
        self, path: str, described: Mapping[str, tuple[torch.dtype, tuple[int, ...]]], request: Request
    ) -> dict[str, torch.Tensor]:
        """Returns the tensors to fill with those ``described``, which the file at ``path`` has.

        Raises:
            KeyError: as ``require``.
            ValueError: shape or dtype differ.
        """
        self.require(path, described, request)
        self.require_fit(path, described)
        return {name: self._tensors[name].detach() for name in described}

    def require_fit(self, path: str, described: Mapping[str, tuple[torch.dtype, tuple[int, ...]]]) -> None:
        """Raises ValueError unless the tensors of these names have these dtypes and shapes."""
        for name, (dtype, shape) in described.items():
            tensor = self._tensors[name]
            if tensor.is_meta or tensor.layout != torch.strided:
                raise ValueError(
                    f"{path}: tensor {name!r} has no dense memory to fill: {tensor.layout}, {tensor.device}"
                )
            if any(stride == 0 and size > 1 for size, stride in zip(tensor.shape, tensor.stride(), strict=True)):
                raise ValueError(f"{path}: tensor {name!r} cannot be filled: it is expanded, its elements share memory")
            if tuple(tensor.shape) != tuple(shape) or tensor.dtype != dtype:
                raise ValueError(
                    f"{path}: tensor {name!r} is {dtype} of shape {tuple(shape)}, and the one to fill is "
                    f"{tensor.dtype} of shape {tuple(tensor.shape)}"
                )
