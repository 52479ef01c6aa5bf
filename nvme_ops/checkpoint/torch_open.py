"""Opens files that any version of ``torch.save`` wrote, decides which reader each needs, and compares CRC-32s."""

from __future__ import annotations

import os
import stat
import sys
import zipfile
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from nvme_ops.base.errors import ChecksumError
from nvme_ops.formats import torch_pickle
from nvme_ops.formats.mistaken import refuse
from nvme_ops.formats.torch_pickle import DenseTensor
from nvme_ops.formats.torch_zip import PICKLE, Archive, is_zip, open_archive
from nvme_ops.io.handle import aio_handle

# The magic number of files from before torch 1.6, after the two bytes of the pickle's protocol.
_LEGACY = b"\x8a\x0al\xfc\x9cF\xf9 j\xa8P\x19."
# The most bytes that a byte of the file may decompress to, on average. torch itself compresses nothing.
_MAX_EXPANSION = 16


@dataclass
class TorchFile:
    """An open file in one of torch's formats."""

    fd: int
    path: str
    handle: aio_handle
    mapped: bool = False  # storages may be mapped from the file

    def archive(self) -> Archive | None:
        """Opens an archive of the current format; returns None if only torch's own reader can read it.

        Raises:
            FormatError: torch did not write this file, or it is damaged.
        """
        status = os.fstat(self.fd)
        if not stat.S_ISREG(status.st_mode):
            refuse(self.path, "is a folder" if stat.S_ISDIR(status.st_mode) else "is not a regular file")
        if status.st_size == 0:
            refuse(self.path, "is an empty file")
        if not is_zip(self.fd):
            # tarfile would try to decompress the file first, however large it claims to be
            if not self.is_legacy() and os.pread(self.fd, 5, 257) != b"ustar":
                refuse(self.path, "begins neither as a zip file nor as a pickle of torch.save", self.fd)
            return None
        archive = open_archive(self.fd, self.path, self.handle)
        if PICKLE not in archive.records:
            refuse(self.path, f"the zip directory has no record {PICKLE!r}: torch.save did not write this file")
        if {record.method for record in archive.records.values()} != {zipfile.ZIP_STORED}:
            full = sum(record.size for record in archive.records.values())
            if full > _MAX_EXPANSION * status.st_size:
                what = f"its compressed records would expand to {full} bytes, from a file of {status.st_size}"
                refuse(self.path, what)
            return None
        archive.mapped = self.mapped
        script = "constants.pkl" in archive.records
        faked = torch._guards.detect_fake_mode(None) is not None
        return None if script or faked or not _is_native(archive) else archive

    def is_legacy(self) -> bool:
        """Returns whether the file begins as those that torch wrote before version 1.6."""
        return os.pread(self.fd, 15, 0)[2:] == _LEGACY


def _is_native(archive: Archive) -> bool:
    if "byteorder" in archive.records:
        return archive.content("byteorder").decode(errors="replace") == sys.byteorder
    big = torch.serialization.get_default_load_endianness() == torch.serialization.LoadEndianness.BIG
    return sys.byteorder == "little" and not big


def require_record(archive: Archive, name: str, size: int) -> None:
    """Raises FormatError if the record of a storage is missing or does not have this size."""
    record = archive.records.get(name)
    if record is None or record.size != size:
        actual = "which the zip directory does not have" if record is None else f"which has {record.size} bytes"
        refuse(archive.path, f"data.pkl: a storage of {size} bytes in record {name!r}, {actual}")


def verify_others(archive: Archive) -> None:
    """Verifies all records that are not storages, now and whenever they are read again.

    Raises ChecksumError with their names, and ValueError if the file has no checksums.
    """
    if not any(record.crc for record in archive.records.values()):
        raise ValueError(
            f"{archive.path} has no checksums to verify: it was saved with checksums=False, or by torch after "
            "set_crc32_options(False)"
        )
    names = [name for name in archive.records if not name.startswith("data/")]
    if wrong := [name for name in names if zlib.crc32(archive.content(name)) != archive.records[name].crc]:
        raise ChecksumError(archive.path, wrong)
    archive.verified = True


def verify_by_zipfile(file: TorchFile) -> None:
    """Verifies an archive that only torch's own reader can read.

    Raises FormatError, ChecksumError, and ValueError for a file that is not an archive, which has no checksums.
    """
    if not is_zip(file.fd):
        raise ValueError(
            f"{file.path} has no checksums to verify: torch wrote it before version 1.6, or in that format"
        )
    try:
        with zipfile.ZipFile(file.path) as archive:
            wrong = archive.testzip()
    except MemoryError:
        raise
    except Exception as error:  # zipfile raises errors of many types
        if isinstance(error, OSError) and error.errno:
            raise
        refuse(file.path, f"{type(error).__name__}: {error}")
    if wrong is not None:
        raise ChecksumError(file.path, [wrong])


def require_undamaged(archive: Archive, wrong: Sequence[str]) -> None:
    """Raises ChecksumError with the names of the tensors in the ``wrong`` records, if there are any."""
    if wrong:
        root, _ = torch_pickle.read(archive.pickled(), archive.path)
        names = names_by_record(root, archive.path)
        raise ChecksumError(archive.path, [name for record in wrong for name in names.get(record, [record])])


def names_by_record(root: Any, path: str) -> dict[str, list[str]]:
    """Returns the names of the tensors in each record."""
    names: dict[str, list[str]] = {}
    for name, tensor in torch_pickle.tensors(root, path):
        for storage in [tensor.storage] if isinstance(tensor, DenseTensor) else tensor.storages:
            names.setdefault(storage.record, []).append(name)
    return names
