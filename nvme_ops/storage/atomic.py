"""Replaces a file at once: whoever looks finds the old file or the new one, whole, whatever happens in between."""

from __future__ import annotations

import errno
import fcntl
import os
import re
import shutil
import stat
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from nvme_ops.storage import unlink

_MARK = ".nvme_ops-tmp"
_SPARE = ".nvme_ops-spare"
_TEMPORARY = re.compile(r"\..*\.\d+-\d+" + re.escape(_MARK), re.DOTALL)


@dataclass(frozen=True)
class Replacement:
    """The file that becomes ``target`` when the block ends well."""

    target: str
    path: str
    fd: int


@contextmanager
def replacing(target: str | os.PathLike[str], durable: bool = True, recycle: bool = False) -> Iterator[Replacement]:
    """A new file beside ``target`` to write to, renamed over it at the end of the block.

    ``durable``: its data and its name are on the device before the block is left (``fdatasync``, rename, ``fsync`` of
    the folder). When the block raises, the new file is removed and ``target`` is as it was. What a process that was
    killed left behind is removed by the next replacement in that folder. A symbolic link stays one: what it points
    to is replaced. The mode of an existing target is kept. The space of a large one is free soon after the block. A
    device or a pipe is not replaced: it gets all the bytes at the end of the block.

    ``recycle``: the file that was replaced is kept, under a hidden name, and the next such replacement is written over
    it, which needs no new blocks. The block has to write every byte and to cut the file to its length.

    Raises:
        IsADirectoryError: ``target`` is a folder.
        OSError: the folder cannot be written, is full, or an I/O error; ``filename`` names the target.
    """
    path = os.path.realpath(os.fspath(target))
    folder, name = os.path.split(path)
    if os.path.isdir(path):
        raise IsADirectoryError(errno.EISDIR, "cannot be replaced by a file: it is a folder", os.fspath(target))
    if _is_special(path):
        with tempfile.TemporaryFile() as file:
            yield Replacement(path, path, file.fileno())
            file.seek(0)
            with open(path, "wb", buffering=0) as special:
                shutil.copyfileobj(file, special)
        return
    fd, folder_fd, temporary = -1, -1, ""
    try:
        try:
            if durable:  # while nothing is replaced yet: this may be refused
                folder_fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            remove_litter(folder)
            unlink.require_room(folder)
            mode = _mode(path)
            spare = os.path.join(folder, f".{_short(name)}{_SPARE}")
            fd, temporary = _create(folder, name, 0o666 if mode is None else mode, spare if recycle else None)
            if mode is not None:
                os.fchmod(fd, mode)  # what the umask took away
            yield Replacement(path, temporary, fd)
            if durable:
                os.fdatasync(fd)
            kept = recycle and _keep(path, spare)
            with unlink.later(path):
                os.rename(temporary, path)
            temporary = ""
            with suppress(OSError):
                fcntl.flock(fd, fcntl.LOCK_UN)  # for who reads it already
            if not kept:
                _remove_spare(spare)
            if durable:
                os.fsync(folder_fd)
        finally:
            if temporary:
                with suppress(OSError):
                    os.unlink(temporary)
            for each in (fd, folder_fd):
                with suppress(OSError):  # what this could tell, fdatasync has told
                    os.close(each)
    except OSError as error:
        if _is_ours(error, path, folder):
            error.filename = os.fspath(target)
            if error.filename2 is not None:  # rename has two
                del error.filename2
        raise


def _is_ours(error: OSError, path: str, folder: str) -> bool:
    """Whether it is about the target, under whatever name, and not about something the caller read meanwhile."""
    name = error.filename
    if name is None or name in (path, folder):
        return True
    return isinstance(name, str) and (name.endswith(_MARK) or name.startswith("file descriptor "))


@contextmanager
def opened(path: str) -> Iterator[int]:
    """A descriptor to read from, of a file that is not written over meanwhile (``recycle``)."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        _lock_shared(fd)
        yield fd
    finally:
        os.close(fd)


def _lock_shared(fd: int) -> None:
    """Locks it, unless somebody else has: a save does so for the moment after the file got its name."""
    for _ in range(100):
        try:
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            time.sleep(0.001)
            continue
        except OSError:  # a file system without locks
            pass
        return


def sync_folder(folder: str) -> None:
    """Makes the names in it durable."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _is_special(path: str) -> bool:
    """Neither a file nor a folder, nor nothing."""
    with suppress(FileNotFoundError):
        mode = os.stat(path).st_mode
        return not stat.S_ISREG(mode) and not stat.S_ISDIR(mode)
    return False


def _mode(path: str) -> int | None:
    """None: there is no such file."""
    try:
        return stat.S_IMODE(os.stat(path).st_mode)
    except FileNotFoundError:
        return None


def _create(folder: str, name: str, mode: int, spare: str | None = None) -> tuple[int, str]:
    """Never open to more users than ``mode`` says. The ``spare``, where there is one to be used.

    The lock says that its writer lives; the kernel lets go of it when the process dies.
    """
    while True:
        # a number that does not come again: whoever clears litter may still look at the file that had it before
        number = int.from_bytes(os.urandom(4), "little")
        path = os.path.join(folder, f".{_short(name)}.{os.getpid()}-{number}{_MARK}")
        if spare is not None and (fd := _take(spare, path, mode)) >= 0:
            return fd, path
        try:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
        except FileExistsError:
            continue
        try:
            if _lock(fd):
                return fd, path
        except BaseException:
            os.unlink(path)
            os.close(fd)
            raise
        os.close(fd)


def _take(spare: str, path: str, mode: int) -> int:
    """A descriptor of the spare file, which is called ``path`` from then on; -1 where it is not ours alone to use."""
    try:
        fd = os.open(spare, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return -1
    try:
        status = os.fstat(fd)
        # who may read it has perhaps opened it already
        private = not stat.S_IMODE(status.st_mode) & ~mode & 0o077
        if _is_spare(status) and private and _lock(fd) and os.path.samestat(os.fstat(fd), os.lstat(spare)):
            os.fchmod(fd, mode)
            os.rename(spare, path)
            return fd
    except OSError:
        pass
    os.close(fd)
    return -1


def _is_spare(status: os.stat_result) -> bool:
    """A file of this user's that has no other name."""
    return stat.S_ISREG(status.st_mode) and status.st_nlink == 1 and status.st_uid == os.geteuid()


def _keep(path: str, spare: str) -> bool:
    """Gives the file that is about to be replaced a second name."""
    with suppress(OSError):  # there is none, or the file system has no links
        if _is_spare(os.lstat(path)):
            _remove_spare(spare)
            os.link(path, spare, follow_symlinks=False)
            return True
    return False


def _remove_spare(spare: str) -> None:
    with suppress(OSError):
        unlink.unlink(spare)


def spares(folder: str) -> list[str]:
    """The files in a folder that are kept to be written over."""
    with suppress(OSError), os.scandir(folder) as entries:
        return [entry.path for entry in entries if entry.name.startswith(".") and entry.name.endswith(_SPARE)]
    return []


def _lock(fd: int) -> bool:
    """False where somebody took the file for litter before it was locked, and removes it."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # a file system without locks
        return True
    return os.fstat(fd).st_nlink > 0


def _short(name: str) -> str:
    """As much of it as leaves room for the rest in NAME_MAX."""
    return os.fsdecode(os.fsencode(name)[: 255 - len(_MARK) - 24])


def remove_litter(folder: str) -> None:
    """Files of writers that are gone, whatever their target was."""
    for path in litter(folder):
        with suppress(OSError), _abandoned(path):
            os.unlink(path)


def litter(folder: str) -> list[str]:
    """Temporary files in a folder, those of writers that live among them."""
    with suppress(OSError), os.scandir(folder) as entries:
        return [entry.path for entry in entries if _TEMPORARY.fullmatch(entry.name)]
    return []


def is_abandoned(path: str) -> bool:
    """Whether the writer of a temporary file is gone."""
    try:
        with _abandoned(path):
            return True
    except OSError:
        return False


@contextmanager
def _abandoned(path: str) -> Iterator[None]:
    """Raises BlockingIOError while its writer lives."""
    fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(fd)
