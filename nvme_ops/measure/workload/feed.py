"""Emulated accelerators: while each computes on a batch, the next one is read."""

from __future__ import annotations

import heapq
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from nvme_ops.measure.files import make_cold
from nvme_ops.measure.rows import latency, percentile
from nvme_ops.measure.workload.readers import Reader

FED = 0.9  # utilization from which an accelerator counts as fed
_FIRST_BATCHES = 4  # of each accelerator, at least
_MAX = 1 << 14  # accelerators


@dataclass(frozen=True)
class Fed:
    """How a number of accelerators were fed."""

    accelerators: int
    utilization: float  #: their busy time over all of their time, from their first batch on
    samples: int
    nbytes: int
    seconds: float  #: from the first batch until the last one was computed on
    waits: list[float] = field(repr=False)  #: seconds that an accelerator was idle before a batch, except its first

    @property
    def rate(self) -> float:
        """Bytes per second."""
        return self.nbytes / self.seconds

    def wait(self, share: float) -> float:
        """Returns a percentile of the waits."""
        return percentile(self.waits, share) if self.waits else 0.0


def feed(reader: Reader, accelerators: int, compute: float, seconds: float) -> Fed:
    """Feeds ``accelerators`` from one stream of batches; each batch takes one accelerator ``compute`` seconds.

    An accelerator asks for its next batch when it begins to work on one, as with two buffers, and waits if that has not
    arrived when it is done. Epochs begin cold; the time between two of them does not count. Feeds for ``seconds`` at
    least, and until each has had four batches.
    """
    import torch

    stopped = 0.0

    def now() -> float:
        return time.perf_counter() - stopped

    def epochs() -> Iterator[Sequence[Any]]:
        nonlocal stopped
        while True:
            stopped += latency(lambda: cool(reader))
            yield from reader.batches()

    batches = epochs()
    wants = [(0.0, number) for number in range(accelerators)]
    free = [0.0] * accelerators
    first: dict[int, float] = {}
    busy = [0] * accelerators
    waits: list[float] = []
    samples = nbytes = 0
    next(batches)  # starts workers, and fills their queues
    begin = now()
    while True:
        wanted, number = heapq.heappop(wants)
        time.sleep(max(0.0, begin + wanted - now()))
        batch = next(batches)
        arrived = now() - begin
        start = max(arrived, free[number])
        if number in first:
            waits.append(start - free[number])
        else:
            first[number] = start
        free[number] = start + compute
        busy[number] += 1
        samples += len(batch)
        nbytes += batch.nbytes if isinstance(batch, torch.Tensor) else sum(map(len, batch))
        if arrived >= seconds and min(busy) >= _FIRST_BATCHES:
            break
        heapq.heappush(wants, (start, number))
    worked = sum(compute * count for count in busy)
    total = sum(free[number] - start for number, start in first.items())
    return Fed(accelerators, worked / total, samples, nbytes, max(free) - min(first.values()), waits)


def cool(reader: Reader) -> None:
    """Drops the reader's files from the page cache."""
    for path in reader.files:
        make_cold(str(path))


def search(measure: Callable[[int], Fed]) -> int:
    """Returns how many accelerators can be fed, to within an eighth; 0 if not even one."""

    def fed(count: int) -> bool:
        return measure(count).utilization >= FED

    low, high = 0, 1
    while high <= _MAX and fed(high):
        low, high = high, 2 * high
    high = min(high, _MAX + 1)
    while high - low > max(1, low // 8):
        middle = (low + high) // 2
        low, high = (middle, high) if fed(middle) else (low, middle)
    return low
