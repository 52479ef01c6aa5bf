"""``HostCopies``: entries of an accelerator that stay in host memory, and come from there instead of from storage."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Iterable

import torch

from nvme_ops.base.text import size_words
from nvme_ops.io.engine import Priority
from nvme_ops.io.future import IoFuture
from nvme_ops.memory.pool import charge_of
from nvme_ops.memory.tier import Share
from nvme_ops.offload.residency.copies import Copy, CopyStream
from nvme_ops.offload.residency.entry import tensors_over
from nvme_ops.offload.residency.files import FileEntry, ModelFiles
from nvme_ops.offload.residency.placement import IN_FLIGHT
from nvme_ops.offload.residency.policy import Policy, Read, Stats
from nvme_ops.offload.residency.residency import Residency
from nvme_ops.offload.residency.shared_files import SharedFiles

_FULL = "others use the host's memory: weights have {} of it, and more are read from storage"


class HostCopies(Policy[FileEntry]):
    """The backing of entries on an accelerator: host memory has some of them, files have all.

    Host memory is page-locked, where the system allows it. An entry is read into it once, and copied to the accelerator
    at each use, by a stream of its own. What the accelerator keeps has no copy here.

    Args:
        device: the accelerator.
        share: host memory.
        shared: the same, if other processes have it, too.
    """

    name = "host copies"
    _closed_error = "the weights of this model were closed"
    _forked_error = "these weights are streamed by the parent process: load the model in this one"

    def __init__(self, device: torch.device, share: Share, shared: SharedFiles | None = None) -> None:
        self._residency, self._files, self._shared = Residency(), ModelFiles(), shared
        super().__init__(self._residency.lock, share, shared or self._files, Stats())
        self.streams, self._is_short = [CopyStream(device)], False
        self._copies: dict[FileEntry, FileEntry] = {}  # by the entry on the accelerator: those that are kept
        self._copying: dict[FileEntry, Copy] = {}  # the last one from each to the accelerator
        self._residency.join(self)

    def keep(self, entries: Collection[FileEntry]) -> None:
        """Sets which entries have a copy here once they are used; others leave, those that are being copied later."""
        with self.lock:
            kept = {entry: self._copies.get(entry) or FileEntry(entry.reads, entry.nbytes) for entry in entries}
            self._copies = kept
            staying = set(kept.values())
            for copy in [copy for copy in self.present if copy not in staying]:
                self._residency.evict(self, copy)

    def room(self, sizes: Collection[int]) -> int:
        """Returns the bytes for which there is room of entries of such sizes: a pool rounds each of them up."""
        charged = sum(sizes) if self._shared is not None else sum(map(charge_of, sizes))
        return self.share.nbytes * sum(sizes) // max(1, charged)

    def entries(self, among: Iterable[FileEntry] = ()) -> set[FileEntry]:
        """Returns the entries that are here, or on their way; and those ``among`` others that other processes have."""
        with self.lock:
            here = {entry for entry, copy in self._copies.items() if copy.values is not None}
        return here if (shared := self._shared) is None else here.union(filter(shared.has, among))

    def is_awaited(self, entry: FileEntry) -> bool:
        """Returns whether an entry is on its way here: ``bring`` would wait for it."""
        copy = self._copies.get(entry)
        return copy is not None and (copy.values is None or copy.is_arriving())

    def read_ahead(self, entries: Iterable[FileEntry]) -> None:
        """Starts to read what is to be here and is not yet, the first of ``entries`` first."""
        with self.lock:
            self.share.collect()
            if len(self.present) >= len(self._copies):
                return
            room = 2 * IN_FLIGHT - sum(copy.nbytes for copy in self.present if copy.is_arriving())
            for entry in entries:
                if (copy := self._copies.get(entry)) is not None and copy.values is None:
                    if room <= 0 or not self._begin(entry, copy, Priority.PREFETCH):
                        return
                    room -= copy.nbytes

    def _begin(self, entry: FileEntry, copy: FileEntry, priority: Priority) -> bool:
        """Starts to read a copy; if the machine has no memory for it, there will be no more of them."""
        if copy.values is not None or self._residency.begin(self, copy, priority):
            return True
        if not self._copying_away() and not (self._shared is not None and self._shared.tier.is_held_up):
            self._copies.pop(entry, None)
            self.share.nbytes = self.share.bytes_in_use
            if not self._is_short:
                warnings.warn(_FULL.format(size_words(self.share.nbytes)), RuntimeWarning, stacklevel=1)
            self._is_short = True
        return False

    def _copying_away(self) -> bool:
        """Returns whether copies that are no longer kept will leave memory to others."""
        return len(self.present) > sum(copy.values is not None for copy in self._copies.values())

    def bring(self, entry: FileEntry) -> None:
        """Waits until an entry that is to be here has arrived. Raises what ``Residency.fetch`` does."""
        copy = self._copies.get(entry)
        if copy is None or (copy.values is not None and copy.arrival is None):
            return
        with self.lock:
            begun = self._begin(entry, copy, Priority.DEMAND)
        if begun:
            self._residency.fetch(self, copy, copy)

    # The backing of what is on the accelerator

    def read(self, entry: FileEntry, memory: torch.Tensor, priority: Priority) -> Read:
        """Starts to fill an entry's memory on the accelerator, from here or from its files; see ``Backing``."""
        copy = self._copies.get(entry)
        if copy is None or copy.values is None or copy.is_arriving() or not self._has_arrived(copy):
            return self._files.read(entry, memory, priority)
        values = entry.over(memory)
        entry.own_tensors = tensors_over(values)
        entry.queued = self._copying[copy] = copying = Copy(self.streams[0])
        copying.begin((memory, copy.values))
        self.counts.bytes_from_host += copy.nbytes
        return values, None, 0

    def write(self, entry: FileEntry) -> tuple[IoFuture, int]:
        """Is never called."""
        raise NotImplementedError

    def _has_arrived(self, copy: FileEntry) -> bool:
        arrival = copy.arrival
        return arrival is None or self._residency.await_arrival(self, copy, arrival, begun=False)

    # The policy

    def allocate(self, entry: FileEntry) -> torch.Tensor | None:
        """Returns memory for a copy, in which it may be already."""
        return super().allocate(entry) if self._shared is None else self._shared.allocate(entry, self.share)

    def victims(self, after: int) -> Iterable[FileEntry]:
        """Returns those that are no longer kept."""
        del after
        staying = set(self._copies.values())
        return [copy for copy in self.present if copy not in staying and not self._is_copied(copy)]

    def _is_copied(self, copy: FileEntry) -> bool:
        copying = self._copying.get(copy)
        return copying is not None and not copying.done()

    def discard(self, entry: FileEntry) -> None:
        """Drops a copy, once what is read from it has arrived."""
        if (copying := self._copying.get(entry)) is not None:
            copying.wait(None)
        super().discard(entry)
        self._copying.pop(entry, None)

    def out_of_memory(self, entry: FileEntry) -> MemoryError:
        """Returns the error to raise when no memory has become free for a copy."""
        return MemoryError(f"no host memory for a weight of {size_words(entry.nbytes)}")

    def close(self) -> None:
        """Waits for transfers under way, and gives up what processes share. Further calls do nothing."""
        super().close()
        if self._shared is not None and self._is_ours():
            self._shared.tier.close()
