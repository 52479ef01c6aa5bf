"""Makes the figures of docs/*.md and of the README: measures by section, keeps the results, writes the pages."""

from __future__ import annotations

import argparse
import contextlib
import datetime
import getpass
import importlib.metadata
import json
import os
import re
import shlex
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import textwrap
import time
from argparse import Namespace
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2
from tabulate import tabulate  # type: ignore[import-not-found,import-untyped,unused-ignore]

from benchmarks import command as shared
from benchmarks.command import ROOT
from nvme_ops.base.command_line import command_line, positive
from nvme_ops.base.text import size_words
from nvme_ops.filesystem.device import mount_of
from nvme_ops.measure import machine, stop
from nvme_ops.measure.picture import plot
from nvme_ops.measure.run import blocks_rows
from nvme_ops.measure.scratch import scratch_folder
from nvme_ops.measure.tables import Cells, cells, used_columns
from nvme_ops.op_builder.machine import Host
from nvme_ops.report.cli import collect
from nvme_ops.report.result import Status


@dataclass(frozen=True)
class Section:
    """A command, run once for all ``{folders}`` or for each ``{place}`` and ``{direction}``; its JSON is the result."""

    command: str
    json: bool = True  # it writes JSON; otherwise its output is the result
    folded: bool = False  # its tables are long, and shown on request below its picture


_EACH, _EFFORT = "nvme-bench --folder {place} {direction}", "--io-size {size} --loops {rounds} {plot}"
_PROGRAM = "python benchmarks {} {{folders}} --size {{size}} --rounds {{rounds}} {{plot}}"
_FIXED = "python benchmarks {} {{folders}} --rounds {{rounds}} {{plot}}"
# A section is one line here, and two on a page, <!-- section NAME --> and its end; page_results.md formats results.
SECTIONS = {
    "raw_io": Section(_PROGRAM.format("raw_io"), folded=True),
    "engines": Section(f"{_EACH} --engine all {_EFFORT}", folded=True),
    "checkpoint": Section(_PROGRAM.format("checkpoint --only save load cached async"), folded=True),
    "fresh": Section(_PROGRAM.format("checkpoint --only fresh")),
    "sweep": Section(f"{_EACH} --sweep block_size=64K,256K,1M,4M queue_depth=1,8,32,128 {_EFFORT}", folded=True),
    "explain": Section("nvme-bench explain {place} --rounds 9", json=False),
    "inference": Section(
        _FIXED.format("inference --only memory nvme_ops accelerate mapped --size 600M --budget 200M --batch 1 4")
    ),
    "experts": Section(_FIXED.format("inference --only experts"), folded=True),
    "training_engines": Section(_FIXED.format("training --only engines")),
    "activations": Section(_FIXED.format("activations --only convolutional transformer")),
    "data": Section(_FIXED.format("data --only random")),
    "adaptive": Section(_PROGRAM.format("adaptive")),
}


def commands(name: str, places: Sequence[str], size: str, rounds: int) -> dict[str, list[str]]:
    """Returns a section's commands by name, as the page shows them: places by name, pictures without folder."""
    text, made = SECTIONS[name].command, {}
    for place in places if "{place}" in text else [""]:
        for direction in ("read", "write") if "{direction}" in text else ("",):
            own = "_".join(filter(None, (name, direction, place.lower())))
            words = text.format(
                place=place, direction="--read" if direction == "read" else "", size=size, rounds=rounds,
                folders=" ".join(f"--folder {each}" for each in places), plot=f"--output {own}.png",
            )  # fmt: skip
            made[own] = shlex.split(words)
    return made


def arguments(argv: Sequence[str]) -> Namespace:
    """Parses the command line; exits with status 2 on wrong arguments."""
    made = command_line("python benchmarks page", (__doc__ or "").strip(), "sections: " + ", ".join(SECTIONS))
    add = made.add_argument
    add("--place", type=_place, action="append", default=[], metavar="NAME=DIR",
        help="a folder to measure in, and its name on the page; may be repeated")  # fmt: skip
    add("--only", nargs="+", choices=SECTIONS, metavar="SECTION", help="measure only these")
    add(
        "--render",
        action="store_true",
        help="measure nothing: write the page from the results, and draw their pictures",
    )
    add("--size", type=shared.file_size, default="1G", help="of a file, a multiple of 4M (default 1G)")
    add("--rounds", type=positive, default=7, help="timed passes of every row (default 7)")
    add("--results", type=Path, default=ROOT / "docs" / "benchmarks", help="folder of the results")
    add("--page", type=Path, default=ROOT / "docs" / "benchmarks.md",
        help="the page with its markers; other pages beside it may have sections, too")  # fmt: skip
    add("--readme", type=Path, default=ROOT / "README.md", help="the README with its markers")
    args = made.parse_args(argv)
    args.places = dict(args.place)
    for file, render in ((args.readme, render_readme), (args.page, render_page)):
        try:
            render(file.read_text(encoding="utf-8"), {})
        except ValueError as error:
            made.error(f"{file}: {error}")
        except OSError as error:
            made.error(f"{file}: {error.strerror}")
    if not args.render and not args.places:
        made.error("--place NAME=DIR is needed, or --render")
    return args


def _place(text: str) -> tuple[str, str]:
    name, separator, folder = text.partition("=")
    if not separator or not re.fullmatch(r"[A-Za-z]\w*", name):
        raise argparse.ArgumentTypeError(f"{text}: not NAME=DIR")
    if not os.path.isdir(folder):
        raise argparse.ArgumentTypeError(f"{text}: no such folder")
    return name.upper(), os.path.abspath(folder)


def measure(name: str, args: Namespace) -> bool:
    """Runs the commands of a section and stores their results; returns False if one failed."""
    stored, results = args.results / f"{name}.json", args.results
    size = f"{args.size >> 30}G" if args.size % (1 << 30) == 0 else f"{args.size >> 20}M"
    with scratch_folder(tempfile.gettempdir(), 0) as folder:
        scrub, scratch = scrub_for(args.places, folder), Path(folder)
        runs = [scrub(_run(own, words, SECTIONS[name].json, args.places, scratch))
                for own, words in commands(name, list(args.places), size, args.rounds).items()]  # fmt: skip
        for old in _read(stored).get("runs", []):
            if old["plot"]:
                (results / old["plot"]).unlink(missing_ok=True)
        for run in runs:
            if run["plot"]:
                shutil.copyfile(scratch / run["plot"], results / run["plot"])
        today = datetime.date.today().isoformat()
        _store(stored, {"date": today, "description": scrub(describe(args.places)), "runs": runs})
    return not any(run["failure"] for run in runs)


def _run(name: str, argv: Sequence[str], has_json: bool, places: Mapping[str, str], scratch: Path) -> dict[str, Any]:
    """Runs a command; returns its result, or how it failed."""
    document, plot, shown = scratch / f"{name}.json", scratch / f"{name}.png", " ".join(argv)
    print(shown, end="", flush=True)
    real = [{**places, plot.name: str(plot)}.get(word, word) for word in argv]
    if has_json:
        real += ["--output", str(document)]
    begin = time.monotonic()
    status, output, errors = _execute(real)
    print(f"  ({time.monotonic() - begin:.0f} s)" + (f": exit status {status}" if status else ""), flush=True)
    said = [line.strip() for line in (errors or output).splitlines() if line.strip()]
    found, failure = None, f"exit status {status}{': ' + said[-1] if said else ''}" if status else ""
    if has_json:
        try:
            found = json.loads(document.read_text(encoding="utf-8"))
            found.pop("passes", None)  # long, and the rows have their figures
        except (OSError, ValueError) as error:
            failure = failure or f"it wrote no results ({error})"
    text, picture = "" if has_json or status else output, plot.name if plot.exists() else ""
    return {"command": shown, "failure": failure, "document": found, "text": text, "plot": picture}


def _execute(argv: Sequence[str]) -> tuple[int, str, str]:
    """Returns status, output and errors. If this process is stopped, so is the command, which removes its files."""
    programs = {"python": [sys.executable], "nvme-bench": [sys.executable, "-m", "nvme_ops.bench"]}
    with subprocess.Popen(
        stop.tied([*programs.get(argv[0], argv[:1]), *argv[1:]], "TERM"), cwd=ROOT,
        env={**shared.environment(), "COLUMNS": "160"},  # of text that is shown as it is
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        start_new_session=True,  # it gets one signal from us, not also the terminal's while it cleans up
    ) as process:  # fmt: skip
        try:
            output, errors = process.communicate()
        except BaseException:
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(30)  # seconds, in which it removes its files
            process.kill()
            raise
    return process.returncode, output, errors


def write(args: Namespace) -> None:
    """Writes the pages and the README's table from the stored results. Raises OSError."""
    stored = {name: found for name in SECTIONS if (found := _read(args.results / f"{name}.json"))}
    pictures, others = os.path.relpath(args.results, args.page.parent), set(args.page.parent.glob("*.md"))
    texts = {file: file.read_text(encoding="utf-8") for file in {args.page, args.readme, *others}}
    try:
        made = {args.readme: render_readme(texts[args.readme], stored)}
        made |= {args.page: render_page(texts[args.page], stored, pictures)}
        made |= {file: render_other(texts[file], stored, pictures) for file in others - set(made)}
    except _DAMAGED as error:
        raise OSError(f"results cannot be shown ({error!r}): measure the sections again") from error
    for file, text in made.items():
        if text != texts[file]:
            file.write_text(text, encoding="utf-8")


def draw(results: Path) -> None:
    """Draws the pictures of all stored results anew."""
    for name in SECTIONS:
        for run in _read(results / f"{name}.json").get("runs", []):
            if run["plot"]:
                plot(run["document"], str(results / run["plot"]))


def _read(file: Path) -> dict[str, Any]:
    """Returns the results of a section, empty if there are none. Raises OSError for a file with anything else."""
    try:
        found: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        missing = {"date", "description", "runs"} - set(found)
    except FileNotFoundError:
        return {}
    except (ValueError, TypeError) as error:
        raise OSError(f"{file} is damaged ({error}): remove it, and measure the section again") from error
    if missing:
        raise OSError(f"{file} is damaged (no {min(missing)}): remove it, and measure the section again")
    return found


def _store(file: Path, found: Mapping[str, Any]) -> None:
    text = json.dumps(found, indent=1)
    lists = re.compile(r"\[\n\s*([-+\d.e,\s]+?)\n\s*\]")  # of numbers: on one line each
    text = lists.sub(lambda each: f"[{', '.join(each[1].replace(',', ' ').split())}]", text)
    file.write_text(text + "\n", encoding="utf-8")


# What the page says about the machine, and what it must not say: folders, hosts, users

# Lines of the report that affect the figures and are the same in the next run
_SETTINGS = {
    "environment": ("io_uring sysctl", "seccomp", "memlock limit", "transparent huge pages"),
    "cufile": ("GPU", "NVIDIA driver", "nvidia-fs", "path of GPU tensors"),
}
_HOMES = re.compile(r"/(?:home|Users)/[^/\s'\"]+|/root(?![\w.-])")
_IMAGES = re.compile(r"/[^\s,;'\"]+\.img\b")  # behind loop devices
_COMMON = {"root", "localhost", ""}  # names that identify nobody, and occur as other words


def describe(places: Mapping[str, str]) -> dict[str, dict[str, Any]]:
    """Returns processor, versions, settings, and the facts of each place by name, as nvme-report words them."""
    report = {name: {each.name: each for each in results} for name, results in collect(Host(), False).items()}
    gpu = report["cufile"].get("GPU")
    settings = {
        result.name: result.detail
        for section, names in _SETTINGS.items()
        if section != "cufile" or (gpu is not None and gpu.status is not Status.NO)
        for result in report[section].values()
        if result.name in names
    }
    versions = {}
    with contextlib.suppress(OSError):
        said = subprocess.run(["fio", "--version"], stdin=subprocess.DEVNULL, capture_output=True, text=True)
        versions["fio"] = said.stdout.strip().removeprefix("fio-")
    for package in ("deepspeed", "numpy", "safetensors"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[package] = importlib.metadata.version(package)
    known = {name: machine.place(folder) for name, folder in places.items()}
    return {"machine": {**machine.machine(), **versions}, "settings": settings, "places": known}


def scrub_for(places: Mapping[str, str], gone: str = "") -> Callable[[Any], Any]:
    """Returns a function that replaces paths by names in any JSON value, and rounds figures to six digits.

    Args:
        places: measured folders by the name that stands for them.
        gone: a folder to which results were written; its files keep their bare names.
    """
    folders = [(str(ROOT), "CHECKOUT"), (tempfile.gettempdir(), "TMP"), (os.path.expanduser("~"), "~")]
    if sys.prefix != sys.base_prefix:  # an environment, and not /usr
        folders.append((sys.prefix, "PYTHON"))
    mounts = [(mount_of(Host(), folder), name) for name, folder in places.items()]  # a place may lie below one
    folders += [(mount.point, name) for mount, name in reversed(mounts) if mount is not None]
    folders += [(folder, name) for name, folder in places.items()]
    names = {each: name for folder, name in folders for each in (os.path.abspath(folder), os.path.realpath(folder))}
    names |= {os.path.join(each, ""): "" for each in (gone, os.path.realpath(gone)) if gone}
    names.pop("/", None)
    hosts = {socket.gethostname(), os.uname().nodename}
    users = {os.environ.get(name, "") for name in ("USER", "LOGNAME", "SUDO_USER")}
    with contextlib.suppress(KeyError, OSError):  # no such user
        users.add(getpass.getuser())
    words = dict.fromkeys({part for name in hosts for part in (name, name.partition(".")[0])} - _COMMON, "HOST")
    words |= dict.fromkeys(users - _COMMON, "USER")
    release = os.uname().release
    number = re.match(r"[\d.]*\d", release)
    words[release] = number[0] if number else release

    ends = dict.fromkeys(names, "") | dict.fromkeys(words, r"(?![\w-]|\.\w)")
    longest = sorted(ends, key=len, reverse=True)
    pattern = re.compile(rf"(?<![\w.-])(?:{'|'.join(re.escape(word) + ends[word] for word in longest)})")
    names |= words

    def scrub(value: Any) -> Any:
        if isinstance(value, str):
            return _HOMES.sub("~", _IMAGES.sub("an image file", pattern.sub(lambda found: names[found[0]], value)))
        if isinstance(value, dict):
            return {scrub(str(key)): scrub(item) for key, item in value.items()}
        if isinstance(value, (list, tuple)):
            return [scrub(item) for item in value]
        return float(f"{value:.6g}") if isinstance(value, float) else value

    return scrub


# Formats the stored results for the page and the README, by Jinja's templates and tabulate. The rows of each table are
# made here, as dictionaries by column; page_results.md says where they go.

_DAMAGED = (LookupError, TypeError, AttributeError, ValueError, jinja2.UndefinedError)  # what other results raise here

# The summary's rows: what is moved, raw_io's group and row
_SUMMARY = [
    ("read, page-locked tensor", "read", "nvme_ops, locked"),
    ("read, ordinary tensor that was in use", "read", "nvme_ops, pageable"),
    ("write, page-locked tensor", "write", "nvme_ops, locked"),
    ("write, ordinary tensor that was in use", "write", "nvme_ops, pageable"),
    ("read from the page cache, ordinary tensor that was in use", "cached", "nvme_ops, pageable"),
    ("16,384 random 4 KiB reads in one call", "random", "nvme_ops submit_preadv, nvme_ops.empty"),
]
# The README's rows: what is done; the section, the begin of a table's title, this package's row; what others use,
# and its row
_README = [
    ("computing with a model larger than memory, batch 4", "inference", "batch 4", "nvme_ops from_pretrained, ",
     "accelerate's disk map, in transformers", "transformers, disk map, "),
    ("saving a checkpoint of 1 GiB, durably", "checkpoint", "save, durably; large", "nvme_ops .safetensors",
     "`torch.save` and `fsync`", "torch.save, torch.load"),
    ("a training step with AdamW's states on NVMe", "training_engines", "AdamW", "nvme_ops, states",
     "DeepSpeed's offload to NVMe", "DeepSpeed, states"),
    ("reading samples of 128 KiB in random order", "data", "random samples of 128 KiB", "nvme_ops",
     "a file for each, torch's `DataLoader`", "plain"),
]  # fmt: skip

Json = Mapping[str, Any]
Results = Mapping[str, Json]  # by section, in the order of the page


def render_page(text: str, results: Results, pictures: str = "") -> str:
    """Returns the page with its results made anew. ``pictures``: the folder of the plots, relative to the page."""
    text = render_other(text, results, pictures, "")
    parts = {"machines": _part("machines", _machines(results)), "summary": _summary(results)}
    return between_marks(
        text, {name: part for name, part in parts.items() if name == "machines" or f"<!-- {name}" in text}
    )


def render_other(text: str, results: Results, pictures: str = "", page: str = "benchmarks.md") -> str:
    """Returns a page with its sections made anew. ``page``: where the machines are described."""
    machines = _machines(results)
    numbers = {name: machines.index(stored["description"]) + 1 for name, stored in results.items()
               if stored["description"]}  # fmt: skip
    return between_marks(text, {
        f"section {name}": _part(
            "section", results.get(name, {}), numbers.get(name), pictures, page, SECTIONS[name].folded)
        for name in re.findall(r"^<!-- section (\w+) -->$", text, re.MULTILINE)
    })  # fmt: skip


def _machines(results: Results) -> list[Json]:
    """Returns the descriptions of the machines that results come from."""
    found: list[Json] = []
    for stored in results.values():
        if stored["description"] and stored["description"] not in found:
            found.append(stored["description"])
    return found


def render_readme(text: str, results: Results) -> str:
    """Returns the README with its table made anew."""
    rows = list(_readme_rows(results))
    return between_marks(text, {"benchmarks": _part("readme", rows) if rows else _part("section", {})})


def _readme_rows(results: Results) -> Iterator[Cells]:
    for words, section, title, ours, other, theirs in _README:
        documents = [run["document"] or {} for run in results.get(section, {}).get("runs", [])]
        tables = [table for document in documents for each in document.get("folders", {}).values()
                  for table in each["tables"] if title in table["title"]]  # fmt: skip
        rows = [[row for row in table["rows"] if row["name"].startswith(name) and row["spread"]][:1]
                for table in tables[:1] for name in (ours, theirs)]  # fmt: skip
        for own, its in zip(*rows, strict=False) if rows else ():  # one pair, or none
            values = [f"{row['spread']['median']:.3g} {tables[0]['unit']}" for row in (own, its)]
            times = statistics.median(one / two for one, two in zip(own["values"], its["values"], strict=True))
            yield {"": words, "nvme_ops": values[0], "what people use today": f"{values[1]}: {other}",
                   "times as fast": f"{times:.1f}", "measured": results[section]["date"]}  # fmt: skip


def between_marks(text: str, parts: Mapping[str, str]) -> str:
    """Returns ``text`` with each part between the lines that name it. Raises ValueError if these are missing."""
    for name, part in parts.items():
        begin, end = f"<!-- {name} -->\n", f"<!-- /{name} -->"
        before, first, rest = text.partition(begin)
        _, last, after = rest.partition(end)
        if not first or not last:
            raise ValueError(f"it has no lines {begin.strip()} and {end}")
        lines = "\n".join(line.rstrip() for line in part.splitlines())
        text = "".join([before, begin, "\n", re.sub(r"\n{3,}", "\n\n", lines).strip("\n"), "\n\n", end, after])
    return text


def _summary(results: Results) -> str:
    documents = (run["document"] or {} for run in results.get("raw_io", {}).get("runs", []))
    raw_io: Json = next((document for document in documents if document.get("folders")), {})
    if not raw_io:
        return _part("section", {})
    notes = {row["note"] for found in raw_io["folders"].values() for table in found["tables"] for row in table["rows"]
             if row["name"] == "fio best"}  # fmt: skip
    lacks = "; ".join(sorted(note for note in notes if note and not note.startswith("failed")))
    known = results["raw_io"]["description"]["places"]
    places = "; ".join(f"{name.lower()} is {_storage(known.get(name, {}))}" for name in raw_io["folders"])
    return _part("summary", results["raw_io"], raw_io, lacks, places, _summary_rows(raw_io["folders"]))


def _storage(place: Mapping[str, str]) -> str:
    kind, device = place.get("file system", "unknown").partition(" ")[0], place.get("device", "none")
    return kind if device.startswith("none") else f"{kind} on {device}"


def _summary_rows(folders: Json) -> Iterator[Cells]:
    for words, group, name in _SUMMARY:
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


def by_size(document: Json, tables: Sequence[Json]) -> Iterator[tuple[str, list[Cells]]]:
    """Yields titles and rows: tables as they are; or, of a program with several sizes, one table for each group.

    Its columns are the sizes, its cells medians and, in brackets, how many times as fast the reference is.
    """
    if not document.get("sizes"):
        yield from ((table["title"], cells(table)) for table in tables)
        return
    for group in dict.fromkeys(table["group"] for table in tables):
        one = [table for table in tables if table["group"] == group]
        made: dict[str, Cells] = {row["name"]: {"": row["name"]} for table in one for row in table["rows"]}
        for table in one:
            size = _SIZE.findall(table["title"])[0]
            for row in table["rows"]:
                if row["spread"]:
                    times = 1 / row["against_reference"]["median"]
                    ratio = "" if row["name"] == table["reference"] else f" ({times:.2g})"
                    made[row["name"]][size] = f"{row['spread']['median']:.2g}{ratio}"
        title = re.split(", |: ", _SIZE.sub("each size", one[0]["title"]))[0]
        reference = f"in brackets: how many times as fast {one[0]['reference']} is"
        yield f"{title}, {one[0]['unit']}; {reference}", [row for row in made.values() if len(row) > 1]


_SIZE = re.compile(r"\d+ [KMG]iB")


def table(rows: Iterable[Cells]) -> str:
    """Returns a table in Markdown. A column that no row fills is left out."""
    lines = used_columns(rows)
    escaped = [[word.replace("|", "\\|").replace("\n", " ") for word in row.values()] for row in lines]
    return str(tabulate(escaped, list(lines[0]), "github", disable_numparse=True))


def machine_rows(description: Json, number: int) -> Iterator[Cells]:
    """Yields the rows of a machine's description."""
    for name, words in {**description["machine"], **description["settings"]}.items():
        yield {f"machine {number}": name, " ": words}
    for name, place in description["places"].items():
        kept = {key: words.partition(" (")[0] if key == "file system" else words for key, words in place.items()}
        yield {f"machine {number}": f"`{name}`", " ": "; ".join(f"{key}: {words}" for key, words in kept.items())}


def _part(macro: str, *values: object) -> str:
    return str(getattr(_ENVIRONMENT.get_template("page_results.md").module, macro)(*values))


def _broken(line: str) -> list[str]:
    """Returns parts of a line that fit, with what is before them, into the 120 columns of a page."""
    return textwrap.wrap(line, 112, break_long_words=False, break_on_hyphens=False)


_ENVIRONMENT = jinja2.Environment(
    loader=jinja2.FileSystemLoader(ROOT / "benchmarks"), trim_blocks=True, lstrip_blocks=True
)
_ENVIRONMENT.filters.update(
    table=table, rows=cells, by_size=by_size, blocks=blocks_rows, machine=machine_rows, size=size_words
)
_ENVIRONMENT.filters["command"] = lambda words: " \\\n      ".join(_broken(words))
_ENVIRONMENT.filters["output"] = lambda text: "\n".join(
    "\n    ".join(_broken(line) or [""]) for line in text.rstrip().splitlines()
)
_ENVIRONMENT.filters["wrapped"] = lambda text: textwrap.fill(
    " ".join(text.split()), 120, break_long_words=False, break_on_hyphens=False
)


def main(argv: Sequence[str]) -> int:
    """Returns 0; 1 if a command failed; 2 for wrong arguments; 130 after Ctrl-C, which keeps finished sections."""
    args = arguments(argv)

    @stop.measuring("page")
    def measured(_: Sequence[str] | None = None) -> int:
        args.results.mkdir(parents=True, exist_ok=True)
        write(args)
        if args.render:
            draw(args.results)
        failed = []
        for name in SECTIONS:
            if not args.render and (not args.only or name in args.only):
                failed += [] if measure(name, args) else [name]
                write(args)
        if failed:
            print(f"page: failed, and the page says so: {', '.join(failed)}", file=sys.stderr)
        return 1 if failed else 0

    return measured()
