"""Makes DCP's names for its writer and reader mean ours, for programs that offer no choice."""

from __future__ import annotations

import inspect
import os
from typing import Any

import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import _storage_utils, filesystem

from nvme_ops.dcp.reader import NvmeStorageReader
from nvme_ops.dcp.writer import NvmeStorageWriter


class _Writer(NvmeStorageWriter):
    """Takes the parameters of FileSystemWriter. Those that tune DCP's way of writing are ignored.

    Parameters for another format or transforms (``serialization_format``, ``_extensions``, and what newer versions of
    torch add) select DCP's own writer.
    """

    def __new__(cls, path: str | os.PathLike[str], *arguments: Any, **settings: Any) -> Any:
        """Returns our writer, or DCP's own."""
        return _chosen(cls, filesystem.FileSystemWriter, path, *arguments, **settings)

    def __init__(
        self,
        path: str | os.PathLike[str],
        single_file_per_rank: bool = True,  # noqa: ARG002
        sync_files: bool = True,
        thread_count: int = 1,  # noqa: ARG002
        per_thread_copy_ahead: int = 10_000_000,  # noqa: ARG002
        cache_staged_state_dict: bool = False,
        overwrite: bool = True,
        **_: object,  # others, at their defaults
    ) -> None:
        super().__init__(path, durable=sync_files, overwrite=overwrite, cache_staged_state_dict=cache_staged_state_dict)


class _DefaultReader(NvmeStorageReader):
    """Takes the parameters of FileSystemReader; those for transforms select DCP's own reader."""

    def __new__(cls, path: str | os.PathLike[str], *arguments: Any, **settings: Any) -> Any:
        """Returns our reader, or DCP's own."""
        return _chosen(cls, filesystem.FileSystemReader, path, *arguments, **settings)

    def __init__(self, path: str | os.PathLike[str], **_: object) -> None:
        super().__init__(path)


def _chosen(ours: type, theirs: type, path: Any, *arguments: Any, **settings: Any) -> Any:
    """Makes an object of our class if it supports everything requested, else of DCP's."""
    known = inspect.signature(ours.__init__).parameters  # type: ignore[misc]
    asked = inspect.signature(theirs.__init__).bind(None, path, *arguments, **settings).arguments  # type: ignore[misc]
    defaults = inspect.signature(theirs.__init__).parameters  # type: ignore[misc]
    if all(name in known or value in (None, defaults[name].default) for name, value in asked.items()):
        return object.__new__(ours)
    return theirs(path, *arguments, **settings)


def use_by_default(enabled: bool = True) -> None:
    """Makes DCP, and code that imports ``FileSystemWriter`` or ``FileSystemReader`` from it, use ours.

    For ``dcp.save(state_dict, checkpoint_id="folder")``, and for accelerate and transformers' Trainer, which make DCP's
    writer themselves. Code that imported the names earlier keeps DCP's.

    Args:
        enabled: False restores DCP's own.
    """
    writer, reader = (
        (_Writer, _DefaultReader) if enabled else (filesystem.FileSystemWriter, filesystem.FileSystemReader)
    )
    for module in (dcp, _storage_utils):
        vars(module).update(FileSystemWriter=writer, FileSystemReader=reader)
