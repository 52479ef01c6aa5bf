"""``Session``: a folder of ours in each of some places, for as long as a program needs it.

In every place there is a folder named ``.nvme_ops-`` and a hash, for this user's eyes only. In it lies ``owner``,
locked by the process that has the session; it says whose it is and what is in it. A session that nobody has the lock of
any more is what a crash has left, and the next one in that place removes it.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import fcntl
import hashlib
import json
import os
import re
import stat
import time
import weakref
from collections.abc import Iterator, Sequence
from pathlib import Path

from nvme_ops.storage import unlink

_PREFIX = ".nvme_ops-"
_FOLDER = re.compile(re.escape(_PREFIX) + r"[0-9a-f]{16}(?:-[0-9a-f]{16})?")
_FILE = re.compile(r"[0-9a-f]{32}")
_OWNER = "owner"
_MAGIC = "nvme_ops session"
_BEGINNING = 86400  # seconds in which a session without an owner's words may still be one that begins


class Session:
    """A folder in each of ``folders``, removed when the session is closed, at the end of the program at the latest.

    Args:
        folders: existing folders, of one device each where there are several.
        name: of what it is for; may be any text.
        keep: whether what is in it stays for the next session of this name, which takes it over. Only one process at a
            time has such a session.
        fingerprint: of what is kept, for example of a model and its version. What has another one is emptied.

    Raises:
        NotADirectoryError, FileNotFoundError, PermissionError: a place that is no folder, or may not be written.
        BlockingIOError: another process has the session that is kept; the message says which.
    """

    def __init__(
        self,
        folders: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
        *,
        name: str,
        keep: bool = False,
        fingerprint: str = "",
    ) -> None:
        given = [folders] if isinstance(folders, str | os.PathLike) else list(folders)
        if not given:
            raise ValueError("a session needs at least one folder")
        self.name, self.keep, self.fingerprint = name, keep, fingerprint
        self._process = os.getpid()
        self._places: list[_Place] = []
        #: Whether this session found what one before it has kept, with the same fingerprint.
        self.found = keep
        try:
            for folder in given:
                place = _Place.open(os.fspath(folder), name, keep, fingerprint)
                self._places.append(place)
                self.found = self.found and place.found
            if keep and not self.found:
                for place in self._places:
                    place.empty()
        except BaseException:
            self.close()
            raise
        _open_sessions.add(self)

    @property
    def folders(self) -> list[str]:
        """Paths of the session's own folders, in the order of the places given."""
        return [place.path for place in self._places]

    @property
    def closed(self) -> bool:
        """Whether it was closed."""
        return not self._places

    def path(self, index: int, name: str) -> str:
        """The path of a file of this name, which may be any text, in the folder of that number."""
        if self.closed:
            raise ValueError(f"the session {self.name!r} is closed")
        return os.path.join(self._places[index].path, hashlib.blake2b(name.encode(), digest_size=16).hexdigest())

    def open(self, index: int, name: str) -> int:
        """A descriptor to read and write that file with; it is made where there is none. Nobody else may open it.

        Raises OSError: also where somebody has planted a link or a folder under its name, or taken the folder away.
        """
        path = self.path(index, name)
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)

    def close(self) -> None:
        """Removes the folders, or leaves what is kept to the next session. Once or more; no forked child does."""
        places, self._places = self._places, []
        for place in places:
            place.close(remove=not self.keep and self._process == os.getpid())

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        """For example ``<Session 'optimizer' in ['/mnt/nvme/.nvme_ops-...']>``."""
        return f"<Session {self.name!r}" + (" closed>" if self.closed else f" in {self.folders}>")


class _Place:
    """One folder of a session, and the lock on it."""

    def __init__(self, path: str, lock: int, found: bool) -> None:
        self.path, self.found = path, found
        self._lock = lock
        self._process = os.getpid()

    @classmethod
    def open(cls, parent: str, name: str, keep: bool, fingerprint: str) -> _Place:
        if not os.path.isdir(parent):
            number = errno.ENOTDIR if os.path.exists(parent) else errno.ENOENT
            raise OSError(number, os.strerror(number), parent)
        parent = os.path.realpath(parent)
        _remove_abandoned(parent)
        base = os.path.join(parent, _PREFIX + hashlib.blake2b(name.encode(), digest_size=8).hexdigest())
        while True:
            path = base if keep else f"{base}-{os.urandom(8).hex()}"
            with contextlib.suppress(FileExistsError):
                os.mkdir(path, 0o700)
            _require_ours(path)
            owner = os.path.join(path, _OWNER)
            try:
                lock = os.open(owner, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
            except FileNotFoundError:  # somebody took the empty folder for a leftover
                continue
            try:
                if not _take_lock(lock, patient=True):
                    pid = _read(lock).get("pid")
                    raise BlockingIOError(errno.EWOULDBLOCK, f"the session {name!r} is in use by process {pid}", path)
                if not _is_file_of(lock, owner):  # the same, a moment later
                    os.close(lock)
                    continue
                before = _read(lock)
                _write(lock, name, keep, fingerprint)
                return cls(path, lock, before.get("fingerprint") == fingerprint and before.get("keep") is True)
            except BaseException:
                with contextlib.suppress(OSError):
                    os.close(lock)
                raise

    def empty(self) -> None:
        """Removes all files of ours but the lock."""
        for entry in _files(self.path):
            unlink.unlink(entry)

    def close(self, remove: bool) -> None:
        """Once."""
        if remove:
            with contextlib.suppress(OSError):  # somebody has taken it away
                _remove(self.path)
        if self._process == os.getpid():
            os.close(self._lock)

    def leave_to_parent(self) -> None:
        """In a forked child: the lock must end with the parent."""
        with contextlib.suppress(OSError):
            os.close(self._lock)


def _require_ours(path: str) -> None:
    """Raises PermissionError where another user has made it, or could have put something there."""
    status = os.lstat(path)
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid() or stat.S_IMODE(status.st_mode) & 0o022:
        raise PermissionError(errno.EPERM, "is not a folder of this user's that nobody else may write to", path)


def _remove_abandoned(parent: str) -> None:
    """What sessions have left behind whose processes are gone. What is kept stays."""
    with contextlib.suppress(OSError), os.scandir(parent) as entries:
        candidates = [entry.path for entry in entries if _FOLDER.fullmatch(entry.name)]
        for path in candidates:
            with contextlib.suppress(OSError):
                _remove_if_abandoned(path)


def _remove_if_abandoned(path: str) -> None:
    _require_ours(path)
    try:
        lock = os.open(os.path.join(path, _OWNER), os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        os.rmdir(path)  # whoever is about to make an owner in it notices
        return
    try:
        owner = _read(lock)
        if owner.get("keep") or (owner and owner.get("magic") != _MAGIC):
            return
        if _take_lock(lock) and _is_dead(_read(lock), lock):
            _remove(path)
    finally:
        os.close(lock)


def _is_dead(owner: dict[str, object], lock: int) -> bool:
    """Where there are locks, to have one is enough; elsewhere the process must be gone, or the machine restarted."""
    if _has_locks(lock):
        return True
    if not owner:
        return time.time() - os.fstat(lock).st_mtime > _BEGINNING
    if owner.get("boot") != _boot():
        return owner.get("machine") == _machine()
    pid = owner.get("pid")
    try:
        os.kill(pid if isinstance(pid, int) else 0, 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        pass
    return False


def _remove(path: str) -> None:
    """The files of ours, then the folder, which stays where there is anything else in it."""
    for entry in _files(path):
        unlink.unlink(entry)
    if not any(entry != _OWNER for entry in os.listdir(path)):
        os.unlink(os.path.join(path, _OWNER))
        os.rmdir(path)


def _files(path: str) -> Iterator[str]:
    with os.scandir(path) as entries:
        yield from [
            entry.path for entry in entries if _FILE.fullmatch(entry.name) and entry.is_file(follow_symlinks=False)
        ]


def _take_lock(fd: int, patient: bool = False) -> bool:
    """False where somebody else has it. A file system without locks gives it to everybody.

    ``patient``: others may have it for the moment in which they look whether it is a leftover.
    """
    for _ in range(100 if patient else 1):
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            time.sleep(0.001 if patient else 0)
            continue
        except OSError:
            pass
        return True
    return False


def _has_locks(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _is_file_of(fd: int, path: str) -> bool:
    with contextlib.suppress(FileNotFoundError):
        return os.path.samestat(os.fstat(fd), os.lstat(path))
    return False


def _read(fd: int) -> dict[str, object]:
    with contextlib.suppress(ValueError):
        found = json.loads(os.pread(fd, 1 << 16, 0) or b"{}")
        return found if isinstance(found, dict) else {}
    return {}


def _write(fd: int, name: str, keep: bool, fingerprint: str) -> None:
    owner = {
        "magic": _MAGIC,
        "name": name,
        "keep": keep,
        "fingerprint": fingerprint,
        "pid": os.getpid(),
        "boot": _boot(),
        "machine": _machine(),
    }
    content = json.dumps(owner).encode()
    os.pwrite(fd, content, 0)
    os.ftruncate(fd, len(content))


def _boot() -> str:
    with contextlib.suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return ""


def _machine() -> str:
    with contextlib.suppress(OSError):
        return Path("/etc/machine-id").read_text().strip()
    return os.uname().nodename


_open_sessions: weakref.WeakSet[Session] = weakref.WeakSet()


def _close_all() -> None:
    for session in list(_open_sessions):
        session.close()


def _forked() -> None:
    for session in list(_open_sessions):
        for place in session._places:
            place.leave_to_parent()


atexit.register(_close_all)
os.register_at_fork(after_in_child=_forked)
