"""``HostExperts``: experts that have left an accelerator, in host memory until they are used again."""

from __future__ import annotations

import contextlib
import heapq
import time
from collections.abc import Iterator
from typing import cast

import torch

from nvme_ops.io.engine import Priority
from nvme_ops.memory.tier import Share
from nvme_ops.offload.experts.expert import Expert
from nvme_ops.offload.experts.host_computing import HostComputing
from nvme_ops.offload.residency.copies import Copy, CopyStream
from nvme_ops.offload.residency.entry import tensors_over
from nvme_ops.offload.residency.files import FileEntry
from nvme_ops.offload.residency.host_copies import HostCopies
from nvme_ops.offload.residency.policy import Read
from nvme_ops.offload.residency.shared_files import SharedFiles
from nvme_ops.storage.joined import JoinedOperation


class _Sunk(FileEntry):
    """An expert in host memory."""

    def __init__(self, expert: Expert) -> None:
        super().__init__(expert.reads, expert.nbytes)
        self.expert, self.worth = expert, expert.worth


class _Accelerator:
    """The backing of what sinks: it comes from the accelerator."""

    def __init__(self, device: torch.device, copying: dict[FileEntry, Copy], shared: SharedFiles | None) -> None:
        self.stream, self._copying, self._shared = CopyStream(device), copying, shared
        self.filling: dict[FileEntry, JoinedOperation] = {}  #: until other processes have it, too

    def read(self, sunk: _Sunk, memory: torch.Tensor, priority: Priority) -> Read:
        """Starts to copy an expert to host memory, after what computes it, unless another process has done so."""
        del priority
        values, source = memory.detach(), sunk.expert.memory
        sunk.own_tensors = tensors_over(values)
        if (queued := sunk.expert.queued) is not None:
            queued.before(self.stream.stream.device)
        copying = Copy(self.stream)
        if self._shared is not None:
            if (filling := self._shared.filling(sunk, memory, copying.future())) is None:
                return values, None, 0
            self.filling[sunk] = filling
        if source is None:
            raise RuntimeError("an expert has left the accelerator before it could sink")
        self._copying[sunk] = copying
        copying.begin((memory, source))
        if sunk in self.filling:
            self.filling[sunk].trouble = None
        return values, None, 0


class HostExperts(HostCopies):
    """Experts sink here from an accelerator if they are worth more than others here, and rise from here.

    One that has risen has its copy here until another one needs the memory, so that it may leave the accelerator again
    without being copied; those copies leave first.

    They are ``shared`` where there is room for all: registering memory for others takes as long as reading these.

    Args:
        device: the accelerator.
        share: host memory.
        computing: decides which of them are computed with here; None: none.
        shared: the same memory, if other processes have it, too.
    """

    name = "experts in host memory"

    def __init__(
        self,
        device: torch.device,
        share: Share,
        computing: HostComputing | None = None,
        shared: SharedFiles | None = None,
    ) -> None:
        super().__init__(device, share, shared)
        self.computing = computing
        self.backing = sinking = _Accelerator(device, self._copying, shared)
        self.streams.append(sinking.stream)
        self._risen: dict[FileEntry, None] = {}  # here and on the accelerator, those that rose first in front
        self._order: list[tuple[float, int, _Sunk]] = []  # a heap; stale where an expert has risen or left
        self._sunk = 0
        self._worth = 0.0  # of what sinks now

    def sink(self, expert: Expert) -> Copy | None:
        """Takes over an expert that leaves the accelerator; returns the copy that still uses its memory there, if any.

        It may be dropped instead, if there is no memory for it here. Raises RuntimeError if the copy cannot be queued.
        """
        with self.lock:
            for earlier in [earlier for earlier, filling in self.backing.filling.items() if filling.done()]:
                self.backing.filling.pop(earlier).exception()
            sunk = self._copies.get(expert)
            if not isinstance(sunk, _Sunk):
                sunk, self._worth = _Sunk(expert), expert.worth
                try:
                    if not self._residency.begin(self, sunk, Priority.DEMAND):
                        return None
                    self._copies[expert] = sunk
                    self._offer(sunk)
                except BaseException:
                    self.discard(sunk)  # waits for what was queued
                    raise
                self.counts.bytes_to_host += expert.nbytes if sunk in self._copying else 0
            else:
                self._offer(sunk)
                self._risen.pop(sunk, None)
            copying = self._copying.get(sunk)
            return None if copying is None or copying.done() else copying

    def values(self, expert: Expert) -> torch.Tensor | None:
        """Returns the bytes of an expert that is here, once they have arrived; while they are used it stays."""
        with self.lock:
            sunk = self._copies.get(expert)
            if not isinstance(sunk, _Sunk) or sunk.values is None:
                return None
            if (copying := self._copying.get(sunk)) is not None:
                copying.wait(None)
            if sunk.worth != expert.worth and sunk not in self._risen:
                self._offer(sunk)
            return sunk.values.detach()

    def _offer(self, sunk: _Sunk) -> None:
        """Lets an expert make room for others, in the order of their worth."""
        if len(self._order) > 4 * len(self.present) + 64:
            self._order = [item for item in self._order if self._is_only_here(item)]
            heapq.heapify(self._order)
        sunk.worth, self._sunk = sunk.expert.worth, self._sunk + 1
        heapq.heappush(self._order, (sunk.worth, self._sunk, sunk))

    def read(self, entry: FileEntry, memory: torch.Tensor, priority: Priority) -> Read:
        """Starts to fill an expert's memory on the accelerator, from here or from its files; see ``Backing``."""
        with self.lock:
            if (shared := self._shared) is not None and entry not in self._copies and shared.has(entry):
                with contextlib.suppress(RuntimeError):  # it is no longer there
                    self.sink(cast("Expert", entry))
            if (sunk := self._copies.get(entry)) is not None and (copying := self._copying.get(sunk)) is not None:
                copying.before(memory.device)  # it may be sinking still
            begin = time.perf_counter()
            read = super().read(entry, memory, priority)
            if sunk is not None:
                self._risen[sunk] = None
                if self.computing is not None and self.computing.is_copy_unknown():
                    self._copying[sunk].wait(None)
                    self.computing.note_copy(entry.nbytes, time.perf_counter() - begin)
        return read

    # The policy

    def resize(self, nbytes: int) -> None:
        """Sets how much memory there is for experts."""
        with self.lock:
            self.share.nbytes = nbytes
            self._residency.make_room(self, 0, 0)

    def victims(self, after: int) -> Iterator[FileEntry]:
        """Yields the copies of those that have risen, then experts that are worth less than the one that sinks now.

        A copy from which the accelerator still reads is waited for if it reads from another one after that.
        """
        if after == 0:  # of ``resize``, which waits for copies, too
            yield from sorted(self.present, key=lambda copy: (copy not in self._risen, cast("_Sunk", copy).worth))
            return
        rising = [sunk for sunk in self._risen if self._is_copied(sunk)]
        yield from [sunk for sunk in self._risen if sunk not in rising]
        yield from rising[:-1]
        used = list[tuple[float, int, _Sunk]]()
        try:
            while self._order and self._order[0][0] < self._worth:
                _, _, sunk = item = self._order[0]
                if self._is_only_here(item):
                    if self._is_copied(sunk):
                        break
                    yield sunk
                    if sunk.values is not None:  # the CPU computes with it
                        used.append(item)
                heapq.heappop(self._order)
        finally:
            for item in used:
                heapq.heappush(self._order, item)

    def _is_only_here(self, item: tuple[float, int, _Sunk]) -> bool:
        worth, _, sunk = item
        return sunk.values is not None and sunk not in self._risen and worth == sunk.worth

    def discard(self, entry: FileEntry) -> None:
        """Drops an expert."""
        if (filling := self.backing.filling.get(entry)) is not None:
            filling.wait(None)
            self.backing.filling.pop(entry).exception()
        if isinstance(entry, _Sunk) and self._copies.get(entry.expert) is entry:
            del self._copies[entry.expert]
        super().discard(entry)
        self._risen.pop(entry, None)
