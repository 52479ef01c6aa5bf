"""What the system refuses to give: file size, descriptors, threads, locked memory, address space."""

from __future__ import annotations

import contextlib
import errno
import gc
import os
import resource
import warnings
from pathlib import Path

import pytest
import torch

from nvme_ops import aio_handle
from nvme_ops._native import native
from tests.conftest import (
    MIB,
    HandleFactory,
    contents,
    give_up_root,
    in_child,
    limited,
    open_to_all,
    pattern,
    round_trip,
    store,
)


@pytest.mark.parametrize("cache", ["auto", "direct", "buffered"])
def test_file_size_limit(make_handle: HandleFactory, folder: Path, cache: str) -> None:
    handle, path = make_handle(cache=cache, intra_op_parallelism=2), folder / "file"
    with limited(resource.RLIMIT_FSIZE, 262_144):
        for size in (500_000, 3 * MIB):  # below and above what is preallocated
            for call in (handle.sync_pwrite, lambda *a: handle.submit_pwrite(*a).result()):
                with pytest.raises(OSError, match="File too large") as caught:
                    call(torch.zeros(size, dtype=torch.uint8), path)
                assert (caught.value.errno, caught.value.filename) == (errno.EFBIG, str(path))
        assert path.stat().st_size <= 262_144
        handle.async_pwrite(torch.zeros(size), path)
        with pytest.raises(OSError, match="File too large"):  # of the call before, which this one waits for
            handle.sync_pwrite(pattern(200_000), folder / "small")
        round_trip(handle, folder / "small", 200_000)


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
        if hasattr(caught.value, "__notes__"):
            assert len(caught.value.__notes__) == 7
        for i in range(0, 12, 3):
            assert torch.equal(contents(folder / str(i)), data)
        assert handle.wait() == 0
        assert handle.sync_pwrite(data, folder / "0") == 1


@pytest.mark.parametrize("lanes", [1, 3])
def test_more_files_than_descriptors(make_handle: HandleFactory, folder: Path, lanes: int) -> None:
    """A lane that finds none left waits for its own transfers, or a while for those of others."""
    handle = make_handle(intra_op_parallelism=lanes, cache="direct")
    data, back = pattern(500 * 1001).view(500, 1001), torch.zeros(500, 1001, dtype=torch.uint8)
    files = [folder / str(i) for i in range(500)]
    handle.submit_pwritev(data[:50], files[:50]).result()
    gc.collect()  # what earlier tests have left open must not be closed in between
    before = len(os.listdir("/proc/self/fd"))
    with limited(resource.RLIMIT_NOFILE, before + 20):
        assert handle.submit_pwritev(data, files).result() == data.nbytes
        assert handle.submit_preadv(back, files).result() == data.nbytes
        assert torch.equal(back, data)
        for path, row in zip(files, back.zero_(), strict=True):
            handle.async_pread(row, path)
        assert handle.wait() == 500
        assert torch.equal(back, data)
        assert len(os.listdir("/proc/self/fd")) == before


def test_no_threads_left(make_handle: HandleFactory, folder: Path) -> None:
    """Fewer lanes, down to the caller's own thread, are slower and no failure."""
    path, data = store(folder / "file", pattern(3 * MIB)), pattern(3 * MIB)
    open_to_all(folder)
    path.chmod(0o666)

    def starved() -> None:
        give_up_root()
        hard = resource.getrlimit(resource.RLIMIT_NPROC)[1]
        handle, back = make_handle(intra_op_parallelism=2), torch.zeros_like(data)
        called: list[object] = []
        resource.setrlimit(resource.RLIMIT_NPROC, (0, hard))
        for call in (
            lambda: handle.submit_pread(back, path).result(),
            lambda: handle.sync_pread(back, path),
            lambda: handle.pread(back, path, True, False),
            lambda: handle.pread(back, path, True, True) or handle.wait(),
            lambda: handle.submit_preadv([back[:5], back[5:]], path, [0, 5]).result(),
        ):
            back.zero_()
            call()
            assert torch.equal(back, data)
        handle.submit_pread(torch.zeros(0), path).add_done_callback(called.append)
        assert len(called) == 1
        with pytest.raises(EOFError):
            handle.submit_pread(torch.zeros(MIB), path).result()
        assert handle.wait() == 0
        resource.setrlimit(resource.RLIMIT_NPROC, (hard, hard))
        round_trip(handle, path)
        resource.setrlimit(resource.RLIMIT_NPROC, (0, hard))
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
        hard = resource.getrlimit(resource.RLIMIT_AS)[1]
        native().trim_pool()
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        resource.setrlimit(resource.RLIMIT_AS, (pages * os.sysconf("SC_PAGE_SIZE"), hard))
        with pytest.raises(MemoryError, match="allocating 67108864 bytes"):
            handle.new_cpu_locked_tensor(64 * MIB, data)
        for call in (
            lambda: handle.sync_pread(back[1:], path),
            lambda: handle.submit_pread(back[1:], path).result(),
            lambda: handle.async_pread(back[1:], path) or handle.wait(),
        ):
            with contextlib.suppress(MemoryError):  # it may also do without
                call()
        resource.setrlimit(resource.RLIMIT_AS, (hard, hard))
        round_trip(handle, path)

    in_child(cramped)
