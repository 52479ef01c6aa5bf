"""What the command lines share: argument types for argparse, and checks of the values."""

from __future__ import annotations

import argparse
import os

from nvme_ops.text import parse_size


def command_line(command: str, description: str, epilog: str) -> argparse.ArgumentParser:
    """Returns a parser that keeps the line breaks of its texts and accepts no abbreviated flags."""
    return argparse.ArgumentParser(
        prog=command,
        description=description,
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )


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
        raise ValueError(f"{flag} {file}: may not be written")
