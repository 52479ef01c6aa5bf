"""Tables of rows: as text, as JSON, as a plot."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from benchmarks.measure import Row, Sample, Spread, paired_ratios, spread

# Amount per second, or seconds, of one unit
RATES = {"GB/s": 1e9, "kIOPS": 1e3}
TIMES = {"us": 1e-6, "s": 1.0}


@dataclass
class Table:
    """Rows measured in the same rounds. ``reference`` names the row that the others are divided by."""

    group: str
    title: str
    unit: str
    rows: list[Row]
    reference: str = ""

    def values(self, row: Row) -> list[float]:
        """What the row measured, in the table's unit."""
        taken = [sample for sample in row.samples if sample is not None]
        if self.unit in TIMES:
            return [sample.seconds / TIMES[self.unit] for sample in taken]
        return [sample.rate / RATES[self.unit] for sample in taken]

    def against(self, row: Row, name: str) -> list[float]:
        """Round by round the row over the row ``name``; of times where the unit is one, else of rates."""
        other: list[Sample | None] = next((each.samples for each in self.rows if each.name == name), [])
        pair = (other, row.samples) if self.unit in TIMES else (row.samples, other)
        return paired_ratios(*pair)


def as_text(table: Table) -> str:
    """Medians, and in brackets between which values they lie."""
    peers = any(table.against(row, row.peer) for row in table.rows)
    cpu = table.unit == "GB/s"
    head = ["", f"{table.unit} (min - max)"]
    head += ["CPU s/GiB"] if cpu else []
    head += [f"/ {table.reference}"] if table.reference else []
    head += ["/ DeepSpeed"] if peers else []
    lines = [[*head, ""]]
    for row in table.rows:
        line = [row.name, _with_range(spread(table.values(row)), 4)]
        if cpu:
            used = spread([sample.cpu_per_gib for sample in row.samples if sample and sample.cpu_per_gib is not None])
            line.append(f"{used.median:.3f}" if used else "-")
        if table.reference:
            ratios = [] if row.name == table.reference else table.against(row, table.reference)
            line.append(_with_range(spread(ratios), 3))
        if peers:
            line.append(_with_range(spread(table.against(row, row.peer)), 3))
        lines.append([*line, row.note])
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    body = "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines
    )
    return f"{table.title}\n{body}"


def as_json(table: Table) -> dict[str, Any]:
    """Everything that the text shows, and each round's figures."""
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
                "spread": _plain(spread(table.values(row))),
                "cpu_seconds_per_gib": [sample.cpu_per_gib for sample in row.samples if sample is not None]
                if table.unit == "GB/s"
                else [],
                "against_reference": _plain(spread(table.against(row, table.reference))),
                "peer": row.peer,
                "against_peer": _plain(spread(table.against(row, row.peer))),
            }
            for row in table.rows
        ],
    }


def plot(tables: dict[str, list[Table]], path: str) -> bool:
    """Bars of the throughput tables, one picture for all folders; False when there is none. Needs matplotlib."""
    import matplotlib  # type: ignore[import-not-found,unused-ignore]

    matplotlib.use("Agg")
    from matplotlib import pyplot

    shown = [(folder, table) for folder, group in tables.items() for table in group if table.unit == "GB/s"]
    if not shown:
        return False
    figure, axes = pyplot.subplots(
        len(shown), 1, figsize=(9, 1 + sum(0.3 * len(table.rows) + 0.8 for _, table in shown)), squeeze=False,
        gridspec_kw={"height_ratios": [len(table.rows) + 1 for _, table in shown]},
    )  # fmt: skip
    for axis, (folder, table) in zip(axes[:, 0], shown, strict=True):
        for place, row in enumerate(table.rows):
            found = spread(table.values(row))
            if found:
                error = [[found.median - found.low], [found.high - found.median]]
                colour = "tab:orange" if row.name.startswith("nvme_ops") else "tab:gray"
                axis.barh(place, found.median, xerr=error, color=colour, ecolor="black", capsize=2)
        axis.set_yticks(range(len(table.rows)), [row.name for row in table.rows])
        axis.invert_yaxis()
        axis.set_title(f"{table.title} ({folder})", loc="left", fontsize=10)
        axis.set_xlabel("GB/s: median, least and most")
    figure.tight_layout()
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
    return True


def _with_range(found: Spread | None, digits: int) -> str:
    if found is None:
        return "-"
    return f"{_short(found.median, digits)} ({_short(found.low, digits)} - {_short(found.high, digits)})"


def _short(value: float, digits: int) -> str:
    """At most so many significant digits, never an exponent: 2.713, 41.2, 1234."""
    whole = len(str(int(abs(value))))
    return f"{value:.{max(0, digits - whole)}f}"


def _plain(found: Spread | None) -> dict[str, float] | None:
    return None if found is None else {"median": found.median, "min": found.low, "max": found.high}
