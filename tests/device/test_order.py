"""What transfers of tensors on an accelerator wait for, and what waits for them."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch

from tests.conftest import MIB, contents, pattern, run_python, store
from tests.device.kinds import READS, WRITES, Call, Device, Simulated, both_ways, in_own_process, on_doubles, sample

each_stream = pytest.mark.parametrize(
    ("number", "lanes"), [(0, 1), (None, 3)], ids=["default stream", "side stream, lanes"]
)


@each_stream
def test_a_write_comes_after_what_is_queued(device: Device, folder: Path, number: int | None, lanes: int) -> None:
    handle = device.handle(lanes)
    for seed, (name, write) in enumerate(WRITES.items()):
        data, path, there = sample(device.odd, seed), folder / name, device.empty(device.odd)
        new = device.tensor(data)
        device.settle()
        with device.on(number) as stream:
            device.keep_busy()
            there.copy_(new, non_blocking=True)
            device.require_pending(stream)
            write(handle, there, path, 1)
        assert torch.equal(contents(path)[1:], data), name


@each_stream
def test_a_read_comes_after_what_is_queued(device: Device, folder: Path, number: int | None, lanes: int) -> None:
    """And its bytes are there for every stream."""
    handle = device.handle(lanes)
    for seed, (name, read) in enumerate(READS.items()):
        data, before = sample(device.odd, seed), sample(device.odd, seed + 1)
        path, there, saved = store(folder / "file", data), device.tensor(before), device.empty(device.odd)
        device.settle()
        with device.on(number) as stream:
            device.keep_busy()
            saved.copy_(there, non_blocking=True)  # still to see what stood there before
            device.require_pending(stream)
            read(handle, there, path, 0)
            assert torch.equal(device.peek(there), data), name
            device.synchronize(stream)
        assert torch.equal(device.peek(saved), before), name
        for other in (0, None):
            with device.on(other) as stream:
                saved.copy_(there, non_blocking=True)
                device.synchronize(stream)
            assert torch.equal(device.peek(saved), data), name


def test_the_queue_at_the_call_counts(device: Device, folder: Path) -> None:
    """What is queued later is not waited for, and after result() the tensor may change."""
    handle, path, data = device.handle(), folder / "file", sample(device.odd)
    there, new, other = device.tensor(data), device.tensor(sample(device.odd, 1)), device.empty(device.odd)
    device.settle()
    with device.on() as stream:
        future = handle.submit_pwrite(there, path)
        device.keep_busy()
        other.copy_(there, non_blocking=True)
        future.result()
        device.require_pending(stream)
        there.copy_(new, non_blocking=True)
        device.synchronize(stream)
    assert torch.equal(contents(path), data)
    assert torch.equal(device.peek(other), data)


@both_ways
def test_the_callers_stream_and_device_stay(device: Device, folder: Path, ways: dict[str, Call]) -> None:
    path, there = store(folder / "file", sample(device.odd)), device.tensor(sample(device.odd))
    for call in ways.values():
        with device.elsewhere():
            before = device.current()
            call(device.handle(), there, path, 0)
            assert device.current() == before
            with pytest.raises(OSError, match="No such file"):
                call(device.handle(), there, folder / "missing" / "file", 0)
            assert device.current() == before


@on_doubles
def test_done_comes_no_earlier_than_the_data(device: Simulated, folder: Path) -> None:
    path, there = store(folder / "file", sample(device.odd)), device.empty(device.odd)
    handle, called, seen = device.handle(), threading.Event(), list[bool]()

    def look(_: object) -> None:
        seen.append(torch.equal(device.peek(there), sample(device.odd)))
        called.set()

    with device.held():
        future = handle.submit_pread(there, path)
        future.add_done_callback(look)
        device.wait_for_held_up()
        assert not future.done()
        with pytest.raises(TimeoutError):
            future.result(timeout=0.01)
    assert called.wait(60)
    assert seen == [True]
    assert future.result() == device.odd


# Lifetimes


def test_a_dropped_handle_finishes_with_memory_that_was_freed(device: Device, folder: Path) -> None:
    """A tensor's memory must not be given to the next one before the transfer has ended."""
    handle, futures = device.handle(2), []
    for number in range(8):
        there = device.tensor(sample(device.odd, number))
        futures.append(handle.submit_pwrite(there, folder / f"file{number}"))
        del there
        device.empty(device.odd)
    del handle
    assert all(future.done() for future in futures)
    for number, future in enumerate(futures):
        assert future.result() == device.odd
        assert torch.equal(contents(folder / f"file{number}"), sample(device.odd, number))


PROGRAM = """
import sys
from tests.conftest import pattern
there = tensor(pattern(17 << 20))
for name in sys.argv[1:]:
    handle.async_pwrite(there, name)
if hasattr(handle, "pin_device_tensor"):
    pinned = [handle.new_pinned_device_tensor(1 << 20, there) for _ in range(3)]
    assert all(map(handle.is_pinned, pinned))
"""


@in_own_process  # how one with cuFile's double ends is in gds/test_driver.py
def test_the_interpreter_ends_with_work_pending(device: Device, folder: Path) -> None:
    """And with memory pinned."""
    names = [folder / "one", folder / "two"]
    run_python(device.program + PROGRAM, *names)
    assert all(torch.equal(contents(name), pattern(17 * MIB)) for name in names)
