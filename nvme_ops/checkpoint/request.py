"""The arguments of ``load``."""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from nvme_ops.errors import MissingTensorError
from nvme_ops.formats.integrity import ShardEntry
from nvme_ops.handle import aio_handle


@dataclass(frozen=True)
class Request:
    """The arguments of ``load`` that apply to every file of a checkpoint."""

    handle: aio_handle
    map_location: Any = None
    keys: tuple[str, ...] | None = None
    verify: bool = False
    mmap: bool = False
    strict: bool = True  # whether names that only one side has are an error
    part: ShardEntry | None = None  # what the index of a sharded checkpoint says about this file

    def chosen(self, known: Iterable[str], path: str, targets: Container[str] | None = None) -> list[str]:
        """Returns the names in ``known`` that are requested, in order. Raises KeyError for others in ``keys``.

        If the request is not ``strict``, only those among ``targets``, if any are given.
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
    """Returns the error for names of tensors that the file lacks."""
    shown = ", ".join(map(repr, names[:5])) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
    return MissingTensorError(f"{path} has no tensor {shown}{why}")
