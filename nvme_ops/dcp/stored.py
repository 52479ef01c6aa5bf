"""Where a tensor's bytes lie in a checkpoint's file, whoever wrote it."""

from __future__ import annotations

import io
import math
import pickle
import struct
import sys
import zipfile
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

import torch

from nvme_ops.errors import FormatError

_LOCAL = struct.Struct("<26x2H")  # of a zip member's head, the lengths of the name and the extra field behind it
_MOST_DESCRIPTION = 1 << 20  # bytes; torch's have less than 200

# By what descriptions call the data. Newer dtypes have no such name, and are named themselves.
_DTYPES = {
    "BFloat16Storage": torch.bfloat16,
    "BoolStorage": torch.bool,
    "ByteStorage": torch.uint8,
    "CharStorage": torch.int8,
    "ComplexDoubleStorage": torch.complex128,
    "ComplexFloatStorage": torch.complex64,
    "DoubleStorage": torch.float64,
    "FloatStorage": torch.float32,
    "HalfStorage": torch.float16,
    "IntStorage": torch.int32,
    "LongStorage": torch.int64,
    "ShortStorage": torch.int16,
}


@dataclass(frozen=True)
class Stored:
    """A contiguous tensor, ``start`` bytes into the file."""

    start: int
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of its data."""
        return math.prod(self.shape) * self.dtype.itemsize


def find(path: str, offset: int, length: int) -> Stored | None:
    """The tensor that ``torch.save`` wrote to this part of the file; None when it is nothing so simple.

    Raises:
        FormatError: it is damaged.
    """
    with open(path, "rb") as file:
        part = _Part(file, offset, length)
        try:
            archive = zipfile.ZipFile(part)
            return _find(part, archive, offset)
        except (OSError, MemoryError):
            raise
        except Exception as error:  # whatever damage makes of an archive
            raise FormatError(f"{path}: no tensor of torch.save at byte {offset}, or a damaged one: {error}") from error


def _find(part: _Part, archive: zipfile.ZipFile, offset: int) -> Stored | None:
    members = {info.filename.partition("/")[2]: info for info in archive.infolist()}
    description = members["data.pkl"]
    if description.file_size > _MOST_DESCRIPTION:
        return None
    order = members.get("byteorder")
    if order is not None and (order.file_size > 10 or archive.read(order) != sys.byteorder.encode()):
        return None
    try:
        tensor = _Unpickler(io.BytesIO(archive.read(description))).load()
    except _NotSoSimpleError:
        return None
    if not isinstance(tensor, _Described) or not tensor.is_contiguous():
        return None
    data = members[f"data/{tensor.key}"]
    begin = tensor.first * tensor.dtype.itemsize
    stored = Stored(0, tensor.dtype, tensor.shape)
    if data.compress_type != zipfile.ZIP_STORED or begin + stored.nbytes > data.file_size:
        return None
    part.seek(data.header_offset)
    name, extra = _LOCAL.unpack(part.read(_LOCAL.size))
    start = data.header_offset + _LOCAL.size + name + extra + begin
    if start + stored.nbytes > part.length:
        raise zipfile.BadZipFile("the data reach beyond the archive")
    return Stored(offset + start, tensor.dtype, tensor.shape)


class _Part(io.RawIOBase):
    """A part of a file as a file of its own."""

    def __init__(self, file: io.BufferedReader, offset: int, length: int) -> None:
        super().__init__()
        self._file, self._offset, self.length, self._position = file, offset, length, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self.length}[whence]
        self._position = max(0, base + offset)
        return self._position

    def readinto(self, buffer: Any, /) -> int:
        self._file.seek(self._offset + self._position)
        wanted = max(0, min(len(buffer), self.length - self._position))
        count = self._file.readinto(memoryview(buffer)[:wanted])
        self._position += count
        return count


@dataclass(frozen=True)
class _Storage:
    """What a description says of the data."""

    key: str
    dtype: torch.dtype


@dataclass(frozen=True)
class _Described:
    key: str
    dtype: torch.dtype
    first: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    def is_contiguous(self) -> bool:
        expected, contiguous = 1, True
        for size, stride in zip(reversed(self.shape), reversed(self.strides), strict=True):
            contiguous = contiguous and (size == 1 or stride == expected)
            expected *= size
        return contiguous or 0 in self.shape


class _NotSoSimpleError(Exception):
    """A pickle of something else than one plain tensor."""


class _Unpickler(pickle.Unpickler):
    """Reads the description of one tensor and runs nothing that it names."""

    def find_class(self, module: str, name: str) -> Any:
        if module == "torch._utils" and name in ("_rebuild_tensor_v2", "_rebuild_tensor_v3"):
            return _described
        if (module, name) == ("collections", "OrderedDict"):
            return OrderedDict
        if module in ("torch", "torch.storage") and name == "UntypedStorage":
            return torch.uint8
        if module == "torch" and name in _DTYPES:
            return _DTYPES[name]
        if module == "torch" and isinstance(dtype := getattr(torch, name, None), torch.dtype):
            return dtype
        raise _NotSoSimpleError(f"{module}.{name}")

    def persistent_load(self, identity: Any) -> _Storage:
        match identity:
            case ("storage", torch.dtype() as dtype, str() as key, _, int()):
                return _Storage(key, dtype)
        raise _NotSoSimpleError(str(identity))


def _described(
    storage: Any, first: Any, shape: Any, strides: Any, grad: Any, hooks: Any, dtype: Any = None, *more: Any
) -> _Described:
    """Stands in the place of torch's functions of the same parameters."""
    plain = isinstance(storage, _Storage) and not grad and not hooks and not more
    numbers = [first, *shape, *strides]
    if not plain or len(shape) != len(strides) or not all(type(number) is int and number >= 0 for number in numbers):
        raise _NotSoSimpleError("a tensor with something more")
    if dtype is not None and not isinstance(dtype, torch.dtype):  # of version 2 it is a conjugate bit, or the like
        raise _NotSoSimpleError("a tensor with metadata")
    return _Described(storage.key, dtype or storage.dtype, first, tuple(shape), tuple(strides))
