"""``save`` and ``load``: DCP's own functions with our writer and reader, when no other settings are needed."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import logger as dcp_logger
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadPlanner, SavePlanner

from nvme_ops import collector
from nvme_ops.dcp.reader import NvmeStorageReader
from nvme_ops.dcp.writer import NvmeStorageWriter
from nvme_ops.handle import aio_handle


@contextlib.contextmanager
def _lean() -> Iterator[None]:
    """Turns off what costs more than the I/O for thousands of tensors.

    Python's collector scans the objects of DCP's plans, none of which is garbage; and DCP makes two log records for
    every tensor, even if no handler uses them.
    """
    logger = dcp_logger._dcp_logger
    off = not logger.disabled and not _is_heard(logger)
    with collector.paused():
        logger.disabled = logger.disabled or off
        try:
            yield
        finally:
            if off:
                logger.disabled = False


def _is_heard(logger: logging.Logger) -> bool:
    """Returns whether a record reaches a handler that uses it."""
    each: logging.Logger | None = logger
    while each is not None:
        if any(not isinstance(handler, logging.NullHandler) for handler in each.handlers):
            return True
        each = each.parent if each.propagate else None
    return False


@_lean()
def save(
    state_dict: dict[str, Any],
    checkpoint_id: str | os.PathLike[str],
    *,
    planner: SavePlanner | None = None,
    process_group: dist.ProcessGroup | None = None,
    durable: bool = True,
    checksums: bool = True,
    overwrite: bool = True,
    handle: aio_handle | None = None,
) -> Metadata:
    """Calls ``torch.distributed.checkpoint.save`` with a ``NvmeStorageWriter``. Every rank must call it.

    Python's collector of cyclic garbage is paused meanwhile, and DCP's debug log is off unless a handler reads it: with
    thousands of tensors each takes as long as the planning.

    Args:
        state_dict: as for DCP.
        checkpoint_id: the folder.
        planner: as for DCP.
        process_group: as for DCP.
        durable: as for ``NvmeStorageWriter``.
        checksums: as for ``NvmeStorageWriter``.
        overwrite: as for ``NvmeStorageWriter``.
        handle: as for ``NvmeStorageWriter``.

    Raises:
        CheckpointException: with what went wrong on which rank, on all ranks.
    """
    writer = NvmeStorageWriter(checkpoint_id, durable=durable, checksums=checksums, overwrite=overwrite, handle=handle)
    saved: Metadata = dcp.save(state_dict, storage_writer=writer, planner=planner, process_group=process_group)
    return saved


@_lean()
def load(
    state_dict: dict[str, Any],
    checkpoint_id: str | os.PathLike[str],
    *,
    planner: LoadPlanner | None = None,
    process_group: dist.ProcessGroup | None = None,
    verify: bool = False,
    handle: aio_handle | None = None,
) -> None:
    """Calls ``torch.distributed.checkpoint.load`` with a ``NvmeStorageReader``, which fills ``state_dict``'s tensors.

    Args:
        state_dict: as for DCP.
        checkpoint_id: the folder.
        planner: as for DCP.
        process_group: as for DCP.
        verify: as for ``NvmeStorageReader``.
        handle: as for ``NvmeStorageReader``.

    Raises:
        CheckpointException: with what went wrong on which rank, on all ranks.
    """
    reader = NvmeStorageReader(checkpoint_id, verify=verify, handle=handle)
    dcp.load(state_dict, storage_reader=reader, planner=planner, process_group=process_group)
