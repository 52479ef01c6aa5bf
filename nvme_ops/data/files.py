"""``DataFiles``: the data files of a store, kept open while they are read, and checked against the index."""

from __future__ import annotations

import errno
import json
import os
import resource
import stat
import threading
import weakref
from collections import OrderedDict
from collections.abc import Sequence
from typing import TYPE_CHECKING

from nvme_ops._native import native
from nvme_ops.data.index import DataFile
from nvme_ops.errors import FormatError, naming
from nvme_ops.settings import PAGE
from nvme_ops.storage.publication import FileState

if TYPE_CHECKING:
    from nvme_ops.ops.async_io import OpenFile

_MOST, _LEAST = 1 << 14, 4  # files that are kept open
_AT_ONCE = 256  # of these are opened at the beginning
_SHARE = 20  # one file is kept open for so many descriptors of the process's limit; each may need up to four


def trailer(store: str, number: int) -> bytes:
    """Returns the last page of a data file of this package: it says which file of which store it is."""
    return json.dumps({"nvme_ops": "samples", "store": store, "file": number}).encode().ljust(PAGE)


class Opened:
    """A file that stays open while a read or the store refers to it; the store may drop it first."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self.file: OpenFile = native().OpenFile(fd)

    def __del__(self) -> None:
        if hasattr(self, "file"):
            self.file.close()
            os.close(self._fd)


class DataFiles:
    """Files that are opened when they are first read. Threads may share them; a forked child inherits them.

    Args:
        files: as listed in the index.
        paths: where each is.
        store: the identity that native files end with; None for files of other programs.

    Raises:
        FormatError: a file's size or modification time is not what the index says, or it has changed since.
        OSError: a file is missing or cannot be read.
    """

    def __init__(self, files: Sequence[DataFile], paths: Sequence[str], store: str | None) -> None:
        self._files, self._store = files, store
        self.paths = list(paths)
        self._seen: dict[int, FileState] = {}
        self._lock, self._process = threading.Lock(), os.getpid()
        self._open: OrderedDict[int, Opened] = OrderedDict()
        self._alive: weakref.WeakValueDictionary[int, Opened] = weakref.WeakValueDictionary()  # also those of reads
        #: The most files that are kept open, and that one read has open at a time.
        self.most = max(_LEAST, min(_MOST, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // _SHARE))
        for number, path in enumerate(paths):
            self._check(number, os.stat(path))
        for number in range(min(len(paths), self.most, _AT_ONCE)):
            self.open(number)

    def crowded(self) -> bool:
        """Returns whether reads under way have so many files open that others should wait."""
        return len(self._alive) > 2 * self.most

    def open(self, number: int) -> Opened:
        """Returns an open file: keep it while a transfer uses it. Raises what the constructor raises."""
        found = self._open.get(number) or self._alive.get(number)
        if found is not None:
            return found
        if self._process != os.getpid():  # another thread of the parent may have held the lock
            self._lock, self._process = threading.Lock(), os.getpid()
        with self._lock:
            while len(self._open) >= self.most:
                self._open.popitem(last=False)
            found = self._open[number] = self._alive[number] = self._opened(number)
            return found

    def check(self, number: int, opened: Opened) -> None:
        """Raises FormatError if an open file has changed since it was first seen."""
        self._check(number, os.fstat(opened._fd), opened._fd)

    def close(self) -> None:
        """Closes the files that no transfer uses, and the others when theirs have ended."""
        self._open.clear()

    def _opened(self, number: int) -> Opened:
        path = self.paths[number]
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            self._check(number, os.fstat(fd), fd)
            if self._store is not None:
                with naming("read of the end", path):
                    end = os.pread(fd, PAGE, self._files[number].nbytes - PAGE)
                if end != trailer(self._store, number):
                    raise FormatError(f"{path}: belongs to another store than its index, or is damaged at its end")
            return Opened(fd)
        except BaseException:
            os.close(fd)
            raise

    def _check(self, number: int, status: os.stat_result, fd: int = -1) -> None:
        file, path = self._files[number], self.paths[number]
        if not stat.S_ISREG(status.st_mode):
            raise OSError(errno.EINVAL, "is no file", path)
        if status.st_size != file.nbytes:
            raise FormatError(
                f"{path}: has {status.st_size} bytes, and {file.nbytes} by the index: it was cut off or replaced"
            )
        if file.stamp is not None and status.st_mtime_ns != file.stamp:
            raise FormatError(f"{path}: was changed after its index was made: make the index again")
        seen = self._seen.get(number)
        if seen is None:
            self._seen[number] = FileState(status, fd)
        elif not seen.holds(status, fd):
            raise FormatError(f"{path}: was replaced or changed while the store was open")
