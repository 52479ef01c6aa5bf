"""``SampleIndex``: where each record of a store lies, and the file that says so.

The file, with little-endian numbers: 8 bytes ``NVMEDATA``; uint32 version, uint32 bytes of the header, uint32 CRC-32C
of the header; the header, a JSON object; then the sections that the header names, each at a multiple of 4096 bytes:

- ``ends``: an int64 for each record, the offset in its data file at which it ends. A record begins where the one before
  it ends, rounded up to ``alignment``; the first of a file at that file's ``start``. There is no such section if
  all records have the same size.
- ``checksums``: a uint32 for each record, the CRC-32C of its bytes. May be missing.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import stat
import struct
import warnings
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple, TypeVar

import torch

from nvme_ops.base.errors import FormatError
from nvme_ops.base.settings import PAGE
from nvme_ops.base.text import parse_json
from nvme_ops.data.columns import Columns
from nvme_ops.filesystem.publication import opened, replacing
from nvme_ops.io.file import shared_handle
from nvme_ops.io.tensors import checksum_of, checksums_of, empty

MAGIC = b"NVMEDATA"
VERSION = 1
NAME = "index.nvmedata"  # the file, in the folder of the store
CLASS_NAMES = "class_names"  # in ``SampleIndex.more``
FOREIGN = "foreign.nvmedata"  # the end of its name, for files that other programs wrote
_PREFIX = struct.Struct("<8sIII")
_HEADER = ("id", "kind", "records", "alignment", "record_bytes", "columns", "more")
_REPLACEABLE = stat.S_IFREG, stat.S_IFLNK, stat.S_IFDIR  # a folder is refused later
_SECTIONS = {"ends": torch.int64, "checksums": torch.int32}

Sizes = TypeVar("Sizes", int, torch.Tensor)


@dataclass(frozen=True)
class DataFile:
    """A file with records. ``name`` is relative to the folder of the index, or absolute."""

    name: str
    nbytes: int
    first: int  #: the number of its first record
    start: int = 0  #: the offset of that record
    stamp: int | None = None  #: for a file of another program: its modification time in nanoseconds


@dataclass
class SampleIndex:
    """What a store consists of. ``files`` are in the order of their records."""

    id: str  #: random; also in the data files of this package's own format
    kind: str  #: ``native``, ``mds`` or ``webdataset``
    records: int
    files: list[DataFile]
    alignment: int = 1  #: records begin at multiples of this many bytes
    record_bytes: int | None = None  #: None: sizes vary
    columns: list[dict[str, Any]] = field(default_factory=list)
    more: dict[str, Any] = field(default_factory=dict)  #: what the kind needs
    ends: torch.Tensor | None = None
    checksums: torch.Tensor | None = None
    path: str = ""

    def __post_init__(self) -> None:
        self._bounds = [*(file.first for file in self.files), self.records]
        if min(self.counts(), default=0) < 0 or self._bounds[0] != 0:
            raise FormatError(f"{self.path}: the index lists its files in an impossible order")
        places = [(file.first, file.start, file.nbytes) for file in self.files]
        self._places = torch.tensor(places, dtype=torch.int64, device="cpu").view(-1, 3)

    def _files_of(self, numbers: torch.Tensor) -> torch.Tensor:
        """Returns each record's file. torch.searchsorted would wake torch's threads, which then spin for a while."""
        if len(self.files) == 1:
            return torch.zeros_like(numbers)
        places = [bisect_right(self._bounds, number) - 1 for number in numbers.tolist()]
        return torch.tensor(places, dtype=torch.int64, device="cpu")

    @property
    def stride(self) -> int | None:
        """Bytes from one record to the next; None if they vary."""
        return None if self.record_bytes is None else aligned(self.record_bytes, self.alignment)

    def counts(self) -> list[int]:
        """Returns the number of records of each file."""
        return [stop - start for start, stop in pairwise(self._bounds)]

    def locate(self, numbers: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Returns for each record the number of its file, its offset and its size in bytes, all int64.

        Raises FormatError where the index is inconsistent.
        """
        files = self._files_of(numbers)
        firsts, starts, sizes = self._places[files].unbind(1)
        if self.stride is not None:
            begins = starts + (numbers - firsts) * self.stride
            lengths = torch.full_like(begins, self.record_bytes or 0)
            ends = begins + lengths
        else:
            if self.ends is None:
                raise FormatError(f"{self.path}: the index has no section 'ends'")
            ends = self.ends[numbers]
            before = aligned(self.ends[(numbers - 1).clamp_(min=0)], self.alignment)
            begins = torch.where(numbers == firsts, starts, before)
            lengths = ends - begins
        wrong = (begins < 0) | (ends < begins) | (ends > sizes)  # compares offsets, since lengths could overflow
        wrong |= begins + aligned(lengths, self.alignment) > sizes  # a whole span is read
        if wrong.any():
            place = int(wrong.nonzero()[0])
            raise FormatError(
                f"{self.path}: the index is wrong: record {int(numbers[place])} cannot lie from byte "
                f"{int(begins[place])} to {int(ends[place])} of {self.files[int(files[place])].name}"
            )
        return files, begins, lengths


def aligned(value: Sizes, alignment: int) -> Sizes:
    """Returns ``value`` rounded up to a multiple of ``alignment``."""
    return value if alignment == 1 else -(-value // alignment) * alignment


def write_index(path: str, index: SampleIndex) -> None:
    """Writes the file atomically and durably; replaces a symbolic link, not its target. Raises OSError."""
    sections = {name: getattr(index, name) for name in _SECTIONS if getattr(index, name) is not None}
    header = {name: getattr(index, name) for name in _HEADER}
    header.update(files=[asdict(file) for file in index.files], sections={})
    place = 0  # of the sections, after the header
    for name, values in sections.items():
        checksum = checksum_of(values, "crc32c")
        header["sections"][name] = {"offset": place, "bytes": values.nbytes, "crc32c": checksum}
        place = aligned(place + values.nbytes, PAGE)
    text = json.dumps(header).encode()
    body = aligned(_PREFIX.size + len(text), PAGE)
    with contextlib.suppress(FileNotFoundError):
        if stat.S_IFMT(os.lstat(path).st_mode) not in _REPLACEABLE:  # a pipe may have no reader
            raise FileExistsError(errno.EEXIST, "is no regular file", path)
    with replacing(path, follow=False) as file:
        prefix = _PREFIX.pack(MAGIC, VERSION, len(text), checksums_of([text], "crc32c")[0])
        os.pwrite(file.fd, prefix + text, 0)
        for name, values in sections.items():
            if values.numel():
                shared_handle().submit_pwrite(values, file.fd, body + header["sections"][name]["offset"]).result()
        os.ftruncate(file.fd, body + place)


def read_index(path: str, sections: Sequence[str] = ("ends",)) -> SampleIndex:
    """Reads the file, with the named ``sections``. Raises FormatError or OSError."""
    with opened(path) as fd:
        header, body = _header(fd, path)
        try:
            files = [DataFile(**entry) for entry in header.pop("files")]
            stored = header.pop("sections")
            index = SampleIndex(files=files, path=path, **header)
            _require_possible(index)
            for name in sections:
                if name in stored:
                    setattr(index, name, _section(fd, path, name, body, stored[name], index.records))
        except (LookupError, TypeError, ValueError, AttributeError, OverflowError, RuntimeError, EOFError) as error:
            if isinstance(error, FormatError):
                raise
            raise FormatError(f"{path}: the header of the index is damaged: {error!r}") from error
        return index


def _require_possible(index: SampleIndex) -> None:
    """Raises ValueError or TypeError for an impossible header."""
    words = [index.id, index.kind, *(file.name for file in index.files)]
    if not all(isinstance(word, str) for word in words) or not isinstance(index.more, dict):
        raise TypeError("a name is no text")
    if any(b"\0" in os.fsencode(word) for word in words):
        raise ValueError("an impossible name")
    numbers = [index.records, index.alignment, index.record_bytes or 0]
    numbers += [number for file in index.files for number in (file.nbytes, file.first, file.start)]
    if not all(type(number) is int and 0 <= number < 1 << 62 for number in numbers) or index.alignment == 0:
        raise ValueError("an impossible size")
    if index.alignment > PAGE or PAGE % index.alignment:
        raise ValueError(f"an alignment of {index.alignment}")
    if index.kind == "native":
        if Columns.from_json(index.columns).record_bytes != index.record_bytes:
            raise ValueError(f"record_bytes is {index.record_bytes}, and the columns have another size")
        if any(file.start for file in index.files):
            raise ValueError("a file does not begin with its first record")
    if index.stride is not None:
        for file, count in zip(index.files, index.counts(), strict=True):
            if count and file.start + (count - 1) * index.stride + (index.record_bytes or 0) > file.nbytes:
                raise ValueError(f"{file.name} cannot hold {count} records")


def _header(fd: int, path: str) -> tuple[dict[str, Any], int]:
    """Returns the header, and where the sections begin."""
    prefix = os.pread(fd, _PREFIX.size, 0)
    if len(prefix) < _PREFIX.size or not prefix.startswith(MAGIC):
        raise FormatError(f"{path}: not the index of a sample store")
    _, version, nbytes, checksum = _PREFIX.unpack(prefix)
    if version != VERSION:
        raise FormatError(f"{path}: version {version} of the format; this program knows {VERSION}")
    text = os.pread(fd, min(nbytes, os.fstat(fd).st_size), _PREFIX.size)
    try:
        if len(text) != nbytes or checksums_of([text], "crc32c")[0] != checksum:
            raise ValueError("its checksum is wrong")
        header = dict(parse_json(text))
    except (ValueError, TypeError) as error:
        raise FormatError(f"{path}: the header of the index is damaged: {error}") from error
    return header, aligned(_PREFIX.size + nbytes, PAGE)


def _section(fd: int, path: str, name: str, body: int, place: dict[str, int], records: int) -> torch.Tensor:
    dtype = _SECTIONS[name]
    if place["bytes"] != records * dtype.itemsize:
        raise FormatError(f"{path}: section {name!r} has {place['bytes']} bytes for {records} records")
    if not 0 <= place["offset"] <= os.fstat(fd).st_size - body - place["bytes"]:
        raise FormatError(f"{path}: the index was cut off within section {name!r}")
    values = empty(records, dtype=dtype)
    if records == 0:
        return values
    shared_handle().submit_pread(values, fd, body + place["offset"]).result()
    if checksum_of(values, "crc32c") != place["crc32c"]:
        raise FormatError(f"{path}: section {name!r} of the index is damaged")
    return values


# The index of files that other programs wrote is made once, kept beside them, and made again when they change


class RecordOffsets(NamedTuple):
    """Where the records of a file lie: the offset of the first, and the offsets at which they end, int64."""

    start: int
    ends: torch.Tensor


def foreign_index(
    kind: str, folder: str, names: Sequence[str], about: bytes, scan: Callable[[str, int], RecordOffsets],
    more: dict[str, Any], single: str = "",
) -> SampleIndex:  # fmt: skip
    """Returns the stored index if it matches the files as they are now; else makes and stores a new one.

    Args:
        kind: ``SampleIndex.kind``.
        folder: where the files are.
        names: the files, in the order of their records.
        about: whatever else the index depends on.
        scan: finds the records of a file, given its path and number.
        more: ``SampleIndex.more``.
        single: the name of the file, if the index is not for the whole folder.
    """
    prefix = os.fsdecode(os.fsencode(single)[:200])
    name = f".{prefix}{'.' * bool(single)}{FOREIGN}"  # hidden: programs list these folders
    path = os.path.join(folder, name)
    stats = [os.stat(os.path.join(folder, entry)) for entry in names]
    # A program that changes a file can set back the modification time, but not the change time.
    changes = repr([(status.st_ino, status.st_ctime_ns) for status in stats]).encode()
    stamp = checksums_of([about + changes], "crc32c")[0]
    now = [(name, status.st_size, status.st_mtime_ns) for name, status in zip(names, stats, strict=True)]
    try:
        kept = read_index(path)
        before = [(file.name, file.nbytes, file.stamp) for file in kept.files]
        if (kept.kind, kept.more.get("about"), before) == (kind, stamp, now):
            return kept
    except (FormatError, OSError):
        pass
    files, ends, records = [], [torch.empty(0, dtype=torch.int64, device="cpu")], 0
    for number, (name, nbytes, changed) in enumerate(now):
        start, its_ends = scan(os.path.join(folder, name), number)
        files.append(DataFile(name, nbytes, records, start, changed))
        ends.append(its_ends)
        records += len(its_ends)
    more = {**more, "about": stamp}
    index = SampleIndex(os.urandom(8).hex(), kind, records, files, more=more, ends=torch.cat(ends), path=path)
    try:
        write_index(path, index)
    except OSError as error:
        words = f"{folder}: its index cannot be stored and is made again each time it is opened: {error}"
        warnings.warn(words, RuntimeWarning, stacklevel=5)
    return index
