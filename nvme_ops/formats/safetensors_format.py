"""Parses the header of a safetensors file: https://github.com/huggingface/safetensors#format. Reads no tensors.

Eight bytes give the length of a JSON object with each tensor's dtype, shape and place; the tensors follow without gaps.
This parser accepts and refuses the same files as safetensors' own, with three exceptions. Only this one refuses several
tensors of one name, and tensors described by an array; only safetensors' refuses nesting in more than 127 levels.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import re
import struct
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from operator import mul
from typing import Any, NamedTuple, NoReturn

import torch

from nvme_ops.base.errors import FormatError, naming
from nvme_ops.formats.mistaken import refuse
from nvme_ops.io.tensors import collector_paused

#: The longest header that safetensors' reader accepts, in bytes.
MAX_HEADER = 100_000_000

_BITS = {
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E5M2": 8, "F8_E4M3": 8, "F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8,
    "I16": 16, "U16": 16, "F16": 16, "BF16": 16, "I32": 32, "U32": 32, "F32": 32, "I64": 64, "U64": 64, "F64": 64,
    "C64": 64, "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6,
}  # fmt: skip
_TORCH_NAMES = {
    "BOOL": "bool", "U8": "uint8", "I8": "int8", "I16": "int16", "U16": "uint16", "I32": "int32", "U32": "uint32",
    "I64": "int64", "U64": "uint64", "F16": "float16", "BF16": "bfloat16", "F32": "float32", "F64": "float64",
    "C64": "complex64", "F8_E5M2": "float8_e5m2", "F8_E4M3": "float8_e4m3fn", "F8_E8M0": "float8_e8m0fnu",
    "F8_E4M3FNUZ": "float8_e4m3fnuz", "F8_E5M2FNUZ": "float8_e5m2fnuz", "F4": "float4_e2m1fn_x2",
}  # fmt: skip
DTYPES: dict[str, torch.dtype] = {
    name: getattr(torch, torch_name) for name, torch_name in _TORCH_NAMES.items() if hasattr(torch, torch_name)
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}

_FIELDS = ("dtype", "shape", "data_offsets")
_LONE_SURROGATE = re.compile(r"\\(?:u[dD][89abAB]..\\u[dD][c-fC-F]..|(u[dD][89a-fA-F]..)|.)", re.DOTALL)


class TensorEntry(NamedTuple):
    """One tensor in a file: its bytes are from ``start`` to ``end``, counted from the beginning of the file."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int

    def in_torch(self, path: str, name: str) -> tuple[torch.dtype, tuple[int, ...]]:
        """Returns torch's dtype and shape. Two values of F4 along the last dimension make one element.

        Raises:
            FormatError: torch cannot represent the tensor, which the message names, with the file.
        """
        if self.dtype not in DTYPES:
            refuse(path, f"tensor {name!r}: torch {torch.__version__} has no dtype for {self.dtype}")
        shape = self.shape
        if self.dtype == "F4":
            if not shape or shape[-1] % 2:
                refuse(path, f"tensor {name!r}: shape {list(shape)} of F4 has no even last dimension, as torch needs")
            shape = (*shape[:-1], shape[-1] // 2)
        if max(shape, default=0) >= 2**63:
            refuse(path, f"tensor {name!r}: shape {list(shape)} is larger than torch supports")
        return DTYPES[self.dtype], shape


@dataclass(frozen=True)
class Header:
    """The content of a header. ``entries`` are in the order of their data."""

    entries: dict[str, TensorEntry]
    metadata: dict[str, str] = field(default_factory=dict)
    text: bytes = field(default=b"", repr=False)  # the JSON, with the spaces after it


def read(fd: int, path: str) -> Header:
    """Reads the header of an open file. Raises FormatError, which names the file and the field that is wrong."""
    return decode(*read_text(fd, path), path)


def read_text(fd: int, path: str) -> tuple[bytes, int]:
    """Reads the JSON text and the size of an open file. Raises FormatError.

    Never allocates memory for a number that the file's size contradicts.
    """
    size = os.fstat(fd).st_size
    with naming("read of the header", path):
        prefix = os.pread(fd, 8, 0)
        if len(prefix) < 8:
            refuse(path, f"{size} bytes are too few for a safetensors file")
        length = struct.unpack("<Q", prefix)[0]
        if length > MAX_HEADER:
            refuse(path, f"header length {length} is more than the {MAX_HEADER} bytes a header may have", fd)
        if length > size - 8:
            refuse(path, f"header length {length} reaches beyond the file's {size} bytes")
        text = bytearray()
        while len(text) < length:
            part = os.pread(fd, length - len(text), 8 + len(text))
            if not part:
                refuse(path, "the file ended within its header")
            text += part
    return bytes(text), size


@collector_paused
def decode(text: bytes, size: int, path: str) -> Header:
    """Parses the JSON text of a file of ``size`` bytes. Raises FormatError."""
    start = 8 + len(text)
    metadata, entries = _read_plainly(text, start, path) or _read_strictly(text, start, path)
    position = start
    for entry in entries.values():
        if entry.start != position:  # not in the order of their data, or overlapping, or with gaps
            entries = dict(sorted(entries.items(), key=lambda item: (item[1].start, item[1].end)))
            position = _end(entries, start, path)
            break
        position = entry.end
    if position > size:
        refuse(path, f"the data end at byte {position} of a file of {size} bytes: it was cut short")
    if position < size:
        refuse(path, f"{size - position} bytes follow the last tensor: the header does not cover the file")
    return Header(entries, metadata, text)


def _end(ordered: Mapping[str, TensorEntry], start: int, path: str) -> int:
    """Checks that the data follow each other without gaps; returns where they end."""
    position = start
    for name, entry in ordered.items():
        if entry.start != position:
            kind = "overlaps the one before it" if entry.start < position else "leaves a gap before it"
            refuse(path, f"tensor {name!r}: data_offsets begin at {entry.start - start}, which {kind}")
        position = entry.end
    return position


_Described = tuple[dict[str, str], dict[str, TensorEntry]]

# How this package and safetensors write an entry. Other forms are valid, too, but take longer to parse.
_METADATA = '{"__metadata__":'
_PLAIN = re.compile(
    r'"([^"\\\x00-\x1f]*)":\{"dtype":"(\w+)","shape":\[((?:\d{1,10}(?:,\d{1,10})*)?)\],'
    r'"data_offsets":\[(0|[1-9]\d{0,18}),(0|[1-9]\d{0,18})\]\}([,}])',
    re.ASCII,
)
_BETWEEN = len('"":{"dtype":"","shape":[],"data_offsets":[,]}')  # constant characters of each entry


def _read_plainly(text: bytes, start: int, path: str) -> _Described | None:
    """Parses a header of the usual form, fast; returns None for any other, including invalid ones."""
    try:
        decoded = text.decode("utf-8").rstrip(" \t\r\n")
    except UnicodeDecodeError:
        return None
    metadata, place = {}, 1
    if decoded.startswith(_METADATA):
        try:
            _, end = json.JSONDecoder().raw_decode(decoded, len(_METADATA))
            metadata = _metadata(_parse(decoded[len(_METADATA) : end].encode(), path), path)
        except (ValueError, RecursionError):  # includes FormatError
            return None
        place = end + 1
    matches = _PLAIN.findall(decoded, place)
    if not matches or decoded[0] != "{" or decoded[place - 1] not in "{,":
        return None
    columns = list(zip(*matches, strict=True))
    written = sum(map(len, itertools.chain.from_iterable(columns)))
    if written + len(matches) * _BETWEEN != len(decoded) - place:
        return None  # there is something else between the entries
    names, dtypes, dimensions, first, last, after = columns
    known = {key: _kind(*key) for key in set(zip(dtypes, dimensions, strict=True))}
    kinds = [known[key] for key in zip(dtypes, dimensions, strict=True)]
    entries: dict[str, TensorEntry] = {}
    for name, dtype, kind, begin, end in zip(names, dtypes, kinds, map(int, first), map(int, last), strict=True):
        if kind is None or end - begin != kind[1]:
            return None
        entries[name] = TensorEntry(dtype, kind[0], start + begin, start + end)
    if "".join(after) != "," * (len(matches) - 1) + "}" or len(entries) < len(matches) or "__metadata__" in entries:
        return None
    return metadata, entries


def _kind(dtype: str, dimensions: str) -> tuple[tuple[int, ...], int] | None:
    """Returns the shape and bytes of a tensor if its description has the usual form, else None."""
    shape = tuple(map(int, filter(None, dimensions.split(","))))
    if dtype not in _BITS or ",".join(map(str, shape)) != dimensions:
        return None
    if max(shape, default=0) >= 2**32 or max(itertools.accumulate(shape, mul), default=0) >= 2**60:
        return None
    bits = math.prod(shape) * _BITS[dtype]
    return None if bits % 8 else (shape, bits // 8)


def _read_strictly(text: bytes, start: int, path: str) -> _Described:
    """Parses any header. Raises FormatError."""
    document = _parse(text, path)
    unique_names(path, document.pairs)
    metadata = _metadata(document.pop("__metadata__", None), path)
    return metadata, {name: _entry(name, info, start, path) for name, info in document.items()}


def unique_names(path: str, pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    """Returns the JSON object of these names and values. Raises FormatError if a name comes twice."""
    document = dict(pairs)
    if len(document) < len(pairs):
        (name, _), *_ = Counter(name for name, _ in pairs).most_common(1)
        refuse(path, f"the name {name!r} appears twice")
    return document


class _Object(dict[str, Any]):
    """A JSON object. A repeated name has its last value, as in other readers, and ``pairs`` has all of them."""

    def __init__(self, pairs: Sequence[tuple[str, Any]]) -> None:
        super().__init__(pairs)
        self.pairs = pairs if len(self) < len(pairs) else ()

    def all_values(self) -> list[Any]:
        """Returns all values, including replaced ones, which must be valid as well."""
        return [value for _, value in self.pairs] or list(self.values())


def _parse(text: bytes, path: str) -> _Object:
    """Parses JSON as strictly as safetensors does: surrogates, NaN, and numbers too large for a double are errors."""

    def constant(word: str) -> NoReturn:
        refuse(path, f"header: {word} is not JSON")

    def real(word: str) -> float:
        value = float(word)
        if math.isinf(value):
            refuse(path, f"header: {word[:40]} is too large a number")
        return value

    def integer(word: str) -> int | float:
        return real(word) if word.startswith("-") or len(word) > 20 else int(word)

    try:
        decoded = text.decode("utf-8")
        document = json.loads(
            decoded, object_pairs_hook=_Object, parse_constant=constant, parse_int=integer, parse_float=real
        )
    except FormatError:
        raise
    except (ValueError, RecursionError) as error:
        refuse(path, f"header is not JSON: {error}")
    if "\\u" in decoded and any(match[1] for match in _LONE_SURROGATE.finditer(decoded)):
        refuse(path, "header is not JSON: half a surrogate pair")
    if not isinstance(document, _Object):
        refuse(path, "header is not a JSON object")
    return document


def _metadata(value: Any, path: str) -> dict[str, str]:
    if value is None:
        return {}
    if not isinstance(value, _Object) or not set(map(type, value.all_values())) <= {str}:
        refuse(path, "__metadata__ is not an object of strings")
    return value


def _entry(name: str, info: Any, start: int, path: str) -> TensorEntry:
    def wrong(what: str) -> NoReturn:
        refuse(path, f"tensor {name!r}: {what}")

    if not isinstance(info, _Object):
        wrong("is not described by an object")
    for key in _FIELDS:
        if key not in info:
            wrong(f"{key} is missing")
        if [name for name, _ in info.pairs].count(key) > 1:
            wrong(f"{key} appears twice")
    dtype, shape, offsets = info["dtype"], info["shape"], info["data_offsets"]
    if isinstance(dtype, _Object) and dtype.all_values() == [None]:  # Rust's other notation: {"F32": null}
        dtype = next(iter(dtype))
    if not isinstance(dtype, str) or dtype not in _BITS:
        wrong(f"dtype {dtype!r} is unknown")
    if not _are_sizes(shape):
        wrong(f"shape {shape!r} is not a list of whole numbers")
    if not _are_sizes(offsets) or len(offsets) != 2:
        wrong(f"data_offsets {offsets!r} are not two whole numbers")
    first, last = offsets
    too_large = any(elements >= 2**64 for elements in itertools.accumulate(shape, mul))
    bits = 0 if too_large else math.prod(shape) * _BITS[dtype]
    if too_large or bits >= 2**64:
        wrong(f"shape {shape!r} is larger than any memory")
    if bits % 8:
        wrong(f"shape {shape!r} of {dtype} does not fill whole bytes")
    if last < first or last - first != bits // 8:
        wrong(f"data_offsets {offsets!r} span {last - first} bytes, and {dtype} of shape {shape!r} has {bits // 8}")
    return TensorEntry(dtype, tuple(shape), start + first, start + last)


def _are_sizes(value: Any) -> bool:
    return isinstance(value, list) and all(type(size) is int and 0 <= size < 2**64 for size in value)
