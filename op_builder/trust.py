"""What makes a finished op safe to load: only this user and root can decide what is there, and the system executes it.

A folder that others can write to is not safe, nor is one below a folder that they can rename. Checks owners and modes
only (POSIX access control lists show in the group's bits).
"""

from __future__ import annotations

import contextlib
import grp
import os
import pwd
import stat
import tempfile
from pathlib import Path


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
    usable = [] if why_not_a_root(root) else [root]
    fallback = None if os.environ.get("TORCH_EXTENSIONS_DIR") else shared_fallback_root()
    if fallback is not None and is_private(fallback.parent) and not why_not_trusted(fallback):
        usable.append(fallback)
    return [root for root in usable if not noexec(root)]


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


def why_not_trusted(*paths: Path) -> str:
    """Returns why others may decide what is at one of ``paths``; an empty string if only this user and root can.

    Links are followed first, so use ``os.path.realpath`` of a path from then on. For one that does not exist yet the
    folders above count. They may be sticky, like /tmp, in which others cannot rename what is not theirs.
    """
    real = list(map(Path, map(os.path.realpath, paths)))
    for place in dict.fromkeys([place for path in real for place in (path, *path.parents)]):
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
