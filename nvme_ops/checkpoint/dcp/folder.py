"""The files in a checkpoint's folder: new ones beside those of the old checkpoint, until the new one is complete.

``.metadata`` is DCP's pickle, followed by a checksum, where pickle ignores it. A reader holds a shared lock on the one
that it has read. A save renames the one that it replaces, and removes it, with the files that only it names, once
nobody holds a lock on it. Saves to one folder take turns, across programs and threads.
"""

from __future__ import annotations

import os
import pickle
import re
import threading
import weakref
from collections.abc import Callable
from typing import Any

from nvme_ops.checksums import checksums_of
from nvme_ops.errors import ChecksumError, FormatError
from nvme_ops.memory.pieces import CHECKSUM
from nvme_ops.storage.publication import Publication, ReadLease, remove_litter
from nvme_ops.whole import read_whole

#: Of the whole checkpoint, and of one rank where ranks save without each other.
METADATA = ".metadata"
#: What the metadata say more of an item: a dict that has where the tensor's bytes begin and the item's CRC-32, where
#: these are. DCP's own reader does not look at it.
ATTRIBUTE = "nvme_ops"
_DATA = re.compile(r"(__\d+_)(\d+)\.distcp")
_OF_A_RANK = re.compile(r"__\d+\.metadata")
_CHECKSUM = re.compile(rb"\nnvme_ops\.crc32c=([0-9a-f]{8})\n\Z")
_CHECKSUM_BYTES = len("\nnvme_ops.crc32c=00000000\n")


def new_name(path: str, prefix: str) -> str:
    """Returns a name for a data file: ``prefix`` and a number not yet used, ``__0_0.distcp`` in an empty folder."""
    found = [match for name in os.listdir(path) if (match := _DATA.fullmatch(name)) and match[1] == prefix]
    return f"{prefix}{max((int(match[2]) for match in found), default=-1) + 1}.distcp"


def written(metadata: Any) -> bytes:
    """Returns what the file ``.metadata`` has."""
    content = pickle.dumps(metadata)
    return content + f"\nnvme_ops.crc32c={checksums_of([content], CHECKSUM)[0]:08x}\n".encode()


def read_metadata(path: str, fd: int, loads: Callable[[bytes], Any] = pickle.loads) -> Any:
    """Reads what ``written`` or DCP's own writer wrote to ``path``, which is open.

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


class Reading(ReadLease):
    """A checkpoint that is being read: until ``end`` a save removes none of its files."""

    def __init__(self, path: str) -> None:
        super().__init__(path)
        try:
            status = os.fstat(self.fileno())
            # Nobody writes to one in place. A save links it, which changes its ctime; other nodes have other device
            # numbers.
            self.identity = (status.st_ino, status.st_size, status.st_mtime_ns)
            self.metadata: Any = read_metadata(path, self.fileno())
        except BaseException:
            self.end()
            raise


_known: weakref.WeakValueDictionary[str, Saving] = weakref.WeakValueDictionary()


class Saving(Publication):
    """A save of the folder, until ``end``. DCP tells nobody of a failed one: its thread or the next save ends it."""

    def __init__(self, metadata: str, durable: bool) -> None:
        path = os.path.realpath(metadata)
        earlier = _known.get(path)
        if earlier is not None and earlier.is_over():
            earlier.end()
        self._thread = threading.current_thread()
        super().__init__(metadata, durable)
        _known[path] = self

    def is_over(self) -> bool:
        """Returns whether the save can only have failed: its thread has no step left to take."""
        return self._thread is threading.current_thread() or not self._thread.is_alive()

    def complete(self, metadata: Any, prefix: str) -> None:
        """Makes what ``metadata`` name the checkpoint; removes the data of older ones and of killed saves.

        With ``prefix`` only files of this rank. Ranks that save independently cannot know which files the others refer
        to.
        """
        self.publish(written(metadata), leases=True)
        kept = _named(metadata) | self.leased(lambda path, fd: _named(read_metadata(path, fd)))
        remove_litter(self.folder)  # never that of a running save
        names = os.listdir(self.folder)
        if not (METADATA in names if prefix else any(map(_OF_A_RANK.fullmatch, names))):
            self.sweep([name for name in names if _DATA.fullmatch(name) and name.startswith(prefix)], kept)


def _named(metadata: Any) -> set[str]:
    return {info.relative_path for info in metadata.storage_data.values()}
