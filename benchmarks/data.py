"""Random reading of samples into batches, cold: this package beside the loaders and formats that people use.

Every pass goes through all samples of a size once, in an order of its own. Workers of torch's loaders stay between
passes. Formats with a file for each sample are measured with 8,192 of them at most.
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

from benchmarks import command
from nvme_ops.arguments import positive, size
from nvme_ops.bench import fio
from nvme_ops.bench.measure import Row, Sample, Unavailable, WrongData, timed
from nvme_ops.bench.tables import Table
from nvme_ops.bench.workload.feed import cool
from nvme_ops.bench.workload.readers import OURS, READERS, DataSet, Reader, checked, made
from nvme_ops.measuring.files import make_cold
from nvme_ops.text import MIB, parse_size, size_words

GROUPS = {"random": "samples of each size in random order, in GB/s"}
FIO = "fio randread, depth"
_DEPTHS = (128, 1024)  # what keeps a device busy; and what has as much memory as the batches of 128 KiB samples
_MOST_FIO_BYTES = 128 * MIB
_SIZES = ("4K", "128K", "1M")
_BATCH, _MOST_BATCH_BYTES = 256, 64 * MIB


def reader_row(name: str, data: DataSet) -> Row:
    """All batches of an epoch. The CPU time of workers is not known."""
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
    try:
        for _ in checked(reader):
            pass
    except ValueError as error:
        raise WrongData(str(error)) from None


def _empty(name: str, words: str) -> Row:
    def run() -> Sample:
        raise Unavailable(words)

    return Row(name, run)


def fio_row(data: DataSet, depth: int) -> Row:
    """Blocks of the same size from this package's file, into ``depth`` buffers that it uses again and again."""
    (path,) = (data.folder / OURS).glob("samples-*")
    shapes = fio.variants([f"--bs={data.sizes[0]}", f"--iodepth={depth}"])
    name = f"{FIO} {depth}"
    return fio.row(name, "randread", lambda: str(path), sum(data.sizes), partial(make_cold, str(path)), shapes)


def tables(run: command.Run, scratch: str, found: dict[str, Any]) -> Generator[Table, None, None]:
    """Of one folder."""
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


def measure(given: argparse.Namespace) -> command.Run:
    """All sizes."""
    return command.Run(given, sizes=given.sizes).folders(7 * len(given.sizes), tables)


def main(words: Sequence[str] | None = None) -> int:
    """Status 0; 1 when a folder cannot be used or a row moved wrong bytes; 2 for wrong arguments; 130 after Ctrl-C."""
    parser = command.parser(__file__, __doc__, GROUPS)
    parser.add_argument("--sizes", type=size, nargs="+", metavar="SIZE", default=[parse_size(text) for text in _SIZES],
                        help=f"of a sample (default {' '.join(_SIZES)})")  # fmt: skip
    parser.add_argument("--workers", type=positive, default=2, metavar="N", help="of torch's loaders (default 2)")
    return command.run(command.parse(parser, words), measure)


if __name__ == "__main__":
    sys.exit(main())
