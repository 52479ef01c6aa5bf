"""The command ``nvme-report``: arguments in, report out, exit status."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from collections.abc import Sequence
from functools import partial

from nvme_ops.op_builder import ALL_OPS
from nvme_ops.op_builder.machine import Host
from nvme_ops.text import command, command_line, say

from . import gds, kernel, ops, render, storage
from .result import Checks, Result, Status, run_checks

_DESCRIPTION = """\
Shows which ops of nvme_ops are installed and which can be built here, which
backend they would use and why the others are not usable, and what else on this
machine affects them. Every warning ends with the command that fixes it. No op
is compiled, nothing is installed or changed, cuFile's driver is not opened
unless --open-driver asks for it.
"""
_EPILOG = """\
examples:
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


def parser() -> argparse.ArgumentParser:
    """Returns the parser of the flags."""
    made = command_line("nvme-report", _DESCRIPTION, _EPILOG)
    add = made.add_argument
    words = "also report on the storage under DIR, with a small temporary file; may be given several times"
    add("--folder", metavar="DIR", action="extend", nargs="+", default=[], help=words)
    add(
        "-v",
        "--verbose",
        action="store_true",
        help="the results of all checks and the environment, laid out like ds_report",
    )
    add("--json", action="store_true", help="one JSON document with everything, instead of text")
    words = "exit with status 1 when one of these ops cannot be used; without names: async_io, and gds where there is "
    add("--strict", metavar="OP", nargs="*", choices=list(ALL_OPS), help=f"{words}an NVIDIA GPU")
    words = "also open cuFile's driver for real and say whether GPUDirect Storage is available; in a process of its own"
    add("--open-driver", action="store_true", help=f"{words}, for at most {gds.LIMIT:.0f} seconds")
    add("--hide_operator_status", action="store_true", help="leave out ninja and the table of ops")
    add("--hide_errors_and_warnings", action="store_true", help="leave out the warnings and their fixes")
    add("--version", action="version", version=f"nvme-report {ops.PACKAGE_VERSION}")
    return made


def collect(host: Host, open_driver: bool = False) -> dict[str, tuple[Result, ...]]:
    """Runs every check that needs no folder; section name -> results. Opens cuFile only if ``open_driver``."""
    rows = run_checks({name: partial(ops.row, builder) for name, builder in ALL_OPS.items()})
    built = ops.all_built()
    environment: Checks = {
        "torch": ops.torch,
        "nvme_ops": ops.package,
        "ops compiled with": lambda: ops.compiled_with(built),
        "C++ compiler": lambda: ops.if_needed(ops.compiler, built),
        "Python headers": lambda: ops.if_needed(ops.python_headers, built),
        "CUDA": lambda: ops.cuda(host),
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
        "ops": rows,
        "backends": kernel.backends(host, built),
        "cufile": gds.section(host) + (run_checks({"cuFile driver": gds.open_driver}) if open_driver else ()),
        "environment": run_checks(environment),
    }


@command("nvme-report")
def main(arguments: Sequence[str] | None = None) -> int:
    """Prints the report; returns the exit status."""
    options = parser().parse_args(arguments)
    host = Host()
    with contextlib.redirect_stdout(sys.stderr):  # what an import prints must not get into the report
        sections = collect(host, options.open_driver)
        folders = {folder: storage.inspect(host, folder) for folder in options.folder}
    unusable = ops.unusable(sections["ops"], options.strict or ())
    if options.json:
        text = render.as_json(ops.PACKAGE_VERSION, [op.name for op in unusable], sections, folders)
    else:
        hidden = render.OPERATORS if options.hide_operator_status else ()
        shown = {name: results for name, results in sections.items() if name not in hidden}
        colour = sys.stdout.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
        style = render.Style(colour=colour, fixes=not options.hide_errors_and_warnings)
        about = ", ".join(ops.versions())
        text = (
            render.as_text(shown, folders, style) if options.verbose else render.as_screen(about, shown, folders, style)
        )
    encoding = sys.stdout.encoding or "utf-8"
    sys.stdout.write(text.encode(encoding, "backslashreplace").decode(encoding))  # a folder may have any name
    sys.stdout.flush()
    if options.strict is None:
        return 0
    bad = [(op.name, op) for op in unusable]
    bad += [(folder, each) for folder, results in folders.items() for each in results if each.status is Status.NO]
    for name, result in bad:
        say(f"nvme-report: {name} cannot be used: {result.detail}\n  fix: {result.fix}")
    return 1 if bad else 0
