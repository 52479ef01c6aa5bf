"""Documents of the benchmarks as Markdown."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from nvme_ops.bench.measure import PERCENTILES, Spread
from nvme_ops.bench.tables import COLUMNS, with_range
from nvme_ops.text import size_words

Json = Mapping[str, Any]


def markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """A table, with an empty line after it. A column that no row fills is left out."""
    kept = [place for place in range(len(head)) if place == 0 or any(row[place] not in ("", "-") for row in rows)]
    lines = [[head[place] for place in kept], ["---"] * len(kept), *([row[place] for place in kept] for row in rows)]
    cells = ([cell.replace("|", "\\|").replace("\n", " ") for cell in line] for line in lines)
    return [*(f"| {' | '.join(line)} |" for line in cells), ""]


def spread(found: Json | None, digits: int) -> str:
    """The median and its range, of a plain Spread in either spelling."""
    if not found:
        return "-"
    low, high = (found[long] if long in found else found[short] for long, short in (("low", "min"), ("high", "max")))
    return with_range(Spread(found["median"], low, high), digits)


def table(document: Json) -> list[str]:
    """What ``tables.as_json`` gave, under its title."""
    rows = document["rows"]
    columns = list(dict.fromkeys(name for row in rows for name in row.get("columns", {}) if name in COLUMNS))
    reference = f"/ {document['reference']}"
    head = ["", f"{document['unit']} (min - max)", *columns, reference, "/ DeepSpeed", "note"]
    lines = []
    for row in rows:
        found = row.get("columns", {})
        cells = [COLUMNS[name][1](found[name]["median"]) if found.get(name) else "-" for name in columns]
        own = row["name"] == document["reference"]
        ratios = ["-" if own else spread(row.get("against_reference"), 3), spread(row.get("against_peer"), 3)]
        lines.append([row["name"], spread(row["spread"], 4), *cells, *ratios, row.get("note", "")])
    return [f"**{document['title']}**", "", *markdown(head, lines)]


def raw_io(document: Json) -> list[str]:
    """Every folder's tables, the memory it took, and how long a start takes."""
    lines = []
    for folder, found in document.get("folders", {}).items():
        lines += [f"#### `{folder}`", ""]
        for each in found.get("tables", []):
            lines += table(each)
        if memory := found.get("memory"):
            words = [
                [name.replace("_", " "), "unknown" if size is None else size_words(size)]
                for name, size in memory.items()
            ]
            lines += ["**staging memory of a default handle**", "", *markdown(["", "bytes"], words)]
    return lines + (table(document["start"]) if document.get("start") else [])


def bench(document: Json) -> list[str]:
    """What ``nvme-bench --json`` wrote."""
    lines = [line for each in document.get("tables", []) for line in table(each)]
    if blocks := document.get("blocks"):
        lines += ["**latency of single blocks at random places, one after the other, us**", "", *_blocks(blocks)]
    if found := document.get("scaling"):
        lines += _scaling(found, document.get("least"))
    return lines


def _blocks(blocks: Json) -> list[str]:
    head = ["", *(f"p{100 * share:g}" for share in PERCENTILES), "submit p50", "submit p99", "blocks"]
    rows = []
    for name, times in blocks.items():
        complete, submit = times.get("complete", {}), times.get("submit", {})
        cells = [f"{1e6 * complete[str(share)]:.0f}" if str(share) in complete else "-" for share in PERCENTILES]
        cells += [f"{1e6 * submit[share]:.1f}" if share in submit else "-" for share in ("0.5", "0.99")]
        rows.append([name, *cells, str(times["count"])])
    return markdown(head, rows)


def scaling(document: Json) -> list[str]:
    """What ``benchmarks/scaling.py --json`` wrote: by direction the rates over so many devices."""
    lines = []
    for each in document.get("tables", []):
        found = [line for line in document["scaling"] if line["group"] == each["group"]]
        notes = [f"- {row['name']}: {row['note']}" for row in each["rows"] if row["note"] not in ("", "io_uring")]
        lines += [f"**{each['title']}**", "", *_scaling(found, document.get("least"))]
        lines += [*notes, ""] if notes else []
    return lines


def _scaling(found: Sequence[Json], least: float | None) -> list[str]:
    rows = []
    for each in found:
        ours = least is not None and "nvme_ops" in each["engine"] and each["ratio"]
        judged = ("reached" if each["ratio"]["median"] >= least else "missed") if ours else ""
        rows.append([each["engine"], str(each["devices"]), spread(each["rate"], 4), spread(each["ratio"], 3), judged])
    head = ["", "devices", "GB/s (min - max)", "/ sum of each alone", f"aim {least:g}" if least is not None else ""]
    return markdown(head, rows)


def tuning(document: Json) -> list[str]:
    """What ``benchmarks/tuning.py --json`` wrote: what nvme-tune found each time, and the best of the sweep."""
    found = [
        [str(number), _settings(each["aio"]), f"{each['seconds']:.0f}", spread(each["against_best"], 3)]
        for number, each in enumerate(document.get("repetitions", []), 1)
    ]
    lines = markdown(["run of nvme-tune", "its settings", "seconds", "/ the sweep's best (min - max)"], found)
    again = [
        [_settings(each["aio"]), f"{each['ratio']:.3f}", f"{each['noise']:.3f}"]
        for each in document.get("against_default", [])
    ]
    title = f"**the best of {len(document.get('sweep', []))} combinations, measured again**"
    return [*lines, title, "", *markdown(["settings", "/ the default", "noise"], again)]


def _settings(aio: Json) -> str:
    words = [f"{size_words(aio['block_size'])} blocks", f"depth {aio['queue_depth']}"]
    words += [f"intra_op_parallelism {aio['intra_op_parallelism']}"]
    return ", ".join(words + [name for name in ("single_submit", "overlap_events") if aio[name]])


def gpu_io(document: Json) -> list[str]:
    """What ``benchmarks/gpu_io.py --json`` wrote."""
    lines = ["; ".join(f"{name} {words}" for name, words in document.get("device", {}).items()), ""]
    for folder, found in document.get("folders", {}).items():
        lines += [f"#### `{folder}`", ""]
        for each in found.get("tables", []):
            lines += table(each)
            aims = found.get("aims", {}).get(each["group"], {})
            rows = [[words, spread(aim["ratio"], 3), f"{aim['least']:g}"] for words, aim in aims.items()]
            lines += markdown(["aim", "reached (min - max)", "at least"], rows) if rows else []
    return lines
