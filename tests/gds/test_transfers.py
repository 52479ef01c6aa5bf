"""What of gds_handle's transfers and pinned memory reaches cuFile, and what goes wrong there; bytes are in device/.

The library and the accelerator are doubles made of host memory: the codes are cuFile's, but when a real one gives them
is not known from here.
"""

from __future__ import annotations

import ctypes
import errno
import gc
import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from nvme_ops.io.gds import gds_handle
from nvme_ops.op_builder import GDSBuilder
from tests.conftest import MIB, contents, store
from tests.device.kinds import Doubles, sample, still_works
from tests.doubles import FakeCuFile, Function
from tests.made_up import library

PAGE, BLOCK = 4096, 65536
SIZE, ODD = 32 * BLOCK, 2 * MIB + 5
READ, WRITE = Function.READ, Function.WRITE
BIG = 33 * MIB  # freed, memory of this size is no longer mapped, and the library looks

# One for each way to hear of a failure.
HEARD: dict[str, Callable[[gds_handle, bool, torch.Tensor, Path], object]] = {
    "wait": lambda h, write, t, path: ((h.async_pwrite if write else h.async_pread)(t, path, 0), h.wait()),
    "list": lambda h, write, t, path: (h.submit_pwritev if write else h.submit_preadv)([t], path, [0]).result(),
}


def moves(device: Doubles, handle: gds_handle, path: Path, write: bool, size: int) -> torch.Tensor:
    """Moves a tensor of random bytes one way, and returns it; they must arrive."""
    data, there = sample(size), device.empty(size)
    if write:
        there.copy_(data)
        handle.sync_pwrite(there, path)
        assert torch.equal(contents(path), data)
    else:
        handle.sync_pread(there, store(path, data))
        assert torch.equal(device.peek(there), data)
    return there


# What reaches cuFile


# A CUDA driver whose memory belongs to a context, or where it is null to the primary one of device 3.
CUDA = """
static void* owner; static void* now; static void* made[8]; static int count;
int cuPointerGetAttribute(void* value, int attribute, unsigned long) {
  if (attribute == 1) *static_cast<void**>(value) = owner;
  if (attribute == 9) *static_cast<int*>(value) = 3;
  return 0;
}
int cuCtxGetCurrent(void** context) { *context = now; return 0; }
int cuCtxSetCurrent(void* context) { now = made[count++ % 8] = context; return 0; }
int cuDevicePrimaryCtxRetain(void** context, int of) { *context = reinterpret_cast<void*>(100L + of); return 0; }
void own(void* context) { owner = context; count = 0; }
void* made_current(int which) { return made[which]; }
"""


@pytest.mark.parametrize(("owner", "current"), [(7, 7), (0, 103)], ids=["its own", "mapped memory"])
def test_the_context_of_the_memory_is_current(
    cufile: FakeCuFile, device: Doubles, folder: Path, owner: int, current: int
) -> None:
    """Found by its name, as the driver's library is."""
    assert GDSBuilder().load().gds_handle is gds_handle
    name = "libcuda.so.1"
    cuda = ctypes.CDLL(str(library(folder / name, f'extern "C" {{{CUDA}}}', f"-Wl,-soname,{name}")))
    cuda.own(ctypes.c_void_p(owner))
    moves(device, gds_handle(), folder / "file", True, BLOCK)
    assert [cuda.made_current(which) for which in range(2)] == [current, 0]  # and what was before, afterwards


def test_lanes_are_the_calls_at_once(cufile: FakeCuFile, device: Doubles, folder: Path) -> None:
    lanes = 4
    handle, back = gds_handle(BLOCK, intra_op_parallelism=lanes), device.empty(SIZE)
    path = store(folder / "file", sample(SIZE))
    with cufile.held(READ):
        future = handle.submit_pread(back, path)
        cufile.wait_for_held_up(READ, lanes)
        assert not future.done()
    assert future.result() == SIZE
    assert torch.equal(device.peek(back), sample(SIZE))
    handle.read(torch.zeros(SIZE, dtype=torch.uint8), path)  # host memory needs no cuFile
    assert (cufile.now.at_once, cufile.calls(READ), cufile.calls(Function.REGISTER_FILE)) == (lanes, 32, 1)
    parts = [device.empty(PAGE) for _ in range(10)]
    handle.submit_preadv(parts, path, range(0, 10 * BLOCK, BLOCK)).result()
    assert cufile.calls(Function.REGISTER_FILE) == 2


# What goes wrong


@pytest.mark.parametrize(("write", "most"), [(True, 1), (True, PAGE), (False, 1000), (False, BLOCK - 1)])
def test_a_short_transfer_goes_on(cufile: FakeCuFile, device: Doubles, folder: Path, write: bool, most: int) -> None:
    function, handle = WRITE if write else READ, gds_handle(BLOCK, intra_op_parallelism=1 + 2 * (most % 2))
    cufile.fail(function, most=most, first=2, count=7)
    there = moves(device, handle, folder / "file", write, SIZE + 777)
    assert cufile.calls(function) > SIZE // BLOCK
    assert cufile.touched_only(there)


CODES = {
    5011: "the CUDA driver failed",
    5044: "an I/O error",
    5999: "see CUfileOpError",
    errno.EIO: os.strerror(errno.EIO),
    errno.ENOSPC: os.strerror(errno.ENOSPC),
}


@pytest.mark.parametrize("code", CODES)
def test_a_code_of_cufile_or_of_the_system(cufile: FakeCuFile, device: Doubles, folder: Path, code: int) -> None:
    path, there, write = store(folder / "file", sample(SIZE)), device.tensor(sample(SIZE)), code % 2 == 0
    function = WRITE if write else READ
    for heard in HEARD.values():
        handle, calls = gds_handle(BLOCK), cufile.calls(function)
        cufile.fail(function, code if code > 5000 else 0, error=code if code < 5000 else 0, first=3)
        with pytest.raises(OSError, match=CODES[code]) as caught:
            heard(handle, write, there, path)
        assert (caught.value.errno, caught.value.filename) == (code, str(path))
        assert code < 5000 or f"cuFile error {code}" in str(caught.value)
        assert f"{'write' if write else 'read'} of {BLOCK} bytes at offset {2 * BLOCK}" in str(caught.value)
        assert cufile.calls(function) == calls + 3  # nothing was started after it
        del caught
        still_works(device, handle, folder)


@pytest.mark.usefixtures("no_collection")
def test_a_handler_that_raises_ends_a_blocking_call(cufile: FakeCuFile, device: Doubles, folder: Path) -> None:
    """What is in flight ends, the rest is not started, and the handle goes on."""
    handle, path = gds_handle(BLOCK, intra_op_parallelism=2), store(folder / "file", sample(ODD))
    there, main, in_flight = device.empty(ODD), threading.get_ident(), threading.Event()

    def interrupt() -> None:
        cufile.wait_for_held_up(READ, 2)
        signal.pthread_kill(main, signal.SIGINT)
        in_flight.wait(60)
        cufile.release(READ)

    def stop(*_: object) -> None:
        in_flight.set()
        raise KeyboardInterrupt

    signal.signal(signal.SIGINT, stop)
    thread = threading.Thread(target=interrupt)
    cufile.fail(READ, delay=0.05, first=3, count=-1)  # time to hear of the end
    with cufile.held(READ):
        thread.start()
        with pytest.raises(KeyboardInterrupt):
            handle.sync_pread(there, path)
        thread.join()
    assert cufile.calls(READ) < ODD // BLOCK
    cufile.mend()
    still_works(device, handle, folder)


# Memory that is registered


def test_memory_is_deregistered_before_it_is_freed_with_its_last_tensor(cufile: FakeCuFile, device: Doubles) -> None:
    handle, before = gds_handle(), device.memory()
    for new in (True, False):
        tensor = handle.new_pinned_device_tensor(BIG, device.empty(1)) if new else device.empty(BIG)
        handle.pin_device_tensor(tensor)
        kept, same = tensor[5:], tensor.view(3, -1)
        del tensor
        assert handle.unpin_device_tensor(same) is True
        del same
        assert device.memory() == before + 1
        del kept
        assert device.memory() == before
    tensor = device.empty(BIG)
    handle.pin_device_tensor(tensor)
    del tensor, handle  # it stays allocated while cuFile knows it, and is deregistered at the end
    gc.collect()
    assert device.memory() == before + 1
    assert (cufile.now.memories, cufile.now.memory_bytes) == (1, BIG)


@pytest.mark.parametrize("code", [5016, 5011])
def test_a_refusal_is_told_and_leaves_nothing(cufile: FakeCuFile, device: Doubles, code: int) -> None:
    cufile.offer(nvidia_fs=2, memory=BIG + MIB)
    handle, tensor = gds_handle(), device.empty(BIG)
    limit = device.empty(BIG)
    if code == 5016:  # more than may be pinned
        handle.pin_device_tensor(limit)
    else:
        cufile.fail(Function.REGISTER_MEMORY, code, count=2)
    before = device.memory()
    match = f"registering {BIG} bytes of memory .* than may be pinned" if code == 5016 else f"cuFile error {code}"
    for refused in (
        lambda: handle.pin_device_tensor(tensor),
        lambda: handle.new_pinned_device_tensor(BIG, tensor),
    ):
        with pytest.raises(OSError, match=match) as caught:
            refused()
        assert caught.value.errno == code
    del caught
    gc.collect()
    assert device.memory() == before
    assert not handle.is_pinned(tensor)
    assert handle.unpin_device_tensor(tensor) is False
    assert handle.unpin_device_tensor(limit) is (code == 5016)
    assert handle.pin_device_tensor(tensor) is True  # there is room now
    handle.unpin_device_tensor(tensor)
