"""Compares the CRC-32s in a container of ``torch.save`` with its records."""

from __future__ import annotations

import zipfile
import zlib
from collections.abc import Sequence
from typing import Any

from nvme_ops.checkpoint import torch_read
from nvme_ops.checkpoint.torch_open import TorchFile
from nvme_ops.checkpoint.torch_zip import Archive, is_zip, refuse
from nvme_ops.errors import ChecksumError
from nvme_ops.formats import torch_pickle
from nvme_ops.formats.torch_pickle import Described


def verify_others(file: TorchFile, archive: Archive) -> None:
    """Verifies all records that are not storages. Raises ValueError if the file has no checksums."""
    if not any(record.crc for record in archive.records.values()):
        raise ValueError(
            f"{file.path} has no checksums to verify: it was saved with checksums=False, or by torch after "
            "set_crc32_options(False)"
        )
    names = [name for name in archive.records if not name.startswith("data/")]
    contents = [torch_read.content(archive, file.handle, name) for name in names]
    wrong = [
        name for name, content in zip(names, contents, strict=True) if zlib.crc32(content) != archive.records[name].crc
    ]
    if wrong:
        raise ChecksumError(file.path, wrong)


def verify_by_zipfile(file: TorchFile) -> None:
    """Verifies a container that only Python's zipfile can read."""
    if not is_zip(file.fd):
        raise ValueError(
            f"{file.path} has no checksums to verify: torch wrote it before version 1.6, or in that format"
        )
    try:
        with zipfile.ZipFile(file.path) as archive:
            wrong = archive.testzip()
    except MemoryError:
        raise
    except Exception as error:  # zipfile raises many kinds
        if isinstance(error, OSError) and error.errno:
            raise
        refuse(file.path, f"{type(error).__name__}: {error}")
    if wrong is not None:
        raise ChecksumError(file.path, [wrong])


def require_undamaged(file: TorchFile, archive: Archive, wrong: Sequence[str]) -> None:
    """Raises ChecksumError with the tensors in these records."""
    if wrong:
        root, _ = torch_pickle.read(file.pickle(archive), file.path)
        names = names_by_record(root, file.path)
        raise ChecksumError(file.path, [name for record in wrong for name in names.get(record, [record])])


def names_by_record(root: Any, path: str) -> dict[str, list[str]]:
    """Returns the names of the tensors in each record."""
    found: dict[str, list[str]] = {}
    for name, each in torch_pickle.tensors(root, path):
        for storage in [each.storage] if isinstance(each, Described) else each.storages:
            found.setdefault(storage.record, []).append(name)
    return found
