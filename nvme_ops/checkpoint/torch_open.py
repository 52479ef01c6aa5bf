"""Opens a file of ``torch.save``, of any version, and decides which reader it needs."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass

import torch

from nvme_ops.checkpoint import torch_read
from nvme_ops.checkpoint.torch_zip import Archive, is_zip, open_archive, refuse, require_file
from nvme_ops.formats.mistaken import HEAD, mistaken
from nvme_ops.formats.torch_pickle import Storage
from nvme_ops.handle import aio_handle

#: The record of the object but for its storages.
PICKLE = "data.pkl"

# The magic number of files from before torch 1.6, after the two bytes of the pickle's protocol.
_LEGACY = b"\x8a\x0al\xfc\x9cF\xf9 j\xa8P\x19."
# How many times larger than the file its decompressed records may be. torch itself compresses nothing.
_MOST_EXPANSION = 16


@dataclass
class TorchFile:
    """An open file in any of torch's formats."""

    fd: int
    path: str
    handle: aio_handle
    mapped: bool = False  # storages may be mapped from the file

    def archive(self) -> Archive | None:
        """Opens an archive of the current format; returns None if only torch's own reader can read it.

        Raises:
            FormatError: not a file of torch's, or a damaged one.
        """
        size = require_file(self.fd, self.path)
        if not is_zip(self.fd):
            if os.pread(self.fd, 15, 0)[2:] != _LEGACY and not _is_tar(self.fd):
                what = "begins neither as a zip file nor as a pickle of torch.save"
                refuse(self.path, mistaken(os.pread(self.fd, HEAD, 0)) or what)
            return None
        archive = open_archive(self.fd, self.path)
        if PICKLE not in archive.records:
            refuse(self.path, f"the zip directory has no record {PICKLE!r}: torch.save did not write this file")
        if any(record.method for record in archive.records.values()):
            full = sum(record.size for record in archive.records.values())
            if full > _MOST_EXPANSION * size:
                refuse(self.path, f"its compressed records would expand to {full} bytes, from a file of {size}")
            return None
        script = "constants.pkl" in archive.records
        faked = torch._guards.detect_fake_mode(None) is not None
        return None if script or faked or not self._is_native(archive) else archive

    def _is_native(self, archive: Archive) -> bool:
        if "byteorder" in archive.records:
            return torch_read.content(archive, self.handle, "byteorder").decode(errors="replace") == sys.byteorder
        big = torch.serialization.get_default_load_endianness() == torch.serialization.LoadEndianness.BIG
        return sys.byteorder == "little" and not big

    def pickle(self, archive: Archive) -> bytes:
        """Returns the pickle: the object without its storages."""
        return torch_read.content(archive, self.handle, PICKLE)


def require_record(archive: Archive, storage: Storage) -> None:
    """Raises FormatError if the record of a storage is missing or has another size."""
    record = archive.records.get(storage.record)
    if record is None or record.size != storage.size:
        actual = "which the zip directory does not have" if record is None else f"which has {record.size} bytes"
        refuse(archive.path, f"data.pkl: a storage of {storage.size} bytes in record {storage.record!r}, {actual}")


def _is_tar(fd: int) -> bool:
    """Returns whether it is a tar. ``tarfile`` tries to decompress the file first, however large it claims to be."""
    return os.pread(fd, 5, 257) == b"ustar"
