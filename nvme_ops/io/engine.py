"""What a handle asks of its engine, which moves its bytes, and what the engine reports: directions, statistics.

Engines are native, described in ``nvme_ops/ops/async_io.pyi``. ``aio_handle`` and ``gds_handle`` each have one; that of
an adaptive handle learns which tool suits each transfer. Only the handles and this module access a handle's engine.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from nvme_ops.base.text import Counts

if TYPE_CHECKING:
    from nvme_ops.ops.async_io import Engine


AUTOMATIC = 0  #: lanes: as many as a transfer needs


class Op(enum.IntEnum):
    """The direction of a transfer: ``READ`` fills memory."""

    READ = 0
    WRITE = 1


class Priority(enum.IntEnum):
    """How urgent a transfer is, most urgent first. The native ``Priority`` has the same values."""

    DEMAND = 0  #: somebody waits for it
    PREFETCH = 1  #: somebody will wait for it soon
    WRITEBACK = 2  #: nobody waits, but memory is held until it ends
    BACKGROUND = 3  #: it may take its time


@dataclass(frozen=True, repr=False)
class Statistics(Counts):
    """What a handle has done in this process since it was made."""

    read_bytes: int
    written_bytes: int
    staged_bytes: int  #: the part of both that was copied through staging memory
    cached_bytes: int  #: the part of both that the page cache served or took
    requests: int  #: completed by the kernel
    mean_in_flight: float  #: requests in one lane's queue when one more was submitted, that one included
    max_in_flight: int
    queue_seconds: float  #: from a transfer's arrival at a lane to its first request, summed over transfers and lanes
    kernel_seconds: float  #: from a request's submission to its completion, summed over requests

    @property
    def bytes(self) -> int:
        """All bytes moved."""
        return self.read_bytes + self.written_bytes

    @property
    def cached_share(self) -> float:
        """The part of all bytes that the page cache served or took, from 0 to 1."""
        return self.cached_bytes / max(1, self.bytes)


class ClosedEngine:
    """The engine of a closed handle: every method raises ValueError."""

    def _refuse(self, *_: Any) -> Any:
        raise ValueError("the handle is closed")

    run = submit = submit_many = backend = staging_bytes = paths = statistics = sweep = _refuse


class HasEngine(Protocol):
    """A handle."""

    _engine: Engine


def engine_of(handle: HasEngine) -> Engine:
    """Returns the engine of ``handle``."""
    return handle._engine


def statistics_of(counters: dict[str, int]) -> Statistics:
    """Converts the counters of ``Engine.statistics`` to seconds and means."""
    same = ("read_bytes", "written_bytes", "staged_bytes", "cached_bytes", "requests")
    return Statistics(
        **{name: counters[name] for name in same},
        mean_in_flight=counters["in_flight_sum"] / max(1, counters["requests"]),
        max_in_flight=counters["in_flight_max"],
        queue_seconds=counters["queued_nanoseconds"] / 1e9,
        kernel_seconds=counters["kernel_nanoseconds"] / 1e9,
    )
