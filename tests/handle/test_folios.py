"""Unaligned writes beside a reader: the page cache works in folios that cover what goes past it, too."""

from __future__ import annotations

import multiprocessing
import os
import random
import shutil
from collections.abc import Callable, Iterator
from multiprocessing.synchronize import Event
from pathlib import Path

import pytest
import torch

from tests.conftest import KIB, MIB, HandleFactory, LoopDevice, _command

SIZE = 8 * MIB


@pytest.fixture(params=["folder", "xfs"])
def place(request: pytest.FixtureRequest, folder: Path, make_device: Callable[..., LoopDevice]) -> Iterator[Path]:
    """Folders on a disk's file system, and on XFS, whose folios have been large for longest."""
    if request.param == "folder":
        yield folder
        return
    if shutil.which("mkfs.xfs") is None:
        pytest.skip("mkfs.xfs is not installed")
    device, mounted = make_device(512 * MIB), folder / "mounted"
    mounted.mkdir()
    _command("mkfs.xfs", "-q", "-f", device.path)
    try:
        _command("mount", device.path, mounted)
    except Exception as error:  # the kernel may have no XFS
        pytest.skip(f"cannot mount: {error}")
    yield mounted
    _command("umount", mounted)


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


@pytest.mark.timeout(900)
@pytest.mark.parametrize("rounds", [20, pytest.param(100, marks=pytest.mark.slow)])
@pytest.mark.parametrize("spread", ["one", "adjacent", "with gaps"])
def test_unaligned_writes_beside_a_sequential_reader(
    make_handle: HandleFactory, read_file: Path, spread: str, rounds: int
) -> None:
    """After each round the file is what was written, to everybody, and no fsync fails."""
    chance, handle = random.Random(1), make_handle(intra_op_parallelism=2)
    descriptor = os.open(read_file, os.O_RDWR)
    try:
        for _ in range(rounds):
            offset, size = chance.randrange(2 * MIB), chance.randrange(100, 5 * MIB)
            parts: list[tuple[int, torch.Tensor]] = []
            end = offset + size
            while offset < end:
                length = size if spread == "one" else chance.randrange(1000, 300_000)
                parts.append((offset, torch.randint(0, 256, (length,), dtype=torch.uint8)))
                offset += length
                if spread == "with gaps":
                    offset += -offset % 4096
            for start, data in parts:
                handle.async_pwrite(data, read_file, start)
            handle.wait()
            os.fsync(descriptor)
            assert all(os.pread(descriptor, len(data), start) == data.numpy().tobytes() for start, data in parts)
    finally:
        os.close(descriptor)
