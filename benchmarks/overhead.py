"""What nvme-bench adds to what it measures: its rows against a bare loop and against fio run by hand, interleaved."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from typing import Any

import nvme_ops
from benchmarks import command
from benchmarks.command import Program, Run
from benchmarks.raw_io import mover
from nvme_ops.measure import fio
from nvme_ops.measure.engines import Contender, Task, make_row
from nvme_ops.measure.rows import Row, Sample
from nvme_ops.measure.tables import Table
from nvme_ops.settings import Settings

GROUPS = {"read": "read", "write": "write"}


def bare_row(task: Task, settings: Settings) -> Row:
    """Nothing but the call and the clock."""
    move = mover(nvme_ops.aio_handle(**settings.as_json()), task)

    def run() -> Sample:
        begin = time.perf_counter()
        move(task.buffer)
        return Sample(time.perf_counter() - begin, task.size)

    return Row("bare loop around sync_pread or sync_pwrite", run, task.set_out)


def by_hand_row(task: Task, settings: Settings) -> Row:
    """Fio with the same settings as nvme-bench's row of it, its bandwidth as it prints it."""
    options = [
        "--name=hand", f"--filename={os.path.abspath(task.path)}", f"--rw={task.pattern}", f"--size={task.size}",
        "--direct=1", "--ioengine=io_uring", f"--bs={settings.block_size}", f"--iodepth={settings.queue_depth}",
        "--fixedbufs=1", "--iomem=mmaphuge", "--allow_file_create=0", "--fallocate=none",
    ]  # fmt: skip

    def run() -> Sample:
        _, side = fio.read_job(*fio.execute(options))
        return Sample(task.size / side["bw_bytes"], task.size)

    return Row("fio by hand", run, task.set_out)


def tables(run: Run, scratch: str, _: dict[str, Any]) -> Iterator[Table]:
    """Two comparisons for each direction."""
    path = command.data_file(scratch, run.given.size)
    for direction in run.given.groups:
        task, settings = Task(path, run.given.size, direction == "write"), Settings()
        for engine, make in (("aio_handle", bare_row), ("fio", by_hand_row)):
            rows = [make_row(Contender(engine, settings, f"nvme-bench, {engine}"), task), make(task, settings)]
            yield Table(direction, f"{direction}, {engine}", "GB/s", rows, rows[1].name, ())


PROGRAM = Program(GROUPS, tables, 1)
