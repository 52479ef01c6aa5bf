"""Errors of system calls, which know a descriptor alone, name the operation and the file; Ctrl-C ends a long fsync."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import nvme_ops
from nvme_ops.data import AsyncLog, SampleWriter
from nvme_ops.storage import Session, TensorStore

DATA = {"a": torch.ones(1000)}


def log(folder: Path) -> None:
    one = AsyncLog(folder / "log", window=0.01)
    try:
        with contextlib.suppress(TimeoutError):
            one.append(b"record")
            one.flush(30)
    finally:
        one._segment = None  # what cannot be written is not waited for at the end
        one._ended = True


def samples(folder: Path) -> None:
    with SampleWriter(folder, bytes) as writer:
        writer.add(b"sample")


def stored(folder: Path) -> None:
    with Session(folder, name="names", reuse=True) as session, TensorStore(session) as store:
        store.put("key", torch.ones(10)).result()
        store.sync()


def file(folder: Path) -> None:
    with nvme_ops.open(folder / "file", "w+") as opened:
        opened.write(b"content")
        opened.seek(0)
        opened.read()
        opened.sync()


def save(name: str) -> Callable[[Path], None]:
    return lambda folder: nvme_ops.save(DATA, folder / name)


def load(name: str) -> Callable[[Path], None]:
    return lambda folder: nvme_ops.load(folder / name)


@pytest.mark.parametrize(
    ("work", "call"),
    [
        (log, "pwrite"), (log, "fdatasync"), (samples, "fsync"), (stored, "pwrite"), (stored, "fdatasync"),
        (file, "pwrite"), (file, "preadv"), (file, "fsync"), (save("b.safetensors"), "fdatasync"),
        (save("b.pt"), "fsync"), (save("folder"), "fdatasync"),
        (load("a.safetensors"), "pread"), (load("a.pt"), "pread"),
    ],
)  # fmt: skip
def test_an_error_names_the_operation_and_the_file(
    folder: Path, monkeypatch: pytest.MonkeyPatch, work: Callable[[Path], None], call: str
) -> None:
    for name in ("a.safetensors", "a.pt"):
        nvme_ops.save(DATA, folder / name)

    def fail(*_: Any) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    fail.__name__ = call
    monkeypatch.setattr(os, call, fail)
    with pytest.raises(OSError, match=r"Errno 5\] .*(write|read|sync).*: Input/output error: ") as caught:
        work(folder)
    monkeypatch.undo()
    assert str(caught.value.filename).startswith(str(folder))


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
