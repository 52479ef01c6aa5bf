"""Formats what ``nvme-bench explain`` found, as one page of text and as JSON."""

from __future__ import annotations

import re
import textwrap
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from nvme_ops.bench.explain_judge import FIO, Judgement, Measured
from nvme_ops.bench.explain_place import FilePlace
from nvme_ops.bench.measure import Row, Spread
from nvme_ops.bench.tables import Table, as_json, with_range
from nvme_ops.bench.tables import as_text as table_text
from nvme_ops.text import rate_words, size_words, terminal_width

_NOTE = 50


@dataclass(frozen=True)
class Direction:
    """The measurements and conclusions of one direction."""

    rows: list[Row]
    measured: Measured
    judgement: Judgement


@dataclass
class Page:
    """Everything on the page."""

    place: FilePlace
    scratch: bool  # the file is one of ours
    size: int  # bytes of a pass
    rounds: int
    machine: dict[str, str]
    energy: str  # why there is none
    as_found: Spread | None  # GB/s, before the page cache was emptied
    still_cached: int | None  # bytes that could not be dropped from the page cache
    hindrances: list[tuple[str, str]] = field(default_factory=list)
    directions: list[Direction] = field(default_factory=list)


def as_text(page: Page) -> str:
    """Returns the verdicts, then for each direction its table and findings, then the place and the machine."""
    lines = [direction.judgement.verdict for direction in page.directions]
    for direction in page.directions:
        lines += ["", _table_text(_table(page, direction)), "", *_findings(direction)]
    return "\n".join([*lines, "", *_surroundings(page)])


def as_document(page: Page, command: list[str]) -> dict[str, Any]:
    """Returns everything in the text, and each pass."""
    return {
        "command": ["explain", *command],
        "machine": page.machine,
        "place": {**asdict(page.place), "scratch": page.scratch},
        "io_size": page.size,
        "rounds": page.rounds,
        "as_found": page.as_found and asdict(page.as_found),
        "still_cached": page.still_cached,
        "refused": [{"what": words, "fix": fix} for words, fix in page.hindrances],
        "energy": page.energy or "available",
        "directions": [
            {
                **asdict(direction.judgement),
                "write": direction.measured.write,
                "busy_cores": direction.measured.busy,
                "copy_rate": direction.measured.copy_rate,
                "new_page_rate": direction.measured.new_page_rate,
                "device_copy_rate": direction.measured.device_copy_rate,
                "table": as_json(_table(page, direction)),
            }
            for direction in page.directions
        ],
    }


def _table(page: Page, direction: Direction) -> Table:
    judgement = direction.judgement
    marks = {judgement.ceiling: "the ceiling", judgement.reached: "what was reached"}
    rows = [replace(row, note=", ".join(filter(None, (marks.get(row.name), row.note)))) for row in direction.rows]
    word = "write" if direction.measured.write else "read"
    title = (
        f"{word} of {size_words(page.size)} past the page cache, default aio_handle, medians of {page.rounds} rounds"
    )
    return Table(word, title, "GB/s", rows, judgement.ceiling, ("CPU s/GiB", "J/GiB"))


def _table_text(table: Table) -> str:
    """Returns what fits on a screen; the document has the notes in full."""
    short = [replace(row, note=textwrap.shorten(row.note, _NOTE, placeholder=" ...")) for row in table.rows]
    return table_text(replace(table, rows=short))


def _findings(direction: Direction) -> list[str]:
    judgement, measured = direction.judgement, direction.measured
    lines = []
    for number, finding in enumerate(judgement.findings, 1):
        lines.append(f"{number}. {finding.name}: {finding.share:.0%} of the gap")
        lines += _wrapped("   measured: ", finding.evidence) + _wrapped("   change: ", finding.fix)
    if not judgement.findings:
        lines.append("Nothing to change: no part of this program costs more than the noise of the measurement.")
    if judgement.ceiling != FIO:
        why = measured.missing or f"{FIO} is slower here"
        lines += _wrapped("", f"The ceiling is this package's own best with page-locked memory: {why}.")
    words = f"Differences below {judgement.noise:.0%} cannot be distinguished from noise (try more --rounds)."
    if not any("one core" in finding.evidence for finding in judgement.findings):
        copied, made = rate_words(measured.copy_rate), rate_words(measured.new_page_rate)
        words += f" One core copies {copied} and makes new pages at {made}."
    return lines + _wrapped("", words)


def _surroundings(page: Page) -> list[str]:
    place, about, lines = page.place, page.machine, []
    if not page.scratch:
        extents = "" if place.extents is None else f" in {place.extents} extent{'' if place.extents == 1 else 's'}"
        lines.append(f"file: {place.path}, {size_words(place.size)}{extents}; {_cache_words(page)}")
    if place.stored < place.size:
        missing = size_words(place.size - place.stored)
        lines.append(f"caution: {missing} of it are not on the device (holes or compression)")
    if page.still_cached is not None and page.still_cached > page.size // 50:
        lines.append(f"caution: {size_words(page.still_cached)} of it stay in the page cache: others map them")
    lines += [f"refused: {words}; fix: {fix}" for words, fix in page.hindrances]
    if page.energy:
        lines.append(f"energy: {page.energy}")
    lines.append(f"place: {', '.join(filter(None, (place.file_system, place.device, place.alignment)))}")
    lines.append(
        f"machine: {about['cpu']}; {about['memory']}; kernel {about['kernel']}; python {about['python']}; "
        f"torch {about['torch']}; {about['backends']}"
    )
    return [part for line in lines for part in _wrapped("", line, "  ")]


def _cache_words(page: Page) -> str:
    cached = page.place.cached
    if cached == 0:
        return "nothing of it in the page cache"
    share = "unknown how much of it" if cached is None else f"{cached / page.place.size:.0%} of it"
    return f"{share} in the page cache, as found {with_range(page.as_found, 3)} GB/s"


def _wrapped(label: str, text: str, indent: str | None = None) -> list[str]:
    whole = label + re.sub(r" (?=[GM]B/s)", "\xa0", text)  # keeps a number and its unit together
    lines = textwrap.wrap(
        whole, terminal_width(), subsequent_indent=" " * len(label) if indent is None else indent,
        break_long_words=False, break_on_hyphens=False,
    )  # fmt: skip
    return [line.replace("\xa0", " ") for line in lines]
