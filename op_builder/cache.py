"""Where finished ops are kept between processes, and how several processes agree on who builds one.

An entry is a folder that appears by one ``rename``, complete or not at all. Builders take turns by ``flock``, which the
kernel gives up for a process that dies, so no lock outlives its holder. What others can write to is neither loaded nor
built in: loading an op runs it.
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
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from . import trust
from .console import warn
from .recipe import Recipe

#: Written into an entry: what it was made from. An entry without it is not one.
RECORD = "build.json"

_NO_LOCKS_HERE = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)
_NOT_OURS = (errno.ELOOP, errno.EACCES, errno.EPERM, errno.EISDIR)  # from opening a lock: not one of this user's


@dataclass(frozen=True)
class Entry:
    """One op in the cache, built or yet to be."""

    folder: Path
    name: str

    @property
    def library(self) -> Path:
        """The shared object."""
        return self.folder / f"{self.name}.so"

    @property
    def log(self) -> Path:
        """What the last failed build said; beside the entry, because a failed one is removed."""
        return self.folder.with_suffix(".log")

    def why_not_trusted(self) -> str:
        """Why others may have put there what lies there; an empty string when they cannot have, or nothing does."""
        if not os.path.lexists(self.folder):
            return ""
        return next(filter(None, map(trust.why_not, (self.folder, self.library, self.folder / RECORD))), "")

    def record(self) -> dict[str, object] | None:
        """What the op was made from; None when there is no finished build, or one that others can have put there."""
        if self.why_not_trusted():
            return None
        try:
            record = json.loads((self.folder / RECORD).read_text())
            complete = self.library.stat().st_size == record["bytes"]  # a copied or full disk may have cut it short
        except (OSError, ValueError, KeyError, TypeError):
            return None
        return record if complete else None

    def discard(self) -> None:
        """Have the next build replace this entry."""
        with contextlib.suppress(OSError):
            (self.folder / RECORD).unlink()


def default_root() -> Path:
    """The folder torch keeps its own extensions in, for this package's: needs no import of torch's slow builder.

    Links are followed, so that what was checked is what is used. Not absolute where there is no home folder.
    """
    chosen = os.environ.get("TORCH_EXTENSIONS_DIR")
    if chosen:
        return Path(os.path.realpath(Path(chosen, "nvme_ops")))
    given = os.environ.get("XDG_CACHE_HOME", "")  # to be ignored where it is relative, says its specification
    base = given if os.path.isabs(given) else os.path.expanduser("~/.cache")
    root = Path(base, "torch_extensions", "nvme_ops")
    return Path(os.path.realpath(root)) if root.is_absolute() else root


def shared_fallback_root() -> Path | None:
    """Where builds go when the home folder takes none, as in many containers: a private folder under /tmp."""
    try:
        place = os.path.realpath(tempfile.gettempdir())
    except FileNotFoundError:  # nowhere to put a temporary file
        return None
    return Path(place, f"torch_extensions_{os.geteuid()}", "nvme_ops")


def roots() -> list[Path]:
    """Where a finished op may be, best first: only folders that no other user can write to."""
    found = [] if _why_not_trusted(default_root()) else [default_root()]
    fallback = None if os.environ.get("TORCH_EXTENSIONS_DIR") else shared_fallback_root()
    if fallback is not None and _is_private(fallback.parent) and not trust.why_not(fallback):
        found.append(fallback)
    return found


def refusal() -> str:
    """Why the folder that ``TORCH_EXTENSIONS_DIR`` names is not used, with the fix; an empty string when it is."""
    problem = _why_not_trusted(default_root()) if os.environ.get("TORCH_EXTENSIONS_DIR") else ""
    return problem and (
        "ops are neither loaded from TORCH_EXTENSIONS_DIR nor built there, because others could change them: "
        f"{problem}; fix: set TORCH_EXTENSIONS_DIR to a folder that only you can write to"
    )


def left_out(name: str) -> str:
    """What to tell someone who filled the cache with the op and still lacks it: why it is not loaded, or nothing."""
    root = default_root()
    problem = _why_not_trusted(root)
    if not problem:
        entries = (Entry(folder, name) for folder in sorted(root.glob(f"{name}-*/")))
        problem = next(filter(None, (entry.why_not_trusted() for entry in entries)), "")
    return problem and f". What {root} may hold of it is not loaded, because others could have changed it: {problem}"


def writable_root() -> Path:
    """The root to build in.

    A folder named by ``TORCH_EXTENSIONS_DIR`` is used or refused. Torch's default one is replaced by a private folder
    under /tmp where it cannot be written, or others can write to it, with a warning.

    Raises:
        RuntimeError: no folder can be written, or only such as others can write to.
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
    trouble = "no folder takes temporary files" if fallback is None else _why_no_fallback(fallback)
    if fallback is None or trouble:
        raise RuntimeError(
            f"no folder for compiled ops can be written: {problem}; {trouble}. "
            "Set TORCH_EXTENSIONS_DIR to a folder that can, and that others cannot write to."
        )
    warn(f"compiled ops are kept in {fallback}, because: {problem}. TORCH_EXTENSIONS_DIR names another folder.")
    return fallback


def find(recipe: Recipe) -> Entry | None:
    """The finished build of ``recipe``, if there is one.

    Without a compiler at hand (an image that was given a filled cache), any build of the same sources for this torch,
    Python and machine serves.
    """
    for root in roots():
        entry = Entry(root / f"{recipe.name}-{recipe.key()}", recipe.name)
        if entry.record() is not None:
            return entry
        if recipe.compiler is None:
            needed = recipe.requirements().items()
            for folder in sorted(root.glob(f"{recipe.name}-*/")):
                record = Entry(folder, recipe.name).record()
                if record is not None and needed <= record.items():
                    return Entry(folder, recipe.name)
    return None


@contextlib.contextmanager
def building(entry: Entry) -> Iterator[Path | None]:
    """Hold the only right to build ``entry`` and give the folder to build in.

    Gives None when another process finished it meanwhile. The folder becomes the entry when the block ends, and is
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
        workshop.chmod(0o700)  # without one they could write to half a build
        try:
            yield workshop
            if entry.record() is None:  # else: no locks here, and another process was first
                workshop.chmod(published_mode)
                _clear(entry.folder)  # a damaged one
                _publish(workshop, entry)
        finally:
            shutil.rmtree(workshop, ignore_errors=True)


def _clear(path: Path) -> None:
    """Make the name free, also of a folder that another user filled, which only that user can empty."""
    aside = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    with contextlib.suppress(FileNotFoundError):
        path.rename(aside)
        if aside.is_dir() and not aside.is_symlink():
            shutil.rmtree(aside, ignore_errors=True)
        else:
            aside.unlink()


def _publish(workshop: Path, entry: Entry) -> None:
    try:
        workshop.rename(entry.folder)
    except OSError:
        if entry.record() is None:  # else another process published in this very moment
            raise


def seal(folder: Path, recipe: Recipe) -> None:
    """Record in ``folder`` what its op was made from: the last thing a build does."""
    library = Entry(folder, recipe.name).library
    record = {**recipe.facts(), "bytes": library.stat().st_size}
    (folder / RECORD).write_text(json.dumps(record, indent=1, sort_keys=True) + "\n")
    for path in folder.iterdir():  # without a umask, what we make could not be trusted
        path.chmod(stat.S_IMODE(path.stat().st_mode) & ~0o022)


@contextlib.contextmanager
def _exclusive(path: Path) -> Iterator[bool]:
    """Hold a lock on ``path``; gives False on a file system without locks, where two builds may run side by side."""
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
    """A lock that no other user can take. What another put there before is replaced: the folder is ours by now."""
    for attempts_left in reversed(range(5)):  # a process that does the same may come between
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
    """Why nothing can be built in ``root``, which is made; an empty string when it can."""
    return _why_not_trusted(root) or _why_not_writable(root) or trust.why_not(root)  # now it is there


def _why_not_writable(root: Path) -> str:
    """The system's words for why a file cannot be made in ``root``; an empty string when one can."""
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
