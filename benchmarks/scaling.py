"""Reads and writes over 1, 2, 4 devices at once: this package beside fio, and the sum of what each device does alone.

The devices are made of memory and limited to a fixed rate each, so that scaling shows on one machine: this measures
programs, not disks. ``nvme-bench --scaling`` does the same on devices that exist. Each is a file in /dev/shm under a
loop device with ext4, which the kernel limits for the processes of one cgroup, separately for reads and writes; what
kernel threads write back is not limited. The kernel grants a rate in slices of a tenth of a second: powers of two are
kept within 1 %, other rates may get a slice too many at first, and a row that begins within the previous row's slice
also gets the share of the pause.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import nvme_ops
from benchmarks import cgroups, command
from benchmarks.cgroups import Group, join
from benchmarks.command import Program, Run
from nvme_ops.arguments import size
from nvme_ops.limits import free_memory
from nvme_ops.measure import fio, machine, stop
from nvme_ops.measure.engines import Contender, Task, make_row
from nvme_ops.measure.files import NotUsable
from nvme_ops.measure.remote import Remote, joint_row
from nvme_ops.measure.rows import Row, paired_ratios, spread, summed, timed
from nvme_ops.measure.tables import ALONE, Table
from nvme_ops.settings import Settings
from nvme_ops.text import MIB, size_words

GROUPS = {"read": "reads of files that are not in the page cache", "write": "writes over existing files"}
LEAST = 0.95  # of the sum: what this package aims at
MEMORY = "/dev/shm"
PREFIX = "nvme_ops-throttled-"
_PAUSE = 0.3  # seconds: more than two slices of the kernel's
_PATIENCE = 10.0  # seconds for processes to end
_TOOLS = ("losetup", "mkfs.ext4", "mount", "umount")

FIO = "fio, a job each"
PROCESSES = "nvme_ops, a process each"
HANDLES = "nvme_ops, one process, a handle each"
HANDLE = "nvme_ops, one handle"
_SHAPE = ["--bs=1M", "--iodepth=16"]  # of every job; all their huge pages fit into what is reserved for one run


# The devices


@dataclass(frozen=True)
class Devices:
    """Mounted file systems, one on each device, by the device's MAJOR:MINOR."""

    folders: dict[str, str]
    rate: int  # bytes per second
    group: Group

    @contextlib.contextmanager
    def unlimited(self) -> Iterator[None]:
        """Lifts the limits, for what is not measured."""
        try:
            for number in self.folders:
                self.group.limit_device(number, None)
            yield
        finally:
            for number in self.folders:
                self.group.limit_device(number, self.rate)


@contextlib.contextmanager
def throttled(count: int, rate: int, size: int) -> Iterator[Devices]:
    """Makes ``count`` devices of ``size`` bytes that read and write ``rate`` bytes per second, each.

    They are removed at the end, whatever happens, and every process that is still in their cgroup is killed. Signals
    that arrive while they are made or removed take effect afterwards.

    Raises:
        NotUsable: root, loop devices, a tool, memory or the cgroup's controller is missing; it says which.
    """
    _require(count * size)
    with contextlib.ExitStack() as stack:
        try:
            with stop.deferred():
                group = stack.enter_context(cgroups.group("io"))
                place = tempfile.mkdtemp(prefix=PREFIX)
                stack.callback(os.rmdir, place)
                made = dict(_make_device(stack, os.path.join(place, str(number)), size) for number in range(count))
                for number in made:
                    group.limit_device(number, rate)
                stack.callback(end_processes, group)  # before anything is unmounted
                for number in made:  # so that what they have begun ends without a limit
                    stack.callback(group.limit_device, number, None)
            yield Devices(made, rate, group)
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
        words = f"{size_words(memory)} of memory are needed and there are {size_words(free)}"
        raise NotUsable(f"{MEMORY}: {words}; choose fewer or smaller devices")


def _make_device(stack: contextlib.ExitStack, folder: str, size: int) -> tuple[str, str]:
    """Makes a device; returns its MAJOR:MINOR, and the folder in which it is mounted."""
    descriptor, image = tempfile.mkstemp(prefix=PREFIX, suffix=".img", dir=MEMORY)
    stack.callback(os.unlink, image)
    try:
        os.posix_fallocate(descriptor, 0, size)  # all pages now, or the first write would be slower
    except OSError as error:
        raise NotUsable(f"{MEMORY}: {error.strerror}; choose fewer or smaller devices") from error
    finally:
        os.close(descriptor)
    device = run_tool("losetup", "--find", "--show", image)
    stack.callback(run_tool, "losetup", "--detach", device)
    # no journal, which kernel threads would write, no reserve, and no inodes beyond what benchmarks need
    options = ["-q", "-F", "-m", "0", "-b", "4096", "-N", "256", "-O", "^has_journal", "-E", "nodiscard"]
    run_tool("mkfs.ext4", *options, device)
    os.mkdir(folder)
    stack.callback(os.rmdir, folder)
    run_tool("mount", "-o", "nodiscard", device, folder)
    stack.callback(_unmount, folder)
    return Path("/sys/block", os.path.basename(device), "dev").read_text(encoding="ascii").strip(), folder


def _unmount(folder: str) -> None:
    try:
        run_tool("umount", folder)
    except NotUsable:  # someone's working folder or open file
        run_tool("umount", "--lazy", folder)


def end_processes(group: Group) -> None:
    """Kills the processes of a group; this process, if it is one of them, leaves the group."""
    end, processes = time.monotonic() + _PATIENCE, Path(group.processes)
    while listed := processes.read_text(encoding="ascii").split():
        for process in listed:
            with contextlib.suppress(ProcessLookupError):
                if int(process) != os.getpid():
                    os.kill(int(process), signal.SIGKILL)
        if str(os.getpid()) in listed:
            join(str(group.path.parent / "cgroup.procs"))
        if time.monotonic() > end:
            return
        time.sleep(0.02)


def run_tool(*words: str) -> str:
    """Returns what a program prints. Raises NotUsable with its error."""
    # in a session of its own: Ctrl-C on the terminal does not stop it halfway
    done = subprocess.run(words, stdin=subprocess.DEVNULL, capture_output=True, text=True, start_new_session=True)
    if done.returncode:
        said = (done.stderr.strip() or f"exit status {done.returncode}").splitlines()[0]
        raise NotUsable(said if said.startswith(words[0]) else f"{words[0]}: {said}")
    return done.stdout.strip()


# What is measured with them, by this process and its children: all are in the cgroup


def fio_row(tasks: Sequence[Task], name: str = "") -> Row:
    paths, before = [task.path for task in tasks], partial(_all, [task.set_cache for task in tasks])
    return fio.row(name, tasks[0].pattern, lambda: paths, tasks[0].size, before, fio.variants(_SHAPE))


def shared_row(tasks: Sequence[Task], handles: Sequence[nvme_ops.aio_handle]) -> Row:
    """Returns a row that starts all transfers, then waits for them."""

    def move() -> None:
        for task, handle in zip(tasks, handles, strict=True):
            start = handle.async_pwrite if task.write else handle.async_pread
            start(task.buffer, task.path)
        for handle in dict.fromkeys(handles):
            handle.wait()

    def before() -> None:
        for task in tasks:
            _ = task.buffer
            task.set_cache()

    def check() -> None:
        for task in tasks:
            task.mark(task.buffer)
        move()
        for task in tasks:
            task.compare(task.buffer)

    return Row("", lambda: timed(move, sum(task.size for task in tasks)), before, check)


def make_rows(
    stack: contextlib.ExitStack, devices: Devices, size: int, write: bool, counts: Sequence[int]
) -> tuple[list[Row], dict[tuple[str, int], Row]]:
    """Returns the rows of each device alone, and those by contender and number of devices, until ``stack`` ends."""
    tasks = [Task(os.path.join(folder, "data"), size, write) for folder in devices.folders.values()]
    contender, handles = Contender("aio_handle", Settings(), ""), [nvme_ops.aio_handle() for _ in tasks]
    processes = [stack.enter_context(Remote(make_row, contender, replace(task))) for task in tasks]
    makers: dict[str, Callable[[list[Task]], Row]] = {
        FIO: fio_row,
        PROCESSES: lambda those: joint_row("", processes[: len(those)], 0),
        HANDLES: lambda those: shared_row(those, handles[: len(those)]),
        HANDLE: lambda those: shared_row(those, handles[:1] * len(those)),
    }
    alone = [fio_row([task], f"fio, device {number} alone") for number, task in enumerate(tasks)]
    together = {(name, count): make(tasks[:count]) for name, make in makers.items() for count in counts
                if count > 1 or name in (FIO, PROCESSES)}  # fmt: skip
    for (name, count), row in together.items():
        row.name = f"{name}, {count} {'device' if count == 1 else 'devices'}"
    for row in [*alone, *together.values()]:
        # a pause, since the kernel credits a row that begins soon after another with the time in between
        row.before = partial(_all, [row.before, partial(time.sleep, _PAUSE)])
        row.check = devices.unlimited()(row.check)
    return alone, together


def _all(calls: Sequence[Callable[[], object]]) -> None:
    for call in calls:
        call()


def compared(group: str, title: str, alone: Sequence[Row], together: dict[tuple[str, int], Row]) -> Table:
    """Compares each row with the sum of the same devices alone, round by round, and notes if it reaches the aim."""
    counts = sorted({count for _, count in together})
    added = {count: Row(f"the sum of {count} alone", samples=summed(alone[:count])) for count in counts}
    for (name, count), row in together.items():
        row.peer = added[count].name
        found = spread(paired_ratios(row.samples, added[count].samples))
        if found and name != FIO:
            kept = "reached" if found.median >= LEAST else "missed"
            row.note = "; ".join(filter(None, [f"aim {LEAST:g}: {kept}", row.note.replace("io_uring", "")]))
    return Table(group, title, "GB/s", [*added.values(), *together.values()], peers=ALONE)


def tables(run: Run, _: str, found: dict[str, Any]) -> Iterator[Table]:
    """Yields the table of each direction, over the same devices."""
    given = run.given
    command.show_progress("making the devices")
    with throttled(max(given.devices), given.rate, given.size + given.size // 16 + 32 * MIB) as devices:
        found["place"] = machine.place(next(iter(devices.folders.values())))
        for folder in devices.folders.values():
            command.data_file(folder, given.size)
        join(devices.group.processes)
        for group in given.groups:
            with contextlib.ExitStack() as stack:
                write, counts = group == "write", sorted(set(given.devices))
                alone, together = make_rows(stack, devices, given.size, write, counts)
                run.measure([*alone, *together.values()], warmups=0)
            words = f"{size_words(given.size)} each, devices limited to {given.rate / 1e6:.0f} MB/s each"
            yield compared(group, f"{GROUPS[group]}, {words}", alone, together)


_FLAGS = {"--devices": ("numbers", [1, 2, 4]), "--rate": ("of each, bytes per second", "512M", size)}
PROGRAM = Program(GROUPS, tables, flags=_FLAGS, folders=False, rounds=5)
