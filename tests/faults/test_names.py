"""Ctrl-C ends a long fsync, whose error is not lost."""

from __future__ import annotations

import errno
import os
import signal
import threading
from pathlib import Path

import pytest

import nvme_ops


@pytest.mark.usefixtures("no_collection")
def test_ctrl_c_ends_the_wait_for_a_sync_whose_error_the_next_one_raises(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = threading.Event()

    def stall(_: int) -> None:
        answers.wait(60)
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, stop)
    try:
        with nvme_ops.open(folder / "file", "w") as opened:
            opened.write(b"content")
            with monkeypatch.context() as patched:
                patched.setattr(os, "fsync", stall)
                with pytest.raises(KeyboardInterrupt):  # noqa: PT012  (or it comes before)
                    signal.setitimer(signal.ITIMER_REAL, 0.1)
                    opened.sync()
                assert not answers.is_set()
                answers.set()
            for _ in range(2):  # what the kernel told the one that nobody waited for
                with pytest.raises(OSError, match=r"fsync|an earlier sync has failed"):
                    opened.sync()
            opened.truncate(0)
            opened.sync()
    finally:
        signal.signal(signal.SIGALRM, before)
