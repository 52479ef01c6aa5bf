"""``Session``: a private folder in each of several places, for as long as a program needs it.

In every place the session has a folder named ``.nvme_ops-`` and a hash, which only this user can read. Its file
``owner`` says whose session it is and what it contains, and is locked by the process that has the session. A session
whose lock nobody holds was left by a crash; the next session in that place removes it.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import re
import stat
import time
from collections.abc import Iterator, Sequence
from io import FileIO
from typing import Protocol

from nvme_ops.base.errors import naming, paths_of
from nvme_ops.base.lifetime import Closing, Tracked, Usable, forkable_lock, track
from nvme_ops.base.ranks import expanded
from nvme_ops.base.settings import PAGE
from nvme_ops.base.text import never_raising, parse_json
from nvme_ops.filesystem.files import (
    HeldFile,
    allocate,
    boot_id,
    machine_id,
    make_last_folder,
    read_whole,
    sync,
    sync_folder,
    try_lock,
    unlink,
    unlock_and_close,
)
from nvme_ops.filesystem.publication import hidden, is_single, remove_litter
from nvme_ops.io.arguments import require_switches

OWNER = "owner"
_UNNAMED = "unnamed"  # the name of a file until it has none
MAGIC = "nvme_ops session"
VERSION = 1  # of the owner file and of what it describes; a file without one has version 1
_CHANGING = ("magic", "pid", "boot", "machine")  # keys that every program writes anew
_MAX = 1 << 20  # bytes of the owner file
_SECTOR = 512  # bytes that a device writes wholly or not at all
_STARTING = 86400  # seconds for which an empty owner file may belong to a session that is starting


def open_owner(path: str, create: bool = False) -> int:
    """Opens the file ``owner``. Raises OSError for a symbolic link, FileNotFoundError if there is no file."""
    return os.open(
        path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC | (os.O_CREAT if create else 0), 0o600
    )


def read_owner(fd: int) -> dict[str, object] | None:
    """Returns what the file says: an empty dict before the first write, None for other content or a later version."""
    if os.fstat(fd).st_size > _MAX:
        return None
    content = read_whole(fd)
    if not content.strip(b"\0"):  # a power failure may leave the length without the bytes
        return {}
    with contextlib.suppress(ValueError):
        owner = parse_json(content)
        if isinstance(owner, dict) and owner.get("magic") == MAGIC and owner.get("version", VERSION) == VERSION:
            return owner
    return None


def write_owner(fd: int, owner: dict[str, object], durable: bool = False) -> None:
    """Overwrites the file in one ``pwrite``, so that a process that is killed leaves the old content or the new.

    So does a power failure: what every program writes anew lies in the first sector, and what describes the session
    after it. ``durable``: the content is on the device when this returns.
    """
    changing = {key: owner[key] for key in _CHANGING if key in owner}
    lasting = {key: value for key, value in owner.items() if key not in changing}
    text = (json.dumps(changing)[:-1] + ", ").ljust(_SECTOR) + json.dumps(lasting)[1:]
    content = text.encode()  # in whole pages: a new size may be on the device before the content, or after it
    content = content.ljust(max(os.fstat(fd).st_size, -(-len(content) // PAGE) * PAGE))
    with naming("write", fd):
        if os.pwrite(fd, content, 0) != len(content):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    if durable:
        sync(fd, fd)


def is_dead(owner: dict[str, object], lock: int) -> bool:
    """Returns whether the owner is gone, for a caller that has taken the lock.

    Where the file system has locks, holding it is enough; elsewhere the process must be gone or the machine restarted.
    """
    with contextlib.suppress(OSError):
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    if not owner:
        return time.time() - os.fstat(lock).st_mtime > _STARTING
    pid = owner.get("pid")
    if pid is None:  # closed
        return True
    if owner.get("boot") != boot_id():
        return owner.get("machine") == machine_id()
    try:
        os.kill(pid if isinstance(pid, int) and pid > 0 else 0, 0)
    except (ProcessLookupError, OverflowError):
        return True
    except PermissionError:
        pass
    return False


_PREFIX = ".nvme_ops-"
_FOLDER = re.compile(re.escape(_PREFIX) + r"[0-9a-f]{16}(?:-[0-9a-f]{16})?")
_KEPT = re.compile(re.escape(_PREFIX) + r"[0-9a-f]{16}")
_FILE = re.compile(r"[0-9a-f]{32}")


class _User(Protocol):
    """A user of a session's files, such as a store."""

    def close(self) -> None:
        """Finishes its transfers and closes the files."""


class Session(Closing, Usable, Tracked):
    """A folder in each of ``folders``, removed when the session is closed or the program ends.

    Args:
        folders: one folder, or several on different devices. A missing one is created if its parent exists,
            but not directly below ``/``, ``/mnt`` and ``/media``, where devices are mounted.
            ``{rank}``, ``{local_rank}`` and ``{hostname}`` in a name are replaced by this process's.
        name: what the session is for; any text.
        reuse: leave the content for the next session of this name with the same folders, which takes it over. Only one
            process at a time can have such a session.
        fingerprint: identifies the content, for example a model and its version. Content with another one is removed.

    Raises:
        ValueError: no folder is given.
        NotADirectoryError, FileNotFoundError, PermissionError: one is not a folder, or cannot be created or written.
        BlockingIOError: another process has this kept session; the message names the process.
        FileExistsError: the owner file of a kept session is damaged, or belongs to something else.
        FileNotFoundError: a kept session with this fingerprint has parts elsewhere, perhaps on a disk that is not
            mounted. It is left as it is.
    """

    _closed_error = "the session {self.name!r} is closed"
    _forked_error = "the session {self.name!r} belongs to the parent process: a forked child must make its own"

    def __init__(
        self,
        folders: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
        *,
        name: str,
        reuse: bool = False,
        fingerprint: str = "",
    ) -> None:
        for argument, value in (("name", name), ("fingerprint", fingerprint)):
            if not isinstance(value, str):
                raise TypeError(f"{argument} must be a str, not {type(value).__name__}")
        require_switches(reuse=reuse)
        self.name, self.reuse, self.fingerprint = name, reuse, fingerprint
        super().__init__()
        self._lock = forkable_lock()
        self._places: list[_Place] = []
        self._users: dict[str, _User] = {}
        given = list(map(expanded, paths_of(folders, "folder")))
        if not given:
            raise ValueError("a session needs at least one folder")
        track(self)
        try:
            for folder in given:
                self._places.append(_Place(folder, name, reuse))
            #: Whether an earlier session left content with the same fingerprint.
            self.found = reuse and self._belong_together()
            if reuse and not self.found:
                self._require_whole()
            self._group = str(self._places[0].before["group"]) if self.found else os.urandom(16).hex()
            if not self.found:
                self._begin_anew()
            for number, place in enumerate(self._places):
                write_owner(place.fileno(), self._owner(number), durable=reuse)
            if reuse:  # also if found, since its program may have been killed before it did this
                self.sync()
                for folder in given:
                    sync_folder(folder)
        except BaseException:
            self.close()
            raise

    def _belong_together(self) -> bool:
        """Returns whether all folders were left by the same session, in this order."""
        expected = {"group": self._places[0].before.get("group"), "keep": True, "fingerprint": self.fingerprint}
        return isinstance(expected["group"], str) and all(
            place.before.items() >= {**expected, "place": [number, len(self._places)]}.items()
            for number, place in enumerate(self._places)
        )

    def _require_whole(self) -> None:
        """Raises FileNotFoundError if beginning anew would delete a part of a session with other parts elsewhere."""
        if any(place.before.get("place", 0) is None for place in self._places):  # it was being emptied
            return
        for place in self._places:
            kept, mine = place.before.get("place"), place.before.get("fingerprint") == self.fingerprint
            if isinstance(kept, list) and place.before.get("keep") is True and mine and any(_files(place.folder)):
                known = len(kept) == 2 and all(type(number) is int for number in kept)
                part = f"part {kept[0] + 1} of {kept[1]}" if known else "a part"
                for location in self._places:
                    location.removed = not location.before
                raise FileNotFoundError(
                    errno.ENOENT,
                    f"has {part} of the kept session {self.name!r}, and the folders given are "
                    "not those of all its parts, in order: is a disk not mounted? A different fingerprint starts over",
                    place.folder,
                )

    def _begin_anew(self) -> None:
        """Empties the folders. If killed at any point, it leaves nothing that the next session takes for complete."""
        for number, place in enumerate(self._places):
            write_owner(place.fileno(), {**self._owner(number), "place": None}, durable=self.reuse)
        for place in self._places:
            _remove_files(place.folder)

    def _owner(self, number: int) -> dict[str, object]:
        return {
            "magic": MAGIC,
            "version": VERSION,
            "name": self.name,
            "keep": self.reuse,
            "fingerprint": self.fingerprint,
            "group": self._group,
            "place": [number, len(self._places)],
            "pid": os.getpid(),
            "boot": boot_id(),
            "machine": machine_id(),
        }

    @property
    def folders(self) -> list[str]:
        """Paths of the session's own folders, in the order of the places given; none after ``close``."""
        return [] if self.closed else [place.folder for place in self._places]

    def path(self, index: int, name: str) -> str:
        """Returns the path of the file ``name`` (any text) in the folder with this index. Raises as ``open``."""
        self.require_open()
        return file_of(self._places[index].folder, name)

    def open(self, index: int, name: str) -> int:
        """Opens the file ``name`` for reading and writing, creating it if necessary; returns the descriptor.

        Raises:
            ValueError: the session is closed.
            RuntimeError: in a forked child.
            OSError: for example, the name is a symbolic link or a folder, or the session's folder was removed.
            PermissionError: the file has another owner or a second name elsewhere.
        """
        path = self.path(index, name)
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o600)
        if is_single(os.fstat(fd)):
            return fd
        os.close(fd)
        raise PermissionError(errno.EPERM, "is not a file that belongs to this session alone", path)

    def sync(self) -> None:
        """Makes the names of the files in all folders durable. Raises OSError."""
        for place in self._places:
            sync_folder(place.folder)

    def lend(self, name: str, user: _User) -> None:
        """Registers ``user`` as using the files of this name; ``close`` closes it first.

        Raises ValueError if they are open already, or the session is closed.
        """
        with self._lock:
            self.require_open()
            if name in self._users:
                raise ValueError(f"the session {self.name!r} has an open store{f' named {name!r}' * bool(name)}")
            self._users[name] = user

    def take_back(self, name: str, user: _User) -> None:
        """Undoes ``lend``."""
        with self._lock:
            if self._users.get(name) is user:
                del self._users[name]

    def close(self) -> None:
        """Removes the folders, or leaves kept content to the next session. Further calls do nothing.

        Closes its stores first, and raises what they raise once everything is closed. A forked child removes nothing.
        """
        with contextlib.ExitStack() as stack:  # calls the last one first
            stack.callback(self._close_places)
            if self._is_ours():
                for user in list(self._users.values()):
                    stack.callback(user.close)

    _at_exit = close

    def _close_places(self) -> None:
        with self._lock:
            for place in self._places:
                place.close()
            self._closed = True

    def __del__(self) -> None:
        if not self._closed and hasattr(self, "_users"):  # at Python's end its modules may be gone
            self.close()

    @never_raising
    def __repr__(self) -> str:
        """Returns for example ``<Session 'optimizer' in ['/mnt/nvme/.nvme_ops-...']>``."""
        return f"<Session {self.name!r}" + (" closed>" if self.closed else f" in {self.folders}>")


def unnamed_file(session: Session, nbytes: int) -> int:
    """Returns the descriptor of a new file of ``nbytes`` without a name, in the first folder. Raises OSError."""
    path = session.path(0, _UNNAMED)
    with contextlib.ExitStack() as undo:
        with session._lock:  # others open a file of this name, too
            fd = session.open(0, _UNNAMED)
            undo.callback(os.close, fd)
            os.unlink(path)
        with naming(f"making room for {nbytes} bytes", path):
            allocate(fd, 0, nbytes)
        undo.pop_all()
    return fd


class _Place(HeldFile):
    """One folder of a session, whose owner file is locked; ``close`` removes it, or leaves it to the next session."""

    _taken = False

    def __init__(self, parent: str, name: str, reuse: bool) -> None:
        make_last_folder(parent)
        parent = os.path.realpath(parent)
        _remove_abandoned(parent)
        self.folder = os.path.join(parent, _PREFIX + _hash(name, 8) + (f"-{os.urandom(8).hex()}" if not reuse else ""))
        self.removed = not reuse  #: whether ``close`` removes the folder

        def lock(fd: int) -> bool:
            if not try_lock(fd, patient=True):
                raise _in_use(name, fd, self.folder)
            return True

        super().__init__(os.path.join(self.folder, OWNER), self._open, lock)
        try:
            self.before = self._owner_before(name, reuse)  #: what its owner file said
            remove_litter(self.folder)
        except BaseException:
            self.close()
            raise
        self._taken = True

    def _owner_before(self, name: str, reuse: bool) -> dict[str, object]:
        before = read_owner(self.fileno())
        if before is None and os.listdir(self.folder) == [OWNER]:
            before = {}  # the power failed while it was being written
        if before is None:
            message = "is not the owner file of a session, is damaged, or is of a later version"
            raise FileExistsError(errno.EEXIST, message, self.path)
        if not before and reuse and any(_files(self.folder)):  # a session that is just starting has none
            message = "is empty, although the files beside it may hold what was kept: remove these"
            raise FileExistsError(errno.EEXIST, message, self.path)
        if before and not is_dead(before, self.fileno()):
            raise _in_use(name, self.fileno(), self.folder)
        return before

    def _open(self, owner: str) -> FileIO:
        while True:
            with contextlib.suppress(FileExistsError):
                os.mkdir(self.folder, 0o700)
            try:
                _require_ours(self.folder)
                return FileIO(open_owner(owner, create=True), "r+")
            except FileNotFoundError:  # another process removed the empty folder as abandoned
                continue
            except PermissionError:
                with contextlib.suppress(OSError):  # there is something in it
                    os.rmdir(self.folder)
                raise

    def _finish(self, file: FileIO) -> None:
        with contextlib.suppress(OSError):  # somebody removed it
            if self._taken and self.removed:
                _remove(self.folder)
            elif self._taken and (owner := read_owner(file.fileno())):
                write_owner(file.fileno(), {**owner, "pid": None})


def _in_use(name: str, lock: int, path: str) -> BlockingIOError:
    pid = (read_owner(lock) or {}).get("pid")
    return BlockingIOError(errno.EWOULDBLOCK, f"the session {name!r} is in use by process {pid}", path)


def _hash(name: str, size: int) -> str:
    return hashlib.blake2b(name.encode(errors="surrogatepass"), digest_size=size).hexdigest()


def _require_ours(path: str) -> None:
    """Raises PermissionError unless this user owns the folder and nobody else may write to it."""
    status = os.lstat(path)
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid() or stat.S_IMODE(status.st_mode) & 0o022:
        mount = path
        while not os.path.ismount(mount):
            mount = os.path.dirname(mount)
        raise PermissionError(
            errno.EPERM,
            f"is not a folder that this user owns and nobody else may write to: {stat.filemode(status.st_mode)}, user "
            f"{status.st_uid} (if {mount} shows the same for everything, mount it with umask=077,uid={os.geteuid()})",
            path,
        )


def _remove_abandoned(parent: str) -> None:
    """Removes sessions in ``parent`` whose processes are gone, except kept ones."""
    for path in hidden(parent, _FOLDER):
        with contextlib.suppress(OSError):
            _remove_if_abandoned(path)


@contextlib.contextmanager
def _looking(path: str) -> Iterator[tuple[dict[str, object] | None, bool]]:
    """Locks the session at ``path`` if it is free; yields what its owner file says, and whether its owner is gone."""
    _require_ours(path)
    lock = open_owner(os.path.join(path, OWNER))
    try:
        is_free = try_lock(lock)
        owner = read_owner(lock)  # not before the lock: its process may have changed it until then
        yield owner, is_free and is_dead(owner or {}, lock)
    finally:
        unlock_and_close(lock)


def _remove_if_abandoned(path: str) -> None:
    try:
        with _looking(path) as (owner, is_abandoned):
            kept = _KEPT.fullmatch(os.path.basename(path)) and any(_files(path)) if not owner else owner.get("keep")
            if owner is not None and not kept and is_abandoned:
                _remove(path)
    except FileNotFoundError:
        os.rmdir(path)  # a process that is about to create the owner file will notice


def kept_sessions(parent: str | os.PathLike[str]) -> Iterator[tuple[str, str, bool]]:
    """Yields name and path of each kept session in ``parent`` that can be read, and whether a process has it now."""
    for path in sorted(hidden(expanded(parent), _KEPT)):
        with contextlib.suppress(OSError):
            with _looking(path) as (owner, is_abandoned):
                pass
            if owner and owner.get("keep") is True:
                yield str(owner["name"]), path, not is_abandoned


def file_of(path: str, name: str) -> str:
    """Returns the path of the file ``name`` of the session at ``path``."""
    return os.path.join(path, _hash(name, 16))


def _remove(path: str) -> None:
    """Removes the session's files, then the folder, unless it contains anything else."""
    _remove_files(path)
    if not any(entry != OWNER for entry in os.listdir(path)):
        os.unlink(os.path.join(path, OWNER))
        os.rmdir(path)


def _remove_files(path: str) -> None:
    for entry in _files(path):
        unlink(entry)


def _files(path: str) -> Iterator[str]:
    with os.scandir(path) as entries:
        yield from [
            entry.path for entry in entries if _FILE.fullmatch(entry.name) and entry.is_file(follow_symlinks=False)
        ]
