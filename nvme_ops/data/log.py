"""``AsyncLog``: an append-only log that never makes its caller wait for storage, and ``read_log``.

A log is a row of files, ``NAME.000000`` and on. A file consists of blocks: 4 bytes ``NVLG``; uint32 CRC-32C of the rest
of the block; uint32 number of records; uint64 bytes of all records; a uint32 for the bytes of each record; the records.
The last block of a file that was ended in good order has no records. All numbers are little-endian.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import json
import os
import re
import struct
import sys
import threading
import time
import warnings
import weakref
from array import array
from collections.abc import Iterator, Mapping
from typing import Literal

from nvme_ops.checksums import checksums_of
from nvme_ops.errors import FormatError
from nvme_ops.file import File
from nvme_ops.storage import locks
from nvme_ops.storage.atomic import sync_folder
from nvme_ops.text import parse_size, size_words

_MAGIC = b"NVLG"
_HEAD = struct.Struct("<4sIIQ")
_AFTER_CRC = 8  # bytes of the head that the checksum does not cover
_MOST = (1 << 32) - 1  # bytes of a record
_BLOCK = 1 << 16  # records
_PARTS = 4  # flushes in a window: what comes right after one waits for the next, and both take time

Full = Literal["block", "drop", "raise"]


class AsyncLog:
    """Appends records, which are written in the background and durable at most ``window`` seconds later.

    A process that is killed loses what it appended within the last window, and nothing before. Threads may share a log;
    several processes may write to one name, each to files of its own. A forked child makes its own log.

    Args:
        path: the files' name, to which a number is added; the folder must exist.
        window: seconds within which a record is durable (``fsync``), as long as the device keeps up.
        buffer_bytes: of records that wait to be written. Beyond that ``on_full`` says what ``append`` does.
        on_full: ``"block"``: wait for room; ``"drop"``: return False, and count; ``"raise"``: BlockingIOError.
        rotate_bytes: of a file, about.
        keep: files of the log that are kept; older ones are removed, unless somebody writes to them. None: all.

    Raises:
        ValueError: arguments that cannot be.
        OSError: the folder cannot be written.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        window: float = 1.0,
        buffer_bytes: int | str = "64M",
        on_full: Full = "block",
        rotate_bytes: int | str = "1G",
        keep: int | None = None,
    ) -> None:
        self.path, self.window, self.on_full = os.path.abspath(os.fspath(path)), window, on_full
        self._limit = parse_size(buffer_bytes) if isinstance(buffer_bytes, str) else buffer_bytes
        self._rotate = parse_size(rotate_bytes) if isinstance(rotate_bytes, str) else rotate_bytes
        self._keep = keep
        if not 0.001 <= window <= 3600:
            raise ValueError(f"window must be between 0.001 and 3600 seconds, not {window}")
        if on_full not in ("block", "drop", "raise"):
            raise ValueError(f"on_full must be 'block', 'drop' or 'raise', not {on_full!r}")
        if self._limit < 1 or self._rotate < 1 or (keep is not None and keep < 1):
            raise ValueError("buffer_bytes, rotate_bytes and keep must be at least 1")
        #: Records that ``append`` has dropped.
        self.dropped = 0
        self._process = os.getpid()
        self._lock = threading.RLock()  # held for moments; reentrant: a signal handler may append
        self._changed = threading.Condition(self._lock)
        self._records: list[bytes] = []
        self._bytes = 0  # of those, and of what is being written
        self._asked = self._durable = 0  # flushes
        self._failure: OSError | None = None
        self._closing = False
        self._segment: _Segment | None = _Segment.new(self.path)
        self._thread = threading.Thread(target=self._run, name="nvme_ops.log", daemon=True)
        self._thread.start()
        _open.add(self)

    def append(self, record: bytes | bytearray | memoryview | str | Mapping[str, object]) -> bool:
        """Adds a record: bytes, text (UTF-8), or a dict (JSON). Returns whether it was taken.

        Raises:
            OSError: writing failed, and has not succeeded since. What was appended before is tried again; this is not.
            BlockingIOError: the buffer is full, with ``on_full="raise"``.
            ValueError: the log is closed, or the record has 4 GiB.
            RuntimeError: in a forked child.
        """
        if not isinstance(record, bytes):
            record = _encoded(record)
        if len(record) > _MOST:
            raise ValueError(f"a record must have less than 4 GiB, not {size_words(len(record))}")
        with self._lock:
            busy = self._closing or self._failure is not None or self._bytes >= self._limit
            if busy and not self._admit():
                return False
            self._records.append(record)
            self._bytes += len(record) + 4
        return True

    def flush(self, timeout: float | None = None) -> None:
        """Waits until everything appended so far is durable. Raises OSError if it cannot be written; TimeoutError."""
        self._require_ours()
        deadline = None if timeout is None else time.monotonic() + timeout
        with self._changed:
            if self._closing and not self._thread.is_alive():
                return
            self._asked += 1
            mine = self._asked
            self._changed.notify_all()
            while self._durable < mine:
                left = None if deadline is None else deadline - time.monotonic()
                if left is not None and left <= 0:
                    raise TimeoutError(f"{self.path}: not durable after {timeout} s")
                if not self._thread.is_alive():
                    raise RuntimeError(f"{self.path}: the thread that writes has ended")
                self._changed.wait(min(self.window, 1.0 if left is None else left))
                if self._failure is not None:
                    raise self._failure

    def close(self) -> None:
        """Writes everything and ends the file. Raises OSError if it cannot be written: call it again, or give up."""
        if self._process != os.getpid() or not self._thread.is_alive():
            return
        self.flush()
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join()
        if self._failure is not None:
            raise self._failure

    def _admit(self) -> bool:
        """Returns whether a record may be added, perhaps after a wait."""
        self._require_ours()
        while True:
            if self._closing:
                raise ValueError(f"{self.path}: the log is closed")
            if self._failure is not None:
                raise self._failure
            if self._bytes < self._limit:
                return True
            if self.on_full == "drop":
                self.dropped += 1
                return False
            if self.on_full == "raise":
                words = f"{size_words(self._bytes)} wait to be written"
                raise BlockingIOError(errno.EAGAIN, words, self.path)
            self._asked += 1
            self._changed.notify_all()
            self._changed.wait(0.05)

    def _require_ours(self) -> None:
        if self._process != os.getpid():
            raise RuntimeError(f"{self.path}: this log is the parent's: a forked child makes its own")

    # On the thread that writes

    def _run(self) -> None:
        while self._work():
            pass

    def _work(self) -> bool:
        """Waits for a part of a window, writes what there is, and returns whether to go on."""
        with self._changed:
            if self._asked == self._durable and not self._closing:
                self._changed.wait(self.window / _PARTS)
            records, self._records = self._records, []
            taken, asked, closing = self._bytes, self._asked, self._closing
        failure: OSError | None = None
        try:
            if records:
                self._write(records)
            if closing and self._segment is not None:
                self._segment.end()
                self._segment = None
        except OSError as error:
            failure = error
            self._leave_segment()
        with self._changed:
            self._failure = failure
            if failure is not None:  # to be written again, to another file
                self._records[:0] = records
            else:
                self._bytes -= taken
                self._durable = asked
            self._changed.notify_all()
            if failure is not None and not closing:
                self._changed.wait(min(self.window, 0.2))
        return not closing

    def _write(self, records: list[bytes]) -> None:
        for start in range(0, len(records), _BLOCK):
            if self._segment is None:
                self._segment = _Segment.new(self.path)
            self._segment.write(records[start : start + _BLOCK])
            if self._segment.nbytes >= self._rotate:
                self._segment.end()
                self._segment = None
                self._remove_oldest()
        if self._segment is not None:
            self._segment.sync()

    def _leave_segment(self) -> None:
        segment, self._segment = self._segment, None
        if segment is not None:
            segment.leave()

    def _remove_oldest(self) -> None:
        if self._keep is None:
            return
        for path in segments(self.path)[: -self._keep]:
            with contextlib.suppress(OSError):
                fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
                try:
                    if locks.take(fd):  # nobody writes to it
                        os.unlink(path)
                finally:
                    os.close(fd)

    def __enter__(self) -> AsyncLog:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        """Returns for example ``<AsyncLog '/mnt/nvme/requests': 12 KiB to be written>``."""
        return f"<AsyncLog {self.path!r}: {size_words(self._bytes) if self._bytes else 'nothing'} to be written>"


def _encoded(record: object) -> bytes:
    if isinstance(record, Mapping):
        return json.dumps(record).encode()
    if isinstance(record, str):
        return record.encode()
    if isinstance(record, bytearray | memoryview):
        return bytes(record)
    raise TypeError(f"a record must be bytes, a str or a dict, not {type(record).__name__}")


class _Segment:
    """One file of a log, locked while it is written to."""

    def __init__(self, path: str, file: File) -> None:
        self.path, self._file, self.nbytes = path, file, 0

    @classmethod
    def new(cls, path: str) -> _Segment:
        """Makes the next file."""
        while True:
            found = segments(path)
            number = int(found[-1].rpartition(".")[2]) + 1 if found else 0
            name = f"{path}.{number:06d}"
            with contextlib.suppress(FileExistsError):  # another process has taken the number
                file = File(name, "x")
                locks.take(file.fileno())
                sync_folder(os.path.dirname(path))
                return cls(name, file)

    def write(self, records: list[bytes]) -> None:
        """Adds a block."""
        lengths = array("I", map(len, records))
        if sys.byteorder != "little":
            lengths.byteswap()
        payload = b"".join(records)
        body = lengths.tobytes()
        rest = _HEAD.pack(_MAGIC, 0, len(records), len(payload))[_AFTER_CRC:] + body + payload
        self._file.write(_HEAD.pack(_MAGIC, checksums_of([rest], "crc32c")[0], len(records), len(payload)))
        self._file.write(memoryview(rest)[_HEAD.size - _AFTER_CRC :])
        self.nbytes += _AFTER_CRC + len(rest)

    def sync(self) -> None:
        """Makes it durable."""
        self._file.sync()

    def end(self) -> None:
        """Ends the file in good order."""
        self.write([])
        self.sync()
        self._file.close()

    def leave(self) -> None:
        """Closes it after a failure."""
        with contextlib.suppress(OSError):
            self._file.close()


def segments(path: str | os.PathLike[str]) -> list[str]:
    """Returns the files of a log, oldest first. Raises OSError."""
    folder, name = os.path.split(os.path.abspath(os.fspath(path)))
    pattern = re.compile(re.escape(name) + r"\.(\d{6,})")
    found = [entry for entry in os.listdir(folder) if pattern.fullmatch(entry)]
    return [os.path.join(folder, entry) for entry in sorted(found, key=lambda entry: int(entry.rpartition(".")[2]))]


def read_log(path: str | os.PathLike[str]) -> Iterator[bytes]:
    """Yields the records of a log, file after file; of one that is being written, those that are in the file by now.

    A file whose writer was killed, or has not ended yet, may end within a block: what is behind the last whole block is
    skipped.

    Raises:
        FileNotFoundError: there is no such log.
        FormatError: a file that was ended in good order is damaged; the message says where.
    """
    found = segments(path)
    if not found:
        raise FileNotFoundError(errno.ENOENT, "no log of this name", os.fspath(path))
    for segment in found:
        yield from _read(segment)


def _read(path: str) -> Iterator[bytes]:
    with contextlib.closing(File(path, "r")) as file:
        nbytes = os.fstat(file.fileno()).st_size
        ended = _is_ended(file.fileno(), nbytes)
        place = 0
        while place < nbytes:
            block = _block(file, nbytes - place)
            if block is None:
                if ended:
                    raise FormatError(f"{path}: damaged at byte {place}")
                return
            lengths, payload = block
            begin = 0
            for length in lengths:
                yield payload[begin : begin + length]
                begin += length
            place += _HEAD.size + 4 * len(lengths) + len(payload)


def _is_ended(fd: int, nbytes: int) -> bool:
    """Returns whether the file has its last block."""
    end = _HEAD.pack(_MAGIC, 0, 0, 0)[_AFTER_CRC:]
    whole = _MAGIC + struct.pack("<I", checksums_of([end], "crc32c")[0]) + end
    return nbytes >= len(whole) and os.pread(fd, len(whole), nbytes - len(whole)) == whole


def _block(file: File, left: int) -> tuple[array[int], bytes] | None:
    """Returns the lengths of the records in the next block, and the records; None for what is no whole block."""
    head = file.read(_HEAD.size)
    if len(head) < _HEAD.size:
        return None
    magic, checksum, count, nbytes = _HEAD.unpack(head)
    if magic != _MAGIC or count > _BLOCK or _HEAD.size + 4 * count + nbytes > left:
        return None
    body = file.read(4 * count + nbytes)
    if len(body) != 4 * count + nbytes or checksums_of([head[_AFTER_CRC:] + body], "crc32c")[0] != checksum:
        return None
    lengths = array("I", body[: 4 * count])
    if sys.byteorder != "little":
        lengths.byteswap()
    return (lengths, body[4 * count :]) if sum(lengths) == nbytes else None


_open: weakref.WeakSet[AsyncLog] = weakref.WeakSet()


def _close_all() -> None:
    for log in list(_open):
        try:
            log.close()
        except Exception as error:
            warnings.warn(
                f"{log.path}: what was appended last could not be written: {error}", RuntimeWarning, stacklevel=1
            )


atexit.register(_close_all)
