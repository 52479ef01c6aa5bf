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
from tests.conftest import contents, pattern, store, takes_direct_io
from tests.device.kinds import Gpu, still_works
from tests.gpu.fixtures import cufile, way
from tests.gpu.support import GDS, ODD, code_of_refusal, empty, gpu, on_a_gpu, run_limited, run_well

pytestmark = on_a_gpu

TOO_MUCH_PINNED = 5016
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


def test_expandable_segments(cufile: None, folder: Path) -> None:
    """Memory mapped piece by piece, which older cuFiles do not know: bounced if need be, pinned or refused."""
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
            try:
                handle.pin_device_tensor(there)
            except OSError as error:
                assert error.errno > 5000, error
            handle.sync_pread(there.zero_(), sys.argv[1])
            assert torch.equal(back, there)
            handle.unpin_device_tensor(there)
        """,
        folder / "file",
        PYTORCH_CUDA_ALLOC_CONF="expandable_segments:True",
        PYTORCH_ALLOC_CONF="expandable_segments:True",
    )


# Memory that is pinned


def test_more_than_may_be_pinned(cufile: None, folder: Path) -> None:
    """cufile.json allows 32 GiB unless it says otherwise; in its compatibility mode cuFile may not look."""
    size = 33 << 30
    if torch.cuda.mem_get_info()[0] < size + (2 << 30):
        pytest.skip("needs 35 GiB of the GPU's memory")
    handle, tensor = gds_handle(), torch.empty(size, dtype=torch.uint8, device=gpu())
    code = code_of_refusal(handle.pin_device_tensor, tensor)
    assert code in (None, TOO_MUCH_PINNED)
    assert handle.is_pinned(tensor) is (code is None)
    assert handle.unpin_device_tensor(tensor) is (code is None)
    del tensor
    torch.cuda.empty_cache()
    still_works(Gpu(GDS, folder), handle, folder)


@pytest.mark.parametrize("mode", ["auto", "off"])
def test_the_interpreter_ends_with_pinned_memory(cufile: None, mode: str) -> None:
    run_well(
        """
        import torch, nvme_ops
        handle = nvme_ops.gds_handle()
        tensors = [handle.new_pinned_device_tensor(1 << 20, torch.empty(1, device="cuda")) for _ in range(3)]
        assert all(map(handle.is_pinned, tensors))
        """,
        NVME_OPS_GDS=mode,
    )
