"""What transfers of tensors on an accelerator wait for, and what waits for them."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

import pytest
import torch

from tests.conftest import MIB, contents, pattern, run_python, store
from tests.device.calls import Call, both_ways, each_read, each_write
from tests.device.kinds import Device, Simulated, in_own_process, on_doubles, sample

pytest_plugins = ("tests.fake_cufile.fixtures",)

each_stream = pytest.mark.parametrize(
    ("default_stream", "lanes"), [(True, 1), (False, 3)], ids=["default stream", "side stream, lanes"]
)


@each_stream
@each_write
def test_a_write_comes_after_what_is_queued(
    device: Device, folder: Path, write: Call, default_stream: bool, lanes: int
) -> None:
    handle, path, data = device.handle(lanes), folder / "file", sample(device.odd)
    new, there = device.tensor(data), device.empty(device.odd)
    device.settle()
    with device.on(default_stream) as stream:
        device.keep_busy()
        there.copy_(new, non_blocking=True)
        device.require_pending(stream)
        write(handle, there, path, 1)
    assert torch.equal(contents(path)[1:], data)


@each_stream
@each_read
def test_a_read_comes_after_what_is_queued(
    device: Device, folder: Path, read: Call, default_stream: bool, lanes: int
) -> None:
    handle, path = device.handle(lanes), store(folder / "file", sample(device.odd))
    there, saved = device.tensor(sample(device.odd, 1)), device.empty(device.odd)
    device.settle()
    with device.on(default_stream) as stream:
        device.keep_busy()
        saved.copy_(there, non_blocking=True)  # still to see what stood there before
        device.require_pending(stream)
        read(handle, there, path, 0)
        assert torch.equal(device.peek(there), sample(device.odd))
        device.synchronize(stream)
    assert torch.equal(device.peek(saved), sample(device.odd, 1))


@each_read
def test_data_read_are_there_for_every_stream(device: Device, folder: Path, read: Call) -> None:
    handle, path, there = device.handle(), store(folder / "file", sample(device.odd)), device.empty(device.odd)
    copies = [device.empty(device.odd) for _ in range(2)]
    device.settle()
    read(handle, there, path, 0)
    for default_stream, copy in zip((True, False), copies, strict=True):
        with device.on(default_stream) as stream:
            copy.copy_(there, non_blocking=True)
            device.synchronize(stream)
        assert torch.equal(device.peek(copy), sample(device.odd))


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
    handle, called = device.handle(), threading.Event()
    seen: list[bool] = []

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


def test_a_callback_and_asyncio(device: Device, folder: Path) -> None:
    handle, path, data = device.handle(2), folder / "file", sample(device.odd)
    there, back = device.tensor(data), device.empty(device.odd)
    called = threading.Event()
    future = handle.submit_pwrite(there, path)
    future.add_done_callback(lambda _: called.set())
    assert called.wait(60)
    assert future.result() == device.odd

    async def read() -> int:
        return int(await handle.submit_pread(back, path))

    assert asyncio.run(read()) == device.odd
    assert torch.equal(device.peek(back), data)


# Lifetimes


def test_memory_freed_while_a_transfer_uses_it(device: Device, folder: Path) -> None:
    """A tensor's memory must not be given to the next one before the transfer has ended."""
    handle, futures = device.handle(), []
    for number in range(8):
        there = device.tensor(sample(device.odd, number))
        futures.append(handle.submit_pwrite(there, folder / f"file{number}"))
        del there
        device.empty(device.odd)
    for number, future in enumerate(futures):
        assert future.result() == device.odd
        assert torch.equal(contents(folder / f"file{number}"), sample(device.odd, number))


def test_a_dropped_handle_finishes(device: Device, folder: Path) -> None:
    handle, sent = device.handle(2), [device.tensor(sample(device.odd, number)) for number in range(3)]
    futures = [handle.submit_pwrite(sent[number], folder / f"file{number}") for number in range(3)]
    del handle, sent
    assert all(future.done() for future in futures)
    for number in range(3):
        assert torch.equal(contents(folder / f"file{number}"), sample(device.odd, number))


PROGRAM = """
import sys
from tests.conftest import pattern
there = tensor(pattern(17 << 20))
for name in sys.argv[1:]:
    handle.async_pwrite(there, name)
"""


@in_own_process  # how one with cuFile's double ends is in gds/test_driver.py
def test_the_interpreter_ends_with_work_pending(device: Device, folder: Path) -> None:
    names = [folder / "one", folder / "two"]
    run_python(device.program + PROGRAM, *names)
    for name in names:
        assert torch.equal(contents(name), pattern(17 * MIB))
