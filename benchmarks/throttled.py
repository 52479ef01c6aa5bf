"""Block devices of a fixed rate, made of memory: they stand in for SSDs, so that scaling shows on one machine.

Each is a file in /dev/shm under a loop device with ext4. The kernel limits the processes of one cgroup on each of
them (``io.max`` of version 2, ``blkio.throttle`` of version 1), reads and writes apart; what kernel threads write back
is not limited. It gives out a rate in slices of a tenth of a second: powers of two are kept within 1 %, others may
begin with a slice too much; who begins within the slice of the one before gets the pause as well.

Also a command, which limits another one::

    python benchmarks/throttled.py --devices 4 --rate 256M --size 600M -- ls {folder}
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))  # so that it runs from anywhere, uninstalled too

from nvme_ops.arguments import positive, size
from nvme_ops.limits import free_memory
from nvme_ops.measuring import stop
from nvme_ops.measuring.files import NotUsable
from nvme_ops.text import MIB, size_words

MEMORY = "/dev/shm"
LEAST_SIZE = 16 * MIB
MOST_DEVICES = 64
FOLDERS = "THROTTLED_FOLDERS"  # for the command: joined by colons
_PATIENCE = 10.0  # seconds for processes to end
_TOOLS = ("losetup", "mkfs.ext4", "mount", "umount")


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
    """Puts this process, and its children and threads from now on, into the cgroup of that file ``cgroup.procs``."""
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
    found = {}
    for line in mounts.splitlines():
        _, point, kind, options, *_ = line.split()
        known = Path(point, "cgroup.controllers")
        if kind == "cgroup2" and known.exists() and "io" in known.read_text(encoding="ascii").split():
            found[2] = Path(point)
        elif kind == "cgroup" and "blkio" in options.split(","):
            found[1] = Path(point)
    if not found:
        raise NotUsable("no cgroup can limit I/O here: neither version 2 with its controller io nor version 1's blkio")
    return found[max(found)], max(found)


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
            return os.rmdir(group.path)
        except OSError:  # a process in it has not quite ended
            if time.monotonic() > end:
                raise
            time.sleep(0.02)


def _write(file: Path, words: str) -> None:
    try:
        file.write_text(words, encoding="ascii")
    except OSError as error:
        raise NotUsable(f"the limit cannot be set: {file}: {error.strerror}") from error


@dataclass(frozen=True)
class Devices:
    """Mounted file systems, one on each device."""

    folders: list[str]
    rate: int  # bytes per second
    group: Group
    numbers: list[str]

    @contextlib.contextmanager
    def unlimited(self) -> Iterator[None]:
        """Lifts the limits, for what is not measured."""
        try:
            for number in self.numbers:
                self.group.limit(number, None)
            yield
        finally:
            for number in self.numbers:
                self.group.limit(number, self.rate)


@contextlib.contextmanager
def throttled(count: int, rate: int, size: int) -> Iterator[Devices]:
    """So many devices of ``size`` bytes that read and write ``rate`` bytes per second, each.

    They are gone at the end, whatever happened in between, and with them every process that is still in their cgroup.
    Signals that come while they are made or taken down act afterwards.

    Raises:
        NotUsable: root, loop devices, a tool, memory or the cgroup's controller is missing; it says which.
    """
    _require(count * size)
    with contextlib.ExitStack() as stack:
        try:
            with stop.deferred():
                group = make_group(stack)
                place = tempfile.mkdtemp(prefix="nvme_ops-throttled-")
                stack.callback(os.rmdir, place)
                made = [_make_device(stack, os.path.join(place, str(number)), size) for number in range(count)]
                for _, number in made:
                    group.limit(number, rate)
                stack.callback(end_processes, group)  # before anything is unmounted
                for _, number in made:
                    stack.callback(group.limit, number, None)  # lest they end at the rate of what they have begun
            yield Devices([folder for folder, _ in made], rate, group, [number for _, number in made])
        finally:
            with stop.deferred():
                stack.close()


def _require(memory: int) -> None:
    if os.geteuid() != 0:
        raise NotUsable("throttled devices need root: for loop devices, mounts and a cgroup")
    for tool in _TOOLS:
        if shutil.which(tool) is None:
            raise NotUsable(f"{tool} is not installed: apt-get install util-linux mount e2fsprogs")
    if not os.path.isdir(MEMORY):
        raise NotUsable(f"{MEMORY} does not exist: mount -t tmpfs tmpfs {MEMORY}")
    free = min(shutil.disk_usage(MEMORY).free, free_memory())
    if free < memory:
        raise NotUsable(
            f"{MEMORY}: {size_words(memory)} of memory are needed and there are {size_words(free)}; "
            "choose fewer or smaller devices"
        )


def _make_device(stack: contextlib.ExitStack, folder: str, size: int) -> tuple[str, str]:
    """The folder in which it is mounted, and the device's MAJOR:MINOR."""
    descriptor, image = tempfile.mkstemp(prefix="nvme_ops-throttled-", suffix=".img", dir=MEMORY)
    stack.callback(os.unlink, image)
    try:
        os.posix_fallocate(descriptor, 0, size)  # all pages now, or the first write would be slower
    except OSError as error:
        raise NotUsable(f"{MEMORY}: {error.strerror}; choose fewer or smaller devices") from error
    finally:
        os.close(descriptor)
    device = _run("losetup", "--find", "--show", image)
    stack.callback(_run, "losetup", "--detach", device)
    # no journal, which kernel threads would write, no reserve, and no inodes beyond what benchmarks need
    _run("mkfs.ext4", "-q", "-F", "-m", "0", "-b", "4096", "-N", "256", "-O", "^has_journal", "-E", "nodiscard", device)
    os.mkdir(folder)
    stack.callback(os.rmdir, folder)
    _run("mount", "-o", "nodiscard", device, folder)
    stack.callback(_unmount, folder)
    return folder, Path("/sys/block", os.path.basename(device), "dev").read_text(encoding="ascii").strip()


def _unmount(folder: str) -> None:
    try:
        _run("umount", folder)
    except NotUsable:  # someone's working folder or open file
        _run("umount", "--lazy", folder)


def _run(*words: str) -> str:
    # in a session of its own: Ctrl-C on the terminal does not stop it halfway
    done = subprocess.run(words, stdin=subprocess.DEVNULL, capture_output=True, text=True, start_new_session=True)
    if done.returncode:
        said = (done.stderr.strip() or f"exit status {done.returncode}").splitlines()[0]
        raise NotUsable(said if said.startswith(words[0]) else f"{words[0]}: {said}")
    return done.stdout.strip()


def arguments(words: Sequence[str] | None) -> argparse.Namespace:
    """Exits with status 2 on wrong ones."""
    parser = argparse.ArgumentParser(
        description="Runs a command on block devices of a fixed rate, which are made for it in memory.",
        epilog="in COMMAND a word with {folder} is given once for each device, and {number} in it is its number: "
        f"--folder_to_device_mapping {{folder}}:{{number}}; {{folders}} is {{folder}}. The environment's {FOLDERS} has "
        "all folders, joined by colons. Exit status: the command's; 1 where such devices cannot be made; 2 for wrong "
        "arguments.",
    )
    parser.add_argument("--devices", type=positive, default=4, metavar="N", help="how many (default 4)")
    parser.add_argument("--rate", type=size, default="256M", help="of each, bytes per second, reads and writes apart")
    parser.add_argument("--size", type=size, default="1200M", help="of each (default 1200M)")
    parser.add_argument("command", nargs="+", metavar="COMMAND", help="what to run, after --")
    given = parser.parse_args(words)
    if given.devices > MOST_DEVICES:
        parser.error(f"--devices: at most {MOST_DEVICES}")
    if given.size < LEAST_SIZE:
        parser.error(f"--size: at least {size_words(LEAST_SIZE)}")
    return given


def with_folders(words: Sequence[str], folders: Sequence[str]) -> list[str]:
    """A word that has ``{folder}`` in it once for each folder, and ``{number}`` in it the folder's number."""
    made = []
    for word in (word.replace("{folders}", "{folder}") for word in words):
        each = [
            word.replace("{folder}", place).replace("{number}", str(number)) for number, place in enumerate(folders)
        ]
        made += each if "{folder}" in word else [word]
    return made


def _run_limited(words: Sequence[str], devices: Devices) -> int:
    environment = {**os.environ, FOLDERS: ":".join(devices.folders)}
    try:
        started = subprocess.Popen(
            with_folders(words, devices.folders),
            env=environment,
            preexec_fn=partial(join, str(devices.group.processes)),
        )
    except OSError as error:
        print(f"throttled.py: {words[0]}: {error.strerror}", file=sys.stderr)
        return 127
    with started as process:
        try:
            status = process.wait()
        except BaseException as reason:
            if not isinstance(reason, KeyboardInterrupt):  # which the terminal sent to it as well
                process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_PATIENCE)
            process.kill()
            raise
    return status if status >= 0 else 128 - status


def main(words: Sequence[str] | None = None) -> int:
    """The command's status; 1 where such devices cannot be made; 2 for wrong arguments; 130 after Ctrl-C."""
    given = arguments(words)
    stop.leave_on_signals()
    try:
        with throttled(given.devices, given.rate, given.size) as devices:
            return _run_limited(given.command, devices)
    except NotUsable as reason:
        print(f"throttled.py: {reason}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\ninterrupted; the devices are removed", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
