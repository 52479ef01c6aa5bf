"""Locks between processes, held on files beside what they protect.

The kernel releases a lock (``flock``) when its process ends, however that happens. Where the file system has no locks,
only one process at a time may save a checkpoint of several files. A temporary file is locked by its writer, and
``abandoned`` once the writer is gone.
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from io import FileIO
from pathlib import Path

SUFFIX = ".nvme_ops-lock"
_PATIENCE = 10.0  # seconds of waiting before a warning says for what
_WITHOUT_LOCKS = {errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL}


@contextmanager
def locked(path: str) -> Iterator[None]:
    """Lets one thread of one process at a time into the block for the ``path`` of a checkpoint."""
    lock = Lock(path)
    try:
        yield
    finally:
        try:
            lock.release()
        finally:
            lock.release()  # again: an exception from a signal handler may have ended the first call


class Lock:
    """A lock for a path, held from construction on. Its file exists while it is held, and after its holder was killed.

    Raises OSError if the file can neither be created nor opened.
    """

    _file: FileIO | None = None

    def __init__(self, path: str) -> None:
        folder, name = os.path.split(os.path.abspath(path))
        self.path = os.path.join(folder, f".{os.fsdecode(os.fsencode(name)[:200])}{SUFFIX}")
        self._pid = os.getpid()
        self._file = hold(self.path, _open, lambda fd: _wait_for(fd, self.path))

    def release(self) -> None:
        """Releases the lock. Further calls do nothing. In a forked child only closes its file: the parent holds it."""
        file = self._file
        if file is None or file.closed:
            return
        if self._pid == os.getpid():
            with suppress(OSError):
                if is_at(self.path, file.fileno()):  # an interrupted earlier call may have removed it
                    os.unlink(self.path)
            with suppress(OSError):  # a file system without locks
                fcntl.flock(file, fcntl.LOCK_UN)  # closing is not enough: a forked child has it open, too
        file.close()

    def __del__(self) -> None:
        self.release()


def hold(path: str, opening: Callable[[str], FileIO], lock: Callable[[int], object]) -> FileIO:
    """Opens and locks a file, repeatedly until the locked file is the one at ``path``.

    A previous holder may have removed it, or put another one in its place.

    Args:
        path: the file.
        opening: opens it, as an object that is closed with its last reference.
        lock: tries to lock the descriptor; returns whether it has, or raises.
    """
    while True:
        file = opening(path)
        try:
            if lock(file.fileno()) and is_at(path, file.fileno(), follow=True):
                return file
        except BaseException:
            file.close()
            raise
        file.close()


def _open(path: str) -> FileIO:
    flags = os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
    try:
        file = FileIO(os.open(path, os.O_RDWR | os.O_CREAT | flags, 0o666))
    except PermissionError:
        if not os.path.lexists(path):
            raise
        file = FileIO(os.open(path, os.O_RDONLY | flags))  # another user's lock
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise OSError(errno.EINVAL, "is not a regular file: it should be the lock of a save", path)
    return file


def _wait_for(fd: int, path: str) -> bool:
    """Waits for the lock; returns True, at once if the file system has no locks."""
    try:
        deadline, pause = time.monotonic() + _PATIENCE, 0.001
        while True:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return True
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    break
            time.sleep(pause)
            pause = min(2 * pause, 0.02)
        warnings.warn(f"waiting for another process that saves here and holds {path}", RuntimeWarning, stacklevel=8)
        fcntl.flock(fd, fcntl.LOCK_EX)
    except OSError as error:
        if error.errno not in _WITHOUT_LOCKS:
            raise
    return True


def is_at(path: str, fd: int, follow: bool = False) -> bool:
    """Returns whether the open file is still the one at ``path``; ``follow``: or what a link there points to."""
    try:
        present = os.stat(path, follow_symlinks=follow)
    except FileNotFoundError:
        return False
    return os.path.samestat(present, os.fstat(fd))


def take(fd: int, kind: int = fcntl.LOCK_EX, patient: bool = False) -> bool:
    """Tries to lock an open file; returns False if somebody else has it locked, True if there are no locks here.

    ``patient``: tries for 0.1 s, since others may lock it for a moment to look at it.
    """
    for _ in range(100 if patient else 1):
        try:
            fcntl.flock(fd, kind | fcntl.LOCK_NB)
        except BlockingIOError:
            time.sleep(0.001 if patient else 0)
            continue
        except OSError:
            pass
        return True
    return False


def release(fd: int) -> None:
    """Unlocks and closes a file. Closing alone is not enough: a child forked meanwhile has it open, too."""
    with suppress(OSError):  # a file system without locks
        fcntl.flock(fd, fcntl.LOCK_UN)
    os.close(fd)


def files(folder: str) -> list[str]:
    """Returns the lock files in a folder, held or not."""
    return [os.path.join(folder, name) for name in os.listdir(folder) if name.endswith(SUFFIX)]


def is_abandoned(path: str) -> bool:
    """Returns whether the writer of a temporary file is gone."""
    try:
        with abandoned(path):
            return True
    except OSError:
        return False


@contextmanager
def abandoned(path: str) -> Iterator[None]:
    """Holds the lock of a temporary file; raises BlockingIOError while its writer lives."""
    fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if not os.fstat(fd).st_nlink:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
        yield
    finally:
        release(fd)


def boot_id() -> str:
    """Returns an id that changes with each start of the machine and is the same in all containers; "" if unknown."""
    with suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return ""


def machine_id() -> str:
    """Returns the id of the machine, or its host name if it has none."""
    with suppress(OSError):
        return Path("/etc/machine-id").read_text().strip()
    return os.uname().nodename
