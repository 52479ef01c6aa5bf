"""What nvme-tune finds, beside the best of an exhaustive sweep on the same device. docs/tune.md explains it.

1. The sweep: every combination of the values that nvme-tune searches, once in each of some rounds. Combinations are
   ranked by the median, over the rounds, of their rate divided by the round's median.
2. nvme-tune some times, each from the beginning, timed.
3. The winners, the best few of the sweep and the default in interleaved rounds. A winner is divided by the best of the
   sweep round by round. That best is chosen by these same rounds, which favours it a little.
"""

from __future__ import annotations

import itertools
import os
import statistics
import time
from argparse import Namespace
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

import nvme_ops
from benchmarks import command
from benchmarks.command import Program, Run
from nvme_ops.measure import tune
from nvme_ops.measure.files import filled
from nvme_ops.measure.rows import Row, Sample
from nvme_ops.measure.search import DEFAULT, Axis, Passes, axes, geometric_mean
from nvme_ops.measure.tables import Table
from nvme_ops.settings import Settings
from nvme_ops.text import MIB, size_words

GROUPS = {"tuning": "the winners of nvme-tune over the best of the sweep, and the best of the sweep over the default"}


def combinations(axes: Sequence[Axis]) -> list[Settings]:
    """Returns all settings that the axes span; everything else has its default."""
    names = [axis.name for axis in axes]
    every = itertools.product(*(axis.values for axis in axes))
    return [replace(DEFAULT, **dict(zip(names, values, strict=True))) for values in every]


def ranked(rows: Sequence[Row]) -> list[Row]:
    """Returns the rows, fastest first, by the median over the rounds of their rate divided by the round's median."""
    rates = [[sample.rate if sample else 0.0 for sample in row.samples] for row in rows]
    levels = [statistics.median(taken) for taken in zip(*rates, strict=True)]
    middle = [statistics.median(rate / level for rate, level in zip(row, levels, strict=True)) for row in rates]
    return [row for _, row in sorted(zip(middle, rows, strict=True), key=lambda each: -each[0])]


def tables(run: Run, scratch: str, _: dict[str, Any]) -> Iterator[Table]:
    """Takes all three steps in one folder."""
    given, path = run.given, os.path.join(scratch, "data")
    Path(path).touch()
    passes = Passes(path, filled(nvme_ops.empty(given.size, dtype=torch.uint8)), nvme_ops.aio_handle)
    passes.calibrate(1e9)  # with unlimited time: passes of --size

    def rows(tried: Iterable[Settings]) -> dict[Settings, Row]:
        def run_it(settings: Settings) -> Sample:
            rates = passes.measure(settings, True)
            return Sample(given.size / geometric_mean(rates.values()), given.size)

        return {each: Row(each.words(), lambda each=each: run_it(each)) for each in tried}  # type: ignore[misc]

    swept = rows(combinations(axes(len(os.sched_getaffinity(0)))))
    run.measure(list(swept.values()), given.sweep_rounds, warmups=0)
    names = [row.name for row in ranked(list(swept.values()))[: given.best]]
    best_few = [settings for settings, row in swept.items() if row.name in names]
    winners = []
    for number in range(given.repetitions):
        command.show_progress(f"nvme-tune, {number + 1} of {given.repetitions}")
        words = ["--folder", os.path.dirname(scratch), "--io_size", str(given.size), "--seconds", str(given.seconds)]
        start = time.perf_counter()
        winners.append((tune.tune(tune.parse(words), lambda _: None).best, time.perf_counter() - start))
    final = rows([DEFAULT, *best_few, *(settings for settings, _ in winners)])
    run.measure(list(final.values()))
    yield from compared(final, best_few, winners, f"{len(swept)} combinations, passes of {size_words(given.size)}")


def compared(
    final: dict[Settings, Row], best_few: list[Settings], winners: list[tuple[Settings, float]], words: str
) -> Iterator[Table]:
    """Yields each winner over the best of the sweep, with the seconds it took; and that best over the default."""
    default = final[DEFAULT]
    few = [final[settings] for settings in best_few]
    others = [row for row in few if row is not default]
    second = Table("sweep", f"the best of {words}, measured again", "GB/s", [default, *others], default.name, ())
    best = max(few, key=lambda row: statistics.median(second.against(row, default.name)))
    runs = [replace(final[settings], name=f"nvme-tune, run {number}", note=f"{final[settings].name}; {seconds:.0f} s")
            for number, (settings, seconds) in enumerate(winners, 1)]  # fmt: skip
    yield Table("winners", "nvme-tune's winners", "GB/s", [best, *runs], best.name, ())
    yield second


def check(given: Namespace) -> None:
    """Raises ValueError for sizes that nvme-tune does not take."""
    if given.size < 32 * MIB:
        raise ValueError("--size: at least 32M, or a pass mostly measures how it begins and ends")


_FLAGS = {
    "--sweep-rounds": ("of the sweep", 2),
    "--repetitions": ("of nvme-tune", 5),
    "--seconds": ("of each of them", 16.0, float),
    "--best": ("of the sweep that are measured again", 6),
}
PROGRAM = Program(GROUPS, tables, 2, _FLAGS, check, size="400M", rounds=9)
