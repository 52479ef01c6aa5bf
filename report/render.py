"""Formats results: on one screen, as text in the layout that ds_report's users know, and as JSON. Checks nothing."""

from __future__ import annotations

import json
import re
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

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
_COLOURS = {Status.OKAY: "\033[92m", Status.WARNING: "\033[93m", Status.NO: "\033[91m", Status.FAIL: "\033[91m"}
_END = "\033[0m"

Sections: TypeAlias = Mapping[str, Sequence[Result]]  # or what lies under each folder


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
        lines += result_lines(sections.get(BUILD, ()), style, _NAME_WIDTH)
        lines += [LINE, f"op name {'.' * 16} installed .. compatible", LINE]
        lines += op_lines(sections.get(OPS, ()), style)
    for name, results in sections.items():
        if name not in (BUILD, OPS):
            lines += [LINE, _TITLES.get(name, name), LINE]
            plain = replace(style, colour=False) if name == CUFILE and not _has_gpu(sections) else style
            lines += result_lines(results, plain, _ENVIRONMENT_WIDTH if name == ENVIRONMENT else _NAME_WIDTH)
    for folder, results in storage.items():
        lines += [LINE, f"Storage at {printable(folder)}:", LINE, *result_lines(results, style)]
    return "\n".join([*lines, LINE, *([verdict(sections, storage)] if sections.get(OPS) else []), LINE]) + "\n"


def verdict(sections: Sections, storage: Sections) -> str:
    """Returns one line: what can be used here, and how, or what cannot, be it a folder."""
    chosen = next((each.detail for each in sections.get(BACKENDS, ()) if each.name == "chosen"), "")
    words, ready = [], True
    for op in sections.get(OPS, ()):
        if not op.data.get("expected", True):
            words.append(f"{op.name}: no GPU here")
        elif op.status in (Status.NO, Status.FAIL):
            ready = False
            words.append(f"{op.name}: {op.detail}")
        elif op.name == "async_io":
            words.append(f"{op.name} on {chosen}" if chosen else op.name)
        elif op.data.get("expected") is not None:
            words.append(op.name)
    for folder, results in storage.items():
        for each in [each for each in results if each.status is Status.NO][:1]:
            ready = False
            words.append(printable(each.detail if folder in each.detail else f"{folder}: {each.detail}"))
    return f"{'ready' if ready else 'NOT ready'}: {'; '.join(words)}"


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
            lines += result_lines([result], style, _NAME_WIDTH)
            continue
        just_in_time = result.data.get("compiled") == "cached"
        installed = "[JIT]" if just_in_time else "[YES]" if result.data["installed"] else "[NO]"
        colour = Status.OKAY if result.data["installed"] or just_in_time else Status.INFO
        cells = f"{_dotted(result.name, _NAME_WIDTH)} {_paint(installed, colour, style)}"
        lines.append(f"{cells} {'.' * (_INSTALLED_WIDTH - len(installed))} {bracket(result.status, style)}")
        if style.fixes:
            words = [printable(result.detail, lines=True)] if result.detail else []
            mark = " optional: " if result.status is Status.OKAY else _paint(" [WARNING] ", Status.WARNING, style)
            lines += [f"{mark}{word}" for word in _warnings(result) or words]
            lines += _fix(result, style)
    return lines


def _warnings(result: Result) -> list[str]:
    warnings = result.data.get("warnings")
    return [printable(warning, lines=True) for warning in warnings] if isinstance(warnings, (list, tuple)) else []


def result_lines(results: Sequence[Result], style: Style, width: int = _NAME_WIDTH, fix: bool = True) -> list[str]:
    """Returns a line for each result, each followed by its ``fix``."""
    lines = []
    for result in results:
        judged = "" if result.status is Status.INFO else bracket(result.status, style)
        words = "" if not style.fixes and result.status.needs_fix else printable(result.detail, lines=True)
        lines.append(" ".join(filter(None, [_dotted(result.name, width), judged, words])))
        lines += _fix(result, style) if fix else []
    return lines


def _fix(result: Result, style: Style) -> list[str]:
    return [f"{'':10} fix: {printable(result.fix, lines=True)}"] if result.fix and style.fixes else []


def _dotted(name: str, width: int) -> str:
    return f"{name} {'.' * max(2, width - len(name))}"


def bracket(status: Status, style: Style) -> str:
    """Returns a mark such as ``[OKAY]``."""
    return _paint(f"[{status.value}]", status, style)


def uncoloured(text: str) -> str:
    """Returns the text without the codes of colours."""
    return re.sub(r"\033\[\d+m", "", text)


def _paint(text: str, status: Status, style: Style) -> str:
    return f"{_COLOURS[status]}{text}{_END}" if style.colour and status in _COLOURS else text


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
_MORE = "nvme-report -v: all that was looked at; --folder DIR: a folder's device"
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
        lines += op_lines(rows, Style(style.colour, fixes=False))
        lines += [LINE]
    for result in sections.get(BACKENDS, ()):
        lines += _clipped(result, style)
    lines += [_folder_line(folder, results, style) for folder, results in storage.items()]
    if style.fixes:
        lines += _complaints(sections, storage, style)
    last = _wrapped(verdict(sections, storage)) if sections.get(OPS) else []
    return "\n".join([*lines, LINE, *last, _MORE]) + "\n"


def _complaints(sections: Sections, storage: Sections, style: Style) -> Iterator[str]:
    """Yields what limits, each with what to do, and then what is optional."""
    needed: list[Result] = []
    optional: list[Result] = []
    gpu = any(each.name == "gds" and each.data.get("expected") for each in sections.get(OPS, ()))
    chosen = next((str(each.data.get("backend")) for each in sections.get(BACKENDS, ()) if each.name == "chosen"), "")
    for section in (OPS, BUILD, BACKENDS, *([CUFILE] if gpu else []), ENVIRONMENT):
        for each in sections.get(section, ()):
            if section == OPS and not each.data.get("expected", True):
                continue
            unneeded = section == BACKENDS and each.name == _OPTIONAL and chosen not in ("", "None", "threads")
            if each.status.needs_fix and each.fix:
                (optional if unneeded else needed).append(each)
    found = [(each.name, each) for each in needed]
    found += [(f"{printable(folder)}: {each.name}", each) for folder, results in storage.items() for each in results
              if each.status.needs_fix]  # fmt: skip
    told: set[str] = set()  # fixes, of which one may help several
    for title, group in (("what limits, and what to do:", found), ("optional:", [(one.name, one) for one in optional])):
        if group:
            yield from (LINE, title)
        for name, each in group:
            mark = bracket(each.status, Style())
            first, *more = _wrapped(f"{mark} {name}: {printable(each.detail)}", "  ")
            yield from (first.replace(mark, bracket(each.status, style), 1), *more)
            if each.fix not in told:
                yield from _command(printable(each.fix))
                told.add(each.fix)


def _command(fix: str) -> Iterator[str]:
    """Yields a command that can be pasted, though it may take several lines; a remark stands above it."""
    words, _, remark = fix.partition("  # ")
    if remark:
        yield from _wrapped(f"# {remark}", "       # ", first="       ")
    lines = textwrap.wrap(words, WIDTH - 10, break_long_words=False, break_on_hyphens=False)
    for number, line in enumerate(lines):
        yield f"{'      ' if number else '  fix:'} {line}" + (" \\" if number < len(lines) - 1 else "")


def _folder_line(folder: str, results: Sequence[Result], style: Style) -> str:
    found = [each.status for each in results if each.status.needs_fix]
    worst = Status.NO if Status.NO in found else (*found, Status.OKAY)[0]
    facts: Mapping[str, str] = {each.name: each.detail for each in results}
    words = ", ".join(filter(None, (facts.get("file system", "").partition(" ")[0], facts.get("device", ""))))
    return _fitting(f"{printable(folder)}: {bracket(worst, style)} {printable(words)}")


def _clipped(result: Result, style: Style) -> list[str]:
    return [_fitting(line) for line in result_lines([result], Style(style.colour, fixes=True), fix=False)]


def _fitting(line: str) -> str:
    """Cuts what is beyond the width, not counting colours."""
    hidden = len(line) - len(uncoloured(line))
    return line if len(line) - hidden <= WIDTH else f"{line[: WIDTH + hidden - 3]}..."


def _wrapped(text: str, indent: str = "", first: str = "") -> list[str]:
    return textwrap.wrap(text, WIDTH, initial_indent=first, subsequent_indent=indent or first, break_on_hyphens=False)
