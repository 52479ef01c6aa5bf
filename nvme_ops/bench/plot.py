"""Plots a run: by number of devices, by swept settings, or by engine. Needs matplotlib."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from nvme_ops.bench.engines import ENGINES, FIO_BEST
from nvme_ops.bench.measure import Spread, spread
from nvme_ops.bench.run import BenchResult, contenders
from nvme_ops.bench.tables import plot as plot_tables
from nvme_ops.text import size_words


def plot(result: BenchResult, path: str) -> bool:
    """Writes the picture; returns False if nothing was measured."""
    if not any(any(row.samples) for row in result.table.rows):
        return False
    by_devices = any(each.rate for each in result.scaling)
    numbers = [name for name in result.options.swept if name in ("block_size", "queue_depth", "intra_op_parallelism")]
    if not by_devices and not numbers:
        return plot_tables({", ".join(result.places): [result.table]}, path)
    from matplotlib.figure import Figure  # type: ignore[import-not-found,unused-ignore]

    figure = Figure(figsize=(8, 5), layout="tight")
    axis = figure.subplots()
    if by_devices:
        _by_devices(axis, result)
    else:
        _by_setting(axis, result, numbers)
    axis.set_title(result.table.title, fontsize=10)
    axis.set_ylabel("GB/s: median, least and most")
    axis.set_ylim(bottom=0)
    axis.grid(visible=True, alpha=0.3)
    axis.legend(fontsize=8)
    figure.savefig(path, dpi=150)
    return True


def _by_devices(axis: Any, result: BenchResult) -> None:
    for engine in dict.fromkeys(each.engine for each in result.scaling):
        found = [each for each in result.scaling if each.engine == engine]
        for rates, style in (
            ([each.rate for each in found], {"marker": "o", "label": engine}),
            ([each.alone for each in found], {"linestyle": ":", "color": "gray"}),
        ):
            known = [(each.devices, rate.median) for each, rate in zip(found, rates, strict=True) if rate]
            axis.plot([devices for devices, _ in known], [rate for _, rate in known], **style)
    axis.plot([], [], linestyle=":", color="gray", label="sum of each device alone")
    axis.set_xlabel("devices at once")
    axis.set_xticks(sorted({each.devices for each in result.scaling}))


def _by_setting(axis: Any, result: BenchResult, numbers: Sequence[str]) -> None:
    """Plots the setting with the most values along the axis, a line for each combination of the others."""
    found = {row.name: spread(result.table.values(row)) for row in result.table.rows}
    along = max(numbers, key=lambda name: len({getattr(settings, name) for settings in result.options.settings}))
    ticks = sorted({getattr(settings, along) for settings in result.options.settings})
    lines: dict[str, list[tuple[int, Spread]]] = {}
    for each in contenders(result.options):
        if each.engine != FIO_BEST and (rates := found[each.name]):
            swept = [name for name in result.options.swept if name in ENGINES[each.engine].takes]
            # an engine without the setting is as fast with any value of it
            places = [getattr(each.settings, along)] if along in swept else ticks
            others = [f"{name} {getattr(each.settings, name)}" for name in swept if name != along]
            lines.setdefault(", ".join([each.engine, *others]), []).extend((place, rates) for place in places)
    for label, points in lines.items():
        points.sort(key=lambda point: point[0])
        medians = [each.median for _, each in points]
        below, above = ([each.median - each.low for _, each in points], [each.high - each.median for _, each in points])
        axis.errorbar([place for place, _ in points], medians, [below, above], marker="o", capsize=2, label=label)
    if best := found.get(FIO_BEST):
        axis.axhline(best.median, linestyle="--", color="gray", label=FIO_BEST)
    axis.set_xscale("log", base=2)
    axis.set_xticks(ticks, [size_words(tick) if along == "block_size" else str(tick) for tick in ticks])
    axis.set_xlabel(along)
