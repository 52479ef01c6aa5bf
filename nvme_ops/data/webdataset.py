"""WebDataset's tars, read in place: consecutive files whose names are the same up to the first dot are one sample.

Source: webdataset 1.0, ``webdataset/tariterators.py``.
"""

from __future__ import annotations

import io
import os
import tarfile

import torch

from nvme_ops.data import foreign
from nvme_ops.data.columns import Sample
from nvme_ops.data.index import Index
from nvme_ops.errors import FormatError
from nvme_ops.tensors import bytes_of

KEY = "__key__"
_BLOCK = 512
_SUFFIX = ".tar"


def _tars(path: str) -> list[str]:
    if os.path.isfile(path):
        return [os.path.basename(path)] if path.endswith(_SUFFIX) else []
    return sorted(entry.name for entry in os.scandir(path) if entry.name.endswith(_SUFFIX) and _is_file(entry))


def _is_file(entry: os.DirEntry[str]) -> bool:
    """Returns whether it is a file, not a folder, pipe or the like; a dangling link is a missing file."""
    return entry.is_file() or (entry.is_symlink() and not os.path.exists(entry.path))


def matches(path: str) -> bool:
    """Returns whether there are tars in the folder, or it is one."""
    return bool(_tars(path))


def index_of(path: str, checksums: bool = False) -> Index:  # noqa: ARG001  (there are none)
    """Returns where the samples of tars lie. Raises FormatError for a damaged or compressed tar."""
    folder, name = os.path.split(os.path.abspath(path)) if os.path.isfile(path) else (path, "")
    return foreign.index_of("webdataset", folder, _tars(path), b"", lambda tar, _: _places(tar), {}, name)


def key_of(name: str) -> tuple[str, str] | None:
    """Returns the key and the extension of a file's name; None if it is not part of a sample."""
    folder, base = os.path.split(name)
    stem, dot, extension = base.partition(".")
    if not stem or not dot or not extension:
        return None
    return os.path.join(folder, stem), extension.lower()


def _places(path: str) -> foreign.Found:
    starts: list[int] = []
    keys: list[str] = []
    end = 0
    try:
        with tarfile.open(path, "r:") as tar:
            for member in tar:
                end = tar.offset
                found = key_of(member.name) if member.isreg() else None
                if found is not None and (not keys or keys[-1] != found[0]):
                    starts.append(member.offset)
                    keys.append(found[0])
                tar.members = []  # type: ignore[attr-defined]  # which would grow
    except tarfile.TarError as error:
        raise FormatError(f"{path}: not a tar that can be read in place: {error}") from error
    with open(path, "rb") as file:
        file.seek(end)
        if file.read(_BLOCK) != bytes(_BLOCK):  # tarfile takes any other header for the end, too
            raise FormatError(f"{path}: damaged or cut off at byte {end}: a tar ends with blocks of zeros")
    ends = torch.tensor([*starts[1:], *([end] if starts else [])], dtype=torch.int64, device="cpu")
    return foreign.Found(starts[0] if starts else 0, ends)


class Tars:
    """Turns a sample into a dict: the bytes of its files, over the memory that was read, by extension; and the key."""

    def __init__(self, index: Index) -> None:
        """Needs nothing from the index: a tar describes itself."""

    def sample(self, record: torch.Tensor) -> Sample:
        """Returns the sample in the bytes of a record. Raises FormatError."""
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
    """Returns name, place and bytes of the regular files in part of a tar."""
    view, found, place = bytes_of(record), [], 0
    while place + _BLOCK <= len(view):
        head = bytes(view[place : place + _BLOCK])
        if head.count(0) == _BLOCK:
            break
        plain = _plain(head)
        if plain is None:
            return _by_tarfile(bytes(view))
        name, size = plain
        begin = place + _BLOCK
        if begin + size > len(view):
            raise FormatError(f"{name!r} does not fit its record of {len(view)} bytes")
        found.append((name, begin, size))
        place = begin + -(-size // _BLOCK) * _BLOCK
    return found


def _plain(head: bytes) -> tuple[str, int] | None:
    """Returns name and bytes of a regular file with an ordinary header; None for anything else."""
    size = head[124:136].rstrip(b"\0 ")
    if head[156:157] not in (b"0", b"\0") or head[345:346] != b"\0" or not size.isdigit():
        return None
    # The sum of the header, with spaces in place of the sum itself.
    given = head[148:156].strip(b"\0 ")
    try:
        if int(given, 8) != sum(head) - sum(head[148:156]) + 8 * 0x20:
            return None
        return head[:100].rstrip(b"\0").decode(errors="surrogateescape"), int(size, 8)
    except ValueError:  # not octal numbers
        return None


def _by_tarfile(content: bytes) -> list[tuple[str, int, int]]:
    try:
        with tarfile.open(fileobj=io.BytesIO(content), mode="r:") as tar:
            return [(member.name, member.offset_data, member.size) for member in tar if member.isreg()]
    except tarfile.TarError as error:
        raise FormatError(f"it is not part of a tar: {error}") from error
