"""Threads, lifetimes and interruption of gds_handle's transfers, seen from cuFile; their order is in device/.

The library and the accelerator are doubles made of host memory: nothing here is evidence about real ones.
"""

from __future__ import annotations

import gc
import os
import signal
import threading
from pathlib import Path

import pytest
import torch

from nvme_ops.gds import gds_handle
from tests.conftest import MIB, contents, pattern, store
from tests.fake_cufile import FakeCuFile, Function
from tests.private_device import PrivateDevice

pytest_plugins = ("tests.fake_cufile.fixtures",)

BLOCK = 65536
ODD = 2 * MIB + 5


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


@pytest.mark.usefixtures("no_collection")
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
