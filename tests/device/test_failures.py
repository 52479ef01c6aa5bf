"""What goes wrong while tensors on an accelerator are moved, and that the handle goes on afterwards."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import MIB, contents, store
from tests.device.kinds import PAGE, READS, WRITES, Device, largest_file, sample, still_works


def test_a_file_that_is_too_short_missing_or_none(device: Device, folder: Path) -> None:
    handle, there, path = device.handle(3), device.empty(device.odd), store(folder / "file", sample(device.odd))
    os.mkfifo(folder / "pipe")
    reading, writing = os.pipe()
    for name, read in READS.items():
        with pytest.raises(EOFError, match=f"{path.name}.*{device.odd}"):
            read(handle, there, path, 1)
        with pytest.raises(FileNotFoundError) as caught:
            read(handle, there, folder / "missing", 0)
        assert str(caught.value.filename) == str(folder / "missing"), name
        del caught
    with pytest.raises(IsADirectoryError):
        handle.read(there, folder)
    for pipe in (folder / "pipe", reading):
        with pytest.raises(OSError, match="neither a regular file nor a block device"):
            handle.read(there, pipe)
    os.close(reading)
    os.close(writing)
    with pytest.raises(OSError, match="descriptor 999"):
        handle.read(there, 999)
    for offset in (-1, 2**63 - 1, 2**64):
        with pytest.raises(ValueError, match="file_offset"):
            handle.write(device.tensor(sample(device.odd, 1)), path, file_offset=offset)
    device.require_pages()
    assert device.peek(there).eq(device.unwritten).all()
    assert contents(path).equal(sample(device.odd))
    still_works(device, handle, folder)


@pytest.mark.parametrize("write", ["sync_pwrite", "async_pwrite", "submit_pwritev"])
def test_a_file_that_may_not_grow(device: Device, folder: Path, write: str) -> None:
    """RLIMIT_FSIZE also holds inside of a longer file, so writes fail in the middle of a transfer."""
    chunks = 12 if "async" in write else 3
    size, limit = chunks * device.chunk + 3, device.chunk + PAGE
    path, sent, handle = store(folder / "file", sample(size, 1)), device.tensor(sample(size)), device.handle()
    with largest_file(limit), pytest.raises(OSError) as caught:  # noqa: PT011  (cuFile may tell it in its own way)
        WRITES[write](handle, sent, path, 0)
    device.require_errno(caught.value, errno.EFBIG)
    assert caught.value.filename == str(path)
    del caught
    assert contents(path)[limit:].equal(sample(size, 1)[limit:])
    still_works(device, handle, folder)


@pytest.fixture
def place(make_file_system: Callable[..., Path]) -> Path:
    """A small file system, mounted and unmounted by this process also where the test runs in a child."""
    return make_file_system(64 * MIB)


def test_a_full_disk(device: Device, place: Path) -> None:
    handle = device.handle()
    with pytest.raises(OSError) as caught:  # noqa: PT011  (cuFile may tell it in its own way)
        handle.write(device.empty(96 * MIB), place / "file")
    device.require_errno(caught.value, errno.ENOSPC)
    assert caught.value.filename == str(place / "file")
    del caught
    (place / "file").unlink()
    still_works(device, handle, place)
