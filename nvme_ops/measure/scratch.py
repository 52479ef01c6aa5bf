"""The folder of a run: its name, how others see that the run is alive, and how it is removed, if need be later.

It is called ``nvme_ops-bench-`` and 16 random digits, and holds an empty file, ``.lock-`` and the kernel's boot id,
that the run keeps locked (flock) as long as it lives. A run removes its folder at its end; if it was killed, the next
run in the same place does. It removes only a folder that has both names, belongs to the same user and can be locked,
so never that of a run that is alive, not even in another container or on another host.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import os
import re
import secrets
import shutil
import signal
import stat
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from nvme_ops.base.lifetime import in_this_process
from nvme_ops.filesystem.device import mount_of
from nvme_ops.filesystem.files import boot_id
from nvme_ops.measure import stop
from nvme_ops.measure.files import NotUsable, require_space
from nvme_ops.op_builder.machine import Host

_PREFIX, _LOCK = "nvme_ops-bench-", ".lock-"
_NAME = re.compile(re.escape(_PREFIX) + "[0-9a-f]{16}")
_LOCK_NAME = re.compile(re.escape(_LOCK) + "[0-9a-f-]{36}")
_LOCAL = {"btrfs", "ext2", "ext3", "ext4", "f2fs", "xfs"}  # no other host has them mounted

_alive: dict[str, int] = {}  # this process's folders, each with the descriptor that locks it


@contextmanager
def scratch_folder(folder: str, needed: int, smaller: str = "--size or --folder") -> Iterator[str]:
    """Makes a folder in ``folder`` and removes it at the end, however the run ends, with those of killed runs.

    ``needed``: bytes of free space. ``smaller``: the flags that reduce them, for the message.

    Raises:
        NotUsable: too little space, or nothing can be written there.
    """
    sweep(folder)
    require_space(folder, needed, smaller)
    path = ""
    try:
        with stop.deferred():
            try:
                path = _make(folder)
            except OSError as error:
                raise NotUsable(f"{folder}: {error.strerror}") from error
        yield path
    finally:
        with stop.deferred():
            _end(path)


def sweep(folder: str) -> None:
    """Removes what killed runs left in ``folder``; silently leaves anything that could be something else."""
    with contextlib.suppress(OSError):
        for name in os.listdir(folder):
            if _NAME.fullmatch(name):
                with contextlib.suppress(OSError):
                    _remove_if_dead(os.path.join(folder, name))


def _new_name(folder: str) -> str:
    return os.path.join(folder, _PREFIX + secrets.token_hex(8))


def _make(folder: str) -> str:
    while True:
        path = _new_name(os.path.abspath(folder))
        os.mkdir(path, 0o700)
        try:
            lock = os.open(os.path.join(path, _LOCK + boot_id()), os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        except FileNotFoundError:  # another run has removed the empty folder
            continue
        with contextlib.suppress(OSError):  # without locks no other run removes it
            fcntl.flock(lock, fcntl.LOCK_EX)
        if os.fstat(lock).st_nlink:
            _alive[path] = lock
            return path
        os.close(lock)  # another run had locked it first, and removed it


def _remove_if_dead(path: str) -> None:
    """Removes the folder of a run that is not alive; leaves what could be another's. Raises OSError if it cannot."""
    about = os.lstat(path)
    if not stat.S_ISDIR(about.st_mode) or about.st_uid != os.geteuid():
        return
    locks = [name for name in os.listdir(path) if _LOCK_NAME.fullmatch(name)]
    if not locks:
        os.rmdir(path)  # only works if it is empty: the run was killed before it had a lock
        return
    if len(locks) > 1 or not (locks[0] == _LOCK + boot_id() or _is_local(path)):
        return
    lock = os.open(os.path.join(path, locks[0]), os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        _remove(path, locks[0])
    finally:
        os.close(lock)


def _remove(path: str, lock: str) -> None:
    """Removes a folder, its lock last, so that after a failure or a kill the next run can remove the rest."""
    with os.scandir(path) as entries:
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                shutil.rmtree(entry.path)
            elif entry.name != lock:
                os.unlink(entry.path)
    os.unlink(os.path.join(path, lock))
    os.rmdir(path)


def _end(path: str) -> None:
    if path in _alive:
        with contextlib.suppress(OSError), _children_ignored():
            # renamed first: an operation left pending by an exception could still open or create its file
            unknown = _new_name(os.path.dirname(path))
            os.rename(path, unknown)
            _remove(unknown, _LOCK + boot_id())
        os.close(_alive.pop(path))


@contextmanager
def _children_ignored() -> Iterator[None]:
    """Suspends the handler of SIGCHLD during the block: torch's raises for each worker that a signal has ended."""
    before = signal.getsignal(signal.SIGCHLD)
    suspend = callable(before) and threading.current_thread() is threading.main_thread()
    if suspend:
        signal.signal(signal.SIGCHLD, lambda *_: None)
    try:
        yield
    finally:
        if suspend:
            signal.signal(signal.SIGCHLD, before)


@atexit.register
def _end_all() -> None:
    """Removes all folders, in case a signal came before a ``with`` knew its folder, or during another signal."""
    if _is_ours():
        with stop.deferred():
            for path in list(_alive):
                _end(path)


_is_ours = in_this_process()


def _is_local(path: str) -> bool:
    """Returns whether only this host can have written there; then a lock of an earlier boot has no owner."""
    mount = mount_of(Host(), path)
    return mount is not None and mount.kind in _LOCAL
