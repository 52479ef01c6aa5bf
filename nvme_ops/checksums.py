"""Checksums of bytes in host memory. ``kind`` is ``"crc32c"``, or ``"crc32"`` as in zip files."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch

from nvme_ops._native import native


def checksums_of(data: Sequence[torch.Tensor | bytes], kind: str) -> list[int]:
    """Returns the checksums of ``data``: bytes, or contiguous CPU tensors, all in one call."""
    return cast("list[int]", native().checksums(kind, data))


def checksum_of(tensor: torch.Tensor, kind: str, value: int = 0) -> int:
    """Returns the checksum of ``tensor``, continuing from ``value`` as ``zlib.crc32`` does."""
    return joined(value, checksums_of([tensor], kind)[0], tensor.nbytes, kind)


def joined(first: int, second: int, length: int, kind: str) -> int:
    """Returns the checksum of two parts from the ``first`` one's, and the ``second``'s, which has ``length`` bytes."""
    return cast("int", native().joined_checksum(kind, first, second, length))
