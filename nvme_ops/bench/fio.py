"""Runs fio and parses its figures: the one place that knows its command line and its JSON."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from collections.abc import Callable, Sequence
from typing import Any

from nvme_ops.bench.huge_pages import huge_pages
from nvme_ops.bench.measure import PERCENTILES, BlockTimes, Row, Sample, Unavailable
from nvme_ops.measuring import stop
from nvme_ops.text import MIB

_PAGE = 4096

DEFAULT = ["--ioengine=io_uring", "--bs=1M", "--iodepth=128"]
RANDOM = ["--ioengine=io_uring", "--bs=4k", "--iodepth=128"]
Paths = str | Sequence[str]  # of one file, or of several at once
Variant = tuple[list[str], str]  # options, and what they do without, in words


def variants(shape: list[str]) -> list[Variant]:
    """Returns options for blocks of a shape, in the memory that suits fio best first, then fallbacks."""
    return [
        (["--ioengine=io_uring", *shape, "--iomem=mmaphuge", "--fixedbufs=1"], ""),
        (["--ioengine=io_uring", *shape, "--iomem=mmaphuge"], "without fixedbufs (memlock limit)"),
        (["--ioengine=io_uring", *shape, "--iomem=malloc", "--fixedbufs=1"], "without huge pages (vm.nr_hugepages)"),
        (["--ioengine=io_uring", *shape, "--iomem=malloc"], "without huge pages and fixedbufs"),
        (["--ioengine=libaio", *shape, "--iomem=malloc"], "libaio: io_uring is not allowed here"),
    ]


BLOCK = 4 * MIB  # of fio at its best
BEST = variants([f"--bs={BLOCK}", "--iodepth=32"])


def best(size: int) -> list[Variant]:
    """Returns ``BEST`` for a file of that size, which may be smaller than its block."""
    return BEST if size >= BLOCK else variants([f"--bs={size}", "--iodepth=32"])


def require() -> str:
    """Returns the path of fio. Raises Unavailable."""
    found = shutil.which("fio")
    if found is None:
        raise Unavailable("fio is not installed: apt-get install fio")
    return found


def row(
    name: str,
    pattern: str,
    path: Callable[[], Paths],
    size: int,
    before: Callable[[], None],
    variants: Sequence[Variant] | None = None,
    operations: bool = False,
    shown: Callable[[Sample], Sample] = lambda sample: sample,
) -> Row:
    """Returns fio's row with the first of ``variants`` that runs, by default ``BEST``; the rest is as for ``run``.

    ``shown`` makes of its samples those of the table.
    """
    made = Row(name, lambda: Sample(1, 1), before)
    run_it = first_that_runs(made, BEST if variants is None else variants, pattern, path, size, 1, operations)
    made.run = lambda: shown(run_it())
    return made


def first_that_runs(
    row: Row,
    variants: Sequence[Variant],
    pattern: str,
    path: Callable[[], Paths],
    size: int,
    lanes: int = 1,
    operations: bool = False,
) -> Callable[[], Sample]:
    """Runs the first variant that works, and again until it fails; the row's note says what it lacks."""
    usable: list[list[str]] = []

    def run_it() -> Sample:
        if usable:
            try:
                return run(pattern, path(), size, usable[0], operations, lanes)
            except RuntimeError:  # another run may have taken the huge pages
                usable.clear()
        for options, lacks in variants:
            try:
                sample = run(pattern, path(), size, options, operations, lanes)
            except RuntimeError as error:
                failure = error
                continue
            usable.append(options)
            row.note = lacks
            return sample
        raise failure

    return run_it


def run(pattern: str, path: Paths, size: int, options: list[str], operations: bool = False, lanes: int = 1) -> Sample:
    """Runs fio over ``size`` bytes of every ``path`` at once, directly: ``read``, ``write``, ``randread``, ``rw``.

    ``lanes`` jobs share the bytes of a path.

    Time and CPU are what fio reports for its job, without starting the process and allocating its memory.

    Raises:
        Unavailable: fio is not installed.
        RuntimeError: fio failed; with its message.
    """
    return read_output(*execute(_options(pattern, path, size, options, lanes)), operations)


def latencies(pattern: str, path: str, size: int, options: list[str]) -> BlockTimes:
    """Returns the latencies of fio's blocks. Raises as ``run`` does."""
    shares = ":".join(f"{100 * share:g}" for share in PERCENTILES)
    wanted = [f"--percentile_list={shares}", "--lat_percentiles=1", "--clat_percentiles=0"]  # submission included
    _, side = read_job(*execute(_options(pattern, path, size, [*options, *wanted])))
    times = {float(share) / 100: nanoseconds / 1e9 for share, nanoseconds in side["lat_ns"]["percentile"].items()}
    complete = {share: min(times.items(), key=lambda item: abs(item[0] - share))[1] for share in PERCENTILES}
    return BlockTimes(side["total_ios"], complete)


def execute(options: Sequence[str]) -> tuple[int, str, str]:
    """Returns exit status, output (JSON) and errors of fio with these options alone. Raises Unavailable."""
    command = stop.tied([require(), "--output-format=json", *options])
    with huge_pages("--iomem=mmaphuge" in options):
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    return done.returncode, done.stdout, done.stderr


def _options(pattern: str, path: Paths, size: int, options: list[str], lanes: int = 1) -> list[str]:
    made = [
        f"--rw={pattern}", "--direct=1", "--allow_file_create=0", "--fallocate=none", "--group_reporting", "--thread",
        *options,
    ]  # fmt: skip
    block = max([_PAGE, *(int(option[5:]) for option in options if re.fullmatch(r"--bs=\d+", option))])
    share = -(-size // (lanes * block)) * block if lanes > 1 else size
    for number, file in enumerate([path] if isinstance(path, str) else path):
        name = os.path.abspath(file).replace(":", "\\:")  # a colon separates files
        for start in range(0, size, share):
            length = min(share, size - start)
            made += [
                f"--name=file{number}-{start}", f"--filename={name}", f"--filesize={os.path.getsize(file)}",
                f"--offset={start}", f"--size={length}", f"--io_size={length}",
            ]  # fmt: skip
    return made


def read_output(status: int, output: str, errors: str, operations: bool = False) -> Sample:
    """Parses what fio printed into a sample. Raises RuntimeError with fio's message if it failed."""
    job, _ = read_job(status, output, errors)
    sides = job["read"], job["write"]
    seconds = max(side["runtime"] for side in sides) / 1000
    cpu = (job["usr_cpu"] + job["sys_cpu"]) / 100 * job["job_runtime"] / 1000
    if seconds <= 0:
        raise RuntimeError("fio: the job is too short to time (below 1 ms); choose a larger --size")
    return Sample(seconds, sum(side["total_ios" if operations else "io_bytes"] for side in sides), cpu)


def read_job(status: int, output: str, errors: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns fio's report of its job, and of the direction that moved data. Raises RuntimeError if it failed."""
    start = output.find("{")  # messages may precede the document
    try:
        job: dict[str, Any] = json.loads(output[start:])["jobs"][0]
    except (ValueError, LookupError, TypeError):
        job = {"error": 1}
    if status or job["error"]:
        words = [line.strip() for line in (errors + output[: max(0, start)]).splitlines() if line.strip()]
        raise RuntimeError(f"fio: {words[0] if words else f'exit status {status}'}")
    return job, job["write"] if job["write"]["total_ios"] else job["read"]
