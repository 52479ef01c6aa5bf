"""Keeps the journal of a kept store: a line for each change, in a file beside the slabs.

A line consists of a CRC-32 and the JSON object that it covers. Some are marks. A mark says that everything named in the
first ``bytes`` bytes of the file is on the device, and since which start of the machine the lines after it count. After
another start, perhaps because of a power failure, the lines after the last mark are void: what they name may never have
reached the device. Marks also have the version of the format; without one it is 1.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import json
import math
import os
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from nvme_ops.base.errors import FormatError, naming
from nvme_ops.base.lifetime import Tracked, track
from nvme_ops.base.settings import PAGE
from nvme_ops.base.text import parse_json
from nvme_ops.filesystem.files import boot_id, is_at, read_whole, sync, write_whole
from nvme_ops.filesystem.publication import replacing
from nvme_ops.io.future import IoFuture
from nvme_ops.storage.session import Session
from nvme_ops.storage.slab import Extent
from nvme_ops.storage.striped import Piece


@dataclass(eq=False, slots=True)
class Value:
    """A tensor that is stored or being written."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    pieces: list[Piece]
    checksum: int | None = None
    readers: list[IoFuture] = field(default_factory=list)  # reads in flight, without the tensors that they fill
    retired: bool = False  # replaced or dropped
    released: bool = False  # its extents were freed
    nbytes: int = field(init=False)

    def __post_init__(self) -> None:
        self.nbytes = sum(piece.nbytes for piece in self.pieces)

    def busy(self) -> bool:
        """Returns whether it is being read."""
        self.readers = [reader for reader in self.readers if not reader.done()]
        return bool(self.readers)


VERSION = 1
_LINES = 4096  # lines, beyond two for each value, from which on the file is rewritten


class Journal(Tracked):
    """Reads and writes the journal of a store. An incomplete last line, whose writer was killed, is ignored."""

    def __init__(self, session: Session, name: str) -> None:
        self.path = session.path(0, name)
        self._fd = -1
        track(self)
        self._fd = session.open(0, name)
        self._end = self._lines = 0
        self._boot = boot_id()
        self._boot_marked: str | None = None  # the start of the machine in the last mark
        self._rewritten = 0  # how often
        self._doubtful = False  # a sync failed: the kernel does not try again
        #: Whether the last mark covers all lines: others count until the machine is restarted.
        self.is_covered = True

    def load(self) -> dict[str, Value]:
        """Returns the value in the last line of each key, and cuts off void lines.

        Raises:
            FormatError: a line that is not void is damaged.
            OSError: void lines could not be cut off.
        """
        content = read_whole(self._fd, self.path)
        lines = content.splitlines(keepends=True)
        if lines and not lines[-1].endswith(b"\n"):
            lines.pop()
        whole = sum(map(len, lines))
        marks = [mark for line in lines if (mark := _mark_in(line)) is not None]
        if later := next((mark[2] for mark in marks if mark[2] != VERSION), None):
            raise FormatError(f"{self.path}: version {later} of the index; this program knows {VERSION}")
        # the last line is a mark, of all before it
        self.is_covered = not lines or (bool(marks) and marks[-1][1] + len(lines[-1]) == whole)
        self._boot_marked = marks[-1][0] if marks else None
        restarted = self._boot_marked not in (None, self._boot)
        end = _durable_end(lines, marks) if restarted else whole
        if self.is_covered and marks and end == marks[-1][1]:
            end = whole
        values: dict[str, Value] = {}
        for line in lines:
            if self._end >= end:
                break
            self._end += len(line)
            self._lines += 1
            if _mark_in(line) is not None:
                continue
            try:
                key, value = _read(line)
            except (ValueError, LookupError, TypeError, AttributeError, OverflowError) as error:
                raise FormatError(f"{self.path}: line {self._lines} of the index is damaged: {error}") from error
            values.pop(key, None)
            if value is not None:
                values[key] = value
        if not lines:
            self.compact(values, values)
        elif restarted and self._end < len(content):
            self._rewrite(values, values)
            self.is_covered = True
        else:
            with naming("ftruncate", self.path):
                os.ftruncate(self._fd, self._end)
        return values

    def record(self, key: str, value: Value | None) -> None:
        """Records a new value of the key, or with None that it has no value any more."""
        if self._fd < 0:
            raise ValueError("the store is closed")
        line = _line(key, value)
        if self._boot_marked != self._boot:  # everything before is durable
            line = _mark_of(self._boot, self._end) + line
        self._write(line)
        self._boot_marked = self._boot

    def sync(self, fd: int) -> None:
        """Makes the journal durable, and closes ``fd``, which ``mark`` returned.

        Raises OSError; the next ``mark`` then rewrites the journal.
        """
        try:
            sync(fd, self.path)
        except BaseException:  # an interrupted one may still fail
            self._doubtful = True
            raise
        finally:
            os.close(fd)

    def is_long(self, values: Mapping[str, Value]) -> bool:
        """Returns whether most lines are obsolete."""
        return self._lines > 2 * len(values) + _LINES

    def place(self) -> tuple[int, int]:
        """Returns the present position, for ``mark`` once what was recorded so far is on the device."""
        return self._rewritten, self._end

    def mark(self, place: tuple[int, int], values: Mapping[str, Value], durable: Mapping[str, Value]) -> int:
        """Records that the values in ``durable``, which the store had at ``place``, are on the device.

        Returns a descriptor for ``sync``, which another thread's ``compact`` does not close. Raises OSError, also if,
        after a failed ``sync``, the journal cannot be rewritten.
        """
        rewritten, end = place
        if self._doubtful or rewritten != self._rewritten:
            self._rewrite(values, durable)
            self._doubtful = False
        else:
            self._write(_mark_of(self._boot, end))
            self._boot_marked = self._boot
        with naming("opening the journal to sync", self.path):
            return os.dup(self._fd)

    def compact(self, values: Mapping[str, Value], durable: Mapping[str, Value]) -> None:
        """Rewrites the journal with one line for each value. If that fails, the old one stays, which says the same.

        ``durable``: the values that are on the device.
        """
        lines = [_line(key, value) for key, value in durable.items()]
        lines.append(_mark_of(self._boot, sum(map(len, lines))))
        lines += [_line(key, None) for key in durable if key not in values]
        lines += [_line(key, value) for key, value in values.items() if durable.get(key) is not value]
        fd = -1
        with contextlib.suppress(OSError), replacing(self.path) as file:
            fd = os.dup(file.fd)
            write_whole(fd, b"".join(lines))
        with contextlib.suppress(OSError):
            if fd >= 0 and is_at(self.path, fd):
                fd, self._fd = self._fd, fd
                self._end, self._lines = sum(map(len, lines)), len(lines)
                self._boot_marked = self._boot
                self._rewritten += 1
        if fd >= 0:
            os.close(fd)

    def _rewrite(self, values: Mapping[str, Value], durable: Mapping[str, Value]) -> None:
        before = self._rewritten
        self.compact(values, durable)
        if self._rewritten == before:
            raise OSError(errno.EIO, "the journal could neither be made durable nor rewritten", self.path)

    def close(self) -> None:
        """Closes the file. Further calls do nothing."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    _after_fork = close

    def _write(self, line: bytes) -> None:
        try:
            with naming("write to the index", self.path):
                write_whole(self._fd, line, self._end)
        except BaseException:
            with contextlib.suppress(OSError):
                os.ftruncate(self._fd, self._end)
            raise
        self._end += len(line)
        self._lines += 1


def entry_of(key: str, value: Value | None) -> dict[str, Any]:
    """Returns the JSON object of the key's line."""
    if value is None:
        return {"key": key}
    return {
        "key": key,
        "dtype": str(value.dtype).removeprefix("torch."),
        "shape": value.shape,
        "stride": value.stride,
        "checksum": value.checksum,
        "pieces": [[piece.folder, piece.begin, piece.nbytes, *piece.extent] for piece in value.pieces],
    }


def _durable_end(lines: list[bytes], marks: list[tuple[str, int, int]]) -> int:
    """Returns how many bytes the last mark covers, or the mark before, if some of the former did not become durable."""
    end = marks[-1][1]
    if len(marks) > 1:
        begins = itertools.accumulate(map(len, lines), initial=0)
        since = [line for begin, line in zip(begins, lines, strict=False) if marks[-2][1] <= begin < end]
        if sum(map(len, since)) != end - marks[-2][1] or not all(map(_is_whole, since)):
            return marks[-2][1]
    return end


def _mark_of(boot: str, nbytes: int) -> bytes:
    return _sealed(json.dumps({"mark": boot, "bytes": nbytes, "version": VERSION}).encode())


def _mark_in(line: bytes) -> tuple[str, int, int] | None:
    """Returns what a mark says: start of the machine, bytes and version; None for any other line."""
    if not line.startswith(b'{"mark": ', 9) or not _is_whole(line):
        return None
    with contextlib.suppress(ValueError, KeyError, TypeError, OverflowError):
        entry = parse_json(line[9:-1])
        return str(entry["mark"]), int(entry["bytes"]), int(entry.get("version", VERSION))
    return None


def _sealed(text: bytes) -> bytes:
    return b"%08x %s\n" % (zlib.crc32(text), text)


def _is_whole(line: bytes) -> bool:
    return line == _sealed(line[9:-1])


def _line(key: str, value: Value | None) -> bytes:
    return _sealed(json.dumps(entry_of(key, value)).encode())


def _read(line: bytes) -> tuple[str, Value | None]:
    """Parses a line. Raises ValueError, KeyError, TypeError or AttributeError for what ``_line`` does not write."""
    if not _is_whole(line):
        raise ValueError("its checksum does not match")
    return value_in(parse_json(line[9:-1]))


def value_in(entry: dict[str, Any]) -> tuple[str, Value | None]:
    """Undoes ``entry_of``. Raises ValueError, LookupError, TypeError, AttributeError or OverflowError."""
    if "pieces" not in entry:
        return str(entry["key"]), None
    pieces = [
        Piece(folder, begin, nbytes, Extent(start, size)) for folder, begin, nbytes, start, size in entry["pieces"]
    ]
    dtype = getattr(torch, entry["dtype"])
    value = Value(dtype, tuple(entry["shape"]), tuple(entry["stride"]), pieces, entry["checksum"])
    numbers = [*value.shape, *value.stride, *(number for piece in pieces for number in (*piece[:3], *piece.extent))]
    if not all(type(number) is int and 0 <= number < 1 << 63 for number in numbers):
        raise ValueError("a number is out of range")
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


class UnsyncedChanges:
    """Tracks what has changed in a store since its last sync; used with the store's lock held.

    Args:
        kept: after a power failure the store has the values of the last sync; so until the next sync, their extents are
            not freed, even if they were replaced or dropped.
    """

    def __init__(self, kept: bool) -> None:
        self._kept = kept
        self.durable: dict[str, Value] = {}  #: what would be left after a power failure
        self.changed: set[str] = set()  #: keys put or dropped since the last sync
        self.doubtful: set[str] = set()  #: keys put before a sync that failed: they may be lost
        self._held: list[Value] = []  # retired values whose extents must stay until the next sync
        self._syncing: dict[str, Value | None] | None = None  # the changes that the present sync makes durable
        self._releasable = 0  # how many of those held it makes free

    def put(self, key: str) -> None:
        """Records that the key has a new value, or none."""
        self.changed.add(key)
        self.doubtful.discard(key)

    def holds(self, key: str, value: Value) -> bool:
        """Returns whether the extents of this value, which the key had, must stay until the next sync."""
        held = self._kept and (self._syncing is not None or self.durable.get(key) is value)
        if held:
            self._held.append(value)
        return held

    def begin(self, values: Mapping[str, Value]) -> None:
        """Begins a sync of ``values``, which ``failed`` or ``ended`` ends."""
        self._syncing = {key: values.get(key) for key in self.changed}
        self.changed = set()
        self._releasable = len(self._held)

    def flushed(self) -> None:
        """Records that the values are on the device. Not to be called after a sync that failed."""
        for key, value in (self._syncing or {}).items():
            self.durable.pop(key, None)
            if value is not None:
                self.durable[key] = value

    def failed(self) -> None:
        """Ends a sync that failed: what was put before it may be lost."""
        self.doubtful |= {key for key, value in (self._syncing or {}).items() if value is not None} - self.changed
        self._undo()

    def ended(self, path: str) -> list[Value]:
        """Ends a sync; returns values whose extents may now be freed.

        Raises OSError if an earlier sync failed and what was put before it was neither put again nor dropped.
        """
        if self.doubtful:
            self._undo()
            shown = ", ".join(map(repr, sorted(self.doubtful)[:5]))
            raise OSError(
                errno.EIO,
                f"a sync has failed: {len(self.doubtful)} tensors put before it may be lost, and must be put again or "
                f"dropped: {shown}{' ...' if len(self.doubtful) > 5 else ''}",
                path,
            )
        released, self._held = self._held[: self._releasable], self._held[self._releasable :]
        self._syncing = None
        return released

    def _undo(self) -> None:
        self.changed |= set(self._syncing or ())
        self._syncing = None
