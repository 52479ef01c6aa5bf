"""What ``torch.save`` puts around the bytes of one tensor: a zip archive with a description and the bytes."""

from __future__ import annotations

import functools
import io
import math
import pickle
import sys
import zlib
from collections import OrderedDict
from typing import Any

import torch

from nvme_ops.formats import zip_parts

#: The checksum that a zip archive has of its members serves for a whole item too.
CHECKSUM = "crc32"
# torch's own alignment; and one that lets storage and memory exchange a large tensor's pages without a copy
_ALIGNMENT, _PAGE, _LARGE = 64, 4096, 64 << 10

_DATA = b"archive/data/0"
_RECORDS = 4  # this and those of ``_records``


def head(dtype: torch.dtype, shape: tuple[int, ...], offset: int) -> bytes:
    """Returns what precedes the data of a contiguous tensor when the archive begins ``offset`` bytes into the file."""
    large = math.prod(shape) * dtype.itemsize >= _LARGE
    return _head(dtype, shape, offset % (_PAGE if large else _ALIGNMENT))


@functools.lru_cache(maxsize=4096)
def _head(dtype: torch.dtype, shape: tuple[int, ...], offset: int) -> bytes:
    records, _, nbytes = _records(dtype, shape)
    alignment = _PAGE if nbytes >= _LARGE else _ALIGNMENT
    padding = -(offset + len(records) + zip_parts.least_local(_DATA, nbytes)) % alignment
    return records + zip_parts.local(_DATA, nbytes, 0, zip_parts.FOLLOWS, padding)


def tail(dtype: torch.dtype, shape: tuple[int, ...], start: int, checksum: int) -> bytes:
    """Returns what follows the data, which begin ``start`` bytes into the archive and have this CRC-32."""
    return checksum.to_bytes(4, "little").join(_tail(dtype, shape, start))


@functools.lru_cache(maxsize=4096)
def tail_length(dtype: torch.dtype, shape: tuple[int, ...], start: int) -> int:
    """Returns the bytes of ``tail``."""
    return len(tail(dtype, shape, start, 0))


@functools.lru_cache(maxsize=4096)
def _tail(dtype: torch.dtype, shape: tuple[int, ...], start: int) -> tuple[bytes, ...]:
    """Returns the tail, split at the checksum."""
    records, directory, nbytes = _records(dtype, shape)
    descriptor = zip_parts.descriptor(nbytes, 0)
    own = zip_parts.central(_DATA, nbytes, 0, len(records), zip_parts.FOLLOWS)
    end = zip_parts.end(_RECORDS, len(directory) + len(own), start + nbytes + len(descriptor))
    first, second = zip_parts.DESCRIPTOR_CHECKSUM, zip_parts.CENTRAL_CHECKSUM
    return descriptor[:first], descriptor[first + 4 :] + directory + own[:second], own[second + 4 :] + end


@functools.lru_cache(maxsize=4096)  # a model has many tensors of few shapes
def _records(dtype: torch.dtype, shape: tuple[int, ...]) -> tuple[bytes, bytes, int]:
    """Returns the archive up to the data, its directory so far, and the bytes of data."""
    records, directory = b"", b""
    for name, content in (
        (b"archive/data.pkl", _description(dtype, shape)),
        (b"archive/byteorder", sys.byteorder.encode()),
        (b"archive/version", b"3\n"),
    ):
        checksum, size = zlib.crc32(content), len(content)
        directory += zip_parts.central(name, size, checksum, len(records))
        records += zip_parts.local(name, size, checksum) + content
    return records, directory, math.prod(shape) * dtype.itemsize


class _Storage:
    """Stands for the data in the description."""

    def __init__(self, identity: tuple[Any, ...]) -> None:
        self.identity = identity


class _Rebuilt:
    def __init__(self, function: Any, arguments: tuple[Any, ...]) -> None:
        self._reduced = function, arguments

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        return self._reduced


class _FramePickler(pickle.Pickler):
    def persistent_id(self, obj: Any) -> Any:
        return obj.identity if isinstance(obj, _Storage) else None


def _description(dtype: torch.dtype, shape: tuple[int, ...]) -> bytes:
    """Returns the pickle of a contiguous tensor without its data, as torch pickles this dtype."""
    function, arguments = torch.empty(0, dtype=dtype).__reduce_ex__(2)
    elements = math.prod(shape)
    strides = [math.prod(max(1, size) for size in shape[place + 1 :]) for place in range(len(shape))]
    if isinstance(arguments[0], torch.UntypedStorage):
        kind, count = torch.UntypedStorage, elements * dtype.itemsize
    else:
        kind, count = getattr(torch, arguments[0]._pickle_storage_type()), elements
    storage = _Storage(("storage", kind, "0", "cpu", count))
    rest = arguments[6:]  # what some dtypes need in addition
    file = io.BytesIO()
    _FramePickler(file, protocol=2).dump(
        _Rebuilt(function, (storage, 0, shape, tuple(strides), False, OrderedDict(), *rest))
    )
    return file.getvalue()
