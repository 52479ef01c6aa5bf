"""Formats a run of ``nvme-bench``: text, JSON, CSV."""

from __future__ import annotations

import csv
import io
from dataclasses import asdict
from typing import Any

from nvme_ops.bench.measure import PERCENTILES, Row, spread
from nvme_ops.bench.run import BenchResult
from nvme_ops.bench.tables import as_json, as_text, plain, with_range
from nvme_ops.measuring.energy import total
from nvme_ops.text import GIB, columns_text, rounded, share_words


def text(result: BenchResult) -> str:
    """Returns the run as text."""
    about = {"": result.machine, **{f"{folder}: ": place for folder, place in result.places.items()}}
    parts = [
        "\n".join(label + "; ".join(map(" ".join, words.items())) for label, words in about.items()),
        as_text(result.table),
        _page_cache_text(result),
        _blocks_text(result) if result.blocks else "",
        _scaling_text(result) if result.scaling else "",
        ds_io_lines(result),
        f"energy: {result.energy}" if result.energy else "",
        verdict(result),
        "interrupted: this is what was measured until then; the files are removed" if result.interrupted else "",
    ]
    return "\n\n".join(filter(None, parts))


def verdict(result: BenchResult) -> str:
    """Returns in one line which row is the fastest, and which others were no slower in some round."""
    table = result.table
    rates = {row.name: found for row in table.rows if (found := spread(table.values(row)))}
    measured = [row for row in table.rows if row.name in rates and row.name != table.reference]
    if not measured:
        return ""
    best = max(measured, key=lambda row: rates[row.name].median)
    words = f"{best.name}: {rounded(rates[best.name].median, 4)} GB/s"
    if against := spread(table.against(best, table.reference)):
        words += f", {rounded(against.median, 3)} of {table.reference}"
    others = [row.name for row in measured if row is not best and max(table.against(row, best.name), default=0) >= 1]
    words = f"fastest: {words}" if len(measured) > 1 else words
    return f"{words}; as fast in some round: {'; '.join(others)}" if others else words


def from_page_cache(row: Row) -> float | None:
    """Returns the share of a row's bytes that came from the page cache; None for writes and reads that bypass it."""
    known = [each for each in row.samples if each is not None and each.from_page_cache is not None]
    cached = sum((each.from_page_cache or 0) * each.amount for each in known)
    return cached / sum(each.amount for each in known) if known else None


def _page_cache_text(result: BenchResult) -> str:
    shares = {row.name: from_page_cache(row) for row in result.table.rows}
    found = ", ".join(f"{name} {share_words(share)}" for name, share in shares.items() if share)
    return f"read from the page cache: {found}. So far memory was measured, not the device." if found else ""


def ds_io_lines(result: BenchResult) -> str:
    """Returns latency and speed of the task and end to end, as ds_io reports them, of all passes; its GB are GiB."""
    direction = "Write" if result.options.write else "Read"
    measured = [row for row in result.table.rows if any(row.samples) and row.name != result.table.reference]
    if not measured:
        return ""
    figures = {row.name: ds_io_figures(row) for row in measured}
    if len(measured) > 1:
        head = ["as ds_io counts (GB = GiB)", *next(iter(figures.values()))]
        lines = [[name, *(f"{value:.4g}" for value in row.values())] for name, row in figures.items()]
        return columns_text([head, *lines])
    split = ((*name.split(), value) for name, value in figures[measured[0].name].items())
    return "\n".join(f"{kind} {direction} {what} = {value} {unit}" for kind, what, unit, value in split)


def ds_io_figures(row: Row) -> dict[str, float]:
    """Sums up the passes that succeeded."""
    samples = [sample for sample in row.samples if sample is not None]
    amount = sum(sample.amount for sample in samples) / GIB
    task = sum(sample.seconds for sample in samples)
    end_to_end = sum(sample.seconds if sample.end_to_end is None else sample.end_to_end for sample in samples)
    return {
        "Task Latency sec": task,
        "Task Speed GB/sec": amount / task,
        "E2E Latency sec": end_to_end,
        "E2E Speed GB/sec": amount / end_to_end,
    }


def _blocks_text(result: BenchResult) -> str:
    head = ["us", *(f"p{100 * share:g}" for share in PERCENTILES), "submit p50", "submit p99", ""]
    lines = [head]
    for name, times in result.blocks.items():
        submit = [f"{1e6 * times.submit[share]:.1f}" if times.submit else "-" for share in (0.5, 0.99)]
        complete = [f"{1e6 * times.complete[share]:.0f}" for share in PERCENTILES]
        lines.append([name, *complete, *submit, f"{times.count} blocks"])
    what, cached = "write" if result.options.write else "read", ", from the page cache" if result.options.cached else ""
    title = f"latency of single blocks, {what} at random places, one after the other{cached}"
    return f"{title}\n{columns_text(lines)}"


def _scaling_text(result: BenchResult) -> str:
    lines = [["", "devices", "GB/s (min - max)", "/ sum of each alone"]]
    for each in result.scaling:
        together = with_range(each.rate, 4)
        lines.append([each.engine, str(each.devices), together, with_range(each.ratio, 3)])
    return f"scaling over devices\n{columns_text(lines)}"


def as_document(result: BenchResult) -> dict[str, Any]:
    """Returns the run as JSON."""
    options = asdict(result.options)
    return {
        "command": ["nvme-bench", *options.pop("words")],
        "machine": result.machine,
        "folders": result.places,
        "options": options,
        "tables": [as_json(result.table)],
        "passes": [
            {"row": row.name, **({"failed": True} if sample is None else asdict(sample))}
            for row in result.table.rows
            for sample in row.samples
        ],
        "ds_io": {row.name: ds_io_figures(row) for row in result.table.rows if any(row.samples)},
        "blocks": {name: asdict(times) for name, times in result.blocks.items()},
        "from_page_cache": {row.name: from_page_cache(row) for row in result.table.rows if any(row.samples)},
        "scaling": [
            {
                "engine": each.engine,
                "devices": each.devices,
                **{name: plain(getattr(each, name)) for name in ("rate", "alone", "ratio")},
            }
            for each in result.scaling
        ],
        "energy": result.energy or "available",
        "interrupted": result.interrupted,
    }


def as_csv(result: BenchResult) -> str:
    """Returns one line for each pass."""
    out = io.StringIO()
    lines = csv.writer(out, lineterminator="\n")
    names = ["seconds", "amount", "cpu_seconds", "submit_seconds", "end_to_end", "peak_bytes", "from_page_cache"]
    lines.writerow(["engine", "pass", *names, "joules", "note"])
    for row in result.table.rows:
        for number, sample in enumerate(row.samples, 1):
            values = [None if sample is None else getattr(sample, name) for name in names]
            joules = total(sample.joules) if sample and sample.joules else None
            lines.writerow([row.name, number, *values, joules, row.note])
    return out.getvalue()
