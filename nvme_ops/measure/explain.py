"""``nvme-bench explain FILE|DIR``: what limits a default handle, the figures that show it, and what to change.

Steps lead from an ordinary tensor to the ceiling, this package's best with page-locked memory. Each is the difference
between two rows that are measured in the same rounds, and a finding if it is beyond the noise of the run.
"""

from __future__ import annotations

import argparse
import math
import os
import re
import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import nvme_ops
from nvme_ops.base.command_line import command_line, say, show, size
from nvme_ops.base.limits import free_memory
from nvme_ops.base.progress import progress_bar
from nvme_ops.base.text import MIB, rate_words, size_words
from nvme_ops.filesystem.device import MEMORY, devices_under, mount_of
from nvme_ops.measure import files, machine
from nvme_ops.measure.engines import Task, gpus
from nvme_ops.measure.rows import Row, interleave, noise, noise_of_median, paired_ratios, timed
from nvme_ops.measure.scratch import scratch_folder
from nvme_ops.measure.tables import Table, as_text
from nvme_ops.op_builder.machine import Host
from nvme_ops.report import kernel

if TYPE_CHECKING:
    import torch

# The rows' names
LOCKED, KEPT, NEW = "page-locked tensor", "torch.empty, kept", "torch.empty, new"
GPU, GDS = "GPU tensor", "GPU tensor, gds_handle"

#: Differences below this do not matter, however sure they are.
MIN_DIFFERENCE = 0.03
_SURE = 2.5  # standard errors; some five comparisons are made
_BUSY = 0.85  # of a core; a thread this busy hardly waits for the device
_MIN_PASS = 64 * MIB  # a pass moves a smaller file several times
_TWO_LANES = "aio_handle(intra_op_parallelism=2), or search all settings: nvme-tune"


def two_lanes(name: str) -> str:
    """Returns the name of the row that is as ``name``, but with two lanes."""
    return f"{name}, 2 lanes"


class Finding(NamedTuple):
    """Why rate is lost. ``share``: how much of the gap to the ceiling the fix alone closes; shares may overlap."""

    name: str
    share: float
    evidence: str
    fix: str


class Case:
    """The rows of one direction, and what they show. ``reached`` is that of an ordinary tensor: NEW, KEPT or GPU."""

    def __init__(self, write: bool, reached: str, rows: Sequence[Row]) -> None:
        self.write, self.reached = write, reached
        self.samples = {row.name: row.samples for row in rows}
        taken = {row.name: kept for row in rows if (kept := [sample for sample in row.samples if sample is not None])}
        self.medians = {name: statistics.median(sample.rate for sample in samples) for name, samples in taken.items()}
        self.busy = {name: statistics.median((sample.cpu_seconds or 0) / sample.seconds for sample in samples)
                     for name, samples in taken.items()}  # fmt: skip
        self.noise = self._least_difference()
        self.ceiling = two_lanes(LOCKED) if self.faster(two_lanes(LOCKED), LOCKED) else LOCKED
        self.findings = self._found() if self.faster(self.ceiling, reached) else []
        if self.busy[self.ceiling] >= _BUSY:
            evidence = f"{self.ceiling} keeps {self.busy[self.ceiling]:.0%} of a core busy"
            self.findings.append(Finding("CPU", 0.0, evidence, "a larger block_size, and fewer other programs"))

    def _least_difference(self) -> float:
        """Returns the least difference between two medians that counts, by the noise of the rates in their rounds."""
        around = [[sample and math.log(sample.rate / median) for sample in self.samples[name]]
                  for name, median in self.medians.items()]  # fmt: skip
        known = [[value for value in taken if value is not None] for taken in zip(*around, strict=True)]
        levels = [statistics.median(values or [0.0]) for values in known]
        one = noise([None if value is None else value - level for value, level in zip(row, levels, strict=True)]
                    for row in around)  # fmt: skip
        chance = 0.0 if one is None else math.sqrt(2) * noise_of_median(one, len(levels))
        return max(MIN_DIFFERENCE, math.expm1(_SURE * chance))

    def faster(self, name: str, other: str) -> bool:
        """Returns whether a row is faster beyond the noise, and in all rounds but one in five."""
        ratios = paired_ratios(*(self.samples.get(row, []) for row in (name, other)))
        against = sum(ratio <= 1 for ratio in ratios)
        return bool(ratios) and statistics.median(ratios) > 1 + self.noise and against <= len(ratios) // 5

    def _steps(self) -> Iterator[tuple[str, str, str, str]]:
        """Yields what may cost rate: its name, the slow row, the fast one, and what to change."""
        if self.reached == GPU:
            best = max((GDS, two_lanes(GPU)), key=lambda name: self.medians.get(name, 0.0))
            fix = "start several transfers at once (async_pread, wait); nvme-report has GPUDirect Storage"
            fix = f"{best}: {rate_words(self.medians[best])}" if self.faster(best, GPU) else fix
            yield f"copy {'from' if self.write else 'to'} the GPU", GPU, LOCKED, fix
        else:
            if not self.write:
                yield "page faults", NEW, KEPT, "keep the tensor and read into it again"
            fix = "keep the data in handle.new_cpu_locked_tensor(...), or in nvme_ops.empty(...)"
            yield "memory copies", KEPT, LOCKED, fix
        yield "one lane", LOCKED, two_lanes(LOCKED), _TWO_LANES
        if self.busy[self.reached] >= _BUSY:
            yield "CPU", self.reached, two_lanes(self.reached), f"{_TWO_LANES}; the tensor can stay what it is"

    def _found(self) -> list[Finding]:
        """Returns the steps beyond the noise, the most costly first."""
        gap = 1 / self.medians[self.reached] - 1 / self.medians[self.ceiling]
        findings = []
        for name, slow, fast, fix in self._steps():
            if self.faster(fast, slow):
                share = (1 / self.medians[slow] - 1 / self.medians[fast]) / gap
                evidence = ", ".join(f"{row} {rate_words(self.medians[row])}" for row in (slow, fast))
                findings.append(Finding(name, min(1.0, max(0.0, share)), evidence, fix))
        unclear = Finding("several small parts", 1.0, "no single step is beyond the noise", "take more --rounds")
        return sorted(findings, key=lambda finding: -finding.share) or [unclear]

    def lines(self) -> list[str]:
        """Returns the verdict, then the findings with their figures and what to change."""
        reached, ceiling = self.medians[self.reached], self.medians[self.ceiling]
        words = f"{rate_words(reached)} reached, {reached / ceiling:.0%} of the ceiling of {rate_words(ceiling)}"
        limit = f"most is lost to: {self.findings[0].name}" if self.findings else "the device is the limit"
        lines = [f"{'write' if self.write else 'read'}: {words}; {limit}"]
        for number, finding in enumerate(self.findings, 1):
            lines.append(f"{number}. {finding.name}: {finding.share:.0%} of the gap")
            lines += [f"   measured: {finding.evidence}", f"   change: {finding.fix}"]
        return [*lines, f"Differences below {self.noise:.0%} cannot be distinguished from noise (try more --rounds)."]


def main(argv: Sequence[str]) -> int:
    """Runs the command; returns 0, or 1 if a transfer failed. Raises NotUsable for places that cannot be used."""
    args = _parse(argv)
    try:
        page = _explain(args)
    except (EOFError, RuntimeError) as reason:
        say(f"nvme-bench explain: {reason}")
        return 1
    show("\n".join(page))
    return 0


def parser() -> argparse.ArgumentParser:
    """Says what limits a default aio_handle that moves an ordinary tensor.

    Measures for about half a minute, and says on one page which part limits, the
    figures that show it, and what to change. A FILE is only read; its pages are
    dropped from the page cache. In a DIR a file of --io-size is made, and removed.

    exit status: 0; 1 when a transfer failed; 2 for wrong arguments and places that
    cannot be used
    """
    made = command_line("nvme-bench explain", parser.__doc__ or "")
    add = made.add_argument
    add("path", metavar="FILE|DIR", help="a file to read, or a folder on the device")
    add("--io-size", type=size, default="512M", metavar="SIZE", help="bytes of a pass, FILE at most (default 512M)")
    add("--rounds", type=int, default=3, metavar="N", help="timed passes of each row (default 3)")
    add("--write", action="store_true", help="explain writing too; for a folder")
    add("--device", default="cpu", metavar="cuda:N", help="GPU memory instead of an ordinary tensor")
    return made


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    made = parser()
    args = made.parse_args(argv)
    match = re.fullmatch(r"cpu|cuda(?::(\d+))?", args.device)
    if match is None:
        made.error(f"--device {args.device}: neither cpu nor cuda:N")
    args.gpu = None if args.device == "cpu" else int(match[1] or 0)
    if args.rounds < 2:
        made.error(f"--rounds {args.rounds}: at least 2, or nothing is known of the noise")
    if args.write and os.path.isfile(args.path):
        made.error("--write: a file that exists is only read; name a folder")
    if args.gpu is not None and args.gpu >= gpus():
        made.error(f"--device {args.device}: torch sees {gpus()} GPUs")
    return args


def _explain(args: argparse.Namespace) -> list[str]:
    """Returns the page: for each direction its table and findings, then the file, what is refused, the machine."""
    with _file(args) as path:
        nbytes, cached, host = os.path.getsize(path), files.cached_share(path), Host()
        files.make_cold(path)
        task, page = Task(path, min(nbytes, args.io_size), False, args.gpu), []
        for task.write in [False, True] if args.write else [False]:
            page += [*_direction(replace(task), args.rounds), ""]
        page.append(f"file: {size_words(nbytes)}, {cached or 0:.0%} of it in the page cache before; {_device_of(path)}")
        checks = [kernel.io_uring(host), kernel.memlock(host), kernel.transparent(host)]
        page += [f"refused: {fact.name}: {fact.detail}; fix: {fact.fix}" for fact in checks if fact.status.needs_fix]
        return [*page, f"machine: {machine.facts(machine.machine())}"]


@contextmanager
def _file(args: argparse.Namespace) -> Iterator[str]:
    """Yields the file to work on: the one that is named, or a new one in the folder. Raises NotUsable."""
    nbytes = min(args.io_size, os.path.getsize(args.path) if os.path.isfile(args.path) else args.io_size)
    if 3 * nbytes > (free := free_memory()):  # an ordinary tensor, one that is kept, a page-locked one
        words = f"takes {size_words(3 * nbytes)} of memory and {size_words(free)} are free; choose a smaller one"
        raise files.NotUsable(f"--io-size {size_words(nbytes)} {words}")
    _device_of(args.path)
    if os.path.isdir(args.path):
        with scratch_folder(args.path, args.io_size + 64 * MIB, "--io-size or folder") as folder:
            files.make_file(path := os.path.join(folder, "data"), args.io_size)
            yield path
        return
    if os.path.exists(args.path) and not (os.path.isfile(args.path) and os.path.getsize(args.path) >= MIB):
        words = "is no regular file of 1 MiB, a block, or more: name one, or a folder on the device"
        raise files.NotUsable(f"{args.path} {words}")
    try:
        os.close(os.open(args.path, os.O_RDONLY | os.O_DIRECT))
    except OSError as error:
        raise files.NotUsable(f"{args.path} cannot be read past the page cache: {error.strerror}") from error
    yield args.path


def _device_of(path: str) -> str:
    """Returns file system and device in words. Raises NotUsable for a file system in memory."""
    mount = mount_of(Host(), path)
    if mount is not None and mount.kind in MEMORY:
        raise files.NotUsable(f"{path} is on {mount.kind}, which lives in memory: there is no device to explain")
    parts = [part for device in devices_under(Host(), path, mount) for part in (device.name, device.kind, device.model)]
    return ", ".join(filter(None, [f"{mount.kind} on {mount.point}" if mount else "", *parts]))


def _direction(task: Task, rounds: int) -> list[str]:
    """Measures one direction; returns its verdict and table, and what was found, as lines."""
    from nvme_ops.io import gds

    usual = GPU if task.gpu is not None else KEPT if task.write else NEW
    lanes = nvme_ops.aio_handle(intra_op_parallelism=2)
    kinds = dict.fromkeys((LOCKED, GPU if usual == GPU else KEPT, usual))
    rows = [_row(task, name, task.handle, name) for name in kinds]
    rows += [_row(task, GDS, nvme_ops.gds_handle(), GPU)] if usual == GPU and gds.is_ready() else []
    rows += [_row(task, two_lanes(name), lanes, name) for name in (LOCKED, usual)]
    with progress_bar(len(rows) * (1 + rounds)) as step:
        interleave(rows, rounds, step)
    if failed := [f"{row.name}: {row.note}" for row in rows if row.name in (usual, LOCKED) and not any(row.samples)]:
        raise RuntimeError(failed[0])
    verdict, *findings = (case := Case(task.write, usual, rows)).lines()
    title = f"{size_words(task.size)} past the page cache by {task.handle.backend}, medians of {rounds} rounds"
    table = as_text(Table("", title, "GB/s", rows, case.ceiling, ("CPU s/GiB",)))
    return [verdict, "", table, "", *findings]


def _row(task: Task, name: str, handle: nvme_ops.aio_handle, kind: str) -> Row:
    """Returns a row that gets its tensor for each call, so that allocating a new one is part of the pass."""
    import torch

    start = handle.sync_pwrite if task.write else handle.sync_pread
    calls = max(1, _MIN_PASS // task.size)
    memory: Callable[[], torch.Tensor] = {
        LOCKED: lambda: task.locked, KEPT: lambda: task.pageable, GPU: lambda: task.buffer,
        NEW: lambda: torch.empty(task.size, dtype=torch.uint8),
    }[kind]  # fmt: skip

    def move() -> None:
        for _ in range(calls):
            start(memory(), task.path, 0)
        task.finish()

    def before() -> None:
        memory()
        task.set_cache()

    return Row(name, lambda: timed(move, task.size * calls), before)
