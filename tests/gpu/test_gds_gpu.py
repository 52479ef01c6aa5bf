"""gds_handle on a real GPU: which way it takes, what it says of it, and how NVME_OPS_GDS limits it.

The contract that it shares with aio_handle is in ../device. Where cuFile cannot work, the tests that need it
are skipped with gds_handle's own words, and those of ``NVME_OPS_GDS=off`` run.
"""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch

from nvme_ops import gds_handle
from tests.conftest import MIB, contents, pattern, store, takes_direct_io
from tests.gpu.fixtures import cufile, gds, way
from tests.gpu.support import ODD, TELLING, empty, gpu, on_a_gpu, run_limited, run_well

pytestmark = on_a_gpu

PAGE = 4096
WAYS = {"gds", "compat", "bounce"}


# Which way, and what is said of it


def test_each_transfer_has_a_way_and_a_reason(cufile: None, folder: Path) -> None:
    handle, path = gds_handle(), store(folder / "file", pattern(ODD))
    for number in range(1, 5):
        handle.read(empty(ODD), path)
        statistics = handle.path_statistics()
        assert statistics["last"] in WAYS
        assert statistics["last"] == handle.last_path
        assert statistics["why"]
        assert sum(use["transfers"] for use in statistics["uses"].values()) == number
        assert sum(use["bytes"] for use in statistics["uses"].values()) == number * ODD


@pytest.mark.parametrize("write", [True, False], ids=["write", "read"])
def test_large_transfers_take_cufile_where_it_takes_the_file(way: str, folder: Path, write: bool) -> None:
    """Always where it reaches the GPU directly; otherwise both ways are tried, one after the other."""
    handle, path, there = gds_handle(), store(folder / "file", pattern(ODD)), empty(ODD)
    ways = []
    for _ in range(2):
        (handle.write if write else handle.read)(there, path)
        ways.append(handle.last_path)
    assert ways == (["gds", "gds"] if way == "gds" else ["bounce", "compat"])


def test_a_file_in_memory_has_its_reason_too(cufile: None) -> None:
    """tmpfs: without O_DIRECT in older kernels, unknown to cuFile in newer ones."""
    place = Path("/dev/shm")
    if not place.is_dir():
        pytest.skip("there is no /dev/shm")
    handle, path = gds_handle(), place / f"nvme_ops-test-{threading.get_native_id()}"
    try:
        for seed in range(3):
            data, back = pattern(ODD, seed), empty(ODD)
            handle.write(data.to(gpu()), path)
            handle.read(back, path)
            assert torch.equal(back.cpu(), data)
        if not takes_direct_io(place):
            assert handle.last_path == "bounce"
            assert "no direct I/O" in handle.path_statistics()["why"]
        assert handle.path_statistics()["why"]
    finally:
        path.unlink(missing_ok=True)


REQUIRE = """
import sys, torch, nvme_ops
handle = nvme_ops.gds_handle()
handle.write(torch.ones(1 << 24, dtype=torch.uint8, device="cuda"), sys.argv[1])
print(handle.last_path)
"""


def test_require_takes_gpudirect_storage_or_says_why_not(cufile: None, folder: Path) -> None:
    done = run_limited(REQUIRE, folder / "file", NVME_OPS_GDS="require")
    if done.returncode == 0:
        assert done.stdout.strip() == "gds"
        assert contents(folder / "file").eq(1).all()
    else:
        assert "RuntimeError: NVME_OPS_GDS=require, but " in done.stderr


def test_require_does_not_leave_gpudirect_storage_for_a_file_without_direct_io(way: str) -> None:
    place = Path("/dev/shm")
    if way != "gds":
        pytest.skip("there is no GPUDirect Storage here, which require would already say when the handle is made")
    if not place.is_dir() or takes_direct_io(place):
        pytest.skip("/dev/shm takes O_DIRECT, or is not there")
    path = place / f"nvme_ops-test-{threading.get_native_id()}"
    done = run_limited(REQUIRE, path, NVME_OPS_GDS="require")
    path.unlink(missing_ok=True)
    assert "RuntimeError: NVME_OPS_GDS=require, but the file system has no direct I/O" in done.stderr


# What is moved by cuFile


@pytest.mark.parametrize("offset", [0, 1, PAGE - 1, PAGE, 12345])
@pytest.mark.parametrize("more", [0, 1, PAGE - 1, PAGE, PAGE + 1])
@pytest.mark.parametrize("start", [1, 256, 4095])
def test_whole_pages_and_what_is_around_them(
    gds: gds_handle, way: str, folder: Path, offset: int, more: int, start: int
) -> None:
    """In the file, and in memory that is aligned or not."""
    size = TELLING + 2 * PAGE + more
    before, data = pattern(size + 20000, 1), pattern(size)
    path, whole = store(folder / "file", before), empty(size + start + 200)
    part = whole[start : start + size]
    part.copy_(data)
    gds.write(part, path, file_offset=offset)
    assert gds.last_path == way
    assert torch.equal(contents(path), torch.cat([before[:offset], data, before[offset + size :]]))
    whole.zero_()
    gds.read(part, path, file_offset=offset)
    assert gds.last_path == way
    there = whole.cpu()
    assert torch.equal(there[start:-200], data)
    assert there[:start].eq(0).all()
    assert there[-200:].eq(0).all()


@pytest.mark.parametrize("lanes", [1, 3, 8])
@pytest.mark.parametrize("block_size", [64 * 1024, MIB, 16 * MIB, 1234567])
def test_block_sizes_and_lanes(way: str, folder: Path, block_size: int, lanes: int) -> None:
    handle, path = gds_handle(block_size, intra_op_parallelism=lanes), folder / "file"
    for seed in range(2):  # where there is no GPUDirect Storage, the second round takes cuFile
        data, back = pattern(2 * ODD, seed), empty(2 * ODD)
        handle.sync_pwrite(data.to(gpu()), path)
        assert torch.equal(contents(path), data)
        handle.sync_pread(back, path)
        assert torch.equal(back.cpu(), data)
    assert way in handle.path_statistics()["uses"]


def test_expandable_segments(cufile: None, folder: Path) -> None:
    """Memory that the caching allocator maps piece by piece, which older cuFiles do not know: bounced if need be."""
    run_well(
        """
        import sys, torch, nvme_ops
        from tests.conftest import pattern
        handle = nvme_ops.gds_handle(intra_op_parallelism=2)
        for seed in range(3):
            data = pattern(100_000_005, seed)
            there = data.to("cuda")
            handle.sync_pwrite(there, sys.argv[1])
            back = torch.zeros_like(there)
            handle.sync_pread(back, sys.argv[1])
            assert torch.equal(back, there)
        """,
        folder / "file",
        PYTORCH_CUDA_ALLOC_CONF="expandable_segments:True",
        PYTORCH_ALLOC_CONF="expandable_segments:True",
    )
