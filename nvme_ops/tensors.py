"""Tensors in the memory that storage fills fastest."""

from __future__ import annotations

import errno
import math
import sys
from typing import cast

import torch

from nvme_ops._native import native


def empty(*size: int | tuple[int, ...] | torch.Size, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Like ``torch.empty`` on the CPU, in huge pages from a pool and aligned for direct I/O.

    The contents are arbitrary. The memory goes back to the pool when the last tensor over it is freed, and the pool
    keeps at most ``NVME_OPS_POOL_BYTES`` (256 MiB) of it for the next call.

    Args:
        size: the shape, as numbers or one tuple.
        dtype: torch's default dtype when None.

    Raises:
        ValueError: a negative size.
        OSError: there is not enough memory (errno ENOMEM).
    """
    given = tuple(size[0]) if len(size) == 1 and not isinstance(size[0], int) else size
    if not all(isinstance(length, int) for length in given):
        raise TypeError(f"size must consist of integers: {given}")
    shape = cast("tuple[int, ...]", given)
    if any(length < 0 for length in shape):
        raise ValueError(f"size must not be negative: {shape}")
    dtype = dtype or torch.get_default_dtype()
    elements = math.prod(shape)
    if elements == 0:
        return torch.empty(shape, dtype=dtype)
    if elements * dtype.itemsize > sys.maxsize:
        raise OSError(errno.ENOMEM, f"a tensor of {elements * dtype.itemsize} bytes does not fit any memory")
    buffer = native().Buffer(elements * dtype.itemsize)
    return torch.frombuffer(buffer, dtype=dtype, count=elements).view(shape)
