"""Runs all benchmarks: parses flags, measures, prints and keeps tables, starts processes and ends a run.

A benchmark is a module beside this file with a ``PROGRAM``: what it can measure, and a function that makes its tables.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import itertools
import json
import os
import pkgutil
import statistics
import subprocess
import sys
import tempfile
import time
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.programs import tied
from nvme_ops.base.command_line import command_line, listed, positive, size
from nvme_ops.base.text import MIB, share_words, size_words
from nvme_ops.measure import files, machine, stop
from nvme_ops.measure.rows import Row, Sample, Unavailable, WrongData, interleave
from nvme_ops.measure.scratch import scratch_folder
from nvme_ops.measure.tables import (
    COLUMNS,
    Table,
    add_outputs,
    as_json,
    as_text,
    check_outputs,
    deliver,
    ratio_words,
    show_progress,
)

ROOT = Path(__file__).resolve().parent.parent
STEP = 4 * MIB  # a block of fio's best: sizes are multiples of it


def _figures(words: Callable[[float], str], *names: str) -> None:
    """Adds columns of further figures to those of nvme-bench."""
    COLUMNS.update({name: (lambda run, name=name: run.figures.get(name), words) for name in names})  # type: ignore[misc]


_figures(share_words, "of the bound", "hits")
_figures(lambda seconds: f"{ratio_words(seconds)} s",
         "step", "first token", "load", "forward", "backward", "optimizer", "LRU step")  # fmt: skip
_figures(size_words, "read per step", "written per step", "read and written", "while decoding", "LRU reads",
         "over the bus", "device memory", "LRU over the bus")  # fmt: skip
_figures(ratio_words, "GB/s", "reads / LRU", "step / LRU", "guesses right", "guesses wrong")


@dataclass(frozen=True)
class Program:
    """A benchmark. ``tables(run, scratch, result)`` makes the tables of one folder, one after the other.

    Tables whose rows have no samples yet are measured when they are yielded. ``scratch`` is empty, with room for
    ``copies`` files of ``--size``; what is put into ``result`` is in the JSON file.
    """

    groups: Mapping[str, str]
    tables: Callable[[Run, str, dict[str, Any]], Iterator[Table]]
    copies: int | Callable[[Namespace], int] = 2
    #: Flag -> its help, its default (a list: several values; False: a switch), and a parser of values or the choices
    flags: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    check: Callable[[Namespace], object] = lambda _: None  # raises ValueError
    size: str = "1G"
    rounds: int = 7
    #: Called before this package's op is loaded; returns more facts for the first lines than those of the machine
    prepare: Callable[[Namespace], dict[str, str]] = lambda _: {}


def names() -> dict[str, str]:
    """Returns all benchmarks with the first line of their documentation."""
    infos = pkgutil.iter_modules([str(ROOT / "benchmarks")])
    texts = {info.name: Path(__file__).with_name(f"{info.name}.py").read_text(encoding="utf-8") for info in infos}
    programs = [name for name, text in texts.items() if "\nPROGRAM = " in text or name == "page"]
    return {name: texts[name].partition("\n")[0].strip('"') for name in programs}


def main(argv: Sequence[str]) -> int:
    """Runs a benchmark; returns 0; 1: wrong bytes; 2: wrong arguments, unusable folders; 130: after Ctrl-C."""
    known = names()
    if not argv or argv[0] not in known:
        print(f"usage: python benchmarks NAME ...\n\n{listed(known.items(), 14)}", file=sys.stderr)
        return 0 if argv in (["--help"], ["-h"]) else 2
    module = importlib.import_module(f"benchmarks.{argv[0]}")
    return int(module.main(argv[1:])) if argv[0] == "page" else run(argv[0], argv[1:])


def parse(name: str, argv: Sequence[str]) -> tuple[Program, Namespace]:
    """Returns a benchmark and its arguments; exits with status 2 on wrong ones."""
    module = importlib.import_module(f"benchmarks.{name}")
    program: Program = module.PROGRAM
    made = command_line(f"python benchmarks {name}", (module.__doc__ or "").partition("\n")[0],
                        f"groups:\n{listed(program.groups.items(), 14)}")  # fmt: skip
    add = made.add_argument
    add("--folder", action="append", metavar="DIR", help="to measure in (default: this one); may be repeated")
    add("--no-deepspeed", action="store_true", help="leave out DeepSpeed's rows")
    add("--size", type=file_size, default=program.size, help=f"of the file; a multiple of 4M (default {program.size})")
    add("--rounds", type=positive, default=program.rounds, metavar="N",
        help=f"timed passes over all rows of a table (default {program.rounds})")  # fmt: skip
    add("--only", nargs="+", choices=program.groups, metavar="GROUP", help="only these groups, listed below")
    add("--minutes", type=positive, metavar="N", help="leave out passes for which so many are too few")
    for flag, (told, default, *reads) in program.flags.items():
        read = reads[0] if reads else positive
        if default is False:
            add(flag, action="store_true", help=told)
            continue
        values = default if isinstance(default, list) else [default]
        parsed = [read(str(value)) if callable(read) else value for value in values]
        more: dict[str, Any] = {"default": parsed, "nargs": "+"} if values is default else {"default": parsed[0]}
        more |= {"type": read} if callable(read) else {"choices": read}
        add(flag, **more, metavar="SIZE" if read is size else "N",
            help=f"{told} (default {' '.join(map(str, values))})")  # fmt: skip
    add_outputs(add, ".json (the figures of every round), a picture's")
    args = made.parse_args(argv)
    args.groups = [group for group in program.groups if not args.only or group in args.only]
    args.folder = args.folder or ["."]
    try:
        for folder in args.folder:
            if not os.path.isdir(folder):
                raise ValueError(f"--folder {folder}: no such folder")
        check_outputs(args.output, pictures=True)
        program.check(args)
    except ValueError as error:
        made.error(str(error))
    return program, args


def file_size(text: str) -> int:
    """Parses a multiple of ``STEP``."""
    value = size(text)
    if value % STEP:
        raise argparse.ArgumentTypeError(f"{text} is not a multiple of {size_words(STEP)}")
    return value


class Run:
    """Runs a program. Its ``result`` is for the JSON file and the picture."""

    def __init__(self, program: Program, args: Namespace) -> None:
        self.args, self._longest = args, 0.0  # seconds of a pass
        args.end = time.monotonic() + 60 * args.minutes if args.minutes else 0
        about = program.prepare(args) | ({"time": f"at most {args.minutes} minutes"} if args.minutes else {})
        show_progress("loading this package's op")
        private = ("folder", "json", "output", "only", "end")
        kept = {name: value for name, value in vars(args).items() if name not in private}
        self.result: dict[str, Any] = {"machine": machine.machine(), **kept, "about": about, "folders": {}}
        show_progress("")
        print(machine.facts(self.result["machine"], about))
        copies = program.copies if isinstance(program.copies, int) else program.copies(args)
        for folder in args.folder:
            result: dict[str, Any] = {"place": machine.place(folder), "tables": [], "notes": []}
            print(f"\n== {folder}: {machine.facts(result['place'])}")
            with scratch_folder(folder, copies * args.size + 64 * MIB) as scratch:
                self.result["folders"][folder] = result
                with contextlib.closing(program.tables(self, scratch, result)) as tables:  # type: ignore[type-var]
                    for table in tables:
                        if not all(row.measured for row in table.rows):
                            self.measure(table.rows)
                        show_progress("")
                        print(f"\n{as_text(table)}", flush=True)
                        result["tables"].append(as_json(table))

    def measure(self, rows: Sequence[Row], rounds: int = 0, warmups: int = 1) -> None:
        """Measures rows before their table is yielded."""
        for row in rows:
            row.run = partial(self._in_time, row.run)
        interleave(rows, rounds or self.args.rounds, show_progress, warmups)

    def _in_time(self, work: Callable[[], Sample]) -> Sample:
        begin = time.monotonic()
        if self.args.end and begin + self._longest > self.args.end:  # it may take as long as any before
            raise Unavailable(f"left out: {self.args.minutes} minutes were too few")
        try:
            return work()
        finally:
            self._longest = max(self._longest, time.monotonic() - begin)


def data_file(scratch: str, size: int) -> str:
    """Makes the file that all rows of a table work on; returns its path."""
    path = os.path.join(scratch, "data")
    show_progress(f"writing {size_words(size)} to {scratch}")
    files.make_file(path, size)
    return path


def run(name: str, argv: Sequence[str]) -> int:
    """Runs one benchmark; the status is that of ``main``."""
    program, args = parse(name, argv)

    @stop.measuring(name)
    def measured(_: Sequence[str] | None = None) -> int:
        with contextlib.redirect_stdout(sys.stderr if args.json else sys.stdout):
            outcome = Run(program, args)
        deliver(args, outcome.result, "")
        tables = [table for folder in outcome.result["folders"].values() for table in folder["tables"]]
        wrong = [row["name"] for table in tables for row in table["rows"] if row["wrong"]]
        if wrong:
            print(f"{name}: wrong data: {', '.join(wrong)}", file=sys.stderr)
        return 1 if wrong else 0

    return measured()


def environment() -> dict[str, str]:
    """Returns the environment of new processes: programs beside this interpreter, modules of this checkout."""
    path = [os.path.dirname(sys.executable), os.environ.get("PATH", os.defpath)]
    known = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PATH": os.pathsep.join(path), "PYTHONPATH": os.pathsep.join(known)}


def execute(argv: Sequence[str]) -> tuple[int, str]:
    """Runs ``python ...`` or ``nvme-bench ...``; returns its status and output, of lines of up to 160 columns.

    If this process is stopped, so is the command, which removes its files.
    """
    programs = {"python": [sys.executable], "nvme-bench": [sys.executable, "-m", "nvme_ops.bench"]}
    words = tied([*programs.get(argv[0], argv[:1]), *argv[1:]], "TERM")
    more: dict[str, Any] = {"env": {**environment(), "COLUMNS": "160"}, "cwd": ROOT, "text": True}
    # a session of its own: it gets one signal from us, not also the terminal's while it cleans up
    with subprocess.Popen(words, stdout=subprocess.PIPE, start_new_session=True, **more) as process:
        try:
            output = process.communicate()[0]
        finally:
            process.terminate()  # which does nothing at the end
    return process.returncode, output


def in_new_process(program: str, *words: str, folder: str | None = None, end: float = 0, **variables: str) -> Any:
    """Returns the JSON in the last line that a Python program prints; Unavailable with the last line of its errors.

    ``end``: when it is killed, by ``time.monotonic()``, if ever.
    """
    more: dict[str, Any] = {"env": {"DS_ACCELERATOR": "cpu", **environment(), **variables}, "cwd": folder, "text": True}
    more["timeout"] = max(1.0, end - time.monotonic()) if end else None
    try:
        done = subprocess.run(tied([sys.executable, "-c", program, *words]), stdin=subprocess.DEVNULL,
                              capture_output=True, **more)  # fmt: skip
    except subprocess.TimeoutExpired:
        raise Unavailable(f"left out: not done after {more['timeout']:.0f} s") from None
    if done.returncode:
        raise Unavailable((done.stderr.strip() or f"exit status {done.returncode}").splitlines()[-1])
    return json.loads(done.stdout.strip().splitlines()[-1])


def work(module: str, folder: str, args: Namespace, **more: object) -> dict[str, Any]:
    """Calls ``benchmarks.MODULE.work(job)`` in a process of its own; ``job.folder`` is a new one in ``folder``.

    ``job`` has the flags, and ``more``; ``job.group`` is a cgroup's file cgroup.procs to join. The device is ready, its
    name replaced by it; the result's ``peak`` is of its memory.
    """
    program = (
        "import argparse, json, sys\n"
        "from benchmarks import accelerators\n"
        f"from benchmarks.{module} import work\n"
        "job = argparse.Namespace(**json.loads(sys.argv[1]))\n"
        "with accelerators.opened(job.device) as job.device:\n"
        "    print(json.dumps(work(job) | {'peak': accelerators.peak_of(job.device)}))"
    )
    with tempfile.TemporaryDirectory(dir=folder) as place:
        words = json.dumps({"group": "", **vars(args), **more, "folder": place})
        accelerator = "cuda" if args.device.startswith("cuda") else "cpu"
        result: dict[str, Any] = in_new_process(program, words, folder=place, end=args.end, DS_ACCELERATOR=accelerator)
    return result


class Alike:
    """Compares the results of processes with those of the one that works in memory."""

    def __init__(self, what: str) -> None:
        self._what, self._expected = what, list[Any]()

    def require(self, values: list[Any], in_memory: bool) -> None:
        """Raises WrongData if they differ."""
        if in_memory and not self._expected:
            self._expected = values
        if self._expected and values != self._expected:
            raise WrongData(f"{self._what} differ from those of the model in memory")


# For such a process


def deepspeed_alone() -> Any:
    """Returns DeepSpeed, initialized with a single rank."""
    os.environ.update(MASTER_ADDR="127.0.0.1", RANK="0", WORLD_SIZE="1", LOCAL_RANK="0")
    import deepspeed  # type: ignore[import-not-found,import-untyped,unused-ignore]
    import torch.distributed as dist

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    deepspeed.init_distributed("gloo")
    return deepspeed


def moved() -> tuple[int, int]:
    """Returns the bytes that this process has read from and written to devices, page faults included."""
    words = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(words["read_bytes"]), int(words["write_bytes"])


def forget(*folders: str) -> None:
    """Writes back the files in folders, and drops them from the page cache."""
    os.sync()
    for path in itertools.chain.from_iterable(Path(folder).rglob("*") for folder in folders):
        with contextlib.suppress(OSError), path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def bounded(
    run: Run, table: Table, bounds: Mapping[str, Row], amount: int,
    needs: Callable[[Row, Sample], Mapping[str, float]] = lambda _, sample: sample.figures,
) -> tuple[float, dict[str, float]]:  # fmt: skip
    """Measures a table, and what bounds it as its last rows; adds the bound's share of each sample's time.

    The bound is the longest of: computing, as the first row does in memory, and moving the bytes that a row ``needs``
    at the rates of ``bounds``, rows by the figure of bytes that they move. All are medians of this run. ``amount`` is
    what a pass of any row does. Returns the seconds of computing, and of a byte by figure, which are none if one fails.
    """
    rows = list(table.rows)

    def shown(move: Callable[[], Sample], figure: str) -> Sample:
        sample = move()
        return Sample(sample.seconds, amount, figures={figure: sample.amount, "GB/s": sample.rate / 1e9})

    for figure, row in bounds.items():
        row.run = partial(shown, row.run, figure)
        table.rows.append(row)
    run.measure(table.rows, warmups=0)  # each pass is a new process, whose first step is not counted
    paces = {figure: statistics.median(sample.seconds / sample.figures[figure] for sample in row.samples if sample)
             for figure, row in bounds.items() if any(row.samples)}  # fmt: skip
    computing = statistics.median([sample.seconds for sample in rows[0].samples if sample] or [0.0])
    if len(paces) < len(bounds):
        return computing, {}
    for row, sample in [(one, sample) for one in rows for sample in one.samples if sample]:
        moving = (needs(row, sample).get(figure, 0) * pace for figure, pace in paces.items())
        sample.figures["of the bound"] = max(computing, *moving) / sample.seconds
    return computing, paces


def let_the_device_rest(size: int) -> None:
    """Waits until the file system has told its device what a row has freed, which would slow the next one."""
    os.sync()
    time.sleep(1.5 * min(1, size / (1 << 30)))
