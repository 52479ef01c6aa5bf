"""File systems that are full, read-only, of 4096-byte sectors or without O_DIRECT, and devices that fail."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from nvme_ops import aio_handle
from tests.conftest import GIB, KIB, MIB, HandleFactory, LoopDevice, contents, pattern, store, sync_file_system

MakeFileSystem = Callable[..., Path]
MakeDevice = Callable[..., LoopDevice]


@pytest.mark.parametrize("sector", [512, 4096])
def test_sectors(make_handle: HandleFactory, make_file_system: MakeFileSystem, sector: int) -> None:
    mounted = make_file_system(16 * MIB, sector)
    path, old = mounted / "file", pattern(3 * MIB + 777, 1)
    for cache in ("auto", "direct", "buffered"):
        handle = make_handle(block_size=65536, cache=cache, intra_op_parallelism=2)
        expected = old.clone()
        handle.sync_pwrite(old, path)
        for size, offset, skew in [(1, 511, 0), (512, 512, 1), (4096, 4096, 0), (100_000, 4097, 3), (MIB, 512, 64)]:
            room = handle.new_cpu_locked_tensor(size + skew, old)
            source = room[skew:]
            source.copy_(pattern(size, size))
            handle.pwrite(source, path, True, False, offset)
            expected[offset : offset + size] = source
            room.zero_()
            handle.sync_pread(source, path, offset)
            assert torch.equal(source, expected[offset : offset + size])
        assert torch.equal(contents(path), expected)


def test_a_full_file_system(make_handle: HandleFactory, make_file_system: MakeFileSystem) -> None:
    mounted = make_file_system(8 * MIB)
    handle = make_handle(intra_op_parallelism=2)
    kept = pattern(MIB, 5)
    handle.sync_pwrite(kept, mounted / "kept")
    for path in (mounted / "new", mounted / "kept"):
        for call in (
            lambda path: handle.sync_pwrite(torch.zeros(32 * MIB, dtype=torch.uint8), path),
            lambda path: handle.submit_pwrite(torch.zeros(32 * MIB, dtype=torch.uint8), path, 100).result(),
        ):
            with pytest.raises(OSError, match=r"No space left on device") as caught:
                call(path)
            assert (caught.value.errno, caught.value.filename) == (errno.ENOSPC, str(path))
            assert torch.equal(contents(mounted / "kept"), kept)
    assert handle.wait() == 0
    handle.sync_pwrite(pattern(MIB, 6), mounted / "new")  # there is room for that
    assert torch.equal(contents(mounted / "new"), pattern(MIB, 6))


def test_a_file_system_that_fills_up_in_small_writes(
    make_handle: HandleFactory, make_file_system: MakeFileSystem
) -> None:
    """Writes below what is preallocated: the space runs out during the transfer."""
    mounted, handle = make_file_system(4 * MIB), make_handle(cache="direct")
    data = pattern(500_000)
    handle.sync_pwrite(data, mounted / "0")  # of those that share what is left, perhaps none ends whole
    for i in range(1, 40):
        handle.async_pwrite(data, mounted / str(i))
    with pytest.raises(OSError, match="No space left on device") as caught:
        handle.wait()
    failed = {Path(failure.filename).name for failure in caught.value.failures}  # type: ignore[attr-defined]
    assert len(failed) == len(caught.value.failures)  # type: ignore[attr-defined]
    assert "0" not in failed
    for i in range(40):
        assert str(i) in failed or torch.equal(contents(mounted / str(i)), data)
    (mounted / "0").unlink()
    handle.sync_pwrite(data[:100_000], mounted / "0")
    assert handle.wait() == 0


@pytest.mark.parametrize("lanes", [1, 3])
def test_a_device_that_fails(make_handle: HandleFactory, make_device: MakeDevice, lanes: int) -> None:
    """The file behind a loop device is cut: the kernel answers EIO from there on."""
    device = make_device(16 * MIB)
    handle = make_handle(block_size=65536, queue_depth=4, intra_op_parallelism=lanes, cache="direct")
    handle.sync_pwrite(pattern(16 * MIB), device.path, 0)
    sync_file_system(device.path)
    os.truncate(device.image, 8 * MIB)
    back = torch.zeros(16 * MIB, dtype=torch.uint8)
    for call in (handle.sync_pread, lambda *a: handle.submit_pread(*a).result(), handle.read):
        with pytest.raises(OSError, match=r"read of \d+ bytes at offset \d+: Input/output error") as caught:
            call(back, device.path)
        assert (caught.value.errno, caught.value.filename) == (errno.EIO, str(device.path))
    assert handle.wait() == 0
    handle.sync_pread(back[: 8 * MIB], device.path)
    assert torch.equal(back[: 8 * MIB], pattern(16 * MIB)[: 8 * MIB])


@pytest.mark.parametrize("sector", [512, 4096])
def test_a_device_itself(make_handle: HandleFactory, make_device: MakeDevice, sector: int) -> None:
    device, handle, data = make_device(8 * MIB, sector), make_handle(intra_op_parallelism=2), pattern(MIB + 100)
    for offset in (0, 1, 4096, 7 * MIB - 100):
        handle.pwrite(data, device.path, True, False, offset)
        back = torch.zeros_like(data)
        handle.sync_pread(back, device.path, offset)
        assert torch.equal(back, data)
    with pytest.raises(EOFError, match=f"which has {8 * MIB} bytes"):
        handle.sync_pread(data, device.path, 7 * MIB - 99)
    with pytest.raises(OSError, match="No space left on device"):
        handle.sync_pwrite(data, device.path, 7 * MIB - 99)


@pytest.mark.parametrize("cache", ["auto", "direct", "buffered"])
def test_a_file_system_in_memory(make_handle: HandleFactory, tmp_path: Path, cache: str) -> None:
    shared = Path("/dev/shm")
    if not os.access(shared, os.W_OK):
        pytest.skip("/dev/shm is not writable")
    path = shared / f"nvme_ops_test_{os.getpid()}"
    handle, data = make_handle(cache=cache, intra_op_parallelism=2), pattern(3 * MIB + 7)
    try:
        for skew in (0, 1):
            handle.pwrite(data, path, True, False)
            back = torch.zeros(len(data) + skew, dtype=torch.uint8)[skew:]
            handle.pread(back, path, True, False)
            assert torch.equal(back, data)
    finally:
        path.unlink(missing_ok=True)


def test_a_pseudo_file_of_no_size(handle: aio_handle) -> None:
    with pytest.raises(EOFError, match="which has 0 bytes: '/proc/self/status'"):
        handle.sync_pread(torch.zeros(4), "/proc/self/status")


def test_a_file_larger_than_the_file_system_allows(handle: aio_handle, folder: Path) -> None:
    path = store(folder / "file", pattern(10))
    with pytest.raises(OSError, match=r"File too large|No space left|Invalid argument"):
        handle.sync_pwrite(torch.zeros(2 * MIB, dtype=torch.uint8), path, (1 << 63) - 3 * MIB)
    with pytest.raises(OSError, match=r"File too large|No space left|Invalid argument"):
        handle.sync_pwrite(torch.zeros(1, dtype=torch.uint8), path, (1 << 63) - GIB)
    assert torch.equal(contents(path), pattern(10))


def test_room_that_was_not_enough_is_given_back(make_handle: HandleFactory, make_file_system: MakeFileSystem) -> None:
    """A file system may have found nearly all of it before there was no more."""
    place = make_file_system(48 * MIB)
    path, handle, refused = place / "file", make_handle(), 0
    for spare in range(0, 64 * KIB, 4 * KIB):
        path.write_bytes(b"1" * 5000)
        sync_file_system(place)
        free, before = os.statvfs(place).f_bfree * 4096, path.stat().st_blocks
        data = torch.zeros(free - spare, dtype=torch.uint8)
        try:
            handle.sync_pwrite(data, path, 5000)
        except OSError as error:
            assert error.errno == errno.ENOSPC  # noqa: PT017
            refused += 1
            assert path.stat().st_size == 5000
            assert path.stat().st_blocks <= before + 16  # of 512 bytes: ext4 keeps a block that named the others
            assert path.read_bytes() == b"1" * 5000
        path.unlink()
    if refused == 0:
        pytest.skip("this file system used every block that it had")
