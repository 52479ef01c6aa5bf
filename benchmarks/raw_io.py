"""This package beside fio, DeepSpeed and plain Python, on the same file in one run. docs/benchmarks.md explains it."""

from __future__ import annotations

import contextlib
import functools
import mmap
import os
import random
import statistics
import tempfile
import time
from argparse import Namespace
from collections.abc import Callable, Iterator
from functools import partial
from typing import IO, Any, cast

import torch

import nvme_ops
from benchmarks import command, fio
from benchmarks.peers import load_deepspeed, safetensors_row
from nvme_ops.base.settings import PAGE, Settings
from nvme_ops.base.text import MIB, size_words
from nvme_ops.measure import engines
from nvme_ops.measure.engines import Contender, Task, make_row, tensor_row
from nvme_ops.measure.files import filled, make_cold, make_warm
from nvme_ops.measure.rows import Row, Sample, Unavailable, WrongData, kept_as_note, latency, timed
from nvme_ops.measure.tables import Table

GROUPS = {
    "read": "read, of a file that is not in the page cache",
    "write": "write, over an existing file",
    "cached": "read of a file in the page cache",
    "random": "16,384 random reads of 4 KiB, past the page cache",
    "latency": "one blocking read of 4 KiB by path, past the page cache",
    "start": "from a fresh process to the first handle",
}
LOCKED, PAGEABLE = "DeepSpeed, locked", "DeepSpeed, pageable"
PREADV = "os.preadv in 64 MiB pieces"
FIO_RANDOM = "fio randread 4k, depth 128"
PYTHON_DIRECT = "python open(O_DIRECT) + preadv + close"
LEARNING = 20  # transfers
_PIECE = 64 * MIB
_REQUESTS = 16384
_PLAIN = {"python": ("python readinto", "numpy tofile + fsync"), "torch": ("torch.load", "torch.save + fsync")}
# prints the seconds from torch's import to the first handle
_START = """
import time
import torch
start = time.perf_counter()
from nvme_ops.op_builder import AsyncIOBuilder
AsyncIOBuilder().load().aio_handle()
print("\\n", time.perf_counter() - start)
"""


def practised(row: Row, path: str, use: Callable[[], object]) -> Row:
    """Lets an adaptive handle learn before the row is checked."""
    check = row.check

    def learn_and_check() -> None:
        for _ in range(LEARNING):
            use()
            make_cold(path)
        check()

    row.check = learn_and_check
    return row


def save_through_us(value: object, path: str) -> None:
    """Calls ``torch.save`` on a file of ``nvme_ops.open``."""
    with nvme_ops.open(path, "w") as file:
        torch.save(value, cast(IO[bytes], file))


def load_through_us(path: str) -> Any:
    """Calls ``torch.load`` on a file of ``nvme_ops.open``."""
    with nvme_ops.open(path) as file:
        return torch.load(cast(IO[bytes], file))


def mover(handle: Any, task: Task) -> Callable[[torch.Tensor], object]:
    """Returns a function that moves a tensor from or to the file, by a handle of this package or of DeepSpeed."""
    move = handle.sync_pwrite if task.write else handle.sync_pread
    return lambda tensor: move(tensor, task.path)


def fio_row(task: Task, name: str = fio.NAME, variants: list[fio.Variant] = fio.BEST) -> Row:
    """Returns fio's row over the file of a task."""
    pattern = "write" if task.write else "read"
    return fio.row(name, pattern, lambda: task.path, task.size, task.set_cache, variants)


def large_rows(task: Task, deepspeed: bool) -> list[Row]:
    """Returns the rows that read or write one large file: fio, this package, DeepSpeed, Python or NumPy, torch."""
    handle = task.handle
    start = handle.async_pwrite if task.write else handle.async_pread

    def start_and_wait(tensor: torch.Tensor) -> None:
        start(tensor, task.path)
        handle.wait()

    blocking = mover(handle, task)
    huge = functools.cache(lambda: filled(nvme_ops.empty(task.size, dtype=torch.uint8)))
    plain = [make_row(Contender(engine, Settings(), names[task.write]), task) for engine, names in _PLAIN.items()]
    name = "torch.save to nvme_ops.open + sync" if task.write else "torch.load from nvme_ops.open"
    return [
        fio_row(task),
        fio_row(task, "fio default", [(fio.DEFAULT, "")]),
        tensor_row(task, "nvme_ops, locked", lambda: task.locked, blocking, LOCKED),
        tensor_row(task, "nvme_ops, nvme_ops.empty", huge, blocking),
        tensor_row(task, "nvme_ops, pageable", lambda: task.pageable, blocking, PAGEABLE),
        tensor_row(task, "nvme_ops, locked, async + wait", lambda: task.locked, start_and_wait),
        tensor_row(task, "nvme_ops, pageable, async + wait", lambda: task.pageable, start_and_wait),
        *(deepspeed_rows(task) if deepspeed else []),
        *plain,
        engines.saved_row(task, name, "pt", save_through_us, load_through_us),
        safetensors_row(task, f"safetensors {'save_file + fsync' if task.write else 'load_file'}"),
    ]


def deepspeed_rows(task: Task) -> list[Row]:
    """Returns the rows of DeepSpeed's default handle, with its own locked memory and with an ordinary tensor."""
    handle = functools.cache(lambda: load_deepspeed().aio_handle())
    locked = functools.cache(lambda: engines.locked_tensor(handle(), task.size))
    memories: dict[str, Callable[[], torch.Tensor]] = {LOCKED: locked, PAGEABLE: lambda: task.pageable}
    return [tensor_row(task, name, memory, lambda tensor: mover(handle(), task)(tensor))
            for name, memory in memories.items()]  # fmt: skip


def cached_rows(task: Task) -> list[Row]:
    """Returns rows that read a file in the page cache, by plain Python and by a default handle."""

    def by_pieces(tensor: torch.Tensor) -> None:
        with open(task.path, "rb", 0) as file, tensor.numpy().data as view:
            position = 0
            while position < len(view):
                position += os.preadv(file.fileno(), [view[position : position + _PIECE]], position)

    huge = functools.cache(lambda: filled(nvme_ops.empty(task.size, dtype=torch.uint8)))
    rows = [
        tensor_row(task, PREADV, lambda: task.pageable, by_pieces),
        tensor_row(task, "nvme_ops, pageable", lambda: task.pageable, mover(task.handle, task)),
        tensor_row(task, "nvme_ops, nvme_ops.empty", huge, mover(task.handle, task)),
    ]
    for row in rows:
        row.before = lambda: make_warm(task.path)
    return rows


def random_rows(task: Task) -> list[Row]:
    """Returns rows of random reads of 4 KiB past the page cache, many in one call: operations per second."""
    count = min(_REQUESTS, task.size // PAGE)
    generator = random.Random(1)
    offsets = [generator.randrange(task.size // PAGE) * PAGE for _ in range(count)]

    def row(name: str, memory: torch.Tensor) -> Row:
        def read() -> None:
            task.handle.submit_preadv(memory, task.path, offsets).result()

        def check() -> None:
            for index in (0, count // 2, count - 1):
                _compare(memory[index], task.path, offsets[index])

        return Row(name, lambda: timed(read, count), task.set_cache, check)

    shape: list[fio.Variant] = [(fio.RANDOM, "")]
    size = 4 * count * PAGE  # of the same requests, since fio's clock counts milliseconds
    return [
        fio.row(FIO_RANDOM, "randread", lambda: task.path, size, task.set_cache, shape, operations=True),
        row("nvme_ops submit_preadv, nvme_ops.empty", nvme_ops.empty(count, PAGE, dtype=torch.uint8)),
        row("nvme_ops submit_preadv, pageable", torch.zeros(count, PAGE, dtype=torch.uint8)),
    ]


def latency_rows(task: Task) -> list[Row]:
    """Returns rows of one blocking read of 4 KiB by path, each at an offset of its own, past the page cache."""
    generator = random.Random(2)
    tensor = torch.zeros(PAGE + 64, dtype=torch.uint8)[1 : PAGE + 1]  # an odd address: direct I/O cannot use it
    aligned = mmap.mmap(-1, PAGE)

    def by_handle(position: int) -> None:
        task.handle.read(tensor, task.path, False, position)

    def by_python(position: int) -> None:
        descriptor = os.open(task.path, os.O_RDONLY | os.O_DIRECT)
        try:
            os.preadv(descriptor, [aligned], position)
        finally:
            os.close(descriptor)

    def check() -> None:
        by_handle(PAGE)
        _compare(tensor, task.path, PAGE)

    def run(call: Callable[[int], None]) -> Sample:
        places = (generator.randrange(task.size // PAGE) * PAGE for _ in range(500))
        return Sample(statistics.median(latency(partial(call, place)) for place in places), 1)

    return [
        Row(PYTHON_DIRECT, partial(run, by_python), task.set_cache),
        Row("nvme_ops handle.read, misaligned tensor", partial(run, by_handle), task.set_cache, check),
    ]


def _compare(tensor: torch.Tensor, path: str, offset: int) -> None:
    with open(path, "rb") as file:
        if tensor.numpy().tobytes() != os.pread(file.fileno(), PAGE, offset):
            raise WrongData(f"the page at {offset} differs")


def start_rows(rounds: int) -> list[Row]:
    """Returns a process from an empty cache, once, and what a warm start takes beyond torch."""
    cold, warm = Row("nvme_ops, empty cache, whole process"), Row("nvme_ops, warm, beyond importing torch")
    with tempfile.TemporaryDirectory(prefix="nvme_ops-extensions-") as extensions, kept_as_note(warm):
        for number in range(1 + rounds):
            start = time.perf_counter()
            beyond = command.in_new_process(_START, TORCH_EXTENSIONS_DIR=extensions, CCACHE_DISABLE="1")
            warm.samples += [Sample(beyond, 1)] if number else []
            cold.samples += [] if number else [Sample(time.perf_counter() - start, 1)]
    return [cold, warm]


def prepare(args: Namespace) -> dict[str, str]:
    """Loads DeepSpeed's op if its rows are wanted: it must come before this package's."""
    if not args.no_deepspeed and {"read", "write"} & set(args.groups):
        command.show_progress("loading DeepSpeed's op; the first time it is compiled, which takes minutes")
        with contextlib.suppress(Unavailable):
            load_deepspeed()
    return {}


def tables(run: command.Run, scratch: str, _: dict[str, Any]) -> Iterator[Table]:
    """Yields the tables of one folder; that of a fresh process does not depend on it, and comes once."""
    args = run.args
    path = command.data_file(scratch, args.size)
    for group in args.groups:
        # a new one for each, so that a table's memory is free before the next
        task, title = Task(path, args.size, group == "write", pageable_memory=True), GROUPS[group]
        sized = f"{title}, {size_words(task.size)}"
        if group == "random":
            yield Table(group, title, "kIOPS", random_rows(task), FIO_RANDOM)
        elif group == "latency":
            yield Table(group, title, "us", latency_rows(task), PYTHON_DIRECT)
        elif group == "cached":
            yield Table(group, sized, "GB/s", cached_rows(task), PREADV)
        elif group != "start":
            yield Table(group, sized, "GB/s", large_rows(task, not args.no_deepspeed), fio.NAME)
        elif len(run.result["folders"]) == len(args.folder):
            yield Table(group, title, "s", start_rows(args.rounds))


PROGRAM = command.Program(GROUPS, tables, 3, prepare=prepare)
