"""Tensors in huge-page memory, which storage fills fastest."""

from __future__ import annotations

import ctypes
import math
import sys
from typing import TYPE_CHECKING, Any, cast

import torch

from nvme_ops._native import native

if TYPE_CHECKING:
    from nvme_ops.ops.async_io import Buffer


def pool_buffer(size: int) -> Buffer:
    """Allocates ``size`` bytes from the native pool. Raises MemoryError."""
    if size > sys.maxsize:
        raise MemoryError(f"a tensor of {size} bytes does not fit any memory")
    return cast("Buffer", native().Buffer(size))


def empty(*size: int | tuple[int, ...] | torch.Size, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Like ``torch.empty`` on the CPU, in huge pages from a pool and aligned for direct I/O.

    The contents are arbitrary. The memory goes back to the pool when the last tensor over it is freed, and the pool
    keeps at most ``NVME_OPS_POOL_BYTES`` (256 MiB) of it for the next call.

    Args:
        size: the shape, as numbers or one tuple.
        dtype: torch's default dtype when None.

    Raises:
        ValueError: a negative size.
        TypeError: a size that is not an int, or a dtype that is not a torch.dtype.
        MemoryError: there is not enough memory.
    """
    given = tuple(size[0]) if len(size) == 1 and not isinstance(size[0], int) else size
    if not all(isinstance(length, int) for length in given):
        raise TypeError(f"size must consist of integers: {given}")
    shape = cast("tuple[int, ...]", given)
    if any(length < 0 for length in shape):
        raise ValueError(f"size must not be negative: {shape}")
    dtype = dtype or torch.get_default_dtype()
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"dtype must be a torch.dtype, not {type(dtype).__name__}")
    elements = math.prod(shape)
    if elements == 0:
        return torch.empty(shape, dtype=dtype, device="cpu")
    buffer = pool_buffer(elements * dtype.itemsize)
    return torch.frombuffer(buffer, dtype=dtype, count=elements).view(shape)


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """Returns the memory of a contiguous CPU tensor, not a copy. It keeps the tensor alive."""
    if tensor.nbytes == 0:
        return memoryview(b"")
    array: Any = (ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())
    array.keeps = tensor
    return memoryview(array).cast("B")
