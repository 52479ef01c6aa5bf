"""The page and the README's table, from the stored results."""

from __future__ import annotations

import os
import re
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.page_sections import SECTIONS
from benchmarks.page_tables import Json, markdown
from nvme_ops.text import size_words

NOTICE = "<!-- made by `make benchmarks-page` from benchmarks/page_template.md and the results: change those -->"
MARKERS = ("<!-- benchmarks -->", "<!-- /benchmarks -->")
_WIDTH = 120
_SECTION = re.compile(r"<!-- section (\w+) -->")
_MACHINES = "<!-- machines -->"
_NOT_YET = "Not measured yet."

# Of the README: what is moved, raw_io's group and row, and the unit where it is not the column's.
_ROWS = [
    ("read, page-locked tensor", "read", "nvme_ops, locked", ""),
    ("read, ordinary tensor that was in use", "read", "nvme_ops, pageable", ""),
    ("write, page-locked tensor", "write", "nvme_ops, locked", ""),
    ("write, ordinary tensor that was in use", "write", "nvme_ops, pageable", ""),
    ("read from the page cache, ordinary tensor that was in use", "cached", "nvme_ops, pageable", ""),
    ("16,384 random 4 KiB reads in one call", "random", "nvme_ops submit_preadv, nvme_ops.empty", " kIOPS"),
]
_FIO = ("fio best", "fio randread 4k, depth 128")

Results = Mapping[str, Json]  # by section


def page(template: str, results: Results, pictures: str) -> str:
    """The page. ``pictures``: the folder of the plots, seen from the page's."""
    machines = distinct_machines(results)
    lines = [NOTICE, ""]
    for line in template.splitlines():
        if found := _SECTION.fullmatch(line):
            lines += _section(found[1], results.get(found[1]), machines, pictures)
        elif line == _MACHINES:
            lines += _machines(machines)
        else:
            lines.append(line)
    return "\n".join(lines).rstrip("\n") + "\n"


def distinct_machines(results: Results) -> list[Json]:
    """The descriptions of the machines that results come from, in the order of the sections."""
    found: list[Json] = []
    for name in SECTIONS:
        description = results.get(name, {}).get("description")
        if description and description not in found:
            found.append(description)
    return found


def _machines(machines: Sequence[Json]) -> list[str]:
    if not machines:
        return [_NOT_YET]
    lines: list[str] = []
    for number, description in enumerate(machines, 1):
        rows = [[name, words] for part in ("machine", "settings") for name, words in description[part].items()]
        rows += [[f"`{name}`", _place_words(found)] for name, found in description["places"].items()]
        lines += markdown([f"machine {number}", ""], rows)
    return lines[:-1]


def _place_words(found: Mapping[str, str]) -> str:
    kept = {name: words.partition(" (")[0] if name == "file system" else words for name, words in found.items()}
    return "; ".join(f"{name}: {words}" for name, words in kept.items())


def _section(name: str, stored: Json | None, machines: Sequence[Json], pictures: str) -> list[str]:
    if stored is None:
        return [_NOT_YET]
    if stored["skipped"]:
        return [f"Not run: {stored['skipped']}."]
    where = f"{stored['date']}, machine {machines.index(stored['description']) + 1}."
    lines: list[str] = []
    for run in stored["runs"]:
        lines += [f"    {run['command']}", "", where, ""]
        if run["failure"]:
            lines += [f"**This run failed: {run['failure']}**", ""]
        if run["document"] is not None:
            lines += _rendered(name, run["document"])
        if run["text"]:
            lines += ["```text", *(line.rstrip() for line in run["text"].splitlines()), "```", ""]
        if run["plot"]:
            lines += [f"![{run['command']}]({os.path.join(pictures, run['plot'])})", ""]
    return lines[:-1]


def _rendered(name: str, document: Json) -> list[str]:
    try:
        return SECTIONS[name].render(document)
    except (KeyError, TypeError, IndexError) as error:  # the results of another version
        return [f"**These results cannot be shown ({type(error).__name__}: {error}): measure the section again.**", ""]


def readme(text: str, results: Results) -> str:
    """The README with what lies between its markers made anew. Raises ValueError where it has none."""
    begin, end = MARKERS
    before, first, rest = text.partition(begin + "\n")
    _, last, after = rest.partition(end)
    if not first or not last:
        raise ValueError(f"it has no lines {begin} and {end}")
    block = readme_block(results.get("raw_io")) + checkpoint_block(results.get("checkpoint"), results.get("fresh"))
    return "".join([before, first, "\n".join(block), "\n", last, after])


def readme_block(stored: Json | None) -> list[str]:
    """Who is compared, on what; and the table."""
    documents = [run["document"] for run in stored["runs"] if run["document"]] if stored else []
    if not stored or not documents or not documents[0].get("folders"):
        return [_NOT_YET]
    document = documents[0]
    folders = {name: _rows_of(found) for name, found in document["folders"].items()}
    rows = []
    for words, group, name, unit in _ROWS:
        found = [each.get((group, name)) for each in folders.values()]
        rows.append([words, *(cell for row in found for cell in _cells(row, unit)), _cpu(found[0] if found else None)])
    head = [cell for name in folders for cell in (f"{name.lower()}, GB/s", "of fio's best", "x DeepSpeed")]
    intro = textwrap.wrap(_intro(stored, document, folders), _WIDTH, break_long_words=False, break_on_hyphens=False)
    return [*intro, "", *markdown(["", *head, "CPU s/GiB"], rows)[:-1]]


def checkpoint_block(stored: Json | None, fresh: Json | None = None) -> list[str]:
    """The state dict of large tensors, in the first place: everybody's rates; of loads in a fresh process too."""
    documents = [run["document"] for run in stored["runs"] if run["document"]] if stored else []
    if not stored or not documents or not documents[0].get("folders"):
        return []
    place, found = next(iter(documents[0]["folders"].items()))
    tables = {table["group"]: table for table in found["tables"] if "; large:" in table["title"]}
    groups = {
        "save": "save, durably",
        "load": "load, cold, warm memory",
        "fresh": "load, cold, fresh process",
        "cached": "load from the page cache",
    }
    tables.update(_loads_of(fresh))
    rates: dict[str, dict[str, str]] = {}
    for group in groups:
        for row in tables.get(group, {"rows": []})["rows"]:
            if row["spread"] and (group != "fresh" or row["name"] in rates):
                rates.setdefault(row["name"], {})[group] = f"{row['spread']['median']:.2f}"
    rows = [[name, *(found.get(group, "-") for group in groups)] for name, found in rates.items()]
    intro = (
        f"Checkpoints: a state dict of {size_words(documents[0]['size'])} in tensors of 32 MiB, medians of "
        f"{documents[0]['rounds']} rounds on the same {place.lower()}, {stored['date']}, GB/s:"
    )
    lines = textwrap.wrap(intro, _WIDTH, break_long_words=False, break_on_hyphens=False)
    return ["", *lines, "", *markdown(["", *groups.values()], rows)[:-1]]


def _loads_of(fresh: Json | None) -> dict[str, Json]:
    """Of a fresh process, in the first place, as ``fresh``; nothing where it was not measured."""
    documents = [run["document"] for run in fresh["runs"] if run["document"]] if fresh else []
    folders = documents[0].get("folders", {}) if documents else {}
    tables = next(iter(folders.values()))["tables"] if folders else []
    return {"fresh" if table["group"] == "load" else "": table for table in tables}


def _rows_of(found: Json) -> dict[tuple[str, str], dict[str, Any]]:
    """Rows by group and name, with the row that they are divided by."""
    return {
        (table["group"], row["name"]): {**row, "reference": table["reference"]}
        for table in found["tables"]
        for row in table["rows"]
    }


def _cells(row: Json | None, unit: str) -> list[str]:
    if row is None or not row["spread"]:
        return ["-", "-", ""]
    rate = row["spread"]["median"]
    text = f"{rate:.3g}{unit}" if rate >= 100 or unit else f"{rate:.2f}"
    ratio, peer = row["against_reference"], row["against_peer"]
    of = f"{ratio['median']:.2f}" if ratio else "-"
    if ratio and row["reference"] not in _FIO:
        of += f" of `{row['reference'].split()[0]}`"
    return [text, of, f"{peer['median']:.1f}" if peer else ""]


def _cpu(row: Json | None) -> str:
    found = (row or {}).get("columns", {}).get("CPU s/GiB")
    return f"{found['median']:.3f}" if found else ""


def _intro(stored: Json, document: Json, folders: Mapping[str, Mapping[Any, Json]]) -> str:
    description = stored["description"]
    machine = description["machine"]
    notes = {rows[key]["note"] for rows in folders.values() for key in rows if key[1] == _FIO[0]}
    lacks = sorted(note for note in notes if note and not note.startswith("failed"))
    best = f"({'; '.join(lacks)})" if lacks else "(io_uring, 4 MiB, depth 32, huge pages, registered buffers)"
    deepspeed = f" and DeepSpeed {machine['deepspeed']} with its defaults" if "deepspeed" in machine else ""
    places = "; ".join(f"{name.lower()} is {_storage(description['places'].get(name, {}))}" for name in folders)
    return (
        f"Against fio at its best {best}{deepspeed}, {size_words(document['size'])}, cold, medians of "
        f"{document['rounds']} interleaved rounds on {machine['cpu']} ({machine['memory']}, kernel "
        f"{machine['kernel']}; {places}), {stored['date']}:"
    )


def _storage(place: Mapping[str, str]) -> str:
    kind, device = place.get("file system", "unknown").partition(" ")[0], place.get("device", "none")
    return kind if device.startswith("none") else f"{kind} on {device}"
