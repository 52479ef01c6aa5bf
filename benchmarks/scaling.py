"""Reads and writes over 1, 2, 4 devices at once: this package beside fio, and the sum of what each device does alone.

The devices are made of memory and limited to a fixed rate each (throttled.py), so that scaling shows on one machine: it
is the programs that are measured, not any disk. ``nvme-bench --scaling`` does the same on devices that exist.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))  # so that it runs from anywhere, uninstalled too

import nvme_ops
from benchmarks import command
from benchmarks.throttled import Devices, join, throttled
from nvme_ops.arguments import positive, size
from nvme_ops.bench import fio, machine
from nvme_ops.bench.engines import Contender, make_row
from nvme_ops.bench.engines.task import Task
from nvme_ops.bench.measure import Row, WrongData, interleave, timed
from nvme_ops.bench.ranks import joint_row
from nvme_ops.bench.remote import Remote
from nvme_ops.bench.run import Scaling, scaling_of
from nvme_ops.bench.tables import Table, as_json, with_range
from nvme_ops.measuring import files
from nvme_ops.settings import Settings
from nvme_ops.text import MIB, columns_text, size_words

GROUPS = {"read": "reads of files that are not in the page cache", "write": "writes over existing files"}
LEAST = 0.95  # of the sum: what this package aims at
_PAUSE = 0.3  # seconds: more than two slices of the kernel's

FIO = "fio, a job each"
PROCESSES = "nvme_ops, a process each"
HANDLES = "nvme_ops, one process, a handle each"
HANDLE = "nvme_ops, one handle"
_FIO_SHAPE = ["--bs=1M", "--iodepth=16"]  # of every job; all their huge pages fit into what is reserved for one run


def arguments(words: Sequence[str] | None) -> argparse.Namespace:
    """Exits with status 2 on wrong ones."""
    parser = command.parser(__file__, __doc__, GROUPS, folders=False)
    parser.add_argument(
        "--devices", type=positive, nargs="+", default=[1, 2, 4], metavar="N", help="numbers (default 1 2 4)"
    )
    parser.add_argument("--rate", type=size, default="512M", help="of each, bytes per second (default 512M)")
    given = command.parse(parser, words)
    given.devices = sorted(set(given.devices))
    return given


# What runs in the processes that are limited


def device_rows(processes: str, task: Task) -> list[Row]:
    """This package on one device. ``processes``: the list of the cgroup to be in."""
    join(processes)
    return [make_row(Contender("aio_handle", Settings(), PROCESSES), task)]


def fio_rows(processes: str, tasks: Sequence[Task], counts: Sequence[int]) -> list[Row]:
    """Fio on each device alone, and on the first so many of them."""
    join(processes)
    return [_fio_row([task]) for task in tasks] + [_fio_row(tasks[:count]) for count in counts]


def _fio_row(tasks: Sequence[Task]) -> Row:
    def before() -> None:
        for task in tasks:
            task.set_out()

    paths, pattern = [task.path for task in tasks], "write" if tasks[0].write else "read"
    return fio.row(FIO, pattern, lambda: paths, tasks[0].size, before, fio.variants(_FIO_SHAPE))


def handle_rows(processes: str, tasks: Sequence[Task], counts: Sequence[int]) -> list[Row]:
    """One process for so many devices: a handle for each, then one handle for all."""
    join(processes)
    handles = [nvme_ops.aio_handle() for _ in tasks]
    apart = [_shared_row(HANDLES, tasks[:count], handles[:count]) for count in counts]
    return apart + [_shared_row(HANDLE, tasks[:count], handles[:1] * count) for count in counts]


def _shared_row(name: str, tasks: Sequence[Task], handles: Sequence[nvme_ops.aio_handle]) -> Row:
    """All transfers are begun, then waited for."""

    def move() -> None:
        for task, handle in zip(tasks, handles, strict=True):
            start = handle.async_pwrite if task.write else handle.async_pread
            start(task.buffer, task.path)
        for handle in dict.fromkeys(handles):
            handle.wait()

    def before() -> None:
        for task in tasks:
            _ = task.buffer
            task.set_out()

    def check() -> None:
        for task in tasks:
            if task.write:
                task.written += 1
                task.buffer[::4096] = task.written % 256  # as tensor_row does
            else:
                task.buffer.zero_()
            task.set_out()
        move()
        for task in tasks:
            there = files.checksum(task.path) if task.write else task.content
            if files.tensor_checksum(task.buffer) != there:
                raise WrongData("tensor and file differ")

    return Row(name, lambda: timed(move, sum(task.size for task in tasks)), before, check)


# What is measured with them


@dataclass
class Rows:
    """The rows of one direction: of each device alone, and by contender and number of devices."""

    alone: list[Row]
    together: dict[tuple[str, int], Row]

    def all(self) -> list[Row]:
        """In the order of the table. With one device fio's is the first of those alone."""
        return self.alone + [row for row in self.together.values() if row is not self.alone[0]]

    def scaling(self) -> list[Scaling]:
        """Over the sum of the first so many devices alone, round by round."""
        return [scaling_of(name, row, self.alone[:count]) for (name, count), row in self.together.items()]


def make_rows(stack: contextlib.ExitStack, devices: Devices, size: int, write: bool, counts: Sequence[int]) -> Rows:
    """Their processes end with ``stack``."""
    processes = str(devices.group.processes)
    tasks = [Task(os.path.join(folder, "data"), size, write) for folder in devices.folders]

    def remote(make: Callable[..., list[Row]], *words: object) -> Remote:
        return stack.enter_context(Remote(make, processes, *words))

    several = [count for count in counts if count > 1]
    of_fio = remote(fio_rows, tasks, several)
    of_handles = remote(handle_rows, [replace(task) for task in tasks], several)
    of_devices = [remote(device_rows, replace(task)) for task in tasks]
    alone = [of_fio.row(f"{FIO.partition(',')[0]}, device {number} alone", number) for number in range(len(tasks))]
    together = {(FIO, 1): alone[0]} if 1 in counts else {}
    together |= {(FIO, count): of_fio.row("", len(tasks) + place) for place, count in enumerate(several)}
    together |= {(PROCESSES, count): joint_row("", of_devices[:count], 0) for count in counts}
    for start, name in ((0, HANDLES), (len(several), HANDLE)):
        together |= {(name, count): of_handles.row("", start + place) for place, count in enumerate(several)}
    for (name, count), row in together.items():
        row.name = row.name or f"{name}, {count} {'device' if count == 1 else 'devices'}"
    rows = Rows(alone, together)
    for row in rows.all():
        row.before, row.check = partial(_settled, row.before), devices.unlimited()(row.check)
    return rows


def _settled(before: Callable[[], None]) -> None:
    """With a pause, or who begins soon after another would get the time in between as credit from the kernel."""
    before()
    time.sleep(_PAUSE)


def measure(given: argparse.Namespace) -> command.Run:
    """All directions."""
    run = command.Run(given, rate=given.rate, devices=given.devices, least=LEAST, tables=[], scaling=[])
    found: dict[str, list[Scaling]] = {}
    command.show_progress("making the devices")
    with throttled(max(given.devices), given.rate, given.size + given.size // 16 + 32 * MIB) as devices:
        run.result["place"] = machine.place(devices.folders[0])
        for folder in devices.folders:
            command.data_file(folder, given.size)
        for group in given.groups:
            with contextlib.ExitStack() as stack:
                rows = make_rows(stack, devices, given.size, group == "write", given.devices)
                interleave(rows.all(), given.rounds, command.show_progress, warmups=0)
            words = f"{size_words(given.size)} each, devices limited to {given.rate / 1e6:.0f} MB/s each"
            table, found[group] = Table(group, f"{GROUPS[group]}, {words}", "GB/s", rows.all()), rows.scaling()
            run.tables[group] = [table]
            run.result["tables"].append(as_json(table))
            run.result["scaling"] += [{"group": group, **asdict(each)} for each in found[group]]
            command.show_progress("")
            print(f"\n{scaling_text(table.title, found[group], rows.all())}", flush=True)
    if given.plot:
        draw(found, given.plot)
        given.plot = None  # or command.run would draw its bars
    return run


def scaling_text(title: str, found: Sequence[Scaling], rows: Sequence[Row]) -> str:
    """The rate of so many devices at once, and over the sum of each alone; then what rows had to say."""
    lines = [["", "devices", "GB/s (min - max)", "/ sum of each alone", ""]]
    for each in found:
        judged = each.ratio if "nvme_ops" in each.engine else None
        words = f"aim {LEAST:g}: {'reached' if judged.median >= LEAST else 'missed'}" if judged else ""
        lines.append([each.engine, str(each.devices), with_range(each.rate, 4), with_range(each.ratio, 3), words])
    notes = [f"{row.name}: {row.note}" for row in rows if row.note not in ("", "io_uring")]
    return "\n".join([title, columns_text(lines), *notes])


def draw(found: dict[str, list[Scaling]], path: str) -> None:
    """Throughput by number of devices, and the sum of each alone. Needs matplotlib."""
    import matplotlib  # type: ignore[import-not-found,unused-ignore]

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, len(found), figsize=(1 + 4.5 * len(found), 4.5), squeeze=False, sharey=True)
    for axis, (group, scaling) in zip(axes[0], found.items(), strict=True):
        ideal = {each.devices: each.alone.median for each in scaling if each.alone is not None}
        axis.plot(list(ideal), list(ideal.values()), "--", color="gray", label="sum of each device alone")
        names = list(dict.fromkeys(each.engine for each in scaling))
        for place, name in enumerate(names):
            beside = 0.06 * (place - (len(names) - 1) / 2)  # or they hide each other
            for each in scaling:
                if each.engine == name and (rate := each.rate):
                    spread = [[rate.median - rate.low], [rate.high - rate.median]]
                    axis.errorbar(each.devices + beside, rate.median, spread, fmt="o", capsize=3, markersize=4,
                                  color=f"C{place}", label=name if each.devices == max(ideal) else None)  # fmt: skip
        axis.set(title=group, xlabel="devices at once", xticks=sorted(ideal), ylim=(0, None))
        axis.grid(visible=True, alpha=0.3)
    axes[0][0].set_ylabel("GB/s: median, least and most")
    axes[0][0].legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=100)
    pyplot.close(figure)


def main(words: Sequence[str] | None = None) -> int:
    """Status 0; 1 when the devices cannot be made or a row moved wrong bytes; 2 for wrong arguments; 130: Ctrl-C."""
    return command.run(arguments(words), measure)


if __name__ == "__main__":
    sys.exit(main())
