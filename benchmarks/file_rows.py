"""Those who read and write one large file: fio, this package, DeepSpeed and plain Python."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from functools import partial
from typing import IO, Any, cast

import torch

import nvme_ops
from nvme_ops.bench import fio
from nvme_ops.bench.engines import Contender, deepspeed, make_row, unavailable
from nvme_ops.bench.engines.task import Task
from nvme_ops.bench.measure import Row, Unavailable
from nvme_ops.bench.work import Work, saved_row, tensor_row
from nvme_ops.measuring.files import filled, make_cold, make_warm
from nvme_ops.settings import Settings
from nvme_ops.text import MIB

FIO_BEST = "fio best"
LOCKED, PAGEABLE = "DeepSpeed, locked", "DeepSpeed, pageable"
PREADV = "os.preadv in 64 MiB pieces"
LEARNING = 20  # transfers
_PIECE = 64 * MIB
_PLAIN = ("python", "torch")


def practised(row: Row, path: str, use: Callable[[], object]) -> Row:
    """Has an adaptive handle learn before the row is checked."""
    check = row.check

    def learn_and_check() -> None:
        for _ in range(LEARNING):
            use()
            make_cold(path)
        check()

    row.check = learn_and_check
    return row


def fio_rows(work: Work) -> list[Row]:
    """Fio at its best, and with its own memory."""
    return [
        fio.row(name, "write" if work.write else "read", lambda: work.path, work.size, work.set_out, variants)
        for name, variants in ((FIO_BEST, fio.BEST), ("fio default", [(fio.DEFAULT, "")]))
    ]


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


def deepspeed_rows(work: Work) -> list[Row]:
    """DeepSpeed's default handle, with its own locked memory and with an ordinary tensor."""
    found = deepspeed.load()
    if isinstance(found, Unavailable):
        return [unavailable(name, found) for name in (LOCKED, PAGEABLE)]
    handle = found.aio_handle()
    move = handle.sync_pwrite if work.write else handle.sync_pread

    @functools.cache
    def locked() -> torch.Tensor:
        return filled(handle.new_cpu_locked_tensor(work.size, torch.empty(0, dtype=torch.uint8)))

    return [
        tensor_row(work, LOCKED, locked, lambda tensor: move(tensor, work.path)),
        tensor_row(work, PAGEABLE, lambda: work.pageable, lambda tensor: move(tensor, work.path)),
    ]


def plain_rows(task: Task) -> list[Row]:
    """NumPy and torch through the page cache. What is written there reaches the device by an ``fsync``, timed too."""
    names = ("numpy tofile + fsync", "torch.save + fsync") if task.write else ("python readinto", "torch.load")
    rows = [make_row(Contender(engine, Settings(), name), task) for engine, name in zip(_PLAIN, names, strict=True)]
    name = "torch.save to nvme_ops.open + sync" if task.write else "torch.load from nvme_ops.open"
    path = f"{task.path}.pt"  # the other torch row's, which has been checked before this one's first pass
    save, load = partial(save_through_us, task.buffer, path), partial(load_through_us, path)
    return [*rows, saved_row(task, name, path, lambda: task.buffer, save, load, [])]


def save_through_us(value: object, path: str) -> None:
    """``torch.save`` to ``nvme_ops.open``; on the device when it returns."""
    with nvme_ops.open(path, "w") as file:
        torch.save(value, cast(IO[bytes], file))
        file.sync()


def load_through_us(path: str) -> Any:
    """``torch.load`` from ``nvme_ops.open``."""
    with nvme_ops.open(path) as file:
        return torch.load(cast(IO[bytes], file))


def cached_rows(work: Work) -> list[Row]:
    """A file in the page cache into the same ordinary tensor, by plain Python and by a default handle."""

    def by_pieces(tensor: torch.Tensor) -> None:
        descriptor = os.open(work.path, os.O_RDONLY)
        try:
            with tensor.numpy().data as view:
                position = 0
                while position < len(view):
                    position += os.preadv(descriptor, [view[position : position + _PIECE]], position)
        finally:
            os.close(descriptor)

    def by_handle(tensor: torch.Tensor) -> None:
        work.handle.sync_pread(tensor, work.path)

    rows = [
        tensor_row(work, PREADV, lambda: work.pageable, by_pieces),
        tensor_row(work, "nvme_ops, pageable", lambda: work.pageable, by_handle),
        tensor_row(work, "nvme_ops, nvme_ops.empty", lambda: work.huge, by_handle),
    ]
    for row in rows:
        row.before = lambda: make_warm(work.path)
    return rows
