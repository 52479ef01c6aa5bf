"""What is in a store that is kept: a line of JSON for each change, in a file beside the slabs."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch

from nvme_ops.storage.atomic import replacing
from nvme_ops.storage.session import Session
from nvme_ops.storage.slab import Extent

if TYPE_CHECKING:
    from nvme_ops.storage.store import Value

_NAME = "index"


class Index:
    """The journal of a store. A line counts when it is whole: a process may be killed while it writes one."""

    def __init__(self, session: Session) -> None:
        self._path = session.path(0, _NAME)
        self._fd = session.open(0, _NAME)

    def load(self) -> Iterator[tuple[str, Value]]:
        """The values as the last lines of their keys tell them."""
        found: dict[str, Any] = {}
        whole = 0
        with os.fdopen(os.dup(self._fd), "rb") as file:
            for line in file:
                try:
                    entry = json.loads(line) if line.endswith(b"\n") else None
                except ValueError:
                    entry = None
                if not isinstance(entry, dict):
                    break  # nothing that was written behind half a line was ever told to be complete
                whole += len(line)
                found[entry["key"]] = entry
        os.ftruncate(self._fd, whole)
        for key, entry in found.items():
            if entry.get("pieces") is not None:
                yield key, _value(entry)

    def put(self, key: str, value: Value) -> None:
        """The key has this value from now on."""
        self._append(_entry(key, value))

    def drop(self, key: str) -> None:
        """The key has no value from now on."""
        self._append({"key": key})

    def sync(self) -> None:
        """Makes it durable."""
        os.fdatasync(self._fd)

    def close(self, values: Mapping[str, Value]) -> None:
        """Leaves one line for each value."""
        text = "".join(json.dumps(_entry(key, value)) + "\n" for key, value in values.items())
        with replacing(self._path, durable=False) as file, os.fdopen(os.dup(file.fd), "wb") as stream:
            stream.write(text.encode())
        os.close(self._fd)

    def _append(self, entry: dict[str, Any]) -> None:
        line = (json.dumps(entry) + "\n").encode()
        os.lseek(self._fd, 0, os.SEEK_END)
        while line:
            line = line[os.write(self._fd, line) :]


def _entry(key: str, value: Value) -> dict[str, Any]:
    return {
        "key": key,
        "dtype": str(value.dtype).removeprefix("torch."),
        "shape": value.shape,
        "stride": value.stride,
        "checksum": value.checksum,
        "pieces": [[piece.folder, piece.begin, piece.nbytes, *piece.extent] for piece in value.pieces],
    }


def _value(entry: dict[str, Any]) -> Value:
    from nvme_ops.storage.store import Piece, Value

    pieces = [
        Piece(folder, begin, nbytes, Extent(start, size)) for folder, begin, nbytes, start, size in entry["pieces"]
    ]
    dtype: torch.dtype = getattr(torch, entry["dtype"])
    return Value(dtype, tuple(entry["shape"]), tuple(entry["stride"]), pieces, entry["checksum"])
