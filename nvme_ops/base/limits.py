"""Finds how much more memory a process can have, on the machine and within its cgroups."""

from __future__ import annotations

import contextlib
import resource
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

from nvme_ops.base.text import bytes_of, size_words

#: For each version of cgroups: the files with limits and with the bytes in use, and the line of ``memory.stat`` with
#: the bytes that the kernel reclaims first (Documentation/admin-guide: cgroup-v2.rst and cgroup-v1/memory.rst).
_FILES = {
    "cgroup2": (("memory.max", "memory.high"), "memory.current", "inactive_file"),
    "cgroup": (("memory.limit_in_bytes",), "memory.usage_in_bytes", "total_inactive_file"),
}


def free_memory(root: Path = Path("/")) -> int:
    """Returns the bytes that this process can still allocate before the kernel refuses, or kills it.

    That is the least of what the machine has (``MemAvailable``) and what the limits of the process's cgroup and its
    ancestors leave, in cgroup v1 and v2. Limits that cannot be read are ignored.

    Args:
        root: prefix of every path that is read.
    """
    lines = _lines(root / "proc/meminfo")
    machine = next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable")), 0)
    return min([machine, *_left_in_cgroups(root)])


_IPC_LOCK = 1 << 14  # CAP_IPC_LOCK, with which RLIMIT_MEMLOCK does not hold (capabilities(7))


def lockable_memory(root: Path = Path("/")) -> int:
    """Returns the bytes that this process may have locked at once, by RLIMIT_MEMLOCK; ``sys.maxsize`` without limit."""
    limit = resource.RLIM_INFINITY
    with contextlib.suppress(OSError):  # where nobody may ask, locking itself says how much may be locked
        limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    words = next((line.split()[1] for line in _lines(root / "proc/self/status") if line.startswith("CapEff:")), "0")
    return sys.maxsize if limit == resource.RLIM_INFINITY or int(words, 16) & _IPC_LOCK else limit


def _left_in_cgroups(root: Path) -> Iterator[int]:
    for kind, top, folder in _cgroups(root):
        limits, usage, spare = _FILES[kind]
        for group in (folder, *folder.parents):
            for name in limits:
                limit = _number(group / name)
                if limit is not None:
                    yield max(0, limit - (_number(group / usage) or 0) + _stat(group / "memory.stat", spare))
            if group == top:
                break


def _cgroups(root: Path) -> Iterator[tuple[str, Path, Path]]:
    """Yields, for each hierarchy that can limit memory, its version, its mount and this process's folder in it."""
    own = (line.split(":", 2) for line in _lines(root / "proc/self/cgroup"))
    paths = {name: path for _, controllers, path in own for name in controllers.split(",")}  # v2: no controller, ""
    for line in _lines(root / "proc/self/mountinfo"):
        before, _, after = line.partition(" - ")
        words, (kind, *_) = before.split(), [*after.split(), ""]
        controllers = set(after.split()[-1].split(",")) if kind == "cgroup" else set()
        key = "" if kind == "cgroup2" else "memory" if "memory" in controllers else None
        if kind not in _FILES or key not in paths:
            continue
        # A container sees part of the hierarchy: words[3] is where its mount begins in the machine's.
        shown, group = PurePosixPath(words[3]), PurePosixPath(paths[key])
        top = root / words[4].lstrip("/")
        yield kind, top, top / group.relative_to(shown) if group.is_relative_to(shown) else top


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    except OSError:
        return []


def _number(path: Path) -> int | None:
    """Returns the number in a file, or None (``max`` is no number)."""
    lines = _lines(path)
    return int(lines[0]) if lines and lines[0].isdigit() else None


def _stat(path: Path, name: str) -> int:
    return next((int(line.split()[1]) for line in _lines(path) if line.startswith(f"{name} ")), 0)


def less_an_eighth(free: int) -> int:
    """Returns what "auto" takes of what is free: the rest of the program needs memory, too."""
    return free * 7 // 8


def host_bytes(host_budget: int | str | None, there: int = 0) -> int:
    """Returns the bytes of host memory that may be page-locked for an accelerator; less than asked for is said.

    ``"auto"``, and None, is what is free less an eighth, and what is ``there`` already, in memory that others share.
    """
    free, locked = less_an_eighth(free_memory()) + there, lockable_memory()
    limit = min(free, locked)
    if host_budget is None or host_budget == "auto":
        return limit
    nbytes = bytes_of("host_budget", host_budget, least=0)
    if nbytes > limit:
        why, fix = f"{size_words(free)} are free", "give less"
        if locked < free:
            why, fix = f"the limit of locked memory is {size_words(locked)}", "ulimit -l unlimited"
        warnings.warn(
            f"host_budget is {size_words(nbytes)}, but {why}: {size_words(limit)} are used (fix: {fix})", stacklevel=3
        )
    return min(nbytes, limit)
