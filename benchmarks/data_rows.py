"""What data.py measures besides reading: a large index, opened by a new process, and what a log costs its caller."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks import command
from nvme_ops.bench.measure import Row, Sample, percentile
from nvme_ops.data import AsyncLog
from nvme_ops.data.claim import data_file
from nvme_ops.data.columns import Columns
from nvme_ops.data.files import trailer
from nvme_ops.data.index import NAME, DataFile, SampleIndex, write_index
from nvme_ops.file import shared_handle
from nvme_ops.measuring.files import make_cold
from nvme_ops.text import MIB

OPEN, FIRST = "SampleStore", "the first shuffled batch of 256"
RECORD_BYTES = 64  # on average
BYTES = RECORD_BYTES + 8  # of a sample and its place in the index
_STORE = "benchmark"  # its identity
_PIECE = 256 * MIB

_OPENING = """
import json, sys, time
import nvme_ops
from nvme_ops.bench.measure import timed
from nvme_ops.data import Loader, SampleStore

def work():
    marks.append(time.perf_counter())
    store = SampleStore(sys.argv[1])
    marks.append(time.perf_counter())
    next(iter(Loader(store, 256, shuffle=True)))
    marks.append(time.perf_counter())

nvme_ops.aio_handle()  # loads the op
marks = []
peak = timed(work, 1).peak_bytes
print(json.dumps([marks[1] - marks[0], marks[2] - marks[1], peak]))
"""


def make_store(folder: Path, records: int) -> None:
    """Writes samples of 1 to 127 bytes; not by ``SampleWriter``, which takes minutes for 100 million."""
    ends = torch.randint(1, 2 * RECORD_BYTES, (records,), dtype=torch.int64).cumsum_(0)
    size = int(ends[-1])
    name = data_file(_STORE, 0)
    noise = torch.randint(256, (min(_PIECE, size),), dtype=torch.uint8)
    for offset in range(0, size, _PIECE):
        shared_handle().write(noise[: size - offset], folder / name, False, offset)
    with open(folder / name, "ab") as file:
        file.write(bytes(-size % 4096) + trailer(_STORE, 0))
    files = [DataFile(name, os.path.getsize(folder / name), 0)]
    write_index(
        str(folder / NAME), SampleIndex(_STORE, "native", records, files, columns=Columns().as_json(), ends=ends)
    )


def index_rows(folder: Path, found: dict[str, Any]) -> list[Row]:
    """Returns rows whose passes each run in a new process, with cold files; ``found`` goes into the JSON file."""
    found["peak_bytes"] = []

    def cold() -> None:
        for path in folder.iterdir():
            make_cold(str(path))

    def run(which: int) -> Sample:
        *seconds, peak = json.loads(command.in_new_process(_OPENING, str(folder)))
        found["peak_bytes"].append(peak)
        return Sample(seconds[which], 1)

    return [Row(name, partial(run, which), cold) for which, name in enumerate((OPEN, FIRST))]


def log_rows(folder: Path, records: int, rate: int, found: dict[str, Any]) -> list[Row]:
    """Returns rows with the median time of a call; ``found`` gets the 99th percentile of each pass.

    Records are due one by one at the rate; a row that falls behind goes on as fast as it can.
    """
    record = bytes(200)

    def paced(name: str, count: int, made: Callable[[], Any]) -> Row:
        def run() -> Sample:
            times = []
            with made() as append:
                begin = time.perf_counter_ns()
                for number in range(count):
                    due = begin + number * 1_000_000_000 // rate
                    while (now := time.perf_counter_ns()) < due:
                        pass
                    append(record)
                    times.append(time.perf_counter_ns() - now)
            found.setdefault(name, []).append(percentile(times, 0.99) / 1e9)
            return Sample(percentile(times, 0.5) / 1e9, 1)

        return Row(name, run)

    @contextmanager
    def log() -> Iterator[Callable[[bytes], object]]:
        with AsyncLog(folder / "log", keep=1) as made:
            yield made.append

    @contextmanager
    def plain(durable: bool) -> Iterator[Callable[[bytes], object]]:
        with open(folder / "plain", "wb") as file:

            def append(each: bytes) -> None:
                file.write(each)
                file.flush()
                if durable:
                    os.fdatasync(file.fileno())

            yield append

    return [
        paced("AsyncLog.append", records, log),
        paced("write and flush", records, partial(plain, False)),
        paced("write, flush and fdatasync", max(1, records // 500), partial(plain, True)),
    ]
