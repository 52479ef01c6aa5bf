"""What ``load`` is asked for."""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from nvme_ops.checkpoint.integrity import Part
from nvme_ops.errors import MissingTensorError
from nvme_ops.handle import aio_handle


@dataclass(frozen=True)
class Request:
    """The arguments of ``load`` that every file of a checkpoint is read with."""

    handle: aio_handle
    map_location: Any = None
    keys: tuple[str, ...] | None = None
    verify: bool = False
    mmap: bool = False
    strict: bool = True  # whether names that one side lacks are an error
    part: Part | None = None  # of a checkpoint in several files: what its index says of this one

    def chosen(self, known: Iterable[str], path: str, targets: Container[str] | None = None) -> list[str]:
        """Those of the ``known`` names that are asked for, in their order. Raises KeyError for others in ``keys``.

        Where the request is not ``strict``: those of them that are among ``targets``, if any are given.
        """
        names = list(known)
        if not self.strict and targets is not None:
            names = [name for name in names if name in targets]
        if self.keys is None:
            return names
        there, wanted = set(names), set(self.keys)
        if self.strict and (missing := [key for key in self.keys if key not in there]):
            raise lacking(path, missing)
        return [name for name in names if name in wanted]


def lacking(path: str, names: Sequence[str], why: str = "") -> MissingTensorError:
    """Makes the error to raise where the file has no tensors of these names."""
    shown = ", ".join(map(repr, names[:5])) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
    return MissingTensorError(f"{path} has no tensor {shown}{why}")
