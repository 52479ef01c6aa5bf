"""The one place where builders write to the terminal; a missing or closed stderr is no error."""

from __future__ import annotations

import contextlib
import sys
import warnings
from collections.abc import Iterator
from typing import TextIO


def say(text: str) -> None:
    """Write one line to stderr, or nowhere where there is none."""
    if sys.stderr is not None:
        with contextlib.suppress(OSError, ValueError):
            sys.stderr.write(f"{text}\n")
            sys.stderr.flush()


def warn(text: str) -> None:
    """Issue a ``UserWarning``, which the caller's filters can silence or turn into an error."""
    with contextlib.suppress(ValueError):  # Python writes to a closed stderr and trips
        warnings.warn(text, UserWarning, stacklevel=3)


def _can_be_flushed(stream: TextIO | None) -> bool:
    try:
        stream.flush()  # type: ignore[union-attr]
    except (AttributeError, OSError, ValueError):  # absent, on a full device, closed
        return False
    return True


@contextlib.contextmanager
def usable_streams() -> Iterator[None]:
    """Give code that flushes stdout and stderr unasked, as torch's builder does, streams that can be flushed."""
    saved = sys.stdout, sys.stderr
    with open("/dev/null", "w") as nowhere:
        if not _can_be_flushed(sys.stdout):
            sys.stdout = nowhere
        if not _can_be_flushed(sys.stderr):
            sys.stderr = nowhere
        try:
            yield
        finally:
            sys.stdout, sys.stderr = saved
