"""Parses the zip container of ``torch.save``: the offsets of its records. Reads no tensor.

Records are stored, not compressed, all below one folder, which torch calls the archive's name; names here are without
it.
"""

from __future__ import annotations

import os
import stat
import struct
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, NoReturn

import torch

from nvme_ops.errors import FormatError
from nvme_ops.formats import zip_parts
from nvme_ops.handle import aio_handle
from nvme_ops.tensors import bytes_of, pool_buffer

_ENCRYPTED = 0x1
# Bytes of headers that are read at once, and the gap between two of them up to which it is read as well.
_BATCH, _NEAR = 8 << 20, 64 << 10


class ZipEntry(NamedTuple):
    """What the directory says about one record: its header is at ``header``, and all of it ends before ``limit``."""

    name: bytes
    method: int
    stored: int
    size: int
    crc: int
    header: int
    limit: int


@dataclass
class Archive:
    """An open container of ``size`` bytes, with its records by name in the directory's order."""

    fd: int
    path: str
    size: int
    records: dict[str, ZipEntry]
    starts: dict[str, int] = field(default_factory=dict)

    def locate(self, handle: aio_handle, names: Iterable[str]) -> None:
        """Reads the headers of these records to learn the ``starts`` of their data.

        Raises:
            FormatError: no such record, an invalid header, or data that overlap what follows.
        """
        unknown = set()
        for name in names:
            if name not in self.records:
                refuse(self.path, f"the zip directory has no record {name!r}")
            if name not in self.starts:
                unknown.add(name)
        runs = _runs(sorted((self.records[name].header, len(self.records[name].name), name) for name in unknown))
        for batch in _batches(runs):
            buffer = pool_buffer(sum(end - begin for begin, end, _ in batch))
            memory = torch.frombuffer(buffer, dtype=torch.uint8)
            parts = memory.split([end - begin for begin, end, _ in batch])
            handle.submit_preadv(parts, self.fd, [begin for begin, _, _ in batch]).result()
            place = 0
            with memoryview(buffer) as content:
                for begin, end, found in batch:
                    for name in found:
                        self._learn(name, content, place - begin)
                    place += end - begin

    def learn(self, names: Iterable[str], memories: Iterable[tuple[int, torch.Tensor]]) -> None:
        """Does the same with parts of the file that were read already: byte tensors with their offsets."""
        unknown = sorted((self.records[name].header, name) for name in names if name not in self.starts)
        number = 0
        for begin, memory in memories:
            content = bytes_of(memory)
            while number < len(unknown) and unknown[number][0] < begin + memory.nbytes:
                self._learn(unknown[number][1], content, -begin)
                number += 1

    def _learn(self, name: str, content: memoryview, shift: int) -> None:
        record = self.records[name]
        place = record.header + shift
        mark, *_, name_length, extra_length = zip_parts.LOCAL.unpack_from(content, place)
        found = bytes(content[place + zip_parts.LOCAL.size : place + zip_parts.LOCAL.size + len(record.name)])
        if mark != zip_parts.LOCAL_MARK or name_length != len(record.name) or found != record.name:
            refuse(self.path, f"record {name!r}: there is no header of it at byte {record.header}")
        start = record.header + zip_parts.LOCAL.size + name_length + extra_length
        if start + record.stored > record.limit:
            refuse(self.path, f"record {name!r}: its bytes reach beyond {record.limit}, where something else begins")
        self.starts[name] = start


def _runs(headers: Iterable[tuple[int, int, str]]) -> Iterator[tuple[int, int, list[str]]]:
    """Returns spans of the file that hold the headers at these offsets, with names of these lengths."""
    begin = end = 0
    names: list[str] = []
    for place, length, name in headers:
        after = place + zip_parts.LOCAL.size + length
        if names and (place - end > _NEAR or after - begin > _BATCH):
            yield begin, end, names
            names = []
        if not names:
            begin = place
        end = after
        names.append(name)
    if names:
        yield begin, end, names


def _batches(runs: Iterable[tuple[int, int, list[str]]]) -> Iterator[list[tuple[int, int, list[str]]]]:
    batch: list[tuple[int, int, list[str]]] = []
    size = 0
    for run in runs:
        if batch and size + run[1] - run[0] > _BATCH:
            yield batch
            batch, size = [], 0
        batch.append(run)
        size += run[1] - run[0]
    if batch:
        yield batch


def is_zip(fd: int) -> bool:
    """Returns whether these first bytes are a zip file's, as torch decides."""
    return os.pread(fd, 4, 0) == zip_parts.LOCAL_MARK


def open_archive(fd: int, path: str) -> Archive:
    """Reads the directory of an open file. Allocates nothing by a number that the file's size contradicts.

    Raises:
        FormatError: with the file and the field that is wrong.
    """
    size = os.fstat(fd).st_size
    count, offset, length = _end(fd, size, path)
    if offset + length > size:
        refuse(path, f"the zip directory reaches to byte {offset + length} of a file of {size}: it was cut short")
    if count * zip_parts.CENTRAL.size > length:
        refuse(path, f"the zip directory cannot have {count} entries in {length} bytes")
    entries = _entries(_read(fd, offset, length, path), count, path)
    return Archive(fd, path, size, _checked(entries, offset, path))


def _end(fd: int, size: int, path: str) -> tuple[int, int, int]:
    """Returns how many entries the directory has, where it starts and its length."""
    begin = max(0, size - zip_parts.END.size - zip_parts.MOST_16)  # a comment may follow
    tail = _read(fd, begin, size - begin, path)
    place = tail.rfind(zip_parts.END_MARK)
    if place < 0 or place + zip_parts.END.size > len(tail):
        refuse(path, "the zip directory at the end is missing: the file was cut short, or is no zip file")
    _, disk, _, _, count, length, offset, comment = zip_parts.END.unpack_from(tail, place)
    if disk not in (0, zip_parts.MOST_16):
        refuse(path, f"end of the zip directory: disk {disk} of a zip file in several parts")
    if place + zip_parts.END.size + comment != len(tail):
        refuse(path, f"end of the zip directory: a comment of {comment} bytes does not end the file")
    locator = begin + place - zip_parts.LOCATOR.size
    if locator < 0 or os.pread(fd, 4, locator) != zip_parts.LOCATOR_MARK:
        return count, offset, length
    _, _, where, _ = zip_parts.LOCATOR.unpack(_read(fd, locator, zip_parts.LOCATOR.size, path))
    if where + zip_parts.END64.size > locator:
        refuse(path, f"the zip64 locator points to byte {where}, beyond itself")
    mark, _, _, _, _, _, _, count, length, offset = zip_parts.END64.unpack(_read(fd, where, zip_parts.END64.size, path))
    if mark != zip_parts.END64_MARK:
        refuse(path, f"there is no end of a zip64 directory at byte {where}, where the locator points")
    return count, offset, length


def _read(fd: int, offset: int, length: int, path: str) -> bytes:
    """Reads ``length`` bytes, which the file is known to have."""
    parts, remaining = [], length
    while remaining:
        part = os.pread(fd, remaining, offset)
        if not part:
            refuse(path, f"the file ended at byte {offset}")
        parts.append(part)
        offset, remaining = offset + len(part), remaining - len(part)
    return b"".join(parts)


def _entries(directory: bytes, count: int, path: str) -> list[ZipEntry]:
    entries, place = [], 0
    for number in range(count):
        if place + zip_parts.CENTRAL.size > len(directory):
            refuse(path, f"the zip directory ends within entry {number} of {count}")
        fields = zip_parts.CENTRAL.unpack_from(directory, place)
        mark, flags, method, crc, stored, size, *lengths = (*fields[:1], *fields[3:5], *fields[7:13])
        place += zip_parts.CENTRAL.size
        name = directory[place : place + lengths[0]]
        extra = directory[place + lengths[0] : place + lengths[0] + lengths[1]]
        place += sum(lengths)
        if mark != zip_parts.CENTRAL_MARK or place > len(directory):
            refuse(path, f"the zip directory has no entry {number} where it should be")
        header = fields[16]
        if zip_parts.MOST_32 in (stored, size, header):
            size, stored, header = _wide(extra, size, stored, header)
        if flags & _ENCRYPTED:
            refuse(path, f"record {_text(name)!r} is encrypted")
        if method == 0 and stored != size:
            refuse(path, f"record {_text(name)!r}: {size} bytes are said to be stored in {stored}")
        entries.append(ZipEntry(name, method, stored, size, crc, header, 0))
    return entries


def _wide(extra: bytes, *numbers: int) -> list[int]:
    """Returns the numbers, taking those too large for 32 bits from the zip64 field."""
    place = 0
    while place + 4 <= len(extra):
        kind, length = struct.unpack_from("<2H", extra, place)
        if kind == zip_parts.ZIP64:
            values = iter(struct.unpack_from(f"<{min(length, len(extra) - place - 4) // 8}Q", extra, place + 4))
            return [next(values, number) if number == zip_parts.MOST_32 else number for number in numbers]
        place += 4 + length
    return list(numbers)


def _checked(entries: Sequence[ZipEntry], end: int, path: str) -> dict[str, ZipEntry]:
    """Returns the records by name without the folder, after checking that none overlaps the next or the directory."""
    if not entries:
        refuse(path, "the zip directory has no entries")
    folder = entries[0].name.partition(b"/")[0] + b"/"
    limits: dict[int, int] = {}
    limit = end
    for number in sorted(range(len(entries)), key=lambda number: entries[number].header, reverse=True):
        record = entries[number]
        least = record.header + zip_parts.LOCAL.size + len(record.name) + record.stored
        if least > limit:
            what = "the record that follows it" if limits else "the zip directory"
            refuse(path, f"record {_text(record.name)!r}: its {record.stored} bytes overlap {what} at byte {limit}")
        limits[number] = limit
        limit = record.header
    records: dict[str, ZipEntry] = {}
    for number, record in enumerate(entries):
        if not record.name.startswith(folder):
            continue
        name = _text(record.name[len(folder) :])
        if name in records:
            refuse(path, f"the zip directory names {name!r} twice")
        records[name] = record._replace(limit=limits[number])
    return records


def _text(name: bytes) -> str:
    return name.decode("utf-8", errors="replace")


def require_file(fd: int, path: str) -> int:
    """Returns the size of a file. Raises FormatError for a folder, a pipe or an empty file."""
    found = os.fstat(fd)
    if not stat.S_ISREG(found.st_mode):
        refuse(path, "is a folder" if stat.S_ISDIR(found.st_mode) else "is no regular file")
    if found.st_size == 0:
        refuse(path, "is an empty file")
    return found.st_size


def refuse(path: str, reason: str) -> NoReturn:
    """Raises FormatError."""
    raise FormatError(f"{path}: {reason}")
