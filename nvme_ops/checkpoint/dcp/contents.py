"""Lists what a DCP checkpoint contains without loading it, and without executing anything in its ``.metadata``."""

from __future__ import annotations

import io
import os
import pickle
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    _MEM_FORMAT_ENCODING,
    STORAGE_TYPES,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)

from nvme_ops.base.errors import FormatError
from nvme_ops.checkpoint.dcp.folder import ATTRIBUTE, METADATA, error_text, read_metadata
from nvme_ops.filesystem.publication import OpenFiles
from nvme_ops.formats.contents import Contents, Item
from nvme_ops.formats.torch_zip import CHECKSUM

_NAMES = {
    "torch.distributed.checkpoint.metadata": (
        "BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "MetadataIndex", "StorageMeta", "TensorProperties",
        "TensorStorageMetadata", "_MEM_FORMAT_ENCODING",
    ),
    "torch.distributed.checkpoint.filesystem": ("_StorageInfo",),
    "torch.serialization": ("_get_layout",),
    "torch": ("Size",),
    "pathlib": ("PosixPath", "PurePosixPath"),
    "pathlib._local": ("PosixPath", "PurePosixPath"),
    "collections": ("OrderedDict",),
}  # fmt: skip


class _Unpickler(pickle.Unpickler):
    """Unpickles what DCP's writers put into ``.metadata``; refuses everything else."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("builtins", "getattr"):  # as some versions of Python (3.11.2) pickle members of an Enum
            return _member
        if name in _NAMES.get(module, ()) or (
            module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        ):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"{module}.{name} does not belong there")


def _member(kind: Any, name: Any) -> Any:
    if kind is not _MEM_FORMAT_ENCODING:
        raise pickle.UnpicklingError(f"{kind!r} does not belong there")
    return kind[name]


def described(path: str, files: OpenFiles) -> tuple[Contents, Metadata]:
    """Returns what a folder contains, and its ``.metadata``; saves keep the files while that is open.

    Raises FormatError or ChecksumError if ``.metadata`` is damaged, else OSError.
    """
    file = os.path.join(path, METADATA)
    with files.opened(file) as fd:
        metadata = read_metadata(file, fd, lambda content: _Unpickler(io.BytesIO(content)).load())
    with consistent(path):
        return Contents("dcp", list(_items(path, metadata))), metadata


@contextmanager
def consistent(folder: str) -> Iterator[None]:
    """Turns what is raised where parts of the metadata contradict each other into a FormatError."""
    try:
        yield
    except FormatError:
        raise
    except (AttributeError, LookupError, TypeError, ValueError, OverflowError, RuntimeError) as error:
        file = os.path.join(folder, METADATA)
        raise FormatError(f"{file}: its parts contradict each other: {error_text(error)}") from error


def _items(folder: str, metadata: Metadata) -> Iterator[Item]:
    entries = metadata.state_dict_metadata.items()
    chunks = {name: {chunk.offsets: chunk for chunk in getattr(entry, "chunks", ())} for name, entry in entries}
    for index, info in metadata.storage_data.items():
        name, dtype, shape = _described(metadata.state_dict_metadata[index.fqn], chunks[index.fqn], index)
        known = getattr(info, ATTRIBUTE, {})
        checksum = (CHECKSUM, known[CHECKSUM]) if CHECKSUM in known else None
        path = os.path.join(folder, info.relative_path)
        if os.path.dirname(info.relative_path) not in ("", "."):
            raise FormatError(f"{path}: is not in the folder of the checkpoint")
        size = os.path.getsize(path) if os.path.exists(path) else sys.maxsize
        if not 0 <= info.offset <= info.offset + info.length <= size:
            raise FormatError(f"{path}: {METADATA} places {name!r} outside of its {size} bytes")
        yield Item(name, dtype, shape, path, info.offset, info.offset + info.length, checksum)


def _described(
    entry: STORAGE_TYPES, chunks: Mapping[torch.Size, ChunkStorageMetadata], index: MetadataIndex
) -> tuple[str, str, tuple[int, ...]]:
    if not isinstance(entry, TensorStorageMetadata):
        return index.fqn, "pickle", ()
    dtype = str(entry.properties.dtype).removeprefix("torch.")
    chunk = chunks.get(index.offset or torch.Size(()), entry.chunks[0])
    part = "" if len(entry.chunks) == 1 else f" from {list(index.offset or ())}"
    return index.fqn + part, dtype, tuple(chunk.sizes)
