"""Reads and lays out the archive of ``torch.save``: a zip file whose records are stored, not compressed, in one folder.

torch calls the folder the archive's name; here, names of records do not include it. Archives to be written are laid out
here, since ``zipfile`` writes the directory only of records whose bytes have passed through it. Archives to be read are
parsed by ``zipfile``, then checked; the offsets of the data, which it does not report, are found by records' headers.

https://pkware.cachefly.net/webdocs/casestudies/APPNOTE.TXT
"""

from __future__ import annotations

import os
import struct
import sys
import zipfile
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from nvme_ops.base.errors import ChecksumError
from nvme_ops.base.settings import ALIGNMENT, LARGE, PAGE
from nvme_ops.formats.mistaken import refuse
from nvme_ops.formats.pickle_protocol import in_protocol_2
from nvme_ops.io.handle import aio_handle
from nvme_ops.io.tensors import bytes_of, pool_buffer

#: The folder in archives written here; torch names it after the file.
FOLDER = b"archive/"
#: The record with the pickle of the object, without its storages.
PICKLE = "data.pkl"
#: The records beside it: the byte order of the storages, and the version of torch's format.
AROUND = {"byteorder": sys.byteorder.encode(), "version": b"3\n"}
#: The kind of checksum that a zip file has for each record.
CHECKSUM = "crc32"
#: Where the checksum is in a record's header, and in its entry in the directory.
LOCAL_CHECKSUM, CENTRAL_CHECKSUM = 14, 16

_LOCAL = struct.Struct("<4s5H3I2H")
_CENTRAL = struct.Struct("<4s6H3I5H2I")
_END, _END64, _LOCATOR = struct.Struct("<4s4H2IH"), struct.Struct("<4sQ2H2I4Q"), struct.Struct("<4sIQI")
_LOCAL_MARK = b"PK\3\4"
_ENCRYPTED, _UTF8 = 0x1, 0x800  # flags
_NEEDS, _NEEDS_64 = 20, 45  # format version needed to extract, times ten
_DATE = 0x21  # 1980-01-01, so that equal objects make equal files
_FIELD, _FIELD_64 = struct.Struct("<2sH"), struct.Struct("<2H2Q")
_PADDING, _ZIP64 = b"FB", 1  # ids of extra fields: torch's padding, and large numbers
_MOST_32, _MOST_16 = 0xFFFFFFFF, 0xFFFF  # a number that is not below these is in a field of zip64


@dataclass(slots=True)
class ZipRecord:
    """A record to be written: ``size`` bytes at ``start``, after a header at ``header``, both within the archive."""

    name: bytes
    size: int
    data: Any = None
    crc: int = 0
    header: int = 0
    start: int = 0

    def local(self) -> bytes:
        """Returns the header, up to the data."""
        wide = self.size >= _MOST_32
        shown, needs = (_MOST_32, _NEEDS_64) if wide else (self.size, _NEEDS)
        extra = _FIELD_64.pack(_ZIP64, 16, self.size, self.size) if wide else b""
        length = self.start - self.header - _LOCAL.size - len(self.name)
        padding = length - len(extra) - _FIELD.size
        numbers = (needs, _UTF8, 0, 0, _DATE, self.crc, shown, shown, len(self.name), length)
        return _LOCAL.pack(_LOCAL_MARK, *numbers) + self.name + extra + _FIELD.pack(_PADDING, padding) + bytes(padding)

    def around(self, crc: int) -> list[tuple[int, bytes]]:
        """Sets the checksum of the data; returns the header's place and bytes, for ``FramedTensor``."""
        self.crc = crc
        return [(self.header, self.local())]


def lay_out(records: Iterable[ZipRecord], base: int = 0) -> int:
    """Places records one after the other, with headers, in an archive that begins ``base`` bytes into a file.

    Returns where the directory begins.
    """
    position = 0
    for record in records:
        record.header = position
        # as torch aligns; large ones to a page, so that storage and memory exchange pages without a copy
        alignment = PAGE if record.size >= LARGE else ALIGNMENT
        extra = _FIELD.size + (_FIELD_64.size if record.size >= _MOST_32 else 0)
        least = base + position + _LOCAL.size + len(record.name) + extra
        record.start = -(-least // alignment) * alignment - base
        position = record.start + record.size
    return position


def directory(records: Sequence[ZipRecord], position: int) -> bytes:
    """Returns the zip directory, which follows the last record, at ``position``."""
    entries = []
    for record in records:
        name, size, header, extra = record.name, record.size, record.header, b""
        if max(size, header) >= _MOST_32:
            wide = [number for number in (size, size, header) if number >= _MOST_32]
            extra = struct.pack(f"<2H{len(wide)}Q", _ZIP64, 8 * len(wide), *wide)
        needs, shown = _NEEDS_64 if extra else _NEEDS, min(size, _MOST_32)
        numbers = (needs, needs, _UTF8, 0, 0, _DATE, record.crc, shown, shown, len(name), len(extra), 0, 0, 0, 0)
        entries.append(_CENTRAL.pack(b"PK\1\2", *numbers, min(header, _MOST_32)) + name + extra)
    made = b"".join(entries)
    count, length, wide_end = len(records), len(made), b""
    if count >= _MOST_16 or max(position, length) >= _MOST_32:
        wide_numbers = (_END64.size - 12, _NEEDS_64, _NEEDS_64, 0, 0, count, count, length, position)
        wide_end = _END64.pack(b"PK\6\6", *wide_numbers) + _LOCATOR.pack(b"PK\6\7", 0, position + length, 1)
    shown_count = min(count, _MOST_16)
    end = (0, 0, shown_count, shown_count, min(length, _MOST_32), min(position, _MOST_32), 0)
    return made + wide_end + _END.pack(b"PK\5\6", *end)


class ZipEntry(NamedTuple):
    """What the directory says about one record, from its header at ``header`` to ``limit`` at most."""

    name: bytes
    method: int
    stored: int
    size: int
    crc: int
    header: int
    limit: int


@dataclass
class Archive:
    """An open archive with its records by name, in the directory's order; offsets are those in the file."""

    fd: int
    path: str
    handle: aio_handle
    records: dict[str, ZipEntry]
    starts: dict[str, int] = field(default_factory=dict)  # of the data, as far as known
    mapped: bool = False  # whether storages may be mapped from the file
    verified: bool = False  # whether checksums of what is read are compared

    def locate(self, names: Iterable[str]) -> None:
        """Reads the headers of these records to learn the ``starts`` of their data.

        Raises:
            FormatError: there is no such record, its header is invalid, or its data overlap what follows.
        """
        unknown = {self._entry(name).header: name for name in names if name not in self.starts}
        sizes = {header: _LOCAL.size + len(self.records[unknown[header]].name) for header in unknown}
        if spans := spans_of([(header, header + sizes[header]) for header in sorted(sizes)], PAGE):
            memory = torch.frombuffer(pool_buffer(sum(end - start for start, end in spans)), dtype=torch.uint8)
            parts = memory.split([end - start for start, end in spans])
            begins = [start for start, _ in spans]
            self.handle.submit_preadv(parts, self.fd, begins).result()
            self.learn(unknown.values(), zip(begins, parts, strict=True))

    def _entry(self, name: str) -> ZipEntry:
        if name not in self.records:
            refuse(self.path, f"the zip directory has no record {name!r}")
        return self.records[name]

    def learn(self, names: Iterable[str], memories: Iterable[tuple[int, torch.Tensor]]) -> None:
        """Does what ``locate`` does, from parts of the file that were read already: offsets and byte tensors."""
        unknown = sorted([(self.records[name].header, name) for name in names if name not in self.starts])
        number = 0
        for begin, memory in memories:
            content = bytes_of(memory)
            while number < len(unknown) and unknown[number][0] < begin + memory.nbytes:
                name, place = unknown[number][1], unknown[number][0] - begin
                number += 1
                record = self.records[name]
                mark, *_, name_length, extra_length = _LOCAL.unpack_from(content, place)
                local_name = bytes(content[place + _LOCAL.size : place + _LOCAL.size + len(record.name)])
                if mark != _LOCAL_MARK or name_length != len(record.name) or local_name != record.name:
                    refuse(self.path, f"record {name!r}: its header is not at byte {record.header}")
                start = record.header + _LOCAL.size + name_length + extra_length
                if start + record.stored > record.limit:
                    what = f"its bytes reach beyond {record.limit}, where something else begins"
                    refuse(self.path, f"record {name!r}: {what}")
                self.starts[name] = start

    def content(self, name: str) -> bytes:
        """Reads a whole record. Raises as ``locate``, and ChecksumError if contents are ``verified``."""
        record = self._entry(name)
        end = min(record.limit, record.header + _LOCAL.size + len(record.name) + _MOST_16 + record.stored)
        memory = torch.frombuffer(pool_buffer(end - record.header), dtype=torch.uint8)
        self.handle.submit_pread(memory, self.fd, record.header).result()
        self.learn([name], [(record.header, memory)])
        start = self.starts[name] - record.header
        content = bytes(bytes_of(memory)[start : start + record.size])
        if self.verified and zlib.crc32(content) != record.crc:
            raise ChecksumError(self.path, [name])
        return content

    def pickled(self) -> bytes:
        """Returns the pickle, in protocol 2. Raises as ``content``, and UnsafeError where that cannot express it."""
        return in_protocol_2(self.content(PICKLE), self.path)


def spans_of(places: Iterable[tuple[int, int]], gap: int, alignment: int = 1) -> list[tuple[int, int]]:
    """Returns spans of a file (start, end) that cover sorted places, with at most ``gap`` unwanted bytes between two.

    Those of one span are aligned as its beginning is.
    """
    spans: list[tuple[int, int]] = []
    for start, end in places:
        if spans and start - spans[-1][1] <= gap and (start - spans[-1][0]) % alignment == 0:
            spans[-1] = (spans[-1][0], end)
        else:
            spans.append((start, end))
    return spans


def is_zip(fd: int) -> bool:
    """Returns whether an open file begins like a zip file, which is how torch decides."""
    return os.pread(fd, 4, 0) == _LOCAL_MARK


def open_archive(fd: int, path: str, handle: aio_handle, begin: int = 0, end: int | None = None) -> Archive:
    """Reads the directory of an archive: an open file, or its bytes from ``begin`` to ``end``.

    Never allocates memory for a number that the size contradicts.

    Raises:
        FormatError: the archive is damaged or not supported; the message says how.
    """
    part = _Part(fd, begin, os.fstat(fd).st_size if end is None else end)
    try:
        with zipfile.ZipFile(part) as archive:
            infos, limit = archive.infolist(), begin + archive.start_dir
    except Exception as error:  # zipfile raises errors of many types
        if part.failure is not None:
            raise OSError(part.failure.errno, part.failure.strerror, path) from None
        refuse(path, f"no zip directory, or a damaged one: the file was cut short, or is not a zip file: {error}")
    entries = []
    for info in infos:
        name = info.orig_filename.encode("utf-8" if info.flag_bits & _UTF8 else "cp437")
        if info.flag_bits & _ENCRYPTED:
            refuse(path, f"record {info.filename!r} is encrypted")
        if info.compress_type == zipfile.ZIP_STORED and info.compress_size != info.file_size:
            what = f"the directory says that {info.file_size} bytes are stored in {info.compress_size}"
            refuse(path, f"record {info.filename!r}: {what}")
        numbers = info.compress_type, info.compress_size, info.file_size, info.CRC, begin + info.header_offset
        entries.append(ZipEntry(name, *numbers, limit=0))
    return Archive(fd, path, handle, _checked(entries, begin, limit, path))


class _Part:
    """A part of a file as a file object with the methods that ``zipfile`` needs."""

    failure: OSError | None = None  #: of a read, which ``zipfile`` takes for the end of what is no zip file

    def __init__(self, fd: int, begin: int, end: int) -> None:
        self._fd, self._begin, self._end, self._place = fd, begin, end, begin

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: self._begin, os.SEEK_CUR: self._place, os.SEEK_END: self._end}[whence]
        if base + offset < self._begin:
            raise OSError("before the beginning")
        self._place = base + offset
        return self._place - self._begin

    def tell(self) -> int:
        return self._place - self._begin

    def read(self, size: int = -1) -> bytes:
        remaining = max(0, self._end - self._place)
        remaining = remaining if size < 0 else min(size, remaining)
        parts = []
        try:
            while remaining and (part := os.pread(self._fd, remaining, self._place)):
                parts.append(part)
                self._place, remaining = self._place + len(part), remaining - len(part)
        except OSError as error:
            self.failure = error
            raise
        return b"".join(parts)


def _checked(entries: Sequence[ZipEntry], begin: int, limit: int, path: str) -> dict[str, ZipEntry]:
    """Returns the records by their names in the folder, with limits. Refuses overlaps and names used twice."""
    if not entries:
        refuse(path, "the zip directory has no entries")
    folder = entries[0].name.partition(b"/")[0] + b"/"
    limits: dict[int, int] = {}
    for number in sorted(range(len(entries)), key=[entry.header for entry in entries].__getitem__, reverse=True):
        record = entries[number]
        least = record.header + _LOCAL.size + len(record.name) + record.stored
        if least > limit or record.header < begin:
            what = "the record that follows it" if limits else "the zip directory"
            name = record.name.decode(errors="replace")
            refuse(path, f"record {name!r}: its {record.stored} bytes overlap {what} at byte {limit}")
        limits[number] = limit
        limit = record.header
    records: dict[str, ZipEntry] = {}
    for number, record in enumerate(entries):
        if not record.name.startswith(folder):
            continue
        name = record.name[len(folder) :].decode(errors="replace")
        if name in records:
            refuse(path, f"the zip directory names {name!r} twice")
        records[name] = record._replace(limit=limits[number])
    return records
