"""Judges what limits a transfer from measured rates alone: no file is opened here.

Steps lead from what was reached to the device's ceiling: a new tensor, a kept one, page-locked memory, two lanes, the
ceiling. Each is the difference between two rows, and a finding if it is beyond the noise of the run.

Noise: each rate is divided by the medians of its row and of its round; ``rows.noise`` of the quotients gives, with the
number of rounds, how much the medians of two rows differ by chance. A difference counts from ``_SURE`` times that on,
if the rounds agree.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from nvme_ops.base.text import rate_words
from nvme_ops.measure import fio
from nvme_ops.measure.rows import noise, noise_of_median

# The rows' displayed names
FIO = fio.NAME
LOCKED = "page-locked tensor"
EMPTY = "nvme_ops.empty, new"
KEPT = "torch.empty, kept"
NEW = "torch.empty, new"
GPU = "GPU tensor"
GDS = "GPU tensor, gds_handle"

#: Differences below this do not matter, however sure they are.
MIN_DIFFERENCE = 0.03
_SURE = 2.5  # standard errors; some eight comparisons are made
_AT_CEILING = 0.95  # of it; the verdict on a lower rate is qualified
_BUSY = 0.85  # of a core; a thread this busy hardly waits for the device
_WITHOUT_COPY = "keep the data in handle.new_cpu_locked_tensor(...), or in nvme_ops.empty(...)"
_TWO_LANES = "aio_handle(intra_op_parallelism=2)"

Rates = Sequence[float | None]  # bytes per second, round by round; None where a pass failed


def two_lanes(name: str) -> str:
    """Returns the name of the row that is as ``name``, but with two lanes."""
    return f"{name}, 2 lanes"


@dataclass(frozen=True)
class Measured:
    """What was measured in one direction."""

    write: bool
    reached: str  # NEW, KEPT or GPU: the row of a default handle and an ordinary tensor
    rates: Mapping[str, Rates]
    busy: Mapping[str, float] = field(default_factory=dict)  # CPU seconds for each second, by row
    missing: str = ""  # why there is no fio
    hindrances: Sequence[tuple[str, str]] = ()  # what the system refuses the handle, each with the fix


@dataclass(frozen=True)
class Finding:
    """Why rate is lost. ``share``: how much of the gap to the ceiling the fix alone closes; shares may overlap."""

    name: str
    share: float
    evidence: str
    fix: str


@dataclass(frozen=True)
class Judgement:
    """The conclusions. ``noise`` is the least relative difference between two rows that counts."""

    verdict: str
    ceiling: str
    noise: float
    findings: list[Finding]


def judge(measured: Measured) -> Judgement:
    """Draws the conclusions. Needs rates of ``measured.reached`` and ``LOCKED``; any other row may be missing."""
    case = _Case(measured)
    reached, ceiling = case.medians[measured.reached], case.medians[case.ceiling]
    findings = case.findings() if case.faster(case.ceiling, measured.reached) else []
    verdict = "write: " if measured.write else "read: "
    verdict += "" if findings else "the device is the limit: "
    verdict += f"{rate_words(reached)} reached, {reached / ceiling:.0%} of {'the' if findings else 'its'} ceiling of "
    verdict += rate_words(ceiling)
    if findings:
        verdict += f"; most is lost to: {findings[0].name} ({findings[0].share:.0%} of the gap)"
    elif reached / ceiling < _AT_CEILING:
        verdict += ", as far as this run can tell"
    return Judgement(verdict, case.ceiling, case.noise, findings)


def least_difference(rates: Mapping[str, Rates]) -> float:
    """Returns the least difference between two rows' medians that counts; MIN_DIFFERENCE in a quiet run."""
    rows = [_around_median(row) for row in rates.values() if any(row)]
    rounds = ([value for value in taken if value is not None] for taken in zip(*rows, strict=True))
    levels = [statistics.median(values or [0.0]) for values in rounds]
    left = (
        [None if value is None else value - level for value, level in zip(row, levels, strict=True)] for row in rows
    )
    one = noise(left)
    return (
        MIN_DIFFERENCE
        if one is None
        else max(MIN_DIFFERENCE, math.expm1(_SURE * math.sqrt(2) * noise_of_median(one, len(levels))))
    )


def _around_median(row: Rates) -> list[float | None]:
    """Returns logarithms of the rates, relative to the row's median."""
    middle = statistics.median(rate for rate in row if rate is not None)
    return [None if rate is None else math.log(rate / middle) for rate in row]


class _Case:
    """Compares the rates of one direction."""

    def __init__(self, measured: Measured) -> None:
        self.measured, self.noise = measured, least_difference(measured.rates)
        known = {name: [rate for rate in row if rate is not None] for name, row in measured.rates.items()}
        self.medians = {name: statistics.median(rates) for name, rates in known.items() if rates}
        self.own = two_lanes(LOCKED) if self.faster(two_lanes(LOCKED), LOCKED) else LOCKED
        # not the fastest of all rows, since one of many is fast by chance
        fio = self.medians.get(FIO, 0.0)
        self.ceiling = self.own if self.medians[self.own] > fio * (1 + self.noise) else FIO

    def faster(self, name: str, other: str) -> bool:
        """Returns whether a row is faster beyond the noise, and in all rounds but one in five."""
        rounds = zip(self.measured.rates.get(name, ()), self.measured.rates.get(other, ()), strict=False)
        ratios = [mine / theirs for mine, theirs in rounds if mine is not None and theirs is not None]
        against = sum(ratio <= 1 for ratio in ratios)
        return bool(ratios) and statistics.median(ratios) > 1 + self.noise and against <= len(ratios) // 5

    def words(self, name: str) -> str:
        return rate_words(self.medians[name])

    def findings(self) -> list[Finding]:
        """Returns each finding once, the most costly first."""
        found = [*self._memory(), *self._lanes()]
        found += self._above_own(bool(found))
        greatest = {finding.name: finding for finding in sorted(found, key=lambda finding: finding.share)}
        return sorted(greatest.values(), key=lambda finding: -finding.share)

    def _finding(self, name: str, slow: str, fast: str, evidence: str, fix: str) -> Finding:
        """Makes a finding; its ``share`` is the time that ``fast`` saves over ``slow``, over the gap to the ceiling."""
        gap = 1 / self.medians[self.measured.reached] - 1 / self.medians[self.ceiling]
        saved = 1 / self.medians[slow] - 1 / self.medians[fast]
        return Finding(name, min(1.0, max(0.0, saved / gap)) if gap > 0 else 0.0, evidence, fix)

    def _step(self, name: str, slow: str, fast: str, evidence: str, fix: str) -> list[Finding]:
        """Makes a finding if ``fast`` is faster; ``evidence`` has placeholders for the rates of both."""
        if not self.faster(fast, slow):
            return []
        return [self._finding(name, slow, fast, evidence.format(self.words(slow), self.words(fast)), fix)]

    def _memory(self) -> list[Finding]:
        """Returns the steps from one kind of memory to the next faster one."""
        measured = self.measured
        if measured.reached == GPU:
            name = "copy from the GPU" if measured.write else "copy to the GPU"
            return self._step(name, GPU, LOCKED, "GPU memory {}, host memory {}", self._gpu_fix())
        found = []
        if measured.reached == NEW:
            fix = "keep the tensor and read into it again"
            if self.faster(EMPTY, NEW):
                fix += f", or take nvme_ops.empty(...), new each time: {self.words(EMPTY)}"
            found += self._step(
                "page faults", NEW, KEPT, "a new torch.empty for each pass {}, one that is kept {}", fix
            )
        evidence = "an ordinary tensor that is kept {}, page-locked memory, without a copy, {}"
        found += self._step("memory copies", KEPT, LOCKED, evidence, _WITHOUT_COPY)
        if not found:
            evidence = "a new torch.empty for each pass {}, page-locked memory {}; the noise hides which of the two"
            found = self._step("page faults and memory copies", NEW, LOCKED, evidence, _WITHOUT_COPY)
        return found

    def _gpu_fix(self) -> str:
        for fast, fix in ((GDS, "nvme_ops.gds_handle()"), (two_lanes(GPU), _TWO_LANES)):
            if self.faster(fast, GPU):
                return f"{fix}: {self.words(fast)}"
        return "start several transfers at once (async_pread, wait), and see nvme-report on GPUDirect Storage"

    def _lanes(self) -> list[Finding]:
        """Reports what a second lane gains, with page-locked memory and with the tensor as it is."""
        reached, busy = self.measured.reached, self.measured.busy
        name, evidence = "one lane", "one lane {}, two lanes {}"
        if busy.get(LOCKED, 0.0) >= _BUSY:
            name, evidence = "CPU", f"{evidence}; one lane keeps {busy[LOCKED]:.0%} of a core busy"
        fix = f"{_TWO_LANES}, or search all settings: nvme-tune"
        found = self._step(name, LOCKED, two_lanes(LOCKED), evidence, fix)
        if busy.get(reached, 0.0) >= _BUSY:
            evidence = f"one lane keeps {busy[reached]:.0%} of a core busy at {{}}, two lanes reach {{}}"
            fix = f"{_TWO_LANES}, where the tensor has to stay what it is"
            found += self._step("CPU", reached, two_lanes(reached), evidence, fix)
        return found

    def _above_own(self, found: bool) -> list[Finding]:
        """Reports the gap between the ceiling and the best that page-locked memory and two lanes reach."""
        reached, own, busy = self.measured.reached, self.own, self.measured.busy.get(self.own, 0.0)
        if not self.faster(self.ceiling, own):
            evidence = f"{reached} {self.words(reached)}; no single step is beyond the noise"
            fix = "take more rounds to tell them apart: --rounds 9"
            return [] if found else [Finding("several small parts", 1.0, evidence, fix)]
        evidence = f"{own} {self.words(own)}, {self.ceiling} {self.words(self.ceiling)}"
        name, fix = "settings", "search all: nvme-tune"
        if self.measured.hindrances:
            refusals, fix = map("; ".join, zip(*self.measured.hindrances, strict=True))
            name, evidence = "what the system refuses", f"{evidence}; {refusals}"
        elif busy >= _BUSY:
            evidence += f"; it keeps {busy:.0%} of a core busy"
            name, fix = "CPU", "a larger block_size, and fewer other programs on this processor"
        return [self._finding(name, own, self.ceiling, evidence, fix)]
