"""How much of a file is in the page cache: what is read from there has memory's rate, not the device's."""

from __future__ import annotations

import ctypes
import mmap
import os

from nvme_ops._native import native


def cached_share(path: str, size: int = 0) -> float | None:
    """Returns the share, from 0 to 1, of a file's first ``size`` bytes or all; None if unknown."""
    size = min(size or os.path.getsize(path), os.path.getsize(path))
    there = cached_bytes(path, size) if size else None
    return None if there is None else there / size


def handles_read_it() -> bool:
    """Returns whether handles with default settings read what is in the page cache from there."""
    return os.environ.get("NVME_OPS_CACHE") != "direct"


def cached_bytes(path: str, size: int = 0) -> int | None:
    """Returns how much of the first ``size`` bytes, or all, is in the page cache; None if the kernel does not tell."""
    with open(path, "rb") as file:
        size = size or os.fstat(file.fileno()).st_size
        pages = native().cached_pages(file.fileno(), 0, size)
        if pages is None:
            pages = _mincore(path, file.fileno(), size)
    return None if pages is None else min(size, pages * mmap.PAGESIZE)


def _mincore(path: str, descriptor: int, size: int) -> int | None:
    """Asks mincore(2), which claims that all pages are cached if the caller neither owns the file nor may write it."""
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
        there = ctypes.create_string_buffer(-(-size // mmap.PAGESIZE))
        if libc.mincore(address, size, there):
            return None
        return sum(byte & 1 for byte in there.raw)
    finally:
        libc.munmap(address, size)
