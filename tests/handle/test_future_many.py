"""``submit_preadv`` and ``submit_pwritev``: many requests in one call."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from nvme_ops import aio_handle
from tests.conftest import MIB, HandleFactory, contents, pattern, store


@pytest.mark.parametrize("lanes", [1, 3])
def test_tensors_of_all_sizes_in_one_file(make_handle: HandleFactory, folder: Path, lanes: int) -> None:
    handle, path = make_handle(intra_op_parallelism=lanes), folder / "file"
    sizes = [1, 511, 4096, 0, 100_003, 512, MIB + 1, 7]
    offsets = [sum(sizes[:i]) for i in range(len(sizes))]
    tensors = [pattern(size, size) for size in sizes]
    assert handle.submit_pwritev(tensors, path, offsets).result() == sum(sizes)
    assert torch.equal(contents(path), torch.cat(tensors))
    backs = [torch.zeros_like(tensor) for tensor in tensors]
    assert handle.submit_preadv(tensors=backs, files=path, file_offsets=offsets).result() == sum(sizes)
    assert all(torch.equal(back, tensor) for back, tensor in zip(backs, tensors, strict=True))
    assert handle.wait() == 0


def test_one_file_for_each(handle: aio_handle, folder: Path) -> None:
    tensors, paths = [pattern(1000 * i, i) for i in range(20)], [folder / str(i) for i in range(20)]
    for path in paths:
        store(path, torch.zeros(30_000, dtype=torch.uint8))
    assert handle.submit_pwritev(tensors, paths).result() == sum(map(len, tensors))
    for tensor, path in zip(tensors, paths, strict=True):
        assert torch.equal(contents(path), tensor)  # each is its whole file
    backs = [torch.zeros_like(tensor) for tensor in tensors]
    handle.submit_preadv(tuple(backs), tuple(map(str, paths))).result()
    assert all(torch.equal(back, tensor) for back, tensor in zip(backs, tensors, strict=True))


def test_files_named_several_times(handle: aio_handle, folder: Path) -> None:
    path, other = store(folder / "file", pattern(100_000)), store(folder / "other", pattern(100_000, 1))
    fd = os.open(path, os.O_RDONLY)
    backs = torch.zeros(6, 1000, dtype=torch.uint8)
    offsets = [0, 10, 50_000, 99_000, 3, 4]
    moved = handle.submit_preadv(backs, [path, other, path, str(path), os.fsencode(other), fd], offsets).result()
    assert moved == 6000
    os.close(fd)
    for i, (back, offset) in enumerate(zip(backs, offsets, strict=True)):
        assert torch.equal(back, pattern(100_000, int(i in (1, 4)))[offset : offset + 1000])


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_rows_and_a_tensor_of_offsets(make_handle: HandleFactory, folder: Path, dtype: torch.dtype) -> None:
    handle, rows, width = make_handle(intra_op_parallelism=2), 2000, 1024
    data = pattern(rows * width).view(rows, width)
    path, order = store(folder / "file", data.view(-1)), torch.randperm(rows)
    back = torch.zeros(rows, width, dtype=torch.uint8)
    assert handle.submit_preadv(back, path, (order * width).to(dtype)).result() == rows * width
    assert torch.equal(back, data[order])
    shaped = torch.zeros(rows, 4, 8, 8, dtype=torch.float32)
    handle.submit_preadv(shaped[: rows // 2], str(path), range(0, rows // 2 * width, width)).result()
    assert torch.equal(shaped[: rows // 2].view(rows // 2, -1).view(torch.uint8), data[: rows // 2])
    fd = os.open(folder / "copy", os.O_WRONLY | os.O_CREAT)
    handle.submit_pwritev(back, fd, order * width).result()
    os.close(fd)
    assert torch.equal(contents(folder / "copy"), data.view(-1))


def test_nothing(handle: aio_handle, folder: Path) -> None:
    path = store(folder / "file", pattern(100))
    assert handle.submit_preadv([], path, []).result() == 0
    assert handle.submit_pwritev([], []).result() == 0
    assert handle.submit_preadv(torch.zeros(0, 10), path, []).result() == 0
    assert handle.submit_preadv(torch.zeros(3, 0), path, [0, 1, 100]).result() == 0


def test_arguments_that_do_not_fit(handle: aio_handle, folder: Path) -> None:
    path, two = store(folder / "file", pattern(100)), [torch.zeros(1), torch.zeros(1)]
    for arguments in ((two, path, [0]), (two, path, [0, 4, 8]), (two, path, torch.zeros(3, dtype=torch.int64))):
        with pytest.raises(ValueError, match=r"file_offsets has \d entries for 2 tensors"):
            handle.submit_preadv(*arguments)
    with pytest.raises(ValueError, match="files has 1 entries for 2 tensors"):
        handle.submit_preadv(two, [path])
    with pytest.raises(ValueError, match="file_offsets is needed"):
        handle.submit_preadv(two, path)
    with pytest.raises(ValueError, match="at least one dimension"):
        handle.submit_preadv(torch.tensor(1.0), path, [0])
    with pytest.raises(ValueError, match="contiguous"):
        handle.submit_preadv(torch.zeros(4, 4).t(), path, [0] * 4)
    with pytest.raises(ValueError, match="file_offset must not be negative: -1"):
        handle.submit_preadv(two, path, [0, -1])
    with pytest.raises(EOFError):
        handle.submit_preadv(two, path, [0, 97]).result()
    others: list[Any] = [(None, path, [0]), (5, path, [0]), (two, 1.5, [0, 0]), (two, path, 5), (two, path, [0, "1"])]
    for other in others:
        with pytest.raises(TypeError):
            handle.submit_preadv(*other)
    with pytest.raises(TypeError, match="tensors must be"):
        handle.submit_preadv([torch.zeros(1), None], path, [0, 0])  # type: ignore[list-item]
    with pytest.raises(TypeError, match="'float' object cannot be interpreted as an integer"):
        handle.submit_preadv(two, path, torch.tensor([0.0, 4.0]))
    with pytest.raises(FileNotFoundError):
        handle.submit_preadv(two, [path, folder / "missing"]).result()


def test_one_bad_request_fails_the_call(make_handle: HandleFactory, make_device) -> None:
    device, handle = make_device(4 * MIB), make_handle(cache="direct", intra_op_parallelism=2)
    with device.image.open("r+b") as image:
        image.truncate(MIB)
    rows = torch.zeros(64, 4096, dtype=torch.uint8)
    offsets = [i * 4096 for i in range(63)] + [2 * MIB]
    with pytest.raises(OSError, match="at offset 2097152: Input/output error") as caught:
        handle.submit_preadv(rows, device.path, offsets).result()
    assert caught.value.errno == errno.EIO
    assert handle.submit_preadv(rows[:63], device.path, offsets[:63]).result() == 63 * 4096
