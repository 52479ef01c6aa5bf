"""Reads a whole file: a read that returns less than was asked is not the end of it."""

from __future__ import annotations

import os

_MOST = 1 << 30  # bytes of one pread


def read_whole(fd: int, nbytes: int | None = None, offset: int = 0) -> bytes:
    """Returns ``nbytes`` of an open file from ``offset`` on, or all that follows; less only where the file ends.

    Raises OSError: a part that cannot be read, after which a read returns less at first.
    """
    wanted = os.fstat(fd).st_size - offset if nbytes is None else nbytes
    parts: list[bytes] = []
    while wanted > 0:
        part = os.pread(fd, min(wanted, _MOST), offset)
        if not part:
            break
        parts.append(part)
        offset, wanted = offset + len(part), wanted - len(part)
    return b"".join(parts)
