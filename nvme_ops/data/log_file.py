"""The files of an ``AsyncLog``: ``Segment`` writes one, ``records_of`` reads them all.

A log is a series of files, ``NAME.000000`` and so on. A file consists of blocks: 4 bytes ``NVLG``; uint32 CRC-32C of
the rest of the block; uint32 number of records; uint64 size of all records; a uint32 for the size of each record; the
records. The last block of a properly ended file has no records. Sizes are in bytes, all numbers little-endian.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import re
import stat
import struct
import sys
import warnings
from array import array
from collections.abc import Iterator

from nvme_ops.base.errors import FormatError, naming
from nvme_ops.filesystem.files import sync_folder, try_lock, write_whole
from nvme_ops.io.file import File
from nvme_ops.io.tensors import checksums_of

_MAGIC, _LAST_MAGIC = b"NVLG", b"NVLZ"  # the last letter is the version
_HEAD = struct.Struct("<4sIIQ")
_AFTER_CRC = 8  # bytes of the head that the checksum does not cover
_SEARCHED = 1 << 20  # bytes that are read at once to find a block after damage
_BLOCK, _BLOCK_BYTES = 1 << 16, 4 << 20  # the most records and bytes in a block; a larger record has its own


def blocks(records: list[bytes]) -> Iterator[list[bytes]]:
    """Divides records into blocks; yields the records of each."""
    for start in range(0, len(records), _BLOCK):
        waiting = [records[start : start + _BLOCK]]
        while waiting:
            block = waiting.pop()
            if len(block) == 1 or sum(map(len, block)) <= _BLOCK_BYTES:
                yield block
            else:
                waiting += [block[len(block) // 2 :], block[: len(block) // 2]]


class Segment:
    """One file of a log, locked while it is written to."""

    def __init__(self, path: str, fd: int) -> None:
        self.path, self._fd = path, fd
        self.owner = os.fstat(fd).st_uid  # not always geteuid(): some network file systems choose it
        self.nbytes = self._durable = 0
        self.sync_failed = False
        self.failed = False  # only what is durable may stay in it

    @classmethod
    def new(cls, path: str) -> Segment:
        """Creates and locks the next file of the log at ``path``. Raises OSError."""
        while True:
            paths = segments(path)
            number = int(paths[-1].rpartition(".")[2]) + 1 if paths else 0
            name = f"{path}.{number:06d}"
            with contextlib.suppress(FileExistsError):  # another process has taken the number
                fd = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
                made = cls(name, fd)
                try:
                    try_lock(fd)
                    sync_folder(os.path.dirname(path))
                    return made
                except BaseException:
                    with contextlib.suppress(Exception):
                        made.abandon()
                    made.close()
                    raise

    def write(self, records: list[bytes]) -> int:
        """Adds a block; returns the bytes of its records and their lengths."""
        lengths = _lengths(array("I", map(len, records)).tobytes())  # in little-endian
        head = _HEAD.pack(_MAGIC, 0, len(records), sum(map(len, records)))[_AFTER_CRC:]
        body = b"".join([head, lengths.tobytes(), *records])
        place = self.nbytes
        with naming("write of records", self.path):
            for part in (_MAGIC + struct.pack("<I", checksums_of([body], "crc32c")[0]), body):
                write_whole(self._fd, part, place)
                place += len(part)
        self.nbytes = place
        return len(body) - len(head)

    def sync(self) -> None:
        """Makes the file durable. Raises OSError; FileNotFoundError if it was removed, so that nobody could read it."""
        self.sync_failed = True
        with naming("fdatasync", self.path):
            os.fdatasync(self._fd)
        if not os.fstat(self._fd).st_nlink:
            raise FileNotFoundError(errno.ENOENT, "was removed while it was written to", self.path)
        self.sync_failed = False
        self._durable = self.nbytes

    def end(self) -> None:
        """Adds the block that marks a proper end, makes the file durable, and closes it. Raises OSError."""
        self.write([])
        self.sync()
        self.close()

    def cut(self) -> None:
        """Truncates the file to its whole blocks. Raises OSError."""
        os.ftruncate(self._fd, self.nbytes)

    def abandon(self) -> None:
        """Truncates the file to what is durable, or removes it if nothing is, and closes it.

        Raises OSError if readers would still find more. The file then stays open, and this can be called again.
        """
        self.nbytes = self._durable
        try:
            if self._durable:
                self.cut()
            elif os.fstat(self._fd).st_nlink:  # if not, the name may be another log's by now
                os.unlink(self.path)
        except OSError as error:
            words = f"a file that could not be written cannot be cut back: {error.strerror}"
            raise OSError(error.errno, words, self.path) from error
        if self._durable:
            with contextlib.suppress(OSError):
                os.fdatasync(self._fd)  # a power failure could bring back what was cut off
        self.close()

    def close(self) -> None:
        """Closes the file as it is. Further calls do nothing."""
        fd, self._fd = self._fd, -1
        with contextlib.suppress(OSError):
            os.close(fd)


def segments(path: str | os.PathLike[str]) -> list[str]:
    """Returns the files of a log, oldest first. Raises OSError."""
    folder, name = os.path.split(os.path.abspath(os.fspath(path)))
    pattern = re.compile(re.escape(name) + r"\.(\d{6,})")
    entries = [entry for entry in os.listdir(folder) if pattern.fullmatch(entry)]
    return [os.path.join(folder, entry) for entry in sorted(entries, key=lambda entry: int(entry.rpartition(".")[2]))]


def is_owned_by(path: str, owner: int) -> bool:
    """Returns whether ``path`` is a regular file, not a link, of the user ``owner``."""
    with contextlib.suppress(OSError):
        status = os.lstat(path)
        return stat.S_ISREG(status.st_mode) and status.st_uid == owner
    return False


def records_of(path: str | os.PathLike[str]) -> Iterator[bytes]:
    """Implements ``AsyncLog.read``."""
    paths = segments(path)
    if not paths:
        raise FileNotFoundError(errno.ENOENT, "no log of this name", os.fspath(path))
    for segment in paths:
        try:
            if not stat.S_ISREG(os.stat(segment).st_mode):  # not made by a log
                continue
            file = File(segment, "r")
        except FileNotFoundError:  # it was rotated away
            continue
        yield from _read(segment, file)


def _read(path: str, file: File) -> Iterator[bytes]:
    with contextlib.closing(file):
        nbytes = os.fstat(file.fileno()).st_size
        ended = _is_ended(file.fileno(), nbytes)
        if _MAGIC < (magic := os.pread(file.fileno(), len(_MAGIC), 0)) <= _LAST_MAGIC:
            raise FormatError(f"{path}: version {magic.decode()} of the format; this program knows {_MAGIC.decode()}")
        place: int | None = 0
        while place is not None and place < nbytes:
            block = _block(file, place, nbytes)
            if block is not None:
                records, place = block
                yield from records
            elif ended:
                raise FormatError(f"{path}: damaged at byte {place}")
            elif (after := _next_block(file, place, nbytes)) is not None:
                words = f"{path}: damaged from byte {place} to {after}; what was there is lost"
                warnings.warn(words, RuntimeWarning, stacklevel=3)
                place = after
            else:
                return


def _is_ended(fd: int, nbytes: int) -> bool:
    """Returns whether the file ends with the block that marks a proper end."""
    end = _HEAD.pack(_MAGIC, 0, 0, 0)[_AFTER_CRC:]
    whole = _MAGIC + struct.pack("<I", checksums_of([end], "crc32c")[0]) + end
    return nbytes >= len(whole) and os.pread(fd, len(whole), nbytes - len(whole)) == whole


def _next_block(file: File, damaged: int, nbytes: int) -> int | None:
    """Returns where to continue after the block at ``damaged``; None if nothing follows it."""
    end = _end_by_head(file, damaged, nbytes)
    if end is not None:
        return end if end < nbytes else None
    place = damaged + 1
    while place < nbytes:
        try:
            place = os.lseek(file.fileno(), place, os.SEEK_DATA)  # skips holes, which may have any size
        except OSError as error:
            if error.errno == errno.ENXIO:  # a hole up to the end
                return None
        part = _read_at(file, place, min(_SEARCHED, nbytes - place))
        if not part:  # the file was truncated meanwhile
            return None
        index = part.find(_MAGIC)
        while index >= 0:
            if _block(file, place + index, nbytes) is not None:
                return place + index
            index = part.find(_MAGIC, index + 1)
        place += max(1, len(part) - len(_MAGIC) + 1)
    return None


def _end_by_head(file: File, damaged: int, nbytes: int) -> int | None:
    """Returns where a damaged block ends; None if its head is not credible.

    A search for the next block could find bytes within a record that look like one.
    """
    head = _read_at(file, damaged, _HEAD.size)
    magic, _, count, payload = _HEAD.unpack(head.ljust(_HEAD.size, b"\0"))
    if magic != _MAGIC or count > _BLOCK:
        return None
    lengths = file.read(4 * count)
    end: int = damaged + _HEAD.size + 4 * count + payload
    credible = len(lengths) == 4 * count and sum(_lengths(lengths)) == payload
    return end if credible or (end < nbytes and _block(file, end, nbytes) is not None) else None


def _block(file: File, place: int, nbytes: int) -> tuple[Iterator[bytes], int] | None:
    """Returns the records of the block at ``place``, and where it ends; None if no whole block is there."""
    head = _read_at(file, place, _HEAD.size)
    magic, checksum, count, payload = _HEAD.unpack(head.ljust(_HEAD.size, b"\0"))
    end: int = place + _HEAD.size + 4 * count + payload
    if magic != _MAGIC or count > _BLOCK or end > nbytes:
        return None
    body = file.read(4 * count + payload)
    if len(body) != 4 * count + payload or checksums_of([head[_AFTER_CRC:] + body], "crc32c")[0] != checksum:
        return None
    places = list(itertools.accumulate(_lengths(body[: 4 * count]), initial=4 * count))
    if places[-1] != len(body):
        return None
    return (body[start:stop] for start, stop in itertools.pairwise(places)), end


def _read_at(file: File, place: int, nbytes: int) -> bytes:
    file.seek(place)
    return file.read(nbytes)


def _lengths(content: bytes) -> array[int]:
    lengths = array("I", content)
    if sys.byteorder != "little":
        lengths.byteswap()
    return lengths
