"""Stores checksums of tensors in files, where other readers ignore them, and compares them."""

from __future__ import annotations

import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from nvme_ops.base.errors import AnotherSaveError, ChecksumError, FormatError
from nvme_ops.formats.safetensors_format import Header
from nvme_ops.io.tensors import checksums_of
from nvme_ops.memory.pieces import CHECKSUM, checksums_anywhere

#: In the metadata of a safetensors file: eight hexadecimal digits for each tensor, in the order of their data, then
#: eight for the JSON of the header, computed with zeros in their place. In an index: eight for its own JSON.
KEY = "nvme_ops.crc32c"
#: ``SAVE``, in the metadata of an index and of its shards: the id of their save. ``SHARDS``, in those of an index: the
#: checksums of the headers of its shards, by file name.
SAVE, SHARDS = "nvme_ops.save", "nvme_ops.shards"
#: All of these keys. They must not be copied with the metadata to another file.
OURS = (KEY, SAVE, SHARDS)
#: What damaged JSON is called where names of damaged tensors are listed.
HEADER, INDEX = "header", "index"
_DIGITS = 8
_BEGIN = f'"{KEY}":"'.encode()  # in JSON


@dataclass(frozen=True)
class ShardEntry:
    """What an index says about one of its shards; None for what it does not say."""

    index: str  # path of the index
    save: str | None
    header: str | None  # checksum of the shard's header
    checked: bool  # whether the index itself has a checksum

    def require(self, path: str, metadata: Mapping[str, str], verify: bool) -> None:
        """Raises AnotherSaveError, or with ``verify`` ChecksumError, unless a shard's ``metadata`` match."""
        wrong = self.wrong(path, metadata)
        if verify and wrong is not None:
            raise ChecksumError(self.index if wrong == INDEX else path, [wrong])

    def wrong(self, path: str, metadata: Mapping[str, str]) -> str | None:
        """Returns ``INDEX`` or ``HEADER`` if that is not what was saved, else None. Raises AnotherSaveError."""
        save = metadata.get(SAVE)
        if None not in (save, self.save) and save != self.save:
            raise AnotherSaveError(f"{path}: belongs to another save than its index, {self.index}")
        if save is not None and (self.save is None or (KEY in metadata and not self.checked)):
            return INDEX
        if self.save is not None and (save is None or self.header not in (None, metadata.get(KEY, "")[-_DIGITS:])):
            return HEADER
        return None


def placeholder(count: int) -> str:
    """Returns text as long as the checksums of ``count`` tensors and of the header will be."""
    return "0" * _DIGITS * (count + 1)


def sealed(text: bytes, checksums: Sequence[int]) -> tuple[bytes, str | None]:
    """Replaces the ``placeholder`` in JSON without spaces after colons by these checksums and the JSON's own.

    Returns the JSON and its own checksum, which an index keeps for its shards; None if there is no placeholder.
    """
    start = text.find(_BEGIN)
    if start < 0:
        return text, None
    start += len(_BEGIN)
    own = start + _DIGITS * len(checksums)  # where the JSON's own is: zeros while it is computed
    text = text[:start] + (f"%0{_DIGITS}x" * len(checksums) % tuple(checksums)).encode() + text[own:]
    seal = f"{checksums_of([text], CHECKSUM)[0]:0{_DIGITS}x}"
    return text[:own] + seal.encode() + text[own + _DIGITS :], seal


def differs(text: bytes, metadata: Mapping[str, str]) -> bool:
    """Returns whether the JSON with this ``metadata`` has a checksum that does not match."""
    written = metadata.get(KEY)
    if written is None:
        return False
    zeroed = text.replace(_in_json(written), _in_json(written[:-_DIGITS] + "0" * _DIGITS), 1)
    return f"{checksums_of([zeroed], CHECKSUM)[0]:0{_DIGITS}x}" != written[-_DIGITS:]


def _in_json(written: str) -> bytes:
    return f'"{KEY}":"{written}'.encode(errors="surrogatepass")


def recorded(header: Header, path: str) -> dict[str, int] | None:
    """Returns the file's checksums by tensor, or None if it has none. Raises FormatError for impossible ones."""
    text = header.metadata.get(KEY)
    if text is None:
        return None
    if len(text) != len(placeholder(len(header.entries))) or not set(text) <= set(string.hexdigits):
        raise FormatError(
            f"{path}: __metadata__: {KEY} does not match the {len(header.entries)} tensors: another program wrote it"
        )
    values = [int(text[start : start + _DIGITS], 16) for start in range(0, len(text), _DIGITS)]
    return dict(zip(header.entries, values[:-1], strict=True))


def check(path: str, expected: Mapping[str, int], tensors: Mapping[str, torch.Tensor]) -> None:
    """Raises ChecksumError if any tensor's bytes do not match its checksum."""
    names = list(tensors)
    checksums = zip(names, checksums_anywhere(list(tensors.values())), strict=True)
    if wrong := [name for name, value in checksums if value != expected[name]]:
        raise ChecksumError(path, wrong)
