"""Fills tensors from files in which their elements do not follow each other, or mean something else than in memory."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch

from nvme_ops.io.handle import aio_handle
from nvme_ops.memory.ring import Place, Ring

if TYPE_CHECKING:
    from nvme_ops.io.arguments import FileName

_GAP = 64 << 10  # bytes from one row to the next above which what lies between them is not read


@dataclass(frozen=True)
class StridedTensor:
    """A tensor to be filled, of any strides on any device, and where its elements are in a file."""

    file: FileName
    start: int  # of the first element, in bytes
    dtype: torch.dtype  # of the stored elements
    stride: tuple[int, ...]  # of the stored elements, in elements
    target: torch.Tensor
    marks: Mapping[str, bool] = field(default_factory=dict)  # conjugate and negative bits of the stored elements

    def blocks(self, most: int) -> Iterator[tuple[StridedTensor, Place]]:
        """Divides it until each part spans at most ``most`` bytes of the file, without large gaps."""
        size = self.dtype.itemsize
        waiting = [self]
        while waiting:
            part = waiting.pop()
            target, start, stride = part.target, part.start, part.stride
            if target.numel() == 0:
                continue
            reaches = [(length - 1) * step * size for length, step in zip(target.shape, stride, strict=True)]
            extent = sum(reaches) + size
            widest = reaches.index(max(reaches)) if reaches else 0
            apart = extent > target.numel() * size and stride[widest] * size > _GAP
            if extent <= most and not apart:
                yield part, Place(self.file, start, extent)
            elif apart:
                step, inner = stride[widest] * size, stride[:widest] + stride[widest + 1 :]
                rows = enumerate(target.unbind(widest))
                parts = [
                    StridedTensor(self.file, start + at * step, self.dtype, inner, row, self.marks) for at, row in rows
                ]
                waiting += reversed(parts)
            else:
                half = target.shape[widest] // 2
                after = target.narrow(widest, half, target.shape[widest] - half)
                waiting.append(replace(part, target=after, start=start + half * stride[widest] * size))
                waiting.append(replace(part, target=target.narrow(widest, 0, half)))


def fill(handle: aio_handle, wanted: Iterable[StridedTensor], ring: Ring | None = None) -> None:
    """Fills tensors through a ring; converts the dtype where it differs. Raises as ``Ring.read``."""
    ring = ring or Ring()
    blocks = [block for tensor in wanted for block in tensor.blocks(ring.piece)]
    for (part, _), piece in zip(blocks, ring.read(handle, (place for _, place in blocks)), strict=True):
        view = piece.view(part.dtype).as_strided(part.target.shape, part.stride)
        if part.marks:
            torch._utils.set_tensor_metadata(view, dict(part.marks))
        part.target.copy_(view)
