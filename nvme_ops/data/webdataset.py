"""WebDataset's tars, read in place: consecutive files whose names are the same up to the first dot are one sample.

Source: webdataset 1.0, ``webdataset/tariterators.py``.
"""

from __future__ import annotations

import errno
import io
import os
import tarfile
import warnings
from collections.abc import Iterator
from typing import IO, Any, BinaryIO, cast

import torch

from nvme_ops.base.errors import FormatError
from nvme_ops.base.limits import free_memory
from nvme_ops.data.columns import Sample
from nvme_ops.data.index import RecordOffsets, SampleIndex, aligned, foreign_index
from nvme_ops.filesystem.publication import opened
from nvme_ops.io.tensors import bytes_of

KEY = "__key__"
_BLOCK = 512
_MAX_HEADER = 16 << 20  # bytes of a name and other metadata in front of a file
_TAR = (".tar",)
#: How the names of compressed ones end.
COMPRESSED = (".tar.gz", ".tgz", ".tar.bz2", ".tbz2", ".tar.xz", ".txz", ".tar.zst", ".tar.zstd")


def _tars(path: str, suffixes: tuple[str, ...] = _TAR) -> list[str]:
    if os.path.isfile(path):
        return [os.path.basename(path)] if path.endswith(suffixes) else []
    if not os.path.isdir(path):
        return []
    return sorted(entry.name for entry in os.scandir(path) if entry.name.endswith(suffixes) and _is_file(entry))


def _is_file(entry: os.DirEntry[str]) -> bool:
    """Returns whether ``entry`` is a file, not a folder, pipe or the like; a dangling link is a missing file."""
    return entry.is_file() or (entry.is_symlink() and not os.path.exists(entry.path))


def matches(path: str) -> bool:
    """Returns whether ``path`` is a tar, or a folder with tars."""
    return bool(_tars(path))


def compressed(path: str) -> list[str]:
    """Returns the paths of compressed tars at ``path`` or in it; only ``samples_of`` reads them."""
    folder = os.path.dirname(path) if os.path.isfile(path) else path
    return [os.path.join(folder, name) for name in _tars(path, COMPRESSED)]


def index_of(path: str) -> SampleIndex:
    """Returns where the samples of tars lie. Raises FormatError for a damaged or compressed tar."""
    folder, name = os.path.split(os.path.abspath(path)) if os.path.isfile(path) else (path, "")
    return foreign_index("webdataset", folder, _tars(path), b"", lambda tar, _: _places(tar), {}, name)


def key_of(name: str) -> tuple[str, str] | None:
    """Returns the key and the extension of a file's name; None if it is not part of a sample."""
    folder, base = os.path.split(name)
    stem, dot, extension = base.partition(".")
    if not stem or not dot:
        return None
    return os.path.join(folder, stem), extension.lower()


def _places(path: str) -> RecordOffsets:
    starts: list[int] = []
    keys: list[str] = []
    links: list[str] = []
    end = 0
    with opened(path) as fd, open(fd, "rb", closefd=False) as file:
        size = os.fstat(fd).st_size
        for member, after in _walk(file, size, f"{path}: not a tar that can be read in place"):
            end = after
            parts = key_of(member.name)
            if parts is not None and member.islnk():
                links.append(f"{member.name} -> {member.linkname}")
            elif parts is not None and member.isreg() and (not keys or keys[-1] != parts[0]):
                starts.append(member.offset)
                keys.append(parts[0])
        if end < size and os.pread(fd, _BLOCK, end) != bytes(_BLOCK):  # tarfile also stops at a bad header
            raise FormatError(f"{path}: damaged or cut off at byte {end}: a tar ends with blocks of zeros")
    if end == size:
        _warn(
            f"{path}: was perhaps cut off after its last file: a tar ends with blocks of zeros, and this one does not"
        )
    if links:
        what = "hard links, which are left out of the samples, as webdataset does: make it with --hard-dereference"
        _warn(f"{path}: has {len(links)} {what}: {', '.join(links[:3])}")
    ends = torch.tensor([*starts[1:], *([end] if starts else [])], dtype=torch.int64, device="cpu")
    return RecordOffsets(starts[0] if starts else 0, ends)


def _warn(words: str) -> None:
    warnings.warn(words, RuntimeWarning, stacklevel=8)


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
    for name, content in _members(record):
        parts = key_of(name)
        if parts is not None and sample.setdefault(KEY, parts[0]) == parts[0]:
            _add(sample, parts, content)
    if not sample:
        raise FormatError("it has no files: the tar has changed since the store was opened")
    return sample


def _add(sample: dict[str, object], parts: tuple[str, str], content: object) -> None:
    key, extension = parts
    if extension in sample:
        raise FormatError(f"{key!r} has two files {extension!r}")
    sample[extension] = content


def samples_of(path: str) -> Iterator[tuple[Sample, int]]:
    """Yields the samples of a compressed tar, with bytes for tensors, and how much of the file was read by then.

    Raises FormatError for a damaged one, and for a compression that this Python does not know.
    """
    sample: dict[str, object] = {}
    with opened(path) as fd, open(fd, "rb", closefd=False) as file:
        try:
            with tarfile.open(fileobj=file, mode="r|*") as tar:
                for member in tar:
                    parts = key_of(member.name) if member.isreg() else None
                    content = None if parts is None else tar.extractfile(member)
                    tar.members = []  # type: ignore[attr-defined]  # it would grow
                    if parts is None or content is None:
                        continue
                    if sample and sample[KEY] != parts[0]:
                        yield sample, file.tell()
                        sample = {}
                    sample.setdefault(KEY, parts[0])
                    _add(sample, parts, content.read())
        except FormatError as error:
            raise FormatError(f"{path}: {error}") from error
        except Exception as error:  # tarfile and what decompresses raise many kinds
            if isinstance(error, OSError) and error.errno:
                raise
            raise FormatError(f"{path}: cannot be decompressed here, or is damaged: {error}") from error
        if sample:
            yield sample, file.tell()


def _members(record: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
    """Returns the name and the content of each regular file in part of a tar."""
    view, contents, place = bytes_of(record), [], 0
    while place + _BLOCK <= len(view):
        head = bytes(view[place : place + _BLOCK])
        if head.count(0) == _BLOCK:
            break
        plain = _plain(head)
        if plain is None:
            members = _walk(io.BytesIO(view), len(view), "it is not part of a tar")
            return [(member.name, _content(record, member, end)) for member, end in members if member.isreg()]
        name, size = plain
        begin = place + _BLOCK
        if begin + size > len(view):
            raise FormatError(f"{name!r} does not fit its record of {len(view)} bytes")
        contents.append((name, record[begin : begin + size]))
        place = begin + aligned(size, _BLOCK)
    return contents


def _content(record: torch.Tensor, member: tarfile.TarInfo, end: int) -> torch.Tensor:
    """Returns the bytes of a file; one that was stored without its holes (``tar -S``) gets these back, as zeros."""
    begin = member.offset_data
    parts: Any = member.sparse
    if parts is None:
        return record[begin : begin + member.size]
    if member.size > free_memory():
        raise FormatError(f"{member.name!r}: {member.size} bytes with its holes are more than the memory that is free")
    content = torch.zeros(member.size, dtype=torch.uint8, device=record.device)
    for start, nbytes in parts:
        if not (0 <= start <= start + nbytes <= member.size and begin + nbytes <= end):
            raise FormatError(f"{member.name!r}: its map of holes is damaged")
        content[start : start + nbytes] = record[begin : begin + nbytes]
        begin += nbytes
    return content


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
