"""The file ``owner`` in a session's folder: says who owns the session, and is locked by that process."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import time
from pathlib import Path

from nvme_ops.durable import sync
from nvme_ops.errors import naming
from nvme_ops.settings import PAGE
from nvme_ops.text import parse_json
from nvme_ops.whole import read_whole

OWNER = "owner"
MAGIC = "nvme_ops session"
_CHANGING = ("magic", "pid", "boot", "machine")
_MOST = 1 << 20  # bytes of the file
_SECTOR = 512  # bytes that a device writes whole or not at all
_BEGINNING = 86400  # seconds for which an empty owner file may belong to a session that is starting


def open_owner(path: str, create: bool = False) -> int:
    """Opens the file ``owner``. Raises OSError for a symbolic link, FileNotFoundError where there is none."""
    return os.open(
        path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC | (os.O_CREAT if create else 0), 0o600
    )


def read_owner(fd: int) -> dict[str, object] | None:
    """Returns what the file says: an empty dict before the first write, None for any other content."""
    if os.fstat(fd).st_size > _MOST:
        return None
    content = read_whole(fd)
    if not content.strip(b"\0"):  # a power failure may leave the length without the bytes
        return {}
    with contextlib.suppress(ValueError):
        found = parse_json(content)
        if isinstance(found, dict) and found.get("magic") == MAGIC:
            return found
    return None


def write_owner(fd: int, owner: dict[str, object], durable: bool = False) -> None:
    """Overwrites the file in one ``pwrite``: a process that is killed leaves the old content or the new.

    So does a power failure: what changes from one program to the next lies in the first sector, and what the files
    belong to behind it. ``durable``: the content is on the device when this returns.
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

    Where the file system has locks, having it is enough; elsewhere the process must be gone or the machine restarted.
    """
    if _has_locks(lock):
        return True
    if not owner:
        return time.time() - os.fstat(lock).st_mtime > _BEGINNING
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


def _has_locks(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def boot_id() -> str:
    """Another one after each start of the machine, the same in all containers; empty where the kernel does not tell."""
    with contextlib.suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return ""


def machine_id() -> str:
    """Returns the id of the machine, or its host name if it has none."""
    with contextlib.suppress(OSError):
        return Path("/etc/machine-id").read_text().strip()
    return os.uname().nodename
