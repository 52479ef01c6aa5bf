"""What is moved between files and tensors on an accelerator."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.conftest import MIB, contents, store
from tests.device.kinds import PAGE, READS, Device, sample

# Chunks and bytes more, an offset, and lanes; the last size needs every slot, one of them twice.
SIZES = [(0, 0), (0, 1), (0, PAGE), (0, PAGE + 1), (1, -1), (1, 0), (8, MIB + 3)]
OFFSETS = [0, 1, PAGE - 1, PAGE, 12345]


@pytest.mark.parametrize(("number", "size"), list(enumerate(SIZES)))
def test_round_trip(device: Device, folder: Path, number: int, size: tuple[int, int]) -> None:
    bytes_, pages = size[0] * device.chunk + size[1], []
    for more in range(0, 5, 2 if size[0] < 8 else 5):
        offset, lanes = OFFSETS[(number + more) % 5], 1 + 2 * ((number + more) % 2)
        before, data, back = sample(offset + 10, 1), sample(bytes_), device.empty(bytes_)
        handle, path = device.handle(lanes), store(folder / "file", before)
        handle.sync_pwrite(device.tensor(data), path, offset)
        assert torch.equal(contents(path), torch.cat([before[:offset], data, before[offset + bytes_ :]])), offset
        handle.sync_pread(back, path, offset)
        assert torch.equal(device.peek(back), data), offset
        pages += [(offset, bytes_)] * 2
    device.require_pages(*pages)


# What tensors can be


# What a tensor of 600 x 500 elements can be written as.
VIEWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "one element": lambda t: t[3, 4],
    "transposed": lambda t: t.t(),
    "columns": lambda t: t[:, 1:-1],
    "repeated": lambda t: t[5].expand(30, 500),
    "channels last": lambda t: t.view(2, 3, 100, 500).contiguous(memory_format=torch.channels_last),
}


def test_views(device: Device, folder: Path) -> None:
    handle, path, data = device.handle(3), folder / "file", sample(4 * 600 * 500).view(torch.float32).view(600, 500)
    there = device.tensor(data)
    for name, view in VIEWS.items():
        handle.sync_pwrite(view(there), path)
        assert torch.equal(contents(path), view(data).contiguous().view(-1).view(torch.uint8)), name
    device.require_route(handle)


def test_a_view_is_filled_and_nothing_around_it(device: Device, folder: Path) -> None:
    path, whole = store(folder / "file", sample(device.odd)), device.empty(device.odd + 200)
    gaps, handle = device.empty(200, 200).t(), device.handle(3)
    with pytest.raises(ValueError, match="buffer must be contiguous"):
        handle.read(gaps, path)
    assert device.peek(gaps.t()).eq(device.unwritten).all()
    part = whole[99 : 99 + device.odd]
    handle.sync_pread(part, path)
    device.require_only(part)
    there = device.peek(whole)
    assert torch.equal(there[99:-101], sample(device.odd))
    assert there[:99].eq(device.unwritten).all()
    assert there[-101:].eq(device.unwritten).all()


def test_autograd_and_inference_mode(device: Device, folder: Path) -> None:
    handle, path = device.handle(), store(folder / "file", sample(8192))
    for name, read in READS.items():
        parameter = torch.nn.Parameter(device.empty(2048, dtype=torch.float32))
        before = parameter._version
        read(handle, parameter, path, 0)
        assert parameter._version > before, name
        assert parameter.requires_grad
        assert torch.equal(device.peek(parameter), sample(8192)), name
        usual = device.empty(8192)
        with torch.inference_mode():
            made_here, filled_outside = device.empty(8192), device.empty(8192)
            handle.write(device.tensor(sample(8192)), folder / "other", True)
            for there in (made_here, usual):
                read(handle, there, path, 0)
        read(handle, filled_outside, folder / "other", 0)
        assert all(torch.equal(device.peek(value), sample(8192)) for value in (made_here, usual, filled_outside)), name


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
    futures = [handle.submit_pwrite(device.tensor(sample(size, 2)), fd, 0), handle.submit_pread(back, fd, 2 * size)]
    os.close(fd)  # at once
    assert [future.result() for future in futures] == [size] * 2
    assert torch.equal(contents(path)[:size], sample(size, 2))
    assert torch.equal(device.peek(back), before[2 * size :])
    device.require_route(handle)
