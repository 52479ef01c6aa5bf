"""Reading a file that lies in the page cache."""

from __future__ import annotations

import os

import torch

from nvme_ops.bench.files import make_warm
from nvme_ops.bench.measure import Row
from nvme_ops.bench.work import Work, tensor_row
from nvme_ops.text import MIB

PREADV = "os.preadv in 64 MiB pieces"
_PIECE = 64 * MIB


def rows(work: Work) -> list[Row]:
    """Into the same ordinary tensor, by plain Python and by a default handle."""

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

    table = [
        tensor_row(work, PREADV, lambda: work.pageable, by_pieces),
        tensor_row(work, "nvme_ops, pageable", lambda: work.pageable, by_handle),
        tensor_row(work, "nvme_ops, nvme_ops.empty", lambda: work.huge, by_handle),
    ]
    for row in table:
        row.before = lambda: make_warm(work.path)
    return table
