"""Formats tables of rows: as text, as JSON, as a plot."""

from __future__ import annotations

import itertools
import math
import os
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from nvme_ops.bench.measure import Row, Sample, Spread, paired_ratios, spread
from nvme_ops.measuring.energy import total
from nvme_ops.text import GIB, columns_text, rounded, share_words, size_words

# Amount per second, or seconds, of one unit
RATES = {"GB/s": 1e9, "kIOPS": 1e3, "tokens/s": 1.0, "samples/s": 1.0, "samples": 1.0}
TIMES = {"us": 1e-6, "s": 1.0}
_DRAWN = ("GB/s", "tokens/s", "samples/s")  # units of tables with more columns, and a plot
_WIDTH = 7.5  # inches of a column of pictures
_OURS = ("nvme_ops", "aio_handle", "gds_handle")  # how rows of this package begin

FROM_PAGE_CACHE = "from page cache"

_Column = tuple[Callable[[Sample], float | None], Callable[[float], str]]


def _seconds(name: str) -> _Column:
    return lambda each: each.figures.get(name), lambda value: f"{rounded(value, 3)} s"


def _bytes(name: str) -> _Column:
    return lambda each: each.figures.get(name), lambda value: size_words(int(value))


#: What a table can tell beside its unit: of each pass a value, and how its median is written.
COLUMNS: dict[str, _Column] = {
    "end to end GB/s": (lambda each: each.end_to_end and each.amount / each.end_to_end / 1e9, lambda v: rounded(v, 4)),
    "CPU s/GiB": (lambda each: each.cpu_per_gib, "{:.3f}".format),
    "peak memory": (lambda each: each.peak_bytes, lambda value: size_words(int(value))),
    FROM_PAGE_CACHE: (lambda each: each.from_page_cache, share_words),
    "submit us": (lambda each: each.submit_seconds and each.submit_seconds / 1e-6, lambda v: rounded(v, 3)),
    "J/GiB": (lambda each: total(each.joules) * GIB / each.amount if each.joules else None, lambda v: rounded(v, 3)),
    "of the bound": (lambda each: each.figures.get("of the bound"), share_words),
    **{name: _seconds(name) for name in ("step", "first token", "load", "forward", "backward", "optimizer")},
    **{name: _bytes(name) for name in ("read per step", "written per step", "read and written", "while decoding")},
    "GB/s": (lambda each: each.figures.get("GB/s"), lambda value: rounded(value, 3)),
}


@dataclass
class Table:
    """Rows measured in the same rounds. ``reference`` names the row that the others are divided by."""

    group: str
    title: str
    unit: str
    rows: list[Row]
    reference: str = ""
    columns: Sequence[str] = ("CPU s/GiB", FROM_PAGE_CACHE)  # those of COLUMNS that a row has; for rates of bytes

    def values(self, row: Row) -> list[float]:
        """Returns what the row measured, in the table's unit."""
        taken = [sample for sample in row.samples if sample is not None]
        if self.unit in TIMES:
            return [sample.seconds / TIMES[self.unit] for sample in taken]
        return [sample.rate / RATES[self.unit] for sample in taken]

    def against(self, row: Row, name: str) -> list[float]:
        """Returns the row over the row ``name``, round by round; a ratio of times if the unit is one, else of rates."""
        other: list[Sample | None] = next((each.samples for each in self.rows if each.name == name), [])
        pair = (other, row.samples) if self.unit in TIMES else (row.samples, other)
        return paired_ratios(*pair)


def as_text(table: Table) -> str:
    """Returns medians, with the minimum and maximum in brackets."""
    peers = any(table.against(row, row.peer) for row in table.rows)
    columns = _columns(table)
    head = ["", f"{table.unit} (min - max)", *columns]
    head += [f"/ {table.reference}"] if table.reference else []
    head += ["/ DeepSpeed"] if peers else []
    lines = [[*head, ""]]
    for row in table.rows:
        line = [row.name, with_range(spread(table.values(row)), 4)]
        for name in columns:
            found = spread(_values_of(row, name))
            line.append(COLUMNS[name][1](found.median) if found else "-")
        if table.reference:
            ratios = [] if row.name == table.reference else table.against(row, table.reference)
            line.append(with_range(spread(ratios), 3))
        if peers:
            line.append(with_range(spread(table.against(row, row.peer)), 3))
        lines.append([*line, row.note])
    return f"{table.title}\n{columns_text(lines)}"


def _columns(table: Table) -> list[str]:
    """Returns the columns with any value; the page cache's only if something was read from there."""
    wanted = table.columns if table.unit in _DRAWN else ()
    known = {name: [value for row in table.rows for value in _values_of(row, name)] for name in wanted}
    return [name for name in wanted if (any(known[name]) if name == FROM_PAGE_CACHE else known[name])]


def _values_of(row: Row, column: str) -> list[float]:
    values = (COLUMNS[column][0](sample) for sample in row.samples if sample is not None)
    return [value for value in values if value is not None]


def as_json(table: Table) -> dict[str, Any]:
    """Returns everything in the text, and each round's figures."""
    return {
        "group": table.group,
        "title": table.title,
        "unit": table.unit,
        "reference": table.reference,
        "rows": [
            {
                "name": row.name,
                "note": row.note,
                "wrong": row.wrong,
                "values": table.values(row),
                "spread": plain(spread(table.values(row))),
                "cpu_seconds_per_gib": [sample.cpu_per_gib for sample in row.samples if sample is not None]
                if table.unit == "GB/s"
                else [],
                "against_reference": plain(spread(table.against(row, table.reference))),
                "columns": {name: plain(spread(_values_of(row, name))) for name in _columns(table)},
                "peer": row.peer,
                "against_peer": plain(spread(table.against(row, row.peer))),
            }
            for row in table.rows
        ],
    }


def plot(tables: dict[str, list[Table]], path: str) -> bool:
    """Plots bars of the throughput tables, one picture for all folders; False if there are none. Needs matplotlib.

    The tables are arranged in as many columns as make the picture about as high as it is wide.
    """
    from matplotlib.figure import Figure  # type: ignore[import-not-found,unused-ignore]

    shown = [(folder, table) for folder, group in tables.items() for table in group if table.unit in _DRAWN]
    if not shown:
        return False
    columns = _in_columns(shown)
    most = max(sum(_height(table) for _, table in column) for column in columns)
    figure = Figure(figsize=(_WIDTH * len(columns), most), layout="constrained")
    for part, column in zip(figure.subfigures(1, len(columns), squeeze=False)[0], columns, strict=True):
        heights = [_height(table) for _, table in column]
        *axes, rest = part.subplots(len(column) + 1, 1, height_ratios=[*heights, most - sum(heights) + 0.01])
        rest.remove()
        for axis, (folder, table) in zip(axes, column, strict=True):
            _draw(axis, table, folder if len(tables) > 1 else "")
    figure.savefig(path, dpi=80 if len(columns) == 1 else 56, bbox_inches="tight")
    return True


def _height(table: Table) -> float:
    return 0.28 * len(table.rows) + 1.1


def _in_columns(shown: Sequence[tuple[str, Table]]) -> list[list[tuple[str, Table]]]:
    """Arranges the tables, in order, in columns of about equal height."""
    heights = [_height(table) for _, table in shown]
    count = max(1, min(len(shown), round(math.sqrt(sum(heights) / _WIDTH))))
    columns: list[list[tuple[str, Table]]] = [[] for _ in range(count)]
    for each, height, end in zip(shown, heights, itertools.accumulate(heights), strict=True):
        columns[int(count * (end - height / 2) / sum(heights))].append(each)
    return [column for column in columns if column]


def _draw(axis: Any, table: Table, folder: str) -> None:
    for place, row in enumerate(table.rows):
        found = spread(table.values(row))
        if found:
            error = [[found.median - found.low], [found.high - found.median]]
            colour = "tab:orange" if row.name.startswith(_OURS) else "tab:gray"
            axis.barh(place, found.median, xerr=error, color=colour, ecolor="black", capsize=2)
    axis.set_yticks(range(len(table.rows)), [row.name for row in table.rows])
    axis.invert_yaxis()
    title = f"{table.title}; {os.path.basename(folder.rstrip('/')) or folder}" if folder else table.title
    axis.set_title("\n".join(textwrap.wrap(title, 70)), loc="left", fontsize=10)
    axis.set_xlabel(f"{table.unit}: median, least and most", fontsize=9)


def with_range(found: Spread | None, digits: int) -> str:
    """Returns the median and, in brackets, minimum and maximum; ``-`` for nothing."""
    if found is None:
        return "-"
    return f"{rounded(found.median, digits)} ({rounded(found.low, digits)} - {rounded(found.high, digits)})"


def plain(found: Spread | None) -> dict[str, float] | None:
    """Returns a value for JSON."""
    return None if found is None else {"median": found.median, "min": found.low, "max": found.high}
