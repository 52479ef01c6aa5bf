"""Those who read and write one large file: fio, this package, and plain Python. DeepSpeed is in deepspeed_rows.py."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import IO, cast

import torch

import nvme_ops
from benchmarks import fio
from benchmarks.files import checksum, make_cold, sync, tensor_checksum
from benchmarks.measure import Row, Sample, timed

FIO_BEST = "fio best"
LOCKED = "DeepSpeed, locked"
PAGEABLE = "DeepSpeed, pageable"


@dataclass
class Work:
    """The file that all rows of a table read or write, and what they need beside it."""

    path: str
    size: int
    write: bool
    written: int = field(default=0, init=False)  # how many checked writes there were, to tell them apart

    @functools.cached_property
    def handle(self) -> nvme_ops.aio_handle:
        """One handle with default settings for all rows, made when first needed."""
        return nvme_ops.aio_handle()

    @functools.cached_property
    def pageable(self) -> torch.Tensor:
        """An ordinary tensor, all of whose pages are there."""
        return filled(torch.empty(self.size, dtype=torch.uint8))

    @functools.cached_property
    def locked(self) -> torch.Tensor:
        """From ``new_cpu_locked_tensor``."""
        return filled(self.handle.new_cpu_locked_tensor(self.size, torch.empty(0, dtype=torch.uint8)))

    @functools.cached_property
    def huge(self) -> torch.Tensor:
        """From ``nvme_ops.empty``."""
        return filled(nvme_ops.empty(self.size, dtype=torch.uint8))

    @functools.cached_property
    def content(self) -> int:
        """The checksum of the file as the first pass finds it; rows that write do not use it."""
        return checksum(self.path)


def filled(tensor: torch.Tensor) -> torch.Tensor:
    """The same tensor, full of arbitrary bytes, so that no page of it is still to be made."""
    words = tensor[: tensor.numel() // 8 * 8].view(torch.int64)
    words.copy_(torch.arange(words.numel(), dtype=torch.int64)).mul_(0x5851F42D4C957F2D)  # Knuth's MMIX multiplier
    return tensor


def tensor_row(
    work: Work, name: str, memory: Callable[[], torch.Tensor], move: Callable[[torch.Tensor], object], peer: str = ""
) -> Row:
    """A row that moves the whole file from or to one tensor; ``memory`` makes the tensor when first called."""

    def before() -> None:
        memory()
        make_cold(work.path)

    def check() -> None:
        tensor = memory()
        if work.write:
            # a mark of its own in every page, or a write that does nothing would leave what the last row wrote
            work.written += 1
            tensor[::4096] = work.written
        else:
            tensor.zero_()
        make_cold(work.path)
        move(tensor)
        there = checksum(work.path) if work.write else work.content
        assert tensor_checksum(tensor) == there, "tensor and file differ"

    return Row(name, lambda: timed(lambda: move(memory()), work.size), before, check, peer)


def fio_rows(work: Work) -> list[Row]:
    """Fio with its own memory, and at its best."""
    pattern = "write" if work.write else "read"
    best = Row(FIO_BEST, lambda: Sample(1, 1), lambda: make_cold(work.path))
    usable: list[list[str]] = []

    def run_best() -> Sample:
        if usable:
            return fio.run(pattern, work.path, work.size, usable[0])
        for options, lacks in fio.BEST:
            try:
                sample = fio.run(pattern, work.path, work.size, options)
            except RuntimeError as error:
                failure = error
                continue
            usable.append(options)
            best.note = lacks
            return sample
        raise failure

    best.run = run_best
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
    def read_into(tensor: torch.Tensor) -> None:
        with open(work.path, "rb", buffering=0) as file, tensor.numpy().data as view:
            position = 0
            while position < len(view):
                position += file.readinto(view[position:]) or len(view)

    def to_file(tensor: torch.Tensor) -> None:
        with open(work.path, "r+b") as file:  # in place, as the others write
            tensor.numpy().tofile(file)
            file.flush()
            os.fsync(file.fileno())

    if work.write:
        return tensor_row(work, "numpy tofile + fsync", lambda: work.pageable, to_file)
    return tensor_row(work, "python readinto", lambda: work.pageable, read_into)


def _torch_row(work: Work, through_us: bool, saved: list[int]) -> Row:
    """``torch.save`` or ``torch.load`` of one tensor, by path or through ``nvme_ops.open``.

    The rows share a file beside the others' one. ``saved``: the checksum of the tensor in it, empty before the first.
    """
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

    def before() -> None:
        if not saved:
            save()
            saved.append(tensor_checksum(work.pageable))
        make_cold(path)

    def check() -> None:
        expected = tensor_checksum(work.pageable) if work.write else saved[0]
        assert tensor_checksum(load()) == expected, "tensor and file differ"

    if work.write:
        name = "torch.save to nvme_ops.open + sync" if through_us else "torch.save + fsync"
    else:
        name = "torch.load from nvme_ops.open" if through_us else "torch.load"
    return Row(name, lambda: timed(save if work.write else load, work.size), before, check)
