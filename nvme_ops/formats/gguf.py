"""Parses the header of a GGUF file: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. Reads no tensors.

What a file claims is compared with its size before anything is made of it.
"""

from __future__ import annotations

import math
import os
import struct
from itertools import pairwise
from typing import Any, BinaryIO, NamedTuple

from nvme_ops.base.errors import FormatError, naming
from nvme_ops.formats.mistaken import refuse

MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_TEXT, _ARRAY = 8, 9
_LONGEST = 1 << 16  # bytes of a name
_DEEPEST = 4  # arrays within each other
_DIMENSIONS = 4
_LEAST_ENTRY, _LEAST_TENSOR = 13, 32  # bytes


class GgufTensor(NamedTuple):
    """One tensor in a file: its bytes are from ``start`` to ``end``, counted from the beginning of the file."""

    kind: str  #: such as "Q4_K", or "F32"
    shape: tuple[int, ...]  #: as torch has it: rows follow each other
    start: int
    end: int


class GgufHeader(NamedTuple):
    """What a file says before its tensors."""

    fields: dict[str, Any]  #: but arrays
    tensors: dict[str, GgufTensor]


def read(fd: int, path: str) -> GgufHeader:
    """Returns the header of an open file. Raises FormatError for a damaged one, ImportError without gguf."""
    try:
        from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
    except ImportError as error:
        raise ImportError("GGUF files need the package gguf: pip install 'nvme-ops[gguf]'") from error
    kinds = {kind.value: (kind.name, *GGML_QUANT_SIZES[kind]) for kind in GGMLQuantizationType}
    with naming("read", path), open(os.dup(fd), "rb", buffering=1 << 20) as stream:
        cursor = _Cursor(stream, path)
        if cursor.take(4) != MAGIC:
            refuse(path, "is no GGUF file", fd)
        version, count, entries = cursor.number("I"), cursor.number("Q"), cursor.number("Q")
        if version not in _VERSIONS:
            cursor.fail(f"has version {version} of GGUF, not 2 or 3, or is big-endian")
        cursor.require(count * _LEAST_TENSOR + entries * _LEAST_ENTRY, f"{count} tensors and {entries} settings")
        fields = {}
        for _ in range(entries):
            name = cursor.text(_LONGEST)
            if (value := cursor.value(cursor.number("I"))) is not None:
                fields[name] = value
        alignment = fields.get("general.alignment", 32)
        if type(alignment) is not int or alignment < 8 or alignment & (alignment - 1):
            cursor.fail(f"has an alignment of {alignment!r}")
        places = {}
        for _ in range(count):
            name, number = cursor.text(_LONGEST), cursor.number("I")
            if name in places or not 0 < number <= _DIMENSIONS:
                cursor.fail(f"has tensor {name!r} twice, or with {number} dimensions")
            shape = tuple(cursor.number("Q") for _ in range(number))[::-1]
            places[name] = shape, cursor.number("I"), cursor.number("Q")
        begin = -(-stream.tell() // alignment) * alignment
    tensors = {}
    for name, (shape, number, offset) in places.items():
        if number not in kinds:
            cursor.fail(f"has tensor {name!r} of type {number}, which the installed gguf does not know")
        kind, values, nbytes = kinds[number]
        size = math.prod(shape) // values * nbytes
        if not size or shape[-1] % values or offset % alignment or begin + offset + size > cursor.size:
            cursor.fail(f"has tensor {name!r}, {kind} of shape {shape}, in no whole blocks or beyond the file's end")
        tensors[name] = GgufTensor(kind, shape, begin + offset, begin + offset + size)
    ordered = sorted(tensors.values(), key=lambda tensor: tensor.start)
    if any(before.end > after.start for before, after in pairwise(ordered)):
        cursor.fail("has tensors that overlap")
    return GgufHeader(fields, tensors)


class _Cursor:
    """Takes what follows from a file, and no more than that has."""

    def __init__(self, stream: BinaryIO, path: str) -> None:
        self._stream, self._path = stream, path
        self.size = os.fstat(stream.fileno()).st_size
        stream.seek(0)

    def fail(self, words: str) -> None:
        """Raises FormatError."""
        raise FormatError(f"{self._path} {words}")

    def require(self, nbytes: int, what: str) -> None:
        """Raises FormatError unless the rest of the file has so many bytes."""
        if nbytes > self.size - self._stream.tell():
            self.fail(f"claims {what}, more than it has room for")

    def take(self, nbytes: int) -> bytes:
        """Returns the next bytes."""
        taken = self._stream.read(nbytes)
        if len(taken) < nbytes:
            self.fail("ends within its header")
        return taken

    def number(self, code: str) -> Any:
        """Returns the next number, as ``struct`` calls its kind."""
        (value,) = struct.unpack(f"<{code}", self.take(struct.calcsize(f"<{code}")))
        return value

    def text(self, most: int | None = None) -> str:
        """Returns the next string. Raises FormatError for one that is longer than ``most`` bytes."""
        length = self.number("Q")
        self.require(length, f"a string of {length} bytes")
        if most is not None and length > most:
            self.fail(f"has a name of {length} bytes")
        try:
            return self.take(length).decode()
        except UnicodeDecodeError as error:
            raise FormatError(f"{self._path} has a string that is not UTF-8") from error

    def value(self, kind: int, depth: int = 0) -> Any:
        """Returns the next value of a setting; None for an array, which is skipped."""
        if kind == _TEXT:
            return self.text()
        if kind in _NUMBERS:
            return self.number(_NUMBERS[kind])
        if kind != _ARRAY or depth == _DEEPEST:
            self.fail(f"has a setting of type {kind}, or arrays within arrays")
        kind, count = self.number("I"), self.number("Q")
        size = struct.calcsize(f"<{_NUMBERS[kind]}") if kind in _NUMBERS else 8
        self.require(count * size, f"an array of {count} values")
        if kind in _NUMBERS:
            self._stream.seek(count * size, os.SEEK_CUR)
            return None
        for _ in range(count):
            if kind == _TEXT:
                length = self.number("Q")
                self.require(length, f"a string of {length} bytes")
                self._stream.seek(length, os.SEEK_CUR)
            else:
                self.value(kind, depth + 1)
        return None
