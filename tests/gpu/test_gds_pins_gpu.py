"""Memory of a real GPU that is pinned for cuFile: its limit, its allocators and its end; the rest is in ../device."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from nvme_ops import gds_handle
from tests.device.kinds import Gpu, still_works
from tests.gpu.fixtures import cufile
from tests.gpu.support import GDS, code_of_refusal, gpu, on_a_gpu, run_well

pytestmark = on_a_gpu

TOO_MUCH_PINNED = 5016


@pytest.fixture(params=["auto", "off"])
def handle(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> gds_handle:
    """With cuFile and without: pins are kept either way."""
    if request.param == "auto":
        request.getfixturevalue("cufile")
    monkeypatch.setenv("NVME_OPS_GDS", request.param)
    return gds_handle(intra_op_parallelism=2)


def test_cpu_tensors_are_asked_about_as_ever(handle: gds_handle) -> None:
    locked = handle.new_cpu_locked_tensor(1000, torch.empty(0))
    assert handle.is_pinned(locked)
    assert handle.is_pinned(torch.empty(100).pin_memory())
    assert not handle.is_pinned(torch.empty(100))
    assert handle.free_cpu_locked_tensor(locked)


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


def test_expandable_segments_can_be_pinned_or_are_refused(cufile: None, folder: Path) -> None:
    run_well(
        """
        import sys, torch, nvme_ops
        from tests.conftest import pattern
        handle, there = nvme_ops.gds_handle(), pattern(100_000_005).to("cuda")
        try:
            handle.pin_device_tensor(there)
        except OSError as error:
            assert error.errno > 5000, error
        for _ in range(3):
            handle.sync_pwrite(there, sys.argv[1])
            back = torch.zeros_like(there)
            handle.sync_pread(back, sys.argv[1])
            assert torch.equal(back, there)
        handle.unpin_device_tensor(there)
        """,
        folder / "file",
        PYTORCH_CUDA_ALLOC_CONF="expandable_segments:True",
        PYTORCH_ALLOC_CONF="expandable_segments:True",
    )


def test_the_interpreter_ends_with_pinned_memory(handle: gds_handle) -> None:
    run_well(
        """
        import torch, nvme_ops
        handle = nvme_ops.gds_handle()
        tensors = [handle.new_pinned_device_tensor(1 << 20, torch.empty(1, device="cuda")) for _ in range(3)]
        """
    )
