"""Those who read and write one large file: fio, this package, and plain Python. DeepSpeed is in deepspeed_rows.py."""

from __future__ import annotations

from typing import IO, cast

import torch

import nvme_ops
from nvme_ops.bench import fio
from nvme_ops.bench.engines import python
from nvme_ops.bench.files import make_cold, sync
from nvme_ops.bench.measure import Row, Sample
from nvme_ops.bench.work import Work, saved_row, tensor_row

FIO_BEST = "fio best"
LOCKED = "DeepSpeed, locked"
PAGEABLE = "DeepSpeed, pageable"


def fio_rows(work: Work) -> list[Row]:
    """Fio with its own memory, and at its best."""
    pattern = "write" if work.write else "read"
    best = Row(FIO_BEST, lambda: Sample(1, 1), lambda: make_cold(work.path))
    best.run = fio.first_that_runs(best, fio.BEST, pattern, lambda: work.path, work.size)
    default = Row(
        "fio default", lambda: fio.run(pattern, work.path, work.size, fio.DEFAULT), lambda: make_cold(work.path)
    )
    return [best, default]


def nvme_ops_rows(work: Work) -> list[Row]:
    """This package: a default handle with each kind of memory, blocking and asynchronous."""
    handle = work.handle
    move = handle.sync_pwrite if work.write else handle.sync_pread
    start = handle.async_pwrite if work.write else handle.async_pread

    def start_and_wait(tensor: torch.Tensor) -> None:
        start(tensor, work.path)
        handle.wait()

    def blocking(tensor: torch.Tensor) -> None:
        move(tensor, work.path)

    return [
        tensor_row(work, "nvme_ops, locked", lambda: work.locked, blocking, LOCKED),
        tensor_row(work, "nvme_ops, nvme_ops.empty", lambda: work.huge, blocking),
        tensor_row(work, "nvme_ops, pageable", lambda: work.pageable, blocking, PAGEABLE),
        tensor_row(work, "nvme_ops, locked, async + wait", lambda: work.locked, start_and_wait),
        tensor_row(work, "nvme_ops, pageable, async + wait", lambda: work.pageable, start_and_wait),
    ]


def plain_rows(work: Work) -> list[Row]:
    """NumPy and torch through the page cache. What is written there reaches the device by an ``fsync``, timed too."""
    saved: list[int] = []
    return [_file_row(work), *(_torch_row(work, through_us, saved) for through_us in (False, True))]


def _file_row(work: Work) -> Row:
    name, move = ("numpy tofile + fsync", python.write) if work.write else ("python readinto", python.read)
    return tensor_row(work, name, lambda: work.pageable, lambda tensor: move(work.path, tensor))


def _torch_row(work: Work, through_us: bool, saved: list[int]) -> Row:
    """``torch.save`` or ``torch.load`` of one tensor, by path or through ``nvme_ops.open``."""
    path = f"{work.path}.pt"

    def save() -> None:
        if through_us:
            with nvme_ops.open(path, "w") as file:
                torch.save(work.pageable, cast(IO[bytes], file))
                file.sync()
        else:
            torch.save(work.pageable, path)
            sync(path)

    def load() -> torch.Tensor:
        if not through_us:
            return cast(torch.Tensor, torch.load(path))
        with nvme_ops.open(path) as file:
            return cast(torch.Tensor, torch.load(cast(IO[bytes], file)))

    if work.write:
        name = "torch.save to nvme_ops.open + sync" if through_us else "torch.save + fsync"
    else:
        name = "torch.load from nvme_ops.open" if through_us else "torch.load"
    return saved_row(work, name, path, lambda: work.pageable, save, load, saved)
