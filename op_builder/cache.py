"""Where finished ops are kept between processes, and how several processes agree on who builds one.

An entry is a folder that appears by one ``rename``, complete or not at all. Builders take turns by ``flock``, which the
kernel gives up for a process that dies, so no lock outlives its holder.
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

from .console import warn
from .recipe import Recipe

#: Written into an entry: what it was made from. An entry without it is not one.
RECORD = "build.json"

_NO_LOCKS_HERE = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)


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

    def record(self) -> dict[str, object] | None:
        """What the op was made from; None when there is no finished build."""
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
    """The folder torch keeps its own extensions in, for this package's: needs no import of torch's slow builder."""
    chosen = os.environ.get("TORCH_EXTENSIONS_DIR")
    if chosen:
        return Path(os.path.abspath(chosen), "nvme_ops")
    return Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "torch_extensions", "nvme_ops")


def shared_fallback_root() -> Path:
    """Where builds go when the home folder takes none, as in many containers: a private folder under /tmp."""
    return Path(tempfile.gettempdir(), f"torch_extensions_{os.geteuid()}", "nvme_ops")


def roots() -> list[Path]:
    """Where a finished op may be, best first. Only a folder that no other user can write to is trusted."""
    found = [default_root()]
    if not os.environ.get("TORCH_EXTENSIONS_DIR") and _is_private(shared_fallback_root().parent):
        found.append(shared_fallback_root())
    return found


def writable_root() -> Path:
    """The root to build in.

    A folder named by ``TORCH_EXTENSIONS_DIR`` is used or refused. Torch's default one is replaced by a private folder
    under /tmp where it cannot be written, with a warning.

    Raises:
        RuntimeError: no folder can be written.
    """
    root = default_root()
    problem = _why_not_writable(root)
    if not problem:
        return root
    if os.environ.get("TORCH_EXTENSIONS_DIR"):
        raise RuntimeError(f"TORCH_EXTENSIONS_DIR cannot be written: {problem}. Set it to a folder that can.")
    fallback = shared_fallback_root()
    with contextlib.suppress(OSError):
        fallback.parent.mkdir(mode=0o700)
    trouble = _why_not_writable(fallback) if _is_private(fallback.parent) else f"{fallback.parent} is not private"
    if trouble:
        raise RuntimeError(
            f"no folder for compiled ops can be written: {problem}; {trouble}. "
            "Set TORCH_EXTENSIONS_DIR to a folder that can."
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
        workshop = entry.folder.with_name(f"{prefix}{os.getpid()}-{secrets.token_hex(4)}")
        workshop.mkdir()  # by umask, not private as tempfile's: a cache may be shared
        try:
            yield workshop
            if entry.record() is None:  # else: no locks here, and another process was first
                shutil.rmtree(entry.folder, ignore_errors=True)  # a damaged one
                _publish(workshop, entry)
        finally:
            shutil.rmtree(workshop, ignore_errors=True)


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


@contextlib.contextmanager
def _exclusive(path: Path) -> Iterator[bool]:
    """Hold a lock on ``path``; gives False on a file system without locks, where two builds may run side by side."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
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


def _why_not_writable(root: Path) -> str:
    """The system's words for why a file cannot be made in ``root``; an empty string when one can."""
    if not root.is_absolute():  # no HOME and no entry in the password file
        return f"{root} is not an absolute path"
    try:
        root.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=root):
            return ""
    except OSError as error:
        return str(error)


def _is_private(folder: Path) -> bool:
    try:
        facts = os.lstat(folder)
    except OSError:
        return False
    return stat.S_ISDIR(facts.st_mode) and facts.st_uid == os.geteuid() and not facts.st_mode & 0o022
