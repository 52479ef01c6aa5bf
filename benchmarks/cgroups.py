"""Control groups that limit a benchmark's processes: their memory, or the rate of devices."""

from __future__ import annotations

import contextlib
import os
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from nvme_ops.measure.files import NotUsable

PREFIX = "nvme_ops-benchmark-"
_PATIENCE = 10.0  # seconds for a process to end
_STALE = 60.0  # seconds after which a group without processes counts as abandoned
_VERSION_1 = {"memory": "memory", "io": "blkio"}  # names of the controllers there


@dataclass(frozen=True)
class Group:
    """A control group, and the version of its hierarchy, which decides where limits are written."""

    path: Path
    version: int

    @property
    def processes(self) -> str:
        """The file that lists its processes."""
        return str(self.path / "cgroup.procs")

    def limit_memory(self, nbytes: int) -> None:
        """Limits memory, page cache included."""
        self._write("memory.max" if self.version == 2 else "memory.limit_in_bytes", str(nbytes))

    def limit_device(self, device: str, rate: int | None) -> None:
        """Limits bytes per second to and from the device MAJOR:MINOR, each; None: no limit."""
        if self.version == 2:
            words = "max" if rate is None else str(rate)
            self._write("io.max", f"{device} rbps={words} wbps={words}")
        else:
            for direction in ("read", "write"):
                self._write(f"blkio.throttle.{direction}_bps_device", f"{device} {rate or 0}")

    def _write(self, name: str, words: str) -> None:
        try:
            (self.path / name).write_text(words, encoding="ascii")
        except OSError as error:
            raise NotUsable(f"the limit cannot be set: {self.path / name}: {error.strerror}") from error


def join(processes: str) -> None:
    """Puts this process, and the children and threads that it starts, into the group of a file ``cgroup.procs``."""
    Path(processes).write_text("0", encoding="ascii")  # 0 is the writing process


def hierarchy(controller: str, mounts: str) -> tuple[Path, int]:
    """Returns where ``memory`` or ``io`` can be limited, and the version. ``mounts``: the text of /proc/self/mounts."""
    found = {}
    for line in mounts.splitlines():
        _, point, kind, options, *_ = line.split()
        known = Path(point, "cgroup.controllers")
        if kind == "cgroup2" and known.exists() and controller in known.read_text(encoding="ascii").split():
            found[2] = Path(point)
        elif kind == "cgroup" and _VERSION_1[controller] in options.split(","):
            found[1] = Path(point)
    if not found:
        raise NotUsable(
            f"no cgroup can limit {controller} here: neither version 2 nor version 1 has a controller for it"
        )
    return found[max(found)], max(found)


@contextlib.contextmanager
def group(controller: str) -> Iterator[Group]:
    """Makes a group without limits, and removes it at the end. Raises NotUsable, for example without root."""
    root, version = hierarchy(controller, Path("/proc/self/mounts").read_text(encoding="utf-8", errors="replace"))
    for left in root.glob(f"{PREFIX}*") if controller == "memory" else ():  # by a run that was killed
        with contextlib.suppress(OSError):  # it is in use, or already gone
            if time.time() - left.stat().st_mtime > _STALE:
                left.rmdir()
    with contextlib.ExitStack() as stack:
        try:
            if version == 2:
                hand_down(stack, root / "cgroup.subtree_control", controller)
            made = Group(Path(tempfile.mkdtemp(prefix=PREFIX, dir=root)), version)
        except OSError as error:
            raise NotUsable(f"no cgroup can be made: {error.filename or root}: {error.strerror}") from error
        stack.callback(_remove, made)
        yield made


def hand_down(stack: contextlib.ExitStack, control: Path, controller: str) -> None:
    """Enables a controller for the children of the group."""
    if controller not in control.read_text(encoding="ascii").split():
        control.write_text(f"+{controller}", encoding="ascii")
        stack.callback(control.write_text, f"-{controller}", encoding="ascii")


def _remove(made: Group) -> None:
    end = time.monotonic() + _PATIENCE
    while True:
        try:
            return os.rmdir(made.path)
        except OSError:  # a process in it has not quite ended
            if time.monotonic() > end:
                raise NotUsable(f"{made.path} cannot be removed") from None
            time.sleep(0.02)
