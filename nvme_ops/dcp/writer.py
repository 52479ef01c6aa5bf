"""``NvmeStorageWriter``: writes DCP's files from the tensors themselves, never over those of an old checkpoint."""

from __future__ import annotations

import dataclasses
import errno
import os
from typing import Any

from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from nvme_ops import collector
from nvme_ops.dcp import folder, metadata_file, readers, saving
from nvme_ops.dcp.items import RankFile
from nvme_ops.file import shared_handle
from nvme_ops.handle import aio_handle
from nvme_ops.storage.atomic import make_folder, replacing


class NvmeStorageWriter(filesystem.FileSystemWriter):
    """For ``torch.distributed.checkpoint.save`` and ``async_save``: the same files, at the speed of the device.

    Every rank writes one file, straight from its tensors; at most 64 MiB of memory are used beside them. The files of
    an older checkpoint in the folder are kept until the new one is complete and ``.metadata`` was replaced, and are
    then removed, those that a ``NvmeStorageReader`` is reading by a later save: a crash at any point leaves the old
    checkpoint or the new one. Programs and threads that save to one folder wait for each other; on a file system
    without locks only one may save at a time.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        durable: bool = True,
        checksums: bool = True,
        overwrite: bool = True,
        cache_staged_state_dict: bool = False,
        handle: aio_handle | None = None,
    ) -> None:
        """Makes a writer; the folder is made when something is saved.

        Args:
            path: the folder.
            durable: return when all is on the device. Without it a power failure may take the checkpoint.
            checksums: keep a CRC-32 of every item, for ``NvmeStorageReader(path, verify=True)``.
            overwrite: whether a checkpoint in the folder may be replaced.
            cache_staged_state_dict: reuse the memory of ``async_save``'s copies for the next one.
            handle: whose settings the transfers use; one for the whole process when None, and in a process that saves
                on behalf of this one.
        """
        super().__init__(path, sync_files=durable, cache_staged_state_dict=cache_staged_state_dict)
        self.overwrite = overwrite
        self._checksums = checksums
        self._handle = handle
        self._lock: saving.Saving | None = None  # from the plan to the end, on the rank that coordinates

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_handle": None, "_lock": None}

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Makes the folder. Raises FileExistsError for a checkpoint that must not be replaced."""
        make_folder(os.fspath(self.path), self.sync_files)
        self._require_that_it_may_be_replaced()
        alone = self._rank_that_saves_alone()
        if alone is None:
            return plan
        return dataclasses.replace(plan, storage_data=filesystem._StoragePrefix(f"__{alone}_"))

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Waits for other saves of the folder, on the coordinator, before any rank writes."""
        self._lock = saving.Saving(os.path.join(self.path, self._metadata_name()))
        try:
            self._require_that_it_may_be_replaced()
            if self._rank_that_saves_alone() is not None:  # its prefix is in the plan already
                return plans
            return super().prepare_global_plan(plans)
        except BaseException:
            self._end()
            raise

    def _require_that_it_may_be_replaced(self) -> None:
        path = os.fspath(self.path)
        alone = self._rank_that_saves_alone()
        present = os.path.join(path, folder.METADATA if alone is None else f"__0{folder.METADATA}")
        if not self.overwrite and os.path.exists(present):
            raise FileExistsError(errno.EEXIST, "there is a checkpoint, and overwrite is False", path)

    @collector.paused()
    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Writes this rank's file."""
        results: list[WriteResult] = []
        if plan.items:
            # not decided with the plan, which planners keep from one save to the next
            name = folder.new_name(os.fspath(self.path), plan.storage_data.prefix)
            try:
                with replacing(os.path.join(self.path, name), self.sync_files) as file:
                    written = RankFile(self._handle or shared_handle(), file.fd, name, planner, self._checksums)
                    results = written.write(plan.items)
            except BaseException:
                self._end()  # nobody calls finish for a save that failed
                raise
        future: Future[list[WriteResult]] = Future()
        future.set_result(results)
        return future

    @collector.paused()
    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Makes what all ranks wrote the checkpoint, then removes the old one."""
        if hasattr(filesystem, "CURRENT_DCP_VERSION"):
            metadata.version = filesystem.CURRENT_DCP_VERSION
        metadata.storage_data = {result.index: result.storage_data for ranks in results for result in ranks}
        metadata.storage_meta = self.storage_meta()
        alone = self._rank_that_saves_alone()
        path, prefix = os.fspath(self.path), "" if alone is None else f"__{alone}"
        try:
            file = os.path.join(path, self._metadata_name())
            readers.keep(file)
            metadata_file.write(file, metadata, self.sync_files)
            kept = {info.relative_path for info in metadata.storage_data.values()} | readers.being_read(path)
            folder.remove_others(path, kept, f"{prefix}_" if prefix else "")
        finally:
            self._end()

    def _end(self) -> None:
        if self._lock is not None:
            self._lock.end()

    def _metadata_name(self) -> str:
        alone = self._rank_that_saves_alone()
        return folder.METADATA if alone is None else f"__{alone}{folder.METADATA}"

    def _rank_that_saves_alone(self) -> int | None:
        """Returns the rank if ranks save independently (``use_collectives=False``, newer torch), else None."""
        return None if getattr(self, "use_collectives", True) else getattr(self, "rank", None)
