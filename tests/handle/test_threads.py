"""One handle for many threads, many handles in many threads, and Python going on meanwhile."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch

from nvme_ops import aio_handle
from tests.conftest import MIB, HandleFactory, in_threads, pattern, store

THREADS = 8

pytestmark = pytest.mark.usefixtures("eager_switches")


@pytest.mark.parametrize("lanes", [1, 3])
def test_one_handle(make_handle: HandleFactory, folder: Path, lanes: int) -> None:
    handle = make_handle(block_size=65536, queue_depth=8, intra_op_parallelism=lanes)

    def work(index: int) -> None:
        for i in range(8):
            size = 1 + (index * 77_777 + i * 33_333) % 500_000
            data, path = pattern(size, index), folder / str(index)
            back = torch.zeros_like(data)
            assert handle.sync_pwrite(data, path) == 1
            assert handle.sync_pread(back, path) == 1
            assert torch.equal(back, data)
            back.zero_()
            handle.read(back, path, i % 2 == 0)
            assert torch.equal(back, data)
            back.zero_()
            assert handle.submit_pread(back, path).result() == size
            assert torch.equal(back, data)

    in_threads(work, THREADS)
    assert handle.wait() == 0


def test_handles_of_their_own(make_handle: HandleFactory, folder: Path) -> None:
    data = pattern(MIB + 3)
    path = store(folder / "shared", data)

    def work(index: int) -> None:
        for _ in range(3):
            handle, back = make_handle(num_threads=2), torch.zeros_like(data)
            handle.async_pwrite(data[index:], folder / str(index))
            handle.async_pread(back, path)
            assert handle.wait() == 2
            assert torch.equal(back, data)

    in_threads(work, THREADS)


def test_asynchronous_calls_are_counted_once(make_handle: HandleFactory, folder: Path) -> None:
    """Whoever waits, the counts add up to the calls, and all that a thread started before its wait has ended."""
    handle, rounds, path = make_handle(intra_op_parallelism=2), 200, store(folder / "file", pattern(5000))
    counts = [0] * THREADS

    def work(index: int) -> None:
        for _ in range(rounds):
            handle.async_pread(torch.zeros(5000, dtype=torch.uint8), path)
            counts[index] += handle.wait()

    in_threads(work, THREADS)
    assert sum(counts) + handle.wait() == rounds * THREADS


def test_waiting_beside_blocking_calls(make_handle: HandleFactory, folder: Path) -> None:
    handle, path = make_handle(intra_op_parallelism=2), store(folder / "file", pattern(5000))

    def work(index: int) -> None:
        for _ in range(200):
            back = torch.zeros(5000, dtype=torch.uint8)
            if index % 2:
                handle.sync_pread(back, path)
                assert torch.equal(back, pattern(5000))
            else:
                handle.async_pread(back, path)
                handle.wait()

    in_threads(work, THREADS)


def test_each_thread_gets_its_own_failures(make_handle: HandleFactory, folder: Path, make_device) -> None:
    """Half of the threads read from a device that answers EIO."""
    device = make_device(4 * MIB)
    with device.image.open("r+b") as image:
        image.truncate(4096)
    handle, path = make_handle(intra_op_parallelism=2, cache="direct"), store(folder / "file", pattern(5000))

    def work(index: int) -> None:
        for _ in range(50):
            back = torch.zeros(5000, dtype=torch.uint8)
            if index % 2:
                with pytest.raises(OSError, match="Input/output error"):
                    handle.sync_pread(back, device.path, MIB)
            else:
                assert handle.sync_pread(back, path) == 1
                assert torch.equal(back, pattern(5000))

    in_threads(work, THREADS)


@pytest.mark.parametrize("lanes", [1, 2])
@pytest.mark.parametrize("call", ["read", "validated", "wait", "result"])
def test_python_goes_on_while_a_call_blocks(make_handle: HandleFactory, folder: Path, lanes: int, call: str) -> None:
    """Another thread counts; holding the interpreter's lock would stop it from the call's start to its end."""
    handle = make_handle(block_size=4096, queue_depth=1, cache="direct", intra_op_parallelism=lanes)
    path, target = folder / "file", torch.ones(64 * MIB, dtype=torch.uint8)
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


def test_a_handle_made_in_a_thread_that_ended(make_handle: HandleFactory, folder: Path) -> None:
    path, made = store(folder / "file", pattern(5000)), []

    def make() -> None:
        handle = make_handle()
        handle.sync_pread(torch.zeros(5000, dtype=torch.uint8), path)
        handle.submit_pread(torch.zeros(5000, dtype=torch.uint8), path).result()
        made.append(handle)

    thread = threading.Thread(target=make)
    thread.start()
    thread.join()
    handle: aio_handle = made[0]
    back = torch.zeros(5000, dtype=torch.uint8)
    assert handle.sync_pread(back, path) == 1
    assert handle.submit_pread(back, path).result() == 5000
