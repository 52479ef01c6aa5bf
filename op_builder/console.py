"""The one place where builders write to the terminal; a missing or closed stderr is not an error."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
import warnings
from collections.abc import Iterator
from typing import TextIO


def say(text: str) -> None:
    """Writes one line to stderr, if there is one."""
    if sys.stderr is not None:
        with contextlib.suppress(OSError, ValueError):
            sys.stderr.write(f"{text}\n")
            sys.stderr.flush()


@contextlib.contextmanager
def working(text: str, hint: str) -> Iterator[None]:
    """Announces a slow step on stderr, and on a terminal shows its duration; silent with NVME_OPS_QUIET=1."""
    if os.environ.get("NVME_OPS_QUIET", "") not in ("", "0"):
        yield
        return
    say(f"{text} ({hint}; NVME_OPS_QUIET=1: not a word)")
    with contextlib.ExitStack() as stack:
        if _on_a_terminal():
            over = threading.Event()
            counting = threading.Thread(target=_count, args=(over,), name="nvme_ops.op_builder", daemon=True)
            counting.start()
            stack.callback(counting.join)
            stack.callback(over.set)
        yield


def _on_a_terminal() -> bool:
    with contextlib.suppress(OSError, ValueError, AttributeError):  # there is none, or a closed one
        return bool(sys.stderr.isatty())
    return False


def _count(over: threading.Event) -> None:
    started = time.monotonic()
    with contextlib.suppress(OSError, ValueError, AttributeError):
        while True:
            sys.stderr.write(f"\r{time.monotonic() - started:.0f} s ")
            sys.stderr.flush()
            if over.wait(0.5):
                break
        sys.stderr.write("\r\033[K")
        sys.stderr.flush()


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
