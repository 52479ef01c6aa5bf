"""Rows that are measured in interleaved rounds, and the statistics of all measurements: medians, paired ratios, noise.

Rates measured minutes apart are never compared: single passes vary by a fifth on shared machines.
"""

from __future__ import annotations

import itertools
import math
import resource
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeVar

from nvme_ops.base.energy import Meter, used
from nvme_ops.measure.files import cached_share

Item = TypeVar("Item")


class Unavailable(Exception):  # noqa: N818  (not an error: the row stays empty and says why)
    """Something that a row needs is missing."""


class WrongData(Exception):  # noqa: N818  (what it says comes after "WRONG DATA")
    """Wrong bytes were moved; the message says where."""


@dataclass(frozen=True)
class Sample:
    """One timed pass."""

    seconds: float
    amount: int  # bytes or operations, as the table says
    cpu_seconds: float | None = None  # user and system, of all threads and processes that did the work
    submit_seconds: float | None = None  # until an asynchronous call returned
    end_to_end: float | None = None  # seconds that the caller waits, for everything around the transfer, too
    peak_bytes: int | None = None  # of memory, beyond what was held before
    joules: dict[str, float] = field(default_factory=dict)  # by part of the machine, if it has counters
    from_page_cache: float | None = None  # share of what was read; None for writes and direct reads
    figures: dict[str, float] = field(default_factory=dict)  # further figures of a benchmark, by column

    @property
    def rate(self) -> float:
        """Amount per second."""
        return self.amount / self.seconds


def percentile(values: Sequence[float], share: float) -> float:
    """Returns the least value that at least a ``share`` (0 to 1) of all do not exceed: the nearest-rank method."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


def spread(values: Sequence[float]) -> dict[str, float] | None:
    """Returns the ``median``, ``min`` and ``max`` of the values, or None if there are none."""
    return {"median": statistics.median(values), "min": min(values), "max": max(values)} if values else None


def _nothing() -> None:
    pass


def _over() -> Sample:
    raise Unavailable("nothing to measure")


@dataclass
class Row:
    """One contender of a table.

    ``run`` does the work once and says how long it took; ``before`` makes the same starting point for all, untimed;
    ``check``, called after the untimed first pass, raises WrongData if the work was not done. ``peer`` names the row of
    the same call by another package. ``reads`` returns the file of the next pass if cached data are read from the page
    cache.
    """

    name: str
    run: Callable[[], Sample] = _over
    before: Callable[[], None] = _nothing
    check: Callable[[], None] = _nothing
    peer: str = ""
    note: str = ""
    samples: list[Sample | None] = field(default_factory=list)  # one for each round; None: it failed
    wrong: bool = False  # the check found wrong bytes
    reads: Callable[[], str] | None = None
    found: float | None = None  # share of that file in the page cache before the pass

    @property
    def measured(self) -> bool:
        """Whether nothing is left to measure."""
        return self.run is _over

    def prepare(self) -> None:
        """Calls ``before`` and checks the page cache; not timed."""
        self.before()
        self.found = cached_share(self.reads()) if self.reads is not None else None

    def measure(self) -> Sample:
        """Calls ``run``; adds which share of the file was in the page cache."""
        sample = self.run()
        return replace(sample, from_page_cache=self.found) if sample.from_page_cache is None else sample


def interleave(
    rows: Sequence[Row], rounds: int, progress: Callable[[str], None] = lambda _: None, warmups: int = 1
) -> None:
    """Runs a timed pass of every row in each of ``rounds``, after ``warmups`` untimed passes and one that is checked.

    Each round has another order, so that slow changes of the machine, and what a row leaves behind, affect all of them.
    A row that fails keeps the reason as its note; the others go on. Afterwards the rows hold their samples, but not the
    memory that they used. ``progress`` is called before each pass, ``len(rows) * (1 + rounds)`` times in all if none
    fails.
    """
    able = []
    try:
        for row in rows:
            progress(f"first pass: {row.name}")
            with kept_as_note(row):
                for _ in range(warmups):
                    row.before()
                    row.run()
                if not warmups:
                    row.before()
                row.check()
                able.append(row)
        for number in range(rounds):
            for row in in_turn(able, number):
                progress(f"round {number + 1} of {rounds}: {row.name}")
                row.samples.append(None)
                with kept_as_note(row):
                    row.prepare()
                    row.samples[-1] = row.measure()
    finally:
        for row in rows:  # frees the tensors that these hold
            row.run, row.before, row.check, row.reads = _over, _nothing, _nothing, None


def in_turn(items: Sequence[Item], number: int) -> list[Item]:
    """Returns the order of a round: in ``len(items)`` rounds each has every place and every predecessor once.

    E. J. Williams, "Experimental designs balanced for the estimation of residual effects of treatments", 1949. An odd
    number of items needs twice as many rounds, of which half are reversed.
    """
    count = len(items)
    zigzag = [(place + 1) // 2 if place % 2 else -(place // 2) for place in range(count)]
    order = [items[(step + number) % count] for step in zigzag]
    return order[::-1] if count % 2 and number // count % 2 else order


@contextmanager
def kept_as_note(row: Row) -> Iterator[None]:
    """Keeps the reason as the note of ``row`` if the block fails; exceptions that are no failure of a row pass."""
    try:
        yield
    except WrongData as error:
        row.wrong, row.note = True, f"WRONG DATA: {error}"
    except Unavailable as reason:
        row.note = str(reason)
    except (OSError, RuntimeError, ValueError, EOFError, MemoryError) as error:
        if (end := _exit_behind(error)) is not None:
            raise end from None
        row.note = f"failed: {type(error).__name__}: {error}".splitlines()[0]


def _exit_behind(error: BaseException) -> BaseException | None:
    """Returns the Ctrl-C or exit that led to an error: torch raises if the signal has ended its workers, too."""
    before = error.__context__
    while before is not None and not isinstance(before, KeyboardInterrupt | SystemExit):
        before = before.__context__
    return before


def paired_ratios(mine: Sequence[Sample | None], reference: Sequence[Sample | None]) -> list[float]:
    """Returns the rates of ``mine`` over those of ``reference``, round by round; omits rounds that lack either."""
    pairs = zip(mine, reference, strict=False)
    return [own.rate / other.rate for own, other in pairs if own is not None and other is not None]


def cached_share_of(samples: Sequence[Sample | None]) -> float | None:
    """Returns the share of all bytes that came from the page cache; None for writes and for reads that bypass it."""
    known = [sample for sample in samples if sample is not None and sample.from_page_cache is not None]
    cached = sum((sample.from_page_cache or 0) * sample.amount for sample in known)
    return cached / sum(sample.amount for sample in known) if known else None


def summed(rows: Sequence[Row]) -> list[Sample | None]:
    """Returns the sum of the rows' rates, round by round; None where one has none."""
    made: list[Sample | None] = []
    for taken in itertools.zip_longest(*(row.samples for row in rows)):
        rates = [sample.rate for sample in taken if sample is not None]
        made.append(Sample(1, int(sum(rates))) if len(rates) == len(rows) else None)
    return made


_SPREAD_OF_MEDIAN = 1.2533  # that of normal values over that of their mean: sqrt(pi / 2)
_MEDIAN_DIFFERENCE = 0.9539  # between two normal values of spread 1: sqrt(2) * 0.6745


def noise(series: Iterable[Sequence[float | None]]) -> float | None:
    """Returns the standard deviation of a single value of these series; None if no two values follow each other.

    Values are logarithms of rates or ratios, round by round. The median of how much each differs from the one before is
    robust, and slow changes of the machine do not count.
    """
    pairs = (pair for values in series for pair in itertools.pairwise(values))
    differences = [abs(after - before) for before, after in pairs if before is not None and after is not None]
    return statistics.median(differences) / _MEDIAN_DIFFERENCE if differences else None


def noise_of_median(one: float, count: int) -> float:
    """Returns the standard deviation of the median of ``count`` values, each with the noise ``one``."""
    return _SPREAD_OF_MEDIAN * one / math.sqrt(count)


def timed(work: Callable[[], object], amount: int) -> Sample:
    """Calls ``work`` once; counts the CPU time of this process and of children that end meanwhile.

    The peak memory is that of this process, known only if the kernel can reset the previous peak.
    """
    before = forget_peak()
    cpu = _cpu_seconds()
    start = time.perf_counter()
    work()
    seconds = time.perf_counter() - start
    used = _cpu_seconds() - cpu
    return Sample(seconds, amount, used, peak_bytes=None if before is None else max(0, peak() - before))


def forget_peak() -> int | None:
    """Resets the kernel's high-water mark; returns the resident bytes now, or None if it cannot."""
    try:
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # resets VmHWM: proc_pid_clear_refs(5)
    except OSError:
        return None
    return peak()


def peak() -> int:
    """Returns the high-water mark in bytes."""
    with open("/proc/self/status", encoding="ascii", errors="replace") as file:
        return next((int(line.split()[1]) * 1024 for line in file if line.startswith("VmHWM")), 0)


def latency(work: Callable[[], object]) -> float:
    """Returns the seconds of one short call. Measures nothing else, to disturb it little."""
    start = time.perf_counter_ns()
    work()
    return (time.perf_counter_ns() - start) / 1e9


def _cpu_seconds() -> float:
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in used)


def metered(row: Row, meter: Meter) -> None:
    """Adds to each pass of a row its energy, and the time that its caller waits."""
    inner = row.run

    def run() -> Sample:
        before = meter.read()
        begin = time.perf_counter()
        sample = inner()
        end_to_end = time.perf_counter() - begin
        return replace(sample, end_to_end=sample.end_to_end or end_to_end, joules=used(before, meter.read()))

    row.run = run
