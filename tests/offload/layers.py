"""Experts of a file: for tests of which ones are in memory."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from nvme_ops import aio_handle
from nvme_ops.filesystem.publication import open_to_read
from nvme_ops.memory.tier import PooledTier, tier_on
from nvme_ops.offload.experts.expert import experts_of
from nvme_ops.offload.experts.experts import Experts
from nvme_ops.offload.experts.host_computing import HostComputing
from nvme_ops.offload.experts.host_experts import HostExperts
from nvme_ops.offload.residency.residency import Residency
from nvme_ops.offload.residency.shared_files import shared_files
from nvme_ops.offload.weights.grouped import _as_they_arrive
from nvme_ops.storage.source import FileExtent, Source, WeightFile
from tests.conftest import KIB, pattern

HALF = 8 * KIB
SIZE = 2 * HALF


class Layers:
    """Layers of experts of two parts, neighbours in a file; on a device with room for some, and below it for others."""

    def __init__(
        self,
        folder: Path,
        layers: int,
        count: int,
        room: int,
        handle: Any = None,
        device: torch.device | None = None,
        below: int = 0,
        shared: bool = False,
        computing: bool = False,
    ) -> None:
        self.path, self.data = folder / "experts", pattern(layers * count * SIZE)
        if not self.path.exists():
            self.path.write_bytes(self.data.numpy().tobytes())
        file = WeightFile(open_to_read(str(self.path)), str(self.path), handle or aio_handle())
        starts = range(0, layers * count * SIZE, HALF)
        parts = [Source([FileExtent(file, start, HALF)], torch.uint8, (HALF,)) for start in starts]
        pairs = list(zip(parts[::2], parts[1::2], strict=True))
        self.sources = [pairs[layer * count : (layer + 1) * count] for layer in range(layers)]
        device = device or torch.device("cpu")
        self.shared = shared_files([file], lambda _: below * SIZE) if shared else None
        tier = PooledTier(below * SIZE) if self.shared is None else self.shared.tier
        on_host = HostComputing() if computing else None
        host = HostExperts(device, tier.share(), on_host, self.shared) if below else None
        self.experts = Experts(
            Residency(), tier_on(device, room * SIZE).share(), experts_of(self.sources, device), host
        )

    def use(self, layer: int, chosen: Iterable[int], tokens: int = 1) -> int:
        """Computes with experts as they arrive; returns how many that has read."""
        before, numbers = self.experts.stats().bytes_read, list(chosen)
        self.experts.expect(layer, dict.fromkeys(numbers, 1), tokens)
        for number in _as_they_arrive(self.experts, layer, numbers):
            sources = self.sources[layer][number]
            if (on_host := self.experts.on_host(sources)) is not None:
                self.experts.computed(sources[0], tokens, 1e-9)
            for source, values in zip(sources, on_host or map(self.experts.fetch, sources), strict=True):
                start = source.extents[0].start
                assert torch.equal(values.cpu(), self.data[start : start + HALF])
        return (self.experts.stats().bytes_read - before) // SIZE

    def held(self, layer: int) -> set[int]:
        return {number for number, _ in enumerate(self.sources[0]) if self.experts.in_memory(layer, number)}
