"""Publishes files: at any moment, and after a power failure, readers find all of the old or all of the new.

``replacing`` does so for one file. A ``Publication`` consists of several files and a manifest that names them. The
order is always the same: the files, each flushed; the manifest that names them, flushed; the folder that names the
manifest. Files that the manifest does not name, because their writer was killed or a newer manifest was published, are
removed by the next writer, unless a reader has a ``ReadLease`` on an older manifest that names them.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import shutil
import stat
import tempfile
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from io import FileIO

from nvme_ops.base.errors import FormatError, naming
from nvme_ops.base.lifetime import in_this_process
from nvme_ops.filesystem.files import (
    HeldFile,
    Lock,
    abandoned,
    freed_later,
    is_at,
    no_folder,
    read_whole,
    require_room,
    set_mode,
    sync,
    sync_names,
    try_lock,
    unlink,
    write_whole,
)

_MARK = ".nvme_ops-tmp"
_SPARE = ".nvme_ops-spare"
_TRIES = 100  # to open a file that is being replaced
_REPLACED = ".replaced-"  # after the name of a manifest, before a number
_TEMPORARY = re.compile(r"\..*\.\d+-\d+" + re.escape(_MARK), re.DOTALL)
_HIDDEN = re.compile(rf"{_TEMPORARY.pattern}|\..*{re.escape(_SPARE)}", re.DOTALL)


@dataclass(frozen=True)
class Replacement:
    """The file that replaces ``target`` when the block ends without an exception."""

    target: str
    path: str
    fd: int


@contextmanager
def replacing(
    target: str | os.PathLike[str], durable: bool = True, recycle: bool = False, follow: bool = True
) -> Iterator[Replacement]:
    """Yields a new file beside ``target``, which is renamed over it at the end of the block.

    ``durable``: its data and its name are on the device before the block is left (``fdatasync``, rename, ``fsync`` of
    the folder). If the block raises, the new file is removed and ``target`` is unchanged. Files left by a killed
    process are removed by the next replacement in that folder. Symbolic links are followed: the file they point to is
    replaced; without ``follow``, the link itself. An existing target's mode is kept; the blocks of a large one are
    freed in the background. A device or a pipe is not replaced: all bytes are copied to it at the end of the block. A
    child that is forked in the block replaces and removes nothing.

    ``recycle``: the replaced file is kept under a hidden name, and the next such replacement is written over it, which
    allocates no new blocks. The block must then write every byte and truncate the file to its length.

    Raises:
        IsADirectoryError: ``target`` is a folder.
        OSError: the folder cannot be written, the disk is full, or an I/O error; ``filename`` names the target.
        RuntimeError: a forked child reached the end of the block.
    """
    path, is_ours = os.path.realpath(os.fspath(target)), in_this_process()
    if not follow:
        given = os.path.abspath(os.fspath(target))
        path = os.path.join(os.path.realpath(os.path.dirname(given)), os.path.basename(given))
    folder, name = os.path.split(path)
    if os.path.isdir(path):
        raise IsADirectoryError(errno.EISDIR, "cannot be replaced by a file: it is a folder", os.fspath(target))
    if os.path.exists(path) and not os.path.isfile(path):  # a device or a pipe
        with tempfile.TemporaryFile() as file:
            yield Replacement(path, path, file.fileno())
            file.seek(0)
            with open(path, "wb", buffering=0) as special:
                shutil.copyfileobj(file, special)
        return
    fd, folder_fd, temporary = -1, -1, ""
    try:
        try:
            if durable:  # opened before anything is replaced, as this may fail
                folder_fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            remove_litter(folder)
            require_room(folder)
            mode: int | None = None
            with suppress(FileNotFoundError):
                mode = stat.S_IMODE(os.stat(path).st_mode)
            spare = os.path.join(folder, f".{_short(name)}{_SPARE}")
            if recycle and durable and os.path.lexists(spare):
                sync_names(folder_fd, path)  # its writer may have been killed before this: then it is still needed
            fd, temporary = _create(folder, name, 0o666 if mode is None else mode, spare if recycle else None)
            if mode is not None:
                set_mode(fd, mode)  # undoes the umask
            yield Replacement(path, temporary, fd)
            if not is_ours():
                raise RuntimeError(f"{path}: only the parent process, which began to write the file, can replace it")
            if durable:
                sync(fd, path)
            kept = recycle and _keep(path, spare)
            with freed_later(path):
                try:
                    os.rename(temporary, path)
                except OSError as error:
                    error.strerror = f"rename: {error.strerror}"
                    raise
            temporary = ""
            with suppress(OSError):
                fcntl.flock(fd, fcntl.LOCK_UN)  # readers may already wait for it
            if not kept:
                _remove_spare(spare)
            if durable:
                try:
                    sync_names(folder_fd, path)
                except BaseException:
                    _remove_spare(spare)  # after a power failure, the name may still mean this file
                    raise
        finally:
            if temporary and is_ours():
                with suppress(OSError):
                    os.unlink(temporary)
            for descriptor in (fd, folder_fd):
                with suppress(OSError):  # any write error was reported by fdatasync
                    os.close(descriptor)
    except OSError as error:
        if error.filename is None and error.errno is not None:
            error.strerror = f"write: {error.strerror}"
        if _is_ours(error, path, folder):
            if error.errno == errno.ENOENT and not os.path.lexists(folder):
                raise no_folder(folder) from None
            error.filename = os.fspath(target)
            if error.filename2 is not None:  # rename has two
                del error.filename2
        raise


def publish(path: str, content: bytes, durable: bool = True, mode: int | None = None) -> None:
    """Replaces a file by one with this content and, if given, this ``mode``.

    Raises as ``replacing``, and OSError if a pipe or a device is there: nobody may be at a pipe's other end.
    """
    if os.path.exists(path) and not os.path.isfile(path):
        raise OSError(errno.EINVAL, "is not a regular file", path)
    with replacing(path, durable) as file:
        if mode is not None:
            set_mode(file.fd, mode)
        write_whole(file.fd, content)


class Publication(Lock):
    """Publishes several files together, through a manifest that names them.

    Publications of one manifest take turns, in all processes and threads, from construction to ``close``.
    Write new files beside those that the present manifest names, then ``publish`` a new one, then ``sweep``.

    Args:
        manifest: its path. A symbolic link stays one: the file it points to is replaced.
        durable: each step is on the device before the next one begins.
    """

    def __init__(self, manifest: str, durable: bool = True) -> None:
        self.manifest, self.durable = os.path.abspath(manifest), durable
        self.folder = os.path.dirname(self.manifest)
        super().__init__(os.path.realpath(manifest))

    def publish(self, content: bytes, leases: bool = False) -> None:
        """Replaces the manifest; with ``leases``, keeps the old one under another name, for ``leased``."""
        old = f"{self.manifest}{_REPLACED}{os.urandom(8).hex()}"
        if leases:
            with suppress(OSError):  # there is no old one, or the file system has no hard links
                os.link(self.manifest, old)
        try:
            publish(self.manifest, content, self.durable)
        except BaseException:
            with suppress(OSError):  # what was not replaced needs no second name
                if os.path.samefile(self.manifest, old):
                    os.unlink(old)
            raise

    def leased(self, names_in: Callable[[str, int], Iterable[str]]) -> set[str]:
        """Returns the files that readers of replaced manifests may need. Removes replaced manifests that nobody reads.

        ``names_in`` returns the files that a manifest names, given its path and a descriptor.
        """
        names: set[str] = set()
        prefix = f"{os.path.basename(self.manifest)}{_REPLACED}"
        for name in os.listdir(self.folder):
            if name.startswith(prefix):
                path = os.path.join(self.folder, name)
                with suppress(OSError, FormatError), opened(path) as fd:
                    if try_lock(fd):  # nobody reads it, or the file system has no locks
                        os.unlink(path)
                    else:
                        names.update(names_in(path, fd))
        return names

    def sweep(self, names: Iterable[str], kept: Collection[str]) -> None:
        """Removes those of the files ``names`` in the manifest's folder that are not in ``kept``; ignores errors."""
        for name in names:
            if name not in kept:
                with suppress(OSError):
                    unlink(os.path.join(self.folder, name))


class ReadLease(HeldFile):
    """A manifest that is being read, until ``close`` or until this object is freed; the files it names are kept."""

    def __init__(self, path: str) -> None:
        super().__init__(path, lambda name: FileIO(name, opener=lambda name, _: open_to_read(name)), _share)


def _share(fd: int) -> bool:
    with suppress(OSError):  # without locks readers are not protected
        fcntl.flock(fd, fcntl.LOCK_SH)
    return True


def _is_ours(error: OSError, path: str, folder: str) -> bool:
    """Returns whether ``error`` is about the target, not about another file that the caller used in the block."""
    name = error.filename
    if name is None or name in (path, folder):
        return True
    return isinstance(name, str) and (name.endswith(_MARK) or name.startswith("file descriptor "))


def open_to_read(path: str) -> int:
    """Opens a file; returns the descriptor.

    Raises OSError, also for a pipe, a socket or a terminal, where a reader would wait for the other end.
    """
    flags = os.O_RDONLY | os.O_CLOEXEC
    try:
        fd = os.open(path, flags | os.O_NONBLOCK)
    except BlockingIOError:  # somebody has a lease on this file: it is no pipe
        fd = os.open(path, flags)
    mode = os.fstat(fd).st_mode
    if stat.S_ISREG(mode) or stat.S_ISDIR(mode) or stat.S_ISBLK(mode):
        return fd
    os.close(fd)
    raise OSError(errno.EINVAL, "is not a regular file", path)


def open_leased(path: str) -> int:
    """Opens a file as ``open_to_read``; while the descriptor is open, ``recycle`` does not write over the file.

    A file that is no longer the one at ``path`` once it is locked may be half written over, so it is opened anew.
    """
    for _ in range(_TRIES):
        with contextlib.ExitStack() as undo:
            fd = open_to_read(path)
            undo.callback(os.close, fd)
            try_lock(fd, fcntl.LOCK_SH, patient=True)  # a save releases it only a moment after the file got its name
            if is_at(path, fd, follow=True):
                undo.pop_all()
                return fd
    return open_to_read(path)  # on a mount where no file is recognised


@contextmanager
def opened(path: str) -> Iterator[int]:
    """Opens a file for reading, as ``open_leased``, for the block.

    An OSError from the block that names no file is given the name of this one.
    """
    with OpenFiles() as files, files.opened(path) as fd:
        yield fd


class OpenFiles(contextlib.ExitStack):
    """Files that are opened once, as ``open_leased``, and stay open until ``close``: whoever saves changes none.

    Those opened after ``close`` are what is there then.
    """

    def __init__(self) -> None:
        super().__init__()
        self._fds: dict[str, int] = {}

    @contextmanager
    def opened(self, path: str) -> Iterator[int]:
        """Yields the descriptor of a file, which stays open. Names the file in errors as ``opened`` does."""
        if path not in self._fds:
            self.callback(self._close, path)  # first: Ctrl-C may come between
            self._fds[path] = open_leased(path)
        with naming("read", path):
            yield self._fds[path]

    def _close(self, path: str) -> None:
        fd = self._fds.pop(path, -1)
        if fd >= 0:
            os.close(fd)


def content_of(path: str, most: int) -> bytes:
    """Returns the content of a small file.

    Raises FormatError if it is larger than ``most`` bytes, as a sparse file easily is; else as ``open_to_read``.
    """
    fd = open_to_read(path)
    try:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            raise OSError(errno.EINVAL, "is not a regular file", path)
        if status.st_size > most:
            raise FormatError(f"{path}: has {status.st_size} bytes; such a file has at most {most} bytes")
        return read_whole(fd, path)
    finally:
        os.close(fd)


def _create(folder: str, name: str, mode: int, spare: str | None = None) -> tuple[int, str]:
    """Creates and locks a temporary file, never with more permissions than ``mode``; reuses ``spare`` if possible.

    The lock shows that the writer is alive; the kernel releases it when the process dies.
    """
    while True:
        # a new number each time: another process may be about to unlink an abandoned file by its name
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
    """Renames the spare file to ``path`` and returns its descriptor; -1 if others may have it open."""
    with suppress(OSError), contextlib.ExitStack() as undo:
        fd = os.open(spare, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        undo.callback(os.close, fd)
        status = os.fstat(fd)
        # another user who may read it may have it open
        private = not stat.S_IMODE(status.st_mode) & ~mode & 0o077
        if is_single(status) and private and _lock(fd) and is_at(spare, fd):
            set_mode(fd, mode)
            os.rename(spare, path)
            if is_at(path, fd):
                undo.pop_all()
                return fd
            os.unlink(path)  # another process has just put its spare there: a second name of a checkpoint
    return -1


def is_single(status: os.stat_result) -> bool:
    """Returns whether it is a regular file of this user with no other name."""
    return stat.S_ISREG(status.st_mode) and status.st_nlink == 1 and status.st_uid == os.geteuid()


def _keep(path: str, spare: str) -> bool:
    """Gives the file that is about to be replaced a second name; returns whether it could."""
    with suppress(OSError):  # there is no file, or the file system has no hard links
        if is_single(os.lstat(path)):
            _remove_spare(spare)
            os.link(path, spare, follow_symlinks=False)
            return True
    return False


def _remove_spare(spare: str) -> None:
    with suppress(OSError):
        unlink(spare)


def _lock(fd: int) -> bool:
    """Locks a new file; returns False if another process has taken it for abandoned already."""
    return try_lock(fd) and os.fstat(fd).st_nlink > 0


def _short(name: str) -> str:
    """Cuts ``name`` so that a temporary name made of it fits NAME_MAX."""
    return os.fsdecode(os.fsencode(name)[: 255 - len(_MARK) - 24])


def remove_litter(folder: str) -> None:
    """Removes the temporary files of processes that are gone, whatever their target."""
    for path in hidden(folder, _TEMPORARY):
        with suppress(OSError), abandoned(path):
            os.unlink(path)


def hidden(folder: str, names: re.Pattern[str] = _HIDDEN) -> list[str]:
    """Returns the paths in a folder whose names match; by default temporary files, also those in use, and spares."""
    with suppress(OSError), os.scandir(folder) as entries:
        return [entry.path for entry in entries if names.fullmatch(entry.name)]
    return []


class FileState:
    """Recognises a file by device, inode, size, modification time (mtime) and change time (ctime).

    A program that writes to a file can put its mtime back, as ``rsync --inplace -t`` does, but not its ctime. But ctime
    also changes with things that leave the bytes alone: a hard link is added or removed (as when another file takes the
    name of an open one), or owner, mode or name change. If one of these explains a new ctime, the file is taken to be
    the same, although its bytes may have changed as well.

    Args:
        status: the file's status when it is first seen.
        fd: an open descriptor of the file, if there is one.
    """

    def __init__(self, status: os.stat_result, fd: int = -1) -> None:
        self._file, self._change = _file(status), status.st_ctime_ns
        self._attributes, self._name = _attributes(status), _name(fd)

    def holds(self, status: os.stat_result, fd: int = -1) -> bool:
        """Returns whether ``status`` is that of the same file with, presumably, the same bytes."""
        if _file(status) != self._file:
            return False
        name = _name(fd) if status.st_ctime_ns != self._change or not self._name else self._name
        if status.st_ctime_ns != self._change:
            if _attributes(status) == self._attributes and (name == self._name or not name or not self._name):
                return False
            self._change, self._attributes = status.st_ctime_ns, _attributes(status)
        self._name = name
        return True

    @property
    def identity(self) -> tuple[int, ...]:
        """What the file and its present bytes are recognised by."""
        return *self._file, self._change

    def is_written(self, status: os.stat_result) -> bool:
        """Returns whether ``status`` is that of another file, or of other bytes without doubt."""
        return _file(status) != self._file


def _file(status: os.stat_result) -> tuple[int, ...]:
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


def _attributes(status: os.stat_result) -> tuple[int, ...]:
    return status.st_nlink, status.st_mode, status.st_uid, status.st_gid


def _name(fd: int) -> str:
    """Returns the present name of an open file; empty if unknown."""
    with contextlib.suppress(OSError):
        return os.readlink(f"/proc/self/fd/{fd}") if fd >= 0 else ""
    return ""
