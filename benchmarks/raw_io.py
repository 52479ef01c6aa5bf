"""This package beside fio, DeepSpeed and plain Python, on the same file in one run. docs/benchmarks.md explains it."""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))  # so that it runs from anywhere, uninstalled too

from benchmarks import cached, command, contenders, deepspeed_rows, memory_use, small_io, start_up
from nvme_ops.bench import files, machine
from nvme_ops.bench.engines import deepspeed
from nvme_ops.bench.measure import interleave
from nvme_ops.bench.scratch import scratch_folder
from nvme_ops.bench.tables import Table, as_json, as_text
from nvme_ops.bench.work import Work
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
_ONCE = ("start",)  # has nothing to do with the folder


def arguments(words: Sequence[str] | None) -> argparse.Namespace:
    """Exits with status 2 on wrong ones."""
    parser = command.parser((__doc__ or "").partition("\n")[0], GROUPS)
    parser.add_argument("--build-times", action="store_true", help="group start for DeepSpeed too: takes minutes")
    return command.parse(parser, words)


def throughput(work: Work, with_deepspeed: bool) -> Table:
    """All who read, or write, the whole file."""
    group = "write" if work.write else "read"
    rows = contenders.fio_rows(work) + contenders.nvme_ops_rows(work)
    rows += deepspeed_rows.rows(work) if with_deepspeed else []
    rows += contenders.plain_rows(work)
    return Table(group, f"{GROUPS[group]}, {size_words(work.size)}", "GB/s", rows, contenders.FIO_BEST)


def folder_tables(given: argparse.Namespace, path: str, groups: list[str], progress: command.Progress) -> Any:
    """Measures one folder; yields tables, and the dictionary of the memory group."""
    for group in groups:
        # a new one for each, so that a table's memory is free before the next
        work = Work(path, given.size, group == "write")
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
    given: argparse.Namespace, folder: str, groups: list[str], progress: command.Progress
) -> tuple[dict[str, Any], list[Table]]:
    """Runs the groups in one folder, printing each table when it is done."""
    found: dict[str, Any] = {"place": machine.place(folder), "tables": []}
    tables = []
    print(f"\n== {folder}: " + "; ".join(f"{name} {words}" for name, words in found["place"].items()))
    with scratch_folder(folder, 2 * given.size + 64 * MIB) as scratch:
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


def measure(given: argparse.Namespace, progress: command.Progress) -> command.Result:
    """Everything: what the JSON file shall hold, and the tables by folder."""
    groups = [group for group in GROUPS if not given.only or group in given.only]
    if not given.no_deepspeed and {"read", "write"} & set(groups):
        progress("loading DeepSpeed's op; the first time it is compiled, which takes minutes")
        deepspeed.load()
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
        with scratch_folder(tempfile.gettempdir(), 64 * MIB) as scratch:
            table = Table("start", GROUPS["start"], "s", start_up.rows(scratch, packages, given.rounds, progress))
        progress("")
        result["start"], tables["start"] = as_json(table), [table]
        print(f"\n{as_text(table)}")
    return result, tables


def main(words: Sequence[str] | None = None) -> int:
    """Status 0; 1 when a folder cannot be used or a row moved wrong bytes; 2 for wrong arguments; 130 after Ctrl-C."""
    return command.run("raw_io.py", arguments(words), measure)


if __name__ == "__main__":
    sys.exit(main())
