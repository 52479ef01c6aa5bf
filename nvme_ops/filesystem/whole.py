"""Reads whole files and writes all bytes: a call that moves fewer bytes than requested is followed by others."""

from __future__ import annotations

import errno
import os

from nvme_ops.base.errors import naming

_LARGE, _MIN_SHARE = 64 << 20, 64  # bytes; with blocks for less than a 64th they are holes, not compressed data
_MAX = 1 << 30  # bytes of one pread


def read_whole(fd: int, path: str | None = None) -> bytes:
    """Returns the content of an open file.

    Raises OSError if a part cannot be read (the read before it returns less), or for a file of holes, which may be
    larger than any memory.
    """
    status, parts = os.fstat(fd), list[bytes]()
    wanted = status.st_size
    with naming("read", fd if path is None else path):
        if wanted > _LARGE and status.st_blocks * 512 < wanted // _MIN_SHARE:
            raise OSError(errno.EFBIG, f"has {wanted} bytes, and blocks for {status.st_blocks * 512} of them")
        while wanted > 0 and (part := os.pread(fd, min(wanted, _MAX), sum(map(len, parts)))):
            parts.append(part)
            wanted -= len(part)
    return b"".join(parts)


def write_whole(fd: int, content: bytes, place: int = 0) -> None:
    """Writes ``content`` to an open file, from byte ``place`` on. Raises OSError, perhaps with a part written."""
    left = memoryview(content)
    while left:
        written = os.pwrite(fd, left, place)
        left, place = left[written:], place + written
