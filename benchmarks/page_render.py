"""What is measured of the page, and the README's tables, from the stored results: by Jinja's templates and tabulate.

The rows of each table are made here, as dictionaries by column; where they stand is up to page_results.md.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import jinja2
from tabulate import tabulate  # type: ignore[import-not-found,import-untyped,unused-ignore]

from benchmarks.command import ROOT
from nvme_ops.measure.run import blocks_rows
from nvme_ops.measure.tables import Cells, cells, filled
from nvme_ops.text import size_words

# What results that are damaged, or of another version, raise here
_DAMAGED = (LookupError, TypeError, AttributeError, ValueError, jinja2.UndefinedError)

# Of the README: what is moved, raw_io's group and row
_ROWS = [
    ("read, page-locked tensor", "read", "nvme_ops, locked"),
    ("read, ordinary tensor that was in use", "read", "nvme_ops, pageable"),
    ("write, page-locked tensor", "write", "nvme_ops, locked"),
    ("write, ordinary tensor that was in use", "write", "nvme_ops, pageable"),
    ("read from the page cache, ordinary tensor that was in use", "cached", "nvme_ops, pageable"),
    ("16,384 random 4 KiB reads in one call", "random", "nvme_ops submit_preadv, nvme_ops.empty"),
]

Json = Mapping[str, Any]
Results = Mapping[str, Json]  # by section, in the order of the page


def page(text: str, results: Results, pictures: str) -> str:
    """The page with its results made anew. ``pictures``: the folder of the plots, seen from the page's."""
    machines: list[Json] = []  # that results come from
    for stored in results.values():
        if stored["description"] and stored["description"] not in machines:
            machines.append(stored["description"])
    numbers = {name: machines.index(stored["description"]) + 1 for name, stored in results.items()
               if stored["description"]}  # fmt: skip
    parts = {f"section {name}": _part("section", results.get(name, {}), numbers.get(name), pictures)
             for name in re.findall(r"^<!-- section (\w+) -->$", text, re.MULTILINE)}  # fmt: skip
    return between_marks(text, {"machines": _part("machines", machines), **parts})


def readme(text: str, results: Results) -> str:
    """The README with its table made anew."""
    try:
        block = _readme_block(results)
    except _DAMAGED as error:
        block = _cannot_be_shown(error)
    return between_marks(text, {"benchmarks": block})


def between_marks(text: str, parts: Mapping[str, str]) -> str:
    """``text`` with each of the parts between the lines that name it. Raises ValueError where it has none."""
    for name, part in parts.items():
        begin, end = f"<!-- {name} -->\n", f"<!-- /{name} -->"
        before, first, rest = text.partition(begin)
        _, last, after = rest.partition(end)
        if not first or not last:
            raise ValueError(f"it has no lines {begin.strip()} and {end}")
        lines = "\n".join(line.rstrip() for line in part.splitlines())
        text = "".join([before, begin, "\n", re.sub(r"\n{3,}", "\n\n", lines).strip("\n"), "\n\n", end, after])
    return text


def _readme_block(results: Results) -> str:
    raw_io = _document(results, "raw_io")
    if not raw_io:
        return _part("section", {})
    notes = {row["note"] for found in raw_io["folders"].values() for table in found["tables"] for row in table["rows"]
             if row["name"] == "fio best"}  # fmt: skip
    lacks = "; ".join(sorted(note for note in notes if note and not note.startswith("failed")))
    known = results["raw_io"]["description"]["places"]
    places = "; ".join(f"{name.lower()} is {_storage(known.get(name, {}))}" for name in raw_io["folders"])
    return _part("readme", results["raw_io"], raw_io, lacks, places, _readme_rows(raw_io["folders"]))


def _document(results: Results, section: str) -> Json:
    """The first one that has folders; empty where there is none."""
    documents = (run["document"] or {} for run in results.get(section, {}).get("runs", []))
    return next((document for document in documents if document.get("folders")), {})


def _storage(place: Mapping[str, str]) -> str:
    kind, device = place.get("file system", "unknown").partition(" ")[0], place.get("device", "none")
    return kind if device.startswith("none") else f"{kind} on {device}"


def _readme_rows(folders: Json) -> Iterator[Cells]:
    for words, group, name in _ROWS:
        made, cpu = {"": words}, "-"
        for place, found in folders.items():
            wanted = ((table, row) for table in found["tables"] if table["group"] == group for row in table["rows"])
            missing: tuple[Json, Json] = ({}, {"spread": None})
            table, row = next((each for each in wanted if each[1]["name"] == name), missing)
            rate = of = times = "-"
            if row["spread"]:
                rate, of = _rate(row["spread"]["median"], table["unit"]), _median(row["against_reference"], 2)
                of += "" if table["reference"].startswith("fio") else f" of `{table['reference'].split()[0]}`"
                times = _median(row["against_peer"], 1)
                cpu = _median(row["columns"].get("CPU s/GiB"), 3) if cpu == "-" else cpu
            columns = {"{}, GB/s": rate, "{}: of fio's best": of, "{}: x DeepSpeed": times}
            made |= {column.format(place.lower()): cell for column, cell in columns.items()}
        yield {**made, "CPU s/GiB": cpu}


def _rate(median: float, unit: str) -> str:
    return f"{median:.2f}" if unit == "GB/s" and median < 100 else f"{median:.3g} {unit}".removesuffix(" GB/s")


def _median(found: Json | None, digits: int) -> str:
    return f"{found['median']:.{digits}f}" if found else "-"


# Filters of the templates


def table(rows: Iterable[Cells]) -> str:
    """Markdown. A column that no row fills is left out."""
    lines = filled(rows)
    escaped = [[word.replace("|", "\\|").replace("\n", " ") for word in row.values()] for row in lines]
    return str(tabulate(escaped, list(lines[0]), "github", disable_numparse=True))


def machine_rows(description: Json, number: int) -> Iterator[Cells]:
    """Of a description by page.py."""
    for name, words in {**description["machine"], **description["settings"]}.items():
        yield {f"machine {number}": name, " ": words}
    for name, place in description["places"].items():
        kept = {key: words.partition(" (")[0] if key == "file system" else words for key, words in place.items()}
        yield {f"machine {number}": f"`{name}`", " ": "; ".join(f"{key}: {words}" for key, words in kept.items())}


def shown(document: Json) -> str:
    """A document of any program, or that it cannot be shown."""
    try:
        return _part("document", document)
    except _DAMAGED as error:
        return _cannot_be_shown(error)


def _cannot_be_shown(error: Exception) -> str:
    return f"**These results cannot be shown ({type(error).__name__}: {error}): measure the section again.**"


def _wrapped(text: str) -> str:
    return textwrap.fill(" ".join(text.split()), 120, break_long_words=False, break_on_hyphens=False)


def _part(macro: str, *values: object) -> str:
    return str(getattr(_ENVIRONMENT.get_template("page_results.md").module, macro)(*values))


_FILTERS = {
    "table": table, "rows": cells, "blocks": blocks_rows, "machine": machine_rows, "shown": shown,
    "size": size_words, "wrapped": _wrapped,
}  # fmt: skip
_ENVIRONMENT = jinja2.Environment(
    loader=jinja2.FileSystemLoader(ROOT / "benchmarks"), trim_blocks=True, lstrip_blocks=True
)
_ENVIRONMENT.filters.update(_FILTERS)
