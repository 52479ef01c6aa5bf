"""What the benchmarks share: their arguments, how tables are measured and kept, new processes, and how a run ends."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from nvme_ops.arguments import check_output, positive, size
from nvme_ops.bench import machine
from nvme_ops.bench.measure import Unavailable, interleave
from nvme_ops.bench.output import show_progress as show_progress
from nvme_ops.bench.tables import Table, as_json, as_text, plot
from nvme_ops.measuring import files, stop
from nvme_ops.measuring.scratch import scratch_folder
from nvme_ops.text import MIB, size_words

ROOT = Path(__file__).parent.parent
BUILDERS = {"nvme_ops": "nvme_ops.op_builder", "DeepSpeed": "deepspeed.ops.op_builder"}
STEP = 4 * MIB  # a block of fio's best: sizes are multiples of it


def file_size(text: str) -> int:
    """A multiple of ``STEP`` for argparse."""
    value = size(text)
    if value % STEP:
        raise argparse.ArgumentTypeError(f"{text} is not a multiple of {size_words(STEP)}")
    return value


def parser(
    file: str, description: str | None, groups: Mapping[str, str], folders: bool = True
) -> argparse.ArgumentParser:
    """With the arguments that all benchmarks take, or those in folders. ``file``, ``description``: of the module."""
    listed = "\n".join(f"  {name:8} {words}" for name, words in groups.items())
    made = argparse.ArgumentParser(
        prog=os.path.basename(file),
        description=(description or "").partition("\n")[0],
        epilog=f"groups:\n{listed}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    rounds = 7 if folders else 5
    if folders:
        made.add_argument(
            "--path", action="append", metavar="DIR", help="folder to measure in (default: this one); may be repeated"
        )
        made.add_argument("--no-deepspeed", action="store_true", help="leave out DeepSpeed's rows")
    made.add_argument("--size", type=file_size, default="1G", help="of the file; a multiple of 4M (default 1G)")
    made.add_argument("--rounds", type=positive, default=rounds,
                      help=f"timed passes over all rows of a table (default {rounds})")  # fmt: skip
    made.add_argument("--only", nargs="+", choices=groups, metavar="GROUP", help="only these groups, listed below")
    made.add_argument("--json", metavar="FILE", help="write the figures of every round to FILE")
    made.add_argument("--plot", metavar="FILE.png", help="draw the throughputs; needs matplotlib")
    made.set_defaults(program=made.prog, groups=list(groups), path=None)
    return made


def parse(made: argparse.ArgumentParser, words: Sequence[str] | None) -> argparse.Namespace:
    """The arguments; ``groups`` has the chosen ones. Exits with status 2 on wrong ones."""
    given = made.parse_args(words)
    given.path = given.path or ["."]
    given.groups = [name for name in given.groups if not given.only or name in given.only]
    for folder in given.path:
        if not os.path.isdir(folder):
            made.error(f"--path {folder}: no such folder")
    try:
        for name in ("json", "plot"):
            if file := getattr(given, name):
                check_output(f"--{name}", file)
    except ValueError as error:
        made.error(str(error))
    if given.plot:
        try:
            import matplotlib  # type: ignore[import-not-found,unused-ignore]  # noqa: F401
        except ImportError:
            made.error("--plot needs matplotlib: pip install matplotlib")
    return given


def listed(found: Mapping[str, object]) -> str:
    """Names and values on one line."""
    return "; ".join(f"{name} {words}" for name, words in found.items())


class Run:
    """What was measured: ``result`` is for the JSON file; ``tables``, by folder or group, for the plot."""

    def __init__(self, given: argparse.Namespace, **more: object) -> None:
        self.given = given
        self.tables: dict[str, list[Table]] = {}
        show_progress("loading this package's op")
        self.result: dict[str, Any] = {"machine": machine.machine(), "size": given.size, "rounds": given.rounds, **more}
        show_progress("")
        print(listed(self.result["machine"]))

    def folders(
        self,
        copies: int,
        make: Callable[[Run, str, dict[str, Any]], Generator[Table, None, None]],
        measured: bool = False,
    ) -> Run:
        """Measures, in each folder, the tables of ``make(run, scratch, found)``, one after the other.

        ``scratch`` has room for so many ``copies`` of the file; ``found`` is what the JSON file shall hold;
        ``measured``: ``make`` has measured the rows of its tables itself.
        """
        self.result["folders"] = {}
        for folder in self.given.path:
            found: dict[str, Any] = {"place": machine.place(folder), "tables": []}
            self.result["folders"][folder] = found
            print(f"\n== {folder}: {listed(found['place'])}")
            with (
                scratch_folder(folder, copies * self.given.size + 64 * MIB) as scratch,
                closing(make(self, scratch, found)) as tables,
            ):
                for table in tables:
                    if not measured:
                        interleave(table.rows, self.given.rounds, show_progress)
                    found["tables"].append(self.show(folder, table))
        return self

    def show(self, key: str, table: Table) -> dict[str, Any]:
        """Prints a table that was measured and keeps it; what the JSON file shall hold of it."""
        show_progress("")
        print(f"\n{as_text(table)}", flush=True)
        self.tables.setdefault(key, []).append(table)
        return as_json(table)


def data_file(scratch: str, size: int) -> str:
    """A new file for all rows to work on."""
    path = os.path.join(scratch, "data")
    show_progress(f"writing {size_words(size)} to {scratch}")
    files.make_file(path, size)
    return path


def run(given: argparse.Namespace, measure: Callable[[argparse.Namespace], Run]) -> int:
    """Status 0; 1 when a folder cannot be used or a row moved wrong bytes; 130 after Ctrl-C."""
    stop.leave_on_signals()
    try:
        found = measure(given)
    except files.NotUsable as reason:
        print(f"{given.program}: {reason}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\ninterrupted; the files are removed", file=sys.stderr)
        return 130
    if given.json:
        Path(given.json).write_text(json.dumps(found.result, indent=2) + "\n", encoding="utf-8")
    if given.plot and not plot(found.tables, given.plot):
        print(f"{given.program}: nothing to plot: no throughput was measured", file=sys.stderr)
    wrong = [row.name for group in found.tables.values() for table in group for row in table.rows if row.wrong]
    if wrong:
        print(f"{given.program}: wrong data: {', '.join(wrong)}", file=sys.stderr)
    return 1 if wrong else 0


def environment(checkout: bool = True) -> dict[str, str]:
    """For new processes: with the programs beside this interpreter and, or without, the modules of this checkout."""
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    known = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    path = [os.path.dirname(sys.executable), os.environ.get("PATH", os.defpath)]
    return {**kept, "PATH": os.pathsep.join(path), **({"PYTHONPATH": os.pathsep.join(known)} if checkout else {})}


def in_new_process(program: str, *words: str, folder: str | None = None, **variables: str) -> str:
    """The last line that a Python program prints. Without ``nvme_ops`` in it, it finds nothing of this checkout.

    DeepSpeed would take our ``op_builder`` for one of its own. Raises Unavailable with the last line of its errors.
    """
    done = subprocess.run(
        stop.tied([sys.executable, "-c", program, *words]),
        env={"DS_ACCELERATOR": "cpu", **environment(checkout="nvme_ops" in program), **variables},
        cwd=folder,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )
    if done.returncode:
        raise Unavailable((done.stderr.strip() or f"exit status {done.returncode}").splitlines()[-1])
    return done.stdout.strip().splitlines()[-1]
