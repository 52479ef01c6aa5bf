"""The settings of a handle that are measured and searched."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from nvme_ops.sizes import MIB, size_words


@dataclass(frozen=True)
class Settings:
    """What ``aio_handle`` takes, DeepSpeed's section ``aio`` holds; the defaults are the handle's."""

    block_size: int = MIB
    queue_depth: int = 128
    single_submit: bool = False
    overlap_events: bool = False
    intra_op_parallelism: int = 1

    def as_json(self) -> dict[str, Any]:
        """``aio_handle(**settings.as_json())`` is a handle with these settings."""
        return asdict(self)

    def words(self) -> str:
        """For a reader: what fits in a table."""
        switches = [name for name in ("single_submit", "overlap_events") if getattr(self, name)]
        lanes = f"{self.intra_op_parallelism} {'lane' if self.intra_op_parallelism == 1 else 'lanes'}"
        return ", ".join([f"{size_words(self.block_size)} x {self.queue_depth}", lanes, *switches])
