"""Unlinks large files without waiting: a thread frees their blocks.

On a file system that discards freed blocks (ext4's ``discard``), freeing a file takes as long as writing one.
"""

from __future__ import annotations

import os
import stat
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

_LEAST = 16 << 20  # bytes; smaller files are freed at once

_changed = threading.Condition()
_under_way: dict[threading.Thread, int] = {}  # thread -> bytes of its file


@contextmanager
def later(path: str) -> Iterator[None]:
    """Lets a ``with`` statement unlink or replace the file; its blocks are freed in the background afterwards."""
    fd, size = -1, 0
    with suppress(OSError):
        status = os.lstat(path)
        if stat.S_ISREG(status.st_mode) and status.st_nlink == 1 and status.st_size >= _LEAST:
            fd, size = os.open(path, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC), status.st_size
    try:
        yield
    finally:
        if fd >= 0:
            _close_by_thread(fd, size)


def unlink(path: str) -> None:
    """Removes a file like ``os.unlink``; its blocks are freed in the background."""
    with later(path):
        os.unlink(path)


def require_room(folder: str) -> None:
    """Waits for blocks that are being freed if space is short, since the next file is likely to be as large."""
    space = os.statvfs(folder)
    if space.f_bavail * space.f_frsize < 2 * sum(_under_way.copy().values()):
        wait()


def wait() -> None:
    """Waits until the blocks of all files unlinked so far are free.

    ``Thread.join`` would not do: before Python 3.13 it takes a thread for ended once Ctrl-C has interrupted the join.
    """
    with _changed:
        mine = list(_under_way)
        while any(thread in _under_way for thread in mine):
            _changed.wait()


def _close_by_thread(fd: int, size: int) -> None:
    owned = [fd]  # whoever pops it closes it
    thread = threading.Thread(target=lambda: _close(owned, thread), name="nvme_ops.storage.unlink", daemon=False)
    try:
        with _changed:
            _under_way[thread] = size
        if sys.is_finalizing():  # a new thread would never begin, and ``start`` would wait for it forever
            raise RuntimeError
        thread.start()
    except BaseException as error:
        _close(owned, thread)
        if not isinstance(error, RuntimeError):  # no more threads
            raise


def _close(owned: list[int], thread: threading.Thread) -> None:
    with suppress(IndexError):
        os.close(owned.pop())
    with _changed:
        _under_way.pop(thread, None)
        _changed.notify_all()


def _reset_in_child() -> None:
    global _changed
    _changed = threading.Condition()
    _under_way.clear()


# A forked child would keep the files open, and so their blocks, for as long as it lives.
os.register_at_fork(before=wait, after_in_child=_reset_in_child)
