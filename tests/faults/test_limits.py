"""What the system refuses to give: file size, descriptors, threads, locked memory, address space, a device's data."""

from __future__ import annotations

import contextlib
import errno
import gc
import os
import resource
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from nvme_ops import aio_handle
from nvme_ops.base.native import native
from tests.conftest import (
    KIB,
    MIB,
    HandleFactory,
    LoopDevice,
    contents,
    give_up_root,
    in_child,
    limited,
    open_to_all,
    pattern,
    round_trip,
    store,
    sync_file_system,
)


def test_the_rest_is_drained_and_every_failure_told(make_handle: HandleFactory, folder: Path) -> None:
    handle, data = make_handle(intra_op_parallelism=2), pattern(200_000)
    with limited(resource.RLIMIT_FSIZE, 262_144):
        for i in range(12):
            handle.async_pwrite(data, folder / str(i), 100_000 * (i % 3))
        with pytest.raises(OSError, match=f"File too large: '{folder}/1'") as caught:
            handle.wait()
        failures = caught.value.failures  # type: ignore[attr-defined]
        assert [Path(failure.filename).name for failure in failures] == ["1", "2", "4", "5", "7", "8", "10", "11"]
        assert failures[0] is caught.value
        assert len(getattr(caught.value, "__notes__", range(7))) == 7
        assert all(torch.equal(contents(folder / str(i)), data) for i in range(0, 12, 3))
        assert handle.wait() == 0


def test_more_files_than_descriptors(make_handle: HandleFactory, folder: Path) -> None:
    """A lane that finds none left waits for its own transfers, or a while for those of others."""
    handle = make_handle(intra_op_parallelism=3, cache="direct")
    data, back = pattern(200 * 1001).view(200, 1001), torch.zeros(200, 1001, dtype=torch.uint8)
    files = [folder / str(i) for i in range(200)]
    handle.submit_pwritev(data[:50], files[:50]).result()
    gc.collect()  # what earlier tests have left open must not be closed in between
    before = len(os.listdir("/proc/self/fd"))
    with limited(resource.RLIMIT_NOFILE, before + 20):
        assert handle.submit_pwritev(data, files).result() == data.nbytes
        assert handle.submit_preadv(back, files).result() == data.nbytes
        assert torch.equal(back, data)
        for path, row in zip(files, back.zero_(), strict=True):
            handle.async_pread(row, path)
        assert handle.wait() == 200
        assert torch.equal(back, data)
        assert len(os.listdir("/proc/self/fd")) == before


def test_no_threads_left(make_handle: HandleFactory, folder: Path) -> None:
    """Fewer lanes, down to the caller's own thread, are slower and no failure."""
    path, data = store(folder / "file", pattern(3 * MIB)), pattern(3 * MIB)
    open_to_all(folder)
    path.chmod(0o666)

    def starved() -> None:
        give_up_root()
        handle, called = make_handle(intra_op_parallelism=2), list[object]()
        with limited(resource.RLIMIT_NPROC, 0):
            back = torch.zeros_like(data)
            assert handle.submit_preadv([back[:5], back[5:]], path, [0, 5]).result() == len(data)
            assert torch.equal(back, data)
            handle.pread(back.zero_(), path, True, True)
            assert handle.wait() == 1
            assert torch.equal(back, data)
            handle.sync_pread(back.zero_(), path)
            assert torch.equal(back, data)
            handle.submit_pread(torch.zeros(0), path).add_done_callback(called.append)
            assert len(called) == 1
            with pytest.raises(EOFError):
                handle.submit_pread(torch.zeros(2 * MIB), path).result()
        round_trip(handle, path)
        with limited(resource.RLIMIT_NPROC, 0):
            round_trip(handle, path)  # what threads there are serve all

    in_child(starved)


def test_no_locked_memory(make_handle: HandleFactory, folder: Path) -> None:
    """Without RLIMIT_MEMLOCK and CAP_IPC_LOCK nothing is registered and nothing locked; everything works."""
    open_to_all(folder)

    def poor() -> None:
        resource.setrlimit(resource.RLIMIT_MEMLOCK, (0, 0))
        give_up_root()
        round_trip(aio_handle(backend="auto", intra_op_parallelism=2), folder / "file")
        with contextlib.suppress(MemoryError):  # an io_uring asked for by name, whose rings need some
            round_trip(make_handle(intra_op_parallelism=2, cache="direct"), folder / "file")
        handle = aio_handle(backend="auto")
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            locked = handle.new_cpu_locked_tensor(MIB, torch.empty(0))
        assert [warning.category for warning in caught] == [RuntimeWarning]
        assert "ulimit -l unlimited" in str(caught[0].message)
        assert caught[0].filename == __file__
        locked.fill_(3)
        assert handle.is_pinned(locked)
        handle.sync_pwrite(locked, folder / "file")
        assert handle.free_cpu_locked_tensor(locked)

    in_child(poor)


def test_address_space_used_up(make_handle: HandleFactory, folder: Path) -> None:
    path, data = store(folder / "file", pattern(3 * MIB)), pattern(3 * MIB)
    back = torch.zeros_like(data)

    def cramped() -> None:
        handle = make_handle(cache="direct")
        handle.sync_pread(back, path)  # threads and rings are there
        native().trim_pool()
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        with limited(resource.RLIMIT_AS, pages * os.sysconf("SC_PAGE_SIZE")):
            with pytest.raises(MemoryError, match="allocating 67108864 bytes"):
                handle.new_cpu_locked_tensor(64 * MIB, data)
            for call in (handle.sync_pread, lambda *given: handle.submit_pread(*given).result()):
                with contextlib.suppress(MemoryError):  # it may also do without
                    call(back[1:], path)
        round_trip(handle, path)

    in_child(cramped)


# Devices


def test_a_device_that_fails(make_handle: HandleFactory, make_device: Callable[..., LoopDevice]) -> None:
    """The file behind a loop device is cut: the kernel answers EIO from there on."""
    device = make_device(16 * MIB)
    handle = make_handle(block_size=65536, queue_depth=4, intra_op_parallelism=3, cache="direct")
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


def test_a_device_itself(make_handle: HandleFactory, make_device: Callable[..., LoopDevice]) -> None:
    device, handle, data = make_device(8 * MIB, 4096), make_handle(intra_op_parallelism=2), pattern(MIB + 100)
    for offset in (0, 1, 4096, 7 * MIB - 100):
        handle.pwrite(data, device.path, True, False, offset)
        back = torch.zeros_like(data)
        handle.sync_pread(back, device.path, offset)
        assert torch.equal(back, data)
    with pytest.raises(EOFError, match=f"which has {8 * MIB} bytes"):
        handle.sync_pread(data, device.path, 7 * MIB - 99)
    with pytest.raises(OSError, match="No space left on device"):
        handle.sync_pwrite(data, device.path, 7 * MIB - 99)


def test_sectors_of_4096_bytes(make_handle: HandleFactory, make_file_system: Callable[..., Path]) -> None:
    path, expected = make_file_system(16 * MIB, 4096) / "file", pattern(3 * MIB + 777, 1)
    handle = make_handle(block_size=65536, cache="direct", intra_op_parallelism=2)
    handle.sync_pwrite(expected, path)
    for size, offset, skew in [(1, 511, 0), (512, 512, 1), (4096, 4096, 0), (100_000, 4097, 3), (MIB, 512, 64)]:
        part = handle.new_cpu_locked_tensor(size + skew, expected)[skew:]
        part.copy_(pattern(size, size))
        handle.pwrite(part, path, True, False, offset)
        expected[offset : offset + size] = part
        handle.sync_pread(part.zero_(), path, offset)
        assert torch.equal(part, expected[offset : offset + size])
    assert torch.equal(contents(path), expected)


def test_room_that_was_not_enough_is_given_back(
    make_handle: HandleFactory, make_file_system: Callable[..., Path]
) -> None:
    """A file system may have found nearly all of it before there was no more."""
    place = make_file_system(48 * MIB)
    path, handle = place / "file", make_handle()
    path.write_bytes(b"1" * 5000)
    sync_file_system(place)
    free, before = os.statvfs(place).f_bfree * 4096, path.stat().st_blocks
    with pytest.raises(OSError, match="No space left") as caught:
        handle.sync_pwrite(torch.zeros(free + 4 * KIB, dtype=torch.uint8), path, 5000)
    assert caught.value.filename == str(path)
    assert path.read_bytes() == b"1" * 5000
    assert path.stat().st_blocks <= before + 16  # of 512 bytes: ext4 keeps a block that named the others
