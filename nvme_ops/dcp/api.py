"""``save`` and ``load``: DCP's own functions with our writer and reader, for those who need no other settings."""

from __future__ import annotations

import os
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadPlanner, SavePlanner

from nvme_ops.checkpoint import collector
from nvme_ops.dcp.reader import NvmeStorageReader
from nvme_ops.dcp.writer import NvmeStorageWriter
from nvme_ops.handle import aio_handle


@collector.paused()
def save(
    state_dict: dict[str, Any],
    checkpoint_id: str | os.PathLike[str],
    *,
    planner: SavePlanner | None = None,
    process_group: dist.ProcessGroup | None = None,
    durable: bool = True,
    checksum: bool = True,
    overwrite: bool = True,
    handle: aio_handle | None = None,
) -> Metadata:
    """``torch.distributed.checkpoint.save`` through a ``NvmeStorageWriter``; every rank calls it.

    Python's collector of cyclic garbage waits meanwhile: with thousands of tensors it takes as long as DCP's planning,
    which makes as many objects, none of them garbage.

    Args:
        state_dict: as for DCP.
        checkpoint_id: the folder.
        planner: as for DCP.
        process_group: as for DCP.
        durable: as for ``NvmeStorageWriter``.
        checksum: as for ``NvmeStorageWriter``.
        overwrite: as for ``NvmeStorageWriter``.
        handle: as for ``NvmeStorageWriter``.

    Raises:
        CheckpointException: with what went wrong on which rank, on all ranks.
    """
    writer = NvmeStorageWriter(checkpoint_id, durable=durable, checksum=checksum, overwrite=overwrite, handle=handle)
    saved: Metadata = dcp.save(state_dict, storage_writer=writer, planner=planner, process_group=process_group)
    return saved


@collector.paused()
def load(
    state_dict: dict[str, Any],
    checkpoint_id: str | os.PathLike[str],
    *,
    planner: LoadPlanner | None = None,
    process_group: dist.ProcessGroup | None = None,
    verify: bool = False,
    handle: aio_handle | None = None,
) -> None:
    """``torch.distributed.checkpoint.load`` through a ``NvmeStorageReader``, which fills ``state_dict``'s tensors.

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
