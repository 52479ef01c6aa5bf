"""Small requests: many in one call, one at a time, and how soon a submission returns."""

from __future__ import annotations

import mmap
import os
import random
import statistics
from collections.abc import Callable
from functools import partial

import torch

import nvme_ops
from nvme_ops.bench import fio
from nvme_ops.bench.measure import Row, Sample, WrongData, latency, timed
from nvme_ops.bench.work import Work
from nvme_ops.text import MIB

PAGE = 4096
REQUESTS = 16384
FIO_RANDOM = "fio randread 4k, depth 128"
PYTHON_DIRECT = "python open(O_DIRECT) + preadv + close"
_FIO_TIMES = 4  # fio's clock counts milliseconds: with more of the same requests that is fine enough
_CALLS = 500  # of one kind in one round


def random_rows(work: Work) -> list[Row]:
    """16,384 random reads of 4 KiB past the page cache: operations per second."""
    count = min(REQUESTS, work.size // PAGE)
    generator = random.Random(1)
    offsets = [generator.randrange(work.size // PAGE) * PAGE for _ in range(count)]

    def row(name: str, memory: torch.Tensor) -> Row:
        def read() -> None:
            work.handle.submit_preadv(memory, work.path, offsets).result()

        def check() -> None:
            for index in (0, count // 2, count - 1):
                if memory[index].numpy().tobytes() != _read(work.path, offsets[index]):
                    raise WrongData(f"request {index} differs")

        return Row(name, lambda: timed(read, count), work.set_out, check)

    return [
        fio.row(
            FIO_RANDOM, "randread", lambda: work.path, count * PAGE * _FIO_TIMES, work.set_out, [(fio.RANDOM, "")],
            operations=True,
        ),
        row("nvme_ops submit_preadv, nvme_ops.empty", nvme_ops.empty(count, PAGE, dtype=torch.uint8)),
        row("nvme_ops submit_preadv, pageable", torch.zeros(count, PAGE, dtype=torch.uint8)),
    ]  # fmt: skip


def latency_rows(work: Work) -> list[Row]:
    """One blocking read of 4 KiB by path, each at an offset of its own, past the page cache."""
    generator = random.Random(2)
    tensor = torch.zeros(PAGE + 64, dtype=torch.uint8)[1 : PAGE + 1]  # an odd address: direct I/O cannot use it
    aligned = mmap.mmap(-1, PAGE)

    def by_handle(position: int) -> None:
        work.handle.read(tensor, work.path, False, position)

    def by_python(position: int) -> None:
        descriptor = os.open(work.path, os.O_RDONLY | os.O_DIRECT)
        try:
            os.preadv(descriptor, [aligned], position)
        finally:
            os.close(descriptor)

    def check() -> None:
        by_handle(PAGE)
        if tensor.numpy().tobytes() != _read(work.path, PAGE):
            raise WrongData("tensor and file differ")

    def row(name: str, call: Callable[[int], None], check: Callable[[], None] = lambda: None) -> Row:
        def once() -> float:
            return latency(partial(call, generator.randrange(work.size // PAGE) * PAGE))

        return Row(name, lambda: Sample(statistics.median(once() for _ in range(_CALLS)), 1), work.set_out, check)

    return [row(PYTHON_DIRECT, by_python), row("nvme_ops handle.read, misaligned tensor", by_handle, check)]


def submit_rows(work: Work) -> list[Row]:
    """How soon ``submit_pread`` returns; ``result()``, not timed, follows each."""

    def row(name: str, tensor: torch.Tensor) -> Row:
        futures: list[nvme_ops.IoFuture] = []

        def submit(position: int) -> None:
            futures.append(work.handle.submit_pread(tensor, work.path, position))

        def once(number: int) -> float:
            seconds = latency(partial(submit, number * tensor.nbytes % (work.size - tensor.nbytes + 1)))
            futures.pop().result()
            return seconds

        return Row(name, lambda: Sample(statistics.median(map(once, range(_CALLS))), 1), work.set_out)

    return [
        row("submit_pread of 4 KiB", torch.zeros(PAGE, dtype=torch.uint8)),
        row("submit_pread of 1 MiB", torch.zeros(MIB, dtype=torch.uint8)),
    ]


def _read(path: str, offset: int) -> bytes:
    with open(path, "rb") as file:
        return os.pread(file.fileno(), PAGE, offset)
