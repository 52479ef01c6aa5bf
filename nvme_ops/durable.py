"""Makes what was written durable. Ctrl-C ends the wait for it, which may be long where a device does not answer."""

from __future__ import annotations

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
