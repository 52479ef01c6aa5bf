"""``FileState``: what shows that a file is the one that was seen before, and that nobody has written to it since."""

from __future__ import annotations

import contextlib
import os


class FileState:
    """Recognises a file by device, inode, size, and the times of its last modification and change.

    Whoever writes to a file can put its modification time back, as ``rsync --inplace -t`` does, but not the time of its
    change. That, however, also tells of what leaves the bytes as they are: a link more or less (a file that is open
    stays what it was when another takes its name), another owner or mode, another name. Where one of these explains
    a new time of change, the file is held to be the same. An explanation is asked for, not proven.

    Args:
        status: of the file as it is first seen.
        fd: an open descriptor of it, if there is one.
    """

    def __init__(self, status: os.stat_result, fd: int = -1) -> None:
        self._file, self._change = _file(status), status.st_ctime_ns
        self._attributes, self._name = _attributes(status), _name(fd)

    def holds(self, status: os.stat_result, fd: int = -1) -> bool:
        """Returns whether it is the same file with the same bytes."""
        if _file(status) != self._file:
            return False
        name = _name(fd) if status.st_ctime_ns != self._change or not self._name else self._name
        if status.st_ctime_ns != self._change:
            if _attributes(status) == self._attributes and (name == self._name or not name or not self._name):
                return False
            self._change, self._attributes = status.st_ctime_ns, _attributes(status)
        self._name = name
        return True


def _file(status: os.stat_result) -> tuple[int, ...]:
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


def _attributes(status: os.stat_result) -> tuple[int, ...]:
    return status.st_nlink, status.st_mode, status.st_uid, status.st_gid


def _name(fd: int) -> str:
    """Returns the name that an open file has now; empty where nothing tells."""
    with contextlib.suppress(OSError):
        return os.readlink(f"/proc/self/fd/{fd}") if fd >= 0 else ""
    return ""
