"""Random reading of samples into batches, cold: this package beside the loaders and formats that people use.

Every pass goes through all samples of a size once, in an order of its own. Workers of torch's loaders stay between
passes. Formats of which the many files take long are measured with fewer samples.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))  # so that it runs from anywhere, uninstalled too

from benchmarks import command, data_rows
from nvme_ops.arguments import positive, size
from nvme_ops.bench.tables import Table
from nvme_ops.text import parse_size, size_words

GROUPS = {"random": "samples of each size in random order, in GB/s"}
_SIZES = ("4K", "128K", "1M")


def tables(run: command.Run, scratch: str, found: dict[str, Any]) -> Generator[Table, None, None]:
    """Of one folder."""
    found["ratios"] = {}
    for each in run.given.sizes:
        command.show_progress(f"writing samples of {size_words(each)} in each format")
        work = data_rows.Work(scratch, each, run.given.size, run.given.workers)
        rows = data_rows.our_rows(work)
        rows += [data_rows.fio_row(work), data_rows.plain_row(work), data_rows.mapped_row(work)]
        rows += [data_rows.webdataset_row(work), data_rows.streaming_row(work)]
        title = f"random samples of {size_words(each)}, cold, batches of {work.batch}"
        table = Table("random", title, "GB/s", rows, data_rows.OURS, ("CPU s/GiB",))
        yield table
        ours = rows[0]
        ratios = {row.name: statistics.median(pairs) for row in rows[1:] if (pairs := table.against(ours, row.name))}
        found["ratios"][str(each)] = ratios
        print("the first row is " + "; ".join(f"{ratio:.2f} x {name}" for name, ratio in ratios.items()), flush=True)


def measure(given: argparse.Namespace) -> command.Run:
    """All sizes."""
    return command.Run(given, sizes=given.sizes).folders(6 * len(given.sizes), tables)


def main(words: Sequence[str] | None = None) -> int:
    """Status 0; 1 when a folder cannot be used or a row moved wrong bytes; 2 for wrong arguments; 130 after Ctrl-C."""
    parser = command.parser(__file__, __doc__, GROUPS)
    parser.add_argument("--sizes", type=size, nargs="+", metavar="SIZE", default=[parse_size(text) for text in _SIZES],
                        help=f"of a sample (default {' '.join(_SIZES)})")  # fmt: skip
    parser.add_argument("--workers", type=positive, default=2, metavar="N", help="of torch's loaders (default 2)")
    return command.run(command.parse(parser, words), measure)


if __name__ == "__main__":
    sys.exit(main())
