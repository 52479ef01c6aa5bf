"""This package beside fio, DeepSpeed and plain Python, on the same file in one run. docs/benchmarks.md explains it."""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))  # so that it runs from anywhere, uninstalled too

from benchmarks import cached, contenders, deepspeed_rows, files, machine, memory_use, small_io, start_up
from benchmarks.measure import MIB, interleave, parse_size, size_words
from benchmarks.tables import Table, as_json, as_text, plot

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
_ONCE = ("start",)  # has nothing to do with the folder
_STEP = 4 * MIB  # a block of fio's best


def arguments(words: Sequence[str] | None) -> argparse.Namespace:
    """Exits with status 2 on wrong ones."""

    def size(text: str) -> int:
        try:
            value = parse_size(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None
        if value % _STEP:
            raise argparse.ArgumentTypeError(f"{text} is not a multiple of {size_words(_STEP)}")
        return value

    def count(text: str) -> int:
        if not text.isdigit() or int(text) < 1:
            raise argparse.ArgumentTypeError(f"{text!r} is not a number of at least 1")
        return int(text)

    groups = "\n".join(f"  {name:8} {words}" for name, words in GROUPS.items())
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").partition("\n")[0],
        epilog=f"groups:\n{groups}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--path", action="append", metavar="DIR", help="folder to measure in (default: this one); may be repeated"
    )
    parser.add_argument("--size", type=size, default="1G", help="of the file; a multiple of 4M (default 1G)")
    parser.add_argument("--rounds", type=count, default=7, help="timed passes over all rows of a table (default 7)")
    parser.add_argument("--only", nargs="+", choices=GROUPS, metavar="GROUP", help="only these groups, listed below")
    parser.add_argument("--json", metavar="FILE", help="write the figures of every round to FILE")
    parser.add_argument("--plot", metavar="FILE.png", help="draw the throughputs; needs matplotlib")
    parser.add_argument("--no-deepspeed", action="store_true", help="leave out DeepSpeed's rows")
    parser.add_argument("--build-times", action="store_true", help="group start for DeepSpeed too: takes minutes")
    given = parser.parse_args(words)
    given.path = given.path or ["."]
    for folder in given.path:
        if not os.path.isdir(folder):
            parser.error(f"--path {folder}: no such folder")
    for name in ("json", "plot"):
        file = getattr(given, name)
        if file and not os.path.isdir(os.path.dirname(os.path.abspath(file))):
            parser.error(f"--{name} {file}: its folder does not exist")
    if given.plot:
        try:
            import matplotlib  # type: ignore[import-not-found,unused-ignore]  # noqa: F401
        except ImportError:
            parser.error("--plot needs matplotlib: pip install matplotlib")
    return given


def throughput(work: contenders.Work, with_deepspeed: bool) -> Table:
    """All who read, or write, the whole file."""
    group = "write" if work.write else "read"
    rows = contenders.fio_rows(work) + contenders.nvme_ops_rows(work)
    rows += deepspeed_rows.rows(work) if with_deepspeed else []
    rows += contenders.plain_rows(work)
    return Table(group, f"{GROUPS[group]}, {size_words(work.size)}", "GB/s", rows, contenders.FIO_BEST)


def folder_tables(given: argparse.Namespace, path: str, groups: list[str], progress: Callable[[str], None]) -> Any:
    """Measures one folder; yields tables, and the dictionary of the memory group."""
    for group in groups:
        # a new one for each, so that a table's memory is free before the next
        work = contenders.Work(path, given.size, group == "write")
        if group in ("read", "write"):
            table = throughput(work, not given.no_deepspeed)
        elif group == "cached":
            title = f"{GROUPS[group]}, {size_words(given.size)}"
            table = Table(group, title, "GB/s", cached.rows(work), cached.PREADV)
        elif group == "random":
            table = Table(group, GROUPS[group], "kIOPS", small_io.random_rows(work), small_io.FIO_RANDOM)
        elif group == "latency":
            table = Table(group, GROUPS[group], "us", small_io.latency_rows(work), small_io.PYTHON_DIRECT)
        elif group == "submit":
            table = Table(group, GROUPS[group], "us", small_io.submit_rows(work))
        else:
            yield memory_use.staging(path, given.size)
            continue
        interleave(table.rows, given.rounds, progress)
        yield table


def memory_text(used: dict[str, int | None]) -> str:
    """The memory group for a reader."""
    words = {name.replace("_", " "): "unknown" if value is None else size_words(value) for name, value in used.items()}
    return "\n".join([GROUPS["memory"], *(f"{name:22}{value}" for name, value in words.items())])


def measure_folder(
    given: argparse.Namespace, folder: str, groups: list[str], progress: Callable[[str], None]
) -> tuple[dict[str, Any], list[Table]]:
    """Runs the groups in one folder, printing each table when it is done."""
    found: dict[str, Any] = {"place": machine.place(folder), "tables": []}
    tables = []
    print(f"\n== {folder}: " + "; ".join(f"{name} {words}" for name, words in found["place"].items()))
    with files.scratch(folder, 2 * given.size + 64 * MIB) as scratch:
        path = os.path.join(scratch, "data")
        progress(f"writing {size_words(given.size)} to {folder}")
        files.make_file(path, given.size)
        for table in folder_tables(given, path, groups, progress):
            progress("")
            if isinstance(table, Table):
                tables.append(table)
                found["tables"].append(as_json(table))
                print(f"\n{as_text(table)}", flush=True)
            else:
                found["memory"] = table
                print(f"\n{memory_text(table)}", flush=True)
    return found, tables


def measure(
    given: argparse.Namespace, progress: Callable[[str], None]
) -> tuple[dict[str, Any], dict[str, list[Table]]]:
    """Everything: what the JSON file shall hold, and the tables by folder."""
    groups = [group for group in GROUPS if not given.only or group in given.only]
    if not given.no_deepspeed and {"read", "write"} & set(groups):
        progress("loading DeepSpeed's op; the first time it is compiled, which takes minutes")
        deepspeed_rows.module()
    progress("loading this package's op")
    result: dict[str, Any] = {"machine": machine.machine(), "size": given.size, "rounds": given.rounds, "folders": {}}
    tables: dict[str, list[Table]] = {}
    progress("")
    print("; ".join(f"{name} {words}" for name, words in result["machine"].items()))
    here = [group for group in groups if group not in _ONCE]
    for folder in given.path if here else []:
        result["folders"][folder], tables[folder] = measure_folder(given, folder, here, progress)
    if "start" in groups:
        packages = ("nvme_ops", "DeepSpeed") if given.build_times else ("nvme_ops",)
        with tempfile.TemporaryDirectory(prefix="nvme_ops-bench-") as scratch:
            table = Table("start", GROUPS["start"], "s", start_up.rows(scratch, packages, given.rounds, progress))
        progress("")
        result["start"], tables["start"] = as_json(table), [table]
        print(f"\n{as_text(table)}")
    return result, tables


def show_progress(words: str) -> None:
    """One line that is written over, on a terminal only."""
    if sys.stderr.isatty():
        print(f"\r\033[K{words}", end="", file=sys.stderr, flush=True)


def main(words: Sequence[str] | None = None) -> int:
    """Status 0; 1 when a folder cannot be used or a row moved wrong bytes; 2 for wrong arguments; 130 after Ctrl-C."""
    given = arguments(words)
    files.leave_on_sigterm()
    try:
        result, tables = measure(given, show_progress)
    except files.NotUsable as reason:
        print(f"raw_io.py: {reason}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\ninterrupted; the files are removed", file=sys.stderr)
        return 130
    if given.json:
        Path(given.json).write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    if given.plot and not plot(tables, given.plot):
        print("raw_io.py: nothing to plot: no throughput was measured", file=sys.stderr)
    wrong = [row.name for group in tables.values() for table in group for row in table.rows if row.wrong]
    if wrong:
        print(f"raw_io.py: wrong data: {', '.join(wrong)}", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
