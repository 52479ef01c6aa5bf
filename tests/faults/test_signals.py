"""Signals: storms of them change nothing, and Ctrl-C ends what blocks."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import nvme_ops
from tests.conftest import GIB, MIB, HandleFactory, pattern, round_trip, store

PART = 32 * MIB  # takes 0.05 s where 512-byte requests are fastest


@pytest.fixture
def alarm(no_collection: None) -> Iterator[None]:
    before = signal.getsignal(signal.SIGALRM)
    yield
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


@contextlib.contextmanager
def alarm_after(seconds: float) -> Iterator[None]:
    """SIGALRM comes within the block, or not at all."""
    try:
        signal.setitimer(signal.ITIMER_REAL, seconds)
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def sparse(path: Path, size: int) -> Path:
    with path.open("wb") as file:
        file.truncate(size)
    return path


@pytest.mark.usefixtures("alarm")
def test_a_storm_of_signals(make_handle: HandleFactory, folder: Path) -> None:
    handled: list[None] = []
    signal.signal(signal.SIGALRM, lambda *_: handled.append(None))
    handle = make_handle(block_size=65536, queue_depth=4, num_threads=2, cache="direct")
    signal.setitimer(signal.ITIMER_REAL, 0.001, 0.001)
    for _ in range(3):
        round_trip(handle, folder / "file", 8 * MIB)
    signal.setitimer(signal.ITIMER_REAL, 0)
    assert handled


@pytest.mark.usefixtures("alarm")
@pytest.mark.parametrize(("call", "lanes"), [("read", 1), ("validated", 2), ("wait", 1), ("result", 2)])
def test_a_handler_that_raises_ends_the_wait(make_handle: HandleFactory, folder: Path, call: str, lanes: int) -> None:
    """512-byte requests, one at a time: hours of work for a file of holes, without the memory for it touched."""
    handle = make_handle(block_size=512, queue_depth=1, intra_op_parallelism=lanes, cache="direct")
    path, target = sparse(folder / "file", GIB), torch.empty(GIB, dtype=torch.uint8)
    signal.signal(signal.SIGALRM, signal.default_int_handler)
    future = handle.submit_pread(target[:PART], path) if call == "result" else None
    if call == "wait":
        handle.async_pread(target[:PART], path)
    with pytest.raises(KeyboardInterrupt), alarm_after(0.01):  # noqa: PT012  (one of these)
        if call == "read":
            handle.read(target, path)
        elif call == "validated":
            handle.pread(target[:PART], path, True, False)
        else:
            future.result() if future is not None else handle.wait()
    if future is not None:
        assert future.result() == PART
    handle.wait()  # nothing of the interrupted call is left but what goes on in the background
    assert handle.wait() == 0
    round_trip(handle, path, 100_000)


@pytest.mark.usefixtures("alarm")
def test_a_handler_may_use_the_handle(make_handle: HandleFactory, folder: Path) -> None:
    handle = make_handle(block_size=4096, queue_depth=1, cache="direct")
    inner, target = store(folder / "inner", pattern(10_000)), torch.ones(32 * MIB, dtype=torch.uint8)
    used: list[torch.Tensor] = []

    def use(*_: object) -> None:
        back = torch.zeros(10_000, dtype=torch.uint8)
        handle.read(back, inner)
        used.append(back)

    signal.signal(signal.SIGALRM, use)
    signal.setitimer(signal.ITIMER_REAL, 0.005, 0.02)
    handle.read(target, sparse(folder / "file", 32 * MIB))
    signal.setitimer(signal.ITIMER_REAL, 0)
    assert used
    assert all(torch.equal(back, pattern(10_000)) for back in used)
    assert not target.any()


@pytest.mark.usefixtures("alarm")
def test_ctrl_c_ends_the_wait_for_a_sync_whose_error_the_next_one_raises(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = threading.Event()

    def stall(_: int) -> None:
        answers.wait(60)
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    signal.signal(signal.SIGALRM, signal.default_int_handler)
    with nvme_ops.open(folder / "file", "w") as opened:
        opened.write(b"content")
        with monkeypatch.context() as patched:
            patched.setattr(os, "fsync", stall)
            with pytest.raises(KeyboardInterrupt), alarm_after(0.1):
                opened.sync()
            assert not answers.is_set()
            answers.set()
        for _ in range(2):  # what the kernel told the one that nobody waited for
            with pytest.raises(OSError, match=r"fsync|an earlier sync has failed"):
                opened.sync()
        opened.truncate(0)
        opened.sync()
