"""This package beside fio, DeepSpeed and plain Python, on the same file in one run. docs/benchmarks.md explains it."""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Generator, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))  # so that it runs from anywhere, uninstalled too

import torch

import nvme_ops
from benchmarks import command, file_rows, small_io
from nvme_ops.bench.engines import deepspeed
from nvme_ops.bench.engines.task import Task
from nvme_ops.bench.measure import Row, Sample, Unavailable, timed
from nvme_ops.bench.tables import Table
from nvme_ops.engine import engine_of
from nvme_ops.measuring.files import make_cold
from nvme_ops.measuring.scratch import scratch_folder
from nvme_ops.op_builder import AsyncIOBuilder
from nvme_ops.text import MIB, size_words

GROUPS = {
    "read": "read, of a file that is not in the page cache",
    "write": "write, over an existing file",
    "cached": "read of a file in the page cache",
    "random": "16,384 random reads of 4 KiB, past the page cache",
    "latency": "one blocking read of 4 KiB by path, past the page cache",
    "submit": "time until submit_pread returns",
    "memory": "staging memory of a default handle",
    "start": "from a fresh process to the first handle",
}
_SMALL: dict[str, tuple[str, Callable[[Task], list[Row]], str]] = {  # unit, rows, reference
    "random": ("kIOPS", small_io.random_rows, small_io.FIO_RANDOM),
    "latency": ("us", small_io.latency_rows, small_io.PYTHON_DIRECT),
    "submit": ("us", small_io.submit_rows, ""),
}

# prints the seconds from torch's import to the first handle
_START = """
import time
import torch
start = time.perf_counter()
from {builder} import AsyncIOBuilder
AsyncIOBuilder().load().aio_handle()
print("\\n", time.perf_counter() - start)
"""


def table(group: str, task: Task, with_deepspeed: bool) -> Table:
    """The table of a group, not measured yet."""
    if group in _SMALL:
        unit, make, reference = _SMALL[group]
        return Table(group, GROUPS[group], unit, make(task), reference)
    title = f"{GROUPS[group]}, {size_words(task.size)}"
    if group == "cached":
        return Table(group, title, "GB/s", file_rows.cached_rows(task), file_rows.PREADV)
    rows = file_rows.fio_rows(task) + file_rows.nvme_ops_rows(task)
    rows += file_rows.deepspeed_rows(task) if with_deepspeed else []
    return Table(group, title, "GB/s", rows + file_rows.plain_rows(task), file_rows.FIO_BEST)


def staging(path: str, size: int) -> dict[str, int | None]:
    """Bytes of staging memory before, during (the most that was seen) and after one cold read, and what else was kept.

    ``peak_resident_growth`` is how far the whole process grew beyond the tensor; None where the kernel does not say.
    """
    native = AsyncIOBuilder().load()
    native.trim_pool()
    handle = nvme_ops.aio_handle()
    engine = engine_of(handle)
    tensor = torch.zeros(size, dtype=torch.uint8)
    make_cold(path)
    seen, ended = [engine.staging_bytes()], threading.Event()

    def watch() -> None:
        while not ended.wait(0.0005):
            seen.append(engine.staging_bytes())

    def read() -> None:
        handle.async_pread(tensor, path)  # a blocking call's own staging memory cannot be asked for meanwhile
        handle.wait()

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        peak = timed(read, size).peak_bytes
    finally:
        ended.set()
        watcher.join()
    time.sleep(0.2)  # the lane's thread gives its memory back after it has told the waiting one
    return {
        "idle_before": seen[0],
        "busy": max(seen),
        "idle_after": engine.staging_bytes(),
        "pool_kept": native.pool_statistics()["cached_bytes"],
        "peak_resident_growth": peak,
    }


def start_rows(scratch: str, packages: list[str], rounds: int) -> list[Row]:
    """For each package: the whole process from an empty cache, once, then what a warm start takes beyond torch."""
    return [row for package in packages for row in _measured(scratch, package, rounds)]


def _measured(scratch: str, package: str, rounds: int) -> list[Row]:
    extensions = os.path.join(scratch, f"extensions-{package}")
    cold = Row(f"{package}, empty cache, whole process", lambda: first_handle(package, extensions)[0])
    warm = Row(f"{package}, warm, beyond importing torch", lambda: first_handle(package, extensions)[1])
    try:
        for number, row in enumerate([cold] + rounds * [warm]):
            command.show_progress(f"round {number} of {rounds}: {row.name}")
            row.samples.append(row.run())
    except Unavailable as reason:
        cold.note = warm.note = str(reason)
    finally:
        shutil.rmtree(extensions, ignore_errors=True)
    return [cold, warm]


def first_handle(package: str, extensions: str) -> tuple[Sample, Sample]:
    """The time of a new process that makes one handle: all of it, and what came after importing torch.

    Raises Unavailable with the last line that it said when it did not come to a handle.
    """
    start = time.perf_counter()
    program = _START.format(builder=command.BUILDERS[package])
    beyond_torch = command.in_new_process(program, TORCH_EXTENSIONS_DIR=extensions, CCACHE_DISABLE="1")
    return Sample(time.perf_counter() - start, 1), Sample(float(beyond_torch), 1)


def tables(run: command.Run, scratch: str, found: dict[str, Any]) -> Generator[Table, None, None]:
    """Of one folder. The group ``memory`` is measured and printed here."""
    path = command.data_file(scratch, run.given.size)
    for group in run.given.groups:
        if group == "memory":
            found["memory"] = staging(path, run.given.size)
            print(f"\n{GROUPS[group]}")
            for name, size in found["memory"].items():
                print(f"{name.replace('_', ' '):22}{'unknown' if size is None else size_words(size)}", flush=True)
        elif group != "start":
            # a new one for each, so that a table's memory is free before the next
            task = Task(path, run.given.size, group == "write", pageable_memory=True)
            yield table(group, task, not run.given.no_deepspeed)


def measure(given: argparse.Namespace) -> command.Run:
    """All groups."""
    if not given.no_deepspeed and {"read", "write"} & set(given.groups):
        command.show_progress("loading DeepSpeed's op; the first time it is compiled, which takes minutes")
        deepspeed.load()
    run = command.Run(given)
    given.path = [] if given.groups == ["start"] else given.path  # it has nothing to do with a folder
    run.folders(2, tables)
    if "start" in given.groups:
        packages = ["nvme_ops", "DeepSpeed"] if given.build_times else ["nvme_ops"]
        with scratch_folder(tempfile.gettempdir(), 64 * MIB) as scratch:
            rows = start_rows(scratch, packages, given.rounds)
        run.result["start"] = run.show("start", Table("start", GROUPS["start"], "s", rows))
    return run


def main(words: Sequence[str] | None = None) -> int:
    """Status 0; 1 when a folder cannot be used or a row moved wrong bytes; 2 for wrong arguments; 130 after Ctrl-C."""
    parser = command.parser(__file__, __doc__, GROUPS)
    parser.add_argument("--build-times", action="store_true", help="group start for DeepSpeed too: takes minutes")
    return command.run(command.parse(parser, words), measure)


if __name__ == "__main__":
    sys.exit(main())
