"""The file that a benchmark works on: makes, compares and drops it from the page cache. ``scratch`` has its folder."""

from __future__ import annotations

import os
import shutil
import time
import zlib
from collections.abc import Iterator

import torch

from nvme_ops.measuring.page_cache import cached_share
from nvme_ops.progress import byte_bar
from nvme_ops.tensors import bytes_of
from nvme_ops.text import MIB, size_words

_PIECE = 16 * MIB
_PAUSES = (0.001, 0.01, 0.05)  # seconds between tries to drop a file from the page cache


class NotUsable(Exception):  # noqa: N818  (the message is all there is to it)
    """The folder cannot be benchmarked; the message says why."""


def require_space(folder: str, needed: int, smaller: str) -> None:
    """Raises NotUsable if ``folder`` has less than ``needed`` bytes of free space."""
    try:
        free = shutil.disk_usage(folder).free
    except OSError as error:
        raise NotUsable(f"{folder}: {error.strerror}") from error
    if free < needed:
        raise NotUsable(
            f"{folder}: {size_words(needed)} of free space are needed and there are {size_words(free)}; "
            f"choose another {smaller}"
        )


def make_file(path: str, size: int) -> None:
    """Fills ``path`` with ``size`` random bytes that no device can compress, all written to the device."""
    piece = torch.randint(-(2**63), 2**63 - 1, (_PIECE // 8,), dtype=torch.int64).view(torch.uint8)
    content = bytes_of(piece)
    with byte_bar(size, f"writing {size_words(size)}") as advance, open(path, "wb", buffering=0) as file:
        for start in range(0, size, _PIECE):
            piece[:8].view(torch.int64)[0] = start  # no two pieces are the same
            left = content[: size - start]
            while left:
                left = left[file.write(left) :]
            advance(min(_PIECE, size - start))
        os.fsync(file.fileno())


def filled(tensor: torch.Tensor) -> torch.Tensor:
    """The same tensor, full of arbitrary bytes, so that no page of it is still to be made."""
    words = tensor[: tensor.numel() // 8 * 8].view(torch.int64)
    torch.arange(words.numel(), out=words).mul_(0x5851F42D4C957F2D)  # Knuth's MMIX multiplier
    return tensor


def make_cold(path: str) -> None:
    """Writes the file back and drops it from the page cache (which tmpfs cannot do).

    The kernel leaves pages that somebody else looks at: on a busy machine some are dropped only by another try.
    """
    with open(path, "rb", buffering=0) as file:
        os.fsync(file.fileno())
        for pause in (*_PAUSES, None):
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            if not cached_share(path) or pause is None:
                return
            time.sleep(pause)


def make_warm(path: str) -> None:
    """Reads the file into the page cache."""
    for _ in _pieces(path):
        pass


def sync(path: str) -> None:
    """Waits until everything written to ``path`` is on the device."""
    with open(path, "rb", buffering=0) as file:
        os.fsync(file.fileno())


def checksum(path: str) -> int:
    """Returns the digest of a file, read by plain Python."""
    total = 0
    for piece in _pieces(path):
        total = zlib.crc32(piece, total)
    return total


def tensor_checksum(tensor: torch.Tensor) -> int:
    """The digest of a tensor's bytes, on any device; the same as of a file that holds them."""
    return zlib.crc32(bytes_of(tensor.cpu()))


def _pieces(path: str) -> Iterator[memoryview]:
    buffer = bytearray(_PIECE)
    with open(path, "rb", buffering=0) as file, memoryview(buffer) as view:
        while count := file.readinto(buffer):
            yield view[:count]
