"""Reads a whole file: a read that returns less than was asked is not the end of it."""

from __future__ import annotations

import os

from nvme_ops.errors import naming

_MOST = 1 << 30  # bytes of one pread


def read_whole(fd: int) -> bytes:
    """Returns what an open file has.

    Raises OSError: a part that cannot be read, after which a read returns less at first.
    """
    wanted, parts = os.fstat(fd).st_size, list[bytes]()
    with naming("read", fd):
        while wanted > 0 and (part := os.pread(fd, min(wanted, _MOST), sum(map(len, parts)))):
            parts.append(part)
            wanted -= len(part)
    return b"".join(parts)
