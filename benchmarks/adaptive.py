"""What an adaptive handle chooses, against each fixed tool: one table for each direction and size of tensors.

Every pass moves several tensors of one size, cold, each at its own place in one file, or in a file of its own by other
packages. A write is timed until its bytes are on the device: rows that use the page cache call ``fdatasync``. The
adaptive handle has moved 20 tensors of the size before. Its other row begins anew in each pass, with one tensor of
another size, and moves 20: the whole exploration. Rows ``all at once`` move the tensors of a pass together.
"""

from __future__ import annotations

import os
import statistics
import tempfile
from collections.abc import Callable, Iterator
from functools import cache, partial
from typing import Any

import numpy
import torch

import nvme_ops
from benchmarks import command, fio, raw_io
from benchmarks.peers import load_deepspeed
from benchmarks.raw_io import LEARNING, practised
from nvme_ops.base.command_line import size
from nvme_ops.base.settings import PAGE
from nvme_ops.base.text import MIB, size_words
from nvme_ops.io.tuning import adaptive as learning
from nvme_ops.measure.engines import locked_tensor
from nvme_ops.measure.files import filled, make_cold
from nvme_ops.measure.rows import Row, WrongData, timed
from nvme_ops.measure.tables import Table

GROUPS = {
    "read": "cold reads of tensors of each size, in GB/s",
    "write": "writes of tensors of each size until they are on the device, in GB/s",
}
ADAPTIVE, NEW = "nvme_ops adaptive, after 20", "nvme_ops adaptive, the first 20"
TOGETHER = "nvme_ops adaptive, all at once"
FIO, DEEP = "fio, as deep as one tensor allows", "fio, as deep as all allow"
_PASS = 128 * MIB  # bytes of a pass: at least one tensor, at most _MAX
_MAX = 256
_FIXED: dict[str, dict[str, Any]] = {
    "direct, in place": {"cache": "direct"}, "cache auto": {}, "256 KiB blocks": {"block_size": 256 << 10},
    "4 MiB blocks": {"block_size": 4 << 20}, "2 lanes": {"num_threads": 2},
}  # fmt: skip

Move = Callable[[torch.Tensor, int], object]
OfPath = Callable[[str], object]


class Work:
    """Tensors of one size, and where they are."""

    def __init__(self, path: str, write: bool, each: int) -> None:
        self.path, self.write, self.each, self.cool = path, write, each, partial(make_cold, path)
        self.count = max(1, min(_MAX, _PASS // each))
        self.places, self._next = os.path.getsize(path) // each, 0
        self.tensor = filled(nvme_ops.empty(each, dtype=torch.uint8))
        self.pageable = filled(torch.empty(each, dtype=torch.uint8))
        self.file = nvme_ops.open(path, "r+")
        self.synced = " + fdatasync" if write else ""  # in the names of rows that write through the page cache

    def offset(self) -> int:
        """Returns a different place for each transfer, so that nothing is read ahead for the next."""
        self._next += 7919  # a prime: every place comes up
        return self._next % self.places * self.each

    def by(self, handle: nvme_ops.aio_handle, sync: bool = False) -> Move:
        """Returns a function that moves a tensor by a handle."""
        call = handle.sync_pwrite if self.write else handle.sync_pread

        def move(tensor: torch.Tensor, offset: int) -> None:
            call(tensor, self.file, offset)
            if sync:
                os.fdatasync(self.file.fileno())

        return move

    def row(self, name: str, move: Move, count: int = 0) -> Row:
        """Returns a row that moves ``count`` tensors in a pass."""
        memory, times = self.tensor, count or self.count

        def check() -> None:
            offset = self.offset()
            if self.write:
                memory.view(-1)[:1] += 1
            move(memory, offset)
            with open(self.path, "rb") as file:
                if os.pread(file.fileno(), self.each, offset) != bytes(memory.numpy().data):
                    raise WrongData(f"the tensor at {offset} differs")

        run = partial(timed, lambda: [move(memory, self.offset()) for _ in range(times)], times * self.each)
        return Row(name, run, self.cool, check)


def handle_rows(work: Work) -> list[Row]:
    """Returns the rows of this package: what is learned, and each fixed tool."""
    adaptive = nvme_ops.aio_handle.adaptive(work.path)
    other_class = nvme_ops.empty(PAGE if work.each > PAGE else 4 * PAGE, dtype=torch.uint8)
    anew: list[Move] = []

    def begin_anew() -> None:
        learning.forget()
        anew[:] = [work.by(nvme_ops.aio_handle.adaptive(work.path))]
        anew[0](other_class, 0)  # starting is not exploration: it costs every handle the same
        work.cool()

    learned = work.row(ADAPTIVE, work.by(adaptive))
    practised(learned, work.path, lambda: work.by(adaptive)(work.tensor, work.offset()))
    first = work.row(NEW, lambda tensor, offset: anew[0](tensor, offset), count=LEARNING)
    first.before = begin_anew
    rows = [learned, first, *([together(work, adaptive)] if work.count > 1 else [])]
    rows += [work.row(f"nvme_ops {name}", work.by(nvme_ops.aio_handle(**args))) for name, args in _FIXED.items()]
    buffered = work.by(nvme_ops.aio_handle(cache="buffered"), sync=work.write)
    return [*rows, work.row(f"nvme_ops buffered{work.synced}", buffered)]


def together(work: Work, handle: nvme_ops.aio_handle) -> Row:
    """Returns the row that moves the tensors of a pass by one call."""
    tensors = list(filled(nvme_ops.empty(work.count * work.each, dtype=torch.uint8)).split(work.each))
    submit = handle.submit_pwritev if work.write else handle.submit_preadv

    def move() -> None:
        submit(tensors, work.file, [work.offset() for _ in tensors]).result()

    return practised(Row(TOGETHER, lambda: timed(move, work.count * work.each), work.cool), work.path, move)


def peer_rows(work: Work, deepspeed: bool) -> list[Row]:
    """Returns the rows of torch, NumPy and DeepSpeed, each with a file for each tensor."""
    memory = work.pageable

    def save_by_numpy(path: str) -> None:
        with open(path, "wb") as file:
            numpy.save(file, memory.numpy())

    def fsynced(write: OfPath) -> OfPath:
        def call(path: str) -> None:
            write(path)
            with open(path, "rb") as file:
                os.fdatasync(file.fileno())

        return call

    verb = "save" if work.write else "load"
    rows = [files_row(work, f"{name}.{verb}{work.synced}", fsynced(save), load)
            for name, save, load in (("torch", partial(torch.save, memory), torch.load),
                                     ("numpy", save_by_numpy, numpy.load))]  # fmt: skip
    if work.count > 1:
        every = {str(number): memory.clone() for number in range(work.count)}
        save = fsynced(partial(torch.save, every))
        rows.append(files_row(work, f"torch.{verb}, all in one file{work.synced}", save, torch.load, work.count))
    return rows + ([deepspeed_row(work)] if deepspeed else [])


def deepspeed_row(work: Work) -> Row:
    """Returns the row of DeepSpeed's handle with its locked memory, and a file for each tensor: it takes no offset."""
    handle = cache(lambda: load_deepspeed().aio_handle())
    memory = cache(lambda: locked_tensor(handle(), work.each))
    return files_row(work, "DeepSpeed", lambda path: handle().sync_pwrite(memory(), path),
                     lambda path: handle().sync_pread(memory(), path))  # fmt: skip


def files_row(work: Work, name: str, save: OfPath, load: OfPath, tensors: int = 0) -> Row:
    """Returns a row that moves files of one tensor, or one of ``tensors``; the same tool writes the files it reads."""
    count, nbytes = (1, tensors * work.each) if tensors else (min(work.count, 32), work.each)
    folder = tempfile.mkdtemp(dir=os.path.dirname(work.path))
    paths = [os.path.join(folder, str(number)) for number in range(count)]

    def before() -> None:
        for path in paths:
            if not work.write and not os.path.exists(path):
                save(path)
            if os.path.exists(path):
                make_cold(path)

    move = save if work.write else load
    return Row(name, lambda: timed(lambda: [move(path) for path in paths], count * nbytes), before)


def fio_rows(work: Work) -> list[Row]:
    """Returns rows of the device's rate: 1 or 32 blocks of the tensors' size at a time; fio's best for larger ones."""
    nbytes = max(16 * MIB, work.count * work.each)  # fio counts in milliseconds
    pattern = "randwrite" if work.write else "randread"
    shapes = {FIO: fio.BEST} if work.each >= fio.BLOCK else {
        name: fio.variants([f"--bs={work.each}", f"--iodepth={depth}"]) for name, depth in {FIO: 1, DEEP: 32}.items()
    }  # fmt: skip
    return [fio.row(name, pattern, lambda: work.path, nbytes, work.cool, shape) for name, shape in shapes.items()]


def summary(table: Table) -> str:
    """Returns how the choice compares with the fixed tool of the highest median, which this favours a little."""
    rows = {row.name: row for row in table.rows if table.values(row)}
    fixed = [row for name, row in rows.items()
             if name.startswith("nvme_ops") and name not in (ADAPTIVE, NEW, TOGETHER)]  # fmt: skip
    if not fixed:
        return "no fixed tool was measured"
    best = max(fixed, key=lambda row: statistics.median(table.values(row)))
    ratios = {name: table.against(rows[name], best.name) for name in (ADAPTIVE, NEW) if name in rows}
    words = [f"{statistics.median(ratio):.2f} ({name.rpartition(', ')[2]})" for name, ratio in ratios.items() if ratio]
    return f"of the best fixed tool ({best.name}): {', '.join(words)}"


def tables(run: command.Run, scratch: str, result: dict[str, Any]) -> Iterator[Table]:
    """Yields the tables of one folder. An adaptive handle begins with the default settings."""
    args = run.args
    path = command.data_file(scratch, args.size)
    with tempfile.TemporaryDirectory() as cache:
        os.environ["XDG_CACHE_HOME"] = cache  # where no settings of nvme-tune are
        for group, nbytes in ((group, nbytes) for group in args.groups for nbytes in args.sizes):
            learning.forget()
            work = Work(path, group == "write", nbytes)
            rows = [*handle_rows(work), *peer_rows(work, not args.no_deepspeed), *fio_rows(work)]
            title = f"{GROUPS[group].partition(',')[0]}: {size_words(nbytes)}, {work.count} in a pass"
            table = Table(group, title, "GB/s", rows, ADAPTIVE, ("CPU s/GiB",))
            yield table
            work.file.close()
            print(words := summary(table), flush=True)
            result["notes"].append(words)


_FLAGS = {"--sizes": ("of a tensor", ["4K", "64K", "1M", "16M", "256M"], size)}
PROGRAM = command.Program(GROUPS, tables, 3, _FLAGS, prepare=raw_io.prepare)
