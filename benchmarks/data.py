"""Random reading of samples into batches, cold: this package beside the loaders and formats that people use.

Every pass of reading goes through all samples of a size once, in its own order. Workers of torch's loaders stay alive
between passes. Formats with a file for each sample are measured with 8,192 of them at most. Two more groups open a
large index and append to a log.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Generator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))  # so that it runs from anywhere, uninstalled too

from benchmarks import command, data_rows
from nvme_ops.arguments import positive, size
from nvme_ops.bench import fio
from nvme_ops.bench.measure import Row, Sample, Unavailable, WrongData, timed
from nvme_ops.bench.tables import Table
from nvme_ops.bench.workload.feed import cool
from nvme_ops.bench.workload.readers import OURS, READERS, DataSet, Reader, checked, made
from nvme_ops.measuring.files import make_cold
from nvme_ops.text import MIB, parse_size, rounded, size_words

GROUPS = {
    "random": "samples of each size in random order, in GB/s",
    "index": "a large index, cold, in a new process, in s",
    "log": "records of 200 bytes at a rate: what each call costs, in us",
}
FIO = "fio randread, depth"
_DEPTHS = (128, 1024)  # what keeps a device busy; and what has as much memory as the batches of 128 KiB samples
_MOST_FIO_BYTES = 128 * MIB
_SIZES = ("4K", "128K", "1M")
_BATCH, _MOST_BATCH_BYTES = 256, 64 * MIB


def reader_row(name: str, data: DataSet) -> Row:
    """Returns a row that reads all batches of an epoch. The CPU time of workers is not known."""
    try:
        reader = made(name, data)
    except Unavailable as reason:
        return _empty(name, str(reason))
    sizes = reader.data.sizes

    def run() -> Sample:
        def work() -> None:
            seen = sum(len(batch) for batch in reader.batches())
            if seen != len(sizes):
                raise WrongData(f"{seen} samples instead of {len(sizes)}")

        sample = timed(work, sum(sizes))
        return sample if name == OURS else replace(sample, cpu_seconds=None)

    return Row(name, run, partial(cool, reader), partial(_check, reader))


def _check(reader: Reader) -> None:
    for _ in checked(reader):
        pass


def _empty(name: str, words: str) -> Row:
    def run() -> Sample:
        raise Unavailable(words)

    return Row(name, run)


def fio_row(data: DataSet, depth: int) -> Row:
    """Returns fio's row: blocks of the same size from this package's file, into ``depth`` buffers that are reused."""
    (path,) = (data.folder / OURS).glob("samples-*")
    shapes = fio.variants([f"--bs={data.sizes[0]}", f"--iodepth={depth}"])
    name = f"{FIO} {depth}"
    return fio.row(name, "randread", lambda: str(path), sum(data.sizes), partial(make_cold, str(path)), shapes)


def random_tables(run: command.Run, scratch: str, found: dict[str, Any]) -> Generator[Table, None, None]:
    """Yields a table for each size."""
    found["ratios"] = {}
    for each in run.given.sizes:
        command.show_progress(f"writing samples of {size_words(each)} in each format")
        folder = Path(scratch, str(each))
        folder.mkdir()
        batch = max(1, min(_BATCH, _MOST_BATCH_BYTES // each))
        data = DataSet(folder, [each] * (run.given.size // each), batch, workers=run.given.workers)
        rows = [reader_row(name, data) for name in READERS]
        rows += [fio_row(data, depth) for depth in _DEPTHS if depth * each <= _MOST_FIO_BYTES]
        title = f"random samples of {size_words(each)}, cold, batches of {batch}, {run.given.workers} workers"
        table = Table("random", title, "GB/s", rows, OURS, ("CPU s/GiB",))
        yield table
        ratios = {
            row.name: statistics.median(pairs)
            for row in rows
            if row.name != OURS and (pairs := table.against(rows[0], row.name))
        }
        found["ratios"][str(each)] = ratios
        print("the first row is " + "; ".join(f"{ratio:.2f} x {name}" for name, ratio in ratios.items()), flush=True)


def index_tables(run: command.Run, scratch: str, found: dict[str, Any]) -> Generator[Table, None, None]:
    """Yields the table of one index."""
    records = run.given.records
    command.show_progress(f"writing {records:,} samples")
    folder = Path(scratch, "index")
    folder.mkdir()
    data_rows.make_store(folder, records)
    kept: dict[str, Any] = {"records": records}
    found["index"] = kept
    yield Table("index", f"{records:,} samples of varying size, cold", "s", data_rows.index_rows(folder, kept))
    if kept["peak_bytes"]:
        print(f"memory for both: {size_words(int(statistics.median(kept['peak_bytes'])))}")


def log_tables(run: command.Run, scratch: str, found: dict[str, Any]) -> Generator[Table, None, None]:
    """Yields the table of one rate."""
    kept: dict[str, list[float]] = {}
    found["log"] = kept
    title = f"records of 200 bytes, {run.given.rate:,} a second, each call"
    yield Table("log", title, "us", data_rows.log_rows(Path(scratch), run.given.log_records, run.given.rate, kept))
    for name, latest in kept.items():
        print(f"99 % of each pass of {name}: {rounded(statistics.median(latest) * 1e6, 3)} us")


_TABLES = {"random": random_tables, "index": index_tables, "log": log_tables}


def tables(run: command.Run, scratch: str, found: dict[str, Any]) -> Generator[Table, None, None]:
    """Yields the tables of one folder."""
    for group in run.given.groups:
        yield from _TABLES[group](run, scratch, found)


def measure(given: argparse.Namespace) -> command.Run:
    """Measures the groups that are wanted."""
    copies = 7 * len(given.sizes) if "random" in given.groups else 0
    if "index" in given.groups:
        copies += -(-given.records * data_rows.BYTES // given.size)
    return command.Run(given, sizes=given.sizes).folders(copies, tables)


def main(words: Sequence[str] | None = None) -> int:
    """Returns 0; 1 when a folder cannot be used or a row moved wrong bytes; 2 for wrong arguments; 130 after Ctrl-C."""
    parser = command.parser(__file__, __doc__, GROUPS)
    parser.add_argument("--sizes", type=size, nargs="+", metavar="SIZE", default=[parse_size(text) for text in _SIZES],
                        help=f"of a sample (default {' '.join(_SIZES)})")  # fmt: skip
    parser.add_argument("--workers", type=positive, default=2, metavar="N", help="of torch's loaders (default 2)")
    parser.add_argument("--records", type=positive, default=100_000_000, metavar="N",
                        help="of the index (default 100,000,000)")  # fmt: skip
    parser.add_argument("--log-records", type=positive, default=100_000, metavar="N",
                        help="of each pass of the log (default 100,000)")  # fmt: skip
    parser.add_argument("--rate", type=positive, default=100_000, metavar="N",
                        help="of the log's records, a second (default 100,000)")  # fmt: skip
    return command.run(command.parse(parser, words), measure)


if __name__ == "__main__":
    sys.exit(main())
