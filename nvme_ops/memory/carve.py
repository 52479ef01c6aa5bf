"""Tensors laid out in one memory, and copies of their bytes in row-major order."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import TypeAlias

import torch

from nvme_ops._native import native
from nvme_ops.offloaded import OffloadedTensor
from nvme_ops.settings import ALIGNMENT, LARGE, PAGE

_LEAST_ALIGNMENT = 8  # bytes: what safetensors pads its header to
#: Bytes to which torch aligns what it allocates on an accelerator. For operands that are aligned to fewer than 256,
#: libraries may take other kernels, which round otherwise: CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES of cuBLASLt.
DEVICE_ALIGNMENT = 512

#: A tensor's dtype and shape.
Kind: TypeAlias = tuple[torch.dtype, tuple[int, ...]]


def is_plain(tensor: torch.Tensor) -> bool:
    """Returns whether the memory of ``tensor``, on any device, has its values in row-major order, ready to be moved."""
    if isinstance(tensor, OffloadedTensor):
        return False
    return tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


def is_plain_on_host(tensor: torch.Tensor) -> bool:
    """Returns whether ``tensor`` is plain and in host memory."""
    return tensor.device.type == "cpu" and is_plain(tensor)


def is_dense(tensor: torch.Tensor) -> bool:
    """Returns whether the elements fill their memory without gaps, in any order of the dimensions."""
    if tensor.is_conj() or tensor.is_neg():
        return False
    return tensor.is_contiguous() or tensor.permute(_order(tensor)).is_contiguous()


def dense_strides(tensor: torch.Tensor) -> tuple[int, ...]:
    """Returns the tensor's own strides if it is dense, else those of a contiguous tensor of its shape."""
    return tuple(tensor.stride() if is_dense(tensor) else torch.empty(tensor.shape, device="meta").stride())


def dense_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a one-dimensional byte view of a dense tensor's memory."""
    tensor = tensor.detach()
    flat = tensor if tensor.is_contiguous() else tensor.permute(_order(tensor))
    return flat.view(-1).view(torch.uint8)


def _order(tensor: torch.Tensor) -> list[int]:
    """Returns the dimensions in the order of memory, outermost first."""
    strides, shape = list(tensor.stride()), tensor.shape
    return sorted(range(tensor.dim()), key=lambda dim: (-strides[dim], -shape[dim]))


def cut(tensor: torch.Tensor, size: int) -> Iterator[torch.Tensor]:
    """Yields parts of at most ``size`` bytes, of about equal size, in row-major order; none for an empty tensor."""
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
    """Fills ``target``, a contiguous byte tensor, with the values of ``source`` in row-major order."""
    copy(target.view(source.dtype).view(source.shape), source)


def copy(target: torch.Tensor, source: torch.Tensor) -> None:
    """Fills ``target``, of any strides, on any device, with the values of ``source``, of the same dtype and shape."""
    if source.element_size() == 1 and not target.is_neg():  # torch cannot copy every dtype of one byte
        target.view(torch.uint8).copy_(source.resolve_neg().view(torch.uint8))
    else:
        target.copy_(source)


def lay_out(runs: Sequence[tuple[int, int]], device: torch.device) -> tuple[list[int], int]:
    """Returns the offset in one memory for each run of a file (its start and end), and the size of that memory.

    Large runs keep their offset within a page, so that storage fills them without a copy. Their tensors are then
    aligned as they are in the file: to at least 8 bytes in host memory, as when safetensors maps it, and on an
    accelerator as torch aligns its own.
    """
    on_host = device.type == "cpu"
    alignment, least = (ALIGNMENT, _LEAST_ALIGNMENT) if on_host else (DEVICE_ALIGNMENT, DEVICE_ALIGNMENT)
    places, size = [], 0
    for start, end in runs:
        size = -(-size // alignment) * alignment
        if end - start >= LARGE and start % least == 0:
            size += (start - size) % PAGE
        places.append(size)
        size += end - start
    return places, size


def placed(base: torch.Tensor, places: Sequence[tuple[int, Kind]]) -> list[torch.Tensor]:
    """Returns contiguous tensors in ``base``, a byte tensor, at places that are aligned for them.

    They are not views: they share no version counter. The memory is freed with the last of them.
    """
    first: dict[Kind, torch.Tensor] = {}  # one tensor of each kind, at the start of the memory
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
    """Gives each named byte tensor a storage of its own: ``length`` bytes of ``memory`` from ``place`` on.

    The storages cannot grow. ``memory`` is freed with the last of them.
    """
    first = memory.storage_offset()
    native().set_parts(
        [tensors[name] for name, _, _ in parts],
        memory,
        [first + place for _, place, _ in parts],
        [length for _, _, length in parts],
    )
