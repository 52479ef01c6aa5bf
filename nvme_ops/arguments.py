"""What the command lines have in common: types for argparse, and checks of what they are given."""

from __future__ import annotations

import argparse
import os

from nvme_ops.text import parse_size


def command_line(command: str, description: str, epilog: str) -> argparse.ArgumentParser:
    """A parser that shows these texts as they are written, and takes no abbreviations."""
    return argparse.ArgumentParser(
        prog=command,
        description=description,
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )


def size(text: str) -> int:
    """A size in bytes."""
    try:
        return parse_size(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def positive(text: str) -> int:
    """A number of at least 1."""
    return _number(text, 1)


def count(text: str) -> int:
    """A number of at least 0."""
    return _number(text, 0)


def _number(text: str, least: int) -> int:
    if not text.isdecimal() or int(text) < least:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of at least {least}")
    return int(text)


def check_output(flag: str, file: str) -> None:
    """Raises ValueError where the file that ``flag`` names cannot be written, which else is met after the work."""
    folder = os.path.dirname(os.path.abspath(file))
    if not os.path.isdir(folder):
        raise ValueError(f"{flag} {file}: its folder does not exist")
    if os.path.isdir(file):
        raise ValueError(f"{flag} {file}: a folder")
    if not os.access(file if os.path.exists(file) else folder, os.W_OK):
        raise ValueError(f"{flag} {file}: may not be written")
