"""``nvme-bench workload``: arguments in, tables out."""

from __future__ import annotations

import argparse
import contextlib
import inspect
import itertools
import math
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from nvme_ops.base.command_line import command_line, listed, positive, say, show, size
from nvme_ops.base.text import MIB, rate_words, rounded, size_words
from nvme_ops.measure.machine import machine, place
from nvme_ops.measure.rows import Row, kept_as_note
from nvme_ops.measure.scratch import scratch_folder
from nvme_ops.measure.tables import Cells, add_outputs, cells_text, check_outputs, deliver, show_progress, used_columns
from nvme_ops.measure.workload.feed import FED, Fed, feed, search
from nvme_ops.measure.workload.readers import MIN_BATCHES, OURS, READERS, DataSet, checked, made
from nvme_ops.measure.workload.table import JOBS, Job

_MAX_SAMPLES = 1 << 18
_HEAD = ("", "data set", "fed", "utilization", "samples/s", "GB/s", "wait p50", "wait p99")


def parser() -> argparse.ArgumentParser:
    """Does the I/O of known jobs, and says how many accelerators it keeps busy.

    An accelerator is only emulated: it takes a batch, waits as long as it would
    compute, and meanwhile asks for the next one. Utilization is its busy time over
    all of its time, as MLPerf Storage counts it. The job that writes computes,
    saves, and computes again.

    jobs:
    {jobs}

    readers:
    {readers}

    Examples:
      nvme-bench workload resnet50 --folder /mnt/nvme    how many H100s it feeds
      nvme-bench workload unet3d cosmoflow --folder /mnt/nvme --reader all
                                                         beside torch's DataLoader

    exit status: 0; 1 when a reader returned wrong bytes; 2 for wrong arguments and
    folders that cannot be used; 130 after Ctrl-C, which prints and writes what was
    measured until then
    """
    jobs = listed(((job.name, f"{job.words} ({job.source})") for job in JOBS.values()), 16)
    readers = listed(((name, (make.__doc__ or "").rstrip(".")) for name, make in READERS.items()), 16)
    texts = inspect.cleandoc(parser.__doc__ or "").format(jobs=jobs, readers=readers)
    made = command_line("nvme-bench workload", texts)
    add = made.add_argument
    add("jobs", type=_job, nargs="+", choices=JOBS, metavar="JOB", help="jobs, listed below")
    add("--folder", required=True, metavar="DIR", help="the data sets are written here, and removed at the end")
    words = f"readers, listed below, or all (default {OURS})"
    add("--reader", type=_reader, nargs="+", choices=[*READERS, "all"], metavar="NAME", help=words)
    words = f"about, for a data set: {MIN_BATCHES} batches at least, {_MAX_SAMPLES:,} samples at most (default 2G)"
    add("--size", type=size, default="2G", metavar="SIZE", help=words)
    add("--workers", type=positive, default=2, metavar="N", help="processes of torch's DataLoader (default 2)")
    add("--seconds", type=float, default=2.0, metavar="S", help="least duration of a measurement (default 2)")
    add("--accelerators", type=positive, metavar="N", help="feed N of them (default: find how many can be fed)")
    words = "emulated accelerators take F times as long for a batch (default 1)"
    add("--slower", type=float, default=1.0, metavar="F", help=words)
    add_outputs(add, ".json (every measurement); with --json the tables go to standard error")
    return made


def _job(text: str) -> str:
    return text.replace("_", "-")


def _reader(text: str) -> str:
    return text.replace("-", "_")


def main(argv: Sequence[str]) -> int:
    """Runs the command; returns 0, or 1 if a reader returned wrong bytes.

    Raises NotUsable or OSError if a folder or an output cannot be used; then, and after Ctrl-C, what was measured
    before has been printed and written.
    """
    args = _parse(argv)
    jobs: dict[str, Any] = {}
    document = {
        "command": ["nvme-bench", "workload", *argv],
        "machine": machine(),
        "folders": {args.folder: place(args.folder)},
        "jobs": jobs,
        "interrupted": True,  # until all of it is measured
    }
    try:
        with contextlib.redirect_stdout(sys.stderr if args.json else sys.stdout):
            for name in dict.fromkeys(args.jobs):
                jobs[name] = {"wrong": [], "notes": {}, "source": JOBS[name].source, "fed": {}, "curves": {}}
                (_write if JOBS[name].writes else _read)(JOBS[name], args, jobs[name])
        document["interrupted"] = False
    finally:
        if any(job["curves"] for job in jobs.values()) or not document["interrupted"]:
            deliver(args, document, "")
    wrong = [name for job in jobs.values() for name in job["wrong"]]
    if wrong:
        say(f"nvme-bench: wrong data: {', '.join(wrong)}")
    return 1 if wrong else 0


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    flags = parser()
    args = flags.parse_args(argv)
    try:
        check_outputs(args.output)
        of_readers = {"--reader": args.reader, "--accelerators": args.accelerators}
        for flag, wanted in of_readers.items():
            if wanted and all(JOBS[name].writes for name in args.jobs):
                raise ValueError(f"{flag} is for jobs that read")
        args.reader = args.reader or [OURS]
        if not all(math.isfinite(value) and value > 0 for value in (args.seconds, args.slower)):
            raise ValueError("--seconds and --slower must be numbers greater than 0")
        if not Path(args.folder).is_dir():
            raise ValueError(f"--folder {args.folder}: no such folder")
    except ValueError as error:
        flags.error(str(error))
    return args


_Add = Callable[..., None]  # adds a line to the table: its words, and a note


@contextlib.contextmanager
def _table() -> Iterator[_Add]:
    """Yields a function that adds a line; prints the lines at the end, even if the block was interrupted."""
    lines: list[Cells] = []

    def add(*words: str, note: str = "") -> None:
        lines.append(dict(itertools.zip_longest(_HEAD, words, fillvalue="-")) | {"note": note})

    try:
        yield add
    finally:
        show_progress("")
        if lines:
            show(cells_text(used_columns(lines)))


@contextlib.contextmanager
def _line(name: str, outcome: dict[str, Any], add: _Add) -> Iterator[None]:
    """Adds a line with the reason if the block fails, and goes on."""
    row = Row(name)
    with kept_as_note(row):
        yield
    if row.note:
        add(name, note=row.note)
        outcome["notes"][name] = row.note
    if row.wrong:
        outcome["wrong"].append(name)


def _sizes(job: Job, total: int) -> list[int]:
    count = min(_MAX_SAMPLES, max(MIN_BATCHES * job.batch, int(total / job.record)))
    count -= count % job.batch  # a smaller batch would count as much computing
    chance = random.Random(0)
    least, most = job.record / 8, 2 * job.record
    return [int(min(most, max(least, chance.gauss(job.record, job.spread)))) for _ in range(count)]


def _read(job: Job, args: argparse.Namespace, outcome: dict[str, Any]) -> None:
    sizes = _sizes(job, args.size)
    compute, nbytes = job.compute * args.slower, sum(sizes)
    show(
        f"\n{job.name}: {job.words}; batches of {job.batch} x {size_words(int(job.record))}, {compute:.4g} s each: "
        f"{rate_words(job.batch * job.record / compute)} and {job.batch / compute:,.0f} samples/s for an accelerator; "
        f"a data set of {size_words(nbytes)}"
    )
    outcome |= {"compute": compute, "nbytes": nbytes}
    with _table() as add:
        for name in list(READERS) if "all" in args.reader else dict.fromkeys(args.reader):
            with _line(name, outcome, add), scratch_folder(args.folder, nbytes + nbytes // 8) as folder:
                _measure_reader(name, DataSet(Path(folder), sizes, job.batch, args.workers), job, args, outcome, add)


def _measure_reader(
    name: str, data: DataSet, job: Job, args: argparse.Namespace, outcome: dict[str, Any], add: _Add
) -> None:
    show_progress(f"{job.name}: writing {size_words(data.nbytes)} for {name}")
    reader = made(READERS[name], data)
    for _ in checked(reader):
        pass
    results: list[Fed] = []

    def at(count: int) -> Fed:
        fed = feed(reader, count, outcome["compute"], args.seconds)
        show_progress(f"{job.name}, {name}: {count} accelerators, {fed.utilization:.0%} busy")
        results.append(fed)
        return fed

    try:
        if args.accelerators:
            at(args.accelerators)
        else:
            search(at)
    finally:
        if results:
            results.sort(key=lambda result: result.accelerators)
            most = max((result.accelerators for result in results if result.utilization >= FED), default=0)
            outcome["fed"][name], outcome["curves"][name] = most, [_as_json(result) for result in results]
            shown = next((result for result in results if result.accelerators == max(1, most)), results[0])
            fed = str(shown.accelerators) if shown.utilization >= FED else "0" if shown.accelerators == 1 else "fewer"
            add(name, size_words(reader.data.nbytes), fed, *_figures(shown))


def _figures(fed: Fed) -> list[str]:
    waits = [f"{1e3 * fed.wait(share):.2f} ms" for share in (0.5, 0.99)]
    busy = f"{100 * fed.utilization:.0f} % of {fed.accelerators}"
    return [busy, rounded(fed.samples / fed.seconds, 3), f"{fed.rate / 1e9:.3g}", *waits]


def _as_json(fed: Fed) -> dict[str, Any]:
    kept = {name: value for name, value in asdict(fed).items() if name != "waits"}
    return {**kept, "fed_from": FED, "wait_p50": fed.wait(0.5), "wait_p99": fed.wait(0.99)}


def _write(job: Job, args: argparse.Namespace, outcome: dict[str, Any]) -> None:
    from nvme_ops.measure.workload import saving

    whole = int(job.record)
    nbytes = min(whole, args.size)
    compute = job.compute * args.slower * nbytes / whole
    scaled = f" (of {size_words(whole)} every {job.compute:g} s)" if nbytes < whole else ""
    show(f"\n{job.name}: {job.words}; {size_words(nbytes)} after every {compute:.3g} s of computing{scaled}")
    outcome |= {"compute": compute, "nbytes": nbytes}
    with _table() as add, scratch_folder(args.folder, 3 * nbytes + 256 * MIB) as folder:
        for name in saving.WAYS:
            show_progress(f"{job.name}: {name}")
            with _line(name, outcome, add):
                fed = saving.measured(name, Path(folder), nbytes, compute, args.seconds)
                outcome["curves"][name] = [_as_json(fed)]
                add(name, "-", "-", *_figures(fed))
