"""One handle for many threads, and Python going on meanwhile; ``wait``, whatever interrupts it and who waits beside."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from nvme_ops import aio_handle
from tests.conftest import MIB, HandleFactory, in_threads, pattern, store

THREADS = 6

pytestmark = pytest.mark.usefixtures("eager_switches")


def test_asynchronous_calls_are_counted_once_and_have_ended(make_handle: HandleFactory, folder: Path) -> None:
    """Whoever waits, the counts add up to the calls, and all that a thread started before its wait has ended."""
    handle, rounds = make_handle(block_size=65536, queue_depth=4, cache="direct"), 20
    data = pattern(300_000)
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


CALLS: dict[str, Callable[[aio_handle, torch.Tensor, Path], object]] = {
    "read": lambda handle, *given: handle.read(*given),
    "validated": lambda handle, *given: handle.pread(*given, True, False),
    "wait": lambda handle, *given: handle.async_pread(*given) or handle.wait(),
    "result": lambda handle, *given: handle.submit_pread(*given).result(),
}


@pytest.mark.parametrize("call", CALLS)
def test_python_goes_on_while_a_call_blocks(folder: Path, call: str) -> None:
    """Another thread counts; holding the interpreter's lock would stop it from the call's start to its end."""
    handle, target = aio_handle(block_size=4096, queue_depth=1, cache="direct"), torch.ones(16 * MIB, dtype=torch.uint8)
    path = store(folder / "file", torch.zeros_like(target))
    counted, ended = 0, threading.Event()

    def count() -> None:
        nonlocal counted
        while not ended.is_set():
            counted += 1

    counter = threading.Thread(target=count)
    counter.start()
    before = counted
    CALLS[call](handle, target, path)
    during = counted - before
    ended.set()
    counter.join()
    assert not target.any()
    assert during > 1000


# Interruption


@pytest.mark.usefixtures("no_collection")
def test_no_interruption_loses_an_operation(make_handle: HandleFactory, folder: Path) -> None:
    handle, data = make_handle(block_size=65536, queue_depth=2, cache="direct"), pattern(MIB)
    path, end = store(folder / "file", data), time.monotonic() + 0.4
    rounds = interruptions = 0
    before = signal.signal(signal.SIGALRM, signal.default_int_handler)
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
        except KeyboardInterrupt:
            interruptions += 1
            again = handle.wait()
        # An exception may come between the call's return and the caller's next step: its last result is lost then.
        assert counted + again in (started, started + 1, 0)
        for back in backs[:started]:
            assert torch.equal(back, data)
        assert handle.wait() == 0
    assert interruptions > 0
    signal.signal(signal.SIGALRM, before)
