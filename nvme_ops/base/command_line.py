"""What all commands share: parsers of arguments, checks of them, exit statuses, printing."""

from __future__ import annotations

import argparse
import contextlib
import functools
import inspect
import os
import re
import sys
import textwrap
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

from nvme_ops.base.text import WORDS, fitted, parse_size, printable


class Main(Protocol):
    """The function of a command: takes its arguments, by default the process's, and returns the exit status."""

    def __call__(self, argv: Sequence[str] | None = None, /) -> int:
        """Runs the command."""


class _Parser(argparse.ArgumentParser):
    """Takes underscores for the hyphens in the names of flags: DeepSpeed's have underscores."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        return super().parse_known_args([*map(self._known, sys.argv[1:] if args is None else args)], namespace)

    def _known(self, word: str) -> str:
        name, equals, value = word.partition("=")
        known = name.replace("_", "-") if name.startswith("--") else name
        return f"{known}{equals}{value}" if known in self._option_string_actions else word


class _Formatter(argparse.RawDescriptionHelpFormatter):
    def _split_lines(self, text: str, width: int) -> list[str]:
        return textwrap.wrap(" ".join(text.split()), width, **WORDS)


def command_line(command: str, description: str, epilog: str = "") -> argparse.ArgumentParser:
    """Returns a parser that keeps the line breaks of its texts and accepts no abbreviated flags.

    Without ``epilog``, ``description`` is a docstring, which is divided before its first heading (``examples:``).
    """
    if not epilog:
        description, *epilogs = re.split("\n\n(?=Examples:|[a-z ]+:)", inspect.cleandoc(description), maxsplit=1)
        epilog = "".join(epilogs)
    return _Parser(command, None, description, epilog, formatter_class=_Formatter, allow_abbrev=False)


def listed(rows: Iterable[tuple[str, str]], width: int) -> str:
    """Lists names and their descriptions beside each other, wrapped at 80 columns, for a help text."""
    indent = " " * (width + 2)
    return "\n".join(
        textwrap.fill(words, 80, initial_indent=f"  {name:{width}}", subsequent_indent=indent, **WORDS)
        for name, words in rows
    )


def command(name: str) -> Callable[[Main], Main]:
    """Decorates the ``main`` of a command: Ctrl-C ends it with one line and status 130, output that is lost with 2.

    Python itself would notice lost output only at exit, after the status was decided. torch's warning that NumPy is
    not installed is left out, here and in the processes that the command starts: no command needs NumPy unless it says.
    """

    def decorated(main: Main) -> Main:
        @functools.wraps(main)
        @_silent_about_numpy()
        def run(argv: Sequence[str] | None = None) -> int:
            try:
                try:
                    status = main(argv)
                except BrokenPipeError:  # the reader has seen enough (`nvme-report | head`)
                    status = 0
                except OSError as error:
                    say(f"{name}: {error}")
                    status = 2
                except ModuleNotFoundError as error:  # torch itself is imported once the arguments are known
                    if error.name != "torch":
                        raise
                    say(f"{name}: torch is not installed: pip install torch")
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


@contextlib.contextmanager
def _silent_about_numpy() -> Iterator[None]:
    """Ignores torch's warning in the block, and in processes that it starts."""
    name, begins = "PYTHONWARNINGS", "Failed to initialize NumPy"
    before = os.environ.get(name)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", begins)
        os.environ[name] = ",".join(filter(None, [before, f"ignore:{begins}:UserWarning"]))
        try:
            yield
        finally:
            os.environ.pop(name)
            os.environ.update({name: before} if before is not None else {})


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


def in_flags(words: object, flags: Mapping[str, str]) -> str:
    """Names flags where a message names arguments of Python. ``flags``: words as in the message -> with the flag."""
    text = str(words)
    for argument, flag in flags.items():
        text = re.sub(rf"(?<![\w/-]){re.escape(argument)}(?![\w=])", flag, text)
    return text


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
