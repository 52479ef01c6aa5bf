"""``IoFuture``: results, failures, callbacks, asyncio, and many at once."""

from __future__ import annotations

import asyncio
import errno
import gc
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from nvme_ops import IoFuture, aio_handle
from tests.conftest import MIB, HandleFactory, LoopDevice, contents, pattern, store

LONG = 192 * MIB  # in single 4 KiB requests: long enough to look at it while it goes on


@pytest.fixture
def pending(make_handle: HandleFactory, folder: Path):
    """A future whose transfer goes on for a while, and its handle."""
    handle, path = make_handle(block_size=4096, queue_depth=1, cache="direct"), folder / "long"
    with path.open("wb") as file:
        file.truncate(LONG)
    future = handle.submit_pread(torch.ones(LONG, dtype=torch.uint8), path)
    yield future
    future.result()


@pytest.fixture
def failing(make_handle: HandleFactory, make_device) -> Any:
    """Makes futures that fail with EIO: reads of a device whose image was cut."""
    device: LoopDevice = make_device(4 * MIB)
    handle = make_handle()
    with device.image.open("r+b") as image:
        image.truncate(4096)
    return lambda: handle.submit_pread(torch.zeros(512, dtype=torch.uint8), device.path, MIB)


def test_result_is_the_bytes_moved(handle: aio_handle, folder: Path) -> None:
    data, path = pattern(300_001), folder / "file"
    written = handle.submit_pwrite(data, path)
    assert isinstance(written, IoFuture)
    assert written.result() == written.result(0) == len(data)
    assert written.done()
    assert written.exception() is None
    back = torch.zeros(100_000, dtype=torch.uint8)
    assert handle.submit_pread(tensor=back, file=path, file_offset=7).result(timeout=60) == 100_000
    assert torch.equal(back, data[7:100_007])
    assert handle.submit_pread(back[:0], path).result() == 0


def test_timeout(pending: IoFuture) -> None:
    for wait in (pending.result, pending.exception):
        for timeout in (0, 0.001, -1):
            with pytest.raises(TimeoutError, match="has not ended"):
                wait(timeout)
    assert not pending.done()
    assert repr(pending) == "<IoFuture: pending>"
    with pytest.raises(TypeError):
        pending.result("soon")  # type: ignore[arg-type]
    pending.result(1e12)
    assert repr(pending) == "<IoFuture: done>"


def test_wait_does_not_count_futures(handle: aio_handle, folder: Path) -> None:
    path = store(folder / "file", pattern(MIB))
    futures = [handle.submit_pread(torch.zeros(MIB, dtype=torch.uint8), path) for _ in range(3)]
    handle.async_pread(torch.zeros(10), path)
    assert handle.wait() == 1
    assert [future.result() for future in futures] == [MIB] * 3
    assert handle.wait() == 0


def test_failure(failing, unraisable: list[Any]) -> None:
    future = failing()
    caught = future.exception()
    assert isinstance(caught, OSError)
    assert caught.errno == errno.EIO
    assert future.exception() is caught
    for _ in range(2):
        with pytest.raises(OSError, match="read of 512 bytes at offset 1048576: Input/output error") as raised:
            future.result()
        assert raised.value is caught
    assert future.done()
    del future, caught, raised
    gc.collect()
    assert unraisable == []


def test_a_failure_nobody_asked_for(failing, unraisable: list[Any]) -> None:
    future = failing()
    called = threading.Event()
    future.add_done_callback(lambda _: called.set())
    assert called.wait(60)
    del future
    gc.collect()
    failing().exception()  # the handle lets go of what has ended when it is used again
    assert [error.errno for error in unraisable] == [errno.EIO]


def test_callbacks(pending: IoFuture) -> None:
    calls: list[tuple[IoFuture, threading.Thread]] = []
    ended = threading.Event()
    for _ in range(3):
        pending.add_done_callback(lambda future: calls.append((future, threading.current_thread())))
    pending.add_done_callback(lambda future: ended.set())
    assert calls == []
    pending.result()
    assert ended.wait(60)
    late = threading.Event()
    pending.add_done_callback(lambda future: late.set())
    assert late.wait(60)
    assert [future for future, _ in calls] == [pending] * 3
    assert threading.main_thread() not in {thread for _, thread in calls}


def test_an_exception_in_a_callback(handle: aio_handle, folder: Path, unraisable: list[Any]) -> None:
    future, ended = handle.submit_pwrite(torch.zeros(4), folder / "file"), threading.Event()
    future.add_done_callback(lambda _: 1 // 0)
    future.add_done_callback(lambda _: ended.set())
    assert ended.wait(60)
    assert [type(error) for error in unraisable] == [ZeroDivisionError]
    assert future.result() == 16


def test_a_callback_may_use_the_handle(handle: aio_handle, folder: Path) -> None:
    """Each write's callback starts the next; none is waited for by anyone else."""
    ended, count = threading.Event(), 50

    def write(i: int) -> None:
        if i == count:
            ended.set()
        else:
            handle.submit_pwrite(torch.full((100,), i), folder / str(i)).add_done_callback(lambda _: write(i + 1))

    write(0)
    assert ended.wait(60)
    back = torch.zeros(100, dtype=torch.int64)
    for i in range(count):
        handle.read(back, folder / str(i))
        assert (back == i).all()


def test_asyncio(handle: aio_handle, folder: Path) -> None:
    tensors = [pattern(10_000 + i, i) for i in range(50)]

    async def main() -> None:
        moved = await asyncio.gather(*(write(i) for i in range(50)))
        assert moved == [10_000 + i for i in range(50)]
        for i, tensor in enumerate(tensors):
            back = torch.zeros_like(tensor)
            assert await handle.submit_pread(back, folder / str(i)) == len(tensor)
            assert torch.equal(back, tensor)
        with pytest.raises(EOFError):
            await handle.submit_pread(torch.zeros(10**6), folder / "0")

    async def write(i: int) -> int:
        return await handle.submit_pwrite(tensors[i], folder / str(i))

    asyncio.run(main())


def test_a_transfer_that_is_to_be_cancelled_ends_early(make_handle: HandleFactory, folder: Path) -> None:
    handle, path = make_handle(block_size=4096, queue_depth=1, cache="direct"), folder / "long"
    with path.open("wb") as file:
        file.truncate(LONG)
    target = torch.ones(LONG, dtype=torch.uint8)
    future = handle.submit_pread(target, path)
    waiting = handle.submit_pread(torch.ones(4096, dtype=torch.uint8), path)
    future.request_cancel()
    with pytest.raises(OSError, match="the transfer: Operation canceled") as caught:
        future.result()
    assert caught.value.errno == errno.ECANCELED
    assert int(target[-1]) == 1, "it was not begun"
    assert waiting.result() == 4096
    future.request_cancel()


def test_cancelling_what_has_ended_changes_nothing(handle: aio_handle, folder: Path, unraisable: list[Any]) -> None:
    future = handle.submit_pwrite(pattern(1000), folder / "file")
    assert future.result() == 1000
    future.request_cancel()
    assert future.result() == 1000
    handle.submit_pwrite(pattern(64 * MIB), folder / "file").request_cancel()
    handle.close()
    gc.collect()
    assert not unraisable, "whoever cancels it knows of it"


def test_asyncio_failure(failing) -> None:
    async def main() -> list[Any]:
        async def one() -> int:
            return await failing()

        return await asyncio.gather(*(one() for _ in range(5)), return_exceptions=True)

    assert [error.errno for error in asyncio.run(main())] == [errno.EIO] * 5


def test_asyncio_timeout_and_cancellation(pending: IoFuture) -> None:
    """The waiting ends, the transfer goes on."""

    async def wait() -> int:
        return await pending

    async def main() -> None:
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(wait(), 0.01)
        task = asyncio.create_task(wait())
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert not pending.done()

    asyncio.run(main())
    assert pending.result() == LONG


def test_an_event_loop_that_closes_first(pending: IoFuture, unraisable: list[Any]) -> None:
    async def main() -> None:
        async def wait() -> None:
            await pending

        waiting = asyncio.create_task(wait())
        await asyncio.sleep(0)
        assert not waiting.done()

    asyncio.run(main())
    ended = threading.Event()
    pending.add_done_callback(lambda _: ended.set())
    assert ended.wait(60)
    assert unraisable == []


def test_thousands_at_once(make_handle: HandleFactory, folder: Path) -> None:
    handle, count = make_handle(queue_depth=32, intra_op_parallelism=2), 5000
    data = torch.arange(count * 128).view(count, 128)
    path = folder / "file"
    futures = [handle.submit_pwrite(row, path, i * 1024) for i, row in enumerate(data)]
    assert sum(future.result() for future in futures) == count * 1024
    assert torch.equal(contents(path).view(torch.int64), data.view(-1))
    back = torch.zeros_like(data)
    futures = [handle.submit_pread(row, path, i * 1024) for i, row in enumerate(back)]
    assert all(future.result() == 1024 for future in reversed(futures))
    assert torch.equal(back, data)
