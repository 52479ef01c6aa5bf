"""The report on one screen: the ops, the backends, what limits them, and what to do. ``-v`` prints everything."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping, Sequence

from nvme_ops.text import printable

from . import render
from .render import BACKENDS, BUILD, CUFILE, ENVIRONMENT, LINE, OPS, Sections, Style
from .result import Result, Status

WIDTH = 80
_MORE = "nvme-report -v: all that was looked at; --path DIR: a folder's device"
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
        lines += render.op_lines(rows, Style(style.colour, fixes=False))
        lines += [LINE]
    for result in sections.get(BACKENDS, ()):
        lines += _clipped(result, style)
    lines += [_folder_line(folder, results, style) for folder, results in storage.items()]
    if style.fixes:
        lines += _complaints(sections, storage, style)
    verdict = [render.verdict(sections, storage)] if sections.get(OPS) else []
    return "\n".join([*lines, LINE, *(_wrapped(verdict[0]) if verdict else []), _MORE]) + "\n"


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
            mark = render.bracket(each.status, Style())
            first, *more = _wrapped(f"{mark} {name}: {printable(each.detail)}", "  ")
            yield from (first.replace(mark, render.bracket(each.status, style), 1), *more)
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
    return _fitting(f"{printable(folder)}: {render.bracket(worst, style)} {printable(words)}")


def _clipped(result: Result, style: Style) -> list[str]:
    plain = Result(result.name, result.status, result.detail, result.fix, result.data)
    return [_fitting(line) for line in render.result_lines([plain], Style(style.colour, fixes=True), fix=False)]


def _fitting(line: str) -> str:
    """Cuts what is beyond the width, not counting colours."""
    hidden = len(line) - len(render.uncoloured(line))
    return line if len(line) - hidden <= WIDTH else f"{line[: WIDTH + hidden - 3]}..."


def _wrapped(text: str, indent: str = "", first: str = "") -> list[str]:
    return textwrap.wrap(text, WIDTH, initial_indent=first, subsequent_indent=indent or first, break_on_hyphens=False)
