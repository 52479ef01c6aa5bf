"""Memory cgroups for single processes of a benchmark, where this user may make them."""

from __future__ import annotations

import contextlib
import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from nvme_ops.measuring.files import NotUsable

_PREFIX = "nvme_ops-benchmark-"
_PATIENCE = 10.0  # seconds for a process to end
_STALE = 60.0  # seconds from which on a group without processes is nobody's


@contextlib.contextmanager
def limited(nbytes: int) -> Iterator[str]:
    """Yields a group's file ``cgroup.procs``, of so many bytes, page cache included; "" where none can be made."""
    place = _group(nbytes)
    try:
        yield str(place / "cgroup.procs") if place else ""
    finally:
        end = time.monotonic() + _PATIENCE
        while place:
            try:
                os.rmdir(place)
                break
            except OSError:  # its process has not quite ended
                if time.monotonic() > end:
                    raise NotUsable(f"{place} cannot be removed") from None
                time.sleep(0.05)


def limited_here() -> bool:
    """Returns whether such a group can be made."""
    with limited(1 << 30) as group:
        return bool(group)


def _group(limit: int) -> Path | None:
    """A new cgroup; None without root or the controller."""
    for root, file in _hierarchies():
        made = None
        for left in Path(root).glob(f"{_PREFIX}*"):  # by a run that was killed
            with contextlib.suppress(OSError):  # of one that is alive
                if time.time() - left.stat().st_mtime > _STALE:
                    left.rmdir()
        try:
            made = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=root))
            (made / file).write_text(str(limit), encoding="ascii")
            return made
        except OSError:
            if made is not None:
                with contextlib.suppress(OSError):
                    os.rmdir(made)
    return None


def _hierarchies() -> Iterator[tuple[str, str]]:
    """Where memory can be limited, and by which file of a group."""
    for line in Path("/proc/self/mounts").read_text(encoding="utf-8", errors="replace").splitlines():
        _, point, kind, options, *_ = line.split()
        if kind == "cgroup2" and os.path.exists(os.path.join(point, "cgroup.controllers")):
            yield point, "memory.max"
        elif kind == "cgroup" and "memory" in options.split(","):
            yield point, "memory.limit_in_bytes"
