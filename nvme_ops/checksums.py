"""Checksums of bytes in host memory. ``kind`` is ``"crc32c"``, or ``"crc32"`` as in zip files."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from nvme_ops._native import native


def checksums_of(data: Sequence[torch.Tensor | bytes], kind: str) -> list[int]:
    """Computes the checksum of the bytes of each, tensors being contiguous and on the CPU, all in one call."""
    found: list[int] = native().checksums(kind, data)
    return found


def checksum_of(tensor: torch.Tensor, kind: str, value: int = 0) -> int:
    """Computes that of one; with the ``value`` of what comes before, of both together, as ``zlib.crc32`` does."""
    return joined(value, checksums_of([tensor], kind)[0], tensor.nbytes, kind)


def joined(first: int, second: int, length: int, kind: str) -> int:
    """Joins the checksum of some bytes, ``first``, with that of ``length`` more, ``second``."""
    found: int = native().joined_checksum(kind, first, second, length)
    return found
