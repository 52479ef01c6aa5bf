"""Calls DCP's ``save`` and ``load`` with our writer and reader, or makes DCP use these by default."""

from __future__ import annotations

import functools
import inspect
import logging
import os
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import _storage_utils, filesystem
from torch.distributed.checkpoint import logger as dcp_logger
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadPlanner, SavePlanner

from nvme_ops.checkpoint.api import name_of
from nvme_ops.checkpoint.dcp.reader import NvmeStorageReader
from nvme_ops.checkpoint.dcp.writer import NvmeStorageWriter
from nvme_ops.io.arguments import require_switches
from nvme_ops.io.handle import aio_handle
from nvme_ops.io.tensors import collector_paused

_P = ParamSpec("_P")
_T = TypeVar("_T")


def _lean(function: Callable[_P, _T]) -> Callable[_P, _T]:
    """Turns off, while a function runs, what, with thousands of tensors, takes longer than the I/O.

    Python's garbage collector scans the objects of DCP's plans, none of which is garbage; and DCP makes two log records
    for every tensor, even if no handler uses them.
    """

    @functools.wraps(function)
    @collector_paused
    def lean(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        logger = dcp_logger._dcp_logger
        off = not logger.disabled and not _has_handler(logger)
        try:
            logger.disabled = logger.disabled or off
            return function(*args, **kwargs)
        finally:
            if off:
                logger.disabled = False

    return lean


def _has_handler(logger: logging.Logger) -> bool:
    """Returns whether records reach a handler that uses them."""
    inherited = logger.parent is not None and logger.propagate and logger.parent.hasHandlers()
    return inherited or not all(isinstance(handler, logging.NullHandler) for handler in logger.handlers)


@_lean
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
    """Calls ``torch.distributed.checkpoint.save`` with an ``NvmeStorageWriter``. Every rank must call it.

    Python's garbage collector is paused meanwhile, and DCP's log is off unless a handler uses it: with thousands of
    tensors each takes as long as the planning.

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
    folder = name_of(checkpoint_id, "save(state_dict, checkpoint_id)")
    writer = NvmeStorageWriter(folder, durable=durable, checksums=checksums, overwrite=overwrite, handle=handle)
    saved: Metadata = dcp.save(state_dict, storage_writer=writer, planner=planner, process_group=process_group)
    return saved


@_lean
def load(
    state_dict: dict[str, Any],
    checkpoint_id: str | os.PathLike[str],
    *,
    planner: LoadPlanner | None = None,
    process_group: dist.ProcessGroup | None = None,
    verify: bool = False,
    handle: aio_handle | None = None,
) -> None:
    """Calls ``torch.distributed.checkpoint.load`` with an ``NvmeStorageReader``, which fills ``state_dict``'s tensors.

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
    folder = name_of(checkpoint_id, "load(state_dict, checkpoint_id)")
    reader = NvmeStorageReader(folder, verify=verify, handle=handle)
    dcp.load(state_dict, storage_reader=reader, planner=planner, process_group=process_group)


class _Writer(NvmeStorageWriter):
    """Accepts the parameters of FileSystemWriter; ignores those that tune how DCP writes.

    Parameters that ask for another format or for transforms (``serialization_format``, ``_extensions``, and any that
    newer versions of torch add) select DCP's own writer.
    """

    def __new__(cls, path: str | os.PathLike[str], *arguments: Any, **settings: Any) -> Any:
        """Returns our writer or DCP's own."""
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
    """Accepts the parameters of FileSystemReader; those for transforms select DCP's own reader."""

    def __new__(cls, path: str | os.PathLike[str], *arguments: Any, **settings: Any) -> Any:
        """Returns our reader or DCP's own."""
        return _chosen(cls, filesystem.FileSystemReader, path, *arguments, **settings)

    def __init__(self, path: str | os.PathLike[str], **_: object) -> None:
        super().__init__(path)


def _chosen(ours: type, theirs: type, path: Any, *arguments: Any, **settings: Any) -> Any:
    """Makes an object of our class if it supports all arguments that are not DCP's defaults, else of DCP's class."""
    known = inspect.signature(ours.__init__).parameters  # type: ignore[misc]
    full = inspect.signature(theirs.__init__)  # type: ignore[misc]
    given = full.bind(None, path, *arguments, **settings).arguments
    if all(name in known or value in (None, full.parameters[name].default) for name, value in given.items()):
        return object.__new__(ours)
    return theirs(path, *arguments, **settings)


def use_by_default(enabled: bool = True) -> None:
    """Makes DCP, and code that imports ``FileSystemWriter`` or ``FileSystemReader`` from it, use ours.

    This serves ``dcp.save(state_dict, checkpoint_id="folder")``, and accelerate and transformers' Trainer, which create
    DCP's writer themselves. Code that imported the names earlier keeps DCP's.

    Args:
        enabled: False restores DCP's own.
    """
    require_switches(enabled=enabled)
    writer, reader = (
        (_Writer, _DefaultReader) if enabled else (filesystem.FileSystemWriter, filesystem.FileSystemReader)
    )
    for module in (dcp, _storage_utils):
        vars(module).update(FileSystemWriter=writer, FileSystemReader=reader)
