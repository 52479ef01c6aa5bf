"""The folder of a run: its name, how others see that the run is alive, and how it is removed, if need be later.

It is called ``nvme_ops-bench-`` and 16 random digits, and holds an empty file, ``.lock-`` and the kernel's boot id,
that the run keeps locked (flock) as long as it lives. A run removes its folder at its end; if it was killed, the next
run in the same place does. It removes only a folder that has both names, belongs to the same user and can be locked,
so never that of a run that is alive, not even in another container or on another host.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
import secrets
import shutil
import signal
import stat
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from io import FileIO

from nvme_ops.filesystem.device import mount_of
from nvme_ops.filesystem.files import HeldFile, abandoned, boot_id, held, try_lock
from nvme_ops.measure import stop
from nvme_ops.measure.files import NotUsable, require_space
from nvme_ops.op_builder.machine import Host

_PREFIX, _LOCK = "nvme_ops-bench-", ".lock-"
_NAME = re.compile(re.escape(_PREFIX) + "[0-9a-f]{16}")
_LOCK_NAME = re.compile(re.escape(_LOCK) + "[0-9a-f-]{36}")
_LOCAL = {"btrfs", "ext2", "ext3", "ext4", "f2fs", "xfs"}  # no other host has them mounted


@contextmanager
def scratch_folder(folder: str, needed: int, smaller: str = "--size or --folder") -> Iterator[str]:
    """Makes a folder in ``folder`` and removes it at the end, however the run ends, with those of killed runs.

    ``needed``: bytes of free space. ``smaller``: the flags that reduce them, for the message.

    Raises:
        NotUsable: too little space, or nothing can be written there.
    """
    sweep(folder)
    require_space(folder, needed, smaller)
    with held(lambda: _make(folder)) as made:
        yield made.folder


def sweep(folder: str) -> None:
    """Removes what killed runs left in ``folder``; silently leaves anything that could be something else."""
    with contextlib.suppress(OSError):
        for name in os.listdir(folder):
            if _NAME.fullmatch(name):
                with contextlib.suppress(OSError):
                    _remove_if_dead(os.path.join(folder, name))


class _RunFolder(HeldFile):
    """The lock in the folder of this run; ``close`` removes both."""

    def __init__(self, parent: str) -> None:
        self.folder = _new_name(os.path.abspath(parent))
        lock = os.path.join(self.folder, _LOCK + boot_id())
        super().__init__(lock, _open, functools.partial(try_lock, patient=True))

    def close(self) -> None:
        """Removes the folder, unless it is the parent's of a forked child."""
        with stop.deferred():
            super().close()

    _at_exit = close  # a signal may have come before the ``with`` knew it

    def _finish(self, file: FileIO) -> None:  # noqa: ARG002
        with contextlib.suppress(OSError), _children_ignored():
            # renamed first: an operation left pending by an exception could still open or create its file
            unknown = _new_name(os.path.dirname(self.folder))
            os.rename(self.folder, unknown)
            _remove(unknown, os.path.basename(self.path))


def _make(folder: str) -> _RunFolder:
    with stop.deferred():
        try:
            return _RunFolder(folder)
        except OSError as error:
            raise NotUsable(f"{folder}: {error.strerror}") from error


def _new_name(folder: str) -> str:
    return os.path.join(folder, _PREFIX + secrets.token_hex(8))


def _open(lock: str) -> FileIO:
    """Makes the folder and its lock: again if another run has removed it, which was empty or not locked yet."""
    while True:
        with contextlib.suppress(FileExistsError):
            os.mkdir(os.path.dirname(lock), 0o700)
        with contextlib.suppress(FileNotFoundError):
            return FileIO(os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))


def _remove_if_dead(path: str) -> None:
    """Removes the folder of a run that is not alive; leaves what could be another's. Raises OSError if it cannot."""
    about = os.lstat(path)
    if not stat.S_ISDIR(about.st_mode) or about.st_uid != os.geteuid():
        return
    locks = [name for name in os.listdir(path) if _LOCK_NAME.fullmatch(name)]
    if not locks:
        os.rmdir(path)  # only works if it is empty: the run was killed before it had a lock
        return
    if len(locks) == 1 and (locks[0] == _LOCK + boot_id() or _is_local(path)):
        with abandoned(os.path.join(path, locks[0])):
            _remove(path, locks[0])


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


def _is_local(path: str) -> bool:
    """Returns whether only this host can have written there; then a lock of an earlier boot has no owner."""
    mount = mount_of(Host(), path)
    return mount is not None and mount.kind in _LOCAL
