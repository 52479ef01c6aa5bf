"""DeepSpeed's aio_handle, from PyPI, on the same file. Not installed: its rows say so."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch

from benchmarks.contenders import LOCKED, PAGEABLE
from nvme_ops.bench.engines.deepspeed import load
from nvme_ops.bench.measure import Row, Sample, Unavailable
from nvme_ops.bench.work import Work, filled, tensor_row


def rows(work: Work) -> list[Row]:
    """A default handle, with its own locked memory and with an ordinary tensor."""
    found = load()
    if isinstance(found, Unavailable):
        return [Row(name, lambda: Sample(1, 1), _raising(found)) for name in (LOCKED, PAGEABLE)]
    handle = found.aio_handle()
    move = handle.sync_pwrite if work.write else handle.sync_pread

    @functools.cache
    def locked() -> torch.Tensor:
        return filled(handle.new_cpu_locked_tensor(work.size, torch.empty(0, dtype=torch.uint8)))

    return [
        tensor_row(work, LOCKED, locked, lambda tensor: move(tensor, work.path)),
        tensor_row(work, PAGEABLE, lambda: work.pageable, lambda tensor: move(tensor, work.path)),
    ]


def _raising(reason: Unavailable) -> Callable[[], None]:
    def give_up() -> None:
        raise reason

    return give_up
