"""What goes wrong under gds_handle: short transfers, errors of the system and of cuFile, files that end too soon.

The libcufile and the accelerator are made of host memory and fail on request: the codes are cuFile's, but when a real
one gives them is not known from here.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from nvme_ops.gds import gds_handle
from tests.conftest import contents, pattern, store
from tests.fake_cufile import FakeCuFile, Function
from tests.private_device import PrivateDevice

pytest_plugins = ("tests.fake_cufile.fixtures",)

PAGE, BLOCK = 4096, 65536
SIZE = 32 * BLOCK
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


# Short transfers


@pytest.mark.parametrize("most", [1, 1000, PAGE, BLOCK - 1])
@both
def test_a_short_transfer_is_continued(
    cufile: FakeCuFile, device: PrivateDevice, folder: Path, write: bool, most: int
) -> None:
    path, data, function = folder / "file", pattern(SIZE + 777), WRITE if write else READ
    there = device.tensor(data) if write else device.empty(SIZE + 777)
    for lanes in (1, 3):
        handle = gds_handle(BLOCK, intra_op_parallelism=lanes)
        cufile.fail(function, most=most, first=2, count=7)
        if write:
            handle.sync_pwrite(there, path)
            assert torch.equal(contents(path), data)
        else:
            handle.sync_pread(there, store(path, data))
            assert torch.equal(device.peek(there), data)
    assert cufile.calls(function) > 2 * SIZE // BLOCK
    assert cufile.touched_only(there)


def test_a_file_cut_while_it_is_read(cufile: FakeCuFile, device: PrivateDevice, folder: Path) -> None:
    handle, path, there = gds_handle(BLOCK), store(folder / "file", pattern(SIZE)), device.empty(SIZE)
    with cufile.held(READ):
        future = handle.submit_pread(there, path)
        cufile.wait_for_held_up(READ)
        os.truncate(path, 3 * BLOCK + 5)
    with pytest.raises(EOFError, match=f"the file, which has {3 * BLOCK + 5} bytes: '{path}'"):
        future.result()
    still_works(cufile, device, handle, folder)


def test_a_write_that_moves_nothing(cufile: FakeCuFile, device: PrivateDevice, folder: Path) -> None:
    handle, path = gds_handle(BLOCK), folder / "file"
    cufile.fail(WRITE, most=0, first=3)
    with pytest.raises(OSError, match="Input/output error") as caught:
        handle.write(device.tensor(pattern(SIZE)), path)
    assert caught.value.errno == errno.EIO
    still_works(cufile, device, handle, folder)


# Codes of cuFile, and errno


@pytest.mark.parametrize(
    ("code", "text"),
    [
        (5006, "the driver is being closed"),
        (5011, "the CUDA driver failed"),
        (5014, "the range leaves its allocation"),
        (5022, "a wrong argument"),
        (5044, "an I/O error"),
        (5999, "see CUfileOpError"),
    ],
)
@both
def test_a_code_of_cufile(
    cufile: FakeCuFile, device: PrivateDevice, folder: Path, write: bool, code: int, text: str
) -> None:
    path, there = store(folder / "file", pattern(SIZE)), device.tensor(pattern(SIZE))
    for heard in HEARD.values():
        handle = gds_handle(BLOCK)
        cufile.fail(WRITE if write else READ, code, first=3)
        with pytest.raises(OSError, match=f"cuFile error {code}, .*{text}") as caught:
            heard(handle, write, there, path)
        assert caught.value.errno == code
        assert caught.value.filename == str(path)
        assert f"{'write' if write else 'read'} of {BLOCK} bytes at offset {2 * BLOCK}" in str(caught.value)
        still_works(cufile, device, handle, folder)


@pytest.mark.parametrize("error", [errno.EIO, errno.ENOSPC, errno.EINVAL, errno.EOPNOTSUPP, errno.EFAULT])
@both
def test_an_error_of_the_system(
    cufile: FakeCuFile, device: PrivateDevice, folder: Path, write: bool, error: int
) -> None:
    path, there = store(folder / "file", pattern(SIZE)), device.tensor(pattern(SIZE))
    for heard in HEARD.values():
        handle = gds_handle(BLOCK)
        cufile.fail(WRITE if write else READ, error=error, first=2)
        with pytest.raises(OSError, match=os.strerror(error)) as caught:
            heard(handle, write, there, path)
        assert caught.value.errno == error
        assert caught.value.filename == str(path)
        del caught
        still_works(cufile, device, handle, folder)


@pytest.mark.parametrize("error", [errno.EINTR, errno.EAGAIN])
@both
def test_a_transient_error_is_tried_again(
    cufile: FakeCuFile, device: PrivateDevice, folder: Path, write: bool, error: int
) -> None:
    handle, path, data = gds_handle(BLOCK, intra_op_parallelism=2), folder / "file", pattern(SIZE)
    there, function = device.tensor(data) if write else device.empty(SIZE), WRITE if write else READ
    cufile.fail(function, error=error, first=5, count=20)
    if write:
        handle.sync_pwrite(there, path)
        assert torch.equal(contents(path), data)
    else:
        handle.sync_pread(there, store(path, data))
        assert torch.equal(device.peek(there), data)
    assert cufile.calls(function) == SIZE // BLOCK + 20


def test_a_transient_error_that_stays_is_told(cufile: FakeCuFile, device: PrivateDevice, folder: Path) -> None:
    handle, path = gds_handle(), store(folder / "file", pattern(SIZE))
    cufile.fail(READ, error=errno.EAGAIN, count=-1)
    with pytest.raises(BlockingIOError) as caught:
        handle.read(device.empty(SIZE), path)
    assert caught.value.errno == errno.EAGAIN
    del caught
    still_works(cufile, device, handle, folder)


def test_nothing_is_started_after_a_failure(cufile: FakeCuFile, device: PrivateDevice, folder: Path) -> None:
    handle, path = gds_handle(BLOCK), store(folder / "file", pattern(SIZE))
    cufile.fail(READ, 5044, first=3)
    with pytest.raises(OSError, match="5044"):
        handle.read(device.empty(SIZE), path)
    assert cufile.calls(READ) == 3


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


def test_the_driver_closed_under_us(cufile: FakeCuFile, device: PrivateDevice, folder: Path) -> None:
    handle, path = gds_handle(BLOCK), store(folder / "file", pattern(SIZE))
    cufile.fail(READ, 5006, first=4, count=-1)
    for _ in range(2):
        with pytest.raises(OSError, match="the driver is being closed") as caught:
            handle.read(device.empty(SIZE), path)
        assert caught.value.errno == 5006
    del caught
    on_host = torch.zeros(SIZE, dtype=torch.uint8)
    handle.read(on_host, path)
    assert torch.equal(on_host, pattern(SIZE))
