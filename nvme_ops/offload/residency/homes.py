"""``Homes``: host memory where entries of an accelerator are instead of on storage."""

from __future__ import annotations

from typing import Any

import torch

from nvme_ops.io.future import IoFuture
from nvme_ops.memory.tier import Share
from nvme_ops.offload.residency.copies import Copy, CopyStream
from nvme_ops.offload.residency.entry import Entry
from nvme_ops.offload.residency.policy import Stats


class Home:
    """Host memory of one entry, and the last copy there or from there."""

    copying: Copy | None = None

    def __init__(self, memory: torch.Tensor) -> None:
        self.memory: Any = memory  #: None once it is freed

    def is_idle(self) -> bool:
        """Returns whether nothing is copied; a copy that has ended releases what it keeps."""
        return self.copying is None or self.copying.done()

    def free(self) -> None:
        """Frees the memory once nothing is copied any more."""
        if self.copying is not None:
            self.copying.wait(None)
        self.memory = self.copying = None


class Homes:
    """Gives entries homes, and copies there and back, each way on a stream of its own.

    Args:
        share: host memory.
    """

    def __init__(self, share: Share) -> None:
        self.share, self.counts = share, Stats()
        self._streams: dict[torch.device, tuple[CopyStream, CopyStream]] = {}  # to host memory, and from there

    def take(self, nbytes: int) -> Home | None:
        """Returns a home of ``nbytes``; None if there is no room."""
        memory = self.share.allocate(max(1, nbytes))
        return None if memory is None else Home(memory)

    def copy_to(self, home: Home, source: torch.Tensor) -> IoFuture:
        """Starts to copy bytes to a home; the copy keeps both until it is known to have ended."""
        home.copying = copying = Copy(self._stream(source.device, 0))
        transfer = copying.future(source, home.memory)
        copying.begin((home.memory[: source.nbytes], source))
        self.counts.bytes_to_host += source.nbytes
        return transfer

    def copy_from(self, home: Home, entry: Entry, memory: torch.Tensor, keep: bool = False) -> Copy:
        """Starts to copy the bytes of an entry to its memory, and is what is queued there. ``keep``: as above."""
        entry.queued = home.copying = copying = Copy(self._stream(memory.device, 1))
        if keep:
            copying.future(memory)
        copying.begin((memory, home.memory[: memory.nbytes]))
        self.counts.bytes_from_host += memory.nbytes
        return copying

    @property
    def device(self) -> torch.device:
        """An accelerator with entries here; the CPU before there are any."""
        return next(iter(self._streams), torch.device("cpu"))

    def streams(self) -> list[CopyStream]:
        """Returns the streams of all devices."""
        return [stream for pair in self._streams.values() for stream in pair]

    def _stream(self, device: torch.device, direction: int) -> CopyStream:
        if device not in self._streams:
            self._streams[device] = CopyStream(device), CopyStream(device)
        return self._streams[device][direction]
