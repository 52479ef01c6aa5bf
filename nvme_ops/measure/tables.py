"""Tables of rows: as text, as JSON, as pictures; and where a command puts what it found."""

from __future__ import annotations

import itertools
import json
import math
import os
import sys
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nvme_ops.arguments import check_output
from nvme_ops.measure.energy import total
from nvme_ops.measure.rows import Row, Sample, Spread, paired_ratios, spread
from nvme_ops.text import GIB, columns_text, rounded, share_words, size_words

# Amount per second, or seconds, of one unit
RATES = {"GB/s": 1e9, "kIOPS": 1e3, "tokens/s": 1.0, "samples/s": 1.0, "samples": 1.0, "bytes": 1.0}
TIMES = {"us": 1e-6, "s": 1.0}
_DRAWN = ("GB/s", "tokens/s", "samples/s")  # units of tables with more columns, and a picture
_WIDTH = 7.5  # inches of a column of pictures
_OURS = ("nvme_ops", "aio_handle", "gds_handle")  # how rows of this package begin

FROM_PAGE_CACHE = "from page cache"

_Column = tuple[Callable[[Sample], float | None], Callable[[float], str]]


def _figure(name: str, words: Callable[[float], str]) -> _Column:
    return lambda each: each.figures.get(name), words


def _seconds(value: float) -> str:
    return f"{rounded(value, 3)} s"


def _bytes(value: float) -> str:
    return size_words(int(value))


def _ratio(value: float) -> str:
    return rounded(value, 3)


#: What a table can tell beside its unit: of each pass a value, and how its median is written.
COLUMNS: dict[str, _Column] = {
    "end to end GB/s": (lambda each: each.end_to_end and each.amount / each.end_to_end / 1e9, lambda v: rounded(v, 4)),
    "CPU s/GiB": (lambda each: each.cpu_per_gib, "{:.3f}".format),
    "peak memory": (lambda each: each.peak_bytes, _bytes),
    FROM_PAGE_CACHE: (lambda each: each.from_page_cache, share_words),
    "submit us": (lambda each: each.submit_seconds and each.submit_seconds / 1e-6, _ratio),
    "J/GiB": (lambda each: total(each.joules) * GIB / each.amount if each.joules else None, _ratio),
    "of the bound": _figure("of the bound", share_words),
    **{name: _figure(name, _seconds) for name in ("step", "first token", "load", "forward", "backward", "optimizer")},
    **{
        name: _figure(name, _bytes)
        for name in ("read per step", "written per step", "read and written", "while decoding")
    },
    "GB/s": _figure("GB/s", _ratio),
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
    peers: str = "DeepSpeed"  # what the rows named by ``Row.peer`` are called together

    def values(self, row: Row) -> list[float]:
        """Returns what the row measured, in the table's unit."""
        taken = [sample for sample in row.samples if sample is not None]
        if self.unit in TIMES:
            return [sample.seconds / TIMES[self.unit] for sample in taken]
        return [sample.rate / RATES[self.unit] for sample in taken]

    def words(self, found: Spread | None) -> str:
        """Returns a spread of values."""
        if self.unit == "bytes":
            return _bytes(found.median) if found else "unknown"
        return with_range(found, 4)

    def against(self, row: Row, name: str) -> list[float]:
        """Returns the row over the row ``name``, round by round; a ratio of times if the unit is one, else of rates."""
        other: list[Sample | None] = next((each.samples for each in self.rows if each.name == name), [])
        pair = (other, row.samples) if self.unit in TIMES else (row.samples, other)
        return paired_ratios(*pair)

    def known_columns(self) -> list[str]:
        """Returns the columns with any value; the page cache's only if something was read from there."""
        wanted = self.columns if self.unit in _DRAWN else ()
        known = {name: [value for row in self.rows for value in values_of(row, name)] for name in wanted}
        return [name for name in wanted if (any(known[name]) if name == FROM_PAGE_CACHE else known[name])]


def values_of(row: Row, column: str) -> list[float]:
    """Returns what a row has of a column, pass by pass."""
    values = (COLUMNS[column][0](sample) for sample in row.samples if sample is not None)
    return [value for value in values if value is not None]


def as_text(table: Table) -> str:
    """Returns medians, with the minimum and maximum in brackets."""
    peers = any(table.against(row, row.peer) for row in table.rows)
    columns = table.known_columns()
    head = ["", table.unit if table.unit == "bytes" else f"{table.unit} (min - max)", *columns]
    head += [f"/ {table.reference}"] if table.reference else []
    head += [f"/ {table.peers}"] if peers else []
    lines = [[*head, ""]]
    for row in table.rows:
        line = [row.name, table.words(spread(table.values(row)))]
        for name in columns:
            found = spread(values_of(row, name))
            line.append(COLUMNS[name][1](found.median) if found else "-")
        if table.reference:
            ratios = [] if row.name == table.reference else table.against(row, table.reference)
            line.append(with_range(spread(ratios), 3))
        if peers:
            line.append(with_range(spread(table.against(row, row.peer)), 3))
        lines.append([*line, row.note])
    return f"{table.title}\n{columns_text(lines)}"


def as_json(table: Table) -> dict[str, Any]:
    """Returns everything in the text, and each round's figures."""
    return {
        **{name: getattr(table, name) for name in ("group", "title", "unit", "reference", "peers")},
        "rows": [
            {
                **{name: getattr(row, name) for name in ("name", "note", "wrong", "peer")},
                "values": table.values(row),
                "spread": plain(spread(table.values(row))),
                "columns": {name: plain(spread(values_of(row, name))) for name in table.known_columns()},
                "against_reference": plain(spread(table.against(row, table.reference))),
                "against_peer": plain(spread(table.against(row, row.peer))),
            }
            for row in table.rows
        ],
    }


def with_range(found: Spread | None, digits: int) -> str:
    """Returns the median and, in brackets, minimum and maximum; ``-`` for nothing."""
    if found is None:
        return "-"
    return f"{rounded(found.median, digits)} ({rounded(found.low, digits)} - {rounded(found.high, digits)})"


def plain(found: Spread | None) -> dict[str, float] | None:
    """Returns a value for JSON."""
    return None if found is None else {"median": found.median, "min": found.low, "max": found.high}


# Pictures, which need matplotlib


def plot(tables: Mapping[str, Sequence[Table]], path: str) -> bool:
    """Draws bars of the throughput tables, one picture for all folders; False if there are none.

    The tables are arranged in as many columns as make the picture about as high as it is wide.
    """
    from matplotlib.figure import Figure  # type: ignore[import-not-found,unused-ignore]

    shown = [(folder, table) for folder, group in tables.items() for table in group if table.unit in _DRAWN]
    if not any(table.values(row) for _, table in shown for row in table.rows):
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


@dataclass
class Lines:
    """GB/s along a setting or a number of devices: ``lines`` are measured, ``bounds`` drawn without marks."""

    title: str
    label: str  # of the axis
    lines: dict[str, list[tuple[float, Spread]]]
    bounds: dict[str, list[tuple[float, float]]] = field(default_factory=dict)
    ticks: dict[float, str] = field(default_factory=dict)
    doubling: bool = False


def plot_lines(panels: Sequence[Lines], path: str) -> None:
    """Draws panels beside each other, over one scale of GB/s."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(2 + 6 * len(panels), 5), layout="tight")
    for axis, panel in zip(figure.subplots(1, len(panels), squeeze=False, sharey=True)[0], panels, strict=True):
        for label, points in panel.lines.items():
            points = sorted(points, key=lambda point: point[0])
            low = [each.median - each.low for _, each in points]
            high = [each.high - each.median for _, each in points]
            places, medians = [place for place, _ in points], [each.median for _, each in points]
            axis.errorbar(places, medians, [low, high], marker="o", capsize=2, label=label)
        for label, bound in panel.bounds.items():
            axis.plot(*zip(*bound, strict=True), linestyle=":", color="gray", label=label)
        if panel.doubling:
            axis.set_xscale("log", base=2)
        axis.set_xticks(list(panel.ticks), list(panel.ticks.values()))
        axis.set(title=panel.title, xlabel=panel.label, ylabel="GB/s: median, least and most", ylim=(0, None))
        axis.grid(visible=True, alpha=0.3)
        axis.legend(fontsize=8)
    figure.savefig(path, dpi=100)


# Where a command puts what it found


def add_outputs(add: Callable[..., Any], kinds: str) -> None:
    """Adds ``--json`` and ``--output``. ``kinds``: endings of the files that there are, in words."""
    add("--json", action="store_true", help="JSON on standard output, instead of text")
    words = f"also to this file, by its ending: {kinds}; may be repeated"
    add("--output", action="append", default=[], metavar="FILE", help=words)


def check_outputs(files: Sequence[str], *endings: str, pictures: bool = False) -> None:
    """Raises ValueError if a file cannot be written, before any work is done; ``endings``: .json, ..."""
    for file in files:
        check_output("--output", file)
        ending = os.path.splitext(file)[1].lower()
        if ending in endings:
            continue
        if not pictures:
            raise ValueError(f"--output {file}: a file's name ends with {' or '.join(endings)}")
        try:
            from matplotlib.backend_bases import FigureCanvasBase  # type: ignore[import-not-found,unused-ignore]
        except ImportError:
            raise ValueError(f"--output {file}: a picture needs matplotlib: pip install matplotlib") from None
        kinds = [*endings, *(f".{kind}" for kind in sorted(FigureCanvasBase.get_supported_filetypes()))]
        if ending not in kinds:
            raise ValueError(f"--output {file}: a file's name ends with one of {', '.join(kinds)}")


def write_outputs(
    files: Sequence[str], picture: Callable[[str], bool] = lambda _: True, **texts: Callable[[], str]
) -> bool:
    """Writes each file: ``texts`` by its ending, else the picture; False if there was nothing to draw."""
    drawn = True
    for file in files:
        make = texts.get(os.path.splitext(file)[1][1:].lower())
        if make is None:
            drawn = picture(file)
        else:
            Path(file).write_text(make(), encoding="utf-8")
    return drawn


def document_text(document: Mapping[str, Any]) -> str:
    """Returns a JSON document as it is printed and written."""
    return json.dumps(document, indent=2) + "\n"


def show_progress(words: str) -> None:
    """One line that is written over, on a terminal only."""
    if sys.stderr.isatty():
        sys.stderr.write(f"\r\033[K{words}")
        sys.stderr.flush()
