"""Makes written data, and the names of files and folders, durable.

Ctrl-C ends the wait, which may be long if a device does not respond.
"""

from __future__ import annotations

import errno
import os
import threading
from concurrent.futures import Future
from contextlib import suppress
from typing import Literal

from nvme_ops.errors import naming

Call = Literal["fsync", "fdatasync"]


class Syncing:
    """An ``fsync`` that goes on when the wait for it is interrupted.

    The call itself cannot be interrupted, so the main thread, which handles signals, leaves it to another thread.

    Args:
        fd: descriptor of the file. It may be closed meanwhile.
        path: name of the file for errors; or ``fd`` again.
        call: name of the function in ``os``.
    """

    def __init__(self, fd: int, path: str | bytes | int | os.PathLike[str], call: Call = "fsync") -> None:
        self._name, self._path = call, path
        self._ended: Future[None] = Future()
        own = -1
        if threading.current_thread() is threading.main_thread():
            with suppress(OSError):  # no more descriptors
                own = os.dup(fd)
        if own < 0:
            self._work(fd, own=False)
            return
        try:
            # a daemon: a caller that waits keeps the program running, and nobody else needs the result
            threading.Thread(target=self._work, args=[own], name=f"nvme_ops {call}", daemon=True).start()
        except RuntimeError:  # no more threads
            self._work(own)

    def _work(self, fd: int, own: bool = True) -> None:
        failure: BaseException | None = None
        try:
            getattr(os, self._name)(fd)
        except BaseException as error:
            failure = error
        if own:
            with suppress(OSError):  # the sync has reported any write error
                os.close(fd)
        if failure is None:
            self._ended.set_result(None)
        else:
            self._ended.set_exception(failure)

    def wait(self) -> None:
        """Waits until the call has returned. Raises OSError that names the operation and the file."""
        with naming(self._name, self._path):
            self._ended.result()


def sync(fd: int, path: str | bytes | int | os.PathLike[str], call: Call = "fdatasync") -> None:
    """Makes an open file durable and waits for that; takes the arguments of ``Syncing``."""
    Syncing(fd, path, call).wait()


def sync_folder(folder: str | bytes) -> None:
    """Makes the names in a folder durable. Raises OSError that names the operation and the folder."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        sync(fd, folder, "fsync")
    finally:
        os.close(fd)


def make_folder(path: str, durable: bool = True, mode: int = 0o777) -> None:
    """Makes a folder and its parents where they are missing; with ``durable`` their names are on the device then."""
    missing, above = [], os.path.abspath(path)
    while not os.path.lexists(above):
        missing.append(above)
        above = os.path.dirname(above)
    for made in reversed(missing):
        with suppress(FileExistsError):
            os.mkdir(made, mode)
    os.makedirs(path, exist_ok=True)  # raises what else can be wrong
    if durable:
        for made in missing:
            sync_folder(os.path.dirname(made))


def no_folder(path: str, words: str = "no such folder") -> FileNotFoundError:
    """Returns the error for a missing folder; it names the topmost one of the path that is missing."""
    while not os.path.lexists(os.path.dirname(path)):
        path = os.path.dirname(path)
    return FileNotFoundError(errno.ENOENT, f"{words}; is a disk not mounted?", path)


def make_last_folder(path: str) -> None:
    """Makes a folder durably, unless it exists. Its parent must exist: where it is missing, a disk may not be mounted.

    Raises:
        FileNotFoundError: the parent is missing; the error names the topmost folder that is.
        NotADirectoryError: the path exists and is not a folder.
    """
    try:
        os.mkdir(path)
    except FileExistsError:
        if not os.path.isdir(path):
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), path) from None
    except OSError as error:
        if os.path.isdir(path):  # on a read-only file system
            return
        above = os.path.dirname(os.path.abspath(path))
        if not isinstance(error, FileNotFoundError) or os.path.lexists(above):
            raise
        raise no_folder(above, "no such folder, and only the last one of a path is made") from None
    else:
        with suppress(PermissionError):  # a folder that may be written to and not read
            sync_folder(os.path.dirname(os.path.abspath(path)))


def sync_above(folder: str) -> None:
    """Makes the names of a folder and its parents durable, up to the device's root and where they can be opened."""
    folder = os.path.realpath(folder)
    device = os.stat(folder).st_dev
    while os.stat(above := os.path.dirname(folder)).st_dev == device and above != folder:
        with suppress(PermissionError):
            sync_folder(above)
        folder = above
