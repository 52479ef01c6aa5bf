"""What gds_handle moves, over a libcufile and an accelerator that are both made of host memory.

The way to storage, the splitting, the order and the bookkeeping are those of production. How a GPU or the real cuFile
behaves is met in gpu/ alone: nothing here is evidence about either.
"""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
import torch
from conftest import MIB, contents, pattern, store
from fake_cufile import FakeCuFile, Function
from private_device import PrivateDevice
from private_device.calls import VIEWS, Call, each_read, each_write

import nvme_ops
from nvme_ops.gds import gds_handle
from nvme_ops.op_builder import GDSBuilder

pytest_plugins = ("fake_cufile.fixtures",)

PAGE, BLOCK = 4096, 65536
SIZES = [0, 1, PAGE - 1, PAGE, PAGE + 1, BLOCK - 1, BLOCK, BLOCK + 1, 40 * BLOCK + 12345]
OFFSETS = [0, PAGE, 1, 12345]
ODD = 2 * MIB + 5


def pages_of(offset: int, size: int) -> int:
    """Bytes of the whole pages of a file in a range."""
    first = -(-offset // PAGE) * PAGE
    return max(0, (offset + size) // PAGE * PAGE - first)


def test_the_op_offers_the_handle(ops: None) -> None:
    assert GDSBuilder().load().gds_handle is gds_handle


# Sizes and places


@pytest.mark.parametrize("offset", OFFSETS)
@pytest.mark.parametrize("size", SIZES)
def test_round_trip(cufile: FakeCuFile, device: PrivateDevice, folder: Path, size: int, offset: int) -> None:
    data, before = pattern(size), pattern(offset + 10, 1)
    for lanes in (1, 3):
        handle, path, back = gds_handle(BLOCK, intra_op_parallelism=lanes), folder / str(lanes), device.empty(size)
        store(path, before)
        handle.sync_pwrite(device.tensor(data), path, offset)
        stored = contents(path)
        assert torch.equal(stored[:offset], before[:offset])
        assert torch.equal(stored[offset : offset + size], data)
        assert len(stored) == max(len(before), offset + size)
        handle.sync_pread(back, path, offset)
        assert torch.equal(device.peek(back), data)
    now = cufile.statistics()
    assert (now.bytes_written, now.bytes_read) == (2 * pages_of(offset, size),) * 2


@pytest.mark.parametrize("offset", OFFSETS)
def test_only_whole_pages_of_the_file_go_through_cufile(
    cufile: FakeCuFile, device: PrivateDevice, folder: Path, offset: int
) -> None:
    handle, path, there = gds_handle(BLOCK), folder / "file", device.tensor(pattern(ODD))
    handle.write(there, path, file_offset=offset)
    assert cufile.touched_only(there)
    assert cufile.statistics().ragged == 0
    assert handle.path_statistics()["uses"] == {"gds": {"transfers": 1, "bytes": ODD}}


@each_write
def test_every_way_to_write(cufile: FakeCuFile, device: PrivateDevice, folder: Path, write: Call) -> None:
    path, data = folder / "file", pattern(ODD)
    write(gds_handle(BLOCK, intra_op_parallelism=2), device.tensor(data), path, 777)
    assert torch.equal(contents(path)[777:], data)
    assert cufile.statistics().bytes_written == pages_of(777, ODD)


@each_read
def test_every_way_to_read(cufile: FakeCuFile, device: PrivateDevice, folder: Path, read: Call) -> None:
    path, back = store(folder / "file", pattern(ODD)), device.empty(ODD - 777)
    read(gds_handle(BLOCK, intra_op_parallelism=2), back, path, 777)
    assert torch.equal(device.peek(back), pattern(ODD)[777:])
    assert cufile.statistics().bytes_read == pages_of(777, ODD - 777)


# What tensors can be


@pytest.mark.parametrize(
    "dtype", [torch.bool, torch.int8, torch.bfloat16, torch.float32, torch.int64, torch.complex128, torch.float8_e4m3fn]
)
def test_dtypes(cufile: FakeCuFile, device: PrivateDevice, folder: Path, dtype: torch.dtype) -> None:
    handle, path, data = gds_handle(), folder / "file", pattern(16 * 12345)
    data = data % 2 if dtype == torch.bool else data
    sent = device.tensor(data.view(dtype).view(3, 5, -1))
    handle.write(sent, path)
    assert torch.equal(contents(path), data)
    back = torch.empty_like(sent)
    handle.read(back, path)
    assert torch.equal(device.peek(back), data)
    assert cufile.calls(Function.READ) > 0


def test_views(cufile: FakeCuFile, device: PrivateDevice, folder: Path) -> None:
    handle, path, data = gds_handle(), folder / "file", pattern(4 * 600 * 500).view(torch.float32).view(600, 500)
    there = device.tensor(data)
    for name, view in VIEWS.items():
        handle.sync_pwrite(view(there), path)
        assert torch.equal(contents(path), view(data).contiguous().view(-1).view(torch.uint8)), name
    assert cufile.calls(Function.WRITE) > 0


def test_a_view_is_filled_and_nothing_around_it(cufile: FakeCuFile, device: PrivateDevice, folder: Path) -> None:
    path, whole = store(folder / "file", pattern(ODD)), device.empty(ODD + 200)
    gds_handle(BLOCK, intra_op_parallelism=3).sync_pread(whole[99 : 99 + ODD], path)
    there = device.peek(whole)
    assert torch.equal(there[99 : 99 + ODD], pattern(ODD))
    assert there[:99].eq(device.unwritten).all()
    assert there[99 + ODD :].eq(device.unwritten).all()
    assert cufile.touched_only(whole[99 : 99 + ODD])


def test_a_destination_with_gaps_is_refused(cufile: FakeCuFile, device: PrivateDevice, folder: Path) -> None:
    path = store(folder / "file", pattern(40_000))
    with pytest.raises(ValueError, match="buffer must be contiguous"):
        gds_handle().read(device.empty(200, 200).t(), path)
    assert cufile.calls(Function.READ) == 0


def test_autograd_sees_a_read(cufile: FakeCuFile, device: PrivateDevice, folder: Path) -> None:
    path, parameter = store(folder / "file", pattern(8192)), torch.nn.Parameter(device.empty(2048, dtype=torch.float32))
    before = parameter._version
    gds_handle().read(parameter, path)
    assert parameter._version > before
    assert parameter.requires_grad
    assert torch.equal(device.peek(parameter), pattern(8192))


# Files


def test_a_write_without_offset_makes_the_whole_file(cufile: FakeCuFile, device: PrivateDevice, folder: Path) -> None:
    path = store(folder / "file", pattern(3 * ODD, 1))
    gds_handle().write(device.tensor(pattern(ODD)), path)
    assert torch.equal(contents(path), pattern(ODD))


def test_a_write_with_an_offset_leaves_the_rest(cufile: FakeCuFile, device: PrivateDevice, folder: Path) -> None:
    path = store(folder / "file", pattern(3 * ODD, 1))
    gds_handle().write(device.tensor(pattern(ODD)), path, file_offset=0)
    assert torch.equal(contents(path), torch.cat([pattern(ODD), pattern(3 * ODD, 1)[ODD:]]))


def test_descriptors(cufile: FakeCuFile, device: PrivateDevice, folder: Path) -> None:
    handle, path, back = gds_handle(), store(folder / "file", pattern(3 * ODD, 1)), device.empty(ODD)
    fd = os.open(path, os.O_RDWR)
    handle.async_pwrite(device.tensor(pattern(ODD)), fd)
    handle.async_pread(back, fd, ODD)
    assert handle.wait() == 2
    assert torch.equal(contents(path), torch.cat([pattern(ODD), pattern(3 * ODD, 1)[ODD:]]))
    assert torch.equal(device.peek(back), pattern(3 * ODD, 1)[ODD : 2 * ODD])
    assert os.fstat(fd).st_size == 3 * ODD  # still open, and the caller's
    os.close(fd)
    assert handle.path_statistics()["uses"] == {"gds": {"transfers": 2, "bytes": 2 * ODD}}


def test_a_file_object(cufile: FakeCuFile, device: PrivateDevice, folder: Path) -> None:
    handle, path, data = gds_handle(BLOCK, intra_op_parallelism=2), folder / "file", pattern(ODD)
    with nvme_ops.open(path, "w", handle=handle) as file:
        file.write(data[:MIB].numpy().tobytes())
        pending = [file.pwrite_async(device.tensor(data[at : at + 5000]), at) for at in range(MIB, ODD, 5000)]
        file.sync()
        assert sum(future.result() for future in pending) == ODD - MIB
    assert torch.equal(contents(path), data)
    back = device.empty(ODD)
    with nvme_ops.open(path, "r", handle=handle) as file:
        assert file.pread(back, 0) == ODD
        assert file.read(300_000) == data[:300_000].numpy().tobytes()
    assert torch.equal(device.peek(back), data)
    assert cufile.touched_only(back) is False
    assert handle.last_path == "gds"


# Many at once


def test_async_operations_and_wait(cufile: FakeCuFile, device: PrivateDevice, folder: Path) -> None:
    handle, count = gds_handle(BLOCK, intra_op_parallelism=2), 12
    sent = [device.tensor(pattern(MIB + i, i), i % 2) for i in range(count)]
    for i in range(count):
        assert handle.async_pwrite(sent[i], folder / f"file{i}") == 0
    assert handle.wait() == count
    assert handle.wait() == 0
    back = [device.empty(MIB + i, index=i % 2) for i in range(count)]
    for i in range(count):
        handle.async_pread(back[i], folder / f"file{i}")
    on_host = torch.zeros(MIB, dtype=torch.uint8)
    assert handle.sync_pread(on_host, folder / "file0") == count + 1
    assert torch.equal(on_host, pattern(MIB, 0))
    for i in range(count):
        assert torch.equal(device.peek(back[i]), pattern(MIB + i, i))


def test_lists_of_cpu_and_device_tensors(cufile: FakeCuFile, device: PrivateDevice, folder: Path) -> None:
    handle, names, data = gds_handle(BLOCK, intra_op_parallelism=3), [folder / "one", folder / "two"], pattern(12 * MIB)
    sizes = [0, 1, 5000, 3 * MIB + 1, MIB, 2 * MIB - 1]
    starts = [100, 200, 300, 6000, 4 * MIB, 9 * MIB]
    parts = [data[start : start + size] for start, size in zip(starts, sizes, strict=True)]
    files = [names[i // 2 % 2] for i in range(6)]
    sent = [device.tensor(part) if i % 2 else part for i, part in enumerate(parts)]
    assert handle.submit_pwritev(sent, files, starts).result() == sum(sizes)
    for start, part, file in zip(starts, parts, files, strict=True):
        assert torch.equal(contents(file)[start : start + len(part)], part)
    back = [torch.zeros(size, dtype=torch.uint8) if i % 2 else device.empty(size) for i, size in enumerate(sizes)]
    assert handle.submit_preadv(back, files, starts).result() == sum(sizes)
    for part, there in zip(parts, back, strict=True):
        assert torch.equal(there if there.is_cpu else device.peek(there), part)
    devices_alone = [device.empty(size) for size in sizes]
    assert handle.submit_preadv(devices_alone, files, starts).result() == sum(sizes)
    for part, there in zip(parts, devices_alone, strict=True):
        assert torch.equal(device.peek(there), part)


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


# Validation


@pytest.mark.parametrize("validated", ["write", "read"])
def test_validation_of_what_is_right(cufile: FakeCuFile, device: PrivateDevice, folder: Path, validated: str) -> None:
    handle, path, back = gds_handle(BLOCK), folder / "file", device.empty(ODD)
    handle.pwrite(device.tensor(pattern(ODD)), path, validated == "write", False)
    handle.pread(back, path, validated == "read", False)
    assert torch.equal(device.peek(back), pattern(ODD))
    assert cufile.calls(Function.READ) > 0


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
