"""Parsing, checking and printing that all command lines share."""

from __future__ import annotations

import argparse
import contextlib
import functools
import os
import sys
import textwrap
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from nvme_ops.text import fitted, parse_size, printable


class Main(Protocol):
    """The function of a command: takes its arguments, by default the process's, and returns the exit status."""

    def __call__(self, argv: Sequence[str] | None = None, /) -> int:
        """Runs the command."""


def command_line(command: str, description: str, epilog: str) -> argparse.ArgumentParser:
    """Returns a parser that keeps the line breaks of its texts and accepts no abbreviated flags."""
    return argparse.ArgumentParser(
        prog=command,
        description=description,
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )


def listed(rows: Iterable[tuple[str, str]], width: int) -> str:
    """Lists names and their descriptions beside each other, wrapped at 80 columns, for a help text."""
    indent = " " * (width + 2)
    return "\n".join(
        textwrap.fill(words, 80, initial_indent=f"  {name:{width}}", subsequent_indent=indent) for name, words in rows
    )


def command(name: str) -> Callable[[Main], Main]:
    """Decorates the ``main`` of a command: Ctrl-C ends it with one line and status 130, output that is lost with 2.

    Python itself would notice lost output only at exit, after the status was decided.
    """

    def decorated(main: Main) -> Main:
        @functools.wraps(main)
        def run(argv: Sequence[str] | None = None) -> int:
            try:
                try:
                    status = main(argv)
                except BrokenPipeError:  # the reader has seen enough (`nvme-report | head`)
                    status = 0
                except OSError as error:
                    say(f"{name}: {error}")
                    status = 2
                except SystemExit:  # by argparse: --help, --version
                    if not _is_written(name):
                        sys.exit(2)
                    raise
                return status if _is_written(name) else 2
            except KeyboardInterrupt:
                say(f"{name}: interrupted")
                return 130

        return run

    return decorated


def _is_written(name: str) -> bool:
    """Flushes standard output; False if that fails, except where its reader has closed the pipe."""
    try:
        sys.stdout.flush()
    except OSError as error:
        with contextlib.suppress(OSError):  # so that the flush at exit does not fail, too
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if isinstance(error, BrokenPipeError):
            return True
        say(f"{name}: standard output cannot be written: {error.strerror}")
        return False
    return True


def show(text: str) -> None:
    """Prints to stdout, wrapped for the terminal; escapes what a terminal would act on."""
    sys.stdout.write(printable(fitted(text), lines=True) + "\n")
    sys.stdout.flush()


def say(words: object) -> None:
    """Prints to stderr; escapes what a terminal would act on."""
    sys.stderr.write(printable(words, lines=True) + "\n")
    sys.stderr.flush()


def size(text: str) -> int:
    """Parses a size in bytes."""
    try:
        return parse_size(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def positive(text: str) -> int:
    """Parses a number of at least 1."""
    return _number(text, 1)


def count(text: str) -> int:
    """Parses a number of at least 0."""
    return _number(text, 0)


def _number(text: str, least: int) -> int:
    if not text.isdecimal() or int(text) < least:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of at least {least}")
    return int(text)


def check_output(flag: str, file: str) -> None:
    """Raises ValueError if the file that ``flag`` names cannot be written, before any work is done."""
    folder = os.path.dirname(os.path.abspath(file))
    if not os.path.isdir(folder):
        raise ValueError(f"{flag} {file}: its folder does not exist")
    if os.path.isdir(file):
        raise ValueError(f"{flag} {file}: a folder")
    if not os.access(file if os.path.exists(file) else folder, os.W_OK):
        raise ValueError(f"{flag} {file}: no permission to write it")
