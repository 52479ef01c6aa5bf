"""Timing and statistics that the benchmarks share: rows taken in interleaved rounds, medians, paired ratios."""

from __future__ import annotations

import re
import resource
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

GIB = 1 << 30
MIB = 1 << 20
_UNITS = {"": 1, "K": 1 << 10, "M": MIB, "G": GIB, "T": 1 << 40}


class Unavailable(Exception):  # noqa: N818  (not an error: the row stays empty and says why)
    """What a row needs is not here."""


@dataclass(frozen=True)
class Sample:
    """One timed pass."""

    seconds: float
    amount: int  # bytes or operations, as the table says
    cpu_seconds: float | None = None  # user and system, of all that did the work

    @property
    def rate(self) -> float:
        """Amount per second."""
        return self.amount / self.seconds

    @property
    def cpu_per_gib(self) -> float | None:
        """CPU seconds per GiB, for amounts in bytes."""
        return None if self.cpu_seconds is None else self.cpu_seconds * GIB / self.amount


@dataclass(frozen=True)
class Spread:
    """The median of some values, and between which they lie."""

    median: float
    low: float
    high: float


def spread(values: Sequence[float]) -> Spread | None:
    """None when there are no values."""
    return Spread(statistics.median(values), min(values), max(values)) if values else None


def _nothing() -> None:
    pass


def _over() -> Sample:
    raise Unavailable("measured already")


@dataclass
class Row:
    """One contender of a table.

    ``run`` does the work once and says how long it took; ``before`` makes the same starting point for all, untimed;
    ``check`` looks, after the untimed first pass, whether the work was done. ``peer`` names the row of the same call by
    another package.
    """

    name: str
    run: Callable[[], Sample]
    before: Callable[[], None] = _nothing
    check: Callable[[], None] = _nothing
    peer: str = ""
    note: str = ""
    samples: list[Sample | None] = field(default_factory=list)  # one for each round; None: it failed
    wrong: bool = False  # the check found other bytes than there should be


def interleave(rows: Sequence[Row], rounds: int, progress: Callable[[str], None] = lambda _: None) -> None:
    """Passes over all rows ``rounds`` times, after one untimed and checked pass.

    Each round starts with another row, so that slow changes of the machine meet all of them. A row that fails keeps the
    reason as its note; the others go on. Afterwards the rows hold samples, and nothing of what they worked on.
    """
    able = []
    for row in rows:
        progress(f"first pass: {row.name}")
        with _kept_as_note(row):
            row.before()
            row.run()
            try:
                row.check()
            except AssertionError as error:
                row.wrong = True
                row.note = f"WRONG DATA: {error}"
                continue
            able.append(row)
    for number in range(rounds):
        first = number % len(able) if able else 0
        for row in able[first:] + able[:first]:
            progress(f"round {number + 1} of {rounds}: {row.name}")
            row.samples.append(None)
            with _kept_as_note(row):
                row.before()
                row.samples[-1] = row.run()
    for row in rows:
        row.run, row.before, row.check = _over, _nothing, _nothing  # the tensors that these hold can go


@contextmanager
def _kept_as_note(row: Row) -> Iterator[None]:
    try:
        yield
    except Unavailable as reason:
        row.note = str(reason)
    except (OSError, RuntimeError, ValueError, EOFError) as error:
        row.note = f"failed: {type(error).__name__}: {error}".splitlines()[0]


def paired_ratios(mine: Sequence[Sample | None], reference: Sequence[Sample | None]) -> list[float]:
    """My rate over the reference's, round by round; rounds that lack either are left out."""
    pairs = zip(mine, reference, strict=False)
    return [own.rate / other.rate for own, other in pairs if own is not None and other is not None]


def timed(work: Callable[[], object], amount: int) -> Sample:
    """One call of ``work``, with the CPU time of all threads of this process and of children that ended meanwhile."""
    cpu = _cpu_seconds()
    start = time.perf_counter()
    work()
    seconds = time.perf_counter() - start
    return Sample(seconds, amount, _cpu_seconds() - cpu)


def latency(work: Callable[[], object]) -> float:
    """Seconds of one short call. Nothing else is looked at, to disturb it little."""
    start = time.perf_counter_ns()
    work()
    return (time.perf_counter_ns() - start) / 1e9


def _cpu_seconds() -> float:
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in used)


def parse_size(text: str) -> int:
    """Bytes: ``64M``, ``1G``, ``1.5GiB``, ``4096``; units are powers of 1024. Raises ValueError."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(?:i?B)?", text.strip(), re.IGNORECASE)
    size = int(float(found[1]) * _UNITS[found[2].upper()]) if found else 0
    if size < 1:
        raise ValueError(f"{text!r} is not a size; examples: 512M, 1G, 1.5G")
    return size


def size_words(size: int) -> str:
    """For a reader: ``512 B``, ``1 GiB``."""
    value = float(size)
    for unit in ("B", "KiB", "MiB"):
        if value < 1024:
            return f"{value:.4g} {unit}"
        value /= 1024
    return f"{value:.4g} GiB"
