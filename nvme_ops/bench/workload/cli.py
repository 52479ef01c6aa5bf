"""``nvme-bench workload``: arguments in, tables out."""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import random
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from nvme_ops.arguments import command_line, positive, size
from nvme_ops.bench.cli import show_progress
from nvme_ops.bench.measure import Unavailable
from nvme_ops.bench.options import check_outputs
from nvme_ops.bench.workload import saving
from nvme_ops.bench.workload.beside import Unordered, checkpoints
from nvme_ops.bench.workload.feed import FED, Fed, cool, feed, search
from nvme_ops.bench.workload.readers import OURS, READERS, DataSet, Reader, checked, made, ours
from nvme_ops.bench.workload.table import JOBS, WRITING, Job, Writing
from nvme_ops.measuring.files import NotUsable
from nvme_ops.measuring.scratch import scratch_folder
from nvme_ops.text import MIB, columns_text, rate_words, share_words, size_words

_DESCRIPTION = """\
Reads as known training and inference jobs do and says how many accelerators that keeps busy. An accelerator is only
emulated: it takes a batch, waits as long as it would compute, and meanwhile asks for the next one. Utilization is its
busy time over all of its time, as MLPerf Storage counts it. Jobs that write compute, write, and compute again.
"""
_EPILOG = """\
examples:
  nvme-bench workload resnet50 --folder /mnt/nvme                       how many H100s does this device feed?
  nvme-bench workload unet3d cosmoflow --folder /mnt/nvme --reader all  who feeds how many
  nvme-bench workload resnet50 --folder /mnt/nvme --accelerators 8 --with llm-checkpoint
                                                                        8 of them, while checkpoints are saved
exit status: 0; 2 for wrong arguments and folders that cannot be used; 130 after Ctrl-C
"""
_MOST_SAMPLES = 1 << 18
_LEAST_BATCHES = 8  # in an epoch: fewer would all be read ahead
_BESIDE = "llm-checkpoint"


def parser() -> argparse.ArgumentParser:
    """Returns the parser of the flags."""
    known: list[Job | Writing] = [*JOBS.values(), *WRITING.values()]
    jobs = "\n".join(f"  {job.name:16}{job.words} ({job.source})" for job in known)
    readers = "\n".join(f"  {name:16}{_words(make)}" for name, make in READERS.items())
    made = command_line("nvme-bench workload", _DESCRIPTION, f"jobs:\n{jobs}\n\nreaders:\n{readers}\n\n{_EPILOG}")
    add = made.add_argument
    add("jobs", nargs="+", choices=[*JOBS, *WRITING], metavar="JOB", help="jobs, listed below")
    add("--folder", required=True, metavar="DIR", help="the data sets are written here, and removed at the end")
    words = f"readers, listed below, or all (default {OURS})"
    add("--reader", nargs="+", choices=[*READERS, "all"], default=[OURS], metavar="NAME", help=words)
    add("--size", type=size, default="2G", metavar="SIZE", help="of a data set, about; at least 8 batches (default 2G)")
    add("--workers", type=positive, default=2, metavar="N", help="of torch's loaders (default 2)")
    add("--seconds", type=float, default=2.0, metavar="S", help="of one measurement, at least (default 2)")
    add("--accelerators", type=positive, metavar="N", help="so many; default: as many as are fed")
    words = "emulated accelerators take F times as long for a batch (default 1)"
    add("--slower", type=float, default=1.0, metavar="F", help=words)
    words = f"also with checkpoints saved at the same time, with and without priorities ({OURS} only)"
    add("--with", dest="beside", choices=[_BESIDE], metavar=_BESIDE, help=words)
    add("--checkpoint", type=size, default="512M", metavar="SIZE", help="of each such checkpoint (default 512M)")
    add("--json", metavar="FILE", help="every measurement; -: to stdout, and the tables to stderr")
    add("--plot", metavar="FILE.png", help="utilization by number of accelerators; needs matplotlib")
    return made


def _words(make: Callable[..., Any]) -> str:
    return (make.__doc__ or "").rstrip(".")


def main(words: Sequence[str]) -> int:
    """Runs the command; returns the exit status."""
    flags = parser()
    given = flags.parse_args(words)
    try:
        check_outputs(given, "json", "plot")
        for flag, wanted in ((f"--with {_BESIDE}", given.beside), ("--plot", given.plot)):
            if wanted and not JOBS.keys() & set(given.jobs):
                raise ValueError(f"{flag} is for jobs that read: {', '.join(JOBS)}")
        if not all(math.isfinite(value) and value > 0 for value in (given.seconds, given.slower)):
            raise ValueError("--seconds and --slower must be numbers greater than 0")
        if given.beside and not {OURS, "all"} & set(given.reader):
            raise ValueError(f"--with {given.beside} is for --reader {OURS}")
        if not Path(given.folder).is_dir():
            raise ValueError(f"--folder {given.folder}: no such folder")
    except ValueError as error:
        flags.error(str(error))
    found: dict[str, Any] = {}
    document = sys.stdout
    try:
        with contextlib.redirect_stdout(sys.stderr if given.json == "-" else document):
            for name in dict.fromkeys(given.jobs):
                found[name] = _read(JOBS[name], given) if name in JOBS else _write(name, given)
        if given.json:
            text = json.dumps(found, indent=2, allow_nan=False) + "\n"
            document.write(text) if given.json == "-" else Path(given.json).write_text(text, encoding="utf-8")
    except (NotUsable, OSError) as reason:
        print(f"nvme-bench: {reason}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("\nnvme-bench: interrupted; the files are removed", file=sys.stderr)
        return 130
    if given.plot:
        from nvme_ops.bench.workload.plot import plot

        plot({name: each["curves"] for name, each in found.items() if "curves" in each}, given.plot)
    return 0


def _sizes(job: Job, total: int) -> list[int]:
    count = min(_MOST_SAMPLES, max(_LEAST_BATCHES * job.batch, int(total / job.record)))
    count -= count % job.batch  # a smaller batch would take as long to compute on
    chance = random.Random(0)
    least, most = job.record / 8, 2 * job.record
    return [int(min(most, max(least, chance.gauss(job.record, job.spread)))) for _ in range(count)]


def _read(job: Job, given: argparse.Namespace) -> dict[str, Any]:
    sizes = _sizes(job, given.size)
    compute = job.compute * given.slower
    print(
        f"\n{job.name}: {job.words}; batches of {job.batch} x {size_words(int(job.record))}, {compute:.4g} s each: "
        f"{rate_words(job.batch * job.record / compute)} and {job.batch / compute:,.0f} samples/s for an accelerator"
    )
    lines = [["reader", "fed", "utilization", "samples/s", "GB/s", "wait p50", "p99", ""]]
    curves: dict[str, list[dict[str, Any]]] = {}
    fed: dict[str, int] = {}
    names = list(READERS) if "all" in given.reader else list(dict.fromkeys(given.reader))
    for name in names:
        with scratch_folder(
            given.folder, sum(sizes) + sum(sizes) // 8 + 2 * given.checkpoint, "--size or --folder"
        ) as folder:
            data = DataSet(Path(folder), sizes, job.batch, job.shuffled, given.workers)
            try:
                lines += _of_reader(name, data, job, compute, given, curves)
                fed[name] = max(
                    (each["accelerators"] for each in curves[name] if each["utilization"] >= FED), default=0
                )
            except Unavailable as reason:
                lines.append([name, "-", "", "", "", "", "", str(reason)])
    show_progress("")
    print(columns_text(lines), flush=True)
    return {"source": job.source, "compute": compute, "fed": fed, "curves": curves}


def _of_reader(
    name: str, data: DataSet, job: Job, compute: float, given: argparse.Namespace, curves: dict[str, Any]
) -> list[list[str]]:
    show_progress(f"{job.name}: writing {size_words(sum(data.sizes))} for {name}")
    reader = made(name, data)
    for _ in checked(reader):
        pass

    def show(fed: Fed) -> None:
        show_progress(f"{job.name}, {name}: {fed.accelerators} accelerators, {share_words(fed.utilization)} busy")

    def at(count: int) -> Fed:
        return feed(reader, count, compute, given.seconds)

    fed, results = (given.accelerators, [at(given.accelerators)]) if given.accelerators else search(at, show)
    curves[name] = [_as_json(each) for each in results]
    shown = next((each for each in results if each.accelerators == max(1, fed)), results[0])
    lines = [_line(name, shown, "")]
    if given.beside and name == OURS:
        count = given.accelerators or max(1, fed // 2)
        lines += _beside(reader, count, compute, given, curves)
    return lines


def _beside(
    reader: Reader, count: int, compute: float, given: argparse.Namespace, curves: dict[str, Any]
) -> list[list[str]]:
    lines = []
    folder = reader.data.folder
    alone = feed(reader, count, compute, given.seconds)
    lines.append(_line(f"{OURS}, alone", alone, ""))
    curves["alone"] = [_as_json(alone)]
    for words, handle in (("beside checkpoints", None), ("the same, without priorities", Unordered())):
        show_progress(words)
        reading = reader if handle is None else ours(reader.data, handle)
        cool(reading)
        with checkpoints(folder, given.checkpoint, handle) as saved:
            fed = feed(reading, count, compute, max(given.seconds, 4.0))
        points = 100 * (alone.utilization - fed.utilization)
        note = f"{points:+.1f} points less; checkpoints at {rate_words(saved.rate)}".replace("+", "")
        lines.append(_line(words, fed, note))
        curves[words] = [_as_json(fed)]
    return lines


def _line(name: str, shown: Fed, note: str) -> list[str]:
    fed = str(shown.accelerators) if shown.utilization >= FED else "0" if shown.accelerators == 1 else "fewer"
    return [
        name, fed, f"{100 * shown.utilization:.0f} % of {shown.accelerators}",
        f"{shown.samples / shown.seconds:,.0f}", f"{shown.rate / 1e9:.3g}",
        f"{1e3 * shown.wait(0.5):.2f} ms", f"{1e3 * shown.wait(0.99):.2f} ms", note,
    ]  # fmt: skip


def _as_json(fed: Fed) -> dict[str, Any]:
    kept = {name: value for name, value in asdict(fed).items() if name != "waits"}
    return {**kept, "fed_from": FED, "wait_p50": fed.wait(0.5), "wait_p99": fed.wait(0.99)}


def _write(name: str, given: argparse.Namespace) -> dict[str, Any]:
    job = WRITING[name]
    nbytes = min(job.nbytes, given.size) if job.records == 1 else job.nbytes
    compute = job.compute * given.slower * nbytes / job.nbytes
    print(
        f"\n{job.name}: {job.words}; {size_words(nbytes)} after every {compute:.3g} s of computing"
        + (f" (of {size_words(job.nbytes)} every {job.compute:g} s)" if nbytes < job.nbytes else "")
    )
    lines, found = [["", "utilization", "GB/s", "wait p50", "p99"]], []
    with scratch_folder(given.folder, 3 * nbytes + 256 * MIB, "--size or --folder") as folder:
        for words, way in saving.ways(job, Path(folder), nbytes).items():
            show_progress(f"{job.name}: {words}")
            with way() as write:
                kept = saving.keep(write, nbytes, compute, given.seconds)
            lines.append(
                [
                    words,
                    f"{100 * kept.utilization:.1f} %",
                    f"{kept.rate / 1e9:.3g}",
                    f"{1e3 * kept.wait(0.5):.3g} ms",
                    f"{1e3 * kept.wait(0.99):.3g} ms",
                ]
            )
            found.append({"name": words, **_as_json(kept)})
    show_progress("")
    print(columns_text(lines), flush=True)
    return {"source": job.source, "compute": compute, "ways": found}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
