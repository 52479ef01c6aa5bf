"""Memory of a real GPU that is pinned for cuFile: what counts as pinned, and that no order of calls does harm."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from conftest import MIB, contents, pattern, store
from gpu.fixtures import cufile
from gpu.support import ODD, code_of_refusal, empty, gpu, on_a_gpu, run_well, still_works

from nvme_ops import gds_handle

pytestmark = on_a_gpu

PAGE = 4096
TOO_MUCH_PINNED = 5016


@pytest.fixture(params=["auto", "off"])
def handle(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> gds_handle:
    """With cuFile and without: pins are kept either way."""
    if request.param == "auto":
        request.getfixturevalue("cufile")
    monkeypatch.setenv("NVME_OPS_GDS", request.param)
    return gds_handle(intra_op_parallelism=2)


def move_both_ways(handle: gds_handle, tensor: torch.Tensor, folder: Path) -> None:
    """Several times, so that every way has its turn."""
    path = folder / "file"
    for seed in range(3):
        data = pattern(tensor.nbytes, seed)
        tensor.view(-1).view(torch.uint8).copy_(data)
        handle.sync_pwrite(tensor, path)
        assert torch.equal(contents(path), data)
        tensor.zero_()
        handle.sync_pread(tensor, path)
        assert torch.equal(tensor.cpu().view(-1).view(torch.uint8), data)


@pytest.mark.parametrize("count", [1, 1000, 6 * MIB + 1])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.float32, torch.complex128], ids=str)
def test_a_new_tensor(handle: gds_handle, folder: Path, dtype: torch.dtype, count: int) -> None:
    tensor = handle.new_pinned_device_tensor(count, torch.empty(3, 3, dtype=dtype, device=gpu()))
    assert (tensor.shape, tensor.dtype, tensor.device) == ((count,), dtype, gpu())
    assert tensor.data_ptr() % PAGE == 0
    assert handle.is_pinned(tensor)
    move_both_ways(handle, tensor, folder)
    assert handle.free_pinned_device_tensor(tensor) is True
    assert not handle.is_pinned(tensor)
    assert handle.free_pinned_device_tensor(tensor) is False
    move_both_ways(handle, tensor, folder)  # it is an ordinary tensor from then on


def test_a_tensor_of_ones_own(handle: gds_handle, folder: Path) -> None:
    tensor = empty(ODD)
    assert not handle.is_pinned(tensor)
    assert handle.pin_device_tensor(tensor) is True
    assert handle.is_pinned(tensor)
    move_both_ways(handle, tensor, folder)
    assert handle.unpin_device_tensor(tensor) is True
    assert not handle.is_pinned(tensor)


def test_pinning_twice_counts_once(handle: gds_handle) -> None:
    tensor = empty(ODD)
    assert handle.pin_device_tensor(tensor) is True
    assert handle.pin_device_tensor(tensor) is True
    assert handle.unpin_device_tensor(tensor) is True
    assert handle.unpin_device_tensor(tensor) is False
    assert not handle.is_pinned(tensor)


def test_a_view_is_pinned_with_its_tensor(handle: gds_handle, folder: Path) -> None:
    tensor = handle.new_pinned_device_tensor(2 * ODD, empty(1))
    for view in (tensor[:100], tensor[77 : 77 + ODD], tensor.view(2, ODD)[1]):
        assert handle.is_pinned(view)
        assert handle.pin_device_tensor(view) is True
        assert handle.unpin_device_tensor(view) is False
        assert handle.is_pinned(tensor)
    move_both_ways(handle, tensor[77 : 77 + ODD], folder)
    assert handle.free_pinned_device_tensor(tensor)


def test_a_tensor_beyond_a_pinned_view_is_not_pinned(handle: gds_handle) -> None:
    whole = empty(2 * ODD)
    handle.pin_device_tensor(whole[:ODD])
    assert handle.is_pinned(whole[:ODD])
    assert not handle.is_pinned(whole)
    assert not handle.is_pinned(whole[ODD - 1 : ODD + 1])
    assert handle.unpin_device_tensor(whole) is False
    assert handle.unpin_device_tensor(whole[:ODD]) is True


@pytest.mark.parametrize("start", [0, PAGE])
def test_a_tensor_around_a_pinned_view(handle: gds_handle, folder: Path, start: int) -> None:
    """Pinned, or refused with cuFile's code; what is said of it afterwards is true."""
    whole = empty(2 * ODD)
    view = whole[start : start + ODD]
    handle.pin_device_tensor(view)
    code = code_of_refusal(handle.pin_device_tensor, whole)
    assert code is None or code > 5000
    pinned = code is None
    assert handle.is_pinned(whole) is pinned
    assert handle.is_pinned(view)
    move_both_ways(handle, whole, folder)
    assert handle.unpin_device_tensor(whole) is pinned
    assert handle.unpin_device_tensor(view) is True
    assert not handle.is_pinned(view)


def test_a_stranger_is_not_unpinned(handle: gds_handle, folder: Path) -> None:
    tensor = empty(ODD)
    assert handle.unpin_device_tensor(tensor) is False
    assert handle.free_pinned_device_tensor(tensor) is False
    still_works(handle, folder)


def test_pins_belong_to_all_handles(handle: gds_handle, folder: Path) -> None:
    tensor, other = handle.new_pinned_device_tensor(ODD, empty(1)), gds_handle()
    assert other.is_pinned(tensor)
    move_both_ways(other, tensor, folder)
    assert other.free_pinned_device_tensor(tensor)
    assert not handle.is_pinned(tensor)


def test_what_cannot_be_pinned_is_named(handle: gds_handle) -> None:
    with pytest.raises(TypeError, match=r"must be a torch\.Tensor, not list"):
        handle.pin_device_tensor([1, 2, 3])  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="must be a tensor on an accelerator, not on the CPU"):
        handle.pin_device_tensor(torch.zeros(10))
    with pytest.raises(ValueError, match="must be contiguous"):
        handle.pin_device_tensor(empty(100).view(10, 10).t())
    with pytest.raises(ValueError, match="no elements"):
        handle.pin_device_tensor(empty(0))
    with pytest.raises(ValueError, match="num_elem must be at least 1"):
        handle.new_pinned_device_tensor(0, empty(1))
    with pytest.raises(ValueError, match="example_tensor must be on an accelerator"):
        handle.new_pinned_device_tensor(10, torch.zeros(1))


def test_cpu_tensors_are_asked_about_as_ever(handle: gds_handle) -> None:
    locked = handle.new_cpu_locked_tensor(1000, torch.empty(0))
    assert handle.is_pinned(locked)
    assert handle.is_pinned(torch.empty(100).pin_memory())
    assert not handle.is_pinned(torch.empty(100))
    assert handle.free_cpu_locked_tensor(locked)


def test_pinned_memory_outlives_its_tensor(handle: gds_handle) -> None:
    tensor = handle.new_pinned_device_tensor(ODD, empty(1))
    held = torch.cuda.memory_allocated()
    view = tensor[:]
    del tensor
    assert torch.cuda.memory_allocated() == held
    assert handle.free_pinned_device_tensor(view)
    del view
    assert torch.cuda.memory_allocated() < held


@pytest.mark.parametrize("write", [True, False], ids=["write", "read"])
def test_a_tensor_freed_while_transfers_use_it(handle: gds_handle, folder: Path, write: bool) -> None:
    """Unpinned and dropped at once: the transfers end as if it had been kept; until then nobody gets its memory."""
    futures = []
    for number in range(8):
        path = store(folder / f"file{number}", pattern(ODD, 100 + number))
        tensor = handle.new_pinned_device_tensor(ODD, empty(1))
        tensor.copy_(pattern(ODD, number))
        futures.append((handle.submit_pwrite if write else handle.submit_pread)(tensor, path))
        assert handle.free_pinned_device_tensor(tensor)
        if write:
            del tensor
            torch.full((ODD,), 255, dtype=torch.uint8, device=gpu())
        else:
            futures[-1].result()
            assert torch.equal(tensor.cpu(), pattern(ODD, 100 + number))
    for number, future in enumerate(futures):
        assert future.result() == ODD
        if write:
            assert torch.equal(contents(folder / f"file{number}"), pattern(ODD, number))
    still_works(handle, folder)


def test_pinned_memory_on_another_device(handle: gds_handle, folder: Path) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("there is one GPU only")
    here, there = (handle.new_pinned_device_tensor(ODD, empty(1, index)) for index in (0, 1))
    ordinary = empty(ODD, 1)
    assert [tensor.device.index for tensor in (here, there)] == [0, 1]
    assert handle.is_pinned(there)
    assert not handle.is_pinned(ordinary)
    for current in (0, 1):
        with torch.cuda.device(current):
            for tensor in (here, there, ordinary):
                move_both_ways(handle, tensor, folder)
            assert torch.cuda.current_device() == current
    for tensor in (here, there):
        assert handle.free_pinned_device_tensor(tensor)


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
    still_works(handle, folder)


def test_expandable_segments_can_be_pinned_or_are_refused(cufile: None, folder: Path) -> None:
    run_well(
        """
        import sys, torch, nvme_ops
        from conftest import pattern
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
