"""The picture of a run: by number of devices, by swept settings, or by engine. Needs matplotlib."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from nvme_ops.bench.engines import ENGINES, FIO_BEST
from nvme_ops.bench.measure import Row, spread
from nvme_ops.bench.run import Result, contenders
from nvme_ops.bench.settings import Settings
from nvme_ops.bench.tables import plot as plot_tables
from nvme_ops.text import size_words


def plot(result: Result, path: str) -> bool:
    """Writes the picture; False when nothing was measured."""
    if not any(any(row.samples) for row in result.table.rows):
        return False
    if result.scaling and any(each.rate for each in result.scaling):
        _save(path, lambda axis: _by_devices(axis, result))
    elif any(name in ("block_size", "queue_depth", "intra_op_parallelism") for name in result.options.swept):
        _save(path, lambda axis: _by_setting(axis, result))
    else:
        return plot_tables({", ".join(result.places): [result.table]}, path)
    return True


def _save(path: str, draw: Any) -> None:
    import matplotlib  # type: ignore[import-not-found,unused-ignore]

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axis = pyplot.subplots(figsize=(8, 5))
    draw(axis)
    axis.set_ylabel("GB/s: median, least and most")
    axis.set_ylim(bottom=0)
    axis.grid(visible=True, alpha=0.3)
    axis.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def _by_devices(axis: Any, result: Result) -> None:
    for engine in dict.fromkeys(each.engine for each in result.scaling):
        found = [each for each in result.scaling if each.engine == engine and each.rate and each.alone]
        axis.plot([each.devices for each in found], [each.rate.median for each in found if each.rate],
                  marker="o", label=engine)  # fmt: skip
        axis.plot([each.devices for each in found], [each.alone.median for each in found if each.alone],
                  linestyle=":", color="gray")  # fmt: skip
    axis.plot([], [], linestyle=":", color="gray", label="sum of each device alone")
    axis.set_xlabel("devices at once")
    axis.set_xticks(sorted({each.devices for each in result.scaling}))
    axis.set_title(result.table.title, fontsize=10)


def _by_setting(axis: Any, result: Result) -> None:
    """The setting with the most values along the axis, a line for each combination of the others."""
    rows = {row.name: row for row in result.table.rows}
    points = [(each.engine, each.settings, rows[each.name]) for each in contenders(result.options)]
    numbers = [name for name in result.options.swept if name not in ("single_submit", "overlap_events")]
    along = max(numbers, key=lambda name: len({getattr(settings, name) for settings in result.options.settings}))
    ticks = sorted({getattr(settings, along) for settings in result.options.settings})
    lines: dict[str, list[tuple[int, Row]]] = {}
    for engine, settings, row in points:
        if engine != FIO_BEST:
            takes = ENGINES[engine].takes
            # an engine without the setting is as fast with any value of it
            places = [getattr(settings, along)] if along in takes else ticks
            swept = [name for name in result.options.swept if name in takes]
            lines.setdefault(_line_name(engine, settings, swept, along), []).extend((place, row) for place in places)
    for label, line in lines.items():
        _draw_line(axis, label, line, result)
    if (best := rows.get(FIO_BEST)) and (found := spread(result.table.values(best))):
        axis.axhline(found.median, linestyle="--", color="gray", label=FIO_BEST)
    axis.set_xscale("log", base=2)
    axis.set_xticks(ticks, [size_words(tick) if along == "block_size" else str(tick) for tick in ticks])
    axis.set_xlabel(along)
    axis.set_title(result.table.title, fontsize=10)


def _line_name(engine: str, settings: Settings, swept: Sequence[str], along: str) -> str:
    others = [f"{name} {getattr(settings, name)}" for name in swept if name != along]
    return ", ".join([engine, *others])


def _draw_line(axis: Any, label: str, line: list[tuple[int, Row]], result: Result) -> None:
    found = [(place, spread(result.table.values(row))) for place, row in sorted(line, key=lambda point: point[0])]
    known = [(place, each) for place, each in found if each is not None]
    axis.errorbar(
        [place for place, _ in known],
        [each.median for _, each in known],
        yerr=[[each.median - each.low for _, each in known], [each.high - each.median for _, each in known]],
        marker="o", capsize=2, label=label,
    )  # fmt: skip
