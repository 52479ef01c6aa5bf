"""Tensors on a real GPU: the contract of test_device_tensor.py where work truly overlaps, for every kind of handle.

``make gpu-test`` runs these. What only gds_handle has is in test_gds_gpu.py and those beside it.
"""

from __future__ import annotations

import errno
import gc
import os
import resource
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from conftest import MIB, contents, in_child, in_threads, pattern, store
from gpu.fixtures import HandleFactory, handle, kind, make_handle
from gpu.support import (
    CHUNK,
    GDS,
    ODD,
    Kind,
    each_stream,
    empty,
    gpu,
    keep_busy,
    on_a_gpu,
    run_well,
    still_works,
    stream_for,
)
from private_device.calls import VIEWS, Call, both_ways, each_read, each_write

from nvme_ops import aio_handle

pytestmark = on_a_gpu

SIZES = [0, 1, 4095, CHUNK - 1, CHUNK, CHUNK + 1, 65 * MIB + 3, 513 * MIB + 7]


# What is moved


@pytest.mark.parametrize("offset", [0, 4095, 12345])
@pytest.mark.parametrize("size", SIZES)
def test_round_trip(make_handle: HandleFactory, folder: Path, size: int, offset: int) -> None:
    handle, path, data = make_handle(), store(folder / "file", pattern(offset)), pattern(size)
    handle.write(data.to(gpu()), path, file_offset=offset)
    assert torch.equal(contents(path)[offset:], data)
    back = empty(size)
    handle.read(back, path, file_offset=offset)
    assert torch.equal(back.cpu(), data)


@pytest.mark.slow
def test_more_than_4_gib(make_handle: HandleFactory, folder: Path) -> None:
    size = (4 << 30) + 12345
    free, _ = torch.cuda.mem_get_info()
    if free < 2 * size + (1 << 30) or os.statvfs(folder).f_bavail * os.statvfs(folder).f_frsize < size + (1 << 30):
        pytest.skip("needs 9 GiB of the GPU's memory and 5 GiB of disk")
    handle, path = make_handle(intra_op_parallelism=2), folder / "file"
    sent = torch.randint(0, 256, (size,), dtype=torch.uint8, device=gpu())
    handle.sync_pwrite(sent, path)
    back = empty(size)
    handle.sync_pread(back, path)
    assert torch.equal(sent, back)


@each_write
def test_every_way_to_write(handle: aio_handle, folder: Path, write: Call) -> None:
    path, data = folder / "file", pattern(ODD)
    write(handle, data.to(gpu()), path, 777)
    assert torch.equal(contents(path)[777:], data)


@each_read
def test_every_way_to_read(handle: aio_handle, folder: Path, read: Call) -> None:
    data = pattern(ODD)
    path, back = store(folder / "file", data), empty(ODD - 777)
    read(handle, back, path, 777)
    assert torch.equal(back.cpu(), data[777:])


@pytest.mark.parametrize(
    "dtype",
    [torch.bool, torch.int8, torch.float16, torch.bfloat16, torch.float32, torch.int64, torch.complex128]
    + [getattr(torch, name) for name in ("float8_e4m3fn", "float8_e5m2") if hasattr(torch, name)],
    ids=str,
)
def test_dtypes(make_handle: HandleFactory, folder: Path, dtype: torch.dtype) -> None:
    handle, path, data = make_handle(), folder / "file", pattern(16 * 12345)
    data = data % 2 if dtype == torch.bool else data
    sent = data.view(dtype).view(3, 5, -1).to(gpu())
    handle.write(sent, path)
    assert torch.equal(contents(path), data)
    back = torch.empty_like(sent)
    handle.read(back, path)
    assert torch.equal(back.cpu().view(-1).view(torch.uint8), data)


def test_views(handle: aio_handle, folder: Path) -> None:
    path, data = folder / "file", pattern(4 * 600 * 500).view(torch.int32).view(600, 500)
    there = data.to(gpu())
    for name, view in VIEWS.items():
        handle.sync_pwrite(view(there), path)
        assert torch.equal(contents(path), view(data).contiguous().view(-1).view(torch.uint8)), name
    with pytest.raises(ValueError, match="buffer must be contiguous"):
        handle.sync_pread(there.t(), path)


def test_conjugated_and_negated_views(make_handle: HandleFactory, folder: Path) -> None:
    handle, path, data = make_handle(), folder / "file", torch.randn(1000, dtype=torch.complex64)
    for view in (lambda t: t.conj(), lambda t: t.conj().imag):
        handle.write(view(data.to(gpu())), path)
        expected = view(data).resolve_conj().resolve_neg().contiguous()
        assert torch.equal(contents(path), expected.view(-1).view(torch.uint8))


def test_a_view_is_filled_and_nothing_around_it(handle: aio_handle, folder: Path) -> None:
    path, whole = store(folder / "file", pattern(ODD)), empty(ODD + 200)
    handle.sync_pread(whole[99 : 99 + ODD], path)
    there = whole.cpu()
    assert torch.equal(there[99 : 99 + ODD], pattern(ODD))
    assert there[:99].eq(0).all()
    assert there[99 + ODD :].eq(0).all()


@each_read
def test_parameters_and_inference_tensors(make_handle: HandleFactory, folder: Path, read: Call) -> None:
    path = store(folder / "file", pattern(ODD))
    parameter = torch.nn.Parameter(torch.zeros(1024, device=gpu()))
    before = parameter._version
    read(make_handle(), parameter, path, 0)
    assert parameter._version > before
    assert parameter.is_leaf
    with torch.inference_mode():
        there = empty(ODD)
        read(make_handle(), there, path, 0)
        assert torch.equal(there.cpu(), pattern(ODD))


# Order on the device


@each_stream
@each_write
def test_a_write_comes_after_what_is_queued(
    handle: aio_handle, folder: Path, write: Call, default_stream: bool
) -> None:
    path, new = folder / "file", pattern(ODD).to(gpu())
    there = empty(ODD)
    torch.cuda.synchronize()
    with torch.cuda.stream(stream_for(default_stream)):
        keep_busy()
        there.copy_(new)
        write(handle, there, path, 1)
    assert torch.equal(contents(path)[1:], pattern(ODD))


@each_stream
@each_read
def test_a_read_comes_after_what_is_queued(handle: aio_handle, folder: Path, read: Call, default_stream: bool) -> None:
    path = store(folder / "file", pattern(ODD))
    there, saved = pattern(ODD, 1).to(gpu()), empty(ODD)
    torch.cuda.synchronize()
    with torch.cuda.stream(stream_for(default_stream)):
        keep_busy()
        saved.copy_(there)  # still to see what stood there before
        read(handle, there, path, 0)
    assert torch.equal(saved.cpu(), pattern(ODD, 1))
    assert torch.equal(there.cpu(), pattern(ODD))


@each_read
def test_data_read_are_there_for_every_stream(make_handle: HandleFactory, folder: Path, read: Call) -> None:
    path, there = store(folder / "file", pattern(ODD)), empty(ODD)
    torch.cuda.synchronize()
    read(make_handle(), there, path, 0)
    for default_stream in (True, False):
        with torch.cuda.stream(stream_for(default_stream)):
            copy = there.clone()
            assert torch.equal(copy.cpu(), pattern(ODD))


def test_a_tensor_may_change_after_its_write(make_handle: HandleFactory, folder: Path) -> None:
    path, there = folder / "file", pattern(ODD).to(gpu())
    torch.cuda.synchronize()
    handle, side = make_handle(), torch.cuda.Stream()
    with torch.cuda.stream(side):
        future = handle.submit_pwrite(there, path)
        future.result()
        there.zero_()
    side.synchronize()
    assert torch.equal(contents(path), pattern(ODD))


@both_ways
def test_the_callers_stream_and_device_stay(make_handle: HandleFactory, folder: Path, ways: dict[str, Call]) -> None:
    path, there = store(folder / "file", pattern(ODD)), pattern(ODD).to(gpu())
    last = torch.cuda.device_count() - 1
    with torch.cuda.device(last), torch.cuda.stream(torch.cuda.Stream(gpu(last))) as _:
        stream = torch.cuda.current_stream()
        for call in ways.values():
            call(make_handle(), there, path, 0)
            assert torch.cuda.current_device() == last
            assert torch.cuda.current_stream() == stream
            with pytest.raises(OSError, match="No such file"):
                call(make_handle(), there, folder / "missing" / "file", 0)
            assert torch.cuda.current_stream() == stream


def test_memory_freed_while_a_transfer_uses_it(make_handle: HandleFactory, folder: Path) -> None:
    """The caching allocator must not give a tensor's memory to the next one before the transfer has ended."""
    handle, futures = make_handle(), []
    for number in range(8):
        there = pattern(ODD, number).to(gpu())
        futures.append(handle.submit_pwrite(there, folder / f"file{number}"))
        del there
        torch.full((ODD,), 255, dtype=torch.uint8, device=gpu())
    for number, future in enumerate(futures):
        assert future.result() == ODD
        assert torch.equal(contents(folder / f"file{number}"), pattern(ODD, number))


# Many at once


def test_several_devices(handle: aio_handle, folder: Path) -> None:
    count = torch.cuda.device_count()
    if count < 2:
        pytest.skip("there is one GPU only")
    sent = [pattern(ODD, index).to(gpu(index)) for index in range(count)]
    names = [folder / f"file{index}" for index in range(count)]
    back = [empty(ODD, index) for index in range(count)]
    assert handle.submit_pwritev(sent, names).result() == count * ODD
    assert handle.submit_preadv(back, names).result() == count * ODD
    for index in range(count):
        assert torch.equal(contents(names[index]), pattern(ODD, index))
        assert torch.equal(back[index].cpu(), pattern(ODD, index))


def test_cpu_and_device_tensors_in_one_call(handle: aio_handle, folder: Path) -> None:
    path, data = folder / "file", pattern(12 * MIB)
    sizes = [0, 1, 5000, 3 * MIB + 1, MIB, 2 * MIB - 1]
    starts = [100, 200, 300, 6000, 4 * MIB, 9 * MIB]
    parts = [data[start : start + size] for start, size in zip(starts, sizes, strict=True)]
    sent = [part.to(gpu()) if i % 2 else part for i, part in enumerate(parts)]
    assert handle.submit_pwritev(sent, path, starts).result() == sum(sizes)
    back = [torch.zeros(size, dtype=torch.uint8) if i % 2 else empty(size) for i, size in enumerate(sizes)]
    assert handle.submit_preadv(back, path, starts).result() == sum(sizes)
    for part, there in zip(parts, back, strict=True):
        assert torch.equal(there.cpu(), part)


def test_page_locked_tensors_of_torch(handle: aio_handle, folder: Path) -> None:
    path, pinned = folder / "file", pattern(ODD).pin_memory()
    assert handle.is_pinned(pinned)
    handle.sync_pwrite(pinned, path)
    back = torch.empty(ODD, dtype=torch.uint8, pin_memory=True)
    handle.sync_pread(back, path)
    assert torch.equal(back, pattern(ODD))


def test_many_asynchronous_operations(handle: aio_handle, folder: Path) -> None:
    count = 12
    sent = [pattern(MIB + i, i).to(gpu(i % torch.cuda.device_count())) for i in range(count)]
    for i in range(count):
        assert handle.async_pwrite(sent[i], folder / f"file{i}") == 0
    assert handle.wait() == count
    back = [torch.zeros_like(tensor) for tensor in sent]
    for i in range(count):
        handle.async_pread(back[i], folder / f"file{i}")
    assert handle.wait() == count
    for i in range(count):
        assert torch.equal(back[i].cpu(), pattern(MIB + i, i))


@pytest.mark.parametrize("shared", [True, False], ids=["one handle", "a handle each"])
def test_threads(make_handle: HandleFactory, folder: Path, shared: bool) -> None:
    common = make_handle(intra_op_parallelism=2)
    wrong: list[str] = []

    def work(number: int) -> None:
        handle = common if shared else make_handle()
        path, index = folder / f"file{number}", number % torch.cuda.device_count()
        with torch.cuda.device(index), torch.cuda.stream(torch.cuda.Stream()):
            stream = torch.cuda.current_stream()
            for round_ in range(4):
                seed = 10 * number + round_
                new = pattern(ODD, seed).to(gpu(index))
                there, back = empty(ODD, index), empty(ODD, index)
                keep_busy()
                there.copy_(new)
                handle.write(there, path, True)
                handle.submit_pread(back, path).result()
                if torch.cuda.current_stream() != stream or torch.cuda.current_device() != index:
                    wrong.append(f"thread {number} is on another stream")
                if not torch.equal(back.cpu(), pattern(ODD, seed)):
                    wrong.append(f"thread {number} read something else in round {round_}")

    in_threads(work, 4)
    assert wrong == []


def test_a_dropped_handle_finishes(make_handle: HandleFactory, folder: Path) -> None:
    handle, sent = make_handle(), [pattern(ODD, i).to(gpu()) for i in range(3)]
    for i in range(3):
        handle.submit_pwrite(sent[i], folder / f"file{i}")
    del handle, sent
    for i in range(3):
        assert torch.equal(contents(folder / f"file{i}"), pattern(ODD, i))


def test_the_interpreter_ends_with_work_pending(kind: Kind, folder: Path) -> None:
    run_well(
        """
        import sys
        import nvme_ops
        from conftest import pattern

        there = pattern(17 << 20).to("cuda")
        handle = getattr(nvme_ops, sys.argv[1])()
        for name in sys.argv[2:]:
            handle.async_pwrite(there, name)
        """,
        kind.name,
        folder / "one",
        folder / "two",
    )
    for name in ("one", "two"):
        assert torch.equal(contents(folder / name), pattern(17 * MIB))


# Failures


@each_read
def test_a_file_that_is_too_short(handle: aio_handle, folder: Path, read: Call) -> None:
    path, there = store(folder / "file", pattern(ODD)), empty(ODD)
    with pytest.raises(EOFError, match=path.name):
        read(handle, there, path, 1)
    assert there.eq(0).all()
    still_works(handle, folder)


@each_read
def test_a_file_that_is_missing(handle: aio_handle, folder: Path, read: Call) -> None:
    with pytest.raises(FileNotFoundError):
        read(handle, empty(ODD), folder / "missing", 0)
    still_works(handle, folder)


@each_write
@pytest.mark.parametrize("chunks", [3, 12])
def test_a_file_that_may_not_grow(
    make_handle: HandleFactory, kind: Kind, folder: Path, write: Call, chunks: int
) -> None:
    """RLIMIT_FSIZE also holds inside of a longer file, so writes fail in the middle of a transfer."""
    path, sent = store(folder / "file", pattern(chunks * CHUNK, 1)), pattern(chunks * CHUNK).to(gpu())
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    handle = make_handle()
    resource.setrlimit(resource.RLIMIT_FSIZE, (CHUNK + 4096, limits[1]))  # no child: CUDA does not survive a fork
    try:
        with pytest.raises(OSError) as caught:  # noqa: PT011  (cuFile may tell it in its own way)
            write(handle, sent, path, 0)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert caught.value.filename == str(path)
    if kind is not GDS:
        assert caught.value.errno == errno.EFBIG
    still_works(handle, folder)


def test_a_full_disk(make_handle: HandleFactory, make_file_system: Callable[..., Path]) -> None:
    place, handle = make_file_system(64 * MIB), make_handle()
    with pytest.raises(OSError) as caught:  # noqa: PT011  (cuFile may tell it in its own way)
        handle.write(empty(96 * MIB), place / "file")
    assert caught.value.filename == str(place / "file")
    (place / "file").unlink()
    still_works(handle, place)


def test_nothing_leaks(make_handle: HandleFactory, folder: Path) -> None:
    path, there = store(folder / "file", pattern(ODD)), empty(ODD)
    handle = make_handle()

    def both_ways() -> None:
        for _ in range(20):
            handle.sync_pwrite(there, path, 0)
            handle.async_pread(there, path, 0)
            handle.wait()
            with pytest.raises(EOFError):
                handle.sync_pread(there, path, 1)
        gc.collect()

    def held() -> tuple[int, int]:
        return torch.cuda.memory_allocated(), len(os.listdir("/proc/self/fd"))

    both_ways()
    before = held()
    both_ways()
    assert held() == before


def test_a_forked_child_may_still_use_the_cpu(make_handle: HandleFactory, folder: Path) -> None:
    """CUDA itself does not survive a fork; a handle used for it before does, for tensors in CPU memory."""
    path, handle = folder / "file", make_handle()
    handle.write(pattern(ODD).to(gpu()), path)

    def body() -> None:
        back = torch.zeros(ODD, dtype=torch.uint8)
        handle.sync_pread(back, path)
        assert torch.equal(back, pattern(ODD))

    in_child(body)
