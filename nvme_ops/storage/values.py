"""What a store knows of a tensor: its kind, and where its bytes are."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from nvme_ops.future import IoFuture
from nvme_ops.memory.carve import copy, dense_bytes, is_dense, is_plain
from nvme_ops.storage.slab import Extent

if TYPE_CHECKING:
    from nvme_ops.ops.async_io import Operation


class Piece(NamedTuple):
    """Bytes of a tensor from ``begin`` on, and the extent that has them in the slab of a folder."""

    folder: int
    begin: int
    nbytes: int
    extent: Extent


@dataclass(eq=False, slots=True)
class Value:
    """A tensor that is stored, or on its way."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    pieces: list[Piece]
    checksum: int | None = None
    readers: list[IoFuture] = field(default_factory=list)  # transfers alone: what they fill may go before
    retired: bool = False  # nobody finds it any more
    released: bool = False  # its extents are free
    nbytes: int = field(init=False)

    def __post_init__(self) -> None:
        self.nbytes = sum(piece.nbytes for piece in self.pieces)

    def busy(self) -> bool:
        """Whether it is being read."""
        self.readers = [reader for reader in self.readers if not reader.done()]
        return bool(self.readers)


class StoreFuture(IoFuture):
    """The result of ``put`` and ``get``: bytes moved. ``tensor`` is what was, or will be, filled or stored."""

    __slots__ = ("tensor",)

    def __init__(self, operation: Operation, tensor: torch.Tensor) -> None:
        super().__init__(operation)
        self.tensor = tensor


def require_dense(tensor: Any) -> None:
    """Raises TypeError for what is no tensor with memory of its own kind."""
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"a dense torch.Tensor is needed, not {type(tensor).__name__}")
    if tensor.layout != torch.strided or tensor.is_meta or tensor.is_quantized:
        raise TypeError(f"a dense torch.Tensor is needed, not one of {tensor.layout}, {tensor.dtype}, {tensor.device}")


def to_store(tensor: torch.Tensor) -> torch.Tensor:
    """Return a contiguous tensor of the bytes to store: the tensor itself or its memory where it is dense, else a copy.

    Raises TypeError as above.
    """
    require_dense(tensor)
    if is_plain(tensor):
        return tensor
    tensor = tensor.detach()
    if not is_dense(tensor):
        made = torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
        copy(made, tensor.resolve_conj())
        tensor = made
    return dense_bytes(tensor)
