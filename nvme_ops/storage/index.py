"""The journal of a kept store: a line for each change, in a file beside the slabs.

A line consists of a CRC-32 and the JSON object that it covers.
"""

from __future__ import annotations

import contextlib
import errno
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
from nvme_ops.text import parse_json
from nvme_ops.whole import read_whole

_LINES = 4096  # lines beyond twice the number of values that may pile up before the file is rewritten


class Index:
    """The journal of a store. An incomplete last line is ignored: its writer was killed."""

    def __init__(self, session: Session, name: str) -> None:
        self._path = session.path(0, name)
        self._fd = session.open(0, name)
        self._end = self._lines = 0
        self._doubtful = False  # a sync failed: the kernel does not try again

    def load(self) -> dict[str, Value]:
        """Returns the values that the last line of each key gives, and cuts off an incomplete last line.

        Raises FormatError for any other line that is damaged.
        """
        content = read_whole(self._fd, self._path)
        found: dict[str, Value] = {}
        for line in content.splitlines(keepends=True):
            if not line.endswith(b"\n") and self._end + len(line) == len(content):
                break
            self._end += len(line)
            self._lines += 1
            try:
                key, value = _read(line)
            except (ValueError, LookupError, TypeError, AttributeError, OverflowError) as error:
                raise FormatError(f"{self._path}: line {self._lines} of the index is damaged: {error}") from error
            found.pop(key, None)
            if value is not None:
                found[key] = value
        os.ftruncate(self._fd, self._end)
        return found

    def damaged(self, error: Exception) -> FormatError:
        """Returns the error to raise when the index names impossible extents."""
        return FormatError(f"{self._path}: the index names extents that cannot be: {error}")

    def put(self, key: str, value: Value) -> None:
        """Records a new value of the key."""
        self._append(_line(key, value))

    def drop(self, key: str) -> None:
        """Records that the key has no value any more."""
        self._append(_line(key, None))

    def sync(self) -> None:
        """Makes the journal durable. Raises OSError; ``sync_again`` then writes it anew."""
        try:
            os.fdatasync(self._fd)
        except OSError as error:
            self._doubtful = True
            raise OSError(error.errno, f"fdatasync: {error.strerror}", self._path) from error

    def is_long(self, values: Mapping[str, Value]) -> bool:
        """Returns whether most lines are obsolete."""
        return self._lines > 2 * len(values) + _LINES

    def sync_again(self, values: Mapping[str, Value]) -> None:
        """Makes durable what a ``sync`` that failed did not. Raises OSError."""
        if self._doubtful:
            before = self._fd
            self.compact(values)
            if self._fd == before:
                raise OSError(errno.EIO, "the journal could not be made durable, nor written anew", self._path)
            self._doubtful = False

    def compact(self, values: Mapping[str, Value]) -> None:
        """Rewrites the journal with one line for each value. If that fails the old one, which says the same, stays."""
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
        """Closes the file. Further calls do nothing."""
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
    """Parses a line. Raises ValueError, KeyError, TypeError or AttributeError for what ``_line`` does not write."""
    text = line[9:-1]
    if line != b"%08x %s\n" % (zlib.crc32(text), text):
        raise ValueError("its checksum does not match")
    entry = parse_json(text)
    if "pieces" not in entry:
        return str(entry["key"]), None
    pieces = [
        Piece(folder, begin, nbytes, Extent(start, size)) for folder, begin, nbytes, start, size in entry["pieces"]
    ]
    dtype = getattr(torch, entry["dtype"])
    value = Value(dtype, tuple(entry["shape"]), tuple(entry["stride"]), pieces, entry["checksum"])
    numbers = [*value.shape, *value.stride, *(number for piece in pieces for number in (*piece[:3], *piece.extent))]
    if not all(type(number) is int and 0 <= number < 1 << 63 for number in numbers):
        raise ValueError("a number that cannot be")
    if value.checksum is not None and type(value.checksum) is not int:
        raise ValueError(f"its checksum is {value.checksum!r}")
    end = 0
    for piece in pieces:
        if piece.begin != end or piece.nbytes < 1 or piece.extent.nbytes != -(-piece.nbytes // PAGE) * PAGE:
            raise ValueError(f"{piece} does not follow byte {end}")
        end += piece.nbytes
    if end != math.prod(value.shape) * dtype.itemsize or len(value.stride) != len(value.shape):
        raise ValueError(f"{end} bytes of {dtype}, shape {value.shape}")
    step = 1
    for stride, length in sorted(zip(value.stride, value.shape, strict=True)) if end else ():
        if length != 1 and stride != step:
            raise ValueError(f"a stride of {value.stride} for the shape {value.shape}")
        step *= length
    return str(entry["key"]), value
