"""Runs fio and takes its figures."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from benchmarks.measure import Sample, Unavailable

_HUGE_PAGES = "/proc/sys/vm/nr_hugepages"
_HUGE_MEMORY = 160 << 20  # fio's best: 32 blocks of 4 MiB, and room to align them

DEFAULT = ["--ioengine=io_uring", "--bs=1M", "--iodepth=128"]
_BEST = ["--bs=4M", "--iodepth=32"]
RANDOM = ["--ioengine=io_uring", "--bs=4k", "--iodepth=128"]
# Best first; a later one is taken where those before do not run. The words name what had to be left out.
BEST = [
    (["--ioengine=io_uring", *_BEST, "--iomem=mmaphuge", "--fixedbufs=1"], ""),
    (["--ioengine=io_uring", *_BEST, "--iomem=mmaphuge"], "without fixedbufs (memlock limit)"),
    (["--ioengine=io_uring", *_BEST, "--iomem=malloc", "--fixedbufs=1"], "without huge pages (vm.nr_hugepages)"),
    (["--ioengine=io_uring", *_BEST, "--iomem=malloc"], "without huge pages and fixedbufs"),
    (["--ioengine=libaio", *_BEST, "--iomem=malloc"], "libaio: io_uring is not allowed here"),
]


def run(pattern: str, path: str, size: int, options: list[str], operations: bool = False) -> Sample:
    """One fio job over ``size`` bytes of ``path``: ``read``, ``write`` or ``randread``, past the page cache.

    Time and CPU are what fio says of its job; starting the process and laying out its memory do not count.

    Raises:
        Unavailable: fio is not installed.
        RuntimeError: fio failed; with its words.
    """
    program = shutil.which("fio")
    if program is None:
        raise Unavailable("fio is not installed: apt-get install fio")
    name = os.path.abspath(path).replace(":", "\\:")  # a colon separates files
    command = [
        program, "--name=job", f"--filename={name}", f"--rw={pattern}", f"--io_size={size}",
        f"--filesize={os.path.getsize(path)}", "--direct=1", "--allow_file_create=0", "--fallocate=none",
        "--output-format=json", *options,
    ]  # fmt: skip
    with _huge_pages("--iomem=mmaphuge" in options):
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    return read_output(done.returncode, done.stdout, done.stderr, operations)


def read_output(status: int, output: str, errors: str, operations: bool = False) -> Sample:
    """The sample in what fio printed. Raises RuntimeError with fio's words when it failed."""
    start = output.find("{")  # notes may stand before the document
    try:
        job: dict[str, Any] = json.loads(output[start:])["jobs"][0]
    except (ValueError, LookupError, TypeError):
        job = {"error": 1}
    if status or job["error"]:
        words = [line.strip() for line in (errors + output[: max(0, start)]).splitlines() if line.strip()]
        raise RuntimeError(f"fio: {words[0] if words else f'exit status {status}'}")
    side = job["write"] if job["write"]["total_ios"] else job["read"]
    seconds = side["runtime"] / 1000
    cpu = (job["usr_cpu"] + job["sys_cpu"]) / 100 * job["job_runtime"] / 1000
    if seconds <= 0:
        raise RuntimeError("fio: the job is too short to time (below 1 ms); choose a larger --size")
    return Sample(seconds, side["total_ios"] if operations else side["io_bytes"], cpu)


@contextmanager
def _huge_pages(wanted: bool) -> Iterator[None]:
    """Reserved huge pages while fio runs, where we may reserve them; afterwards as many as before.

    Only as long as fio runs, lest others of the run take them.
    """
    before = 0
    try:
        if wanted:
            with open(_HUGE_PAGES, encoding="ascii") as file:
                before = int(file.read())
            _reserve(before + _HUGE_MEMORY // _huge_page_size())
    except OSError:  # not root: what is reserved may do
        wanted = False
    try:
        yield
    finally:
        if wanted:
            _reserve(before)


def _reserve(pages: int) -> None:
    with open(_HUGE_PAGES, "w", encoding="ascii") as file:
        file.write(str(pages))


def _huge_page_size() -> int:
    with open("/proc/meminfo", encoding="ascii") as file:
        return next((int(line.split()[1]) * 1024 for line in file if line.startswith("Hugepagesize")), 2 << 20)
