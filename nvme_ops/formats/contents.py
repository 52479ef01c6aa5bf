"""What a checkpoint holds, tensor by tensor, as every format tells it."""

from __future__ import annotations

from dataclasses import dataclass, field

_PICKLE = "pickle"  # in the place of a dtype


@dataclass(frozen=True)
class Item:
    """A tensor, or in a format that stores no tensors but their memory, a storage."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    path: str
    start: int  # of its bytes in the file
    end: int
    checksum: tuple[str, int] | None = None  # kind and value, where the file keeps one

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
    damaged: list[str] = field(default_factory=list)  # what is known to be, without a look at the data

    @property
    def tensors(self) -> list[Item]:
        """Without the pickles that some formats keep beside them."""
        return [item for item in self.items if item.dtype != _PICKLE]

    @property
    def bytes(self) -> int:
        """Bytes of all data."""
        return sum(item.bytes for item in self.items)
