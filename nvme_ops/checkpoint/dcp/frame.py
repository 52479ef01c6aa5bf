"""What ``torch.save`` puts around the bytes of one tensor: a zip archive with a description and the bytes."""

from __future__ import annotations

import functools
import io
import math
from collections import OrderedDict
from typing import Any

import torch

from nvme_ops.checkpoint.torch_save import Pickler, Reference
from nvme_ops.checksums import checksums_of
from nvme_ops.formats.torch_zip import (
    AROUND,
    CENTRAL_CHECKSUM,
    CHECKSUM,
    FOLDER,
    LOCAL_CHECKSUM,
    PICKLE,
    ZipRecord,
    directory,
    lay_out,
)
from nvme_ops.settings import ALIGNMENT, LARGE, PAGE


class Frame:
    """The bytes before and after those of a contiguous tensor; the archive begins ``offset`` bytes into a page."""

    def __init__(self, dtype: torch.dtype, shape: tuple[int, ...], offset: int) -> None:
        texts = {PICKLE: _description(dtype, shape), **AROUND}
        crcs = checksums_of(list(texts.values()), CHECKSUM)
        records = [
            ZipRecord(FOLDER + name.encode(), len(text), text, crc)
            for (name, text), crc in zip(texts.items(), crcs, strict=True)
        ]
        data = ZipRecord(FOLDER + b"data/0", math.prod(shape) * dtype.itemsize)
        end = lay_out([*records, data], offset)
        head = b"".join([part for record in records for part in (record.local(), record.data)]) + data.local()
        tail = directory([*records, data], end)
        self.head_length, self.tail_length = len(head), len(tail)
        place = data.header + LOCAL_CHECKSUM
        self._head = head[:place], head[place + 4 :]
        place = len(directory(records, 0)) - len(directory([], 0)) + CENTRAL_CHECKSUM
        self._tail = tail[:place], tail[place + 4 :]

    def around(self, checksum: int) -> tuple[bytes, bytes]:
        """Returns head and tail for data with this CRC-32."""
        written = checksum.to_bytes(4, "little")
        return written.join(self._head), written.join(self._tail)


def frame(dtype: torch.dtype, shape: tuple[int, ...], offset: int) -> Frame:
    """Returns what surrounds the tensor when the archive begins ``offset`` bytes into the file."""
    large = math.prod(shape) * dtype.itemsize >= LARGE
    return _frame(dtype, shape, offset % (PAGE if large else ALIGNMENT))


_frame = functools.lru_cache(maxsize=4096)(Frame)  # a model has many tensors of few shapes


class _Rebuilt:
    def __init__(self, function: Any, arguments: tuple[Any, ...]) -> None:
        self._reduced = function, arguments

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        return self._reduced


@functools.lru_cache(maxsize=4096)
def _description(dtype: torch.dtype, shape: tuple[int, ...]) -> bytes:
    """Returns the pickle of a contiguous tensor without its data, as torch pickles this dtype."""
    function, arguments = torch.empty(0, dtype=dtype).__reduce_ex__(2)
    elements = math.prod(shape)
    strides = [math.prod(max(1, size) for size in shape[place + 1 :]) for place in range(len(shape))]
    if isinstance(arguments[0], torch.UntypedStorage):
        kind, count = torch.UntypedStorage, elements * dtype.itemsize
    else:
        kind, count = getattr(torch, arguments[0]._pickle_storage_type()), elements
    storage = Reference("storage", kind, "0", "cpu", count)
    rest = arguments[6:]  # what some dtypes need in addition
    stream = io.BytesIO()
    Pickler(stream, everywhere=True).dump(
        _Rebuilt(function, (storage, 0, shape, tuple(strides), False, OrderedDict(), *rest))
    )
    return stream.getvalue()
