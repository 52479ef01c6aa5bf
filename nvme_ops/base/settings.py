"""Sizes and defaults of the Python side, each defined once. Those of the native side are in ``csrc/base/limits.h``."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from nvme_ops.base.text import MIB, size_words

#: Bytes of one buffer of a ring: large enough to keep a device busy while the previous one is used.
PIECE = 8 << 20

#: Buffers of a ring: one is filled while the other is used.
RING_DEPTH = 2

#: Bytes from which a tensor's pages in memory should be pages of the file, too: smaller tensors are copied anyway.
LARGE = 64 << 10

#: Bytes of a page of memory, and the least that direct I/O moves.
PAGE = 4096

#: Bytes to which tensors that share a memory are aligned, as torch aligns its own.
ALIGNMENT = 64

#: Bytes of a new slab, and by which it grows.
SLAB_STEP = 256 << 20

#: Bytes from which a tensor is divided among several folders, and of each part.
STRIPE = 4 << 20


@dataclass(frozen=True)
class Settings:
    """Settings of an ``aio_handle``, as in DeepSpeed's section ``aio``; the defaults are the handle's."""

    block_size: int = MIB
    queue_depth: int = 128
    single_submit: bool = False
    overlap_events: bool = False
    intra_op_parallelism: int = 1

    def as_json(self) -> dict[str, Any]:
        """Returns the settings as keyword arguments of ``aio_handle``."""
        return asdict(self)

    def words(self) -> str:
        """Returns the settings in words, short enough for a table."""
        switches = [name for name in ("single_submit", "overlap_events") if getattr(self, name)]
        lanes = f"{self.intra_op_parallelism} {'lane' if self.intra_op_parallelism == 1 else 'lanes'}"
        return ", ".join([f"{size_words(self.block_size)} x {self.queue_depth}", lanes, *switches])
