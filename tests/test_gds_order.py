"""Order, threads and lifetimes of gds_handle's transfers, over a libcufile and an accelerator made of host memory.

The accelerator runs nothing before somebody waits for it, so a missing wait shows as wrong bytes. None of this is
evidence about a GPU.
"""

from __future__ import annotations

import gc
import os
import signal
import threading
from pathlib import Path

import pytest
import torch
from conftest import MIB, contents, in_threads, pattern, store
from fake_cufile import FakeCuFile, Function
from private_device import PrivateDevice
from private_device.calls import Call, both_ways, each_read, each_write

from nvme_ops.gds import gds_handle

pytest_plugins = ("fake_cufile.fixtures",)

BLOCK = 65536
ODD = 2 * MIB + 5

# Order on the device


@each_write
def test_a_write_comes_after_what_is_queued(
    cufile: FakeCuFile, device: PrivateDevice, folder: Path, write: Call
) -> None:
    path, new = folder / "file", device.tensor(pattern(ODD))
    for on in (0, None):
        with device.on(on) as stream:
            there = device.empty(ODD)
            there.copy_(new, non_blocking=True)
            assert not device.idle(stream)
            write(gds_handle(BLOCK), there, path, 1)
        assert torch.equal(contents(path)[1:], pattern(ODD))
    assert cufile.calls(Function.WRITE) > 0


@each_read
def test_a_read_comes_after_what_is_queued(cufile: FakeCuFile, device: PrivateDevice, folder: Path, read: Call) -> None:
    path = store(folder / "file", pattern(ODD))
    for on in (0, None):
        there, saved = device.tensor(pattern(ODD, 1)), device.empty(ODD)
        with device.on(on) as stream:
            saved.copy_(there, non_blocking=True)  # still to see what stood there before
            assert not device.idle(stream)
            read(gds_handle(BLOCK), there, path, 0)
            assert torch.equal(device.peek(there), pattern(ODD))
            device.synchronize(stream)
        assert torch.equal(device.peek(saved), pattern(ODD, 1))
    assert cufile.calls(Function.READ) > 0


def test_data_read_are_there_for_every_stream(cufile: FakeCuFile, device: PrivateDevice, folder: Path) -> None:
    path, there = store(folder / "file", pattern(ODD)), device.empty(ODD)
    gds_handle().read(there, path)
    for stream in (0, None):
        copy = device.empty(ODD)
        with device.on(stream) as current:
            copy.copy_(there, non_blocking=True)
            device.synchronize(current)
        assert torch.equal(device.peek(copy), pattern(ODD))


def test_the_queue_at_the_call_counts(cufile: FakeCuFile, device: PrivateDevice, folder: Path) -> None:
    """What is queued later is not waited for, and after result() the tensor may change."""
    path, there, new = folder / "file", device.tensor(pattern(ODD)), device.tensor(pattern(ODD, 1))
    handle, other = gds_handle(), device.empty(ODD)
    with device.on() as stream:
        future = handle.submit_pwrite(there, path)
        other.copy_(there, non_blocking=True)
        future.result()
        assert not device.idle(stream)
        there.copy_(new, non_blocking=True)
        device.synchronize(stream)
    assert torch.equal(contents(path), pattern(ODD))
    assert torch.equal(device.peek(other), pattern(ODD))


@both_ways
def test_the_callers_stream_and_device_stay(
    cufile: FakeCuFile, device: PrivateDevice, folder: Path, ways: dict[str, Call]
) -> None:
    path, there = store(folder / "file", pattern(ODD)), device.tensor(pattern(ODD))
    for call in ways.values():
        with device.on(index=1) as stream, device.on(2, index=0), device.on(stream, index=1):
            call(gds_handle(BLOCK), there, path, 0)
            assert (device.current_device(), device.stream(0), device.stream(1)) == (1, 2, stream)


def test_two_devices(cufile: FakeCuFile, device: PrivateDevice, folder: Path) -> None:
    handle, names = gds_handle(BLOCK, intra_op_parallelism=2), [folder / f"file{i}" for i in range(4)]
    sent = [device.tensor(pattern(ODD, i), i % 2) for i in range(4)]
    back = [device.empty(ODD, index=i % 2) for i in range(4)]
    assert handle.submit_pwritev(sent, names).result() == 4 * ODD
    assert handle.submit_preadv(back, names).result() == 4 * ODD
    for i in range(4):
        assert back[i].device == device.device(i % 2)
        assert torch.equal(contents(names[i]), pattern(ODD, i))
        assert torch.equal(device.peek(back[i]), pattern(ODD, i))


def test_done_comes_no_earlier_than_the_data(cufile: FakeCuFile, device: PrivateDevice, folder: Path) -> None:
    path, there = store(folder / "file", pattern(ODD)), device.empty(ODD)
    handle, called = gds_handle(BLOCK), threading.Event()
    seen: list[bool] = []

    def look(_: object) -> None:
        seen.append(torch.equal(device.peek(there), pattern(ODD)))
        called.set()

    with cufile.held(Function.READ):
        future = handle.submit_pread(there, path)
        future.add_done_callback(look)
        cufile.wait_for_held_up(Function.READ)
        assert not future.done()
        with pytest.raises(TimeoutError):
            future.result(timeout=0.01)
    assert called.wait(60)
    assert seen == [True]
    assert future.result() == ODD


# Threads


@pytest.mark.parametrize("shared", [True, False], ids=["one handle", "a handle each"])
def test_threads(cufile: FakeCuFile, device: PrivateDevice, folder: Path, shared: bool) -> None:
    common = gds_handle(BLOCK, intra_op_parallelism=2)
    wrong: list[str] = []

    def work(number: int) -> None:
        handle = common if shared else gds_handle(BLOCK)
        path, index = folder / f"file{number}", number % 2
        for round_ in range(3):
            seed = 10 * number + round_
            new = device.tensor(pattern(ODD, seed), index)
            with device.on(index=index) as stream:
                there, back = device.empty(ODD, index=index), device.empty(ODD, index=index)
                there.copy_(new, non_blocking=True)
                handle.write(there, path, True)
                handle.submit_pread(back, path).result()
                if device.stream(index) != stream or device.current_device() != index:
                    wrong.append(f"thread {number} is on another stream")
            if not torch.equal(device.peek(back), pattern(ODD, seed)):
                wrong.append(f"thread {number} read something else in round {round_}")

    in_threads(work, 4)
    assert wrong == []
    assert cufile.calls(Function.DRIVER_OPEN) == 1


def test_threads_read_one_file_at_once(cufile: FakeCuFile, device: PrivateDevice, folder: Path) -> None:
    handle, path = gds_handle(BLOCK, intra_op_parallelism=4), store(folder / "file", pattern(ODD))
    tensors = [device.empty(ODD) for _ in range(4)]
    threads = [threading.Thread(target=handle.read, args=[tensor, path]) for tensor in tensors]
    with cufile.held(Function.READ):
        for thread in threads:
            thread.start()
        cufile.wait_for_held_up(Function.READ, 4)
    for thread in threads:
        thread.join()
    for tensor in tensors:
        assert torch.equal(device.peek(tensor), pattern(ODD))


# Lifetimes


@pytest.mark.parametrize("write", [True, False], ids=["write", "read"])
def test_a_tensor_that_its_owner_drops(cufile: FakeCuFile, device: PrivateDevice, folder: Path, write: bool) -> None:
    size = 33 * MIB  # freed, memory of this size is no longer mapped, and the library looks
    path, before = store(folder / "file", pattern(size, 1)), device.statistics().device_blocks
    handle, there = gds_handle(), device.tensor(pattern(size))
    function = Function.WRITE if write else Function.READ
    with cufile.held(function):
        future = (handle.submit_pwrite if write else handle.submit_pread)(there, path)
        cufile.wait_for_held_up(function)
        del there
        gc.collect()
        assert device.statistics().device_blocks == before + 1
    assert future.result() == size
    del future
    assert device.statistics().device_blocks == before
    assert torch.equal(contents(path), pattern(size, 0 if write else 1))


def test_a_dropped_handle_finishes(cufile: FakeCuFile, device: PrivateDevice, folder: Path) -> None:
    handle, sent = gds_handle(BLOCK, intra_op_parallelism=2), [device.tensor(pattern(ODD, i)) for i in range(3)]
    futures = [handle.submit_pwrite(sent[i], folder / f"file{i}") for i in range(3)]
    del handle, sent
    assert all(future.done() for future in futures)
    for i in range(3):
        assert torch.equal(contents(folder / f"file{i}"), pattern(ODD, i))
    assert cufile.statistics().files == 0


def test_nothing_is_left_behind(cufile: FakeCuFile, device: PrivateDevice, folder: Path) -> None:
    handle, path, there = gds_handle(BLOCK, intra_op_parallelism=2), folder / "file", device.tensor(pattern(ODD))
    back = device.empty(ODD)

    def work(round_: int) -> None:
        handle.sync_pwrite(there, path)
        handle.async_pread(back, path)
        handle.wait()
        handle.submit_preadv([back, back[:5000]], [path, path]).result()
        gds_handle(intra_op_parallelism=2).read(back, path)
        handle.pin_device_tensor(back)
        cufile.fail((Function.READ, Function.REGISTER_FILE)[round_ % 2], 5030)
        if round_ % 2 == 0:
            with pytest.raises(OSError, match="5030"):
                handle.read(back, path)
        handle.read(back, path)
        handle.unpin_device_tensor(back)

    def held() -> tuple[int, int, int]:
        gc.collect()
        now = device.statistics()
        return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task")), now.pinned_blocks

    for round_ in range(4):
        work(round_)
    before = held()
    for round_ in range(40):
        work(round_)
    after = held()
    assert after[0] == before[0]
    assert after[1] <= before[1] + 4  # threads of the backend beside cuFile come as they are needed
    assert after[2] == before[2]


# Interruption


@pytest.mark.parametrize("lanes", [1, 2])
def test_a_handler_that_raises_ends_a_blocking_call(
    cufile: FakeCuFile, device: PrivateDevice, folder: Path, lanes: int
) -> None:
    """What is in flight ends, the rest is not started, and the handle goes on."""
    handle, path = gds_handle(BLOCK, intra_op_parallelism=lanes), store(folder / "file", pattern(ODD))
    there, main, in_flight = device.empty(ODD), threading.get_ident(), threading.Event()

    def interrupt() -> None:
        cufile.wait_for_held_up(Function.READ, lanes)
        signal.pthread_kill(main, signal.SIGINT)
        in_flight.wait(60)
        cufile.release(Function.READ)

    def stop(*_: object) -> None:
        in_flight.set()
        raise KeyboardInterrupt

    signal.signal(signal.SIGINT, stop)
    thread = threading.Thread(target=interrupt)
    cufile.fail(Function.READ, delay=0.05, first=lanes + 1, count=-1)  # time to hear of the end
    with cufile.held(Function.READ):
        thread.start()
        with pytest.raises(KeyboardInterrupt):
            handle.sync_pread(there, path)
        thread.join()
    assert cufile.calls(Function.READ) < ODD // BLOCK
    cufile.mend()
    handle.sync_pread(there, path)
    assert torch.equal(device.peek(there), pattern(ODD))
