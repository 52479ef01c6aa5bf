"""One handle for many threads, and Python going on meanwhile; ``wait``, whatever interrupts it and who waits beside."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.conftest import MIB, HandleFactory, in_threads, pattern, store

THREADS = 8

pytestmark = pytest.mark.usefixtures("eager_switches")


@pytest.mark.parametrize("lanes", [1, 3])
def test_one_handle(make_handle: HandleFactory, folder: Path, make_device, lanes: int) -> None:
    """Some of the threads read from a device that answers EIO: each thread gets its own failures and bytes."""
    device = make_device(4 * MIB)
    with device.image.open("r+b") as image:
        image.truncate(4096)
    handle = make_handle(block_size=65536, queue_depth=8, intra_op_parallelism=lanes)

    def work(index: int) -> None:
        for i in range(8):
            size = 1 + (index * 77_777 + i * 33_333) % 500_000
            data, path = pattern(size, index), folder / str(index)
            back = torch.zeros_like(data)
            assert handle.sync_pwrite(data, path) == 1
            assert handle.sync_pread(back, path) == 1
            assert torch.equal(back, data)
            if index % 2:
                with pytest.raises(OSError, match="Input/output error"):
                    handle.sync_pread(back, device.path, MIB)
            handle.read(back.zero_(), path, i % 2 == 0)
            assert torch.equal(back, data)
            assert handle.submit_pread(back.zero_(), path).result() == size
            assert torch.equal(back, data)

    in_threads(work, THREADS)
    assert handle.wait() == 0


def test_asynchronous_calls_are_counted_once_and_have_ended(make_handle: HandleFactory, folder: Path) -> None:
    """Whoever waits, the counts add up to the calls, and all that a thread started before its wait has ended."""
    handle, rounds = make_handle(block_size=65536, queue_depth=4, cache="direct"), 40
    data = pattern(MIB)
    path, counts = store(folder / "file", data), [0] * THREADS

    def work(index: int) -> None:
        for _ in range(rounds):
            back = torch.zeros_like(data)
            handle.async_pread(back, path)
            if index % 4:
                counts[index] += handle.wait()
            else:
                counts[index] += handle.sync_pread(torch.zeros(5000, dtype=torch.uint8), path) - 1
            assert torch.equal(back, data)

    in_threads(work, THREADS)
    assert sum(counts) + handle.wait() == rounds * THREADS


@pytest.mark.parametrize(("call", "lanes"), [("read", 1), ("read", 2), ("validated", 1), ("wait", 1), ("result", 2)])
def test_python_goes_on_while_a_call_blocks(make_handle: HandleFactory, folder: Path, call: str, lanes: int) -> None:
    """Another thread counts; holding the interpreter's lock would stop it from the call's start to its end."""
    handle = make_handle(block_size=4096, queue_depth=1, cache="direct", intra_op_parallelism=lanes)
    path, target = folder / "file", torch.ones(32 * MIB, dtype=torch.uint8)
    with path.open("wb") as file:
        file.truncate(len(target))
    counted, started, ended = 0, threading.Event(), threading.Event()

    def count() -> None:
        nonlocal counted
        while not ended.is_set():
            counted += started.is_set()

    counter = threading.Thread(target=count)
    counter.start()
    future = handle.submit_pread(target, path) if call == "result" else None
    if call == "wait":
        handle.async_pread(target, path)
    started.set()
    before = counted
    if call == "read":
        handle.read(target, path)
    elif call == "validated":
        handle.pread(target, path, True, False)
    elif call == "wait":
        handle.wait()
    elif future is not None:
        future.result()
    during = counted - before
    ended.set()
    counter.join()
    assert not target.any()
    assert during > 1000


# Interruption


class InterruptionError(Exception):
    pass


@pytest.fixture
def alarm(no_collection: None) -> Iterator[None]:
    """SIGALRM raises ``InterruptionError``."""

    def interrupt(*_: object) -> None:
        raise InterruptionError

    before = signal.signal(signal.SIGALRM, interrupt)
    yield
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


@pytest.mark.usefixtures("alarm")
def test_no_interruption_loses_an_operation(make_handle: HandleFactory, folder: Path) -> None:
    handle, data = make_handle(block_size=65536, queue_depth=2, cache="direct"), pattern(MIB)
    path, end = store(folder / "file", data), time.monotonic() + 1
    rounds = interruptions = 0
    while rounds < 200 and time.monotonic() < end:
        rounds += 1
        backs = [torch.zeros_like(data) for _ in range(3)]
        counted = started = again = 0
        try:
            signal.setitimer(signal.ITIMER_REAL, 1e-5 + 2e-5 * (rounds % 60))
            for back in backs:
                handle.async_pread(back, path)
                started += 1
            counted = handle.wait()
            signal.setitimer(signal.ITIMER_REAL, 0)
        except InterruptionError:
            interruptions += 1
            again = handle.wait()
        # An exception may come between the call's return and the caller's next step: its last result is lost then.
        assert counted + again in (started, started + 1, 0)
        for back in backs[:started]:
            assert torch.equal(back, data)
        assert handle.wait() == 0
    assert interruptions > 0


@pytest.mark.usefixtures("alarm")
def test_failures_of_an_interrupted_wait_are_raised_by_the_next(make_handle: HandleFactory, folder: Path) -> None:
    handle, path = make_handle(), store(folder / "file", pattern(100))
    handle.async_pread(torch.zeros(1000), path)
    handle.async_pread(torch.zeros(25), path)
    with pytest.raises(InterruptionError):
        signal.raise_signal(signal.SIGALRM)
    with pytest.raises(EOFError):
        handle.wait()
    assert handle.wait() == 0
