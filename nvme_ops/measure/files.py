"""Makes and compares the file that a benchmark works on; drops it from the page cache. ``scratch`` has its folder."""

from __future__ import annotations

import ctypes
import mmap
import os
import random
import shutil
import time
import zlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

from nvme_ops.base.errors import naming
from nvme_ops.base.native import native
from nvme_ops.base.progress import byte_bar
from nvme_ops.base.text import MIB, size_words

if TYPE_CHECKING:
    import torch

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
    piece = bytearray(random.randbytes(_PIECE))
    words = f"writing {size_words(size)}"
    with naming("write", path), byte_bar(size, words) as advance, open(path, "wb", buffering=0) as file:
        for start in range(0, size, _PIECE):
            piece[:8] = start.to_bytes(8, "little")  # no two pieces are the same
            left = memoryview(piece)[: size - start]
            while left:
                left = left[file.write(left) :]
            advance(min(_PIECE, size - start))
        os.fsync(file.fileno())


def filled(tensor: torch.Tensor) -> torch.Tensor:
    """Fills a uint8 tensor with arbitrary bytes, so that all of its pages exist, and returns it."""
    import torch

    words = tensor[: tensor.numel() // 8 * 8].view(torch.int64)
    torch.arange(words.numel(), out=words).mul_(0x5851F42D4C957F2D)  # Knuth's MMIX multiplier
    return tensor


def make_cold(path: str) -> None:
    """Writes the file back and drops it from the page cache (which tmpfs cannot do).

    The kernel keeps pages that are in use: on a busy machine, it drops some only when asked again.
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
    """Returns the digest of a tensor's bytes, on any device: that of a file with the same content."""
    from nvme_ops.io.tensors import bytes_of

    return zlib.crc32(bytes_of(tensor.cpu()))


def _pieces(path: str) -> Iterator[memoryview]:
    buffer = bytearray(_PIECE)
    with open(path, "rb", buffering=0) as file, memoryview(buffer) as view:
        while count := file.readinto(buffer):
            yield view[:count]


def cached_share(path: str, size: int = 0) -> float | None:
    """Returns the cached share, 0 to 1, of a file's first ``size`` bytes, or of all; None if unknown."""
    size = min(size or os.path.getsize(path), os.path.getsize(path))
    cached = cached_bytes(path, size) if size else None
    return None if cached is None else cached / size


def handles_read_the_cache() -> bool:
    """Returns whether handles with default settings read cached data from the page cache."""
    return os.environ.get("NVME_OPS_CACHE") != "direct"


def cached_bytes(path: str, size: int = 0) -> int | None:
    """Returns how many of a file's first ``size`` bytes, or of all, are cached; None if the kernel does not tell."""
    with open(path, "rb") as file:
        size = size or os.fstat(file.fileno()).st_size
        pages = native().cached_pages(file.fileno(), 0, size)
        if pages is None:
            pages = _mincore(path, file.fileno(), size)
    return None if pages is None else min(size, pages * mmap.PAGESIZE)


def _mincore(path: str, descriptor: int, size: int) -> int | None:
    """Returns the number of cached pages by mincore(2).

    Returns None if the caller neither owns the file nor may write it: mincore then claims that all pages are cached.
    """
    if os.stat(path).st_uid != os.geteuid() and not os.access(path, os.W_OK):
        return None
    libc = ctypes.CDLL(None)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    libc.mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_char_p]
    address = libc.mmap(None, size, mmap.PROT_READ, mmap.MAP_SHARED, descriptor, 0)
    if address in (None, ctypes.c_void_p(-1).value):
        return None
    try:
        pages = ctypes.create_string_buffer(-(-size // mmap.PAGESIZE))
        return None if libc.mincore(address, size, pages) else sum(byte & 1 for byte in pages.raw)
    finally:
        libc.munmap(address, size)
