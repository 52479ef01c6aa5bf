"""What one process does with one file, the same for every engine; and the file and memory that its rows share."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch

from nvme_ops.bench.measure import Row
from nvme_ops.bench.work import Work
from nvme_ops.measuring.files import filled, make_cold, make_warm


@dataclass
class Task(Work):
    """A transfer of ``size`` bytes between ``path`` and memory, in the terms of ``nvme-bench``'s flags.

    Pickled before its memory is allocated, it does the same in another process.
    """

    gpu: int | None = None  # number of the device that holds the tensor; None: host memory
    cached: bool = False  # the file lies in the page cache
    validate: bool = False
    pageable_memory: bool = False  # an ordinary tensor instead of a page-locked one
    use_gds: bool = False
    slow_bounce_buffer: bool = False
    more_paths: tuple[str, ...] = ()  # with them each pass takes the next file

    @functools.cached_property
    def buffer(self) -> torch.Tensor:
        """The tensor to read into or write from."""
        if self.gpu is not None:
            return filled(torch.empty(self.size, dtype=torch.uint8, device=torch.device("cuda", self.gpu)))
        return self.pageable if self.pageable_memory else self.locked

    def set_out(self, path: str = "") -> None:
        """Makes the same starting point for all: the file not in the page cache, or in it."""
        (make_warm if self.cached else make_cold)(path or self.path)

    def finish(self) -> None:
        """Waits until the device of the tensor is done."""
        if self.gpu is not None:
            torch.cuda.synchronize(self.gpu)


def over_files(task: Task, row: Row) -> Row:
    """Makes every pass of ``row`` use the next file, the same ones as the other rows."""
    paths = (task.path, *task.more_paths)
    before, passes = row.before, 0

    def take_next() -> None:
        nonlocal passes
        task.path = paths[passes % len(paths)]
        passes += 1
        before()

    row.before = take_next
    return row
