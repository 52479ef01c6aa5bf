"""Keeps finished ops between processes, and lets processes agree on which one builds an op.

An entry is a folder that appears by one ``rename``, complete or not at all. Builders take turns by ``flock``, which the
kernel releases when a process dies, so no lock outlives its holder. Folders that others can write to are neither loaded
from nor built in: loading an op executes it.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import secrets
import shutil
import stat
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from . import trust
from .console import warn
from .recipe import Recipe

#: Written into an entry: what it was made from. An entry without it is not one.
RECORD = "build.json"

_NO_LOCKS_HERE = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)
_NOT_OURS = (errno.ELOOP, errno.EACCES, errno.EPERM, errno.EISDIR)  # opening a lock that is not this user's


@dataclass(frozen=True)
class Built:
    """A finished op, and what it was made from."""

    how: str  #: "prebuilt" or "cached"
    library: Path
    record: Mapping[str, object]


@dataclass(frozen=True)
class CacheEntry:
    """One op in the cache, built or yet to be."""

    folder: Path
    name: str

    @property
    def library(self) -> Path:
        """Path of the shared object."""
        return self.folder / f"{self.name}.so"

    @property
    def log(self) -> Path:
        """Path of the last failed build's output; beside the entry, because a failed one is removed."""
        return self.folder.with_suffix(".log")

    def why_not_trusted(self) -> str:
        """Returns why others may have written the entry; an empty string if they cannot have, or none exists."""
        if not os.path.lexists(self.folder):
            return ""
        return trust.why_not(self.folder, self.library, self.folder / RECORD)

    def record(self) -> dict[str, object] | None:
        """Returns what the op was made from; None without a finished build that only this user can have written."""
        if self.why_not_trusted():
            return None
        try:
            record = json.loads((self.folder / RECORD).read_text())
            complete = self.library.stat().st_size == record["bytes"]  # a copied or full disk may have cut it short
        except (OSError, ValueError, KeyError, TypeError):
            return None
        return record if complete else None

    def discard(self) -> None:
        """Makes the next build replace this entry."""
        with contextlib.suppress(OSError):
            (self.folder / RECORD).unlink()


def default_root() -> Path:
    """Returns this package's part of torch's folder for extensions, without importing torch's slow builder.

    Links are followed, so that what was checked is what is used. Not absolute if there is no home folder.
    """
    chosen = os.environ.get("TORCH_EXTENSIONS_DIR")
    if chosen:
        return Path(os.path.realpath(Path(chosen, "nvme_ops")))
    given = os.environ.get("XDG_CACHE_HOME", "")  # to be ignored where it is relative, says its specification
    base = given if os.path.isabs(given) else os.path.expanduser("~/.cache")
    root = Path(base, "torch_extensions", "nvme_ops")
    return Path(os.path.realpath(root)) if root.is_absolute() else root


def shared_fallback_root() -> Path | None:
    """Returns a private folder under /tmp, for when the home folder is not writable, as in many containers."""
    try:
        place = os.path.realpath(tempfile.gettempdir())
    except FileNotFoundError:  # no place for a temporary file
        return None
    return Path(place, f"torch_extensions_{os.geteuid()}", "nvme_ops")


def roots() -> list[Path]:
    """Returns where a finished op may be, best first: only folders that no other user can write to."""
    root = default_root()
    found = [] if _why_not_trusted(root) else [root]
    fallback = None if os.environ.get("TORCH_EXTENSIONS_DIR") else shared_fallback_root()
    if fallback is not None and _is_private(fallback.parent) and not trust.why_not(fallback):
        found.append(fallback)
    return found


def refusal() -> str:
    """Returns why the folder named by ``TORCH_EXTENSIONS_DIR`` is not used, with the fix; empty if it is used."""
    problem = _why_not_trusted(default_root()) if os.environ.get("TORCH_EXTENSIONS_DIR") else ""
    return problem and (
        "ops are neither loaded from TORCH_EXTENSIONS_DIR nor built there, because others could change them: "
        f"{problem}; fix: set TORCH_EXTENSIONS_DIR to a folder that only you can write to"
    )


def left_out(name: str) -> str:
    """Returns why an op in the cache is not loaded, for a message; empty if there is none."""
    root = default_root()
    problem = _why_not_trusted(root)
    if not problem:
        entries = (CacheEntry(folder, name) for folder in sorted(root.glob(f"{name}-*/")))
        problem = next(filter(None, (entry.why_not_trusted() for entry in entries)), "")
    return problem and f". {name} is not loaded from {root}, because others could have changed it: {problem}"


def writable_root() -> Path:
    """Returns the root to build in.

    A folder named by ``TORCH_EXTENSIONS_DIR`` is used or refused. Torch's default one is replaced by a private folder
    under /tmp where it cannot be written, or others can write to it, with a warning.

    Raises:
        RuntimeError: no folder can be written, or only folders that others can write to.
    """
    root = default_root()
    problem = _why_not_usable(root)
    if not problem:
        return root
    if os.environ.get("TORCH_EXTENSIONS_DIR"):
        raise RuntimeError(
            refusal() or f"TORCH_EXTENSIONS_DIR cannot be written: {problem}. Set it to a folder that can."
        )
    fallback = shared_fallback_root()
    trouble = "there is no folder for temporary files" if fallback is None else _why_no_fallback(fallback)
    if fallback is None or trouble:
        raise RuntimeError(
            f"no folder for compiled ops can be written: {problem}; {trouble}. "
            "Set TORCH_EXTENSIONS_DIR to a folder that can, and that others cannot write to."
        )
    warn(f"compiled ops are kept in {fallback}, because: {problem}. TORCH_EXTENSIONS_DIR names another folder.")
    return fallback


def find(recipe: Recipe) -> CacheEntry | None:
    """Returns the finished build of ``recipe``, or None.

    Without a compiler at hand (an image that was given a filled cache), any build of the same sources for this torch,
    Python and machine serves.
    """
    for root in roots():
        entry = CacheEntry(root / f"{recipe.name}-{recipe.key()}", recipe.name)
        if entry.record() is not None:
            return entry
        if recipe.compiler is None:
            needed = recipe.requirements().items()
            for folder in sorted(root.glob(f"{recipe.name}-*/")):
                record = CacheEntry(folder, recipe.name).record()
                if record is not None and needed <= record.items():
                    return CacheEntry(folder, recipe.name)
    return None


@contextlib.contextmanager
def building(entry: CacheEntry) -> Iterator[Path | None]:
    """Holds the exclusive right to build ``entry`` and yields the folder to build in.

    Yields None if another process has finished it meanwhile. The folder becomes the entry when the block ends, and is
    removed when it raises.
    """
    prefix = f".{entry.folder.name}."
    with _exclusive(entry.folder.with_suffix(".lock")) as alone:
        if alone:
            for leftover in entry.folder.parent.glob(f"{prefix}*"):  # of builds that were killed
                shutil.rmtree(leftover, ignore_errors=True)
        if entry.record() is not None:
            yield None
            return
        if problem := entry.why_not_trusted():
            warn(f"the cached {entry.name} op is built anew, because others could have changed it: {problem}")
        workshop = entry.folder.with_name(f"{prefix}{os.getpid()}-{secrets.token_hex(4)}")
        workshop.mkdir(0o755)
        published_mode = stat.S_IMODE(workshop.stat().st_mode)  # by umask, because a cache may be read by others
        workshop.chmod(0o700)  # whatever the umask, nobody else may write to an unfinished build
        try:
            yield workshop
            if entry.record() is None:  # otherwise another process was first, without locks
                workshop.chmod(published_mode)
                _clear(entry.folder)  # a damaged entry
                _publish(workshop, entry)
        finally:
            shutil.rmtree(workshop, ignore_errors=True)


def _clear(path: Path) -> None:
    """Frees the name, even if it is a folder that another user has filled, and only that user can empty."""
    aside = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    with contextlib.suppress(FileNotFoundError):
        path.rename(aside)
        if aside.is_dir() and not aside.is_symlink():
            shutil.rmtree(aside, ignore_errors=True)
        else:
            aside.unlink()


def _publish(workshop: Path, entry: CacheEntry) -> None:
    try:
        workshop.rename(entry.folder)
    except OSError:
        if entry.record() is None:  # else another process published in this very moment
            raise


def seal(folder: Path, recipe: Recipe) -> None:
    """Records in ``folder`` what its op was made from: the last step of a build."""
    library = CacheEntry(folder, recipe.name).library
    record = {**recipe.facts(), "bytes": library.stat().st_size}
    (folder / RECORD).write_text(json.dumps(record, indent=1, sort_keys=True) + "\n")
    for path in folder.iterdir():  # files made with a lax umask would not be trusted
        path.chmod(stat.S_IMODE(path.stat().st_mode) & ~0o022)
        with open(path, "rb") as file:  # a power failure may leave the right size without the bytes
            os.fsync(file.fileno())


@contextlib.contextmanager
def _exclusive(path: Path) -> Iterator[bool]:
    """Holds a lock on ``path``; yields False on a file system without locks, where two builds may run concurrently."""
    descriptor = _open_lock(path)
    locked = True
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        except OSError as error:
            if error.errno not in _NO_LOCKS_HERE:
                raise
            locked = False
        yield locked
    finally:
        if locked:
            fcntl.flock(descriptor, fcntl.LOCK_UN)  # closing is not enough where a child forked meanwhile has it open
        os.close(descriptor)


def _open_lock(path: Path) -> int:
    """Opens a lock file that no other user can lock, replacing one that another user put there."""
    for attempts_left in reversed(range(5)):  # another process may do the same at the same time
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        except OSError as error:
            if error.errno not in _NOT_OURS or not attempts_left:
                raise
        else:
            facts = os.fstat(descriptor)
            if stat.S_ISREG(facts.st_mode) and facts.st_uid == os.geteuid():
                os.fchmod(descriptor, 0o600)
                return descriptor
            os.close(descriptor)
        _clear(path)
    raise RuntimeError(f"{path} is another user's, and comes back when it is removed")


def _why_not_trusted(root: Path) -> str:
    if not root.is_absolute():  # no HOME and no entry in the password file
        return f"{root} is not an absolute path"
    return trust.why_not(root)


def _why_not_usable(root: Path) -> str:
    """Returns why nothing can be built in ``root``, which is made; an empty string if it can."""
    return _why_not_trusted(root) or _why_not_writable(root) or trust.why_not(root)  # now it is there


def _why_not_writable(root: Path) -> str:
    """Returns the system's reason why a file cannot be made in ``root``; an empty string if one can."""
    try:
        trust.make_folder(root)
        with tempfile.TemporaryFile(dir=root):
            return ""
    except OSError as error:
        return str(error)


def _why_no_fallback(fallback: Path) -> str:
    with contextlib.suppress(OSError):
        fallback.parent.mkdir(mode=0o700)
    return _why_not_usable(fallback) if _is_private(fallback.parent) else f"{fallback.parent} is not private"


def _is_private(folder: Path) -> bool:
    try:
        facts = os.lstat(folder)
    except OSError:
        return False
    return stat.S_ISDIR(facts.st_mode) and facts.st_uid == os.geteuid() and not facts.st_mode & 0o022
