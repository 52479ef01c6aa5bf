"""The one place where builders write to the terminal; a missing or closed stderr is not an error."""

from __future__ import annotations

import contextlib
import os
import sys
import warnings
from collections.abc import Iterator
from typing import TextIO


def say(text: str) -> None:
    """Writes one line to stderr, if there is one."""
    if sys.stderr is not None:
        with contextlib.suppress(OSError, ValueError):
            sys.stderr.write(f"{text}\n")
            sys.stderr.flush()


def announce(text: str) -> None:
    """Announces a slow step on stderr, unless NVME_OPS_QUIET=1 is set."""
    if os.environ.get("NVME_OPS_QUIET", "") in ("", "0"):
        say(text)


def warn(text: str) -> None:
    """Issues a ``UserWarning``, which the caller's filters can silence or turn into an error."""
    with contextlib.suppress(ValueError):  # warnings.warn fails on a closed stderr
        warnings.warn(text, UserWarning, stacklevel=3)


def _can_be_flushed(stream: TextIO | None) -> bool:
    try:
        stream.flush()  # type: ignore[union-attr]
    except (AttributeError, OSError, ValueError):  # absent, on a full device, closed
        return False
    return True


@contextlib.contextmanager
def usable_streams() -> Iterator[None]:
    """Gives code that flushes stdout and stderr, as torch's builder does, streams that can be flushed."""
    with contextlib.ExitStack() as stack:
        nowhere = stack.enter_context(open(os.devnull, "w"))
        if not _can_be_flushed(sys.stdout):
            stack.enter_context(contextlib.redirect_stdout(nowhere))
        if not _can_be_flushed(sys.stderr):
            stack.enter_context(contextlib.redirect_stderr(nowhere))
        yield
