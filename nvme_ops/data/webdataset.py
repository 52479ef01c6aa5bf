"""WebDataset's tars, read in place: consecutive files whose names are the same up to the first dot are one sample.

Source: webdataset 1.0, ``webdataset/tariterators.py``.
"""

from __future__ import annotations

import errno
import io
import os
import tarfile
from collections.abc import Iterator
from typing import IO, BinaryIO, cast

import torch

from nvme_ops.data.columns import Sample
from nvme_ops.data.index import Found, SampleIndex, aligned, foreign_index
from nvme_ops.errors import FormatError
from nvme_ops.storage.publication import opened
from nvme_ops.tensors import bytes_of

KEY = "__key__"
_BLOCK = 512
_MAX_HEADER = 16 << 20  # bytes of a name and other metadata in front of a file
_SUFFIX = ".tar"


def _tars(path: str) -> list[str]:
    if os.path.isfile(path):
        return [os.path.basename(path)] if path.endswith(_SUFFIX) else []
    return sorted(entry.name for entry in os.scandir(path) if entry.name.endswith(_SUFFIX) and _is_file(entry))


def _is_file(entry: os.DirEntry[str]) -> bool:
    """Returns whether ``entry`` is a file, not a folder, pipe or the like; a dangling link is a missing file."""
    return entry.is_file() or (entry.is_symlink() and not os.path.exists(entry.path))


def matches(path: str) -> bool:
    """Returns whether ``path`` is a tar, or a folder with tars."""
    return bool(_tars(path))


def index_of(path: str, checksums: bool = False) -> SampleIndex:  # noqa: ARG001  (there are none)
    """Returns where the samples of tars lie. Raises FormatError for a damaged or compressed tar."""
    folder, name = os.path.split(os.path.abspath(path)) if os.path.isfile(path) else (path, "")
    return foreign_index("webdataset", folder, _tars(path), b"", lambda tar, _: _places(tar), {}, name)


def key_of(name: str) -> tuple[str, str] | None:
    """Returns the key and the extension of a file's name; None if it is not part of a sample."""
    folder, base = os.path.split(name)
    stem, dot, extension = base.partition(".")
    if not stem or not dot or not extension:
        return None
    return os.path.join(folder, stem), extension.lower()


def _places(path: str) -> Found:
    starts: list[int] = []
    keys: list[str] = []
    end = 0
    with opened(path) as fd, open(fd, "rb", closefd=False) as file:
        for member, after in _walk(file, os.fstat(fd).st_size, f"{path}: not a tar that can be read in place"):
            end = after
            found = key_of(member.name) if member.isreg() else None
            if found is not None and (not keys or keys[-1] != found[0]):
                starts.append(member.offset)
                keys.append(found[0])
        if os.pread(fd, _BLOCK, end) != bytes(_BLOCK):  # tarfile also stops at a bad header
            raise FormatError(f"{path}: damaged or cut off at byte {end}: a tar ends with blocks of zeros")
    ends = torch.tensor([*starts[1:], *([end] if starts else [])], dtype=torch.int64, device="cpu")
    return Found(starts[0] if starts else 0, ends)


class _BoundedTar:
    """Limits what tarfile reads from a file: it would allocate whatever size a header claims."""

    def __init__(self, file: BinaryIO, nbytes: int) -> None:
        self._file, self._nbytes = file, nbytes
        self.seek, self.tell = file.seek, file.tell

    def read(self, size: int) -> bytes:
        left = max(0, self._nbytes - self.tell())
        if not 0 <= min(size, left) <= _MAX_HEADER:
            raise FormatError(f"a header of more than {_MAX_HEADER} bytes")
        return self._file.read(min(size, left))


def _walk(file: BinaryIO, nbytes: int, what: str) -> Iterator[tuple[tarfile.TarInfo, int]]:
    """Yields the members of a tar, and where each ends. Raises FormatError for all errors of tarfile."""
    end = 0
    try:
        with tarfile.open(fileobj=cast(IO[bytes], _BoundedTar(file, nbytes)), mode="r:") as tar:
            for member in tar:
                if member.size < 0 or not end < tar.offset <= nbytes:
                    raise FormatError(f"{member.name!r} cannot end at byte {tar.offset}")
                end = tar.offset
                yield member, end
                tar.members = []  # type: ignore[attr-defined]  # it would grow
    except OSError as error:
        if error.errno != errno.EINVAL:  # from a seek to an impossible offset
            raise
        raise FormatError(f"{what}: {error}") from error
    except Exception as error:  # tarfile raises many kinds
        raise FormatError(f"{what}: {error}") from error


def sample(record: torch.Tensor) -> Sample:
    """Returns a dict: each file's bytes, a view of ``record``, by its extension; and the key. Raises FormatError."""
    sample: dict[str, object] = {}
    for name, begin, nbytes in _members(record):
        found = key_of(name)
        if found is not None and sample.setdefault(KEY, found[0]) == found[0]:
            if found[1] in sample:
                raise FormatError(f"{found[0]!r} has two files {found[1]!r}")
            sample[found[1]] = record[begin : begin + nbytes]
    if not sample:
        raise FormatError("it has no files: the tar has changed since the store was opened")
    return sample


def _members(record: torch.Tensor) -> list[tuple[str, int, int]]:
    """Returns the name, offset and size of each regular file in part of a tar."""
    view, found, place = bytes_of(record), [], 0
    while place + _BLOCK <= len(view):
        head = bytes(view[place : place + _BLOCK])
        if head.count(0) == _BLOCK:
            break
        plain = _plain(head)
        if plain is None:
            members = [each for each, _ in _walk(io.BytesIO(view), len(view), "it is not part of a tar")]
            return [(each.name, each.offset_data, each.size) for each in members if each.isreg()]
        name, size = plain
        begin = place + _BLOCK
        if begin + size > len(view):
            raise FormatError(f"{name!r} does not fit its record of {len(view)} bytes")
        found.append((name, begin, size))
        place = begin + aligned(size, _BLOCK)
    return found


def _plain(head: bytes) -> tuple[str, int] | None:
    """Returns the name and size of a regular file from an ordinary header; None for any other header.

    ``TarInfo.frombuf`` handles them all, but takes ten times as long.
    """
    size = head[124:136].rstrip(b"\0 ")
    if head[156:157] not in (b"0", b"\0") or head[345:346] != b"\0" or not size.isdigit():
        return None
    summed = sum(head) - sum(head[148:156]) + 8 * 0x20  # the sum itself counts as spaces
    try:
        if int(head[148:156].strip(b"\0 "), 8) == summed:
            return head[:100].rstrip(b"\0").decode(errors="surrogateescape"), int(size, 8)
    except ValueError:  # not octal numbers
        pass
    return None
