"""Describes what a checkpoint contains, tensor by tensor, in the same form for every format."""

from __future__ import annotations

from dataclasses import dataclass, field

_PICKLE = "pickle"  # in place of a dtype


@dataclass(frozen=True)
class Item:
    """A tensor, or a storage in formats that store those."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    path: str
    start: int  # of its bytes in the file
    end: int
    checksum: tuple[str, int] | None = None  # kind and value, if the file has one

    @property
    def bytes(self) -> int:
        """Bytes of its data."""
        return self.end - self.start


@dataclass(frozen=True)
class Contents:
    """Everything in a checkpoint."""

    format: str
    items: list[Item]
    metadata: dict[str, str] = field(default_factory=dict)
    damaged: list[str] = field(default_factory=list)  # names of what is known to be damaged before data are read

    @property
    def tensors(self) -> list[Item]:
        """The items that are not pickles."""
        return [item for item in self.items if item.dtype != _PICKLE]

    @property
    def bytes(self) -> int:
        """Bytes of all data."""
        return sum(item.bytes for item in self.items)
