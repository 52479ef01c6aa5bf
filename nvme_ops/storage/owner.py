"""The file ``owner`` in a session's folder: locked by the process that has the session, it says whose that is."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import time
from pathlib import Path

OWNER = "owner"
MAGIC = "nvme_ops session"
_BEGINNING = 86400  # seconds in which a session without an owner's words may still be one that begins


def open_owner(path: str, create: bool = False) -> int:
    """A descriptor of it. Raises OSError for a link, and FileNotFoundError."""
    return os.open(
        path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC | (os.O_CREAT if create else 0), 0o600
    )


def read_owner(fd: int) -> dict[str, object] | None:
    """What it says, nothing of a session that begins; None where it is no session's."""
    content = os.pread(fd, os.fstat(fd).st_size, 0)
    if not content:
        return {}
    with contextlib.suppress(ValueError):
        found = json.loads(content)
        if isinstance(found, dict) and found.get("magic") == MAGIC:
            return found
    return None


def write_owner(fd: int, owner: dict[str, object]) -> None:
    """Writes in one step: who is killed at any point leaves what was there before, or this."""
    content = json.dumps(owner).encode()
    content = content.ljust(os.fstat(fd).st_size)
    if os.pwrite(fd, content, 0) != len(content):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), OWNER)


def take_lock(fd: int, patient: bool = False) -> bool:
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


def is_dead(owner: dict[str, object], lock: int) -> bool:
    """Where there are locks, to have one is enough; elsewhere the process must be gone, or the machine restarted."""
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
        os.kill(pid if isinstance(pid, int) else 0, 0)
    except ProcessLookupError:
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
    """Another one after each start of the machine."""
    with contextlib.suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return ""


def machine_id() -> str:
    """The machine's own, where it has one, else its name."""
    with contextlib.suppress(OSError):
        return Path("/etc/machine-id").read_text().strip()
    return os.uname().nodename
