"""MosaicML's MDS shards, read in place. Source: streaming 0.13, ``streaming/base/format/mds``.

``index.json`` lists the shards. A shard begins with uint32s: the number of samples, where each sample begins, and where
the last ends. A sample begins with a uint32 for each column of variable size, its bytes; the columns follow in order.
"""

from __future__ import annotations

import math
import os
import stat
from collections.abc import Callable
from typing import Any

import torch

from nvme_ops.base.errors import FormatError, UnsafeError
from nvme_ops.base.text import parse_json
from nvme_ops.data.columns import Sample
from nvme_ops.data.index import RecordOffsets, SampleIndex, foreign_index
from nvme_ops.filesystem.publication import content_of, opened
from nvme_ops.io.tensors import bytes_of

_LIST = "index.json"
_KEYS = ("column_names", "column_encodings", "column_sizes")
_WORD = 4
_MAX = 100_000_000  # bytes of the index
# In an array of any dtype, a byte says the dtype, and two bits the size of each length of its shape.
_DTYPES = {8: "uint8", 9: "int8", 16: "uint16", 17: "int16", 18: "float16", 32: "uint32", 33: "int32", 34: "float32",
           64: "uint64", 65: "int64", 66: "float64"}  # fmt: skip
_SCALARS = {name: getattr(torch, name) for name in _DTYPES.values()}


def matches(path: str) -> bool:
    """Returns whether the folder has an index of MDS shards; other programs have an ``index.json``, too."""
    if not os.path.isfile(os.path.join(path, _LIST)):
        return False
    try:
        document = parse_json(content_of(os.path.join(path, _LIST), _MAX))
        return isinstance(document, dict) and "shards" in document
    except ValueError:
        return any(name.endswith(".mds") for name in os.listdir(path))
    except OSError:
        return False


def index_of(path: str) -> SampleIndex:
    """Returns where the samples of a folder lie. Raises FormatError for shards that cannot be read in place."""
    name = os.path.join(path, _LIST)
    text = content_of(name, _MAX)
    try:
        shards = parse_json(text)["shards"]
        names = [_name_of(shard, path) for shard in shards]
        columns = {key: shards[0][key] for key in _KEYS}
        if any(shard[key] != columns[key] for shard in shards for key in _KEYS):
            raise FormatError("its shards have different columns")
        counts = [int(shard["samples"]) for shard in shards]
        if min(counts) < 0 or any(b"\0" in os.fsencode(entry) for entry in names):
            raise ValueError("an impossible shard")
    except FormatError as error:
        raise FormatError(f"{name}: {error}") from error
    except (LookupError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise FormatError(f"{name}: no index of MDS shards: {error!r}") from error
    return foreign_index("mds", path, names, text, lambda shard, number: _places(shard, counts[number]), columns)


def _name_of(shard: dict[str, Any], folder: str) -> str:
    """Returns the name of a shard's file. Raises FormatError if it cannot be read in place."""
    if shard["format"] != "mds":
        raise FormatError(f"shards of the format {shard['format']!r}; only mds is read")
    name = str(shard["raw_data"]["basename"])
    if not os.path.exists(os.path.join(folder, name)) and shard.get("zip_data"):
        raise FormatError(f"{name} is compressed ({shard['compression']}): decompress it first")
    if os.path.isabs(name) or os.pardir in name.split(os.sep):
        raise FormatError(f"{name!r} is not in the folder")
    return name


def _places(shard: str, count: int) -> RecordOffsets:
    with opened(shard) as fd:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise FormatError(f"{shard}: is no regular file")
        size, wanted = os.fstat(fd).st_size, (count + 2) * _WORD
        with open(fd, "rb", closefd=False) as file:
            head = file.read(wanted) if wanted <= size else b""
    if len(head) != wanted or int.from_bytes(head[:_WORD], "little") != count:
        raise FormatError(f"{shard}: does not begin with the places of {count} samples, as the index says")
    places = torch.frombuffer(bytearray(head), dtype=torch.int32)[1:].to(torch.int64) & 0xFFFFFFFF
    if (places[1:] < places[:-1]).any() or int(places[-1]) > size:
        raise FormatError(f"{shard}: the places of its samples are damaged")
    return RecordOffsets(int(places[0]), places[1:])


class NotDecodedError(FormatError, ImportError):
    """A column that another package decodes, which is not installed."""


class Shards:
    """Turns records into dicts.

    Numbers become Python numbers, arrays tensors; ``bytes`` and encoded images (``jpeg``, ``png``) become tensors of
    their bytes, views of the memory that was read. The package ``streaming``, if installed, decodes other encodings.
    Pickles are refused.

    Raises:
        FormatError: the columns in the index are damaged.
        UnsafeError: a column is pickled.
    """

    def __init__(self, index: SampleIndex) -> None:
        try:
            names, encodings, sizes = (index.more[key] for key in _KEYS)
            if not all(size is None or (type(size) is int and size >= 0) for size in sizes):
                raise ValueError(f"column_sizes are {sizes!r}")
            decoders = [_decoder(str(encoding)) for encoding in encodings]
            self._columns = list(zip(map(str, names), decoders, sizes, strict=True))
        except UnsafeError as error:
            raise UnsafeError(f"{index.path}: {error}") from error
        except (KeyError, ValueError, TypeError) as error:
            raise FormatError(f"{index.path}: the columns are damaged: {error!r}") from error
        self._head = sum(size is None for _, _, size in self._columns) * _WORD

    def sample(self, record: torch.Tensor) -> Sample:
        """Returns the sample in a record, uint8. Raises FormatError."""
        sample: dict[str, Any] = {}
        head = bytes(bytes_of(record[: self._head]))
        if len(head) != self._head:
            raise FormatError(f"a sample of {record.numel()} bytes has no room for the sizes of its columns")
        word, begin = 0, self._head
        for name, decode, size in self._columns:
            if size is None:
                size = int.from_bytes(head[word : word + _WORD], "little")
                word += _WORD
            if begin + size > record.numel():
                raise FormatError(f"column {name!r} does not fit its sample of {record.numel()} bytes")
            try:
                sample[name] = decode(record[begin : begin + size])
            except NotDecodedError:
                raise
            except (ValueError, LookupError, TypeError, OverflowError, RuntimeError) as error:
                raise FormatError(f"column {name!r} of a sample is damaged: {error}") from error
            begin += size
        return sample


def _decoder(encoding: str) -> Callable[[torch.Tensor], Any]:
    name, _, arguments = encoding.partition(":")
    if name == "pkl":
        raise UnsafeError("a column is pickled: unpickling runs whatever code it names, so this package does not")
    if name == "ndarray":
        dtype, _, shape = arguments.partition(":")
        lengths = tuple(int(length) for length in shape.split(",")) if shape else None
        return lambda part: _array(part, dtype, lengths)
    dtypes = {**_SCALARS, "int": torch.int64}
    if name in dtypes:
        return lambda part: part.clone().view(dtypes[name]).item()  # ``part`` may be misaligned
    if encoding in ("bytes", "jpeg", "png"):
        return lambda part: part
    texts: dict[str, Callable[[str], Any]] = {"str": str, "json": parse_json, "str_int": int, "str_float": float}
    if encoding in texts:
        return lambda part: texts[encoding](bytes(bytes_of(part)).decode())
    return lambda part: _by_streaming(encoding, part)


def _array(part: torch.Tensor, dtype: str, shape: tuple[int, ...] | None) -> torch.Tensor:
    begin = 0
    if not dtype:
        dtype, begin = _DTYPES[int(part[0])], 1
    if shape is None:
        code = int(part[begin])
        count, width = code >> 2, 1 << (code & 3)
        body = bytes(bytes_of(part[begin + 1 : begin + 1 + count * width]))
        shape = tuple(int.from_bytes(body[k * width : (k + 1) * width], "little") for k in range(count))
        begin += 1 + count * width
    values = part[begin:].clone().view(_SCALARS[dtype])
    if values.numel() != math.prod(shape):
        raise ValueError(f"{values.numel()} values for the shape {shape}")
    return values.view(shape)


def _by_streaming(encoding: str, part: torch.Tensor) -> Any:
    try:
        from streaming.base.format.mds import encodings  # type: ignore[import-not-found,import-untyped,unused-ignore]
    except ImportError:
        words = f"the encoding {encoding!r} is decoded by MosaicML's package: pip install mosaicml-streaming"
        raise NotDecodedError(words) from None
    return encodings.mds_decode(encoding, bytes(bytes_of(part)))
