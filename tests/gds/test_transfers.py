"""What reaches cuFile of gds_handle's transfers, what goes wrong there, and that nothing stays; bytes are in device/.

The library and the accelerator are doubles made of host memory: the codes are cuFile's, but when a real one gives them
is not known from here.
"""

from __future__ import annotations

import ctypes
import errno
import gc
import os
import signal
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from nvme_ops.gds import gds_handle
from nvme_ops.op_builder import GDSBuilder, machine
from tests.conftest import MIB, contents, in_threads, pattern, store
from tests.fake_cufile import FakeCuFile, Function
from tests.private_device import PrivateDevice

pytest_plugins = ("tests.fake_cufile.fixtures",)

PAGE, BLOCK = 4096, 65536
SIZE, ODD = 32 * BLOCK, 2 * MIB + 5
READ, WRITE = Function.READ, Function.WRITE

# One for each way to hear of a failure.
HEARD: dict[str, Callable[[gds_handle, bool, torch.Tensor, Path], object]] = {
    "blocking": lambda h, write, t, path: (h.sync_pwrite if write else h.sync_pread)(t, path, 0),
    "wait": lambda h, write, t, path: ((h.async_pwrite if write else h.async_pread)(t, path, 0), h.wait()),
    "result": lambda h, write, t, path: (h.submit_pwrite if write else h.submit_pread)(t, path, 0).result(),
    "list": lambda h, write, t, path: (h.submit_pwritev if write else h.submit_preadv)([t], path, [0]).result(),
}
both = pytest.mark.parametrize("write", [True, False], ids=["write", "read"])


def still_works(cufile: FakeCuFile, device: PrivateDevice, handle: gds_handle, folder: Path) -> None:
    cufile.mend()
    path, back = folder / "afterwards", device.empty(SIZE + 5)
    handle.write(device.tensor(pattern(SIZE + 5, 9)), path)
    handle.async_pread(back, path)
    assert handle.wait() == 1
    assert torch.equal(device.peek(back), pattern(SIZE + 5, 9))
    assert handle.last_path == "gds"


def moves(device: PrivateDevice, handle: gds_handle, path: Path, write: bool, size: int) -> torch.Tensor:
    """Moves a tensor of random bytes one way, and returns it; they must arrive."""
    data, there = pattern(size), device.empty(size)
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
    cufile: FakeCuFile, device: PrivateDevice, folder: Path, owner: int, current: int
) -> None:
    """Found by its name, as the driver's library is."""
    found = machine.find_compiler()
    assert found is not None
    (folder / "cuda.cpp").write_text(f'extern "C" {{{CUDA}}}')
    library = folder / "libcuda.so.1"
    command = [*found.command, "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", str(folder / "cuda.cpp")]
    subprocess.run([*command, "-o", str(library)], check=True)
    cuda = ctypes.CDLL(str(library))
    cuda.own(ctypes.c_void_p(owner))
    moves(device, gds_handle(), folder / "file", True, BLOCK)
    assert [cuda.made_current(which) for which in range(2)] == [current, 0]  # and what was before, afterwards


@pytest.mark.parametrize("offset", [0, PAGE, 1, 12345])
def test_only_whole_pages_of_the_file(cufile: FakeCuFile, device: PrivateDevice, folder: Path, offset: int) -> None:
    handle, there = gds_handle(BLOCK), device.tensor(pattern(ODD))
    handle.write(there, folder / "file", file_offset=offset)
    assert cufile.touched_only(there)
    assert cufile.statistics().ragged == 0
    assert handle.path_statistics()["uses"] == {"gds": {"transfers": 1, "bytes": ODD}}


def test_no_cpu_tensor(cufile: FakeCuFile, folder: Path) -> None:
    assert GDSBuilder().load().gds_handle is gds_handle
    handle, path, data = gds_handle(BLOCK, intra_op_parallelism=2), folder / "file", pattern(ODD)
    back, rows = torch.zeros_like(data), torch.zeros(4, 10_000, dtype=torch.uint8)
    handle.write(data, path, True)
    handle.sync_pread(back, path)
    assert torch.equal(back, data)
    handle.async_pwrite(data, path)
    handle.wait()
    assert handle.submit_preadv([back, back[:100]], path, [0, 7]).result() == ODD + 100
    assert handle.submit_preadv(rows, path, [30_000, 20_000, 10_000, 0]).result() == 40_000
    assert torch.equal(rows.flip(0).view(-1), data[:40_000])
    locked = handle.new_cpu_locked_tensor(ODD, data)
    handle.read(locked, path)
    assert torch.equal(locked, data)
    assert handle.is_pinned(locked[5:])
    handle.free_cpu_locked_tensor(locked)
    for function in (READ, WRITE, Function.REGISTER_FILE, Function.REGISTER_MEMORY):
        assert cufile.calls(function) == 0
    assert handle.last_path is None


@pytest.mark.parametrize("lanes", [1, 4])
def test_lanes_are_the_calls_at_once(cufile: FakeCuFile, device: PrivateDevice, folder: Path, lanes: int) -> None:
    handle, back = gds_handle(BLOCK, intra_op_parallelism=lanes), device.empty(SIZE)
    path = store(folder / "file", pattern(SIZE))
    with cufile.held(READ):
        future = handle.submit_pread(back, path)
        cufile.wait_for_held_up(READ, lanes)
        assert not future.done()
    assert future.result() == SIZE
    assert torch.equal(device.peek(back), pattern(SIZE))
    assert (cufile.statistics().at_once, cufile.calls(READ), cufile.calls(Function.REGISTER_FILE)) == (lanes, 32, 1)
    parts = [device.empty(PAGE) for _ in range(10)]
    handle.submit_preadv(parts, path, range(0, 10 * BLOCK, BLOCK)).result()
    assert cufile.calls(Function.REGISTER_FILE) == 2


def test_threads_read_one_file_at_once(cufile: FakeCuFile, device: PrivateDevice, folder: Path) -> None:
    handle, path = gds_handle(BLOCK, intra_op_parallelism=4), store(folder / "file", pattern(ODD))
    tensors = [device.empty(ODD) for _ in range(4)]

    def work(number: int) -> None:
        if number < 4:
            handle.read(tensors[number], path)
        else:
            cufile.wait_for_held_up(READ, 4)
            cufile.release(READ)

    with cufile.held(READ):
        in_threads(work, 5)
    assert all(torch.equal(device.peek(tensor), pattern(ODD)) for tensor in tensors)


@both
def test_validation_finds_what_differs(cufile: FakeCuFile, device: PrivateDevice, folder: Path, write: bool) -> None:
    handle, path, there = gds_handle(BLOCK), store(folder / "file", pattern(ODD)), device.tensor(pattern(ODD))
    with device.held():  # the tail, which does not fill a page and comes after what cuFile has moved
        (handle.pwrite if write else handle.pread)(there, path, True, True)
        device.wait_for_held_up()
        with path.open("r+b") as file:
            file.write(bytes([int(pattern(1)) ^ 1]))
    with pytest.raises(OSError, match="differ") as caught:
        handle.wait()
    assert (caught.value.errno, caught.value.filename) == (errno.EIO, str(path))


# What goes wrong


@pytest.mark.parametrize("most", [1, 1000, PAGE, BLOCK - 1])
@both
def test_a_short_transfer_goes_on(
    cufile: FakeCuFile, device: PrivateDevice, folder: Path, write: bool, most: int
) -> None:
    function, handle = WRITE if write else READ, gds_handle(BLOCK, intra_op_parallelism=1 + 2 * (most % 2))
    cufile.fail(function, most=most, first=2, count=7)
    there = moves(device, handle, folder / "file", write, SIZE + 777)
    assert cufile.calls(function) > SIZE // BLOCK
    assert cufile.touched_only(there)


@pytest.mark.parametrize("error", [errno.EINTR, errno.EAGAIN])
@both
def test_a_transient_error_is_tried_again(
    cufile: FakeCuFile, device: PrivateDevice, folder: Path, write: bool, error: int
) -> None:
    cufile.fail(WRITE if write else READ, error=error, first=5, count=20)
    moves(device, gds_handle(BLOCK, intra_op_parallelism=2), folder / "file", write, SIZE)
    assert cufile.calls(WRITE if write else READ) == SIZE // BLOCK + 20


CODES = {
    5006: "the driver is being closed",
    5011: "the CUDA driver failed",
    5014: "the range leaves its allocation",
    5022: "a wrong argument",
    5044: "an I/O error",
    5999: "see CUfileOpError",
    **{code: os.strerror(code) for code in (errno.EIO, errno.ENOSPC, errno.EINVAL, errno.EOPNOTSUPP)},
}


@pytest.mark.parametrize("code", CODES)
def test_a_code_of_cufile_or_of_the_system(cufile: FakeCuFile, device: PrivateDevice, folder: Path, code: int) -> None:
    path, there, write = store(folder / "file", pattern(SIZE)), device.tensor(pattern(SIZE)), code % 2 == 0
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
        still_works(cufile, device, handle, folder)


def test_what_ends_too_soon_or_never_goes_well(cufile: FakeCuFile, device: PrivateDevice, folder: Path) -> None:
    handle, path, there = gds_handle(BLOCK), store(folder / "file", pattern(SIZE)), device.empty(SIZE)
    cufile.fail(READ, error=errno.EAGAIN, count=-1)
    with pytest.raises(BlockingIOError):
        handle.read(there, path)
    still_works(cufile, device, handle, folder)
    cufile.fail(WRITE, most=0, first=3)
    with pytest.raises(OSError, match="Input/output error"):
        handle.write(there, folder / "other")
    still_works(cufile, device, handle, folder)
    with cufile.held(READ):
        future = handle.submit_pread(there, path)
        cufile.wait_for_held_up(READ)
        os.truncate(path, 3 * BLOCK + 5)
    with pytest.raises(EOFError, match=f"the file, which has {3 * BLOCK + 5} bytes: '{path}'"):
        future.result()
    still_works(cufile, device, handle, folder)


def test_every_transfer_of_wait_ends_before_a_failure_is_raised(
    cufile: FakeCuFile, device: PrivateDevice, folder: Path
) -> None:
    handle, path = gds_handle(SIZE), store(folder / "file", pattern(SIZE))
    tensors = [device.empty(SIZE) for _ in range(5)]
    cufile.fail(READ, 5044, first=2)
    cufile.fail(READ, 5014, first=4)
    for tensor in tensors:
        handle.async_pread(tensor, path)
    with pytest.raises(OSError, match="cuFile error") as caught:
        handle.wait()
    failures = caught.value.failures  # type: ignore[attr-defined]
    assert {failure.errno for failure in failures} == {5014, 5044}
    assert failures[0] is caught.value
    assert [torch.equal(device.peek(tensor), pattern(SIZE)) for tensor in tensors].count(True) == 3
    del caught, failures
    still_works(cufile, device, handle, folder)


# Lifetimes


@both
def test_a_tensor_that_its_owner_drops(cufile: FakeCuFile, device: PrivateDevice, folder: Path, write: bool) -> None:
    size = 33 * MIB  # freed, memory of this size is no longer mapped, and the library looks
    path, before = store(folder / "file", pattern(size, 1)), device.statistics().device_blocks
    handle, there, function = gds_handle(), device.tensor(pattern(size)), WRITE if write else READ
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


@pytest.mark.usefixtures("no_collection")
@pytest.mark.parametrize("lanes", [1, 2])
def test_a_handler_that_raises_ends_a_blocking_call(
    cufile: FakeCuFile, device: PrivateDevice, folder: Path, lanes: int
) -> None:
    """What is in flight ends, the rest is not started, and the handle goes on."""
    handle, path = gds_handle(BLOCK, intra_op_parallelism=lanes), store(folder / "file", pattern(ODD))
    there, main, in_flight = device.empty(ODD), threading.get_ident(), threading.Event()

    def interrupt() -> None:
        cufile.wait_for_held_up(READ, lanes)
        signal.pthread_kill(main, signal.SIGINT)
        in_flight.wait(60)
        cufile.release(READ)

    def stop(*_: object) -> None:
        in_flight.set()
        raise KeyboardInterrupt

    signal.signal(signal.SIGINT, stop)
    thread = threading.Thread(target=interrupt)
    cufile.fail(READ, delay=0.05, first=lanes + 1, count=-1)  # time to hear of the end
    with cufile.held(READ):
        thread.start()
        with pytest.raises(KeyboardInterrupt):
            handle.sync_pread(there, path)
        thread.join()
    assert cufile.calls(READ) < ODD // BLOCK
    still_works(cufile, device, handle, folder)
