"""Programs written for DeepNVMe run here: every method, keyword and return value that they use."""

from __future__ import annotations

import inspect
import os
from pathlib import Path
from typing import Any

import pytest
import torch

import nvme_ops
from nvme_ops import aio_handle
from nvme_ops._native import native
from nvme_ops.op_builder import AsyncIOBuilder
from tests.conftest import BACKENDS, HandleFactory, contents, pattern, store

SIZE = 100_003  # a multiple of nothing


def test_load_gives_one_module_however_often() -> None:
    module = AsyncIOBuilder().load(verbose=False)
    assert all(AsyncIOBuilder().load() is module for _ in range(50))
    assert module is native()
    for name in ("aio_handle", "aio_read", "aio_write", "deepspeed_memcpy", "IoFuture"):
        assert callable(getattr(module, name))
    assert module.aio_handle is nvme_ops.aio_handle


def test_the_backends_are_the_ones_tested() -> None:
    assert tuple(native().backends()) == BACKENDS
    assert native().backends()["threads"] is None


def test_defaults() -> None:
    handle = aio_handle()
    assert handle.get_block_size() == 1048576
    assert handle.get_queue_depth() == 128
    assert handle.get_single_submit() is False
    assert handle.get_overlap_events() is False
    assert handle.get_intra_op_parallelism() == handle.get_thread_count() == 1


def test_positional_constructor() -> None:
    handle = aio_handle(4096, 7, True, True, 3)
    assert handle.get_block_size() == 4096
    assert handle.get_queue_depth() == 7
    assert handle.get_single_submit() is True
    assert handle.get_overlap_events() is True
    assert handle.get_intra_op_parallelism() == handle.get_thread_count() == 3


@pytest.mark.parametrize("threads", [{"intra_op_parallelism": 4}, {"num_threads": 4}])
def test_keyword_constructor(threads: dict[str, Any]) -> None:
    handle = aio_handle(block_size=8192, queue_depth=16, single_submit=False, overlap_events=True, **threads)
    assert (handle.get_block_size(), handle.get_queue_depth()) == (8192, 16)
    assert (handle.get_single_submit(), handle.get_overlap_events()) == (False, True)
    assert handle.get_intra_op_parallelism() == handle.get_thread_count() == 4


def test_both_spellings_of_the_thread_count() -> None:
    assert aio_handle(intra_op_parallelism=2, num_threads=2).get_thread_count() == 2
    with pytest.raises(ValueError, match=r"intra_op_parallelism=2 and num_threads=3"):
        aio_handle(intra_op_parallelism=2, num_threads=3)


@pytest.mark.parametrize("lanes", [1, 3, 8])
def test_alignment_is_a_sector_for_every_lane(lanes: int) -> None:
    """FastFileWriter asserts that its buffer is a multiple of it; in its example that has 64,000,000 bytes."""
    assert aio_handle(intra_op_parallelism=lanes).get_alignment() == 512 * lanes
    assert 64_000_000 // 2 % aio_handle(intra_op_parallelism=1).get_alignment() == 0


@pytest.mark.parametrize("lanes", [1, 3])
@pytest.mark.parametrize("validate", [False, True])
def test_read_and_write_return_0(make_handle: HandleFactory, folder: Path, lanes: int, validate: bool) -> None:
    handle, path, data = make_handle(intra_op_parallelism=lanes), folder / "file", pattern(SIZE)
    assert handle.write(data, str(path), validate) == 0
    assert torch.equal(contents(path), data)
    back = torch.zeros_like(data)
    assert handle.read(back, str(path), validate) == 0
    assert torch.equal(back, data)
    assert handle.write(buffer=data[:10], filename=str(path), validate=validate, file_offset=5) == 0
    part = torch.zeros(20, dtype=torch.uint8)
    assert handle.read(buffer=part, filename=str(path), validate=validate, file_offset=1) == 0
    assert torch.equal(part, torch.cat([data[1:5], data[:10], data[15:21]]))
    assert handle.wait() == 0


@pytest.mark.parametrize("lanes", [1, 3])
def test_sync_calls_count_what_ended(make_handle: HandleFactory, folder: Path, lanes: int) -> None:
    handle, path, data = make_handle(num_threads=lanes), folder / "file", pattern(SIZE)
    back = torch.zeros_like(data)
    assert handle.sync_pwrite(data, str(path)) == 1
    assert handle.sync_pread(back, str(path)) == 1
    assert torch.equal(back, data)
    others = [torch.zeros_like(data) for _ in range(4)]
    for other in others:
        assert handle.async_pread(other, str(path)) == 0
    back.zero_()
    assert handle.sync_pread(back, str(path), 0) == 5
    assert all(torch.equal(tensor, data) for tensor in [back, *others])
    assert handle.async_pwrite(data, str(path), 0) == 0
    assert handle.pwrite(data, str(path), False, False, 0) == 2
    assert handle.wait() == 0


@pytest.mark.parametrize("lanes", [1, 3])
@pytest.mark.parametrize("validate", [False, True])
def test_async_by_position_and_by_keyword(make_handle: HandleFactory, folder: Path, lanes: int, validate: bool) -> None:
    handle, path, data = make_handle(intra_op_parallelism=lanes), folder / "file", pattern(SIZE)
    assert handle.pwrite(data, str(path), validate, True) == 0
    assert handle.wait() == 1
    assert handle.pwrite(data, str(path), validate, async_op=False) == 1
    back, part = torch.zeros_like(data), torch.zeros(100, dtype=torch.uint8)
    assert handle.pread(back, str(path), validate, True) == 0
    assert handle.pread(buffer=part, filename=str(path), validate=validate, async_op=True, file_offset=7) == 0
    assert handle.wait() == 2
    assert torch.equal(back, data)
    assert torch.equal(part, data[7:107])
    assert handle.pread(back, str(path), validate, False) == 1


def test_wait_counts_the_calls_since_the_last_wait(make_handle: HandleFactory, folder: Path) -> None:
    handle = make_handle(intra_op_parallelism=2)
    assert handle.wait() == 0
    tensors = [pattern(4096 * i + i, i) for i in range(1, 17)]
    for i, tensor in enumerate(tensors):
        handle.async_pwrite(tensor, str(folder / str(i)))
    assert handle.wait() == len(tensors)
    backs = [torch.zeros_like(tensor) for tensor in tensors]
    for i, back in enumerate(backs):
        handle.async_pread(back, str(folder / str(i)))
    assert handle.wait() == len(tensors)
    assert handle.wait() == 0
    assert all(torch.equal(back, tensor) for back, tensor in zip(backs, tensors, strict=True))


def test_async_as_a_keyword(handle: aio_handle, folder: Path) -> None:
    path, data = folder / "file", pattern(SIZE)
    back: Any = torch.zeros_like(data)
    assert handle.pwrite(buffer=data, filename=str(path), validate=False, **{"async": True}) == 0
    assert handle.wait() == 1
    assert handle.pwrite(data, str(path), True, file_offset=0, **{"async": False}) == 1
    assert handle.pread(back, str(path), False, **{"async": True}) == 0
    assert handle.wait() == 1
    assert torch.equal(back, data)
    for call in (handle.pread, handle.pwrite):
        for given in (True, False):
            with pytest.raises(TypeError, match=r"got both async_op \(or a fourth argument by position\) and async"):
                call(back, str(path), False, given, **{"async": True})
        with pytest.raises(TypeError, match=rf"{call.__name__}\(\) got an unexpected keyword argument 'asynchronous'"):
            call(back, str(path), asynchronous=True)
        with pytest.raises(TypeError, match="async must be a bool, not str"):
            call(back, str(path), **{"async": "false"})  # type: ignore[arg-type]
        with pytest.raises(TypeError, match="async_op must be a bool, not str"):
            call(back, str(path), False, "false")  # type: ignore[arg-type]
        with pytest.raises(TypeError, match="validate must be a bool, not str"):
            call(back, str(path), "false")  # type: ignore[arg-type]
    for blocking in (handle.read, handle.write):
        with pytest.raises(TypeError, match="validate must be a bool, not str"):
            blocking(back, str(path), "false")  # type: ignore[arg-type]
    assert handle.wait() == 0


def test_a_descriptor_as_a_keyword(handle: aio_handle, folder: Path) -> None:
    path, data = store(folder / "file", pattern(SIZE, 1)), pattern(1000)
    with path.open("r+b") as file:
        assert handle.async_pwrite(buffer=data, fd=file.fileno(), file_offset=5) == 0
        assert handle.wait() == 1
        assert handle.async_pwrite(data, fd=file.fileno()) == 0
        assert handle.wait() == 1
        os.fsync(file.fileno())  # still open
        with pytest.raises(TypeError, match=r"async_pwrite\(\) got both a filename and an fd"):
            handle.async_pwrite(data, str(path), fd=file.fileno())
    assert torch.equal(contents(path), torch.cat([data, data[-5:], pattern(SIZE, 1)[1005:]]))
    with pytest.raises(TypeError, match=r"async_pwrite\(\) needs a filename or an fd"):
        handle.async_pwrite(data)
    others: list[Any] = ["1", 1.5, True]
    for other in others:
        with pytest.raises(TypeError, match=f"fd must be an int, not {type(other).__name__}"):
            handle.async_pwrite(data, fd=other)
    assert handle.wait() == 0


def test_fast_file_writer(make_handle: HandleFactory, folder: Path) -> None:
    """DeepSpeed's FastFileWriter: an O_DIRECT descriptor, pinned buffers, an unaligned tail at the end."""
    handle = make_handle(block_size=65536, queue_depth=8, single_submit=False, overlap_events=True, num_threads=2)
    data, path = pattern(3 * 65536 + 777), folder / "file"
    buffer = handle.new_cpu_locked_tensor(65536, torch.empty(0, dtype=torch.uint8))
    fd = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_DIRECT | os.O_TRUNC, 0o644)
    try:
        for start in range(0, len(data), 65536):
            piece = buffer.narrow(0, 0, min(65536, len(data) - start))
            piece.copy_(data[start : start + 65536])
            assert handle.async_pwrite(piece, fd, start) == 0
            assert handle.wait() == 1
        os.fsync(fd)  # still open
    finally:
        os.close(fd)
    assert handle.free_cpu_locked_tensor(buffer) is True
    assert torch.equal(contents(path), data)


def test_partition_swapper(make_handle: HandleFactory, folder: Path) -> None:
    """DeepSpeed's swappers: narrow views of one pinned buffer, many files, counts asserted."""
    handle = make_handle(block_size=4096, queue_depth=4, single_submit=True, overlap_events=False, num_threads=1)
    aligned, used, count = 2048, 2000, 8
    buffer = handle.new_cpu_locked_tensor(num_elem=aligned * count, example_tenosr=torch.empty(0))
    views = [buffer.narrow(0, i * aligned, used) for i in range(count)]
    assert all(handle.is_pinned(view) for view in views)
    for i, view in enumerate(views):
        view.copy_(torch.full((used,), float(i)))
        assert handle.async_pwrite(view, str(folder / f"{i}.tensor.swp")) == 0
    assert handle.wait() == count
    buffer.fill_(-1)
    for i, view in enumerate(views):
        assert handle.async_pread(view, str(folder / f"{i}.tensor.swp")) == 0
    assert handle.wait() == count
    for i, view in enumerate(views):
        assert torch.equal(view, torch.full((used,), float(i)))
        assert (buffer[i * aligned + used : (i + 1) * aligned] == -1).all()


def test_aio_read_and_aio_write(folder: Path) -> None:
    module, data, path = AsyncIOBuilder().load(), pattern(SIZE), folder / "file"
    back = torch.zeros_like(data)
    assert module.aio_write(data, str(path), 65536, 8, False, True, True) == 0
    assert module.aio_read(back, str(path), 65536, 8, True, False, True) == 0
    assert torch.equal(back, data)
    names = ["tensor", "filename", "block_size", "queue_depth", "single_submit", "overlap_events", "validate"]
    for function in (module.aio_read, module.aio_write):
        assert list(inspect.signature(function).parameters) == names


def test_memcpy_copies_every_element() -> None:
    memcpy = AsyncIOBuilder().load().deepspeed_memcpy
    source = torch.arange(24, dtype=torch.float64).reshape(2, 3, 4)
    target = torch.zeros(2, 3, 4, dtype=torch.float64)
    assert memcpy(target, source) == 0
    assert torch.equal(target, source)
    assert memcpy(dest=target, src=source.permute(2, 0, 1).contiguous()) == 0
    assert torch.equal(target.view(4, 2, 3), source.permute(2, 0, 1))
    raw = torch.zeros(24 * 8, dtype=torch.uint8)
    assert memcpy(raw, source) == 0
    assert torch.equal(raw.view(torch.float64), source.view(-1))
    strided = torch.zeros(4, 3, 2, dtype=torch.float64).permute(2, 1, 0)
    assert memcpy(strided, source) == 0
    assert torch.equal(strided, source)
    leaf = torch.zeros(2, 3, 4, dtype=torch.float64, requires_grad=True)
    assert memcpy(leaf, source) == 0
    assert torch.equal(leaf, source)


def test_memcpy_refuses_what_does_not_fit() -> None:
    memcpy = AsyncIOBuilder().load().deepspeed_memcpy
    with pytest.raises(ValueError, match="dest has 16 bytes and src has 12"):
        memcpy(torch.zeros(4), torch.zeros(3))
    with pytest.raises(ValueError, match="contiguous"):
        memcpy(torch.zeros(4, 4).t(), torch.zeros(16))
    with pytest.raises(TypeError, match=r"src must be a torch\.Tensor"):
        memcpy(torch.zeros(4), [0, 0, 0, 0])


def test_a_larger_block_times_depth_than_32_bits(make_handle: HandleFactory, folder: Path) -> None:
    data = pattern(5 * 1048576 + 1)
    for block_size, queue_depth in [(1 << 31, 4), (1 << 40, 1 << 20), ((1 << 63) - 1, (1 << 63) - 1), (65537, 1 << 33)]:
        handle = make_handle(block_size=block_size, queue_depth=queue_depth)
        assert (handle.get_block_size(), handle.get_queue_depth()) == (block_size, queue_depth)
        back = torch.zeros_like(data)
        assert handle.sync_pwrite(data, str(folder / "file")) == 1
        assert handle.sync_pread(back, str(folder / "file")) == 1
        assert torch.equal(back, data)


def test_a_path_may_be_anything_that_names_a_file(handle: aio_handle, folder: Path) -> None:
    path, data = folder / "größe \udcff.bin", pattern(1000)
    for name in (path, str(path), os.fsencode(path)):
        store(path, torch.zeros(1000, dtype=torch.uint8))
        assert handle.sync_pwrite(data, name) == 1
        back = torch.zeros_like(data)
        assert handle.sync_pread(back, name) == 1
        assert torch.equal(back, data)


def test_help_reads_well() -> None:
    assert (aio_handle.__doc__ or "").startswith("Reads tensors from files and writes them")
    public = [name for name in vars(aio_handle) if not name.startswith("_")]
    assert [name for name in public if not (getattr(aio_handle, name).__doc__ or "").strip()] == []
