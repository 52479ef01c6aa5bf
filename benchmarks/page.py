"""Makes the figures of docs/*.md and of the README: measures by section, keeps the results, writes the pages."""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import statistics
import sys
import tempfile
import textwrap
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2
from tabulate import tabulate  # type: ignore[import-not-found,import-untyped,unused-ignore]

from benchmarks import command as shared
from benchmarks.anonymous import describe, scrub_for
from nvme_ops.base.command_line import command_line, positive
from nvme_ops.base.text import size_words
from nvme_ops.measure import stop
from nvme_ops.measure.picture import plot
from nvme_ops.measure.tables import Cells, cells, used_columns

DOCS, README = shared.ROOT / "docs", shared.ROOT / "README.md"
PAGE = "benchmarks.md"  # the page that describes the machines
Json = Mapping[str, Any]


@dataclass(frozen=True)
class Section:
    """A command, run once for all ``{folders}`` or for each ``{place}`` and ``{direction}``; its JSON is the result."""

    command: str
    json: bool = True  # it writes JSON; otherwise its output is the result
    pictured: bool = False  # its tables are long: the page has their medians as pictures, and a link to all of the rest


_EACH, _EFFORT = "nvme-bench --folder {place} {direction}", "--io-size {size} --loops {rounds} {plot}"
_PROGRAM = "python benchmarks {} {{folders}} --size {{size}} --rounds {{rounds}} {{plot}}"
_FIXED = "python benchmarks {} {{folders}} --rounds {{rounds}} {{plot}}"
# A section is one line here, and two on a page, <!-- section NAME --> and its end; page_results.md formats results.
SECTIONS = {
    "raw_io": Section(_PROGRAM.format("raw_io"), pictured=True),
    "checkpoint": Section(_PROGRAM.format("checkpoint --only save load cached async"), pictured=True),
    "fresh": Section(_PROGRAM.format("checkpoint --only fresh")),
    "sweep": Section(f"{_EACH} --sweep block_size=64K,256K,1M,4M queue_depth=1,8,32,128 {_EFFORT}", pictured=True),
    "explain": Section("nvme-bench explain {place} --rounds 9", json=False),
    "inference": Section(
        _FIXED.format("inference --only memory nvme_ops accelerate mapped --size 600M --budget 200M --batch 1 4")
    ),
    "experts": Section(_FIXED.format("inference --only experts"), pictured=True),
    "training_engines": Section(_FIXED.format("training --only engines")),
    "activations": Section(_FIXED.format("activations --only convolutional transformer")),
    "data": Section(_FIXED.format("data --only random")),
    "adaptive": Section(_PROGRAM.format("adaptive"), pictured=True),
}


def commands(name: str, args: argparse.Namespace) -> dict[str, list[str]]:
    """Returns a section's commands by name, as the page shows them: places by name, pictures without folder."""
    text, made, places = SECTIONS[name].command, dict[str, list[str]](), dict(args.place)
    for place in places if "{place}" in text else [""]:
        for direction in ("read", "write") if "{direction}" in text else ("",):
            own = "_".join(filter(None, (name, direction, place.lower())))
            words = text.format(
                place=place, direction="--read" if direction == "read" else "", size=args.size, rounds=args.rounds,
                folders=" ".join(f"--folder {folder}" for folder in places), plot=f"--output {own}.png",
            )  # fmt: skip
            made[own] = shlex.split(words)
    return made


def arguments(argv: Sequence[str]) -> argparse.Namespace:
    """Parses the command line; exits with status 2 on wrong arguments."""
    made = command_line("python benchmarks page", (__doc__ or "").strip(), "sections: " + ", ".join(SECTIONS))
    add = made.add_argument
    add("--place", type=_place, action="append", default=[], metavar="NAME=DIR",
        help="a folder to measure in, and its name on the page; may be repeated")  # fmt: skip
    add("--only", nargs="+", choices=SECTIONS, default=list(SECTIONS), metavar="SECTION", help="measure only these")
    add("--render", action="store_true", help="measure nothing: write the pages and draw the pictures again")
    add("--size", default="1G", help="of a file, a multiple of 4M (default 1G)")
    add("--rounds", type=positive, default=7, help="timed passes of every row (default 7)")
    args = made.parse_args(argv)
    if not args.render and not args.place:
        made.error("--place NAME=DIR is needed, or --render")
    return args


def _place(text: str) -> tuple[str, str]:
    name, _, folder = text.partition("=")
    if not re.fullmatch(r"[A-Za-z]\w*", name) or not os.path.isdir(folder):
        raise argparse.ArgumentTypeError(f"{text}: not NAME=DIR with a folder that exists")
    return name.upper(), os.path.abspath(folder)


def measure(name: str, args: argparse.Namespace) -> bool:
    """Runs the commands of a section and stores their results; if one fails, returns False and keeps those before."""
    places, made, runs = dict(args.place), commands(name, args), list[dict[str, Any]]()
    with tempfile.TemporaryDirectory() as scratch:
        scrub, path = scrub_for(places, scratch), os.path.join(scratch, "found.json")
        for own, argv in made.items():
            print(shown := " ".join(argv), flush=True)
            # its document is written where its picture should be, which is drawn from it
            status, text = shared.execute([{**places, f"{own}.png": path}.get(word, word) for word in argv])
            if status:
                print(f"page: {name}: exit status {status}", file=sys.stderr)
                return False
            document = json.loads(Path(path).read_text(encoding="utf-8")) if SECTIONS[name].json else {}
            document.pop("passes", None)  # long, and the rows have their figures
            run = {"command": shown, "document": document or None, "text": "" if document else text, "plot": ""}
            runs.append(scrub(run))
    for own, run in zip(made, runs, strict=True):
        drawn = run["document"] and plot(run["document"], str(DOCS / "benchmarks" / f"{own}.png"))
        run["plot"] = f"{own}.png" if drawn else ""
    stored = {"date": time.strftime("%Y-%m-%d"), "description": scrub(describe(places)), "runs": runs}
    lists = re.compile(r"\[\n\s*([-+\d.e,\s]+?)\n\s*\]")  # of numbers: on one line each
    text = lists.sub(lambda match: f"[{', '.join(match[1].replace(',', ' ').split())}]", json.dumps(stored, indent=1))
    (DOCS / "benchmarks" / f"{name}.json").write_text(text + "\n", encoding="utf-8")
    return True


def results() -> dict[str, Json]:
    """Returns what is stored, by section."""
    files = {name: DOCS / "benchmarks" / f"{name}.json" for name in SECTIONS}
    return {name: json.loads(file.read_text(encoding="utf-8")) for name, file in files.items() if file.exists()}


def write(draw: bool = False) -> None:
    """Writes pages and README from the stored results, also pictures if asked to. Raises OSError for damaged ones."""
    try:
        stored = results()
        for file in (README, *DOCS.glob("*.md")):
            text = file.read_text(encoding="utf-8")
            if (made := render(file.name, text, stored)) != text:
                file.write_text(made, encoding="utf-8")
        for run in [run for result in stored.values() for run in result["runs"] if draw and run["plot"]]:
            plot(run["document"], str(DOCS / "benchmarks" / run["plot"]))
    except (LookupError, TypeError, AttributeError, ValueError, jinja2.UndefinedError) as error:
        raise OSError(f"damaged results or marks: {error!r}") from error


# Rows of the tables, as dictionaries by column; page_results.md says where they go, and has the words.


def render(name: str, text: str, stored: Mapping[str, Json]) -> str:
    """Returns a page with what is between its marks made anew. Raises ValueError if a mark is missing."""
    machines = list({repr(result["description"]): result["description"] for result in stored.values()}.values())
    for mark, kind, section in re.findall(r"^<!-- ((\w+)(?: (\w+))?) -->$", text, re.MULTILINE):
        before, _, rest = text.partition(f"<!-- {mark} -->\n")
        _, end, after = rest.partition(f"<!-- /{mark} -->")
        if not end:
            raise ValueError(f"{name} has no line <!-- /{mark} -->")
        part = str(getattr(_TEMPLATE, kind)(stored, machines, section, SECTIONS, "" if name == PAGE else PAGE))
        lines = re.sub(r"\n{3,}", "\n\n", "\n".join(line.rstrip() for line in part.splitlines())).strip("\n")
        text = f"{before}<!-- {mark} -->\n\n{lines}\n\n{end}{after}"
    return text


def _pick(tables: Iterable[Json], field: str, part: str, name: str) -> tuple[Json, Json] | None:
    """Returns the first table with ``part`` in a field, and its first measured row whose name begins with ``name``."""
    wanted = ((table, row) for table in tables if part in table[field] for row in table["rows"])
    return next((pair for pair in wanted if pair[1]["name"].startswith(name) and pair[1]["spread"]), None)


def readme_rows(stored: Mapping[str, Json]) -> Iterator[Cells]:
    """Yields the README's rows: this package, and what people use today."""
    for words, section, title, ours, other, theirs in _TEMPLATE.README:
        runs = stored.get(section, {}).get("runs", [])
        tables = [table for run in runs for folder in run["document"]["folders"].values() for table in folder["tables"]]
        own, its = (_pick(tables, "title", title, name) for name in (ours, theirs))
        if own and its:
            values = [f"{row['spread']['median']:.3g} {table['unit']}" for table, row in (own, its)]
            times = (one / two for one, two in zip(own[1]["values"], its[1]["values"], strict=True))
            yield {"": words, "nvme_ops": values[0], "what people use today": f"{values[1]}: {other}",
                   "times as fast": f"{statistics.median(times):.1f}", "measured": stored[section]["date"]}  # fmt: skip


def summary_rows(folders: Json) -> Iterator[Cells]:
    """Yields the rows of the table in short, of raw_io's results in each folder."""
    for words, group, name in _TEMPLATE.SUMMARY:
        made, cpu = {"": words}, "-"
        for place, folder in folders.items():
            rate = of = times = "-"
            if one := _pick(folder["tables"], "group", group, name):
                (table, row), unit, median = one, one[0]["unit"], one[1]["spread"]["median"]
                rate = f"{median:.2f}" if unit == "GB/s" else f"{median:.3g} {unit}"
                of = _median(row["against_reference"], 2)
                of += "" if table["reference"].startswith("fio") else f" of `{table['reference'].split()[0]}`"
                times = _median(row["against_peer"], 1)
                cpu = _median(row["columns"].get("CPU s/GiB"), 3) if cpu == "-" else cpu
            there = place.lower()
            made |= {f"{there}, GB/s": rate, f"{there}: of fio's best": of, f"{there}: x DeepSpeed": times}
        yield {**made, "CPU s/GiB": cpu}


def _median(spread: Json | None, digits: int) -> str:
    return f"{spread['median']:.{digits}f}" if spread else "-"


def by_size(tables: Sequence[Json]) -> Iterator[tuple[str, list[Cells]]]:
    """Yields titles and rows of a program with several sizes: one table for each group, whose columns are the sizes."""
    for group in dict.fromkeys(table["group"] for table in tables):
        one = [table for table in tables if table["group"] == group]
        title = re.split(", |: ", _SIZE.sub("each size", one[0]["title"]))[0]
        columns = [(_SIZE.findall(table["title"])[0], table) for table in one]
        yield _side_by_side(title, columns)


def _side_by_side(title: str, tables: Sequence[tuple[str, Json]]) -> tuple[str, list[Cells]]:
    """Returns one table with a column for each: medians and, in brackets, how many times as fast the reference is."""
    made: dict[str, Cells] = {row["name"]: {"": row["name"]} for _, table in tables for row in table["rows"]}
    for label, table in tables:
        for row in filter(lambda row: row["spread"], table["rows"]):
            against = row["against_reference"] if row["name"] != table["reference"] else None
            ratio = f" ({1 / against['median']:.2g})" if against else ""
            made[row["name"]][label] = f"{row['spread']['median']:.3g}{ratio}"
    unit, reference = tables[0][1]["unit"], tables[0][1]["reference"]
    words = f"; in brackets: how many times as fast {reference} is" if reference else ""
    return f"{title}, {unit}{words}", [row for row in made.values() if len(row) > 1]


_SIZE = re.compile(r"\d+ [KMG]iB")


def table(rows: Iterable[Cells]) -> str:
    """Returns a table in Markdown. A column that no row fills is left out."""
    lines = used_columns(rows)
    escaped = [[word.replace("|", "\\|").replace("\n", " ") for word in row.values()] for row in lines]
    return str(tabulate(escaped, list(lines[0]), "github", disable_numparse=True))


def wrapped(text: str, joint: str = "\n    ", width: int = 112) -> str:
    """Wraps each line, to fit with what is before it into the 120 columns of a page."""
    lines = (textwrap.wrap(line, width, break_long_words=False, break_on_hyphens=False) for line in text.splitlines())
    return "\n".join(joint.join(parts) for parts in lines)


_JINJA = jinja2.Environment(trim_blocks=True, lstrip_blocks=True)
_FILTERS = (table, cells, by_size, size_words, readme_rows, summary_rows, wrapped)
_JINJA.filters |= {function.__name__: function for function in _FILTERS}
_TEMPLATE: Any = _JINJA.from_string(Path(__file__).with_name("page_results.md").read_text(encoding="utf-8")).module


def main(argv: Sequence[str]) -> int:
    """Returns 0; 1 if a command failed; 2 for wrong arguments; 130 after Ctrl-C, which keeps finished sections."""
    args = arguments(argv)

    @stop.measuring("page")
    def measured(_: Sequence[str] | None = None) -> int:
        status = 0
        for name in [] if args.render else args.only:
            status |= not measure(name, args)
            write()
        if args.render:
            write(draw=True)
        return status

    return measured()
