"""Runs fio and parses its figures: the one place that knows its command line and its JSON."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from benchmarks.programs import tied
from nvme_ops.base.settings import PAGE
from nvme_ops.base.text import MIB
from nvme_ops.measure.rows import Row, Sample, Unavailable

DEFAULT = ["--ioengine=io_uring", "--bs=1M", "--iodepth=128"]
RANDOM = ["--ioengine=io_uring", "--bs=4k", "--iodepth=128"]
Variant = tuple[list[str], str]  # options, and in words what they do without


def variants(shape: list[str]) -> list[Variant]:
    """Returns options for ``shape`` (block size, depth), with the memory that is fastest first, then with fallbacks."""
    return [
        (["--ioengine=io_uring", *shape, "--iomem=mmaphuge", "--fixedbufs=1"], ""),
        (["--ioengine=io_uring", *shape, "--iomem=mmaphuge"], "without fixedbufs (memlock limit)"),
        (["--ioengine=io_uring", *shape, "--iomem=malloc", "--fixedbufs=1"], "without huge pages (vm.nr_hugepages)"),
        (["--ioengine=io_uring", *shape, "--iomem=malloc"], "without huge pages and fixedbufs"),
        (["--ioengine=libaio", *shape, "--iomem=malloc"], "libaio: io_uring is not allowed here"),
    ]


#: The row of fio at its best: the bound of all others.
NAME = "fio best"
BLOCK = 4 * MIB  # of its requests
BEST = variants([f"--bs={BLOCK}", "--iodepth=32"])


def best(size: int) -> list[Variant]:
    """Returns ``BEST`` for a file of ``size`` bytes, with smaller blocks if the file is smaller than one."""
    block = min(BLOCK, max(PAGE, 1 << size.bit_length() - 1))
    return variants([f"--bs={block}", "--iodepth=32"])


def require() -> str:
    """Returns the path of fio. Raises Unavailable."""
    path = shutil.which("fio")
    if path is None:
        raise Unavailable("fio is not installed: apt-get install fio")
    return path


def row(
    name: str,
    pattern: str,
    path: Callable[[], str],
    size: int,
    before: Callable[[], None],
    variants: Sequence[Variant] = BEST,
    operations: bool = False,
) -> Row:
    """Returns a row of fio with the first of ``variants`` that works, as long as it does; the note says what it lacks.

    Other arguments are as for ``run``.
    """
    usable: list[Variant] = []

    def run_it() -> Sample:
        for options, lacks in [*usable, *variants]:
            try:
                sample = run(pattern, path(), size, options, operations)
            except RuntimeError as error:  # even one that worked: another run may have taken the huge pages
                failure = error
                continue
            usable[:], made.note = [(options, lacks)], lacks
            return sample
        raise failure

    made = Row(name, run_it, before)
    return made


def run(pattern: str, path: str, size: int, options: list[str], operations: bool = False) -> Sample:
    """Runs fio with direct I/O over ``size`` bytes of ``path``.

    ``pattern`` is ``read``, ``write``, ``randread`` or ``rw``. The sample counts bytes or, with ``operations``,
    requests. Time and CPU are those of fio's job, without the start of its process and the allocation of memory.

    Raises:
        Unavailable: fio is not installed.
        RuntimeError: fio failed; with its message.
    """
    return read_output(*execute(_options(pattern, path, size, options)), operations)


def execute(options: Sequence[str]) -> tuple[int, str, str]:
    """Runs fio with these options alone; returns exit status, output (JSON) and errors. Raises Unavailable."""
    command = tied([require(), "--output-format=json", *options])
    with huge_pages("--iomem=mmaphuge" in options):
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    return done.returncode, done.stdout, done.stderr


def _options(pattern: str, path: str, size: int, options: list[str]) -> list[str]:
    name = os.path.abspath(path).replace(":", "\\:")  # a colon separates files
    return [
        f"--rw={pattern}", "--direct=1", "--allow_file_create=0", "--fallocate=none", "--group_reporting", "--thread",
        *options, *([] if "w" in pattern else ["--readonly"]),  # it refuses a job that would write
        "--name=file", f"--filename={name}", f"--filesize={os.path.getsize(path)}", f"--size={size}",
        f"--io_size={size}",
    ]  # fmt: skip


def read_output(status: int, output: str, errors: str, operations: bool = False) -> Sample:
    """Parses fio's output into a sample. Raises RuntimeError with fio's message if it failed."""
    start = output.find("{")  # messages may precede the document
    try:
        job: dict[str, Any] = json.loads(output[start:])["jobs"][0]
    except (ValueError, LookupError, TypeError):
        job = {"error": 1}
    if status or job["error"]:
        words = [line.strip() for line in (errors + output[: max(0, start)]).splitlines() if line.strip()]
        raise RuntimeError(f"fio: {words[0] if words else f'exit status {status}'}")
    sides = job["read"], job["write"]
    seconds = max(side["runtime"] for side in sides) / 1000
    cpu = (job["usr_cpu"] + job["sys_cpu"]) / 100 * job["job_runtime"] / 1000
    if seconds <= 0:
        raise RuntimeError("fio: the job is too short to time (below 1 ms); choose a larger --size")
    return Sample(seconds, sum(side["total_ios" if operations else "io_bytes"] for side in sides), cpu)


# Huge pages. A separate process reserves them while fio runs, and restores their number when its standard input closes:
# at the end of the block, and when the run is killed. Only one such process at a time changes the kernel's counter.
COUNTER = "/proc/sys/vm/nr_hugepages"
SIZE = 160 * MIB  # fio's best: 32 blocks of 4 MiB, and room to align them
_KEEPER = """
import fcntl, os, signal, sys

for number in (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM):  # also sent to the run, which ends it
    signal.signal(number, signal.SIG_IGN)
counter = os.open(sys.argv[1], os.O_RDWR)

def there():
    return int(os.pread(counter, 64, 0).split()[0])

def change(pages):
    fcntl.flock(counter, fcntl.LOCK_EX)
    before = there()
    os.pwrite(counter, b"%d\\n" % max(0, before + pages), 0)
    changed = there() - before
    fcntl.flock(counter, fcntl.LOCK_UN)
    return changed

got = change(int(sys.argv[2]))
print(got, flush=True)
sys.stdin.read()
change(-got)
"""


@contextmanager
def huge_pages(wanted: bool = True) -> Iterator[None]:
    """Reserves ``SIZE`` bytes of huge pages for the block, or as many as there is memory for; none without permission.

    They are reserved only while fio runs, so that nothing else in the run takes them.
    """
    if not wanted or not os.access(COUNTER, os.W_OK):  # not root: those already reserved may suffice
        yield
        return
    command = [sys.executable, "-I", "-S", "-c", _KEEPER, COUNTER, str(SIZE // page_size())]
    pipe, null = subprocess.PIPE, subprocess.DEVNULL
    # in a session of its own: a signal to all processes of the run must not end this one
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=null, start_new_session=True) as keeper:
        if keeper.stdout is not None:
            keeper.stdout.readline()
        yield


def page_size() -> int:
    """Returns the bytes of a huge page."""
    with open("/proc/meminfo", encoding="ascii") as file:
        return next((int(line.split()[1]) * 1024 for line in file if line.startswith("Hugepagesize")), 2 * MIB)
