"""Formats results: on one screen, as text in the layout that ds_report's users know, and as JSON. Checks nothing."""

from __future__ import annotations

import json
import re
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias, cast

from nvme_ops.text import printable

from .result import Json, Result, Status

LINE = "-" * 50
OPS, BUILD, ENVIRONMENT = "ops", "build", "environment"  # sections with a layout of their own
BACKENDS, CUFILE = "backends", "cufile"
OPERATORS = (BUILD, OPS)  # what --hide_operator_status leaves out
NOTE = """\
NOTE: Ops not installed will be just-in-time (JIT) compiled at
      runtime if needed. Op compatibility means that your system
      meets the required dependencies to JIT install the op."""
_NAME_WIDTH = 23
_INSTALLED_WIDTH = 11
_ENVIRONMENT_WIDTH = 33
_GREEN, _YELLOW, _RED, _END = "\033[92m", "\033[93m", "\033[91m", "\033[0m"
_COLOURS = {"OKAY": _GREEN, "YES": _GREEN, "JIT": _GREEN, "WARNING": _YELLOW, "NO": _RED, "FAIL": _RED}
# a mark; not the [NO] of an op that is not installed, which is nothing bad
_MARK = re.compile(r"\[(OKAY|YES|JIT|WARNING|FAIL|NO(?!\] \.\.))\]")

Sections: TypeAlias = Mapping[str, Sequence[Result]]  # by section, or by folder


@dataclass(frozen=True)
class Style:
    """How the text is written."""

    colour: bool = False
    fixes: bool = True  # warnings and what to do about them; False for --hide_errors_and_warnings


def as_text(sections: Sections, storage: Sections, style: Style) -> str:
    """Returns the report as text; omits sections that are not given."""
    lines: list[str] = []
    if BUILD in sections or OPS in sections:
        lines += [LINE, "nvme_ops op report", LINE, *NOTE.splitlines(), LINE, "JIT compiled ops requires ninja"]
        lines += _painted(result_lines(sections.get(BUILD, ()), style), style)
        lines += [LINE, f"op name {'.' * 16} installed .. compatible", LINE]
        lines += _painted(op_lines(sections.get(OPS, ()), style), style)
    for name, results in sections.items():
        if name not in (BUILD, OPS):
            lines += [LINE, _TITLES.get(name, name), LINE]
            more = result_lines(results, style, _ENVIRONMENT_WIDTH if name == ENVIRONMENT else _NAME_WIDTH)
            lines += more if name == CUFILE and not _has_gpu(sections) else _painted(more, style)
    for folder, results in storage.items():
        lines += [LINE, f"Storage at {printable(folder)}:", LINE, *_painted(result_lines(results, style), style)]
    return "\n".join([*lines, LINE, *([verdict(sections, storage)] if sections.get(OPS) else []), LINE]) + "\n"


def verdict(sections: Sections, storage: Sections) -> str:
    """Returns one line: what can be used here, and how, or what cannot, be it a folder."""
    words, ready, chosen = [], True, _chosen(sections)
    for op in sections.get(OPS, ()):
        if not op.data.get("expected", True):
            words.append(f"{op.name}: no GPU here")
        elif op.status in (Status.NO, Status.FAIL):
            ready = False
            words.append(f"{op.name}: {op.detail}")
        elif op.name == "async_io":
            words.append(f"{op.name} on {chosen.detail}" if chosen else op.name)
        elif op.data.get("expected") is not None:
            words.append(op.name)
    for folder, results in storage.items():
        for each in [each for each in results if each.status is Status.NO][:1]:
            ready = False
            words.append(printable(each.detail if folder in each.detail else f"{folder}: {each.detail}"))
    return f"{'ready' if ready else 'NOT ready'}: {'; '.join(words)}"


def _chosen(sections: Sections) -> Result | None:
    return next((each for each in sections.get(BACKENDS, ()) if each.name == "chosen"), None)


def _has_gpu(sections: Sections) -> bool:
    return any(each.name == "GPU" and not each.status.needs_fix for each in sections.get(CUFILE, ()))


_TITLES = {
    BACKENDS: "Backends, in the order in which they are tried:",
    CUFILE: "cuFile (for the gds op):",
    ENVIRONMENT: "General environment info:",
}


def op_lines(results: Sequence[Result], style: Style) -> list[str]:
    """Returns the table of ops."""
    lines = [] if results else ["no op is known"]
    for result in results:
        if "installed" not in result.data:  # its check failed
            lines += result_lines([result], style)
            continue
        just_in_time = result.data.get("compiled") == "cached"
        installed = "[JIT]" if just_in_time else "[YES]" if result.data["installed"] else "[NO]"
        dots = "." * (_INSTALLED_WIDTH - len(installed))
        lines.append(f"{_dotted(result.name, _NAME_WIDTH)} {installed} {dots} [{result.status.value}]")
        if style.fixes:
            mark = " optional: " if result.status is Status.OKAY else " [WARNING] "
            warnings = result.data.get("warnings") or [*filter(None, [result.detail])]
            lines += [f"{mark}{printable(word, lines=True)}" for word in cast("list[str]", warnings)]
            lines += _fix(result, style)
    return lines


def result_lines(results: Sequence[Result], style: Style, width: int = _NAME_WIDTH, fix: bool = True) -> list[str]:
    """Returns a line for each result, each followed by its ``fix``."""
    lines = []
    for result in results:
        judged = "" if result.status is Status.INFO else f"[{result.status.value}]"
        words = "" if not style.fixes and result.status.needs_fix else printable(result.detail, lines=True)
        lines.append(" ".join(filter(None, [_dotted(result.name, width), judged, words])))
        lines += _fix(result, style) if fix else []
    return lines


def _fix(result: Result, style: Style) -> list[str]:
    return [f"{'':10} fix: {printable(result.fix, lines=True)}"] if result.fix and style.fixes else []


def _dotted(name: str, width: int) -> str:
    return f"{name} {'.' * max(2, width - len(name))}"


def _painted(lines: Iterable[str], style: Style) -> Iterable[str]:
    """Returns the lines with their marks in colours, if there are any."""
    if not style.colour:
        return lines
    return [_MARK.sub(lambda found: f"{_COLOURS[found[1]]}{found[0]}{_END}", line) for line in lines]


def as_json(version: str, unusable: Sequence[str], sections: Sections, storage: Sections) -> str:
    """Returns one JSON document: every result under its section and name, fixes included."""
    document: dict[str, Json] = {
        "schema": 1,
        "version": version,
        "unusable_ops": list(unusable),
        "sections": {name: _results(results) for name, results in sections.items()},
        "storage": {folder: _results(results) for folder, results in storage.items()},
    }
    return json.dumps(document, indent=2) + "\n"


def _results(results: Sequence[Result]) -> dict[str, Json]:
    return {
        each.name: {"status": each.status.value, "detail": each.detail, "fix": each.fix, "data": each.data}
        for each in results
    }


# On one screen: the ops, the backends, what limits them, and what to do

WIDTH = 80
_MORE = "nvme-report -v: the results of all checks; --folder DIR: a folder's device"
_OPTIONAL = "libaio"  # where another backend is used


def as_screen(about: str, sections: Sections, storage: Sections, style: Style) -> str:
    """Returns the report as text of ``WIDTH`` columns; omits sections that are not given.

    Args:
        about: the versions, in the first line.
        sections: all results.
        storage: results by folder.
        style: how it is written.
    """
    lines = [*_wrapped(about), LINE]
    if OPS in sections:
        rows = [each for each in sections[OPS] if each.data.get("expected", True)]
        lines += [f"op name {'.' * 16} installed .. compatible"]
        lines += op_lines(rows, Style(fixes=False))
        lines += [LINE]
    for result in sections.get(BACKENDS, ()):
        lines += map(_fitting, result_lines([result], Style(), fix=False))
    lines += [_folder_line(folder, results) for folder, results in storage.items()]
    if style.fixes:
        lines += _complaints(sections, storage)
    last = _wrapped(verdict(sections, storage)) if sections.get(OPS) else []
    return "\n".join([*_painted(lines, style), LINE, *last, _MORE]) + "\n"


def _complaints(sections: Sections, storage: Sections) -> Iterator[str]:
    """Yields the complaints, each with its fix: first those that limit performance, then optional ones."""
    found: list[tuple[str, Result]] = []
    optional: list[tuple[str, Result]] = []
    gpu = any(each.name == "gds" and each.data.get("expected") for each in sections.get(OPS, ()))
    chosen = _chosen(sections)
    served = chosen is not None and chosen.data.get("backend") not in (None, "threads")
    for section in (OPS, BUILD, BACKENDS, *([CUFILE] if gpu else []), ENVIRONMENT):
        for each in sections.get(section, ()):
            if each.status.needs_fix and each.data.get("expected", True):
                (optional if served and each.name == _OPTIONAL else found).append((each.name, each))
    for folder, results in storage.items():
        found += [(f"{printable(folder)}: {each.name}", each) for each in results if each.status.needs_fix]
    shown: set[str] = set()  # fixes; one may help against several complaints
    for title, group in (("what limits, and what to do:", found), ("optional:", optional)):
        if group:
            yield from (LINE, title)
        for name, each in group:
            yield from _wrapped(f"[{each.status.value}] {name}: {printable(each.detail)}", "  ")
            if each.fix not in shown:
                yield from _command(printable(each.fix))
                shown.add(each.fix)


def _command(fix: str) -> Iterator[str]:
    """Yields the lines of a command, which can be pasted even if there are several; a remark comes first."""
    words, _, remark = fix.partition("  # ")
    if remark:
        yield from _wrapped(f"# {remark}", "       # ", first="       ")
    lines = textwrap.wrap(words, WIDTH - 10, break_long_words=False, break_on_hyphens=False)
    for number, line in enumerate(lines):
        yield f"{'      ' if number else '  fix:'} {line}" + (" \\" if number < len(lines) - 1 else "")


def _folder_line(folder: str, results: Sequence[Result]) -> str:
    found = [each.status for each in results if each.status.needs_fix]
    worst = Status.NO if Status.NO in found else (*found, Status.OKAY)[0]
    facts: Mapping[str, str] = {each.name: each.detail for each in results}
    words = ", ".join(filter(None, (facts.get("file system", "").partition(" ")[0], facts.get("device", ""))))
    return _fitting(f"{printable(folder)}: [{worst.value}] {printable(words)}")


def _fitting(line: str) -> str:
    return line if len(line) <= WIDTH else f"{line[: WIDTH - 3]}..."


def _wrapped(text: str, indent: str = "", first: str = "") -> list[str]:
    return textwrap.wrap(text, WIDTH, initial_indent=first, subsequent_indent=indent or first, break_on_hyphens=False)
