"""Shows which ops are installed or can be built here, and what affects them.

Also which backend they would use, why the others are not usable, and what else
on this machine matters. An op that is built is tried: a handle writes a page
and reads it back. Every warning ends with the command that fixes it. No op is
compiled, nothing is installed or changed, cuFile's driver is not opened unless
--open-driver asks for it.

for example:
  nvme-report                      the report, on one screen
  nvme-report -v                   the results of all checks
  nvme-report --folder /mnt/nvme   and what that folder's device can do
  nvme-report --json | jq .sections.backends.chosen
  nvme-report --strict             exit status 1 when an op cannot be used, for
                                   Dockerfiles and CI
  nvme-report --strict async_io    the same, for this op only

exit status: 0; 1 with --strict when an op or a folder cannot be used;
2 for a wrong argument
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import sys
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias, cast

from nvme_ops.base.command_line import command, command_line, say
from nvme_ops.base.text import WORDS, printable, terminal_width
from nvme_ops.op_builder import ALL_OPS, AsyncIOBuilder
from nvme_ops.op_builder.machine import Host

from . import gds, kernel, ops, storage, trial
from .result import Checks, Json, Result, Status, run_checks
from .trial import Attempt


def parser() -> argparse.ArgumentParser:
    """Returns the parser of the flags."""
    description, example, epilog = (__doc__ or "").partition("for example:\n")  # what --help says
    made = command_line("nvme-report", description, example + epilog)
    add = made.add_argument
    words = "also report on the storage under DIR, with a small temporary file; may be given several times"
    add("--folder", metavar="DIR", action="extend", nargs="+", default=[], help=words)
    add("-v", "--verbose", action="store_true", help="the results of all checks, and lines of any width")
    add("--json", action="store_true", help="one JSON document with everything, instead of text")
    words = "exit with status 1 when one of these ops cannot be used; without names: async_io, and gds where there is "
    add("--strict", metavar="OP", nargs="*", choices=list(ALL_OPS), help=f"{words}an NVIDIA GPU")
    words = "also open cuFile's driver for real and say whether GPUDirect Storage is available; in a process of its own"
    add("--open-driver", action="store_true", help=f"{words}, for at most {gds.LIMIT:.0f} seconds")
    add("--hide-operator-status", action="store_true", help="leave out ninja and the table of ops")
    add("--hide-errors-and-warnings", action="store_true", help="leave out the warnings and their fixes")
    add("--version", action="version", version=f"nvme-report {ops.PACKAGE_VERSION}")
    return made


def collect(host: Host, open_driver: bool = False, handle: Attempt | None = None) -> dict[str, tuple[Result, ...]]:
    """Runs every check that needs no folder; section name -> results. Opens cuFile only if ``open_driver``.

    ``handle`` is what came of trying one, which is tried here otherwise.
    """
    handle = handle or try_handle()
    tried = {AsyncIOBuilder.NAME: handle}
    rows = run_checks({name: partial(ops.row, builder, tried.get(name)) for name, builder in ALL_OPS.items()})
    built = ops.all_built()
    backends, cufile = kernel.backends(host, handle), gds.section(host)
    environment: Checks = {
        "torch": ops.torch,
        "nvme_ops": ops.package,
        "ops compiled with": lambda: ops.compiled_with(built),
        "C++ compiler": lambda: ops.if_needed(ops.compiler, built),
        "Python headers": lambda: ops.if_needed(ops.python_headers, built),
        "CUDA_HOME": ops.cuda,
        "kernel": lambda: kernel.version(host),
        "io_uring sysctl": lambda: kernel.io_uring_sysctl(host),
        "seccomp": lambda: kernel.seccomp(host),
        "aio-max-nr": lambda: kernel.aio_limit(host),
        "memlock limit": lambda: kernel.memlock(host),
        "huge pages (hugetlb)": lambda: kernel.reserved(host),
        "transparent huge pages": lambda: kernel.transparent(host),
        "shared memory (/dev/shm) size": lambda: kernel.shared(host),
    }
    return {
        "build": run_checks({"ninja": ops.ninja}),
        "ops": tuple(ops.judged_with(result, (*backends, *cufile)) for result in rows),
        "backends": backends,
        "cufile": cufile + (run_checks({"cuFile driver": gds.open_driver}) if open_driver else ()),
        "environment": run_checks(environment),
    }


def try_handle(folders: Sequence[str] = ()) -> Attempt:
    """Returns what came of making a handle, and of writing and reading a page, also in each of ``folders``."""
    return Attempt() if ops.torch_problem() else trial.attempt(ALL_OPS[AsyncIOBuilder.NAME], folders)


@command("nvme-report")
def main(arguments: Sequence[str] | None = None) -> int:
    """Prints the report; returns the exit status."""
    options = parser().parse_args(arguments)
    host = Host()
    with contextlib.redirect_stdout(sys.stderr):  # what an import prints must not get into the report
        handle = try_handle(options.folder)
        sections = collect(host, options.open_driver, handle)
        folders = {folder: storage.inspect(host, folder, handle) for folder in options.folder}
    unusable = ops.unusable(sections["ops"], options.strict or ())
    if options.json:
        text = as_json(ops.PACKAGE_VERSION, [op.name for op in unusable], sections, folders)
    else:
        hidden = (BUILD, OPS) if options.hide_operator_status else ()
        shown = {name: results for name, results in sections.items() if name not in hidden}
        colour = sys.stdout.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
        style = Style(colour, not options.hide_errors_and_warnings, options.verbose)
        text = as_text(", ".join(ops.versions()), shown, folders, style)
    encoding = sys.stdout.encoding or "utf-8"
    sys.stdout.write(text.encode(encoding, "backslashreplace").decode(encoding))  # a folder may have any name
    sys.stdout.flush()
    if options.strict is None:
        return 0
    bad = [(op.name, op) for op in unusable]
    for folder, results in folders.items():
        bad += [(folder, failed) for failed in results if failed.status is Status.NO][:1]
    for name, result in bad:
        say(f"nvme-report: {name} cannot be used: {result.detail}\n  fix: {result.fix}")
    return 1 if bad else 0


# The report, as text and as JSON

LINE = "-" * 50
WIDTH = 80
BUILD, OPS, BACKENDS, CUFILE, ENVIRONMENT = "build", "ops", "backends", "cufile", "environment"
_TITLES = {
    BUILD: "JIT compiled ops requires ninja",
    OPS: f"op name {'.' * 16} installed .. compatible",
    BACKENDS: "Backends, in the order in which they are tried:",
    CUFILE: "cuFile (for the gds op):",
    ENVIRONMENT: "General environment info:",
}
_ALWAYS_SHOWN = ("directory", "device")  # of a folder
_NOTE = """\
NOTE: Ops not installed will be just-in-time (JIT) compiled at
      runtime if needed. Op compatibility means that your system
      meets the required dependencies to JIT install the op."""
_MORE = "nvme-report -v: the results of all checks; --folder DIR: a folder's device"
_NAME, _WIDE_NAME, _INSTALLED = 23, 33, 11  # characters
_GREEN, _YELLOW, _RED, _END = "\033[92m", "\033[93m", "\033[91m", "\033[0m"
_COLOURS = {"OKAY": _GREEN, "YES": _GREEN, "JIT": _GREEN, "WARNING": _YELLOW, "NO": _RED, "FAIL": _RED}
# a mark; not the [NO] of an op that is not installed, which is nothing bad
_MARK = re.compile(r"\[(OKAY|YES|JIT|WARNING|FAIL|NO(?!\] \.\.))\]")

Sections: TypeAlias = Mapping[str, Sequence[Result]]  # by section, or by folder


@dataclass(frozen=True)
class Style:
    """How the text is written."""

    colour: bool = False
    fixes: bool = True  # warnings and what to do about them; False for --hide-errors-and-warnings
    verbose: bool = False  # the results of all checks, with lines of any width; else complaints, and what matters most

    @property
    def width(self) -> int:
        """Characters of a line."""
        return sys.maxsize if self.verbose else min(WIDTH, terminal_width())

    def shows(self, section: str, result: Result) -> bool:
        """Returns whether a result is in the text."""
        always = section in (OPS, BACKENDS) or result.name in _ALWAYS_SHOWN or (self.fixes and result.status.needs_fix)
        return self.verbose or (always and bool(result.data.get("expected", True)))


def as_text(about: str, sections: Sections, storage: Sections, style: Style) -> str:
    """Returns the report as text; omits sections that are not given, or of which nothing is shown.

    Args:
        about: the versions, in the first line.
        sections: all results.
        storage: results by folder.
        style: how it is written.
    """
    lines = [*_wrapped(about, style), LINE]
    if style.verbose and OPS in sections:
        lines += [*_NOTE.splitlines(), LINE]
    titled = [(name, _TITLES[name], results) for name, results in sections.items()]
    titled += [("", f"Storage at {printable(folder)}:", results) for folder, results in storage.items()]
    for name, title, results in titled:
        if shown := [result for result in results if style.shows(name, result)]:
            lines += _wrapped(title, style)
            for result in shown:
                lines += _painted(_lines(result, style, _WIDE_NAME if name == ENVIRONMENT else _NAME), style)
            lines.append(LINE)
    last = _wrapped(verdict(sections, storage)[1], style) if sections.get(OPS) else []
    return "\n".join([*lines, *last, *([] if style.verbose else _wrapped(_MORE, style))]) + "\n"


def verdict(sections: Sections, storage: Sections) -> tuple[bool, str]:
    """Returns whether all can be used here, and one line: how, or what cannot, be it a folder."""
    words, ready, chosen = [], True, _chosen(sections)
    for op in sections.get(OPS, ()):
        if not op.data.get("expected", True):
            words.append(f"{op.name}: no GPU here")
        elif op.status in (Status.NO, Status.FAIL):
            ready = False
            words.append(f"{op.name}: {_line(op.detail)}")
        elif op.name == "async_io":
            words.append((f"{op.name} on {chosen.detail}" if chosen else op.name) + _reservation(op, sections))
        elif op.data.get("expected") is not None:
            words.append(op.name + _reservation(op, sections))
    for folder, results in storage.items():
        for result in [result for result in results if result.status is Status.NO][:1]:
            ready = False
            words.append(_line(result.detail if folder in result.detail else f"{folder}: {result.detail}"))
    return ready, f"{'ready' if ready else 'NOT ready'}: {'; '.join(words)}"


def _reservation(op: Result, sections: Sections) -> str:
    """Returns what was not done to find out that an op can be used; an empty string if it was used."""
    reservations = []
    if op.data.get("compiled", "") is None:
        reservations.append("to be compiled at its first use")
    if op.name == "gds" and not any(result.data.get("opened") for result in sections.get(CUFILE, ())):
        reservations.append("a forecast: --open-driver tries it")
    return f" ({', '.join(reservations)})" if reservations else ""


def _chosen(sections: Sections) -> Result | None:
    return next((result for result in sections.get(BACKENDS, ()) if result.name == "chosen"), None)


def _lines(result: Result, style: Style, width: int) -> Iterator[str]:
    """Yields a result's line, or an op's with its warnings below, and the command that improves it."""
    name = f"{result.name} {'.' * max(2, width - len(result.name))}"
    if "installed" in result.data:
        just_in_time = result.data.get("compiled") == "cached"
        installed = "[JIT]" if just_in_time else "[YES]" if result.data["installed"] else "[NO]"
        yield f"{name} {installed} {'.' * (_INSTALLED - len(installed))} [{result.status.value}]"
        mark = " optional:" if result.status is Status.OKAY else " [WARNING]"
        warnings = result.data.get("warnings") or [*filter(None, [result.detail])]
        for words in cast("list[str]", warnings) if style.fixes else []:
            yield from _wrapped(f"{mark} {_line(words)}", style, "  ")
    else:
        judged = "" if result.status is Status.INFO else f"[{result.status.value}]"
        detail = _line(result.detail) if style.fixes or not result.status.needs_fix else ""
        yield from _wrapped(" ".join(filter(None, [name, judged, detail])), style, "  ")
    if result.fix and style.fixes:
        yield from _command(printable(result.fix), style)


def _command(fix: str, style: Style) -> Iterator[str]:
    """Yields the lines of a command, which can be pasted even if there are several; then a remark, such as another."""
    words, _, remark = fix.partition("  # ")
    lines = textwrap.wrap(words, style.width - 10, **WORDS)
    for number, line in enumerate(lines):
        yield f"{'      ' if number else '  fix:'} {line}" + (" \\" if number < len(lines) - 1 else "")
    if remark:
        yield from _wrapped(f"       # {remark}", style, "       # ")


def _line(text: str) -> str:
    return printable(" ".join(text.split()))


def _wrapped(text: str, style: Style, indent: str = "") -> list[str]:
    return textwrap.wrap(text, style.width, subsequent_indent=indent, **WORDS)


def _painted(lines: Iterable[str], style: Style) -> Iterable[str]:
    """Returns the lines with their marks in colours, if there are any."""
    if not style.colour:
        return lines
    return [_MARK.sub(lambda match: f"{_COLOURS[match[1]]}{match[0]}{_END}", line) for line in lines]


def as_json(version: str, unusable: Sequence[str], sections: Sections, storage: Sections) -> str:
    """Returns one JSON document: the verdict, and every result under its section and name, fixes included."""
    ready, text = verdict(sections, storage)
    document: dict[str, Json] = {
        "schema": 1,
        "version": version,
        "verdict": {"ready": ready, "text": text},
        "unusable_ops": list(unusable),
        "sections": {name: _results(results) for name, results in sections.items()},
        "storage": {folder: _results(results) for folder, results in storage.items()},
    }
    return json.dumps(document, indent=2) + "\n"


def _results(results: Sequence[Result]) -> dict[str, Json]:
    return {
        result.name: {"status": result.status.value, "detail": result.detail, "fix": result.fix, "data": result.data}
        for result in results
    }
