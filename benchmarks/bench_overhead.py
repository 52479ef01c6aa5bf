"""What nvme-bench adds to what it measures: its rows against a bare loop and against fio run by hand, interleaved."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))  # so that it runs from anywhere, uninstalled too

import nvme_ops
from benchmarks import command
from nvme_ops.bench import fio
from nvme_ops.bench.engines import Contender, make_row
from nvme_ops.bench.engines.task import Task
from nvme_ops.bench.measure import Row, Sample
from nvme_ops.bench.tables import Table
from nvme_ops.settings import Settings

GROUPS = {"read": "read", "write": "write"}
BARE, BY_HAND = "bare loop around sync_pread or sync_pwrite", "fio by hand"


def bare_row(task: Task, settings: Settings) -> Row:
    """Nothing but the call and the clock."""
    handle = nvme_ops.aio_handle(**settings.as_json())
    move = handle.sync_pwrite if task.write else handle.sync_pread

    def run() -> Sample:
        begin = time.perf_counter()
        move(task.buffer, task.path)
        return Sample(time.perf_counter() - begin, task.size)

    return Row(BARE, run, task.set_out)


def by_hand_row(task: Task, settings: Settings) -> Row:
    """Fio with the same settings as nvme-bench's row of it, its bandwidth as it prints it."""
    options = [
        "--name=hand", f"--filename={os.path.abspath(task.path)}", f"--rw={'write' if task.write else 'read'}",
        f"--size={task.size}", "--direct=1", "--ioengine=io_uring", f"--bs={settings.block_size}",
        f"--iodepth={settings.queue_depth}", "--fixedbufs=1", "--iomem=mmaphuge", "--allow_file_create=0",
        "--fallocate=none",
    ]  # fmt: skip

    def run() -> Sample:
        _, side = fio.read_job(*fio.execute(options))
        return Sample(task.size / side["bw_bytes"], task.size)

    return Row(BY_HAND, run, task.set_out)


def tables(run: command.Run, scratch: str, _: dict[str, Any]) -> Generator[Table, None, None]:
    """Two comparisons for each direction."""
    path = command.data_file(scratch, run.given.size)
    for direction in run.given.groups:
        task, settings = Task(path, run.given.size, direction == "write"), Settings()
        for engine, make in (("aio_handle", bare_row), ("fio", by_hand_row)):
            rows = [make_row(Contender(engine, settings, f"nvme-bench, {engine}"), task), make(task, settings)]
            yield Table(direction, f"{direction}, {engine}", "GB/s", rows, rows[1].name, ())


def main(words: Sequence[str] | None = None) -> int:
    """Status 0; 1 when a folder cannot be used; 2 for wrong arguments; 130 after Ctrl-C."""
    return command.run(
        command.parse(command.parser(__file__, __doc__, GROUPS), words),
        lambda given: command.Run(given).folders(1, tables),
    )


if __name__ == "__main__":
    sys.exit(main())
