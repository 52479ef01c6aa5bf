"""Locks that keep a checkpoint's files while it is read: a save that replaces it removes them only afterwards.

A reader holds a shared lock on the ``.metadata`` that it has read. A save renames the one that it replaces, and removes
it, with the files that only it names, once nobody holds a lock on it.
"""

from __future__ import annotations

import fcntl
import os
from contextlib import suppress
from typing import Any

from nvme_ops.dcp import metadata_file
from nvme_ops.errors import FormatError
from nvme_ops.storage.atomic import open_to_read, opened

_REPLACED = ".metadata.replaced-"


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
                    self.metadata: Any = metadata_file.read(path, self._fd)
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
                metadata = metadata_file.read(path, fd)
                found |= {info.relative_path for info in metadata.storage_data.values()}
            except OSError:  # no locks here: readers have none either
                os.unlink(path)
            else:
                os.unlink(path)
    return found
