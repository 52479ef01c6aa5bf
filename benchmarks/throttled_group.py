"""A cgroup whose processes are limited in what they read from and write to a device: either version of cgroups."""

from __future__ import annotations

import contextlib
import os
import signal
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from nvme_ops.bench.files import NotUsable

_PATIENCE = 10.0  # seconds for processes to end


@dataclass(frozen=True)
class Group:
    """A cgroup, and where it holds its limits."""

    path: Path
    version: int

    @property
    def processes(self) -> Path:
        """The file that lists its processes."""
        return self.path / "cgroup.procs"

    def limit(self, device: str, rate: int | None) -> None:
        """Bytes per second to and from the device MAJOR:MINOR, each; None: no limit."""
        if self.version == 2:
            words = "max" if rate is None else str(rate)
            _write(self.path / "io.max", f"{device} rbps={words} wbps={words}")
        else:
            for direction in ("read", "write"):
                _write(self.path / f"blkio.throttle.{direction}_bps_device", f"{device} {rate or 0}")


def join(processes: str) -> None:
    """Puts this process into the cgroup of that file ``cgroup.procs``."""
    Path(processes).write_text("0", encoding="ascii")  # 0 is the one that writes


def make_group(stack: contextlib.ExitStack) -> Group:
    """A new one without limits; at the end of ``stack`` it is removed. Needs root."""
    root, version = controller(Path("/proc/self/mounts").read_text(encoding="utf-8", errors="replace"))
    try:
        if version == 2:
            _hand_down(stack, root / "cgroup.subtree_control")
        group = Group(Path(tempfile.mkdtemp(prefix="nvme_ops-throttled-", dir=root)), version)
    except OSError as error:
        raise NotUsable(f"no cgroup to throttle in: {error.filename or root}: {error.strerror}") from error
    stack.callback(_remove, group)
    return group


def _hand_down(stack: contextlib.ExitStack, control: Path) -> None:
    """Lets children of the group limit I/O."""
    if "io" not in control.read_text(encoding="ascii").split():
        control.write_text("+io", encoding="ascii")
        stack.callback(control.write_text, "-io", encoding="ascii")


def controller(mounts: str) -> tuple[Path, int]:
    """The hierarchy in which I/O can be limited, and its version. ``mounts``: the text of /proc/self/mounts."""
    first: tuple[Path, int] | None = None
    for line in mounts.splitlines():
        _, point, kind, options, *_ = line.split()
        if kind == "cgroup2":
            known = Path(point, "cgroup.controllers")
            if known.exists() and "io" in known.read_text(encoding="ascii").split():
                return Path(point), 2
        elif kind == "cgroup" and "blkio" in options.split(","):
            first = Path(point), 1
    if first is None:
        raise NotUsable("no cgroup can limit I/O here: neither version 2 with its controller io nor version 1's blkio")
    return first


def end_processes(group: Group) -> None:
    """Kills them; this one, if it is among them, leaves."""
    end = time.monotonic() + _PATIENCE
    while listed := group.processes.read_text(encoding="ascii").split():
        for process in listed:
            with contextlib.suppress(ProcessLookupError):
                if int(process) != os.getpid():
                    os.kill(int(process), signal.SIGKILL)
        if str(os.getpid()) in listed:
            join(str(group.path.parent / "cgroup.procs"))
        if time.monotonic() > end:
            return
        time.sleep(0.02)


def _remove(group: Group) -> None:
    end = time.monotonic() + _PATIENCE
    while True:
        try:
            os.rmdir(group.path)
        except OSError:  # a process in it has not quite ended
            if time.monotonic() > end:
                raise
            time.sleep(0.02)
        else:
            return


def _write(file: Path, words: str) -> None:
    try:
        file.write_text(words, encoding="ascii")
    except OSError as error:
        raise NotUsable(f"the limit cannot be set: {file}: {error.strerror}") from error
