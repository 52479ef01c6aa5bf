"""The file and memory that the rows of one process share; makes rows from calls."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

import nvme_ops
from nvme_ops.bench.measure import Row, WrongData, timed
from nvme_ops.measuring.files import checksum, filled, make_cold, tensor_checksum


@dataclass
class Work:
    """The file that all rows of a table read or write, and what else they need."""

    path: str
    size: int
    write: bool
    written: int = field(default=0, init=False)  # number of checked writes, to distinguish them
    _contents: dict[str, int] = field(default_factory=dict, init=False, repr=False)

    @functools.cached_property
    def handle(self) -> nvme_ops.aio_handle:
        """A handle with default settings for all rows, made when first needed."""
        return nvme_ops.aio_handle()

    @functools.cached_property
    def pageable(self) -> torch.Tensor:
        """An ordinary tensor that has all its pages."""
        return filled(torch.empty(self.size, dtype=torch.uint8))

    @functools.cached_property
    def locked(self) -> torch.Tensor:
        """Memory of ``new_cpu_locked_tensor``."""
        return filled(self.handle.new_cpu_locked_tensor(self.size, torch.empty(0, dtype=torch.uint8)))

    @functools.cached_property
    def huge(self) -> torch.Tensor:
        """Memory of ``nvme_ops.empty``."""
        return filled(nvme_ops.empty(self.size, dtype=torch.uint8))

    @property
    def content(self) -> int:
        """The checksum of the file at the first pass; rows that write do not use it."""
        if self.path not in self._contents:
            self._contents[self.path] = checksum(self.path)
        return self._contents[self.path]

    def set_out(self, path: str = "") -> None:
        """Makes the same starting point for every pass, for this file or the one at ``path``."""
        make_cold(path or self.path)


def tensor_row(
    work: Work,
    name: str,
    memory: Callable[[], torch.Tensor],
    move: Callable[[torch.Tensor], object],
    peer: str = "",
    past_cache: bool = False,
) -> Row:
    """Returns a row that moves the whole file from or to one tensor, which ``memory`` makes when first called.

    ``past_cache``: what is in the page cache is read from the device too.
    """

    def before() -> None:
        memory()
        work.set_out()

    def check() -> None:
        tensor = memory()
        if work.write:
            # marks every page, to detect a write that does nothing and leaves what the last row wrote
            work.written += 1
            tensor[::4096] = work.written % 256
        else:
            tensor.zero_()
        work.set_out()
        move(tensor)
        there = checksum(work.path) if work.write else work.content
        if tensor_checksum(tensor) != there:
            raise WrongData("tensor and file differ")

    reads = None if work.write or past_cache else lambda: work.path
    return Row(name, lambda: timed(lambda: move(memory()), work.size), before, check, peer, reads=reads)


def saved_row(
    work: Work,
    name: str,
    path: str,
    memory: Callable[[], torch.Tensor],
    save: Callable[[], None],
    load: Callable[[], torch.Tensor],
    saved: list[int],
) -> Row:
    """Returns a row that saves a tensor to a file of another format at ``path``, or loads it from there.

    Several rows may share ``path``. ``saved``: the checksum of the tensor in it, empty before the first.
    """

    def before() -> None:
        if not saved:
            save()
            saved.append(tensor_checksum(memory()))
        work.set_out(path)

    def check() -> None:
        expected = tensor_checksum(memory()) if work.write else saved[0]
        if tensor_checksum(load()) != expected:
            raise WrongData("tensor and file differ")

    reads = None if work.write else lambda: path
    return Row(name, lambda: timed(save if work.write else load, work.size), before, check, reads=reads)
