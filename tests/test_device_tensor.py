"""Tensors on an accelerator, as a user of aio_handle meets them, on a device simulated in host memory.

The device of private_device runs nothing before somebody waits for it, so whatever the op fails to wait for shows as
wrong bytes, and it counts memory that is freed while a queued copy still uses it. None of this is evidence about a
GPU: its speed, its memory and its errors are met in gpu/test_handle_gpu.py alone.
"""

from __future__ import annotations

import errno
import gc
import os
import resource
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from conftest import MIB, contents, in_child, in_threads, pattern, run_python, store
from private_device import PrivateDevice, private_device
from private_device.calls import READS, VIEWS, WRITES, Call, both_ways, each_read, each_write

from nvme_ops import aio_handle

CHUNK = 8 * MIB
SIZES = [0, 1, 4095, CHUNK - 1, CHUNK, CHUNK + 1, 8 * CHUNK + MIB + 3]  # the last needs every slot, one of them twice
PLACES = [0, 4095, 12345]
ODD = 2 * CHUNK + 5

_RANDOM: list[torch.Tensor] = []


def sample(size: int, seed: int = 0) -> torch.Tensor:
    """Like pattern, from one pool for all tests."""
    if not _RANDOM:
        _RANDOM.append(pattern(100 * MIB))
    return _RANDOM[0][4096 * seed :][:size]


@pytest.fixture(scope="session")
def the_device() -> PrivateDevice:
    real = torch.cuda.is_available() or (hasattr(torch, "accelerator") and torch.accelerator.is_available())
    if real and private_device.cache_info().currsize == 0:  # torch takes the simulated one for an accelerator too
        pytest.skip("torch has a real accelerator, and only one can page-lock memory in a process")
    return private_device()


@pytest.fixture
def device(the_device: PrivateDevice) -> Iterator[PrivateDevice]:
    """The device; what a test leaves behind on it is a failure: memory, events, or another current stream or device."""

    before, streams = the_device.statistics(), [the_device.stream(index) for index in range(the_device.count)]
    with the_device.pinned_memory(True):
        yield the_device
    gc.collect()
    after = the_device.statistics()
    assert after.violations == before.violations
    for name in ("device_blocks", "pinned_blocks", "events"):
        assert getattr(after, name) <= getattr(before, name), name
    assert the_device.current_device() == 0
    assert [the_device.stream(index) for index in range(the_device.count)] == streams


@pytest.fixture(params=[1, 3], ids=["1-lane", "3-lanes"])
def handle(request: pytest.FixtureRequest) -> aio_handle:
    return aio_handle(intra_op_parallelism=request.param)


# What is moved


@pytest.mark.parametrize("pinned", [True, False], ids=["pinned", "pageable"])
@pytest.mark.parametrize("offset", PLACES)
@pytest.mark.parametrize("size", SIZES)
def test_round_trip(device: PrivateDevice, folder: Path, size: int, offset: int, pinned: bool) -> None:
    handle, path, data = aio_handle(), store(folder / "file", sample(offset)), sample(size)
    with device.pinned_memory(pinned):
        handle.write(device.tensor(data), path, file_offset=offset)
        assert torch.equal(contents(path)[offset:], data)
        back = device.empty(size)
        handle.read(back, path, file_offset=offset)
    assert torch.equal(device.peek(back), data)


@each_write
def test_every_way_to_write(device: PrivateDevice, handle: aio_handle, folder: Path, write: Call) -> None:
    path, data = folder / "file", sample(ODD)
    write(handle, device.tensor(data), path, 777)
    assert torch.equal(contents(path)[777:], data)


@each_read
def test_every_way_to_read(device: PrivateDevice, handle: aio_handle, folder: Path, read: Call) -> None:
    data = sample(ODD)
    path, back = store(folder / "file", data), device.empty(ODD - 777)
    read(handle, back, path, 777)
    assert torch.equal(device.peek(back), data[777:])


def test_a_write_without_offset_makes_the_whole_file(device: PrivateDevice, folder: Path) -> None:
    path, data = store(folder / "file", sample(3 * ODD, 1)), sample(ODD)
    aio_handle().write(device.tensor(data), path)
    assert torch.equal(contents(path), data)


@pytest.mark.parametrize(
    "dtype", [torch.bool, torch.int8, torch.bfloat16, torch.float32, torch.int64, torch.complex128, torch.float8_e4m3fn]
)
def test_dtypes(device: PrivateDevice, folder: Path, dtype: torch.dtype) -> None:
    handle, path, data = aio_handle(), folder / "file", sample(16 * 12345)
    data = data % 2 if dtype == torch.bool else data
    sent = device.tensor(data.view(dtype).view(3, 5, -1))
    handle.write(sent, path)
    assert torch.equal(contents(path), data)
    back = torch.empty_like(sent)
    handle.read(back, path)
    assert torch.equal(device.peek(back), data)


def test_views(device: PrivateDevice, handle: aio_handle, folder: Path) -> None:
    path, data = folder / "file", sample(4 * 600 * 500).view(torch.float32).view(600, 500)
    there = device.tensor(data)
    for name, view in VIEWS.items():
        handle.sync_pwrite(view(there), path)
        assert torch.equal(contents(path), view(data).contiguous().view(-1).view(torch.uint8)), name


def test_a_view_is_filled_and_nothing_around_it(device: PrivateDevice, handle: aio_handle, folder: Path) -> None:
    path, whole = store(folder / "file", sample(ODD)), device.empty(ODD + 200)
    handle.sync_pread(whole[99 : 99 + ODD], path)
    there = device.peek(whole)
    assert torch.equal(there[99 : 99 + ODD], sample(ODD))
    assert there[:99].eq(device.unwritten).all()
    assert there[99 + ODD :].eq(device.unwritten).all()


def test_a_destination_with_gaps_is_refused(device: PrivateDevice, folder: Path) -> None:
    path = store(folder / "file", sample(400))
    with pytest.raises(ValueError, match="buffer must be contiguous"):
        aio_handle().read(device.empty(20, 20).t(), path)


def test_autograd_sees_a_read(device: PrivateDevice, folder: Path) -> None:
    path, parameter = store(folder / "file", sample(4096)), torch.nn.Parameter(device.empty(1024, dtype=torch.float32))
    before = parameter._version
    aio_handle().read(parameter, path)
    assert parameter._version > before
    assert parameter.requires_grad
    assert parameter.is_leaf
    assert torch.equal(device.peek(parameter), sample(4096))


@each_read
def test_inference_tensors(device: PrivateDevice, folder: Path, read: Call) -> None:
    path = store(folder / "file", sample(ODD))
    with torch.inference_mode():
        made_here = device.empty(ODD)
        read(aio_handle(), made_here, path, 0)
    assert torch.equal(device.peek(made_here), sample(ODD))
    with torch.inference_mode():
        filled_outside = device.empty(ODD)
    read(aio_handle(), filled_outside, path, 0)
    assert torch.equal(device.peek(filled_outside), sample(ODD))


def test_a_normal_tensor_in_inference_mode(device: PrivateDevice, folder: Path) -> None:
    handle, path, there = aio_handle(), folder / "file", device.tensor(sample(ODD))
    back = device.empty(ODD)
    with torch.inference_mode():
        handle.write(there, path, True)
        handle.read(back, path, True)
    assert torch.equal(device.peek(back), sample(ODD))


# Order on the device


@pytest.mark.parametrize("default_stream", [True, False])
@each_write
def test_a_write_comes_after_what_is_queued(
    device: PrivateDevice, handle: aio_handle, folder: Path, write: Call, default_stream: bool
) -> None:
    path, new = folder / "file", device.tensor(sample(ODD))
    with device.on(0 if default_stream else None) as stream:
        there = device.empty(ODD)
        there.copy_(new, non_blocking=True)
        assert not device.idle(stream)
        write(handle, there, path, 1)
    assert torch.equal(contents(path)[1:], sample(ODD))


@pytest.mark.parametrize("default_stream", [True, False])
@each_read
def test_a_read_comes_after_what_is_queued(
    device: PrivateDevice, handle: aio_handle, folder: Path, read: Call, default_stream: bool
) -> None:
    path = store(folder / "file", sample(ODD))
    there, saved = device.tensor(sample(ODD, 1)), device.empty(ODD)
    with device.on(0 if default_stream else None) as stream:
        saved.copy_(there, non_blocking=True)  # still to see what stood there before
        assert not device.idle(stream)
        read(handle, there, path, 0)
        assert torch.equal(device.peek(there), sample(ODD))
        device.synchronize(stream)
    assert torch.equal(device.peek(saved), sample(ODD, 1))


@each_read
def test_data_read_are_there_for_every_stream(device: PrivateDevice, folder: Path, read: Call) -> None:
    path, there = store(folder / "file", sample(ODD)), device.empty(ODD)
    read(aio_handle(), there, path, 0)
    for stream in (0, None):
        copy = device.empty(ODD)
        with device.on(stream) as current:
            copy.copy_(there, non_blocking=True)
            device.synchronize(current)
        assert torch.equal(device.peek(copy), sample(ODD))


def test_the_queue_at_the_call_counts(device: PrivateDevice, folder: Path) -> None:
    """What is queued later is not waited for, and after result() the tensor may change."""
    path, there, new = folder / "file", device.tensor(sample(ODD)), device.tensor(sample(ODD, 1))
    handle, other = aio_handle(), device.empty(ODD)
    with device.on() as stream:
        future = handle.submit_pwrite(there, path)
        other.copy_(there, non_blocking=True)
        future.result()
        assert not device.idle(stream)
        there.copy_(new, non_blocking=True)
        device.synchronize(stream)
    assert torch.equal(contents(path), sample(ODD))
    assert torch.equal(device.peek(other), sample(ODD))


@both_ways
def test_the_callers_stream_and_device_stay(device: PrivateDevice, folder: Path, ways: dict[str, Call]) -> None:
    path, there = store(folder / "file", sample(ODD)), device.tensor(sample(ODD))
    for call in ways.values():
        with device.on(index=1) as stream, device.on(2, index=0), device.on(stream, index=1):
            exchanges = device.exchanges()
            call(aio_handle(), there, path, 0)
            assert device.exchanges() > exchanges
            assert (device.current_device(), device.stream(0), device.stream(1)) == (1, 2, stream)
            with pytest.raises(RuntimeError), device.failing("queue"):
                call(aio_handle(), there, path, 0)
            assert (device.current_device(), device.stream(0), device.stream(1)) == (1, 2, stream)


def test_two_devices(device: PrivateDevice, handle: aio_handle, folder: Path) -> None:
    names = [folder / f"file{i}" for i in range(4)]
    sent = [device.tensor(sample(ODD, i), i % 2) for i in range(4)]
    back = [device.empty(ODD, index=i % 2) for i in range(4)]
    assert handle.submit_pwritev(sent, names).result() == 4 * ODD
    assert handle.submit_preadv(back, names).result() == 4 * ODD
    for i in range(4):
        assert back[i].device == device.device(i % 2)
        assert torch.equal(contents(names[i]), sample(ODD, i))
        assert torch.equal(device.peek(back[i]), sample(ODD, i))


# Many at once


@pytest.mark.parametrize("lanes", [1, 3])
def test_cpu_and_device_tensors_in_one_call(device: PrivateDevice, folder: Path, lanes: int) -> None:
    handle, path, data = aio_handle(intra_op_parallelism=lanes), folder / "file", sample(12 * MIB)
    sizes = [0, 1, 5000, 3 * MIB + 1, MIB, 2 * MIB - 1]
    starts = [100, 200, 300, 6000, 4 * MIB, 9 * MIB]
    parts = [data[start : start + size] for start, size in zip(starts, sizes, strict=True)]
    sent = [device.tensor(part) if i % 2 else part for i, part in enumerate(parts)]
    assert handle.submit_pwritev(sent, path, starts).result() == sum(sizes)
    stored = contents(path)
    for start, part in zip(starts, parts, strict=True):
        assert torch.equal(stored[start : start + len(part)], part)
    back = [torch.zeros(size, dtype=torch.uint8) if i % 2 else device.empty(size) for i, size in enumerate(sizes)]
    assert handle.submit_preadv(back, path, starts).result() == sum(sizes)
    for part, there in zip(parts, back, strict=True):
        assert torch.equal(there if there.is_cpu else device.peek(there), part)


def test_rows_on_a_device_are_refused(device: PrivateDevice, folder: Path) -> None:
    path = store(folder / "file", sample(4096))
    with pytest.raises(ValueError, match="accelerator must be a list of tensors"):
        aio_handle().submit_preadv(device.empty(4, 1024), path, [0, 1024, 2048, 3072])


def test_many_asynchronous_operations(device: PrivateDevice, handle: aio_handle, folder: Path) -> None:
    count = 12
    sent = [device.tensor(sample(MIB + i, i), i % 2) for i in range(count)]
    for i in range(count):
        with device.on():
            assert handle.async_pwrite(sent[i], folder / f"file{i}") == 0
    assert handle.wait() == count
    back = [device.empty(MIB + i, index=i % 2) for i in range(count)]
    for i in range(count):
        handle.async_pread(back[i], folder / f"file{i}")
    on_host = torch.zeros(MIB, dtype=torch.uint8)
    assert handle.sync_pread(on_host, folder / "file0") == count + 1
    assert torch.equal(on_host, sample(MIB, 0))
    for i in range(count):
        assert torch.equal(device.peek(back[i]), sample(MIB + i, i))


@pytest.mark.parametrize("shared", [True, False], ids=["one handle", "a handle each"])
def test_threads(device: PrivateDevice, folder: Path, shared: bool) -> None:
    common = aio_handle(intra_op_parallelism=2)
    wrong: list[str] = []

    def work(number: int) -> None:
        handle = common if shared else aio_handle()
        path, index = folder / f"file{number}", number % 2
        for round_ in range(3):
            seed = 10 * number + round_
            new = device.tensor(sample(ODD, seed), index)
            with device.on(index=index) as stream:
                there, back = device.empty(ODD, index=index), device.empty(ODD, index=index)
                there.copy_(new, non_blocking=True)
                handle.write(there, path, True)
                handle.submit_pread(back, path).result()
                if device.stream(index) != stream or device.current_device() != index:
                    wrong.append(f"thread {number} is on another stream")
            if not torch.equal(device.peek(back), sample(ODD, seed)):
                wrong.append(f"thread {number} read something else in round {round_}")

    in_threads(work, 4)
    assert wrong == []


def test_done_comes_no_earlier_than_the_data(device: PrivateDevice, folder: Path) -> None:
    path, there = store(folder / "file", sample(ODD)), device.empty(ODD)
    handle, called = aio_handle(), threading.Event()
    seen: list[bool] = []

    def look(_: object) -> None:
        seen.append(torch.equal(device.peek(there), sample(ODD)))
        called.set()

    with device.held():
        future = handle.submit_pread(there, path)
        future.add_done_callback(look)
        device.wait_for_held_up()
        assert not future.done()
        with pytest.raises(TimeoutError):
            future.result(timeout=0.01)
    assert called.wait(60)
    assert seen == [True]
    assert future.result() == ODD


def test_a_dropped_handle_finishes(device: PrivateDevice, folder: Path) -> None:
    handle, sent = aio_handle(), [device.tensor(sample(ODD, i)) for i in range(3)]
    for i in range(3):
        handle.submit_pwrite(sent[i], folder / f"file{i}")
    del handle, sent
    for i in range(3):
        assert torch.equal(contents(folder / f"file{i}"), sample(ODD, i))


def test_the_interpreter_ends_with_work_pending(device: PrivateDevice, folder: Path) -> None:
    run_python(
        """
        import sys, torch
        from conftest import pattern
        from nvme_ops import aio_handle
        from private_device import private_device

        there = private_device().tensor(pattern(17 << 20))
        handle = aio_handle()
        for name in sys.argv[1:]:
            handle.async_pwrite(there, name)
        """,
        folder / "one",
        folder / "two",
    )
    for name in ("one", "two"):
        assert torch.equal(contents(folder / name), pattern(17 * MIB))


# Failures


def still_works(device: PrivateDevice, handle: aio_handle, folder: Path) -> None:
    path, back = folder / "afterwards", device.empty(ODD)
    handle.write(device.tensor(sample(ODD, 9)), path)
    handle.async_pread(back, path)
    assert handle.wait() == 1
    assert torch.equal(device.peek(back), sample(ODD, 9))


@each_read
def test_a_file_that_is_too_short(device: PrivateDevice, handle: aio_handle, folder: Path, read: Call) -> None:
    path, there = store(folder / "file", sample(ODD)), device.empty(ODD)
    with pytest.raises(EOFError, match=f"{path.name}.*{ODD}"):
        read(handle, there, path, 1)
    assert device.peek(there).eq(device.unwritten).all()
    still_works(device, handle, folder)


@each_read
def test_a_file_that_is_missing(device: PrivateDevice, handle: aio_handle, folder: Path, read: Call) -> None:
    with pytest.raises(FileNotFoundError) as caught:
        read(handle, device.empty(ODD), folder / "missing", 0)
    assert str(caught.value.filename) == str(folder / "missing")
    del caught
    still_works(device, handle, folder)


def test_a_file_cut_while_a_read_waits(device: PrivateDevice, folder: Path) -> None:
    """The file was long enough at the call: the failure meets the transfer with some chunks on their way."""
    handle, first, second = (
        aio_handle(),
        store(folder / "first", sample(ODD)),
        store(folder / "second", sample(5 * ODD)),
    )
    back, cut = device.empty(ODD), device.empty(5 * ODD)
    with device.held():
        ahead, behind = handle.submit_pread(back, first), handle.submit_pread(cut, second)
        device.wait_for_held_up()
        os.truncate(second, 2 * ODD)
    assert ahead.result() == ODD
    with pytest.raises(EOFError, match="second"):
        behind.result()
    assert torch.equal(device.peek(back), sample(ODD))
    still_works(device, handle, folder)


@each_write
@pytest.mark.parametrize("chunks", [2, 12])
def test_a_file_that_may_not_grow(device: PrivateDevice, folder: Path, write: Call, chunks: int) -> None:
    """RLIMIT_FSIZE also holds inside of a longer file, so writes fail in the middle of a transfer."""
    size = chunks * CHUNK + 3
    path, sent = store(folder / "file", sample(size, 1)), device.tensor(sample(size))

    def body() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (CHUNK + 4096, resource.RLIM_INFINITY))
        handle, before = aio_handle(), device.statistics()
        with pytest.raises(OSError, match="File too large") as caught:
            write(handle, sent, path, 0)
        assert caught.value.errno == errno.EFBIG
        assert caught.value.filename == str(path)
        after = device.statistics()
        assert (after.pinned_blocks, after.violations) == (before.pinned_blocks, before.violations)
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        still_works(device, handle, folder)

    in_child(body)


@pytest.mark.parametrize("skipped", [0, 5, 11])
@pytest.mark.parametrize("what", ["queue", "run", "record"])
@pytest.mark.parametrize("write", [True, False], ids=["write", "read"])
@pytest.mark.parametrize("way", ["blocking", "async"])
def test_a_device_that_fails(
    device: PrivateDevice, folder: Path, way: str, write: bool, what: str, skipped: int
) -> None:
    handle, size = aio_handle(), 11 * CHUNK + 5  # twelve copies
    path, there = store(folder / "file", sample(size)), device.tensor(sample(size))
    calls: dict[str, Call] = {
        "blocking": WRITES["write"] if write else READS["read"],
        "async": WRITES["async_pwrite"] if write else READS["async_pread"],
    }
    with (
        device.failing(what, skipped),
        pytest.raises(RuntimeError, match=r"copying to or from the device: .* private device"),
    ):
        calls[way](handle, there, path, 0)
    still_works(device, handle, folder)


def test_validation_finds_what_differs(device: PrivateDevice, folder: Path) -> None:
    path, there = store(folder / "file", sample(ODD)), device.empty(ODD)
    handle = aio_handle()
    with device.held():
        handle.pread(there, path, True, True)
        device.wait_for_held_up()  # the first chunk has been read
        with path.open("r+b") as file:
            file.write(bytes([int(sample(1)) ^ 1]))
    with pytest.raises(OSError, match="differ") as caught:
        handle.wait()
    assert caught.value.errno == errno.EIO
    assert caught.value.filename == str(path)
    del caught
    still_works(device, handle, folder)
