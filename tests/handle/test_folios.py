"""Writes beside readers of the same file, and what of a file the page cache has, takes and is asked for."""

from __future__ import annotations

import mmap
import multiprocessing
import os
import random
from collections.abc import Callable, Iterator
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any

import pytest
import torch

import nvme_ops
from nvme_ops import aio_handle
from nvme_ops.measure.files import cached_share
from tests.conftest import KIB, MIB, HandleFactory, pattern, store

SIZE, LARGE = 8 * MIB, 64 * MIB
MODES: tuple[Any, ...] = ("auto", "direct", "buffered")


@pytest.fixture(params=["folder", "xfs"])
def place(request: pytest.FixtureRequest, folder: Path, make_file_system: Callable[..., Path]) -> Path:
    """Folders on a disk's file system, and on XFS, whose folios have been large for longest."""
    return folder if request.param == "folder" else make_file_system(512 * MIB, kind="xfs")


def read_and_drop(path: Path, stop: Event) -> None:
    """Reads the file from its start to its end, which makes the kernel read ahead in large folios, again and again."""
    descriptor = os.open(path, os.O_RDONLY)
    while not stop.is_set():
        for offset in range(0, SIZE, 256 * KIB):
            os.pread(descriptor, 256 * KIB, offset)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)


@pytest.fixture
def read_file(place: Path) -> Iterator[Path]:
    """A file that another process reads all the time."""
    path = place / "file"
    path.write_bytes(bytes(SIZE))
    context = multiprocessing.get_context("fork")
    stop = context.Event()
    reader = context.Process(target=read_and_drop, args=(path, stop))
    reader.start()
    yield path
    stop.set()
    reader.join()


@pytest.mark.parametrize("rounds", [24, pytest.param(100, marks=pytest.mark.slow)])
def test_unaligned_writes_beside_a_sequential_reader(read_file: Path, rounds: int) -> None:
    """The page cache works in folios that cover what goes past it, too.

    After each round, of one write, of adjacent ones or of some with gaps, the file is what was written, to everybody,
    and no fsync fails.
    """
    chance, handle = random.Random(1), aio_handle(intra_op_parallelism=2)
    descriptor = os.open(read_file, os.O_RDWR)
    try:
        for turn in range(rounds):
            offset, size = chance.randrange(2 * MIB), chance.randrange(100, 5 * MIB)
            parts: list[tuple[int, torch.Tensor]] = []
            end = offset + size
            while offset < end:
                length = chance.randrange(1000, 300_000) if turn % 3 else size
                parts.append((offset, torch.randint(0, 256, (length,), dtype=torch.uint8)))
                offset += length
                if turn % 3 == 2:
                    offset += -offset % 4096
            for start, data in parts:
                handle.async_pwrite(data, read_file, start)
            handle.wait()
            os.fsync(descriptor)
            assert all(os.pread(descriptor, len(data), start) == data.numpy().tobytes() for start, data in parts)
    finally:
        os.close(descriptor)


# The page cache


def uncached(path: Path, data: torch.Tensor) -> Path:
    """Writes a file of which the page cache has nothing."""
    if cached_share(str(store(path, data)), len(data)) != 0:
        pytest.skip("what is in the page cache cannot be told, or not be changed, here")
    return path


def test_a_large_read_that_is_cached_has_a_second_lane(folder: Path) -> None:
    """Whether it fills one tensor or many. The first lane of a blocking call is its caller's thread."""
    data, back = pattern(LARGE + 5 * MIB), pattern(LARGE + 5 * MIB, 1)  # memory that has its pages
    path = uncached(folder / "file", data)
    parts = list(back.split(3 * MIB + 77))
    offsets = range(0, len(data), 3 * MIB + 77)
    for size, cached, lanes, threads in (
        (len(data), False, None, 0),
        (len(data), True, None, 1),
        (LARGE, True, 1, 0),
        (LARGE - 1, True, None, 0),
    ):
        if cached:
            path.read_bytes()
        before = set(os.listdir("/proc/self/task"))
        with aio_handle(intra_op_parallelism=lanes) as handle:
            handle.sync_pread(back[:size].zero_(), path)
            assert len(set(os.listdir("/proc/self/task")) - before) == threads
            assert handle.statistics().cached_bytes == size * cached
            assert torch.equal(back[:size], data[:size])
            if lanes is None and size == len(data):
                assert handle.submit_preadv(parts, path, offsets).result() == len(data)
                assert torch.equal(back, data)


def test_small_reads_in_a_row_go_through_the_page_cache(folder: Path) -> None:
    data, back = pattern(MIB), torch.zeros(4096, dtype=torch.uint8)
    for opened in (False, True):
        path = uncached(folder / "file", data)
        with nvme_ops.open(path, "rb") as file, aio_handle() as handle:
            for index in (9, 40, 41, 20, 60):  # nothing in a row
                handle.sync_pread(back, file if opened else path, index * 4096)
            assert handle.statistics().cached_bytes == 0
            for index in range(100, 110):
                handle.sync_pread(back, file if opened else path, index * 4096)
                assert torch.equal(back, data[index * 4096 :][:4096])
            assert handle.statistics().cached_bytes == 8 * 4096  # from the third on


def test_a_file_partly_in_the_cache(make_handle: HandleFactory, folder: Path) -> None:
    data = pattern(4 * MIB + 99)
    for cache in MODES:
        path = store(folder / cache, data)
        fd = os.open(path, os.O_RDWR)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)
        for offset in (0, 70_000, MIB, MIB + 4096, 3 * MIB + 1, 4 * MIB):
            os.pread(fd, 4096, offset)
        os.pwrite(fd, data[2 * MIB : 2 * MIB + 5].numpy().tobytes(), 2 * MIB)  # one dirty page
        os.close(fd)
        for lanes in (3, 1):
            back = torch.zeros_like(data)
            make_handle(cache=cache, block_size=65536, intra_op_parallelism=lanes).sync_pread(back, path)
            assert torch.equal(back, data)


def test_the_cache_sees_what_was_written_past_it(folder: Path) -> None:
    path = store(folder / "file", pattern(MIB, 1))
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 0) as view:
        assert view[:] == pattern(MIB, 1).numpy().tobytes()  # all cached
        for i, cache in enumerate(MODES):
            for size, offset in [(MIB, 0), (4096, 4096), (100_000, 333), (1, 5000), (512, 512)]:
                data = pattern(size, i + 10)
                aio_handle(cache=cache).sync_pwrite(data, path, offset)
                assert view[offset : offset + size] == data.numpy().tobytes()


def test_only_buffered_reads_fill_the_cache(make_handle: HandleFactory, folder: Path) -> None:
    path, back = uncached(folder / "file", pattern(MIB)), torch.zeros(MIB, dtype=torch.uint8)
    for cache in MODES:
        make_handle(cache=cache).sync_pread(back, path)
        assert cached_share(str(path), MIB) == (cache == "buffered")
