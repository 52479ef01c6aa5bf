"""What reaches cuFile of gds_handle's transfers, and in how many calls; that they are right is in device/.

The library and the accelerator are doubles made of host memory: nothing here is evidence about real ones.
"""

from __future__ import annotations

import errno
from pathlib import Path

import pytest
import torch

from nvme_ops.gds import gds_handle
from nvme_ops.op_builder import GDSBuilder
from tests.conftest import MIB, pattern, store
from tests.fake_cufile import FakeCuFile, Function
from tests.private_device import PrivateDevice

pytest_plugins = ("tests.fake_cufile.fixtures",)

PAGE, BLOCK = 4096, 65536
ODD = 2 * MIB + 5


def test_the_op_offers_the_handle(ops: None) -> None:
    assert GDSBuilder().load().gds_handle is gds_handle


@pytest.mark.parametrize("offset", [0, PAGE, 1, 12345])
def test_only_whole_pages_of_the_file_go_through_cufile(
    cufile: FakeCuFile, device: PrivateDevice, folder: Path, offset: int
) -> None:
    handle, path, there = gds_handle(BLOCK), folder / "file", device.tensor(pattern(ODD))
    handle.write(there, path, file_offset=offset)
    assert cufile.touched_only(there)
    assert cufile.statistics().ragged == 0
    assert handle.path_statistics()["uses"] == {"gds": {"transfers": 1, "bytes": ODD}}


def test_rows_of_a_cpu_tensor(cufile: FakeCuFile, folder: Path) -> None:
    path, rows = store(folder / "file", pattern(40_000)), torch.zeros(4, 10_000, dtype=torch.uint8)
    assert gds_handle().submit_preadv(rows, path, [30_000, 20_000, 10_000, 0]).result() == 40_000
    assert torch.equal(rows.flip(0).view(-1), pattern(40_000))


def test_cpu_tensors_never_reach_cufile(cufile: FakeCuFile, folder: Path) -> None:
    handle, path, data = gds_handle(BLOCK, intra_op_parallelism=2), folder / "file", pattern(ODD)
    back = torch.zeros_like(data)
    handle.write(data, path, True)
    handle.sync_pread(back, path)
    assert torch.equal(back, data)
    handle.async_pwrite(data, path)
    handle.wait()
    assert handle.submit_preadv([back, back[:100]], path, [0, 7]).result() == ODD + 100
    locked = handle.new_cpu_locked_tensor(ODD, data)
    handle.read(locked, path)
    assert torch.equal(locked, data)
    assert handle.is_pinned(locked[5:])
    handle.free_cpu_locked_tensor(locked)
    for function in (Function.READ, Function.WRITE, Function.REGISTER_FILE, Function.REGISTER_MEMORY):
        assert cufile.calls(function) == 0
    assert handle.last_path is None


@pytest.mark.parametrize("lanes", [1, 4])
def test_lanes_are_the_calls_at_once(cufile: FakeCuFile, device: PrivateDevice, folder: Path, lanes: int) -> None:
    handle, back = gds_handle(BLOCK, intra_op_parallelism=lanes), device.empty(32 * BLOCK)
    path = store(folder / "file", pattern(32 * BLOCK))
    with cufile.held(Function.READ):
        future = handle.submit_pread(back, path)
        cufile.wait_for_held_up(Function.READ, lanes)
        assert not future.done()
    assert future.result() == 32 * BLOCK
    assert torch.equal(device.peek(back), pattern(32 * BLOCK))
    assert cufile.statistics().at_once == lanes
    assert cufile.calls(Function.READ) == 32


def test_a_file_is_registered_once_for_a_transfer(cufile: FakeCuFile, device: PrivateDevice, folder: Path) -> None:
    handle = gds_handle(BLOCK, intra_op_parallelism=4)
    handle.write(device.tensor(pattern(ODD)), folder / "file")
    assert cufile.calls(Function.REGISTER_FILE) == 1
    parts = [device.empty(PAGE) for _ in range(10)]
    handle.submit_preadv(parts, folder / "file", range(0, 10 * BLOCK, BLOCK)).result()
    assert cufile.calls(Function.REGISTER_FILE) == 2


@pytest.mark.parametrize("write", [True, False], ids=["write", "read"])
def test_validation_finds_what_differs(cufile: FakeCuFile, device: PrivateDevice, folder: Path, write: bool) -> None:
    handle, path, there = gds_handle(BLOCK), store(folder / "file", pattern(ODD)), device.tensor(pattern(ODD))
    with device.held():  # the tail, which does not fill a page and comes after what cuFile has moved
        (handle.pwrite if write else handle.pread)(there, path, True, True)
        device.wait_for_held_up()
        with path.open("r+b") as file:
            file.write(bytes([int(pattern(1)) ^ 1]))
    with pytest.raises(OSError, match="differ") as caught:
        handle.wait()
    assert caught.value.errno == errno.EIO
    assert caught.value.filename == str(path)
