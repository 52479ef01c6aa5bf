"""What is moved between files and tensors on an accelerator."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

import nvme_ops
from tests.conftest import MIB, contents, store
from tests.device.calls import VIEWS, Call, each_read, each_write
from tests.device.kinds import PAGE, Device, sample

pytest_plugins = ("tests.fake_cufile.fixtures",)

OFFSETS = [0, 1, PAGE - 1, PAGE, 12345]
# Chunks, and bytes more; the last needs every slot, one of them twice.
SIZES = [(0, 0), (0, 1), (0, PAGE - 1), (0, PAGE), (0, PAGE + 1), (1, -1), (1, 0), (1, 1), (8, MIB + 3)]
DTYPES = [torch.bool, torch.int8, torch.float16, torch.bfloat16, torch.float32, torch.int64, torch.complex128]
DTYPES += [getattr(torch, name) for name in ("float8_e4m3fn", "float8_e5m2") if hasattr(torch, name)]

each_lanes = pytest.mark.parametrize("lanes", [1, 3])


@each_lanes
@pytest.mark.parametrize("offset", OFFSETS)
@pytest.mark.parametrize(("chunks", "more"), SIZES)
def test_round_trip(device: Device, folder: Path, chunks: int, more: int, offset: int, lanes: int) -> None:
    size, before = chunks * device.chunk + more, sample(offset + 10, 1)
    handle, path, data, back = device.handle(lanes), store(folder / "file", before), sample(size), device.empty(size)
    handle.sync_pwrite(device.tensor(data), path, offset)
    assert torch.equal(contents(path), torch.cat([before[:offset], data, before[offset + size :]]))
    device.require_pages(offset, size)
    handle.sync_pread(back, path, offset)
    assert torch.equal(device.peek(back), data)


@each_lanes
@each_write
def test_every_way_to_write(device: Device, folder: Path, write: Call, lanes: int) -> None:
    path, data = folder / "file", sample(device.odd)
    write(device.handle(lanes), device.tensor(data), path, 777)
    assert torch.equal(contents(path)[777:], data)


@each_lanes
@each_read
def test_every_way_to_read(device: Device, folder: Path, read: Call, lanes: int) -> None:
    data = sample(device.odd)
    path, back = store(folder / "file", data), device.empty(device.odd - 777)
    read(device.handle(lanes), back, path, 777)
    assert torch.equal(device.peek(back), data[777:])
    device.require_pages(777, device.odd - 777)


def test_a_write_without_offset_makes_the_whole_file(device: Device, folder: Path) -> None:
    path, data = store(folder / "file", sample(3 * device.odd, 1)), sample(device.odd)
    device.handle().write(device.tensor(data), path)
    assert torch.equal(contents(path), data)


def test_a_write_with_an_offset_leaves_the_rest(device: Device, folder: Path) -> None:
    before, data = sample(3 * device.odd, 1), sample(device.odd)
    path = store(folder / "file", before)
    device.handle().write(device.tensor(data), path, file_offset=0)
    assert torch.equal(contents(path), torch.cat([data, before[device.odd :]]))


# What tensors can be


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_dtypes(device: Device, folder: Path, dtype: torch.dtype) -> None:
    handle, path, data = device.handle(), folder / "file", sample(16 * 12345)
    data = data % 2 if dtype == torch.bool else data
    sent = device.tensor(data.view(dtype).view(3, 5, -1))
    handle.write(sent, path)
    assert torch.equal(contents(path), data)
    back = torch.empty_like(sent)
    handle.read(back, path)
    assert torch.equal(device.peek(back), data)
    assert back.dtype == dtype
    device.require_route(handle)


@each_lanes
def test_views(device: Device, folder: Path, lanes: int) -> None:
    handle, path, data = device.handle(lanes), folder / "file", sample(4 * 600 * 500).view(torch.float32).view(600, 500)
    there = device.tensor(data)
    for name, view in VIEWS.items():
        handle.sync_pwrite(view(there), path)
        assert torch.equal(contents(path), view(data).contiguous().view(-1).view(torch.uint8)), name
    device.require_route(handle)


@each_lanes
def test_a_view_is_filled_and_nothing_around_it(device: Device, folder: Path, lanes: int) -> None:
    path, whole = store(folder / "file", sample(device.odd)), device.empty(device.odd + 200)
    part = whole[99 : 99 + device.odd]
    device.handle(lanes).sync_pread(part, path)
    device.require_only(part)
    there = device.peek(whole)
    assert torch.equal(there[99:-101], sample(device.odd))
    assert there[:99].eq(device.unwritten).all()
    assert there[-101:].eq(device.unwritten).all()


def test_a_destination_with_gaps_is_refused(device: Device, folder: Path) -> None:
    path, gaps = store(folder / "file", sample(40_000)), device.empty(200, 200).t()
    with pytest.raises(ValueError, match="buffer must be contiguous"):
        device.handle().read(gaps, path)
    assert device.peek(gaps.t()).eq(device.unwritten).all()
    device.require_pages(0, 0)


@each_read
def test_autograd_sees_a_read(device: Device, folder: Path, read: Call) -> None:
    path, parameter = store(folder / "file", sample(8192)), torch.nn.Parameter(device.empty(2048, dtype=torch.float32))
    before = parameter._version
    read(device.handle(), parameter, path, 0)
    assert parameter._version > before
    assert parameter.requires_grad
    assert parameter.is_leaf
    assert torch.equal(device.peek(parameter), sample(8192))


@each_read
def test_inference_tensors(device: Device, folder: Path, read: Call) -> None:
    path = store(folder / "file", sample(device.odd))
    with torch.inference_mode():
        made_here = device.empty(device.odd)
        read(device.handle(), made_here, path, 0)
    assert torch.equal(device.peek(made_here), sample(device.odd))
    with torch.inference_mode():
        filled_outside = device.empty(device.odd)
    read(device.handle(), filled_outside, path, 0)
    assert torch.equal(device.peek(filled_outside), sample(device.odd))


def test_a_normal_tensor_in_inference_mode(device: Device, folder: Path) -> None:
    handle, path, there = device.handle(), folder / "file", device.tensor(sample(device.odd))
    back = device.empty(device.odd)
    with torch.inference_mode():
        handle.write(there, path, True)
        handle.read(back, path, True)
    assert torch.equal(device.peek(back), sample(device.odd))


@pytest.mark.parametrize("validated", ["write", "read"])
def test_validation_of_what_is_right(device: Device, folder: Path, validated: str) -> None:
    handle, path, back = device.handle(), folder / "file", device.empty(device.odd)
    handle.pwrite(device.tensor(sample(device.odd)), path, validated == "write", False)
    handle.pread(back, path, validated == "read", False)
    assert torch.equal(device.peek(back), sample(device.odd))
    device.require_route(handle)


# What files can be


def test_descriptors(device: Device, folder: Path) -> None:
    size, before = device.odd, sample(3 * device.odd, 1)
    handle, path, back = device.handle(), store(folder / "file", before), device.empty(size)
    fd = os.open(path, os.O_RDWR)
    handle.async_pwrite(device.tensor(sample(size)), fd)
    handle.async_pread(back, fd, size)
    assert handle.wait() == 2
    assert torch.equal(contents(path), torch.cat([sample(size), before[size:]]))
    assert torch.equal(device.peek(back), before[size : 2 * size])
    assert os.fstat(fd).st_size == 3 * size  # still open, and the caller's
    os.close(fd)
    device.require_route(handle)


def test_a_descriptor_may_be_closed_at_once(device: Device, folder: Path) -> None:
    handle, path, back = device.handle(), folder / "file", device.empty(device.odd)
    with path.open("wb") as file:
        future = handle.submit_pwrite(device.tensor(sample(device.odd)), file.fileno(), 0)
    assert future.result() == device.odd
    with path.open("rb") as file:
        future = handle.submit_pread(back, file.fileno())
    assert future.result() == device.odd
    assert torch.equal(device.peek(back), sample(device.odd))


def test_a_file_object(device: Device, folder: Path) -> None:
    handle, path, data, back = device.handle(2), folder / "file", sample(device.odd), device.empty(device.odd)
    starts = range(MIB, device.odd, device.odd // 100)
    with nvme_ops.open(path, "w", handle=handle) as file:
        file.write(data[:MIB].numpy().tobytes())
        parts = [data[start : start + starts.step] for start in starts]
        pending = [file.pwrite_async(device.tensor(part), at) for part, at in zip(parts, starts, strict=True)]
        file.sync()
        assert sum(future.result() for future in pending) == device.odd - MIB
    assert torch.equal(contents(path), data)
    with nvme_ops.open(path, "r", handle=handle) as file:
        assert file.pread(back, 0) == device.odd
        assert file.read(300_000) == data[:300_000].numpy().tobytes()
    assert torch.equal(device.peek(back), data)
    device.require_route(handle)
