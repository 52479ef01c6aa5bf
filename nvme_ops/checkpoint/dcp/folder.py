"""Manages the files of a checkpoint's folder: the old ones stay until the new checkpoint is complete.

``.metadata`` is DCP's pickle, followed by a checksum, which pickle ignores. A reader holds a shared lock on the
``.metadata`` that it has read. A save renames the one that it replaces, and removes it, with the files that only it
names, once nobody holds a lock on it. Saves to one folder take turns, across programs and threads.
"""

from __future__ import annotations

import os
import pickle
import re
import threading
import weakref
from collections.abc import Callable
from typing import Any

from torch.distributed.checkpoint.metadata import Metadata

from nvme_ops.base.errors import ChecksumError, FormatError
from nvme_ops.filesystem.files import read_whole
from nvme_ops.filesystem.publication import Publication, ReadLease, remove_litter
from nvme_ops.io.tensors import checksums_of
from nvme_ops.memory.pieces import CHECKSUM

#: The file's name; where ranks save independently, the end of the name of each rank's file.
METADATA = ".metadata"
#: The attribute of an item in the metadata that holds a dict: ``"data"``, where the tensor's bytes begin in the item,
#: and the item's CRC-32, each only if known. DCP's own reader ignores it.
ATTRIBUTE = "nvme_ops"
_DATA = re.compile(r"(__\d+_)(\d+)\.distcp")
_OF_A_RANK = re.compile(r"__\d+\.metadata")
_CHECKSUM = re.compile(rb"\nnvme_ops\.crc32c=([0-9a-f]{8})\n\Z")
_CHECKSUM_BYTES = len("\nnvme_ops.crc32c=00000000\n")


def metadata_of(path: str | os.PathLike[str], rank: int | None) -> str:
    """Returns the path of the metadata in a folder; with ``rank``, of those of a rank that saves independently."""
    return os.path.join(path, METADATA if rank is None else f"__{rank}{METADATA}")


def new_name(path: str, prefix: str) -> str:
    """Returns an unused name for a data file: ``prefix`` and a number, such as ``__0_0.distcp``."""
    matches = [match for name in os.listdir(path) if (match := _DATA.fullmatch(name)) and match[1] == prefix]
    return f"{prefix}{max((int(match[2]) for match in matches), default=-1) + 1}.distcp"


def metadata_bytes(metadata: Any) -> bytes:
    """Returns the content of the file ``.metadata``."""
    content = pickle.dumps(metadata)
    return content + f"\nnvme_ops.crc32c={checksums_of([content], CHECKSUM)[0]:08x}\n".encode()


def read_metadata(path: str, fd: int, loads: Callable[[bytes], Any] = pickle.loads) -> Metadata:
    """Reads the metadata, written by us or by DCP's own writer, from ``path``, which is open as ``fd``.

    As with DCP's own reader, the author of the file can make ``pickle.loads`` execute anything.

    Raises:
        ChecksumError: its checksum does not match.
        FormatError: it cannot be unpickled, or is something else.
        OSError: it cannot be read.
    """
    content = read_whole(fd, path)
    if match := _CHECKSUM.search(content, max(0, len(content) - _CHECKSUM_BYTES)):
        content = content[: match.start()]
        if checksums_of([content], CHECKSUM)[0] != int(match[1], 16):
            raise ChecksumError(path, [os.path.basename(path)])
    try:
        metadata = loads(content)
    except Exception as error:  # a damaged pickle can raise anything
        raise FormatError(f"{path}: not the metadata of a checkpoint, or damaged: {error_text(error)}") from error
    if not isinstance(metadata, Metadata) or not isinstance(metadata.storage_data, dict):
        raise FormatError(f"{path}: not the metadata of a checkpoint")
    return metadata


def error_text(error: Exception) -> str:
    """Returns the type and message of an error, or its type alone if the message is nested too deeply."""
    try:
        return repr(error)
    except RecursionError:
        return type(error).__name__


class Reading(ReadLease):
    """A checkpoint that is being read: until ``close``, no save removes its files."""

    def __init__(self, path: str) -> None:
        super().__init__(path)
        try:
            status = os.fstat(self.fileno())
            # Never written in place, so this suffices. A save links the file, which changes its ctime, and nodes may
            # have different device numbers.
            self.identity = (status.st_ino, status.st_size, status.st_mtime_ns)
            self.metadata = read_metadata(path, self.fileno())
        except BaseException:
            self.close()
            raise


_savings: weakref.WeakValueDictionary[str, Saving] = weakref.WeakValueDictionary()  # by path of the metadata


class Saving(Publication):
    """A save to the folder, until ``close``. DCP does not report that one failed: the next one may have to end it."""

    def __init__(self, metadata: str, durable: bool) -> None:
        path = os.path.realpath(metadata)
        earlier = _savings.get(path)
        self._thread = threading.current_thread()
        if earlier is not None and (earlier._thread is self._thread or not earlier._thread.is_alive()):
            earlier.close()  # it has failed: its thread has ended, or is already beginning another save
        super().__init__(metadata, durable)
        _savings[path] = self

    def complete(self, metadata: Any, prefix: str) -> None:
        """Publishes ``metadata``, then removes the data of older checkpoints and of killed saves.

        With ``prefix``, removes only files of this rank: ranks that save independently do not know each other's.
        """
        self.publish(metadata_bytes(metadata), leases=True)
        kept = _named(metadata) | self.leased(lambda path, fd: _named(read_metadata(path, fd)))
        remove_litter(self.folder)  # spares running saves
        names = os.listdir(self.folder)
        if not (METADATA in names if prefix else any(map(_OF_A_RANK.fullmatch, names))):
            self.sweep([name for name in names if _DATA.fullmatch(name) and name.startswith(prefix)], kept)


def _named(metadata: Any) -> set[str]:
    return {info.relative_path for info in metadata.storage_data.values()}
