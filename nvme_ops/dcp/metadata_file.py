"""The file ``.metadata``: DCP's pickle, followed by a checksum, where pickle ignores it."""

from __future__ import annotations

import os
import pickle
import re
from collections.abc import Callable
from typing import Any

from nvme_ops.checksums import checksums_of
from nvme_ops.errors import ChecksumError, FormatError
from nvme_ops.memory.pieces import CHECKSUM
from nvme_ops.storage.atomic import replacing
from nvme_ops.whole import read_whole

_CHECKSUM = re.compile(rb"\nnvme_ops\.crc32c=([0-9a-f]{8})\n\Z")
_CHECKSUM_BYTES = len("\nnvme_ops.crc32c=00000000\n")


def write(path: str, metadata: Any, durable: bool) -> None:
    """Replaces the file atomically."""
    content = pickle.dumps(metadata)
    content += f"\nnvme_ops.crc32c={checksums_of([content], CHECKSUM)[0]:08x}\n".encode()
    with replacing(path, durable) as file, open(file.fd, "wb", closefd=False) as stream:
        stream.write(content)


def read(path: str, fd: int, loads: Callable[[bytes], Any] = pickle.loads) -> Any:
    """Reads what ``write`` or DCP's own writer wrote to ``path``, which is open.

    As with DCP's own reader, whoever wrote the file can make this process execute anything.

    Raises:
        ChecksumError: its checksum does not match.
        FormatError: it cannot be unpickled.
        OSError: it cannot be read.
    """
    content = read_whole(fd, path)
    if found := _CHECKSUM.search(content, max(0, len(content) - _CHECKSUM_BYTES)):
        content = content[: found.start()]
        if checksums_of([content], CHECKSUM)[0] != int(found[1], 16):
            raise ChecksumError(path, [os.path.basename(path)])
    try:
        return loads(content)
    except Exception as error:  # a damaged pickle can raise anything
        raise FormatError(f"{path}: not the metadata of a checkpoint, or damaged: {words_of(error)}") from error


def words_of(error: Exception) -> str:
    """Returns the kind of an error and what it says, unless that is nested too deeply to be said."""
    try:
        return repr(error)
    except RecursionError:
        return type(error).__name__
