"""Control groups that limit the memory of a benchmark's processes."""

from __future__ import annotations

import contextlib
import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from nvme_ops.measure.rows import Unavailable

PREFIX = "nvme_ops-benchmark-"


def hierarchy(mounts: str) -> tuple[Path, str]:
    """Returns where memory can be limited, and by which file of a group. ``mounts``: the text of /proc/self/mounts."""
    versions = {}
    for line in mounts.splitlines():
        _, point, kind, options, *_ = line.split()
        known = Path(point, "cgroup.controllers")
        if kind == "cgroup2" and known.exists() and "memory" in known.read_text(encoding="ascii").split():
            versions[2] = Path(point), "memory.max"
        elif kind == "cgroup" and "memory" in options.split(","):
            versions[1] = Path(point), "memory.limit_in_bytes"
    if not versions:
        raise Unavailable("no cgroup can limit memory here: neither version 2 nor version 1 has a controller for it")
    return versions[max(versions)]


@contextlib.contextmanager
def limited_memory(nbytes: int) -> Iterator[str]:
    """Makes a group that may have so much memory, page cache included; yields its cgroup.procs, and removes it.

    Raises Unavailable, for example without root.
    """
    root, limit = hierarchy(Path("/proc/self/mounts").read_text(encoding="utf-8", errors="replace"))
    for left in root.glob(f"{PREFIX}*"):  # by a run that was killed
        with contextlib.suppress(OSError):  # it is in use, or already gone
            if time.time() - left.stat().st_mtime > 60:  # seconds: nobody is about to join
                left.rmdir()
    with contextlib.ExitStack() as stack:
        try:
            control = root / "cgroup.subtree_control"  # enables the controller for the children of the group
            if limit == "memory.max" and "memory" not in control.read_text(encoding="ascii").split():
                control.write_text("+memory", encoding="ascii")
                stack.callback(control.write_text, "-memory", encoding="ascii")
            made = Path(tempfile.mkdtemp(prefix=PREFIX, dir=root))
            stack.callback(_remove, made)
            (made / limit).write_text(str(nbytes), encoding="ascii")
        except OSError as error:
            raise Unavailable(f"no cgroup can be made: {error.filename or root}: {error.strerror}") from error
        yield str(made / "cgroup.procs")


def _remove(made: Path) -> None:
    end = time.monotonic() + 10  # seconds for a process to end
    while True:
        try:
            return os.rmdir(made)
        except OSError:  # a process in it has not quite ended
            if time.monotonic() > end:
                raise
            time.sleep(0.02)
