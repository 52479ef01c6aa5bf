"""Writes beside readers of the same file, and what of a file the page cache has, takes and is asked for."""

from __future__ import annotations

import multiprocessing
import os
import random
from collections.abc import Callable, Iterator
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any

import pytest
import torch

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


def test_only_buffered_reads_fill_the_cache(make_handle: HandleFactory, folder: Path) -> None:
    path, back = uncached(folder / "file", pattern(MIB)), torch.zeros(MIB, dtype=torch.uint8)
    for cache in MODES:
        make_handle(cache=cache).sync_pread(back, path)
        assert cached_share(str(path), MIB) == (cache == "buffered")
