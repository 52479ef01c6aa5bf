"""Tables of rows, as text, JSON and pictures; and the outputs of a command."""

from __future__ import annotations

import json
import os
import sys
from argparse import Namespace
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nvme_ops.base.command_line import check_output, say, show
from nvme_ops.base.energy import total
from nvme_ops.base.text import GIB, columns_text, rounded, share_words, size_words
from nvme_ops.measure.picture import DRAWN, plot
from nvme_ops.measure.rows import Row, Sample, paired_ratios, spread

# Amount per second, or seconds, of one unit
RATES = {"GB/s": 1e9, "kIOPS": 1e3, "tokens/s": 1.0, "samples/s": 1.0, "samples": 1.0}
TIMES = {"us": 1e-6, "s": 1.0}

FROM_PAGE_CACHE = "from page cache"
ALONE = "the sum of each alone"  # by which rows of several devices are divided

_Column = tuple[Callable[[Sample], float | None], Callable[[float], str]]


def _per_gib(sample: Sample, value: float | None) -> float | None:
    return None if value is None else value * GIB / sample.amount


def ratio_words(value: float) -> str:
    """Returns a ratio, or another figure without a unit, in words."""
    return rounded(value, 3)


#: The columns that a table can have beside its unit: the value of a pass, and how to show the median. Those of further
#: figures are added where these are measured.
COLUMNS: dict[str, _Column] = {
    "end to end GB/s": (lambda run: run.end_to_end and run.amount / run.end_to_end / 1e9, lambda v: rounded(v, 4)),
    "CPU s/GiB": (lambda run: _per_gib(run, run.cpu_seconds), "{:.3f}".format),
    "peak memory": (lambda run: run.peak_bytes, size_words),
    FROM_PAGE_CACHE: (lambda run: run.from_page_cache, share_words),
    "submit us": (lambda run: run.submit_seconds and run.submit_seconds / 1e-6, ratio_words),
    "J/GiB": (lambda run: _per_gib(run, total(run.joules) if run.joules else None), ratio_words),
}


@dataclass
class Table:
    """Rows measured in the same rounds. ``reference`` names the row that the others are divided by."""

    group: str
    title: str
    unit: str
    rows: list[Row]
    reference: str = ""
    columns: Sequence[str] = ("CPU s/GiB", FROM_PAGE_CACHE)  # in COLUMNS; for rates, if a row has values
    peers: str = "DeepSpeed"  # what the rows named by ``Row.peer`` are called together

    def values(self, row: Row) -> list[float]:
        """Returns the row's rates, or times, in the table's unit."""
        taken = [sample for sample in row.samples if sample is not None]
        if self.unit in TIMES:
            return [sample.seconds / TIMES[self.unit] for sample in taken]
        return [sample.rate / RATES[self.unit] for sample in taken]

    def against(self, row: Row, name: str) -> list[float]:
        """Returns the row over the row ``name``, round by round: ratios of times if the unit is one, else of rates."""
        other: list[Sample | None] = next((entry.samples for entry in self.rows if entry.name == name), [])
        pair = (other, row.samples) if self.unit in TIMES else (row.samples, other)
        return paired_ratios(*pair)

    def known_columns(self) -> list[str]:
        """Returns the columns with any value; the page cache's only if something was read from there."""
        wanted = self.columns if self.unit in DRAWN else ()
        known = {name: [value for row in self.rows for value in values_of(row, name)] for name in wanted}
        return [name for name in wanted if (any(known[name]) if name == FROM_PAGE_CACHE else known[name])]


def values_of(row: Row, column: str) -> list[float]:
    """Returns the values of a row in a column, pass by pass, where there are any."""
    values = (COLUMNS[column][0](sample) for sample in row.samples if sample is not None)
    return [value for value in values if value is not None]


def as_json(table: Table) -> dict[str, Any]:
    """Returns a table with the figures of each round."""
    columns = table.known_columns()
    return {
        **{name: getattr(table, name) for name in ("group", "title", "unit", "reference", "peers")},
        "rows": [
            {
                **{name: getattr(row, name) for name in ("name", "note", "wrong", "peer")},
                "values": table.values(row),
                "spread": spread(table.values(row)),
                "columns": {name: spread(values_of(row, name)) for name in columns},
                "against_reference": spread(table.against(row, table.reference)),
                "against_peer": spread(table.against(row, row.peer)),
            }
            for row in table.rows
        ],
    }


Cells = dict[str, str]  # a row's text by column


def cells(document: Mapping[str, Any]) -> list[Cells]:
    """Returns the rows of an ``as_json`` as text: medians, with the minimum and maximum in brackets."""
    unit, reference = document["unit"], document["reference"]
    made = []
    for row in document["rows"]:
        figures = row["spread"]
        value = {f"{unit} (min - max)": with_range(figures, 4)}
        columns = {name: COLUMNS[name][1](cell["median"]) if cell else "-" for name, cell in row["columns"].items()}
        ratio = "-" if row["name"] == reference else with_range(row["against_reference"], 3)
        ratios = {f"/ {reference}": ratio, f"/ {document['peers']}": with_range(row["against_peer"], 3)}
        made.append({"": row["name"], **value, **columns, **ratios, "note": row["note"]})
    return used_columns(made)


def used_columns(rows: Iterable[Cells]) -> list[Cells]:
    """Returns the rows without columns that are empty in all of them; the first column stays."""
    rows = list(rows)
    first, *names = dict.fromkeys(name for row in rows for name in row) or [""]
    kept = [first, *(name for name in names if any(row.get(name, "-") not in ("", "-") for row in rows))]
    return [{name: row.get(name, "-") for name in kept} for row in rows]


def as_text(table: Table) -> str:
    """Returns the title and the rows."""
    return f"{table.title}\n{cells_text(cells(as_json(table)))}"


def cells_text(rows: Sequence[Cells]) -> str:
    """Returns the rows as aligned text; notes have no heading."""
    head = ["" if name == "note" else name for name in rows[0]] if rows else []
    return columns_text([head, *(list(row.values()) for row in rows)])


def with_range(figures: Mapping[str, float] | None, digits: int) -> str:
    """Returns the median and, in brackets, minimum and maximum of a ``spread``; ``-`` for nothing."""
    if figures is None:
        return "-"
    median, low, high = (rounded(figures[name], digits) for name in ("median", "min", "max"))
    return f"{median} ({low} - {high})"


# The outputs of a command


def add_outputs(add: Callable[..., Any], kinds: str) -> None:
    """Adds ``--json`` and ``--output``. ``kinds``: the endings that a file can have, in words."""
    add("--json", action="store_true", help="JSON on standard output, instead of text")
    words = f"also write this file, by its ending: {kinds}; may be repeated"
    add("--output", action="append", default=[], metavar="FILE", help=words)


def check_outputs(files: Sequence[str], pictures: bool = False) -> None:
    """Raises ValueError if a file cannot be written, before any work is done. Without ``pictures``, only JSON can."""
    for file in files:
        check_output("--output", file)
        ending = os.path.splitext(file)[1].lower()
        if ending == ".json":
            continue
        if not pictures:
            raise ValueError(f"--output {file}: a file's name ends with .json")
        try:
            from matplotlib.backend_bases import FigureCanvasBase  # type: ignore[import-not-found,unused-ignore]
        except ImportError:
            raise ValueError(f"--output {file}: a picture needs matplotlib: pip install matplotlib") from None
        kinds = [f".{kind}" for kind in sorted(FigureCanvasBase.get_supported_filetypes())]
        if ending not in kinds:
            raise ValueError(f"--output {file}: a file's name ends with one of .json, {', '.join(kinds)}")


def deliver(args: Namespace, document: Mapping[str, Any], text: str) -> None:
    """Prints the text, or with ``--json`` the document, and writes the files of ``--output``."""
    written = json.dumps(document, indent=2) + "\n"
    if args.json:
        sys.stdout.write(written)
    elif text:
        show(text)
    for file in args.output:
        if file.lower().endswith(".json"):
            Path(file).write_text(written, encoding="utf-8")
        elif not plot(document, file):
            say(f"{file}: nothing to plot: no throughput was measured")


def show_progress(words: str) -> None:
    """Shows a line that the next one overwrites, on a terminal only."""
    if sys.stderr.isatty():
        sys.stderr.write(f"\r\033[K{words}")
        sys.stderr.flush()
