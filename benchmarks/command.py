"""What the benchmarks' command lines share: arguments, progress, and how a run ends."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from nvme_ops.arguments import check_output, positive, size
from nvme_ops.bench import files, stop
from nvme_ops.bench.measure import interleave
from nvme_ops.bench.tables import Table, as_json, as_text, plot
from nvme_ops.text import MIB, size_words

STEP = 4 * MIB  # a block of fio's best: sizes are multiples of it

Progress = Callable[[str], None]
Result = tuple[dict[str, Any], dict[str, list[Table]]]  # what the JSON file shall hold, and the tables by folder


def file_size(text: str) -> int:
    """A multiple of ``STEP`` for argparse."""
    value = size(text)
    if value % STEP:
        raise argparse.ArgumentTypeError(f"{text} is not a multiple of {size_words(STEP)}")
    return value


def parser(description: str, groups: dict[str, str]) -> argparse.ArgumentParser:
    """With the arguments that every benchmark of a folder takes."""
    listed = "\n".join(f"  {name:8} {words}" for name, words in groups.items())
    made = argparse.ArgumentParser(
        description=description,
        epilog=f"groups:\n{listed}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    made.add_argument(
        "--path", action="append", metavar="DIR", help="folder to measure in (default: this one); may be repeated"
    )
    made.add_argument("--size", type=file_size, default="1G", help="of the file; a multiple of 4M (default 1G)")
    made.add_argument("--rounds", type=positive, default=7, help="timed passes over all rows of a table (default 7)")
    made.add_argument("--only", nargs="+", choices=groups, metavar="GROUP", help="only these groups, listed below")
    made.add_argument("--json", metavar="FILE", help="write the figures of every round to FILE")
    made.add_argument("--plot", metavar="FILE.png", help="draw the throughputs; needs matplotlib")
    made.add_argument("--no-deepspeed", action="store_true", help="leave out DeepSpeed's rows")
    return made


def parse(made: argparse.ArgumentParser, words: Sequence[str] | None) -> argparse.Namespace:
    """Exits with status 2 on wrong arguments."""
    given = made.parse_args(words)
    given.path = given.path or ["."]
    for folder in given.path:
        if not os.path.isdir(folder):
            made.error(f"--path {folder}: no such folder")
    for name in ("json", "plot"):
        file = getattr(given, name)
        if file:
            try:
                check_output(f"--{name}", file)
            except ValueError as error:
                made.error(str(error))
    if given.plot:
        try:
            import matplotlib  # type: ignore[import-not-found,unused-ignore]  # noqa: F401
        except ImportError:
            made.error("--plot needs matplotlib: pip install matplotlib")
    return given


def show_progress(words: str) -> None:
    """One line that is written over, on a terminal only."""
    if sys.stderr.isatty():
        print(f"\r\033[K{words}", end="", file=sys.stderr, flush=True)


def measure_table(table: Table, rounds: int, progress: Progress) -> dict[str, Any]:
    """Measures its rows and prints it; returns what the JSON file shall hold of it."""
    interleave(table.rows, rounds, progress)
    progress("")
    print(f"\n{as_text(table)}", flush=True)
    return as_json(table)


def run(name: str, given: argparse.Namespace, measure: Callable[[argparse.Namespace, Progress], Result]) -> int:
    """Status 0; 1 when a folder cannot be used or a row moved wrong bytes; 130 after Ctrl-C."""
    stop.leave_on_signals()
    try:
        result, tables = measure(given, show_progress)
    except files.NotUsable as reason:
        print(f"{name}: {reason}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\ninterrupted; the files are removed", file=sys.stderr)
        return 130
    if given.json:
        Path(given.json).write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    if given.plot and not plot(tables, given.plot):
        print(f"{name}: nothing to plot: no throughput was measured", file=sys.stderr)
    wrong = [row.name for group in tables.values() for table in group for row in table.rows if row.wrong]
    if wrong:
        print(f"{name}: wrong data: {', '.join(wrong)}", file=sys.stderr)
    return 1 if wrong else 0
