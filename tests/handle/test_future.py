"""``IoFuture``: results, failures, cancellation, callbacks, asyncio, concurrent.futures; what a handle counts."""

from __future__ import annotations

import asyncio
import concurrent.futures
import errno
import gc
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import nvme_ops
from nvme_ops import IoFuture, aio_handle
from tests.conftest import KIB, MIB, HandleFactory, in_child, pattern

LONG = 96 * MIB  # in single 4 KiB requests: long enough to look at it while it goes on


@pytest.fixture
def pending(folder: Path) -> Iterator[IoFuture]:
    """A future whose transfer goes on for a while, and its handle."""
    handle, path = aio_handle(block_size=4096, queue_depth=1, cache="direct"), folder / "long"
    with path.open("wb") as file:
        file.truncate(LONG)
    future = handle.submit_pread(torch.ones(LONG, dtype=torch.uint8), path)
    yield future
    assert future.result() == LONG


@pytest.fixture
def failing(handle: aio_handle, folder: Path) -> Any:
    """Makes futures that fail."""
    return lambda: handle.submit_pread(torch.zeros(10), folder / "nosuch")


def test_result_is_the_bytes_moved(handle: aio_handle, folder: Path) -> None:
    data, path = pattern(300_001), folder / "file"
    written = handle.submit_pwrite(data, path)
    assert written.result() == written.result(0) == len(data)
    assert (written.done(), written.running(), written.exception()) == (True, False, None)
    back = torch.zeros(100_000, dtype=torch.uint8)
    future = handle.submit_pread(tensor=back, file=path, file_offset=7)
    handle.async_pread(back[:10], path)
    assert handle.wait() == 1  # futures do not count
    assert future.result(timeout=60) == 100_000
    handle.submit_pread(back, path, 7).result()
    assert torch.equal(back, data[7:100_007])
    assert handle.submit_pread(back[:0], path).result() == 0


def test_while_it_goes_on(pending: IoFuture) -> None:
    for wait in (pending.result, pending.exception):
        for timeout in (0, 0.001, -1):
            with pytest.raises(TimeoutError):
                wait(timeout)
    with pytest.raises(TypeError):
        pending.result("soon")  # type: ignore[arg-type]
    assert (pending.cancel(), pending.cancelled()) == (False, False)
    assert pending.running()
    assert repr(pending) == "<IoFuture: pending>"
    pending.result(1e12)
    assert repr(pending) == "<IoFuture: done, 96 MiB moved>"


def test_a_failure_is_raised_each_time_and_told_if_nobody_asks(failing, unraisable: list[Any]) -> None:
    future = failing()
    caught = future.exception()
    assert caught.errno == errno.ENOENT
    for _ in range(2):
        with pytest.raises(OSError, match="No such file") as raised:
            future.result()
        assert raised.value is caught
    del future, caught, raised
    gc.collect()
    assert unraisable == []
    future, called = failing(), threading.Event()
    future.add_done_callback(lambda _: called.set())
    assert called.wait(60)
    del future
    gc.collect()
    failing().exception()  # the handle lets go of what has ended when it is used again
    assert [error.errno for error in unraisable] == [errno.ENOENT]


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
    waiting.request_cancel()
    assert waiting.result() == 4096


def test_whoever_cancels_knows_of_it(handle: aio_handle, folder: Path, unraisable: list[Any]) -> None:
    handle.submit_pwrite(pattern(16 * MIB), folder / "file").request_cancel()
    handle.close()
    gc.collect()
    assert not unraisable


# Callbacks


def test_callbacks(pending: IoFuture, unraisable: list[Any], folder: Path) -> None:
    """One may use a handle, and one that raises does not matter to the others."""
    calls: list[tuple[IoFuture, threading.Thread]] = []
    ended, late = threading.Event(), threading.Event()
    for _ in range(3):
        pending.add_done_callback(lambda future: calls.append((future, threading.current_thread())))
    pending.add_done_callback(lambda _: 1 // 0)
    pending.add_done_callback(lambda _: aio_handle().sync_pwrite(pattern(100), folder / "of a callback"))
    pending.add_done_callback(lambda _: ended.set())
    assert calls == []
    pending.result()
    assert ended.wait(60)
    pending.add_done_callback(lambda _: late.set())
    assert late.wait(60)
    assert [future for future, _ in calls] == [pending] * 3
    assert threading.main_thread() not in {thread for _, thread in calls}
    assert [type(error) for error in unraisable] == [ZeroDivisionError]
    assert (folder / "of a callback").stat().st_size == 100


# Among others' futures


def test_asyncio(handle: aio_handle, failing, folder: Path) -> None:
    tensors = [pattern(10_000 + i, i) for i in range(20)]

    async def one(future: IoFuture) -> int:
        return await future

    async def main() -> None:
        moved = await asyncio.gather(*(one(handle.submit_pwrite(part, folder / str(len(part)))) for part in tensors))
        assert moved == [len(tensor) for tensor in tensors]
        for tensor in tensors:
            back = torch.zeros_like(tensor)
            assert await handle.submit_pread(back, folder / str(len(tensor))) == len(tensor)
            assert torch.equal(back, tensor)
        errors: list[Any] = await asyncio.gather(*(one(failing()) for _ in range(5)), return_exceptions=True)
        assert [error.errno for error in errors] == [errno.ENOENT] * 5

    asyncio.run(main())


def test_asyncio_timeout_cancellation_and_a_loop_that_closes_first(pending: IoFuture, unraisable: list[Any]) -> None:
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
        left = asyncio.create_task(wait())
        await asyncio.sleep(0)
        assert not left.done()
        assert not pending.done()

    asyncio.run(main())
    ended = threading.Event()
    pending.add_done_callback(lambda _: ended.set())
    assert ended.wait(60)
    assert unraisable == []


def test_concurrent_futures_takes_them_among_its_own(tmp_path: Path) -> None:
    handle, data = aio_handle(), pattern(1 << 20)
    writes = [handle.submit_pwrite(data, tmp_path / str(number)) for number in range(10)]
    done, left = concurrent.futures.wait(writes, timeout=60)
    assert (done, left) == (set(writes), set())
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        mixed: list[Any] = [handle.submit_pread(data, tmp_path / str(number)) for number in range(10)]
        mixed.append(pool.submit(int, "7"))
        assert {future.result() for future in concurrent.futures.as_completed(mixed, timeout=60)} == {1 << 20, 7}
    failing = handle.submit_pread(torch.zeros(10), tmp_path / "nosuch")
    done, _ = concurrent.futures.wait([failing], timeout=60, return_when=concurrent.futures.FIRST_EXCEPTION)
    assert isinstance(done.pop().exception(), FileNotFoundError)


# Statistics, priorities


def test_statistics_count_what_a_handle_moves_at_any_priority(make_handle: HandleFactory, folder: Path) -> None:
    data = pattern(MIB)
    for cache in ("direct", "buffered"):
        handle, back = make_handle(64 * KIB, 16, cache=cache), torch.empty_like(data)
        assert handle.statistics().bytes == handle.statistics().requests == 0
        for priority in nvme_ops.Priority:
            handle.submit_pwrite(data, folder / "file", priority=priority).result()
            handle.submit_preadv([back.zero_()], [folder / "file"], priority=priority).result()
            assert torch.equal(back, data)
        stats = handle.statistics()
        assert stats.written_bytes == stats.read_bytes == 4 * MIB
        assert stats.cached_share == (cache == "buffered")
        assert 0 <= stats.staged_bytes <= stats.bytes
        if cache == "direct":
            assert stats.requests >= 8
            assert 1 <= stats.mean_in_flight <= stats.max_in_flight <= 16
            assert stats.kernel_seconds > 0

    def child() -> None:
        assert handle.statistics().bytes == 0

    in_child(child)
    assert handle.statistics().written_bytes == 4 * MIB
