"""What ``load`` is asked for."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from nvme_ops.checkpoint.integrity import Part
from nvme_ops.handle import aio_handle


@dataclass(frozen=True)
class Request:
    """The arguments of ``load`` that every file of a checkpoint is read with."""

    handle: aio_handle
    map_location: Any = None
    keys: tuple[str, ...] | None = None
    verify: bool = False
    mmap: bool = False
    part: Part | None = None  # of a checkpoint in several files: what its index says of this one

    def chosen(self, known: Iterable[str], path: str) -> list[str]:
        """Those of the ``known`` names that are asked for, in their order. Raises KeyError for others in ``keys``."""
        names = list(known)
        if self.keys is None:
            return names
        there, wanted = set(names), set(self.keys)
        if missing := [key for key in self.keys if key not in there]:
            raise lacking(path, missing)
        return [name for name in names if name in wanted]


def lacking(path: str, names: Sequence[str], why: str = "") -> KeyError:
    """To raise where the file has no tensors of these names."""
    shown = ", ".join(map(repr, names[:5])) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
    return KeyError(f"{path} has no tensor {shown}{why}")
