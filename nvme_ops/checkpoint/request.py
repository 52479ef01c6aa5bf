"""What ``save`` and ``load`` are asked for, and what a format does.

A save is planned first: everything is decided before anything is written.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from nvme_ops.base.errors import MissingTensorError
from nvme_ops.checkpoint.modules import covered, require_writable, state_to_fill
from nvme_ops.filesystem.publication import OpenFiles
from nvme_ops.formats.contents import Contents
from nvme_ops.formats.integrity import ShardEntry
from nvme_ops.io.handle import aio_handle
from nvme_ops.io.tensors import Kind
from nvme_ops.memory.pieces import BorrowedTensors


class Plan(Protocol):
    """An object laid out in a format: everything except the bytes of its tensors.

    ``tensors`` are read when the plan is written; to change them before that, replace them here by copies.
    """

    tensors: list[torch.Tensor]

    def target(self, path: str) -> str:
        """Returns the file that is replaced when the plan is written to ``path``: for one file, that path."""
        return path

    def write(self, path: str, handle: aio_handle, borrowed: BorrowedTensors | None = None) -> None:
        """Writes everything, atomically. ``borrowed``: tensors to be read first."""


@dataclass(frozen=True)
class SaveOptions:
    """The arguments of ``save`` that a format heeds."""

    durable: bool = True
    checksums: bool = True
    metadata: Mapping[str, str] | None = None
    max_shard_size: int | str | None = None
    recycle: bool = False


class Format(Protocol):
    """A module that has these functions. Raises FormatError for what is damaged or of another format."""

    def plan(self, obj: Any, options: SaveOptions, /) -> Plan:
        """Plans a checkpoint of ``obj``. Raises TypeError and ValueError for what the format cannot store."""

    def load(self, path: str, into: Mapping[str, Any] | torch.nn.Module | None, request: Request, /) -> Any:
        """Loads the tensors by name; for a ``.pt`` file without ``into`` and names the object that was saved."""

    def contents(self, path: str, files: OpenFiles, /) -> Contents:
        """Lists what the checkpoint contains."""


class FileFormat(Format, Protocol):
    """The format of one file, which may be a shard."""

    def contents(self, path: str, files: OpenFiles, part: ShardEntry | None = None, /) -> Contents:
        """Lists what the file contains; ``part`` is what its index says about it."""

    def kinds(self, path: str, request: Request, /) -> dict[str, Kind]:
        """Returns the dtypes and shapes of the tensors that ``read`` would return, if known without reading data."""

    def read(self, path: str, targets: Targets | None, request: Request, /) -> dict[str, torch.Tensor]:
        """Loads one file of a checkpoint that may have several; returns the tensors by name."""


@dataclass(frozen=True)
class Request:
    """The arguments of ``load`` that apply to every file of a checkpoint."""

    handle: aio_handle
    map_location: Any = None
    keys: tuple[str, ...] | None = None
    verify: bool = False
    mmap: bool = False
    strict: bool = True  # names that only one side has are an error
    part: ShardEntry | None = None  # what the index of a sharded checkpoint says about this file

    def chosen(self, known: Iterable[str], path: str, targets: Container[str] | None = None) -> list[str]:
        """Returns the names in ``known`` that are requested, in their order.

        Raises KeyError for other names in ``keys``; if the request is not ``strict``, ignores them, and also names
        that ``targets``, if given, lacks.
        """
        names = list(known)
        if not self.strict and targets is not None:
            names = [name for name in names if name in targets]
        if self.keys is None:
            return names
        present, wanted = set(names), set(self.keys)
        if self.strict and (missing := [key for key in self.keys if key not in present]):
            raise missing_error(path, missing)
        return [name for name in names if name in wanted]


def missing_error(path: str, names: Sequence[str], why: str = "") -> MissingTensorError:
    """Returns the error for tensors that the file at ``path`` lacks. ``why`` ends the message."""
    return MissingTensorError(f"{path} has no tensor {listed(names)}{why}")


def entries_error(path: str, others: Iterable[object], inner: Sequence[object]) -> ValueError:
    """Returns the error for ``others``, entries that are no tensors; those of ``inner`` have tensors by name."""
    what = f"; --key takes the tensors of one entry: {listed(inner)}" if inner else ""
    return ValueError(f"{path} has more than tensors by name: {listed(others)}{what}")


def listed(names: Iterable[object]) -> str:
    """Returns the first five names and the number of others, for a message."""
    shown = [repr(name) for name in names]
    return ", ".join(shown[:5]) + (f" and {len(shown) - 5} more" if len(shown) > 5 else "")


class Targets:
    """Holds the tensors to be filled, by name. None is filled before everything requested is known to fit."""

    def __init__(self, into: Mapping[str, Any] | torch.nn.Module) -> None:
        """Takes a state dict or a module. Raises ValueError for tensors on storage that cannot be changed."""
        state = state_to_fill(into) if isinstance(into, torch.nn.Module) else into
        self._tensors = {name: value for name, value in state.items() if isinstance(value, torch.Tensor)}
        for name, tensor in self._tensors.items():
            require_writable(name, tensor)

    def require(self, path: str, names: Iterable[str], request: Request) -> None:
        """Raises KeyError unless every name has a tensor and, without ``keys``, every tensor one of the names.

        For tied weights one of their names is enough. Does nothing if the request is not strict.
        """
        if not request.strict:
            return
        present = set(names)
        if unmatched := sorted(present - self._tensors.keys()):
            raise MissingTensorError(
                f"{path}: tensor {unmatched[0]!r} has no counterpart in into=; name those to load with keys=, or "
                "ignore what the other side lacks with strict=False"
            )
        if request.keys is None and (missing := sorted(self._tensors.keys() - covered(self._tensors, present))):
            raise missing_error(path, missing, ", which into= asks for")

    def __contains__(self, name: object) -> bool:
        return name in self._tensors

    def take(self, path: str, described: Mapping[str, Kind], request: Request) -> dict[str, torch.Tensor]:
        """Returns the tensors to be filled with those in the file at ``path`` that ``described`` lists.

        Raises:
            KeyError: as in ``require``.
            ValueError: as in ``require_fit``.
        """
        self.require(path, described, request)
        self.require_fit(path, described)
        return {name: self._tensors[name].detach() for name in described}

    def require_fit(self, path: str, described: Mapping[str, Kind]) -> None:
        """Raises ValueError unless the tensors of these names are dense and have these dtypes and shapes."""
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
