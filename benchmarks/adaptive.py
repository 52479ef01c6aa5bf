"""What an adaptive handle chooses, against each fixed tool: one table for each direction and size of tensors.

Every pass moves several tensors of one size, cold, at places of their own in one file; the tools of others use a file
for each tensor. A write is timed until its bytes are on the device: what writes through the page cache calls
``fdatasync``. The adaptive handle has moved 20 tensors of the size before the first pass counts. Its other row begins
anew in each pass, with one tensor of another size, and moves 20: the whole exploration. The rows ``all at once`` move
the tensors of a pass together, as a model's are saved. Under load another process reads the device all the time.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Generator, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))  # so that it runs from anywhere, uninstalled too

import numpy
import torch

import nvme_ops
from benchmarks import command
from benchmarks.file_rows import LEARNING, practised
from nvme_ops.arguments import size
from nvme_ops.bench import fio
from nvme_ops.bench.engines import deepspeed, unavailable
from nvme_ops.bench.measure import Row, Sample, Unavailable, WrongData, metered, timed
from nvme_ops.bench.tables import Table
from nvme_ops.measuring import stop
from nvme_ops.measuring.energy import Meter
from nvme_ops.measuring.files import filled, make_cold
from nvme_ops.settings import PAGE
from nvme_ops.text import GIB, MIB, parse_size, size_words
from nvme_ops.tuning import dictionary

GROUPS = {
    "read": "cold reads of tensors of each size, in GB/s",
    "write": "writes of tensors of each size until they are on the device, in GB/s",
    "read-load": "cold reads beside a process that reads the device",
    "write-load": "writes beside a process that reads the device",
}
ADAPTIVE, NEW = "nvme_ops adaptive, after 20", "nvme_ops adaptive, the first 20"
TOGETHER = "nvme_ops adaptive, all at once"
STAGED = "nvme_ops staged, an ordinary tensor"  # not a choice for a tensor that lies elsewhere
_SIZES = ("4K", "64K", "1M", "16M", "256M")
FIO = "fio, as deep as one tensor allows"
DEEP = "fio, as deep as all allow"
_DEPTHS = {FIO: 1, DEEP: 32}
_FIO_BYTES = 16 * MIB  # at least: fio counts in milliseconds
_PASS = 128 * MIB  # bytes of a pass: at least one tensor, at most _MOST
_MOST = 256
_DATASYNC = "+ fdatasync"
_ENVIRONMENT = command.environment()  # before the dictionaries get their own cache folder: the usual one has the op
_LOAD = """
import sys, nvme_ops, torch
memory = nvme_ops.empty(8 << 20, dtype=torch.uint8)
handle = nvme_ops.aio_handle(cache="direct")
print("loading", flush=True)
while True:
    for offset in range(0, int(sys.argv[2]) - memory.nbytes, memory.nbytes):
        handle.sync_pread(memory, sys.argv[1], offset)
"""

_PEERS_OF = {ADAPTIVE: ("torch", FIO), TOGETHER: ("torch", DEEP)}  # what a row is compared with besides the fixed tools

Move = Callable[[torch.Tensor, int], object]


class Work:
    """Tensors of one size, and where they are."""

    def __init__(self, path: str, write: bool, each: int) -> None:
        self.path, self.write, self.each = path, write, each
        self.count = max(1, min(_MOST, _PASS // each))
        self.places = os.path.getsize(path) // each
        self.next = 0
        self.tensor = filled(nvme_ops.empty(each, dtype=torch.uint8))
        self.pageable = filled(torch.empty(each, dtype=torch.uint8))
        self.file = nvme_ops.open(path, "r+")

    def offset(self) -> int:
        """Returns a different place for each transfer, so that nothing is read ahead for the next."""
        self.next += 7919  # a prime: every place comes up
        return self.next % self.places * self.each

    def together(self, handle: nvme_ops.aio_handle) -> Row:
        """Returns the row that moves the tensors of a pass by one call."""
        tensors = list(filled(nvme_ops.empty(self.count * self.each, dtype=torch.uint8)).split(self.each))
        submit = handle.submit_pwritev if self.write else handle.submit_preadv

        def move() -> None:
            submit(tensors, self.file, [self.offset() for _ in tensors]).result()

        def practise() -> None:
            for _ in range(LEARNING):
                make_cold(self.path)
                move()

        return Row(TOGETHER, lambda: timed(move, self.count * self.each), lambda: make_cold(self.path), practise)

    def row(self, name: str, move: Move, tensor: torch.Tensor | None = None, count: int = 0) -> Row:
        """Returns a row that moves ``count`` tensors in a pass."""
        memory, times = self.tensor if tensor is None else tensor, count or self.count

        def run() -> Sample:
            def work() -> None:
                for _ in range(times):
                    move(memory, self.offset())

            return timed(work, times * self.each)

        def check() -> None:
            offset = self.offset()
            if self.write:
                memory.view(-1)[:1] += 1
            move(memory, offset)
            with open(self.path, "rb") as file:
                if os.pread(file.fileno(), self.each, offset) != bytes(memory.numpy().data):
                    raise WrongData(f"the tensor at {offset} differs")

        return Row(name, run, lambda: make_cold(self.path), check)


def know_nothing() -> None:
    """Makes the next handle begin anew."""
    dictionary.forget()
    os.environ["XDG_CACHE_HOME"] = tempfile.mkdtemp(dir=os.path.dirname(os.environ["XDG_CACHE_HOME"]))


def handle_rows(work: Work) -> list[Row]:
    """Returns the rows of this package: what is learned, and each fixed tool."""
    op = "sync_pwrite" if work.write else "sync_pread"

    def by(handle: nvme_ops.aio_handle) -> Move:
        call = getattr(handle, op)
        return lambda tensor, offset: call(tensor, work.file, offset)

    adaptive = nvme_ops.aio_handle.adaptive(work.path)
    other_class = nvme_ops.empty(PAGE if work.each > PAGE else 4 * PAGE, dtype=torch.uint8)

    def begin_anew() -> None:
        know_nothing()
        anew[:] = [by(nvme_ops.aio_handle.adaptive(work.path))]
        anew[0](other_class, 0)  # starting is not exploration: it costs every handle the same
        make_cold(work.path)

    anew: list[Move] = []
    learned = work.row(ADAPTIVE, by(adaptive))
    first = work.row(NEW, lambda tensor, offset: anew[0](tensor, offset), count=LEARNING)
    first.before = begin_anew
    fixed: dict[str, dict[str, Any]] = {
        "direct, in place": {"cache": "direct"},
        "cache auto": {},
        "256 KiB blocks": {"block_size": 256 << 10},
        "4 MiB blocks": {"block_size": 4 << 20},
        "2 lanes": {"num_threads": 2},
    }
    rows = [work.row(f"nvme_ops {name}", by(nvme_ops.aio_handle(**given))) for name, given in fixed.items()]
    rows.append(work.row(STAGED, by(nvme_ops.aio_handle()), work.pageable))
    together = [work.together(adaptive)] if work.count > 1 else []
    practised(learned, work.path, lambda: by(adaptive)(work.tensor, work.offset()))
    return [learned, first, *together, *rows, buffered_row(work, by)]


def buffered_row(work: Work, by: Callable[[nvme_ops.aio_handle], Move]) -> Row:
    """Returns the row through the page cache."""
    move = by(nvme_ops.aio_handle(cache="buffered"))

    def synced(tensor: torch.Tensor, offset: int) -> None:
        move(tensor, offset)
        os.fdatasync(work.file.fileno())

    return work.row(f"nvme_ops buffered {_DATASYNC}" if work.write else "nvme_ops buffered",
                    synced if work.write else move)  # fmt: skip


def deepspeed_row(work: Work) -> Row:
    """Returns the row of DeepSpeed's handle with its locked memory, and a file for each tensor: it takes no offset."""
    found = deepspeed.load()
    if isinstance(found, Unavailable):
        return unavailable("DeepSpeed", found)
    handle = found.aio_handle()
    memory = filled(handle.new_cpu_locked_tensor(work.each, torch.empty(0, dtype=torch.uint8)))

    def save(path: str) -> None:
        handle.sync_pwrite(memory, path)

    def load(path: str) -> None:
        handle.sync_pread(memory, path)

    return files_row(work, "DeepSpeed", memory, save, load)


def plain_rows(work: Work) -> list[Row]:
    """Returns the rows of torch, NumPy and safetensors, each with a file for each tensor."""
    memory = work.pageable

    def fsynced(write: Callable[[str], object]) -> Callable[[str], None]:
        def call(path: str) -> None:
            write(path)
            with open(path, "rb") as file:
                os.fdatasync(file.fileno())

        return call

    ways: dict[str, tuple[Callable[[str], object], Callable[[str], object]]] = {
        "torch.save" if work.write else "torch.load": (partial(torch.save, memory), torch.load),
        "numpy.save" if work.write else "numpy.load": (_numpy_save(memory), numpy.load),
    }
    with contextlib.suppress(ImportError):
        from safetensors.torch import load_file, save_file

        ways["safetensors"] = (
            partial(save_file, {"tensor": memory}),
            lambda path: load_file(path)["tensor"].clone(),  # it maps the file: what is not used is not read
        )
    suffix = f" {_DATASYNC}" if work.write else ""
    rows = [files_row(work, f"{name}{suffix}", memory, fsynced(save), load) for name, (save, load) in ways.items()]
    if work.count > 1:
        name, (_, load) = next(iter(ways.items()))
        every = {str(number): memory.clone() for number in range(work.count)}
        save = fsynced(partial(torch.save, every))
        rows.append(files_row(work, f"{name}, all in one file{suffix}", memory, save, load, work.count))
    return rows


def _numpy_save(memory: torch.Tensor) -> Callable[[str], None]:
    def save(path: str) -> None:
        with open(path, "wb") as file:
            numpy.save(file, memory.numpy())

    return save


def fio_rows(work: Work) -> list[Row]:
    """Returns rows of the device's rate: 1 or 32 blocks of the tensors' size at a time; fio's best for larger ones."""
    nbytes = max(_FIO_BYTES, work.count * work.each)
    pattern = "randwrite" if work.write else "randread"

    def row(name: str, shape: Sequence[fio.Variant]) -> Row:
        return fio.row(name, pattern, lambda: work.path, nbytes, lambda: make_cold(work.path), shape)

    if work.each >= fio.BLOCK:
        return [row(FIO, fio.BEST)]
    return [row(name, fio.variants([f"--bs={work.each}", f"--iodepth={depth}"])) for name, depth in _DEPTHS.items()]


def files_row(
    work: Work, name: str, memory: torch.Tensor, save: Callable[[str], object], load: Callable[[str], object],
    tensors: int = 0,
) -> Row:  # fmt: skip
    """Returns a row that moves files of one tensor each, or one of ``tensors``; the same tool writes those it reads."""
    count, nbytes = (1, tensors * memory.nbytes) if tensors else (min(work.count, 32), memory.nbytes)
    folder = tempfile.mkdtemp(dir=os.path.dirname(work.path))
    paths = [os.path.join(folder, str(number)) for number in range(count)]

    def before() -> None:
        for path in paths:
            if not work.write and not os.path.exists(path):
                save(path)
            if os.path.exists(path):
                make_cold(path)

    def run() -> Sample:
        return timed(lambda: [(save if work.write else load)(path) for path in paths], count * nbytes)

    return Row(name, run, before)


@contextlib.contextmanager
def load(scratch: str, wanted: bool) -> Iterator[None]:
    """Has another process read a file of its own as long as the block lasts."""
    if not wanted:
        yield
        return
    path = os.path.join(scratch, "load")
    if not os.path.exists(path):
        nvme_ops.aio_handle().write(filled(nvme_ops.empty(GIB, dtype=torch.uint8)), path)
    words = [sys.executable, "-c", _LOAD, path, str(GIB)]
    with subprocess.Popen(
        stop.tied(words), env=_ENVIRONMENT, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            if process.stdout is None or process.stdout.readline() != "loading\n":
                raise Unavailable("the process that reads did not start")
            yield
        finally:
            process.kill()


def against_best(table: Table, row: Row, fixed: Sequence[Row]) -> list[float]:
    """Returns the row's rate over that of the best fixed tool, round by round.

    The best tool of a round is that of the other rounds: in its own, the luckiest would be the best.
    """
    found = []
    for number, mine in enumerate(row.samples):
        others = {
            each.name: [rate for other, rate in enumerate(table.values(each)) if other != number] for each in fixed
        }
        best = max(fixed, key=lambda each: statistics.median(others[each.name] or table.values(each)))
        other = best.samples[number]
        if mine is not None and other is not None:
            found.append(mine.rate / other.rate)
    return found


def summary(table: Table) -> str:
    """Returns how the choice compares with the best fixed tool, and with torch and fio."""
    rows = {row.name: row for row in table.rows if table.values(row)}
    others = (ADAPTIVE, NEW, TOGETHER, STAGED)
    fixed = [row for name, row in rows.items() if name.startswith("nvme_ops") and name not in others]
    if not fixed or ADAPTIVE not in rows:
        return ""
    best = max(fixed, key=lambda row: statistics.median(table.values(row)))
    ratios = {name: against_best(table, rows[name], fixed) for name in (ADAPTIVE, NEW) if name in rows}
    words = ", ".join(
        f"{statistics.median(found):.2f} ({name.rpartition(', ')[2]})" for name, found in ratios.items() if found
    )
    peers = [
        f"{name.rpartition(', ')[2]} {statistics.median(found):.2f} x {other}"
        for name, peer in _PEERS_OF.items()
        for other in rows
        if name in rows and other.startswith(peer) and (found := table.against(rows[name], other))
    ]
    return "; ".join([f"of the best fixed tool ({best.name}): {words}", *peers])


def tables(run: command.Run, scratch: str, found: dict[str, Any]) -> Generator[Table, None, None]:
    """Yields the tables of one folder."""
    path = command.data_file(scratch, run.given.size)
    meter = Meter()
    found["lost"] = {}
    for group in run.given.groups:
        write = group.startswith("write")
        for each in run.given.sizes:
            know_nothing()
            work = Work(path, write, each)
            rows = handle_rows(work)
            if not run.given.no_peers:
                rows += plain_rows(work)
            if not run.given.no_deepspeed:
                rows.append(deepspeed_row(work))
            rows += fio_rows(work)
            for row in rows:
                metered(row, meter)
            with load(scratch, group.endswith("load")):
                command.interleave(rows, run.given.rounds, command.show_progress)
            title = f"{GROUPS[group].partition(',')[0]}: {size_words(each)}, {work.count} in a pass"
            table = Table(group, title, "GB/s", rows, ADAPTIVE, ("CPU s/GiB", "J/GiB"))
            work.file.close()
            yield table
            if words := summary(table):
                found["lost"][f"{group} {each}"] = words
                print(words, flush=True)


def measure(given: argparse.Namespace) -> command.Run:
    """Measures all groups, with a dictionary of their own."""
    if not given.no_deepspeed:
        command.show_progress("loading DeepSpeed's op; the first time it is compiled, which takes minutes")
        deepspeed.load()
    nvme_ops.aio_handle()  # loads the op, which may be in the cache folder that is replaced below
    with tempfile.TemporaryDirectory() as cache:
        os.environ["XDG_CACHE_HOME"] = os.path.join(cache, "first")
        return command.Run(given, sizes=given.sizes).folders(3, tables, measured=True)


def main(words: Sequence[str] | None = None) -> int:
    """Returns 0; 1 when a folder cannot be used or a row moved wrong bytes; 2 for wrong arguments; 130 after Ctrl-C."""
    parser = command.parser(__file__, __doc__, GROUPS)
    parser.add_argument("--sizes", type=size, nargs="+", metavar="SIZE", default=[parse_size(text) for text in _SIZES],
                        help=f"of a tensor (default {' '.join(_SIZES)})")  # fmt: skip
    parser.add_argument("--no-peers", action="store_true", help="leave out torch, NumPy and safetensors")
    return command.run(command.parse(parser, words), measure)


if __name__ == "__main__":
    sys.exit(main())
