"""DCP's own names for its writer and reader, made to mean ours: for programs that leave no choice."""

from __future__ import annotations

import os

import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import _storage_utils, filesystem

from nvme_ops.dcp.reader import NvmeStorageReader
from nvme_ops.dcp.writer import NvmeStorageWriter


class _Writer(NvmeStorageWriter):
    """With the parameters of FileSystemWriter. Those that choose how it does its work have nothing to choose here."""

    def __init__(
        self,
        path: str | os.PathLike[str],
        single_file_per_rank: bool = True,  # noqa: ARG002
        sync_files: bool = True,
        thread_count: int = 1,  # noqa: ARG002
        per_thread_copy_ahead: int = 10_000_000,  # noqa: ARG002
        cache_staged_state_dict: bool = False,
        overwrite: bool = True,
    ) -> None:
        super().__init__(path, durable=sync_files, overwrite=overwrite, cache_staged_state_dict=cache_staged_state_dict)


class _Reader(NvmeStorageReader):
    """With the parameters of FileSystemReader."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        super().__init__(path)


def use_by_default(enabled: bool = True) -> None:
    """From now on DCP, and whoever takes a ``FileSystemWriter`` or ``FileSystemReader`` from it by name, takes ours.

    For ``dcp.save(state_dict, checkpoint_id="folder")``, and for accelerate and transformers' Trainer, which make DCP's
    writer themselves. What took the name from DCP before keeps DCP's.

    Args:
        enabled: False gives DCP its own back.
    """
    writer, reader = (_Writer, _Reader) if enabled else (filesystem.FileSystemWriter, filesystem.FileSystemReader)
    for module in (dcp, _storage_utils):
        vars(module).update(FileSystemWriter=writer, FileSystemReader=reader)
