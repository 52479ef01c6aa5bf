"""Files beyond what ``os`` has: durable and whole writes, locks between processes, and unlinking without waiting.

Ctrl-C ends the wait for a device, which may be long if it does not respond. The kernel releases a lock (``flock``) when
its process ends, however that happens. Where the file system has no locks, only one process at a time may save a
checkpoint of several files. A temporary file is locked by its writer, and ``abandoned`` once the writer is gone. On a
file system that discards freed blocks (ext4's ``discard``), freeing a file takes as long as writing one: a thread does.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import stat
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from io import FileIO
from pathlib import Path
from typing import Literal, TypeVar

from nvme_ops.base import lifetime
from nvme_ops.base.errors import name_failure, naming

Call = Literal["fsync", "fdatasync"]
_Held = TypeVar("_Held", bound="HeldFile | None")
LOCK_SUFFIX = ".nvme_ops-lock"
_PATIENCE = 10.0  # seconds of waiting before a warning says for what
_libc = ctypes.CDLL(None, use_errno=True)
#: What says that a call is of no use here: no such call of this file system, or a container's filter.
_NOT_HERE = {errno.EINVAL, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EPERM}
_WITHOUT_LOCKS = {*_NOT_HERE, errno.ENOLCK}
_MUCH = 16 << 20  # bytes; smaller files are freed at once
_LARGE, _MIN_SHARE = 64 << 20, 64  # bytes; with blocks for less than a 64th they are holes, not compressed data
_MAX_READ = 1 << 30  # bytes of one pread

_freed = threading.Condition(lifetime.forkable_lock())
_under_way: dict[threading.Thread, int] = {}  # thread -> bytes of its file


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
            self._work(fd, own)
            return
        try:
            # a daemon: a caller that waits keeps the program running, and nobody else needs the result
            threading.Thread(target=self._work, args=[own, own], name=f"nvme_ops {call}", daemon=True).start()
        except RuntimeError:  # no more threads
            self._work(own, own)

    def _work(self, fd: int, own: int) -> None:
        try:
            try:
                getattr(os, self._name)(fd)
            finally:
                with suppress(OSError):  # there is none, or the sync has reported any write error
                    os.close(own)
        except BaseException as error:
            self._ended.set_exception(error)
        else:
            self._ended.set_result(None)

    def wait(self) -> None:
        """Waits until the call has returned. Raises OSError that names the operation and the file."""
        try:
            self._ended.result()
        except OSError as error:
            name_failure(error, self._name, self._path)
            raise


def sync(fd: int, path: str | bytes | int | os.PathLike[str], call: Call = "fdatasync") -> None:
    """Makes an open file durable and waits for that; takes the arguments of ``Syncing``."""
    Syncing(fd, path, call).wait()


def sync_folder(folder: str | bytes) -> None:
    """Makes the names in a folder durable. Raises OSError that names the operation and the folder."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        sync_names(fd, folder)
    finally:
        os.close(fd)


def sync_names(fd: int, path: str | bytes) -> None:
    """Makes the names in an open folder durable. Raises OSError that names the operation and ``path``.

    Several network and FUSE file systems have no ``fsync`` of a folder (EINVAL): there a name is as durable as they
    make it by themselves.
    """
    try:
        sync(fd, path, "fsync")
    except OSError as error:
        if error.errno not in _NOT_HERE:
            raise


def allocate(fd: int, start: int, nbytes: int) -> None:
    """Allocates the blocks of a range, and extends the file to its end. Raises OSError.

    Without ``fallocate`` (ext2, FUSE, NFS before 4.2, a container's filter) it only extends the file, unless the disk
    is too full now; when it is full later, writing the range fails. ``posix_fallocate`` would write to every block.
    """
    try:
        fallocate(fd, 0, start, nbytes)
    except OSError as error:
        if error.errno not in _NOT_HERE:
            raise
        space = os.fstatvfs(fd)
        if space.f_blocks > 0 and space.f_bavail * space.f_frsize < nbytes:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)) from None
        if os.fstat(fd).st_size < start + nbytes:
            os.ftruncate(fd, start + nbytes)


def fallocate(fd: int, mode: int, start: int, nbytes: int) -> None:
    """Calls the system call of this name, which ``os`` does not have. Raises OSError."""
    while _libc.fallocate64(fd, mode, ctypes.c_int64(start), ctypes.c_int64(nbytes)) != 0:
        code = ctypes.get_errno()
        if code != errno.EINTR:
            raise OSError(code, os.strerror(code))


def read_whole(fd: int, path: str | None = None) -> bytes:
    """Returns the content of an open file.

    Raises OSError if a part cannot be read (the read before it returns less), or for a file of holes, which may be
    larger than any memory.
    """
    status, parts = os.fstat(fd), list[bytes]()
    wanted = status.st_size
    with naming("read", fd if path is None else path):
        if wanted > _LARGE and status.st_blocks * 512 < wanted // _MIN_SHARE:
            raise OSError(errno.EFBIG, f"has {wanted} bytes, and blocks for {status.st_blocks * 512} of them")
        while wanted > 0 and (part := os.pread(fd, min(wanted, _MAX_READ), sum(map(len, parts)))):
            parts.append(part)
            wanted -= len(part)
    return b"".join(parts)


def write_whole(fd: int, content: bytes, place: int = 0) -> None:
    """Writes ``content`` to an open file, from byte ``place`` on. Raises OSError, perhaps with a part written."""
    left = memoryview(content)
    while left:
        written = os.pwrite(fd, left, place)
        left, place = left[written:], place + written


def set_mode(fd: int, mode: int) -> None:
    """Gives an open file these permission bits.

    Where a mount has none of its own (CIFS, object stores), fewer will do. Raises OSError if there would be more.
    """
    present = stat.S_IMODE(os.fstat(fd).st_mode)
    if present == mode:
        return
    try:
        os.fchmod(fd, mode)
    except OSError as error:
        if error.errno not in _NOT_HERE or present & ~mode:
            raise


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


_MOUNT_PARENTS = ("/mnt", "/media")  # by the Filesystem Hierarchy Standard


def make_last_folder(path: str) -> None:
    """Makes a folder durably, unless it exists. Its parent must exist: where it is missing, a disk may not be mounted.

    For the same reason none is made directly below ``/``, ``/mnt`` or ``/media``, unless a disk is mounted there.

    Raises:
        FileNotFoundError: the parent is missing, or has mounted disks; the error names the topmost missing folder.
        NotADirectoryError: the path exists and is not a folder.
    """
    above = os.path.dirname(os.path.abspath(path))
    parent = os.path.realpath(above)
    holds_mounts = parent == "/" or (parent in _MOUNT_PARENTS and not os.path.ismount(parent))
    if holds_mounts and not os.path.lexists(path):
        raise no_folder(os.path.abspath(path), f"no such folder, and none is made directly below {parent}")
    try:
        os.mkdir(path)
    except FileExistsError:
        if not os.path.isdir(path):
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), path) from None
    except OSError as error:
        if os.path.isdir(path):  # on a read-only file system
            return
        if not isinstance(error, FileNotFoundError) or os.path.lexists(above):
            raise
        raise no_folder(above, "no such folder, and only the last one of a path is made") from None
    else:
        with suppress(PermissionError):  # a folder that may be written to and not read
            sync_folder(above)


def sync_above(folder: str) -> None:
    """Makes the names of a folder and its parents durable, up to the device's root and where they can be opened."""
    folder = os.path.realpath(folder)
    device = os.stat(folder).st_dev
    while os.stat(above := os.path.dirname(folder)).st_dev == device and above != folder:
        with suppress(PermissionError):
            sync_folder(above)
        folder = above


@contextmanager
def held(make: Callable[[], _Held]) -> Iterator[_Held]:
    """Holds the file that ``make`` returns, perhaps none, until the end of the block.

    Unlike a ``with`` statement with the file itself, it does so also if Ctrl-C comes as the block is entered.
    """
    file = None
    try:
        file = make()
        yield file
    finally:
        if file is not None:
            try:
                file.close()
            finally:
                file.close()  # again: an exception from a signal handler may have ended the first call


def locked(path: str) -> AbstractContextManager[Lock]:
    """Lets one thread of one process at a time into the block for the ``path`` of a checkpoint."""
    return held(lambda: Lock(path))


class HeldFile(lifetime.Closing, lifetime.Owned, lifetime.Tracked):
    """A file that is locked from construction on, until ``close`` or until this object is freed.

    A file that its previous holder has removed or replaced meanwhile is opened anew.

    Args:
        path: the file.
        opening: opens it, as an object that is closed with its last reference.
        lock: tries to lock the descriptor; returns whether it has, or raises.
    """

    _file: FileIO | None = None

    def __init__(self, path: str, opening: Callable[[str], FileIO], lock: Callable[[int], object]) -> None:
        super().__init__()
        self.path = path
        lifetime.track(self)
        while True:
            with ExitStack() as undo:
                file = undo.enter_context(opening(path))
                if lock(file.fileno()) and is_at(path, file.fileno(), follow=True):
                    self._file = file
                    undo.pop_all()
                    return

    def fileno(self) -> int:
        """Returns the descriptor."""
        if self._file is None:
            raise ValueError("the file is not open")
        return self._file.fileno()

    def close(self) -> None:
        """Releases the lock. Further calls do nothing. In a forked child only closes its file: the parent holds it."""
        file = self._file
        if file is None or file.closed:
            return
        if self._is_ours():
            self._finish(file)
            with suppress(OSError):  # a file system without locks
                fcntl.flock(file, fcntl.LOCK_UN)  # closing is not enough: a forked child has it open, too
        file.close()

    _after_fork = close  # a lock lasts until all descriptors of its file are closed

    def _finish(self, file: FileIO) -> None:
        """Does what is to be done before the lock is released; perhaps again, after Ctrl-C."""

    def __exit__(self, *_: object) -> None:
        try:
            self.close()
        finally:
            self.close()  # again: an exception from a signal handler may have ended the first call

    def __del__(self) -> None:
        self.close()


class Lock(HeldFile):
    """A lock for a path, held from construction on. Its file exists while it is held, and after its holder was killed.

    Raises OSError if the file can neither be created nor opened.
    """

    def __init__(self, path: str) -> None:
        folder, name = os.path.split(os.path.abspath(path))
        file = os.path.join(folder, f".{os.fsdecode(os.fsencode(name)[:200])}{LOCK_SUFFIX}")
        super().__init__(file, _open, lambda fd: _wait_for(fd, file))

    def excludes(self) -> bool:
        """Returns whether nobody else can hold it: False where the file system has no locks."""
        fd = os.open(self.path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            return not try_lock(fd)
        finally:
            os.close(fd)

    def _finish(self, file: FileIO) -> None:
        with suppress(OSError):
            if is_at(self.path, file.fileno()):  # an interrupted earlier call may have removed it
                os.unlink(self.path)


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


def try_lock(fd: int, kind: int = fcntl.LOCK_EX, patient: bool = False) -> bool:
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


def unlock_and_close(fd: int) -> None:
    """Unlocks and closes a file. Closing alone is not enough: a child forked meanwhile has it open, too."""
    with suppress(OSError):  # a file system without locks
        fcntl.flock(fd, fcntl.LOCK_UN)
    os.close(fd)


def lock_files(folder: str) -> list[str]:
    """Returns the lock files in a folder, held or not."""
    return [os.path.join(folder, name) for name in os.listdir(folder) if name.endswith(LOCK_SUFFIX)]


@contextmanager
def abandoned(path: str) -> Iterator[None]:
    """Holds the lock of a temporary file, or of a lock's; raises BlockingIOError while its writer or holder lives."""
    fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if not is_at(path, fd):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
        yield
    finally:
        unlock_and_close(fd)


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


@contextmanager
def freed_later(path: str) -> Iterator[None]:
    """Lets a ``with`` statement unlink or replace the file; its blocks are freed in the background afterwards."""
    fd, size = -1, 0
    with suppress(OSError):
        status = os.lstat(path)
        if stat.S_ISREG(status.st_mode) and status.st_nlink == 1 and status.st_size >= _MUCH:
            fd, size = os.open(path, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC), status.st_size
    try:
        yield
    finally:
        if fd >= 0:
            _free_by_thread(fd, size)


def unlink(path: str) -> None:
    """Removes a file like ``os.unlink``; its blocks are freed in the background."""
    with freed_later(path):
        os.unlink(path)


def require_room(folder: str) -> None:
    """Waits for blocks that are being freed if space is short, since the next file is likely to be as large."""
    try:
        space = os.statvfs(folder)
    except OSError:  # the write will tell
        return
    if space.f_bavail * space.f_frsize < 2 * sum(_under_way.copy().values()):
        wait_until_free()


def wait_until_free() -> None:
    """Waits until the blocks of all files unlinked so far are free.

    ``Thread.join`` would not do: before Python 3.13 it takes a thread for ended once Ctrl-C has interrupted the join.
    """
    with _freed:
        mine = list(_under_way)
        while any(thread in _under_way for thread in mine):
            _freed.wait()


def _free_by_thread(fd: int, size: int) -> None:
    owned = [fd]  # whoever pops it closes it
    thread = threading.Thread(target=lambda: _free(owned, thread), name="nvme_ops.filesystem.files", daemon=False)
    try:
        with _freed:
            _under_way[thread] = size
        if sys.is_finalizing():  # a new thread would never begin, and ``start`` would wait for it forever
            raise RuntimeError
        thread.start()
    except BaseException as error:
        _free(owned, thread)
        if not isinstance(error, RuntimeError):  # no more threads
            raise


def _free(owned: list[int], thread: threading.Thread) -> None:
    with suppress(IndexError):
        os.close(owned.pop())
    with _freed:
        _under_way.pop(thread, None)
        _freed.notify_all()


# A forked child would keep the files open, and so their blocks, for as long as it lives.
lifetime.at_fork(_under_way.clear, before=wait_until_free)
