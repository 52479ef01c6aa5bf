"""Activations on storage: this package against memory, computing again, and hand-written hooks.

Each way trains the same net in a process of its own and must get the same gradients as in memory, bit for bit. The
convolutional net computes little for each byte that it keeps: storage decides. The transformer computes much. The bound
is the longer of two times: computing in memory, and moving the same bytes at fio's best mixed rate. The
table ``largest`` doubles the batch until it no longer fits a memory limit or the disk, then halves the last step.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Generator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))  # so that it runs from anywhere, uninstalled too

import torch

import nvme_ops
from benchmarks import command, memory_limit
from benchmarks.activations_worker import Job
from benchmarks.file_rows import FIO_BEST
from nvme_ops.arguments import positive, size
from nvme_ops.bench import fio
from nvme_ops.bench.measure import Row, Sample, Unavailable, WrongData
from nvme_ops.bench.tables import Table
from nvme_ops.measuring.files import require_space
from nvme_ops.text import GIB, MIB, size_words

GROUPS = {
    "convolutional": "a light convolutional net, in samples/s: storage decides",
    "transformer": "layers of a transformer, in samples/s: computing decides",
    "largest": "the largest batch of a deep convolutional net within a memory limit; needs root for the limit",
}
MEMORY = "in memory"
COLUMNS = ("forward", "backward", "read and written", "GB/s", "peak memory", "of the bound")
_WAYS = {
    MEMORY: "memory",
    "save_on_nvme": "nvme",
    'save_on_nvme, policy="auto"': "auto",
    "torch.utils.checkpoint": "checkpoint",
    "hooks by torch.save": "torch",
    "hooks by numpy.save": "numpy",
}
_LAYERS = {"convolutional": 48, "transformer": 6, "largest": 512}
_FIRST = 1  # steps that are not counted
_WORKER = Path(__file__).parent / "activations_worker.py"
_PROGRAM = "import runpy, sys; runpy.run_path(sys.argv[1], run_name='__main__')  # finds nvme_ops"


def trained(job: Job) -> dict[str, Any]:
    """Returns what a process measured. Raises Unavailable with the error that it ended with."""
    with tempfile.TemporaryDirectory(dir=job.folder) as folder:
        words = json.dumps(dataclasses.asdict(dataclasses.replace(job, folder=folder)))
        found: dict[str, Any] = json.loads(command.in_new_process(_PROGRAM, str(_WORKER), words, folder=folder))
    return found


def net_rows(net: str, scratch: str, given: argparse.Namespace) -> Table:
    """Returns a table whose rows all train the same net."""
    batch = given.batch if net == "convolutional" else given.batch_of_transformer
    expected: list[int] = []

    def train(way: str) -> Sample:
        found = trained(Job(way, net, _LAYERS[net], batch, _FIRST + given.steps, scratch, given.budget))
        if way == "memory" and not expected:
            expected.extend(found["gradients"])
        if expected and found["gradients"] != expected:
            raise WrongData("gradients differ from those in memory")
        forward, backward, moved = (
            statistics.median(found[name][_FIRST:]) for name in ("forward", "backward", "moved")
        )
        figures = {"forward": forward, "backward": backward}
        if moved:
            figures |= {"read and written": moved, "GB/s": moved / (forward + backward) / 1e9}
        return Sample(forward + backward, batch, peak_bytes=found["peak_bytes"], figures=figures)

    rows = [Row(label, partial(train, way), before=os.sync) for label, way in _WAYS.items()]
    path = os.path.join(scratch, "fio")
    nvme_ops.aio_handle().write(nvme_ops.empty(GIB, dtype=torch.uint8).fill_(1), path)

    def shown(sample: Sample) -> Sample:
        return Sample(sample.seconds, batch, figures={"read and written": sample.amount, "GB/s": sample.rate / 1e9})

    rows.append(fio.row(f"{FIO_BEST}, half read, half written", "rw", lambda: path, GIB, os.sync, shown=shown))
    title = f"{net}, {_LAYERS[net]} layers, batch {batch}, budget {size_words(given.budget)}"
    return Table(net, title, "samples/s", rows, MEMORY, COLUMNS)


def note_bound(table: Table) -> None:
    """Adds the bound to each sample, as a share of its time."""
    taken = {row.name: [each for each in row.samples if each is not None] for row in table.rows}
    moved = [each.figures["GB/s"] for name, those in taken.items() if name.startswith("fio") for each in those]
    if not moved or not taken[MEMORY]:
        return
    computing = statistics.median(each.seconds for each in taken[MEMORY])
    for name, those in taken.items():
        for each in those if not name.startswith("fio") else []:
            bound = max(computing, each.figures.get("read and written", 0) / (statistics.median(moved) * 1e9))
            each.figures["of the bound"] = bound / each.seconds


def largest_rows(scratch: str, given: argparse.Namespace) -> Table:
    """Returns a table whose rows search once each; the figure is the batch."""

    def fits(row: Row, way: str, batch: int) -> bool:
        with memory_limit.limited(given.limit) as group:
            if not group:
                raise Unavailable("no memory cgroup can be made: run it as root")
            command.show_progress(f"{row.name}: batch {batch}")
            job = Job(way, "convolutional", _LAYERS["largest"], batch, 1, scratch, given.budget_of_largest, group)
            try:
                trained(job)
            except Unavailable as error:
                row.note = f"{batch} did not fit: {str(error).splitlines()[-1]}"
                return False
            return True

    def find(row: Row, way: str) -> Sample:
        most = 0
        while max(1, 2 * most) <= given.most and fits(row, way, max(1, 2 * most)):
            most = max(1, 2 * most)
        if 2 <= most <= given.most * 2 // 3 and fits(row, way, most + most // 2):
            most += most // 2
        return Sample(1.0, most)

    ways = {label: way for label, way in _WAYS.items() if way != "auto"}
    rows = [Row(label, lambda: Sample(1.0, 0), before=os.sync) for label in ways]
    for row, way in zip(rows, ways.values(), strict=True):
        row.run = partial(find, row, way)
    title = f"largest batch of {_LAYERS['largest']} light layers in {size_words(given.limit)} of memory"
    return Table("largest", title, "samples", rows, MEMORY, ())


def tables(run: command.Run, scratch: str, _: dict[str, Any]) -> Generator[Table, None, None]:
    """Yields the tables of one folder."""
    require_space(scratch, run.given.size, "--size or --path")
    for net in ("convolutional", "transformer"):
        if net in run.given.groups:
            table = net_rows(net, scratch, run.given)
            command.interleave(table.rows, run.given.rounds, command.show_progress)
            note_bound(table)
            yield table
    if "largest" in run.given.groups:
        table = largest_rows(scratch, run.given)
        command.interleave(table.rows, 1, command.show_progress, warmups=0)
        yield table


def measure(given: argparse.Namespace) -> command.Run:
    """Measures all groups."""
    return command.Run(given, budget=given.budget, batch=given.batch).folders(1, tables, measured=True)


def main(words: Sequence[str] | None = None) -> int:
    """Returns 0; 1 when a folder cannot be used or gradients differ; 2 for wrong arguments; 130 after Ctrl-C."""
    parser = command.parser(__file__, __doc__, GROUPS)
    parser.set_defaults(size=16 * GIB, rounds=5)
    parser.add_argument("--budget", type=size, default=256 * MIB, metavar="SIZE",
                        help="memory for what is saved (default 256M)")  # fmt: skip
    parser.add_argument("--batch", type=positive, default=64, metavar="N",
                        help="samples of the convolutional net (default 64)")  # fmt: skip
    parser.add_argument("--batch-of-transformer", type=positive, default=8, metavar="N",
                        help="samples of the transformer (default 8)")  # fmt: skip
    parser.add_argument("--steps", type=positive, default=2, metavar="N",
                        help="of each process, after the first one (default 2)")  # fmt: skip
    parser.add_argument("--limit", type=size, default=GIB, metavar="SIZE",
                        help="of memory, in the group largest (default 1G)")  # fmt: skip
    parser.add_argument("--budget-of-largest", type=size, default=64 * MIB, metavar="SIZE",
                        help="memory for what is saved in that group (default 64M)")  # fmt: skip
    parser.add_argument("--most", type=positive, default=1 << 16, metavar="N",
                        help="no larger batches are tried in that group (default 65536)")  # fmt: skip
    return command.run(command.parse(parser, words), measure)


if __name__ == "__main__":
    sys.exit(main())
