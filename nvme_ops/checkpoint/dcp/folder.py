"""The files in a checkpoint's folder: new ones beside those of the old checkpoint, until the new one is complete.

``.metadata`` is DCP's pickle, followed by a checksum, where pickle ignores it. A reader holds a shared lock on the one
that it has read. A save renames the one that it replaces, and removes it, with the files that only it names, once
nobody holds a lock on it. Saves to one folder take turns, across programs and threads.
"""

from __future__ import annotations

import fcntl
import os
import pickle
import re
import threading
import weakref
from collections.abc import Callable, Collection
from contextlib import suppress
from typing import Any

from nvme_ops.checksums import checksums_of
from nvme_ops.errors import ChecksumError, FormatError
from nvme_ops.memory.pieces import CHECKSUM
from nvme_ops.storage import publication, unlink
from nvme_ops.storage.locks import Lock
from nvme_ops.storage.publication import open_to_read, opened, replacing
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
_REPLACED = ".metadata.replaced-"


def new_name(path: str, prefix: str) -> str:
    """Returns a name for a data file: ``prefix`` and a number not yet used, ``__0_0.distcp`` in an empty folder."""
    found = [match for name in os.listdir(path) if (match := _DATA.fullmatch(name)) and match[1] == prefix]
    return f"{prefix}{max((int(match[2]) for match in found), default=-1) + 1}.distcp"


def remove_others(path: str, kept: Collection[str], prefix: str = "") -> None:
    """Removes the data of older checkpoints and of killed saves; with ``prefix`` only files of this rank.

    Not for ranks that save independently: this rank cannot know which files the others refer to.
    """
    publication.remove_litter(path)  # never that of a running save
    names = os.listdir(path)
    alone = not prefix and any(_OF_A_RANK.fullmatch(name) for name in names)
    together = prefix and METADATA in names
    for name in names:
        if _DATA.fullmatch(name) and name.startswith(prefix) and name not in kept and not alone and not together:
            with suppress(OSError):
                unlink.unlink(os.path.join(path, name))


def write_metadata(path: str, metadata: Any, durable: bool) -> None:
    """Replaces the file atomically."""
    content = pickle.dumps(metadata)
    content += f"\nnvme_ops.crc32c={checksums_of([content], CHECKSUM)[0]:08x}\n".encode()
    with replacing(path, durable) as file, open(file.fd, "wb", closefd=False) as stream:
        stream.write(content)


def read_metadata(path: str, fd: int, loads: Callable[[bytes], Any] = pickle.loads) -> Any:
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


class Reading:
    """A checkpoint that is being read, until ``end`` or until the object is freed."""

    def __init__(self, path: str) -> None:
        self._pid = os.getpid()
        while True:
            self._fd = open_to_read(path)
            try:
                with suppress(OSError):  # without locks readers are not protected
                    fcntl.flock(self._fd, fcntl.LOCK_SH)
                status = os.fstat(self._fd)
                if os.path.samestat(status, os.stat(path)):
                    # Nobody writes to one in place. ``keep`` links it, which changes its ctime; other nodes have
                    # other device numbers.
                    self.identity = (status.st_ino, status.st_size, status.st_mtime_ns)
                    self.metadata: Any = read_metadata(path, self._fd)
                    return
            except BaseException:
                self.end()
                raise
            self.end()  # it was replaced before it was locked

    def end(self) -> None:
        """Releases the lock. Further calls do nothing."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            with suppress(OSError):
                if self._pid == os.getpid():
                    fcntl.flock(fd, fcntl.LOCK_UN)  # children of a fork have it open too
            os.close(fd)

    def __del__(self) -> None:
        if getattr(self, "_fd", -1) >= 0:
            self.end()


def keep(path: str) -> None:
    """Gives the metadata at ``path``, if any, a second name before they are replaced."""
    with suppress(OSError):  # there are none, or the file system has no hard links
        os.link(path, f"{path}.replaced-{os.urandom(8).hex()}")


def being_read(folder: str) -> set[str]:
    """Returns the files that readers of replaced metadata may need. Removes the second names that nobody reads."""
    found: set[str] = set()
    for name in os.listdir(folder):
        if _REPLACED not in name:
            continue
        path = os.path.join(folder, name)
        with suppress(OSError, FormatError), opened(path) as fd:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                metadata = read_metadata(path, fd)
                found |= {info.relative_path for info in metadata.storage_data.values()}
            except OSError:  # no locks here: readers have none either
                os.unlink(path)
            else:
                os.unlink(path)
    return found


_known: weakref.WeakValueDictionary[str, Saving] = weakref.WeakValueDictionary()


class Saving:
    """Holds the folder until ``end``. DCP tells nobody of a failed save: then its thread or the next one ends it."""

    def __init__(self, metadata: str) -> None:
        path = os.path.realpath(metadata)
        earlier = _known.get(path)
        if earlier is not None and earlier.is_over():
            earlier.end()
        self._thread = threading.current_thread()
        self._lock = Lock(path)
        _known[path] = self

    def is_over(self) -> bool:
        """Returns whether the save can only have failed: its thread has no step left to take."""
        return self._thread is threading.current_thread() or not self._thread.is_alive()

    def end(self) -> None:
        """Releases the folder. Further calls do nothing."""
        self._lock.release()
