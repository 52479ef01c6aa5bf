"""DCP's own names for its writer and reader, made to mean ours: for programs that leave no choice."""

from __future__ import annotations

import inspect
import os
from typing import Any

import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import _storage_utils, filesystem

from nvme_ops.dcp.reader import NvmeStorageReader
from nvme_ops.dcp.writer import NvmeStorageWriter


class _Writer(NvmeStorageWriter):
    """Takes the parameters of FileSystemWriter. Those that choose how it does its work have nothing to choose here.

    What asks for another format or for transforms (``serialization_format``, ``_extensions``, and whatever newer
    versions of torch add) gets DCP's own writer.
    """

    def __new__(cls, path: str | os.PathLike[str], *arguments: Any, **settings: Any) -> Any:
        """Perhaps DCP's own."""
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
        **_: object,  # as they are by default
    ) -> None:
        super().__init__(path, durable=sync_files, overwrite=overwrite, cache_staged_state_dict=cache_staged_state_dict)


class _Reader(NvmeStorageReader):
    """Takes the parameters of FileSystemReader; whoever asks for transforms gets DCP's own."""

    def __new__(cls, path: str | os.PathLike[str], *arguments: Any, **settings: Any) -> Any:
        """Perhaps DCP's own."""
        return _chosen(cls, filesystem.FileSystemReader, path, *arguments, **settings)

    def __init__(self, path: str | os.PathLike[str], **_: object) -> None:
        super().__init__(path)


def _chosen(ours: type, theirs: type, path: Any, *arguments: Any, **settings: Any) -> Any:
    """An object of our class where it knows all that is asked for."""
    known = inspect.signature(ours.__init__).parameters  # type: ignore[misc]
    asked = inspect.signature(theirs.__init__).bind(None, path, *arguments, **settings).arguments  # type: ignore[misc]
    defaults = inspect.signature(theirs.__init__).parameters  # type: ignore[misc]
    if all(name in known or value in (None, defaults[name].default) for name, value in asked.items()):
        return object.__new__(ours)
    return theirs(path, *arguments, **settings)


def use_by_default(enabled: bool = True) -> None:
    """Makes DCP, and whoever takes a ``FileSystemWriter`` or ``FileSystemReader`` from it by name, takes ours.

    For ``dcp.save(state_dict, checkpoint_id="folder")``, and for accelerate and transformers' Trainer, which make DCP's
    writer themselves. What took the name from DCP before keeps DCP's.

    Args:
        enabled: False gives DCP its own back.
    """
    writer, reader = (_Writer, _Reader) if enabled else (filesystem.FileSystemWriter, filesystem.FileSystemReader)
    for module in (dcp, _storage_utils):
        vars(module).update(FileSystemWriter=writer, FileSystemReader=reader)
