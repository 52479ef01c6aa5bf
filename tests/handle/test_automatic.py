"""What the engine decides by itself: lanes for large reads that the page cache has, the cache for reads in a row."""

from __future__ import annotations

import itertools
import os
import signal
from pathlib import Path

import pytest
import torch

import nvme_ops
from nvme_ops import aio_handle
from nvme_ops.measure.files import cached_share
from tests.conftest import MIB, HandleFactory, in_threads, pattern, round_trip, store

LARGE = 64 * MIB


@pytest.mark.parametrize(
    ("size", "cached", "lanes", "threads"),
    [(LARGE, True, None, 1), (LARGE, True, 1, 0), (LARGE - 1, True, None, 0), (LARGE, False, None, 0)],
)
def test_a_large_read_that_is_cached_has_a_second_lane(
    folder: Path, size: int, cached: bool, lanes: int | None, threads: int
) -> None:
    """The first lane of a blocking call is its caller's thread."""
    data, back = pattern(size), pattern(size, 1)  # memory that has its pages
    path = store(folder / "file", data)
    if cached_share(str(path), size) != 0:
        pytest.skip("what is in the page cache cannot be told, or not be changed, here")
    if cached:
        path.read_bytes()
    before = set(os.listdir("/proc/self/task"))
    with aio_handle(intra_op_parallelism=lanes) as handle:
        handle.sync_pread(back, path)
        assert len(set(os.listdir("/proc/self/task")) - before) == threads
        assert handle.statistics().cached_bytes == size * cached
        assert torch.equal(back, data)
        assert handle.submit_pread(back, path).result() == size
        assert handle.get_intra_op_parallelism() == handle.get_thread_count() == 1


def test_many_tensors_are_divided_too(make_handle: HandleFactory, folder: Path) -> None:
    data = pattern(LARGE + 5 * MIB)
    path = store(folder / "file", data)
    back = torch.zeros_like(data)
    parts = list(back.split(3 * MIB + 77))
    offsets = [3 * MIB * i + 77 * i for i in range(len(parts))]
    handle = make_handle()
    for _ in range(3):  # cold, then cached
        back.zero_()
        assert handle.submit_preadv(parts, path, offsets).result() == data.numel()
        assert torch.equal(back, data)
        path.read_bytes()


@pytest.mark.parametrize("opened", [False, True])
def test_small_reads_in_a_row_go_through_the_page_cache(make_handle: HandleFactory, folder: Path, opened: bool) -> None:
    data = pattern(MIB)
    path = store(folder / "file", data)
    if cached_share(str(path), MIB) != 0:
        pytest.skip("what is in the page cache cannot be told, or not be changed, here")
    handle, back = make_handle(), torch.zeros(4096, dtype=torch.uint8)
    with nvme_ops.open(path, "rb") as file:
        for index in (9, 40, 41, 20, 60):  # nothing in a row
            handle.sync_pread(back, file if opened else path, index * 4096)
        assert handle.statistics().cached_bytes == 0
        for index in range(100, 110):
            handle.sync_pread(back, file if opened else path, index * 4096)
            assert torch.equal(back, data[index * 4096 :][:4096])
        assert handle.statistics().cached_bytes == 8 * 4096  # from the third on


@pytest.fixture
def cached(folder: Path) -> Path:
    path = store(folder / "file", pattern(LARGE))
    path.read_bytes()
    return path


def test_threads_read_at_once(make_handle: HandleFactory, cached: Path) -> None:
    handle, data = make_handle(), pattern(LARGE)

    def work(number: int) -> None:
        back = torch.zeros_like(data)
        for _ in range(3):
            back.zero_()
            handle.submit_pread(back, cached).result() if number % 2 else handle.read(back, cached)
            assert torch.equal(back, data)

    in_threads(work, 4)


def test_a_handler_that_forks_in_a_divided_read(make_handle: HandleFactory, folder: Path, cached: Path) -> None:
    handle, data, back = make_handle(), pattern(LARGE), torch.zeros(LARGE, dtype=torch.uint8)
    handle.sync_pread(back, cached)
    children: list[int] = []

    def fork(*_: object) -> None:
        children.append(os.fork())
        if children[-1] == 0:
            signal.alarm(30)
            torch.set_num_threads(1)

    before = signal.signal(signal.SIGALRM, fork)
    try:
        for attempt in itertools.count():
            back.zero_()
            signal.setitimer(signal.ITIMER_REAL, 0.002 + 0.001 * (attempt % 8))
            try:
                handle.sync_pread(back, cached)
            except RuntimeError as error:
                assert "only the parent" in str(error)  # noqa: PT017
            if children:
                break
        if children[-1] == 0:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            status = 1
            try:
                round_trip(handle, folder / "child")
                status = 0
            finally:
                os._exit(status)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert torch.equal(back, data)
    assert os.waitstatus_to_exitcode(os.waitpid(children[0], 0)[1]) == 0
    round_trip(handle, folder / "parent")
