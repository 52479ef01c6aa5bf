"""Finished ops, built ahead of time in the package or just in time in a cache: which one fits, and is safe to load.

A wheel has one library for each minor version of torch, because torch's C++ interface differs between them. It fits
every build of that version and every Python from 3.11 on: it is compiled against that version's headers and Python's
limited API, and not linked with torch's libraries, whose symbols it finds in the process.

In the cache an entry is a folder, complete or not there (jit.py makes them). Loading an op executes it, so none is
loaded that others could have changed.
"""

from __future__ import annotations

import contextlib
import grp
import importlib.machinery
import json
import os
import pwd
import stat
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .recipe import Recipe

#: Written beside an op: what it was made from. An entry of the cache without it is not one.
RECORD = "build.json"

#: The package that prebuilt ops are installed in.
OPS = Path(__file__).parent.parent / "ops"

#: The ``python`` of a wheel's op in its record: the oldest whose limited API has all that csrc uses.
PORTABLE_PYTHON = "abi3 of 3.11"
_SUFFIX = ".abi3.so"
#: The key that marks a wheel's op in its record: it fits more than one Python and build of torch.
MARK = "portable"


@dataclass(frozen=True)
class Built:
    """A finished op, and what it was made from."""

    how: str  #: "prebuilt" or "cached"
    library: Path
    record: Mapping[str, object]


# Built ahead of time


def find_prebuilt(name: str) -> Built | None:
    """Returns the prebuilt op ``name`` in the package, whatever it was built for; None if there is none."""
    fitting = [OPS / f"{name}{suffix}" for suffix in importlib.machinery.EXTENSION_SUFFIXES]
    others = sorted(OPS.glob(f"{name}.*.so"), reverse=True)
    if len(others) > 1:  # a wheel's, for several versions of torch
        with contextlib.suppress(ImportError):  # a missing torch is reported elsewhere
            import torch

            fitting.append(OPS / file_name(name, minor(str(torch.__version__))))
    for library in [*fitting, *others]:
        if library.is_file():
            try:
                record = json.loads(record_path(library).read_text())
            except (OSError, ValueError):
                record = {}
            return Built("prebuilt", library, record if isinstance(record, dict) else {})
    return None


def record_path(library: Path) -> Path:
    """Returns the file beside a prebuilt op that says what it was made from."""
    return library.with_name(f"{stem(library.name) or library.name.partition('.')[0]}.{RECORD}")


def mismatch(found: Built, requirements: Mapping[str, str]) -> str:
    """Returns why ``found`` must not be loaded by a process with ``requirements``; an empty string if it fits."""
    if problem := _why_not_as_safe_as_this_module(found.library):
        return problem
    if not found.record:
        return f"{record_path(found.library).name} is missing"
    if found.record.get(MARK):
        requirements = portable_requirements(requirements)
    differences = [
        f"{name}: built for {found.record.get(name)}, here {wanted}"
        for name, wanted in requirements.items()
        if found.record.get(name) != wanted
    ]
    return "; ".join("its sources changed" if text.startswith("sources:") else text for text in differences)


def _why_not_as_safe_as_this_module(library: Path) -> str:
    """Returns why ``library`` is easier for others to change than this module, which Python has executed."""
    package = os.stat(__file__)
    for path in (library.parent, library, record_path(library)):
        try:
            facts = os.stat(path)
        except OSError:  # mismatch says that the record is missing
            continue
        if facts.st_uid not in (0, os.geteuid(), package.st_uid):
            return f"{path} belongs to another user"
        if facts.st_mode & ~package.st_mode & 0o022 and (writers := writable_by_others(facts)):
            return f"{path} can be written by {writers} (fix: chmod go-w '{path}')"
    return ""


def file_name(op: str, torch_minor: str) -> str:
    """Returns the name of a wheel's library: ``async_io.torch2.13.abi3.so``."""
    return f"{op}.torch{torch_minor}{_SUFFIX}"


def stem(name: str) -> str:
    """Returns ``async_io.torch2.13`` for the name of a wheel's library; an empty string for any other name."""
    return name.removesuffix(_SUFFIX) if name.endswith(_SUFFIX) and ".torch" in name else ""


def minor(version: str) -> str:
    """Returns ``2.13`` for ``2.13.0+cpu``."""
    from packaging.version import Version  # not at the top: setup.py loads this where only setuptools may be

    return "{}.{}".format(*Version(version).release)


def portable_requirements(exact: Mapping[str, str]) -> dict[str, str]:
    """Returns what a wheel's op must match, in place of ``exact``, for an op prebuilt for one machine."""
    here = PORTABLE_PYTHON if _SUFFIX in importlib.machinery.EXTENSION_SUFFIXES else "one without abi3"
    return {
        "sources": exact["sources"],
        "torch": minor(exact["torch"]),
        "cxx11_abi": exact["cxx11_abi"],
        "machine": exact["machine"],
        "python": here,
    }


# Built just in time


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
        return why_not_trusted(self.folder, self.library, self.folder / RECORD)

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


def find_cached(recipe: Recipe) -> CacheEntry | None:
    """Returns the finished build of ``recipe``, or None.

    Without a compiler at hand (an image that was given a filled cache), any build of the same sources for this torch,
    Python and machine serves.
    """
    folder_name = f"{recipe.name}-{recipe.key()}"
    for root in roots():
        entry = CacheEntry(root / folder_name, recipe.name)
        if entry.record() is not None:
            return entry
        if recipe.compiler is None:
            needed = recipe.requirements().items()
            for folder in sorted(root.glob(f"{recipe.name}-*/")):
                record = CacheEntry(folder, recipe.name).record()
                if record is not None and needed <= record.items():
                    return CacheEntry(folder, recipe.name)
    return None


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
    found = [] if why_not_a_root(root) else [root]
    fallback = None if os.environ.get("TORCH_EXTENSIONS_DIR") else shared_fallback_root()
    if fallback is not None and is_private(fallback.parent) and not why_not_trusted(fallback):
        found.append(fallback)
    return [root for root in found if not noexec(root)]


def refusal() -> str:
    """Returns why the folder named by ``TORCH_EXTENSIONS_DIR`` is not used, with the fix; empty if it is used."""
    if not os.environ.get("TORCH_EXTENSIONS_DIR"):
        return ""
    root = default_root()
    if problem := why_not_a_root(root):
        return (
            "ops are neither loaded from TORCH_EXTENSIONS_DIR nor built there, because others could change them: "
            f"{problem}; fix: set TORCH_EXTENSIONS_DIR to a folder that only you can write to"
        )
    if problem := noexec(root):
        return f"no op can be loaded from TORCH_EXTENSIONS_DIR: {problem}; fix: set it to {ELSEWHERE}"
    return ""


def left_out(name: str) -> str:
    """Returns why an op in the cache is not loaded, for a message; empty if there is none."""
    root = default_root()
    problem = why_not_a_root(root)
    if not problem:
        entries = (CacheEntry(folder, name) for folder in sorted(root.glob(f"{name}-*/")))
        problem = next(filter(None, (entry.why_not_trusted() for entry in entries)), "")
    return problem and f". {name} is not loaded from {root}, because others could have changed it: {problem}"


def why_not_a_root(root: Path) -> str:
    """Returns why ops in ``root`` are not trusted; an empty string if they are."""
    if not root.is_absolute():  # no HOME and no entry in the password file
        return f"{root} is not an absolute path"
    return why_not_trusted(root)


#: The way out of a file system that is mounted noexec, as those in memory of a container are by default.
ELSEWHERE = "a folder that is not, or mount that one with exec (in a container: --tmpfs /ops:exec)"


def noexec(path: Path) -> str:
    """Returns that no op can be loaded from ``path``, which need not exist, for its mount; empty if one can."""
    for place in (path, *path.parents):
        with contextlib.suppress(OSError):
            return (
                f"{place} is on a file system that is mounted noexec" if os.statvfs(place).f_flag & os.ST_NOEXEC else ""
            )
    return ""


def is_private(folder: Path) -> bool:
    """Returns whether ``folder`` is this user's, and nobody else can write to it."""
    try:
        facts = os.lstat(folder)
    except OSError:
        return False
    return stat.S_ISDIR(facts.st_mode) and facts.st_uid == os.geteuid() and not facts.st_mode & 0o022


# Whether a path is safe to load from: only this user and root can decide what is there. A folder that others can write
# to is not safe, nor is one below a folder that they can rename. Checks owners and modes only (POSIX access control
# lists show in the group's bits).


def why_not_trusted(*paths: Path) -> str:
    """Returns why others may decide what is at one of ``paths``; an empty string if only this user and root can.

    Links are followed first, so use ``os.path.realpath`` of a path from then on. For one that does not exist yet the
    folders above count. They may be sticky, like /tmp, in which others cannot rename what is not theirs.
    """
    real = list(map(Path, map(os.path.realpath, paths)))
    for place in dict.fromkeys([place for each in real for place in (each, *each.parents)]):
        try:
            facts = os.lstat(place)
        except (FileNotFoundError, NotADirectoryError):
            continue
        except OSError as error:
            return str(error)
        above = place not in real
        if facts.st_uid not in (0, os.geteuid()) and not (above and facts.st_uid == _owner_of_the_unmapped()):
            return f"{place} belongs to {_user(facts.st_uid)}"
        if above and facts.st_mode & stat.S_ISVTX:
            continue
        if facts.st_mode & 0o022 and (loose := writable_by_others(facts)):
            return f"{place} can be written by {loose} (fix: chmod go-w '{place}')"
    return ""


def writable_by_others(facts: os.stat_result) -> str:
    """Returns who may write besides the owner; empty if nobody. A group with no other member does not count.

    Many systems give every user such a group and the umask 002. OpenSSH on Debian has the same rule
    (user-group-modes.patch).
    """
    if facts.st_mode & stat.S_IWOTH:
        return "everybody"
    if facts.st_mode & stat.S_IWGRP and not _is_private_group(facts.st_gid, facts.st_uid):
        return f"the group {_group(facts.st_gid)}"
    return ""


def make_folder(path: Path, mode: int = 0o755) -> None:
    """Makes a folder like ``mkdir -p``, writable by nobody else, whatever the umask."""
    if not path.is_dir():
        make_folder(path.parent)
        with contextlib.suppress(FileExistsError):
            path.mkdir(mode)


def replace_file(path: Path) -> int:
    """Opens the new file ``path`` for writing, not writable by others, and never through a link put there."""
    with contextlib.suppress(FileNotFoundError):
        path.unlink()
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)


def _is_private_group(group: int, owner: int) -> bool:
    try:
        name, entry = pwd.getpwuid(owner).pw_name, grp.getgrgid(group)
    except KeyError:
        return False
    owners = {user.pw_uid for user in pwd.getpwall() if user.pw_gid == group}
    listed = bool(owners) or entry.gr_name == name  # many user directories do not support listing
    return listed and owners <= {owner} and set(entry.gr_mem) <= {name}


def _owner_of_the_unmapped() -> int | None:
    """Returns the apparent owner of files whose owner is unmapped in this user namespace; None if all are mapped.

    In rootless containers (Apptainer) that includes root: / and /home belong to nobody there.
    """
    try:
        if Path("/proc/self/uid_map").read_text().split() == ["0", "0", str(2**32 - 1)]:
            return None
        return int(Path("/proc/sys/kernel/overflowuid").read_text())
    except (OSError, ValueError):
        return None


def _user(number: int) -> str:
    try:
        return f"the user {pwd.getpwuid(number).pw_name}"
    except KeyError:
        return f"the user with the number {number}"


def _group(number: int) -> str:
    try:
        return grp.getgrgid(number).gr_name
    except KeyError:
        return str(number)
