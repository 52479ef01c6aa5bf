"""What nvme-bench adds to what it measures: its rows against a bare loop and against fio run by hand, interleaved."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))  # so that it runs from anywhere, uninstalled too

import nvme_ops
from benchmarks import command
from nvme_ops.bench import files, stop
from nvme_ops.bench.engines import Contender, make_row
from nvme_ops.bench.engines.task import Task
from nvme_ops.bench.huge_pages import huge_pages
from nvme_ops.bench.measure import Row, Sample, interleave
from nvme_ops.bench.scratch import scratch_folder
from nvme_ops.bench.settings import Settings
from nvme_ops.bench.tables import Table, as_json, as_text
from nvme_ops.text import MIB

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
    command_line = [
        "fio", "--name=hand", f"--filename={os.path.abspath(task.path)}", f"--rw={'write' if task.write else 'read'}",
        f"--size={task.size}", "--direct=1", "--ioengine=io_uring", f"--bs={settings.block_size}",
        f"--iodepth={settings.queue_depth}", "--fixedbufs=1", "--iomem=mmaphuge", "--allow_file_create=0",
        "--fallocate=none", "--output-format=json",
    ]  # fmt: skip

    def run() -> Sample:
        with huge_pages():
            done = subprocess.run(stop.tied(command_line), capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(done.stderr.strip().splitlines()[-1] if done.stderr.strip() else "fio failed")
        side = json.loads(done.stdout[done.stdout.find("{") :])["jobs"][0]["write" if task.write else "read"]
        return Sample(task.size / side["bw_bytes"], task.size)

    return Row(BY_HAND, run, task.set_out)


def measure(given: argparse.Namespace, progress: command.Progress) -> command.Result:
    """Two comparisons for each direction."""
    result: dict[str, object] = {"size": given.size, "rounds": given.rounds, "folders": {}}
    tables: dict[str, list[Table]] = {}
    for folder in given.path:
        tables[folder] = []
        for direction in [name for name in GROUPS if not given.only or name in given.only]:
            with scratch_folder(folder, given.size + 64 * MIB) as scratch:
                path = os.path.join(scratch, "data")
                files.make_file(path, given.size)
                task, settings = Task(path, given.size, direction == "write"), Settings()
                for engine, other in (
                    ("aio_handle", bare_row(task, settings)),
                    ("fio", by_hand_row(task, settings)),
                ):
                    rows = [make_row(Contender(engine, settings, f"nvme-bench, {engine}"), task), other]
                    table = Table(direction, f"{direction}, {engine}", "GB/s", rows, other.name, ())
                    interleave(rows, given.rounds, progress)
                    progress("")
                    print(f"\n{as_text(table)}", flush=True)
                    tables[folder].append(table)
    result["folders"] = {folder: {"tables": [as_json(table) for table in group]} for folder, group in tables.items()}
    return result, tables


def main(words: Sequence[str] | None = None) -> int:
    """Status 0; 1 when a folder cannot be used; 2 for wrong arguments; 130 after Ctrl-C."""
    parser = command.parser((__doc__ or "").partition("\n")[0], GROUPS)
    return command.run("bench_overhead.py", command.parse(parser, words), measure)


if __name__ == "__main__":
    sys.exit(main())
