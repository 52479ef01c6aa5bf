"""Tensors that lie in one memory, and copies of their bytes in row-major order."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import TypeAlias

import torch

from nvme_ops._native import native
from nvme_ops.settings import ALIGNMENT, LARGE, PAGE

_LEAST_ALIGNMENT = 8  # bytes: what safetensors pads its header to

#: What a tensor is, beside its place.
Kind: TypeAlias = tuple[torch.dtype, tuple[int, ...]]


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether its memory is its values in row-major order, on whatever device: to be moved as it is."""
    return tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


def is_plain_on_host(tensor: torch.Tensor) -> bool:
    """Whether it is plain, and in host memory."""
    return tensor.device.type == "cpu" and is_plain(tensor)


def is_dense(tensor: torch.Tensor) -> bool:
    """Whether its memory is its elements without gaps, in whatever order of its dimensions."""
    if tensor.is_conj() or tensor.is_neg():
        return False
    return tensor.is_contiguous() or tensor.permute(_order(tensor)).is_contiguous()


def dense_strides(tensor: torch.Tensor) -> tuple[int, ...]:
    """Its own strides where it is dense, else those of a contiguous tensor of its shape."""
    return tuple(tensor.stride() if is_dense(tensor) else torch.empty(tensor.shape, device="meta").stride())


def dense_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The memory of a dense tensor."""
    tensor = tensor.detach()
    flat = tensor if tensor.is_contiguous() else tensor.permute(_order(tensor))
    return flat.view(-1).view(torch.uint8)


def _order(tensor: torch.Tensor) -> list[int]:
    """The dimensions as they lie in memory, the outermost first."""
    strides, shape = list(tensor.stride()), tensor.shape
    return sorted(range(tensor.dim()), key=lambda dim: (-strides[dim], -shape[dim]))


def cut(tensor: torch.Tensor, size: int) -> Iterator[torch.Tensor]:
    """Parts of at most ``size`` bytes, about alike, that follow each other in row-major order; none of no bytes."""
    if tensor.nbytes == 0:
        return
    if tensor.nbytes <= size:
        yield tensor
        return
    row = tensor.nbytes // tensor.shape[0]
    if row > size:
        for part in tensor.unbind(0):
            yield from cut(part, size)
    else:
        rows = tensor.shape[0]
        parts = -(-rows // (size // row))
        yield from tensor.split(-(-rows // parts))


def copy_bytes(target: torch.Tensor, source: torch.Tensor) -> None:
    """Fills ``target``, contiguous bytes, with the values of ``source`` in row-major order."""
    copy(target.view(source.dtype).view(source.shape), source)


def copy(target: torch.Tensor, source: torch.Tensor) -> None:
    """Fills ``target``, which is contiguous, with the values of ``source``, whose dtype and shape it has."""
    if source.element_size() == 1:  # not every such dtype can be copied
        target.view(torch.uint8).copy_(source.resolve_neg().view(torch.uint8))
    else:
        target.copy_(source)


def lay_out(runs: Sequence[tuple[int, int]]) -> tuple[list[int], int]:
    """Where each run of a file, from start to end, goes in one memory, and its size.

    Pages of large ones fall on pages, so that storage fills them without a copy. Their tensors are then aligned as they
    are in the file: to 8 bytes at least, as where safetensors maps it.
    """
    places, size = [], 0
    for start, end in runs:
        size = -(-size // ALIGNMENT) * ALIGNMENT
        if end - start >= LARGE and start % _LEAST_ALIGNMENT == 0:
            size += (start - size) % PAGE
        places.append(size)
        size += end - start
    return places, size


def placed(base: torch.Tensor, places: Sequence[tuple[int, Kind]]) -> list[torch.Tensor]:
    """Contiguous tensors in ``base``, which is bytes, at places that are aligned for them.

    No views of it: a change of one is none of the others to autograd. The memory is freed with the last of them.
    """
    first: dict[Kind, torch.Tensor] = {}  # of each kind one at the start of the memory
    for _, kind in places:
        if kind not in first:
            dtype, shape = kind
            first[kind] = base[: math.prod(shape) * dtype.itemsize].view(dtype).view(shape)
    tensors = [first[kind].data for _, kind in places]
    native().set_storage_offsets(tensors, [place // dtype.itemsize for place, (dtype, _) in places])
    return tensors


def give_storages(
    tensors: Mapping[str, torch.Tensor], memory: torch.Tensor, parts: Sequence[tuple[str, int, int]]
) -> None:
    """Gives each named tensor, of bytes, a storage of its own: ``length`` bytes from ``place`` of ``memory`` on.

    The storages cannot grow. ``memory`` is freed with the last of them.
    """
    first = memory.storage_offset()
    native().set_parts(
        [tensors[name] for name, _, _ in parts],
        memory,
        [first + place for _, place, _ in parts],
        [length for _, _, length in parts],
    )
