"""Makes what was written durable, and the names of files and folders.

Ctrl-C ends the wait for it, which may be long where a device does not answer.
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

    The kernel does not interrupt it: the main thread, which has the signals, leaves it to another one.

    Args:
        fd: of the file. It may be closed meanwhile.
        path: of the file, for errors; or ``fd`` again.
        call: which one of ``os``.
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
            # a daemon: whoever waits for it keeps the program from ending, and nobody else needs it
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
            with suppress(OSError):  # any write error was reported by that
                os.close(fd)
        if failure is None:
            self._ended.set_result(None)
        else:
            self._ended.set_exception(failure)

    def wait(self) -> None:
        """Waits for it. Raises OSError, which names the operation and the file."""
        with naming(self._name, self._path):
            self._ended.result()


def sync(fd: int, path: str | bytes | int | os.PathLike[str], call: Call = "fdatasync") -> None:
    """Makes an open file durable; otherwise like ``Syncing``."""
    Syncing(fd, path, call).wait()


def sync_folder(folder: str | bytes) -> None:
    """Makes the names in a folder durable. Raises OSError, which names the operation and the folder."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        sync(fd, folder, "fsync")
    finally:
        os.close(fd)


def make_folder(path: str, durable: bool = True, mode: int = 0o777) -> None:
    """Makes a folder and its parents, where they are missing; ``durable``: their names are on the device then."""
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
    """Returns the error for a folder that is missing, which names the first one of its path that is."""
    while not os.path.lexists(os.path.dirname(path)):
        path = os.path.dirname(path)
    return FileNotFoundError(errno.ENOENT, f"{words}; is a disk not mounted?", path)


def make_last_folder(path: str) -> None:
    """Makes a folder, durably, in one that exists, unless it is there.

    Raises:
        FileNotFoundError: the folder that it would be in is missing, and is named: a disk may not be mounted.
        NotADirectoryError: there is something else.
    """
    try:
        os.mkdir(path)
    except FileExistsError:
        if not os.path.isdir(path):
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), path) from None
    except OSError as error:
        if os.path.isdir(path):  # on a file system that cannot be written
            return
        above = os.path.dirname(os.path.abspath(path))
        if not isinstance(error, FileNotFoundError) or os.path.lexists(above):
            raise
        raise no_folder(above, "no such folder, and only the last one of a path is made") from None
    else:
        with suppress(PermissionError):  # a folder that may be written to and not read
            sync_folder(os.path.dirname(os.path.abspath(path)))


def sync_above(folder: str) -> None:
    """Makes the names of a folder, and of those that it is in, durable: on its device, as far as they can be opened."""
    folder = os.path.realpath(folder)
    device = os.stat(folder).st_dev
    while os.stat(above := os.path.dirname(folder)).st_dev == device and above != folder:
        with suppress(PermissionError):
            sync_folder(above)
        folder = above
