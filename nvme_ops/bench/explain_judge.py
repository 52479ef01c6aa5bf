"""What limits a transfer, judged from measured rates alone: no file is opened here.

What was reached is followed back to the device's ceiling in steps, each the difference between two rows: a new tensor,
a kept one, page-locked memory, other settings, the ceiling. A step is a finding when it is beyond the noise of the run.

Noise: from all rates the medians of their row and of their round are taken out, and what is left is compared with the
next round. From the median of all those differences follows the spread of one pass, and from that, by the number of
rounds, what the medians of two rows may differ by chance. More than ``_SURE`` times that counts, provided that the
rounds agree.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from nvme_ops.text import rate_words, size_words

# Rows, by the names that a reader sees
FIO = "fio best"
LOCKED = "page-locked tensor"
EMPTY = "nvme_ops.empty, new"
KEPT = "torch.empty, kept"
NEW = "torch.empty, new"
GPU = "GPU tensor"
GDS = "GPU tensor, gds_handle"

#: Differences below this are of no use to anybody, however sure.
LEAST = 0.03
_SURE = 2.5  # standard errors; some eight comparisons are made
_SPREAD_OF_MEDIAN = 1.2533  # of n normal values: sqrt(pi / 2) of that of their mean
_MEDIAN_DIFFERENCE = 0.9539  # of two normal values of spread 1: sqrt(2) * 0.6745
_PLAINLY = 0.95  # of the ceiling; less may be so by noise only
_BUSY = 0.85  # of a core; a thread that waits less does not wait for the device

Rates = Sequence[float | None]  # bytes per second, round by round; None where a pass failed


@dataclass(frozen=True)
class Variation:
    """A row that differs from another in one argument of the handle."""

    of: str  # the name of that other row
    argument: str
    value: int

    @property
    def name(self) -> str:
        """Of the row."""
        words = size_words(self.value) if self.argument == "block_size" else str(self.value)
        return f"{self.of}, {words} lanes" if self.argument == LANES else f"{self.of}, {self.argument} {words}"


LANES = "intra_op_parallelism"


@dataclass(frozen=True)
class Measured:
    """What was measured in one direction."""

    write: bool
    reached: str  # the row of a default handle and an ordinary tensor
    rates: Mapping[str, Rates]
    busy: Mapping[str, float] = field(default_factory=dict)  # CPU seconds for each second, by row
    variations: Sequence[Variation] = ()
    copy_rate: float = 0.0  # bytes per second that one core copies
    new_page_rate: float = 0.0  # bytes per second of new memory that one core touches first
    device_copy_rate: float = 0.0  # bytes per second between page-locked memory and the GPU
    missing: str = ""  # why there is no fio
    hindrances: Sequence[tuple[str, str]] = ()  # what the system refuses the handle, each with the fix


@dataclass(frozen=True)
class Finding:
    """A part that limits. ``share``: of the gap to the ceiling, what the fix alone would close; shares may overlap."""

    name: str
    share: float
    evidence: str
    fix: str


@dataclass(frozen=True)
class Judgement:
    """What came out. ``fraction``: what was reached over the ceiling."""

    verdict: str
    reached: str
    ceiling: str
    fraction: float
    noise: float  # the least relative difference between two rows that counts
    findings: list[Finding]


def judge(measured: Measured) -> Judgement:
    """Needs rates of ``measured.reached`` and of ``LOCKED``; any other row may be missing."""
    noise = least_difference(measured.rates)
    compare = _Comparison(measured.rates, noise, measured.reached)
    compare.ceiling = ceiling = _ceiling(measured, compare)
    fraction = compare.median(measured.reached) / compare.median(ceiling)
    findings: list[Finding] = []
    if compare.faster(ceiling, measured.reached):
        found = [*_memory(measured, compare), *_settings(measured, compare), *_processor(measured, compare)]
        found += _rest(measured, compare, bool(found))
        greatest = {finding.name: finding for finding in sorted(found, key=lambda finding: finding.share)}
        findings = sorted(greatest.values(), key=lambda finding: -finding.share)
    direction = "write" if measured.write else "read"
    rate, most = compare.words(measured.reached), compare.words(ceiling)
    if findings:
        first = findings[0]
        verdict = (
            f"{direction}: {rate} reached, {fraction:.0%} of the ceiling of {most}; "
            f"most is lost to: {first.name} ({first.share:.0%} of the gap)"
        )
    else:
        verdict = f"{direction}: the device is the limit: {rate} reached, {fraction:.0%} of its ceiling of {most}"
        if fraction < _PLAINLY:
            verdict += ", as far as this run can tell"
    return Judgement(verdict, measured.reached, ceiling, fraction, noise, findings)


def least_difference(rates: Mapping[str, Rates]) -> float:
    """By how much the medians of two rows must differ to count; LEAST where the run was quiet."""
    rows = [_around_median(row) for row in rates.values() if any(rate is not None for rate in row)]
    count = max((len(row) for row in rows), default=0)
    rounds = [[row[number] for row in rows if number < len(row)] for number in range(count)]
    levels = [statistics.median([value for value in taken if value is not None] or [0.0]) for taken in rounds]
    differences = []
    for row in rows:
        left = [None if value is None else value - level for value, level in zip(row, levels, strict=False)]
        pairs = itertools.pairwise(left)
        differences += [abs(after - before) for before, after in pairs if before is not None and after is not None]
    if not differences:
        return LEAST
    spread = statistics.median(differences) / _MEDIAN_DIFFERENCE
    return max(LEAST, math.expm1(_SURE * _SPREAD_OF_MEDIAN * spread * math.sqrt(2 / count)))


def _around_median(row: Rates) -> list[float | None]:
    """Logarithms of the rates, over the row's median."""
    middle = statistics.median(rate for rate in row if rate is not None)
    return [None if rate is None else math.log(rate / middle) for rate in row]


class _Comparison:
    """Rows against each other; ``ceiling`` is known after the first comparisons."""

    def __init__(self, rates: Mapping[str, Rates], noise: float, reached: str) -> None:
        self._rates, self.noise, self._reached = rates, noise, reached
        self.ceiling = ""

    def has(self, name: str) -> bool:
        return any(rate is not None for rate in self._rates.get(name, ()))

    def median(self, name: str) -> float:
        return statistics.median(rate for rate in self._rates[name] if rate is not None)

    def ratios(self, name: str, other: str) -> list[float]:
        """Round by round."""
        pairs = zip(self._rates.get(name, ()), self._rates.get(other, ()), strict=False)
        return [mine / theirs for mine, theirs in pairs if mine is not None and theirs is not None]

    def faster(self, name: str, other: str) -> bool:
        """Beyond the noise, and in all rounds but one in five."""
        ratios = self.ratios(name, other)
        against = sum(ratio <= 1 for ratio in ratios)
        return bool(ratios) and statistics.median(ratios) > 1 + self.noise and against <= len(ratios) // 5

    def fastest(self, names: Iterable[str]) -> str:
        return max((name for name in names if self.has(name)), key=self.median)

    def share(self, slow: str, fast: str) -> float:
        """The seconds saved by ``fast`` for ``slow``, of those that lie between what was reached and the ceiling."""
        gap = 1 / self.median(self._reached) - 1 / self.median(self.ceiling)
        saved = 1 / self.median(slow) - 1 / self.median(fast)
        return min(1.0, max(0.0, saved / gap)) if gap > 0 else 0.0

    def words(self, name: str) -> str:
        return rate_words(self.median(name))


def _ceiling(measured: Measured, compare: _Comparison) -> str:
    """Fio; where page-locked memory is faster, or fio missing, that. The fastest of many would be one by chance."""
    own = _best_setting(measured, compare)
    if not compare.has(FIO) or compare.median(own) > compare.median(FIO) * (1 + compare.noise):
        return own
    return FIO


def _best_setting(measured: Measured, compare: _Comparison) -> str:
    """Page-locked memory with the default settings, or with others that are faster."""
    settings = [each.name for each in measured.variations if each.of == LOCKED]
    return compare.fastest([LOCKED, *(name for name in settings if compare.faster(name, LOCKED))])


def _memory(measured: Measured, compare: _Comparison) -> list[Finding]:
    """The steps from one kind of memory to the next better one."""
    found = []
    if compare.faster(KEPT, NEW) and measured.reached == NEW:
        better = compare.has(EMPTY) and compare.faster(EMPTY, NEW)
        other = f", or take nvme_ops.empty(...), new each time: {compare.words(EMPTY)}" if better else ""
        found.append(
            Finding(
                "page faults", compare.share(NEW, KEPT),
                f"a new torch.empty for each pass {compare.words(NEW)}, one that is kept {compare.words(KEPT)}"
                + _rate_of("one core makes new pages at", measured.new_page_rate),
                f"keep the tensor and read into it again{other}",
            )
        )  # fmt: skip
    if compare.faster(LOCKED, KEPT) and measured.reached in (KEPT, NEW):
        found.append(
            Finding(
                "memory copies", compare.share(KEPT, LOCKED),
                f"an ordinary tensor that is kept {compare.words(KEPT)}, page-locked memory, without a copy, "
                + compare.words(LOCKED) + _rate_of("one core copies", measured.copy_rate),
                "keep the data in handle.new_cpu_locked_tensor(...), or in nvme_ops.empty(...)",
            )
        )  # fmt: skip
    if not found and measured.reached == NEW and compare.faster(LOCKED, NEW):
        found.append(
            Finding(
                "page faults and memory copies", compare.share(NEW, LOCKED),
                f"a new torch.empty for each pass {compare.words(NEW)}, page-locked memory {compare.words(LOCKED)}; "
                "the noise hides which of the two",
                "keep the data in handle.new_cpu_locked_tensor(...), or in nvme_ops.empty(...)",
            )
        )  # fmt: skip
    if measured.reached == GPU and compare.faster(LOCKED, GPU):
        lanes = next((each for each in measured.variations if (each.of, each.argument) == (GPU, LANES)), None)
        fix = "start several transfers at once (async_pread, wait), and see nvme-report on GPUDirect Storage"
        if compare.faster(GDS, GPU):
            fix = f"nvme_ops.gds_handle(): {compare.words(GDS)}"
        elif lanes and compare.faster(lanes.name, GPU):
            fix = f"aio_handle({LANES}={lanes.value}): {compare.words(lanes.name)}"
        found.append(
            Finding(
                "copy to the GPU" if not measured.write else "copy from the GPU", compare.share(GPU, LOCKED),
                f"GPU memory {compare.words(GPU)}, host memory {compare.words(LOCKED)}"
                + _rate_of("the copy alone", measured.device_copy_rate),
                fix,
            )
        )  # fmt: skip
    return found


def _settings(measured: Measured, compare: _Comparison) -> list[Finding]:
    """Of each argument the best value, where it beats the default with page-locked memory."""
    names = {"block_size": "block size", "queue_depth": "queue depth", LANES: "one lane"}
    found = []
    for argument, name in names.items():
        rows = [each for each in measured.variations if (each.of, each.argument) == (LOCKED, argument)]
        better = [each for each in rows if compare.faster(each.name, LOCKED)]
        if not better:
            continue
        best = max(better, key=lambda each: compare.median(each.name))
        busy = measured.busy.get(LOCKED, 0.0)
        cpu = argument == LANES and busy >= _BUSY
        found.append(
            Finding(
                "CPU" if cpu else name, compare.share(LOCKED, best.name),
                f"the default {compare.words(LOCKED)}, {best.name} {compare.words(best.name)}"
                + (f"; one lane keeps {busy:.0%} of a core busy" if cpu else ""),
                f"aio_handle({argument}={best.value}), or search all settings: nvme-tune",
            )
        )  # fmt: skip
    return found


def _processor(measured: Measured, compare: _Comparison) -> list[Finding]:
    """A core that is busy all the time with an ordinary tensor: more of them help where the tensor must stay."""
    busy = measured.busy.get(measured.reached, 0.0)
    lanes = [each for each in measured.variations if (each.of, each.argument) == (measured.reached, LANES)]
    if busy < _BUSY or measured.reached == LOCKED:
        return []
    for each in lanes:
        if compare.faster(each.name, measured.reached):
            evidence = (
                f"one lane keeps {busy:.0%} of a core busy at {compare.words(measured.reached)}, "
                f"{each.value} lanes reach {compare.words(each.name)}"
            )
            fix = f"aio_handle({LANES}={each.value}), where the tensor has to stay what it is"
            return [Finding("CPU", compare.share(measured.reached, each.name), evidence, fix)]
    return []


def _rest(measured: Measured, compare: _Comparison, found: bool) -> list[Finding]:
    """What page-locked memory and the best setting do not reach either."""
    best = _best_setting(measured, compare)
    if not compare.faster(compare.ceiling, best):
        if found:
            return []
        evidence = f"{measured.reached} {compare.words(measured.reached)}; no single step is beyond the noise"
        return [Finding("several small parts", 1.0, evidence, "take more rounds to tell them apart: --rounds 9")]
    evidence = f"{best} {compare.words(best)}, {compare.ceiling} {compare.words(compare.ceiling)}"
    share = compare.share(best, compare.ceiling)
    if measured.hindrances:
        refusals = "; ".join(words for words, _ in measured.hindrances)
        fixes = "; ".join(fix for _, fix in measured.hindrances)
        return [Finding("what the system refuses", share, f"{evidence}; {refusals}", fixes)]
    if (busy := measured.busy.get(best, 0.0)) >= _BUSY:
        evidence += f"; it keeps {busy:.0%} of a core busy"
        return [Finding("CPU", share, evidence, "a larger block_size, and fewer other programs on this processor")]
    return [Finding("settings", share, f"{evidence}; no other setting tried comes closer", "search all: nvme-tune")]


def _rate_of(words: str, rate: float) -> str:
    return f"; {words} {rate_words(rate)}" if rate else ""
