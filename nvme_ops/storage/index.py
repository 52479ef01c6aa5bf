"""What is in a store that is kept: a line for each change, in a file beside the slabs.

A line is the CRC-32 of its rest, and a JSON object.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import zlib
from collections.abc import Mapping
from typing import Any

import torch

from nvme_ops.errors import FormatError
from nvme_ops.settings import PAGE
from nvme_ops.storage.atomic import replacing
from nvme_ops.storage.session import Session
from nvme_ops.storage.slab import Extent
from nvme_ops.storage.values import Piece, Value

_LINES = 4096  # that may be there beside twice as many as there are values, before the file is written anew


class Index:
    """The journal of a store. A line counts when it is whole: a process may be killed while it writes one."""

    def __init__(self, session: Session, name: str) -> None:
        self._path = session.path(0, name)
        self._fd = session.open(0, name)
        self._end = self._lines = 0

    def load(self) -> dict[str, Value]:
        """The values as the last lines of their keys tell them.

        Raises FormatError for lines that nobody wrote so; half a line at the end is one whose writer was killed.
        """
        content = os.pread(self._fd, os.fstat(self._fd).st_size, 0)
        found: dict[str, Value] = {}
        for line in content.splitlines(keepends=True):
            if not line.endswith(b"\n") and self._end + len(line) == len(content):
                break
            self._end += len(line)
            self._lines += 1
            try:
                key, value = _read(line)
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                raise FormatError(f"{self._path}: line {self._lines} of the index is damaged: {error}") from error
            found.pop(key, None)
            if value is not None:
                found[key] = value
        os.ftruncate(self._fd, self._end)
        return found

    def damaged(self, error: Exception) -> FormatError:
        """What to raise where it names extents that cannot be."""
        return FormatError(f"{self._path}: the index names extents that cannot be: {error}")

    def put(self, key: str, value: Value) -> None:
        """The key has this value from now on."""
        self._append(_line(key, value))

    def drop(self, key: str) -> None:
        """The key has no value from now on."""
        self._append(_line(key, None))

    def sync(self) -> None:
        """Makes it durable."""
        os.fdatasync(self._fd)

    def is_long(self, values: Mapping[str, Value]) -> bool:
        """Whether most of it is past."""
        return self._lines > 2 * len(values) + _LINES

    def compact(self, values: Mapping[str, Value]) -> None:
        """Leaves one line for each value. Where that cannot be done all lines stay, which say the same."""
        lines = [_line(key, value) for key, value in values.items()]
        fd = -1
        with contextlib.suppress(OSError), replacing(self._path) as file:
            fd = os.dup(file.fd)
            with os.fdopen(os.dup(fd), "wb") as stream:
                stream.writelines(lines)
        with contextlib.suppress(OSError):
            if fd >= 0 and os.path.samestat(os.fstat(fd), os.lstat(self._path)):
                fd, self._fd = self._fd, fd
                self._end, self._lines = sum(map(len, lines)), len(lines)
        if fd >= 0:
            os.close(fd)

    def close(self) -> None:
        """Once or more."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def _append(self, line: bytes) -> None:
        if self._fd < 0:
            raise ValueError("the store is closed")
        try:
            written = 0
            while written < len(line):
                written += os.pwrite(self._fd, line[written:], self._end + written)
        except BaseException:
            with contextlib.suppress(OSError):
                os.ftruncate(self._fd, self._end)
            raise
        self._end += len(line)
        self._lines += 1


def _line(key: str, value: Value | None) -> bytes:
    entry: dict[str, Any] = {"key": key}
    if value is not None:
        entry |= {
            "dtype": str(value.dtype).removeprefix("torch."),
            "shape": value.shape,
            "stride": value.stride,
            "checksum": value.checksum,
            "pieces": [[piece.folder, piece.begin, piece.nbytes, *piece.extent] for piece in value.pieces],
        }
    text = json.dumps(entry).encode()
    return b"%08x %s\n" % (zlib.crc32(text), text)


def _read(line: bytes) -> tuple[str, Value | None]:
    """Raises ValueError, KeyError, TypeError or AttributeError for what ``_line`` does not make."""
    text = line[9:-1]
    if line != b"%08x %s\n" % (zlib.crc32(text), text):
        raise ValueError("its checksum is another")
    entry = json.loads(text)
    if "pieces" not in entry:
        return str(entry["key"]), None
    pieces = [
        Piece(folder, begin, nbytes, Extent(start, size)) for folder, begin, nbytes, start, size in entry["pieces"]
    ]
    dtype = getattr(torch, entry["dtype"])
    value = Value(dtype, tuple(entry["shape"]), tuple(entry["stride"]), pieces, entry["checksum"])
    end = 0
    for piece in pieces:
        if piece.begin != end or piece.nbytes < 1 or piece.extent.nbytes != -(-piece.nbytes // PAGE) * PAGE:
            raise ValueError(f"{piece} does not follow byte {end}")
        end += piece.nbytes
    if end != math.prod(value.shape) * dtype.itemsize or len(value.stride) != len(value.shape):
        raise ValueError(f"{end} bytes of {dtype}, shape {value.shape}")
    return str(entry["key"]), value
